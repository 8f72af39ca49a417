//! Standard error: progress, warnings and the final account, for people. Bars only where a person watches.

use hpp_engine::{Reporter, listed};
use hpp_schema::{ByteSize, Provider};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::{BTreeMap, HashSet};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, PoisonError};

/// How much is said.
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
    bar: Mutex<Option<ProgressBar>>,
    warned: Mutex<HashSet<String>>,
    /// Partitions that run elsewhere, by what there is to say about them.
    elsewhere: Mutex<BTreeMap<String, Vec<String>>>,
}

impl Console {
    /// A console that says this much.
    pub fn new(level: Level) -> Arc<Self> {
        Arc::new(Self { level, bar: Mutex::default(), warned: Mutex::default(), elsewhere: Mutex::default() })
    }

    /// Something everyone should see.
    pub fn say(&self, text: &str) {
        if self.level >= Level::Normal {
            self.line(text);
        }
    }

    /// Something for those who asked for more.
    pub fn detail(&self, text: &str) {
        if self.level >= Level::Detailed {
            self.line(text);
        }
    }

    /// A warning, said once.
    pub fn warn(&self, text: &str) {
        let new = self.warned.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned());
        if new {
            self.say(&format!("warning: {text}"));
        }
    }

    /// Loading is over: takes the progress bar away and says, once for each reason, what runs elsewhere.
    pub fn loading_done(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
        let elsewhere = std::mem::take(&mut *self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner));
        for (what, partitions) in elsewhere {
            self.warn(&format!("{} on {what}", listed(&partitions)));
        }
    }

    fn line(&self, text: &str) {
        // Whoever closed stderr does not want to hear about it.
        let write = || drop(writeln!(io::stderr(), "{text}"));
        match &*self.bar.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }

    fn progress(&self, done: usize, of: usize, what: String) {
        if self.level < Level::Normal || !io::stderr().is_terminal() {
            return;
        }
        let mut slot = self.bar.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = slot.get_or_insert_with(|| {
            let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}");
            ProgressBar::new(of as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        bar.set_length(of as u64);
        bar.set_position(done as u64);
        bar.set_message(what);
        if done == of {
            bar.finish_and_clear();
            *slot = None;
        }
    }
}

impl Reporter for Console {
    fn checking_files(&self, files: usize) {
        self.detail(&format!("checking {files} files"));
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
        self.progress(index, count, format!("loading {partition}"));
    }

    fn loaded(&self, partition: &str, provider: Provider, processor: &str, millis: f64) {
        self.detail(&format!("{partition}: {} on {processor}, loaded in {millis:.0} ms", provider.name()));
    }

    fn fallback(&self, partition: &str, wanted: Provider, got: Provider, reason: &str) {
        let (wanted, got) = (wanted.name(), got.name());
        let what = format!("the {got} provider instead of {wanted}: {reason}");
        let mut elsewhere = self.elsewhere.lock().unwrap_or_else(PoisonError::into_inner);
        elsewhere.entry(what).or_default().push(partition.to_owned());
    }

    fn warning(&self, message: &str) {
        self.warn(message);
    }
}
