//! Standard error: progress, warnings and the final account, for people. Bars only where a person watches; elsewhere a line
//! every few seconds.

use crate::progress::{Doing, TICK};
use hpp_engine::{Reporter, listed};
use hpp_schema::{ByteSize, Provider};
use indicatif::ProgressBar;
use std::collections::{BTreeMap, HashSet};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// How much is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Errors only.
    Quiet,
    /// Warnings and the account at the end.
    Normal,
    /// Each step of loading, and settings that were decided here.
    Detailed,
}

/// Where everything goes that is not a result.
pub struct Console {
    level: Level,
    /// For the thread that reports progress while nothing else is printed.
    own: Weak<Console>,
    progress: Mutex<Progress>,
    warned: Mutex<HashSet<String>>,
    elsewhere: Mutex<Vec<Elsewhere>>,
}

/// What is being done, and how it is shown.
#[derive(Default)]
struct Progress {
    doing: Option<Doing>,
    bar: Option<ProgressBar>,
    /// Whether a thread looks at it now and then.
    is_watched: bool,
}

/// A partition that does not run on the provider that the plan prefers.
struct Elsewhere {
    partition: String,
    wanted: Provider,
    got: Provider,
    reason: String,
}

impl Console {
    /// A console that prints this much.
    pub fn new(level: Level) -> Arc<Self> {
        Arc::new_cyclic(|own| Self {
            level,
            own: own.clone(),
            progress: Mutex::default(),
            warned: Mutex::default(),
            elsewhere: Mutex::default(),
        })
    }

    /// Whether only errors are printed.
    pub fn is_quiet(&self) -> bool {
        self.level < Level::Normal
    }

    /// Something everyone should see.
    pub fn say(&self, text: &str) {
        if !self.is_quiet() {
            self.line(text);
        }
    }

    /// Something for those who asked for more.
    pub fn detail(&self, text: &str) {
        if self.level >= Level::Detailed {
            self.line(text);
        }
    }

    /// A part of an error message, printed at every level.
    pub fn error(&self, text: &str) {
        self.line(text);
    }

