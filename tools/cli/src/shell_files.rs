//! Generates shell completions and man pages from a command's clap definition, for packages and `make install`. Each
//! command enables it with its feature `shell-files`.

use clap::{Arg, Command};
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
pub fn write(command: Command, share: &Path) -> io::Result<()> {
    let name = command.get_name().to_owned();
    let places = [
        (Shell::Bash, "bash-completion/completions", name.clone()),
        (Shell::Zsh, "zsh/site-functions", format!("_{name}")),
        (Shell::Fish, "fish/vendor_completions.d", Shell::Fish.file_name(&name)),
    ];
    for (shell, place, file) in places {
        let dir = share.join(place);
        fs::create_dir_all(&dir)?;
        fs::write(dir.join(file), completions(&command, shell))?;
    }
    let man = share.join("man/man1");
    fs::create_dir_all(&man)?;
    clap_mangen::generate_to(with_aliases_in_help(command), man)
}

/// The completions of `command` for `shell`.
fn completions(command: &Command, shell: Shell) -> String {
    let name = command.get_name();
    // Of a name with hyphens, clap_complete 4.6.11 writes bash functions that never complete the options of subcommands.
    let written = if shell == Shell::Bash { name.replace('-', "_") } else { name.to_owned() };
    // Generate in memory, because the generator panics on I/O errors.
    let mut text = Vec::new();
    generate(shell, &mut command.clone(), &written, &mut text);
    let text = String::from_utf8_lossy(&text);
    // The last word of bash's `complete` is the command that is completed.
    text.replace(&format!(" -o default {written}\n"), &format!(" -o default {name}\n"))
}

/// Adds the other names of options to their help, where `--help` has them: clap_mangen leaves them out.
fn with_aliases_in_help(command: Command) -> Command {
    let with_aliases = |arg: Arg| {
        let long = arg.get_visible_aliases().unwrap_or_default().into_iter().map(|name| format!("--{name}"));
        let short = arg.get_visible_short_aliases().unwrap_or_default().into_iter().map(|name| format!("-{name}"));
        let names: Vec<String> = long.chain(short).collect();
        match arg.get_long_help().or(arg.get_help()) {
            Some(help) if !names.is_empty() => {
                let help = format!("{help} [aliases: {}]", names.join(", "));
                arg.long_help(help)
            }
            _ => arg,
        }
    };
    command.mut_args(with_aliases).mut_subcommands(with_aliases_in_help)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shell_and_man_get_what_they_look_for() {
        let dir = tempfile::tempdir().unwrap();
        let hidden = Command::new("probe").hide(true);
        let bench = Command::new("bench").arg(Arg::new("runs").long("runs"));
        let seed = Arg::new("seed").long("seed").short('s').env("HPP_SEED").visible_alias("start").help("Starts");
        let command = Command::new("hpp-x").about("Does x").arg(seed);
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
        let man = read("man/man1/hpp-x.1");
        assert!(man.contains("HPP_SEED") && man.contains("[aliases: \\-\\-start]"), "{man}");
        assert!(!dir.path().join("man/man1/hpp-x-probe.1").exists(), "hidden commands have no man page");
    }
    /// What bash offers for the last word of a command line.
    #[cfg(unix)]
    #[test]
    fn bash_completes_the_options_of_subcommands() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("hpp-x");
        let bench = Command::new("bench").arg(Arg::new("runs").long("runs"));
        let command = Command::new("hpp-x").arg(Arg::new("seed").long("seed")).subcommand(bench);
        fs::write(&file, completions(&command, Shell::Bash)).unwrap();
        let offered = |words: &str| {
            let script = format!(
                "source {}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); function=$(complete -p hpp-x); \
                 function=${{function#*-F }}; ${{function%% *}} hpp-x \"${{COMP_WORDS[COMP_CWORD]}}\" \
                 \"${{COMP_WORDS[COMP_CWORD - 1]}}\"; echo \"${{COMPREPLY[@]}}\"",
                file.display()
            );
            let output = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
            assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap().trim().to_owned()
        };
        assert_eq!(offered("hpp-x --se"), "--seed");
        assert_eq!(offered("hpp-x bench --r"), "--runs");
    }
}
