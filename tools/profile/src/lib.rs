//! Measures a model on this machine: the time of each block, the bandwidths of memory, links and disk, and statistics of a
//! corpus. Writes them as a profile and as an HTML report.

mod begin;
mod child;
mod cli;
pub mod corpus;
mod derive;
mod doubt;
mod effort;
mod error;
mod estimate;
mod fit;
mod hotness;
mod interrupt;
mod measure;
mod merge;
mod missing;
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
