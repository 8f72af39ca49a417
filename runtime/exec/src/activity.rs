//! A step that may take long, described for the user: a line every few seconds, or a progress bar on a terminal.

use hpp_schema::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Interval between two updates.
pub const TICK: Duration = Duration::from_millis(500);
/// Steps shorter than this are not shown.
const MIN_SHOWN: Duration = Duration::from_secs(1);
/// Interval between two lines if stderr is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// A step that may take long.
pub struct Activity {
    what: String,
    progress: Option<ListPosition>,
    output: Option<PathBuf>,
    started: Instant,
    /// When this step began. In a list: when the current item began, while `started` is the start of the list.
    began: Instant,
    next_line: Instant,
    /// The text of the last line, and when the step that it describes began.
    said: Option<(String, Instant)>,
}

/// The position in a list.
struct ListPosition {
    index: usize,
    count: usize,
}

impl Activity {
    /// A step without known progress.
    pub fn step(what: String) -> Self {
        let now = Instant::now();
        Self {
            what,
            progress: None,
            output: None,
            started: now,
            began: now,
            next_line: now + LINE_INTERVAL,
            said: None,
        }
    }

    /// Loading partition `index` of `count`.
    pub fn partition(name: &str, index: usize, count: usize) -> Self {
        let what = format!("loading {name}, partition {} of {count} (at each start)", index + 1);
        Self { progress: Some(ListPosition { index, count }), ..Self::step(what) }
    }

    /// Running prompt `index` of `count`.
    pub fn prompts(index: usize, count: usize, what: String) -> Self {
        Self { progress: Some(ListPosition { index, count }), ..Self::step(what) }
    }

    /// The same step while it writes the prepared weights of a partition to `dir`, the directory of all prepared weights.
    pub fn preparing(self, partition: &str, dir: &Path) -> Self {
        let position = self.progress.as_ref().map(|at| format!(", partition {} of {}", at.index + 1, at.count));
        let what = format!("writing prepared weights for {partition}{}", position.unwrap_or_default());
        Self { what, output: Some(dir.to_owned()), ..self }
    }

    /// This step after a previous one: takes over the time of the next line, and the start time if both belong to a list.
    pub fn after(self, previous: Self) -> Self {
        let same_list = self.progress.is_some() && previous.progress.is_some();
        let started = if same_list { previous.started } else { self.started };
        Self { started, began: self.began, next_line: previous.next_line, said: previous.said, ..self }
    }

    /// Whether it has taken long enough to be shown.
    pub fn is_long(&self) -> bool {
        self.started.elapsed() >= MIN_SHOWN
    }

    /// A line about the step, at most once per interval. If the text has not changed, the line adds for how many seconds that has been so.
    pub fn line_if_due(&mut self) -> Option<String> {
        let now = Instant::now();
        if now < self.next_line {
            return None;
        }
        self.next_line = now + LINE_INTERVAL;
        let text = self.text();
        match &self.said {
            Some((said, since)) if *said == text => Some(format!("{text}, for {} s so far", since.elapsed().as_secs())),
            _ => {
                self.said = Some((text.clone(), self.began));
                Some(text)
            }
        }
    }

    /// A progress bar, or a spinner if the progress is unknown.
    pub fn bar(&self) -> ProgressBar {
        match self.progress {
            Some(ListPosition { count, .. }) => {
                let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}");
                let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
                ProgressBar::new(count as u64).with_style(style)
            }
            None => ProgressBar::new_spinner(),
        }
    }

    /// Updates the bar.
    pub fn draw(&self, bar: &ProgressBar) {
        if let Some(ListPosition { index, count }) = self.progress {
            bar.set_length(count as u64);
            bar.set_position(index as u64);
        }
        bar.set_message(self.text());
        bar.tick();
    }

    fn text(&self) -> String {
        let Some(dir) = &self.output else { return self.what.clone() };
        format!("{}: {} on disk so far, only at the first start", self.what, ByteSize(bytes_in(dir)).human())
    }
}

/// Size of a directory's files, which may grow meanwhile.
fn bytes_in(dir: &Path) -> u64 {
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_in(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    };
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_the_progress_at_intervals() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("cpu_0")).unwrap();
        std::fs::write(dir.path().join("cpu_0/weights"), vec![0; 3 << 20]).unwrap();
        let mut activity = Activity::partition("cpu_1", 1, 4);
        assert_eq!(activity.text(), "loading cpu_1, partition 2 of 4 (at each start)");
        assert_eq!(activity.line_if_due(), None, "not immediately");
        activity.next_line = Instant::now();
        assert!(activity.line_if_due().is_some());
        let mut next = Activity::partition("cpu_2", 2, 4).after(activity).preparing("cpu_2", dir.path());
        assert_eq!(next.line_if_due(), None, "one was just printed");
        next.next_line = Instant::now();
        let line =
            "writing prepared weights for cpu_2, partition 3 of 4: 3 MiB on disk so far, only at the first start";
        assert_eq!(next.line_if_due().as_deref(), Some(line));
    }

    #[test]
    fn a_line_is_not_repeated() {
        let mut activity = Activity::step("run 2 of 3".to_owned());
        let line = |activity: &mut Activity| {
            activity.next_line = Instant::now();
            activity.line_if_due().unwrap()
        };
        assert_eq!(line(&mut activity), "run 2 of 3");
        assert_eq!(line(&mut activity), "run 2 of 3, for 0 s so far");
        let mut next = Activity::step("run 3 of 3".to_owned()).after(activity);
        assert_eq!(line(&mut next), "run 3 of 3");
    }
}
