//! `hpp-exec`: obeys a plan and turns the result into text, files and reports.
//!
//! This crate knows the terminal, tokenizers, chat templates and sampling. It knows no graph and no session: it drives
//! `hpp-engine` over `hpp-backend` and makes no choice that belongs in a plan.

pub mod atomic_file;
pub mod sampling;
pub mod tensors;
pub mod text;
