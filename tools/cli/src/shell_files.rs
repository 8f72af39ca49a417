//! Generates shell completions and man pages from a command's clap definition, for packages and `make install`. Each
//! command enables it with its feature `shell-files`.

use clap::Command;
use clap_complete::{Generator, Shell, generate};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The first argument that requests the files. The second is a directory such as /usr/local/share.
pub const ASKED: &str = "write-shell-files";

/// Writes the files of `command` if the arguments of this process request it, and returns the exit code. `None`
/// otherwise.
pub fn written(command: Command) -> Option<ExitCode> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next()? != ASKED {
        return None;
    }
    let Some(share) = arguments.next().map(PathBuf::from) else {
        eprintln!("error: {ASKED} needs a directory, such as /usr/local/share");
        return Some(ExitCode::from(2));
    };
    match write(command, &share) {
        Ok(()) => Some(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("error: cannot write completions and man pages to {}: {error}", share.display());
            Some(ExitCode::FAILURE)
        }
    }
}

/// Writes completions for bash, zsh and fish, and man pages, to the standard directories below `share`.
pub fn write(mut command: Command, share: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    let places = [
        (Shell::Bash, "bash-completion/completions", name.clone()),
        (Shell::Zsh, "zsh/site-functions", format!("_{name}")),
        (Shell::Fish, "fish/vendor_completions.d", Shell::Fish.file_name(&name)),
    ];
    for (shell, place, file) in places {
        let dir = share.join(place);
        fs::create_dir_all(&dir)?;
        // Generate in memory first, because the generator panics on I/O errors.
        let mut text = Vec::new();
        generate(shell, &mut command, name.clone(), &mut text);
        fs::write(dir.join(file), text)?;
    }
    let man = share.join("man/man1");
    fs::create_dir_all(&man)?;
    clap_mangen::generate_to(command, man)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;

    #[test]
    fn every_shell_and_man_get_what_they_look_for() {
        let dir = tempfile::tempdir().unwrap();
        let hidden = Command::new("probe").hide(true);
        let bench = Command::new("bench").arg(Arg::new("runs").long("runs"));
        let command = Command::new("hpp-x").about("Does x").arg(Arg::new("seed").long("seed").short('s'));
        write(command.subcommand(bench).subcommand(hidden), dir.path()).unwrap();
        let read = |file: &str| fs::read_to_string(dir.path().join(file)).unwrap();
        for file in [
            "bash-completion/completions/hpp-x",
            "zsh/site-functions/_hpp-x",
            "fish/vendor_completions.d/hpp-x.fish",
            "man/man1/hpp-x.1",
        ] {
            assert!(read(file).contains("seed"), "{file}");
        }
        assert!(read("man/man1/hpp-x-bench.1").contains("runs"));
        assert!(!dir.path().join("man/man1/hpp-x-probe.1").exists(), "hidden commands have no man page");
    }
}
