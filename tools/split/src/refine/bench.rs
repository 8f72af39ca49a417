//! Running a plan through `hpp-exec bench`, in a child process, from a directory that goes away again.

use super::RefineError;
use crate::cli::SplitArgs;
use crate::error::SplitError;
use crate::files::{self, Writing};
use crate::predict::Expected;
use crate::request::Request;
use hpp_graph::Part;
use hpp_model::Analysis;
use hpp_onnx::WorkDir;
use hpp_schema::Plan;
use serde::Deserialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Where hpp-exec is, when it is not beside this program.
pub const EXEC: &str = "HPP_EXEC";
/// How often a running child is looked at.
const GLANCE: Duration = Duration::from_millis(20);

/// What was measured of a plan.
#[derive(Clone, Debug)]
pub struct Measured {
    /// One more token, milliseconds.
    pub decode_ms: f64,
    /// To the first token, milliseconds.
    pub prefill_ms: f64,
    /// Each partition's share of both: milliseconds in all passes of the prompt, and for one more token.
    pub stages: Vec<(f64, f64)>,
    /// All copies of a run, milliseconds.
    pub transfer_ms: f64,
    /// Tokens decoded in a run, the first one apart.
    pub decoded: f64,
}

impl Measured {
    /// In the terms predictions are made in.
    pub fn expected(&self) -> Expected {
        Expected { decode_ms: self.decode_ms, prefill_ms: self.prefill_ms }
    }
}

/// The part of `hpp-exec bench --json` that is needed here.
#[derive(Debug, Deserialize)]
struct Answer {
    time_to_first_token_ms: Spread,
    decode_tokens_per_second: Option<Spread>,
    transfer_ms: Spread,
    stages: Vec<Stage>,
}

#[derive(Debug, Deserialize)]
struct Spread {
    median: f64,
}

#[derive(Debug, Deserialize)]
struct Stage {
    prefill_ms: f64,
    decode_ms_per_token: f64,
}

/// Where and how plans are run.
pub struct Bench {
    exec: PathBuf,
    prompt: u64,
    tokens: u64,
    /// Removed with everything in it when this is dropped.
    dir: WorkDir,
    interrupt: Interrupt,
}

impl Bench {
    /// Prepares a directory beside the one the plan will go to.
    pub fn new(request: &Request, tokens: u64, target: &Path) -> Result<Self, SplitError> {
        let interrupt = Interrupt::install()?;
        let io = |path: &Path| {
            let path = path.to_owned();
            move |source| SplitError::Io { action: "create a directory beside", path, source }
        };
        let absolute = std::path::absolute(target).map_err(io(target))?;
        let parent = absolute.parent().unwrap_or(&absolute);
        fs::create_dir_all(parent).map_err(io(parent))?;
        let name = absolute.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let dir = WorkDir::new(parent, &format!(".{name}.refine-")).map_err(io(parent))?;
        // The last of the new tokens is not fed back.
        let room = (request.load.context + 1).saturating_sub(tokens);
        Ok(Bench { exec: exec()?, prompt: request.load.prompt.min(room).max(1), tokens, dir, interrupt })
    }

    /// Writes the plan, runs it and removes it.
    pub fn run(
        &self,
        args: &SplitArgs,
        analysis: &Analysis,
        parts: &[Part],
        plan: Plan,
    ) -> Result<Measured, SplitError> {
        let target = self.dir.path().join("plan");
        let how = files::How { force: false, pack: false, in_place: false, hash_weights: false, lifted: args.lifted() };
        let writing = Writing::begin(how, analysis, &target)?;
        writing.finish(parts, plan)?;
        let measured = self.interrupt.check().and_then(|()| self.answer(args, &target));
        let gone = |source| SplitError::Io { action: "remove", path: target.clone(), source };
        fs::remove_dir_all(&target).map_err(gone)?;
        Ok(measured?)
    }

    fn answer(&self, args: &SplitArgs, plan: &Path) -> Result<Measured, RefineError> {
        let failed = |source| RefineError::Run { path: self.exec.clone(), source };
        let (out, err) = (self.dir.path().join("stdout"), self.dir.path().join("stderr"));
        let context = args.context.map(|context| ["--context".to_owned(), context.to_string()]);
        let child = Command::new(&self.exec)
            .arg("bench")
            .arg(plan)
            .args(["--json", "--runs", "3"])
            .args(["--prompt-tokens".to_owned(), self.prompt.to_string()])
            .args(["--new-tokens".to_owned(), self.tokens.to_string()])
            .args(context.into_iter().flatten())
            .stdin(Stdio::null())
            .stdout(File::create(&out).map_err(failed)?)
            .stderr(File::create(&err).map_err(failed)?)
            .spawn()
            .map_err(failed)?;
        let status = self.wait(child)?;
        if !status.success() {
            let said = fs::read_to_string(&err).unwrap_or_default();
            return Err(RefineError::Failed(said.trim().to_owned()));
        }
        self.understand(&fs::read_to_string(&out).map_err(failed)?)
    }

    fn wait(&self, mut child: Child) -> Result<ExitStatus, RefineError> {
        loop {
            let status = child.try_wait().map_err(|source| RefineError::Run { path: self.exec.clone(), source })?;
            if let Err(interrupted) = self.interrupt.check() {
                let _ = child.kill();
                let _ = child.wait();
                return Err(interrupted);
            }
            match status {
                Some(status) => return Ok(status),
                None => std::thread::sleep(GLANCE),
            }
        }
    }

    fn understand(&self, text: &str) -> Result<Measured, RefineError> {
        let answer: Answer = serde_json::from_str(text).map_err(|error| RefineError::Answer(error.to_string()))?;
        let rate = answer.decode_tokens_per_second.map(|spread| spread.median).filter(|rate| *rate > 0.0);
        let rate = rate.ok_or_else(|| RefineError::Answer("it decoded nothing".to_owned()))?;
        Ok(Measured {
            decode_ms: 1e3 / rate,
            prefill_ms: answer.time_to_first_token_ms.median,
            stages: answer.stages.iter().map(|stage| (stage.prefill_ms, stage.decode_ms_per_token)).collect(),
            transfer_ms: answer.transfer_ms.median,
            decoded: self.tokens.saturating_sub(1) as f64,
        })
    }
}

/// The program beside this one, or the one a person names.
pub fn exec() -> Result<PathBuf, RefineError> {
    let beside = || {
        let own = std::env::current_exe().unwrap_or_default();
        own.with_file_name(format!("hpp-exec{}", std::env::consts::EXE_SUFFIX))
    };
    let path = std::env::var_os(EXEC).map_or_else(beside, PathBuf::from);
    if path.is_file() { Ok(path) } else { Err(RefineError::NoExec(path)) }
}

/// Ctrl-C, which ends a measurement and leaves nothing behind. A second one ends the process at once.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    fn install() -> Result<Self, RefineError> {
        let asked = Arc::new(AtomicBool::new(false));
        let install = |signal| {
            flag::register_conditional_shutdown(signal, 130, Arc::clone(&asked))?;
            flag::register(signal, Arc::clone(&asked))
        };
        for signal in [SIGINT, SIGTERM] {
            install(signal).map_err(|source| RefineError::Run { path: PathBuf::from("hpp-split"), source })?;
        }
        Ok(Interrupt(asked))
    }

    /// An error once a stop was asked for.
    pub fn check(&self) -> Result<(), RefineError> {
        if self.0.load(Ordering::SeqCst) { Err(RefineError::Interrupted) } else { Ok(()) }
    }
}
