//! Standard error: progress, warnings and the final summary. Progress bars on a terminal, otherwise a line every few seconds.

use crate::activity::{Activity, TICK};
use hpp_engine::{ProviderFallback, Reporter, fallback_warnings};
use hpp_schema::{ByteSize, Provider};
use indicatif::ProgressBar;
use std::collections::HashSet;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// How much is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// Errors only.
    Quiet,
    /// Warnings, progress and the summary at the end.
    Normal,
}

/// Prints everything that is not a result.
pub struct Console {
    level: Level,
    /// For the thread that updates the progress.
    this: Weak<Console>,
    display: Mutex<Display>,
    warned: Mutex<HashSet<String>>,
    fallbacks: Mutex<Vec<ProviderFallback>>,
}

/// The current activity and its progress bar.
#[derive(Default)]
struct Display {
    activity: Option<Activity>,
    bar: Option<ProgressBar>,
    /// Whether a thread updates the display.
    has_thread: bool,
}

impl Console {
    /// A console that prints messages up to this level.
    pub fn new(level: Level) -> Arc<Self> {
        Arc::new_cyclic(|this| Self {
            level,
            this: this.clone(),
            display: Mutex::default(),
            warned: Mutex::default(),
            fallbacks: Mutex::default(),
        })
    }

    /// Whether only errors are printed.
    pub fn is_quiet(&self) -> bool {
        self.level == Level::Quiet
    }

    /// Prints a message unless the console is quiet.
    pub fn info(&self, text: &str) {
        if !self.is_quiet() {
            self.line(text);
        }
    }

    /// Prints a warning, each text once.
    pub fn warn(&self, text: &str) {
        let new = self.warned.lock().unwrap_or_else(PoisonError::into_inner).insert(text.to_owned());
        if new {
            self.info(&format!("warning: {text}"));
        }
    }

    /// Starts a step that may take long. It is shown if it lasts, until the next step starts or [`idle`](Self::idle) ends it.
    pub fn working(&self, what: impl Into<String>) {
        self.start(Activity::step(what.into()));
    }

    /// Shows that `done` of `total` prompts are answered.
    pub fn answered(&self, done: usize, total: usize, what: String) {
        self.start(Activity::prompts(done, total, what));
    }

    /// Ends the current step.
    pub fn idle(&self) {
        let mut display = self.display();
        display.activity = None;
        if let Some(bar) = display.bar.take() {
            bar.finish_and_clear();
        }
    }

    /// Ends loading and warns, in as few lines as possible, of partitions that do not run on the device of the plan. `has_device`
    /// returns whether a provider has a device on this machine.
    pub fn loading_done(&self, has_device: impl Fn(Provider) -> bool) {
        self.idle();
        let fallbacks = std::mem::take(&mut *self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner));
        fallback_warnings(&fallbacks, has_device).iter().for_each(|text| self.warn(text));
    }

    fn start(&self, activity: Activity) {
        if self.is_quiet() {
            return;
        }
        let mut display = self.display();
        display.activity = Some(match display.activity.take() {
            Some(previous) => activity.after(previous),
            None => activity,
        });
        if display.bar.is_some() {
            display.draw();
        }
        if !std::mem::replace(&mut display.has_thread, true) {
            let console = self.this.clone();
            std::thread::spawn(move || while console.upgrade().is_some_and(|console| console.tick()) {});
        }
    }

    /// Updates the display after [`TICK`]. Returns false, which ends the thread, if there is no activity.
    fn tick(&self) -> bool {
        std::thread::sleep(TICK);
        let mut display = self.display();
        if io::stderr().is_terminal() {
            display.draw();
        } else if let Some(text) = display.activity.as_mut().and_then(Activity::line_if_due) {
            hpp_io::line_to_stderr(&text);
        }
        display.has_thread = display.activity.is_some();
        display.has_thread
    }

    fn display(&self) -> MutexGuard<'_, Display> {
        self.display.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Prints a line above the progress bar, even if the console is quiet. For parts of error messages and for the log.
    pub fn line(&self, text: &str) {
        let write = || hpp_io::line_to_stderr(text);
        match &self.display().bar {
            Some(bar) => bar.suspend(write),
            None => write(),
        }
    }
}

impl Display {
    /// Draws a long activity on the terminal.
    fn draw(&mut self) {
        let Some(activity) = self.activity.as_ref().filter(|activity| activity.is_long()) else { return };
        activity.draw(self.bar.get_or_insert_with(|| activity.bar()));
    }
}

impl Reporter for Console {
    fn checking_files(&self, _: usize) {
        self.working("checking the plan's files (at each start)");
    }

    fn comparing(&self, file: &str, bytes: u64) {
        // Checking large files takes half a second from the page cache and several seconds from a disk.
        if bytes >= 2 << 30 {
            let bytes = ByteSize(bytes).human();
            self.info(&format!("comparing all {bytes} of {file} with the plan: the file is new or was modified"));
        }
    }

    fn loading(&self, partition: &str, index: usize, count: usize) {
        self.start(Activity::partition(partition, index, count));
    }

    fn preparing(&self, partition: &str, dir: &Path) {
        let mut display = self.display();
        if let Some(activity) = display.activity.take() {
            display.activity = Some(activity.preparing(partition, dir));
        }
    }

    fn fallback(&self, partition: &str, wanted: Provider, got: Provider, reason: &str) {
        let mut fallbacks = self.fallbacks.lock().unwrap_or_else(PoisonError::into_inner);
        fallbacks.push(ProviderFallback { partition: partition.to_owned(), wanted, got, reason: reason.to_owned() });
    }

    fn warning(&self, message: &str) {
        self.warn(message);
    }
}
