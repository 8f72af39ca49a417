//! Measuring a model on a machine: what blocks cost, what the machine can do, what a corpus shows, and a report of it.

mod begin;
pub mod child;
mod cli;
pub mod corpus;
mod derive;
mod doubt;
mod effort;
mod error;
mod estimate;
pub mod fit;
pub mod hotness;
mod interrupt;
mod jobs;
mod measure;
mod page;
mod pieces;
mod progress;
mod rates;
pub mod report;
mod run;
#[cfg(test)]
mod sample;
pub mod sensitivity;
mod settings;
mod skeleton;
mod store;
mod table;
pub mod taps;
mod targets;

pub use cli::Cli;
pub use error::ProfileError;
pub use run::run;
