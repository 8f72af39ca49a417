//! hpp-split as a child process.

use crate::cli::RuntimeArgs;
use crate::console::Console;
use crate::error::ExecError;
use std::ffi::OsString;
use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Lines of hpp-split that are for people who run it themselves.
const ONLY_BY_HAND: [&str; 2] = ["wrote ", "run it: "];

/// The command that plans.
pub(super) struct Planner {
    path: PathBuf,
}

impl Planner {
    /// hpp-split beside this executable, else on PATH.
    pub fn find(model: &Path) -> Result<Self, ExecError> {
        let name = format!("hpp-split{}", std::env::consts::EXE_SUFFIX);
        let own = std::env::current_exe().ok();
        let beside = own.iter().filter_map(|own| own.parent()).map(Path::to_owned);
        let path = std::env::var_os("PATH").unwrap_or_default();
        let found = beside.chain(std::env::split_paths(&path)).map(|dir| dir.join(&name)).find(|path| path.is_file());
        found.map(|path| Self { path }).ok_or_else(|| ExecError::NoPlanner { model: model.to_owned() })
    }

    /// The executable.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the plan of `model` at `place`. The child holds `lock` too, so that a child that outlives this process still keeps
    /// others from writing to the same place. What hpp-split prints on stderr comes through as it is.
    pub fn plan(
        &self,
        model: &Path,
        flags: &[OsString],
        place: &Path,
        lock: File,
        console: &Console,
    ) -> Result<(), ExecError> {
        let failed = |source| ExecError::Planner { path: self.path.clone(), source };
        let mut command = Command::new(&self.path);
        command.arg(model).arg("--out").arg(place).args(["--force", "--in-place"]).args(flags);
        command.stdin(Stdio::from(lock)).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().map_err(failed)?;
        let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
        let (table, held_back) = std::thread::scope(|scope| {
            let table = scope.spawn(move || {
                let mut text = String::new();
                // What is not text is not shown.
                let _ = stdout.map(|mut stdout| stdout.read_to_string(&mut text));
                text
            });
            let mut held_back = Vec::new();
            for line in stderr.into_iter().flat_map(|stderr| BufReader::new(stderr).lines()).map_while(Result::ok) {
                if ONLY_BY_HAND.iter().any(|start| line.starts_with(start)) {
                    continue;
                }
                console.say(&line);
                if console.is_quiet() {
                    held_back.push(line);
                }
            }
            (table.join().unwrap_or_default(), held_back)
        });
        let status = child.wait().map_err(failed)?;
        if status.success() {
            console.detail(table.trim_end());
            return Ok(());
        }
        held_back.iter().for_each(|line| console.error(line));
        Err(ExecError::NotPlanned { code: status.code().and_then(|code| u8::try_from(code).ok()) })
    }
}

/// The flags that hpp-split gets.
pub(super) fn flags(args: &RuntimeArgs) -> Vec<OsString> {
    let context = args.context.map(|tokens| tokens.to_string());
    let planning = &args.planning;
    let given = [
        ("--ram", &planning.ram),
        ("--vram", &planning.vram),
        ("--gpu-layers", &planning.gpu_layers),
        ("--context", &context),
    ];
    let flags = given.into_iter().filter_map(|(flag, value)| Some([flag.into(), value.clone()?.into()]));
    flags.flatten().collect()
}
