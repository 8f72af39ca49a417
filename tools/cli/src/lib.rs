//! What the command lines of all commands share: advice on invalid arguments, spellings of other programs, and with the feature `shell-files` completions and
//! man pages.

mod advice;
mod file_size_limit;
#[cfg(feature = "shell-files")]
pub mod shell_files;
mod spellings;
mod values;

pub use advice::{Advice, Habit, OPTIONS_OF, SUBCOMMANDS_OF, nearest};
pub use file_size_limit::report_file_size_limit;
pub use spellings::normalize_spellings;
pub use values::tokens;
