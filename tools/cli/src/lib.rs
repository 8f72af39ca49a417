//! What the command lines of all commands share: advice on invalid arguments, and with the feature `shell-files` completions and
//! man pages.

mod advice;
#[cfg(feature = "shell-files")]
pub mod shell_files;

pub use advice::{Advice, Habit, OPTIONS_OF};