    /// A warning, printed once.
    pub fn warn(&self, text: &str) {
        let new = self.warned.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned());
        if new {
            self.say(&format!("warning: {text}"));
        }
    }

    /// Something that may take long begins: it is shown after a moment, until something else begins or [`idle`](Self::idle).
    pub fn working(&self, what: impl Into<String>) {
        self.begin(Doing::step(what.into()));
    }

    /// Nothing that takes long is being done any more.
    pub fn idle(&self) {
        let mut progress = self.progress();
        progress.doing = None;
        if let Some(bar) = progress.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Loading is over: says, in as few lines as possible, which partitions run elsewhere than planned. `has_device` tells
    /// whether a provider has a device here at all.
    pub fn loading_done(&self, has_device: impl Fn(Provider) -> bool) {
        self.idle();
        let elsewhere = std::mem::take(&mut *self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner));
        for moved in &elsewhere {
            self.detail(&format!("{} not on {}: {}", moved.partition, moved.wanted.name(), moved.reason));
        }
        moves(&elsewhere, has_device).iter().for_each(|text| self.warn(text));
    }

    fn begin(&self, doing: Doing) {
        if self.is_quiet() {
            return;
        }
        let mut progress = self.progress();
        progress.doing = Some(match progress.doing.take() {
            Some(before) => doing.after(before),
            None => doing,
        });
        if progress.bar.is_some() {
            progress.draw();
        }
        if !std::mem::replace(&mut progress.is_watched, true) {
            let own = self.own.clone();
            std::thread::spawn(move || while own.upgrade().is_some_and(|own| own.tick()) {});
        }
    }

    /// Shows progress if it is time to; false when there is nothing to watch any more.
    fn tick(&self) -> bool {
        std::thread::sleep(TICK);
        let mut progress = self.progress();
        if io::stderr().is_terminal() {
            progress.draw();
        } else if let Some(text) = progress.doing.as_mut().and_then(Doing::line_now) {
            // Nobody reads a closed stderr.
            let _ = writeln!(io::stderr(), "{text}");
        }
        progress.is_watched = progress.doing.is_some();
        progress.is_watched
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn line(&self, text: &str) {
        // Nobody reads a closed stderr.
        let write = || drop(writeln!(io::stderr(), "{text}"));
        match &self.progress().bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

impl Progress {
    /// Draws what is being done, on a terminal.
    fn draw(&mut self) {
        let Some(doing) = self.doing.as_ref().filter(|doing| doing.is_long()) else { return };
        doing.draw(self.bar.get_or_insert_with(|| doing.bar()));
    }
}

/// One line for each reason. Partitions whose providers have no device here share one, whatever each provider says.
fn moves(elsewhere: &[Elsewhere], has_device: impl Fn(Provider) -> bool) -> Vec<String> {
    let mut absent: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut failed: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for partition in elsewhere.chunk_by(|a, b| a.partition == b.partition) {
        let Some(Elsewhere { partition: name, got, .. }) = partition.last() else { continue };
        let got = if *got == Provider::Cpu { "the CPU" } else { got.name() };
        let (here, not_here): (Vec<_>, Vec<_>) = partition.iter().partition(|moved| has_device(moved.wanted));
        for Elsewhere { wanted, reason, .. } in &here {
            let why = format!("{got} instead of {}: {reason}", wanted.name());
            failed.entry(why).or_default().push(name);
        }
        if here.is_empty() {
            let why = match &not_here[..] {
                [only] => format!("{} finds no usable GPU here", only.wanted.name()),
                _ => "no usable GPU here".to_owned(),
            };
            absent.entry(format!("{got}: {why} (hpp-exec devices says why)")).or_default().push(name);
        }
    }
    let line = |(what, mut names): (String, Vec<&str>)| {
        names.dedup();
        format!("{} {} on {what}", listed(&names), if names.len() == 1 { "runs" } else { "run" })
    };
    failed.into_iter().chain(absent).map(line).collect()
}

impl Reporter for Console {
    fn checking_files(&self, files: usize) {
        self.detail(&format!("checking {files} files"));
        self.working("checking the plan's files (at each start)");
    }

    fn comparing(&self, file: &str, bytes: u64) {
        let text = format!("comparing all {} of {file} with the plan", ByteSize(bytes).human());
        // Half a second where it comes from memory, several where it comes from a disk.
        match bytes >= 2 << 30 {
            true => self.say(&format!("{text}: it is new here or was written to")),
            false => self.detail(&text),
        }
    }

    fn loading(&self, partition: &str, index: usize, count: usize) {
        self.begin(Doing::partition(partition, index, count));
    }

    fn preparing(&self, partition: &str, dir: &Path, about: u64) {
        let mut progress = self.progress();
        if let Some(doing) = progress.doing.take() {
            progress.doing = Some(doing.preparing(partition, dir, about));
        }
    }

    fn loaded(&self, partition: &str, provider: Provider, processor: &str, millis: f64) {
        self.detail(&format!("{partition}: {} on {processor}, loaded in {millis:.0} ms", provider.name()));
    }

    fn fallback(&self, partition: &str, wanted: Provider, got: Provider, reason: &str) {
        let mut elsewhere = self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner);
        elsewhere.push(Elsewhere { partition: partition.to_owned(), wanted, got, reason: reason.to_owned() });
    }

    fn warning(&self, message: &str) {
        self.warn(message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn elsewhere(partition: &str, wanted: Provider, reason: &str) -> Elsewhere {
        Elsewhere { partition: partition.into(), wanted, got: Provider::Cpu, reason: reason.into() }
    }

    #[test]
    fn a_gpu_that_is_not_here_is_one_line() {
        let both = |name: &str| [Provider::Cuda, Provider::Webgpu].map(|wanted| elsewhere(name, wanted, "no library"));
        let all: Vec<Elsewhere> = ["gpu_0", "gpu_1", "gpu_2", "gpu_3"].into_iter().flat_map(both).collect();
        let one = ["gpu_0 to gpu_3 run on the CPU: no usable GPU here (hpp-exec devices says why)"];
        assert_eq!(moves(&all, |_| false), one);
        let only = [elsewhere("gpu_0", Provider::Cuda, "no library")];
        let said = ["gpu_0 runs on the CPU: CUDA finds no usable GPU here (hpp-exec devices says why)"];
        assert_eq!(moves(&only, |_| false), said);
    }

    #[test]
    fn what_a_gpu_that_is_here_refuses_is_said() {
        let all = [
            elsewhere("gpu_0", Provider::Cuda, "no library"),
            elsewhere("gpu_0", Provider::Webgpu, "it does not compute in 16 bits"),
        ];
        let said = ["gpu_0 runs on the CPU instead of WebGPU: it does not compute in 16 bits"];
        assert_eq!(moves(&all, |provider| provider == Provider::Webgpu), said);
    }
}
