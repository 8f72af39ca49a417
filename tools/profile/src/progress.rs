//! Progress on stderr: a bar with the remaining time on a terminal, otherwise one line every 10 s.

use indicatif::{ProgressBar, ProgressState, ProgressStyle};
use std::fmt::Write;
use std::io::IsTerminal;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval between two lines if stderr is not a terminal.
const BETWEEN_LINES: Duration = Duration::from_secs(10);

/// Shows how much of the profiling is done.
pub struct Progress {
    bar: ProgressBar,
    remaining: Arc<Mutex<Remaining>>,
    quiet: bool,
    lines: Mutex<Option<Lines>>,
}

/// The thread that writes lines if stderr is not a terminal. Dropping the sender ends it.
struct Lines {
    end: Sender<()>,
    thread: JoinHandle<()>,
}

impl Progress {
    /// Draws nothing before [`expect`](Self::expect).
    pub fn new(quiet: bool) -> Self {
        let bar = if quiet { ProgressBar::hidden() } else { ProgressBar::new(1000) };
        Progress { bar, remaining: Arc::default(), quiet, lines: Mutex::new(None) }
    }

    /// Starts the countdown for work that is expected to take this many seconds.
    pub fn expect(&self, seconds: f64) {
        self.remaining().expect(seconds);
        let shared = Arc::clone(&self.remaining);
        let left = move |_: &ProgressState, text: &mut dyn Write| {
            let left = lock(&shared).left(Instant::now());
            let _ = text.write_str(&left.map_or(String::new(), |left| format!("{} left", spoken(left))));
        };
        if let Ok(style) = ProgressStyle::with_template("{bar:24} {percent:>3}% {left:<16} {msg}") {
            self.bar.set_style(style.with_key("left", left));
        }
        self.bar.enable_steady_tick(Duration::from_millis(500));
        if !self.quiet && !std::io::stderr().is_terminal() {
            *lock(&self.lines) = Some(Lines::start(Arc::clone(&self.remaining)));
        }
    }

    /// Prints lines above the bar.
    pub fn line_printer(&self) -> impl Fn(&str) + Send + Sync + use<> {
        let bar = self.bar.clone();
        move |line| bar.suspend(|| hpp_io::line_to_stderr(line))
    }

    /// Shows the name of the measurement that starts now.
    pub fn begin(&self, what: &str) {
        tracing::info!(what, "measurement begins");
        what.clone_into(&mut self.remaining().what);
        self.bar.set_message(what.to_owned());
    }

    /// Marks a measurement with this many expected seconds as done.
    pub fn end(&self, seconds: f64) {
        let mut remaining = self.remaining();
        remaining.done(seconds, Instant::now());
        let part = remaining.part();
        drop(remaining);
        self.bar.set_position((part * 1000.0) as u64);
    }

    /// Writes a warning above the bar.
    pub fn warn(&self, text: &str) {
        if !self.quiet {
            self.bar.suspend(|| hpp_io::line_to_stderr(&format!("warning: {text}")));
        }
    }

    /// Removes the bar, and stops writing lines.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
        let lines = lock(&self.lines).take();
        if let Some(lines) = lines {
            lines.stop();
        }
    }

    fn remaining(&self) -> MutexGuard<'_, Remaining> {
        lock(&self.remaining)
    }
}

impl Lines {
    fn start(remaining: Arc<Mutex<Remaining>>) -> Self {
        let (end, ended) = channel::<()>();
        let thread = std::thread::spawn(move || {
            while ended.recv_timeout(BETWEEN_LINES) == Err(RecvTimeoutError::Timeout) {
                let line = lock(&remaining).line(Instant::now());
                hpp_io::line_to_stderr(&line);
            }
        });
        Lines { end, thread }
    }

