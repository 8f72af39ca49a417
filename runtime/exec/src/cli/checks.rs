//! Rules of the command line that clap does not enforce.

use super::{Cli, Command, VerifyArgs};
use clap::CommandFactory;
use clap::error::ErrorKind;

/// Returns the command line unless it breaks a rule that clap does not enforce. An example: `--against` requires `--kl`, but clap ignores this
/// requirement if an argument is given that conflicts with `--kl`, such as a prompt.
///
/// # Errors
/// Which option lacks another, with what to add.
pub fn checked(cli: Cli) -> Result<Cli, clap::Error> {
    match cli.command.as_ref().and_then(missing) {
        Some(why) => Err(of_verify(why)),
        None => Ok(cli),
    }
}

/// What an option of `verify` lacks.
fn missing(command: &Command) -> Option<String> {
    let Command::Verify(VerifyArgs { kl: None, against, report, .. }) = command else { return None };
    let (option, does) = match (against, report) {
        (Some(_), _) => ("--against", "names what --kl compares with"),
        (None, Some(_)) => ("--report", "draws what --kl measures"),
        (None, None) => return None,
    };
    Some(format!("{option} needs --kl: it {does}; add --kl PROMPTS.jsonl in place of a prompt, or leave {option} out"))
}

/// An error with the usage of `verify`.
fn of_verify(why: String) -> clap::Error {
    let mut command = Cli::command();
    command.build();
    match command.find_subcommand_mut("verify") {
        Some(verify) => verify.error(ErrorKind::MissingRequiredArgument, why),
        None => command.error(ErrorKind::MissingRequiredArgument, why),
    }
}
