//! `hpp-split`: from a model to partitions and a plan.

mod amount;
mod cli;
mod complaint;
mod costs;
mod destination;
mod error;
mod explain;
mod files;
mod here;
mod inspect;
mod lifted;
mod operators;
mod output;
mod pieces;
mod place;
mod predict;
mod presets;
mod print;
mod progress;
mod reason;
mod records;
mod refine;
mod request;
mod run;
mod settings;
mod split;
mod suggest;
mod sweep;
mod table;
mod targets;
mod trace;

pub use cli::Cli;
pub use error::SplitError;
pub use suggest::subcommand as suggestion;

/// Does what the command line says.
pub fn run(cli: &Cli) -> Result<(), SplitError> {
    match &cli.command {
        Some(cli::Command::Inspect(args)) => inspect::run(args),
        None => split::run(&cli.split),
    }
}