    fn stop(self) {
        drop(self.end);
        // The panic handler has already reported a panic of the thread.
        let _ = self.thread.join();
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Estimates the remaining time: the expected seconds of the remaining work, times actual over expected seconds of the finished work.
#[derive(Debug, Default)]
pub struct Remaining {
    expected: f64,
    done: f64,
    taken: f64,
    /// When the current measurement began.
    since: Option<Instant>,
    /// The current measurement.
    what: String,
}

impl Remaining {
    /// Starts with this many expected seconds.
    pub fn expect(&mut self, seconds: f64) {
        *self = Remaining { expected: seconds, since: Some(Instant::now()), ..Remaining::default() };
    }

    /// Marks work with this many expected seconds as done.
    pub fn done(&mut self, seconds: f64, now: Instant) {
        self.done += seconds;
        if let Some(since) = self.since.replace(now) {
            self.taken += now.saturating_duration_since(since).as_secs_f64();
        }
    }

    /// `profiling: 34 %, 2 min 10 s left: layers.1 on cpu`.
    fn line(&self, now: Instant) -> String {
        let left = self.left(now).map_or(String::new(), |left| format!(", {} left", spoken(left)));
        format!("profiling: {:.0} %{left}: {}", self.part() * 100.0, self.what)
    }

    /// The finished part of the work, 0 to 1.
    pub fn part(&self) -> f64 {
        if self.expected > 0.0 { (self.done / self.expected).clamp(0.0, 1.0) } else { 0.0 }
    }

    /// Remaining time. `None` until some work is done, and once the current measurement has taken longer than was estimated for all remaining work.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        if self.done <= 0.0 {
            return None;
        }
        let pace = self.taken / self.done;
        let going_on = self.since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
        let left = (self.expected - self.done).max(0.0) * pace;
        (left == 0.0 || going_on < left).then(|| Duration::try_from_secs_f64((left - going_on).max(0.0)).ok())?
    }
}

/// `45 s`, `3 min`, `1 h 20 min`.
fn spoken(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..600 => format!("{} min {} s", seconds / 60, seconds % 60),
        seconds @ 600..3600 => format!("{} min", seconds / 60),
        seconds => format!("{} h {} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_remaining_time_follows_the_measured_pace() {
        let mut remaining = Remaining::default();
        assert_eq!(remaining.left(Instant::now()), None);
        remaining.expect(100.0);
        let begun = remaining.since.unwrap();
        let after = |seconds| begun + Duration::from_secs(seconds);
        assert_eq!(remaining.left(after(5)), None, "the pace is not known yet");
        // A tenth took twice as long as expected: nine tenths take 180 s more.
        remaining.done(10.0, after(20));
        assert_eq!(remaining.left(after(20)).unwrap().as_secs(), 180);
        assert_eq!(remaining.left(after(50)).unwrap().as_secs(), 150, "the countdown continues");
        assert_eq!(remaining.left(after(900)), None, "nobody knows how long it still takes");
        // The next tenth took no time at all.
        remaining.done(10.0, after(20));
        assert_eq!(remaining.left(after(20)).unwrap().as_secs(), 80);
        assert!((remaining.part() - 0.2).abs() < 1e-9);
        remaining.done(200.0, after(21));
        assert_eq!((remaining.part(), remaining.left(after(21)).unwrap().as_secs()), (1.0, 0));
    }

    #[test]
    fn a_line_names_part_time_left_and_measurement() {
        let mut remaining = Remaining::default();
        remaining.expect(100.0);
        remaining.what = "layers.1 on cpu".into();
        let begun = remaining.since.unwrap();
        assert_eq!(remaining.line(begun), "profiling: 0 %: layers.1 on cpu");
        remaining.done(25.0, begun + Duration::from_secs(25));
        assert_eq!(
            remaining.line(begun + Duration::from_secs(25)),
            "profiling: 25 %, 1 min 15 s left: layers.1 on cpu"
        );
    }

    #[test]
    fn times_are_spoken() {
        let spoken = |seconds| spoken(Duration::from_secs(seconds));
        assert_eq!([spoken(7), spoken(61), spoken(1200), spoken(7260)], ["7 s", "1 min 1 s", "20 min", "2 h 1 min"]);
    }
}
