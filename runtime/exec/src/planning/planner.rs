//! Runs hpp-split as a child process.

use super::error::PlanningError;
use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::interrupt::Interrupt;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;

/// How lines of hpp-split begin that are not shown, with the indented lines after them: they are for users who run hpp-split themselves.
const OMITTED_LINES: [&str; 2] = ["wrote ", "run it: "];

/// How lines of hpp-split begin that describe the plan. They hold for every run of the plan.
const REMARKS: [&str; 2] = ["note: ", "warning: "];
/// How lines among these begin that hold only during planning: what is planned for, and files that could not be removed.
const ONCE: [&str; 2] = ["note: planning ", "warning: cannot "];

/// The hpp-split command.
pub(super) struct SplitCommand {
    path: PathBuf,
}

impl SplitCommand {
    /// Finds hpp-split beside this executable, else on PATH.
    pub fn find(model: &Path) -> Result<Self, PlanningError> {
        let name = format!("hpp-split{}", std::env::consts::EXE_SUFFIX);
        let this = std::env::current_exe().ok();
        let beside = this.iter().filter_map(|this| this.parent()).map(Path::to_owned);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = beside.chain(std::env::split_paths(&path)).map(|dir| dir.join(&name)).find(|path| path.is_file());
        found.map(|path| Self { path }).ok_or_else(|| PlanningError::NoPlanner { model: model.to_owned() })
    }

    /// The executable.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Plans `model` into the directory `dir` and prints hpp-split's stderr. The child inherits `lock`, so that the directory stays locked even if
    /// the child outlives this process. A signal ends the child, and this fails with [`PlanningError::Interrupted`]. Returns hpp-split's notes
    /// and warnings about the plan.
    pub fn plan(
        &self,
        model: &Path,
        flags: &[OsString],
        dir: &Path,
        lock: File,
        console: &Console,
        interrupt: &Interrupt,
    ) -> Result<Vec<String>, PlanningError> {
        let failed = |source| PlanningError::Planner { path: self.path.clone(), source };
        let mut command = Command::new(&self.path);
        command.arg(model).arg("--out").arg(dir).arg("--force").args(flags);
        command.stdin(Stdio::from(lock)).stdout(Stdio::piped()).stderr(Stdio::piped());
        // A signal must end hpp-split before this process.
        interrupt.request_stop_on_signal();
        let mut child = command.spawn().map_err(failed)?;
        let terminate = terminator(&child);
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (end, ended) = channel::<()>();
        let (table, held_back, remarks) = std::thread::scope(|scope| {
            scope.spawn(move || {
                if interrupt.wait(&ended) {
                    terminate();
                }
            });
            let table = scope.spawn(move || {
                let mut text = String::new();
                // Output that is not UTF-8 is not shown.
                let _ = stdout.map(|mut stdout| stdout.read_to_string(&mut text));
                text
            });
            let (mut held_back, mut remarks) = (Vec::new(), Vec::new());
            let mut is_omitted = false;
            for line in stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).lines()).map_while(Result::ok) {
                is_omitted =
                    OMITTED_LINES.iter().any(|start| line.starts_with(start)) || is_omitted && line.starts_with("  ");
                if is_omitted {
                    continue;
                }
                console.info(&line);
                if is_remark(&line) {
                    remarks.push(line.clone());
                }
                if console.is_quiet() {
                    held_back.push(line);
                }
            }
            drop(end);
            (table.join().unwrap_or_default(), held_back, remarks)
        });
        let status = child.wait().map_err(failed);
        interrupt.exit_on_signal();
        if interrupt.is_requested() {
            console.info("planning was interrupted");
            return Err(PlanningError::Interrupted { code: interrupt.exit_code() });
        }
        let status = status?;
        if status.success() {
            table.lines().for_each(|line| tracing::info!("{line}"));
            return Ok(remarks);
        }
        held_back.iter().for_each(|line| console.line(line));
        Err(PlanningError::NotPlanned { code: status.code().and_then(|code| u8::try_from(code).ok()) })
    }
}

/// Asks a process to end. Its number stays its own until its end has been waited for.
#[cfg(unix)]
fn terminator(child: &Child) -> impl FnOnce() + Send + use<> {
    let process = rustix::process::Pid::from_child(child);
    move || {
        // If this fails, the process has ended.
        let _ = rustix::process::kill_process(process, rustix::process::Signal::TERM);
    }
}

/// Does nothing: a terminal sends Ctrl-C to both processes.
#[cfg(not(unix))]
fn terminator(_: &Child) -> impl FnOnce() + Send + use<> {
    || ()
}

/// Whether a line of hpp-split describes the plan, and so holds for every run of it.
fn is_remark(line: &str) -> bool {
    let is_for_once = ONCE.iter().any(|start| line.starts_with(start));
    REMARKS.iter().any(|start| line.starts_with(start)) && !is_for_once
}

/// The options passed to hpp-split.
pub(super) fn flags(args: &RuntimeArgs) -> Vec<OsString> {
    let context = args.context.map(|tokens| tokens.to_string());
    let planning = &args.planning;
    let bits = planning.draft_bits.map(|bits| bits.name().to_owned());
    let given = [
        ("--ram", &planning.ram),
        ("--vram", &planning.vram),
        ("--gpu-layers", &planning.gpu_layers),
        ("--context", &context),
        ("--draft", &bits),
    ];
    let flags = given.into_iter().filter_map(|(flag, value)| Some([flag.into(), value.clone()?.into()]));
    let int8_activations: Option<OsString> = planning.int8_activations.then(|| "--int8-activations".into());
    flags.flatten().chain(int8_activations).chain(["--in-place".into()]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::AutoPlanArgs;

    #[test]
    fn remarks_are_notes_and_warnings_about_the_plan() {
        assert!(is_remark("note: --kv has no effect: the model keeps no states") && is_remark("warning: w"));
        let others = [
            "wrote plan",
            "note: planning for 64 tokens of context, of 128 that the model allows",
            "warning: cannot remove a: delete it yourself",
        ];
        assert!(!others.into_iter().any(is_remark));
    }

    #[cfg(unix)]
    #[test]
    fn a_signal_ends_hpp_split_too() {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("hpp-split");
        std::fs::write(&path, "#!/bin/sh\necho $$ > \"$1\"\nexec sleep 60\n").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        let (planner, interrupt, number) = (SplitCommand { path }, Interrupt::never(), dir.path().join("number"));
        let begun = std::time::Instant::now();
        let planned = std::thread::scope(|scope| {
            scope.spawn(|| {
                while !std::fs::read_to_string(&number).is_ok_and(|number| number.ends_with('\n')) {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                interrupt.request();
            });
            let lock = File::create(dir.path().join("lock")).unwrap();
            planner.plan(&number, &[], dir.path(), lock, &Console::new(crate::console::Level::Quiet), &interrupt)
        });
        assert!(matches!(planned, Err(PlanningError::Interrupted { code: 130 })), "{planned:?}");
        assert!(begun.elapsed() < std::time::Duration::from_secs(30), "hpp-split continued");
    }

    #[test]
    fn options_are_passed_on_as_they_were_given() {
        let of = |planning| flags(&RuntimeArgs { planning, ..RuntimeArgs::default() });
        assert_eq!(of(AutoPlanArgs::default()), ["--in-place"]);
        let ram = Some("1G".to_owned());
        let given = AutoPlanArgs { ram, int8_activations: true, replan: true, ..AutoPlanArgs::default() };
        assert_eq!(of(given), ["--ram", "1G", "--int8-activations", "--in-place"]);
    }
}
