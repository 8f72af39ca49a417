//! What is being done while nothing is printed, in words: what happens once and what at each start.

use hpp_schema::ByteSize;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Time between two looks.
pub const TICK: Duration = Duration::from_millis(500);
/// What is over sooner is not shown.
const LONG: Duration = Duration::from_secs(1);
/// Time between two lines where no terminal is.
const LINE: Duration = Duration::from_secs(5);

/// Something that may take long.
pub struct Doing {
    what: String,
    /// How many of how many are done.
    part: Option<(usize, usize)>,
    /// The directory in which weights are prepared, and about how many bytes they will have.
    growing: Option<(PathBuf, u64)>,
    since: Instant,
    /// When the next line is due.
    due: Instant,
}

impl Doing {
    /// A step of which nothing tells how far it is.
    pub fn step(what: String) -> Self {
        let now = Instant::now();
        Self { what, part: None, growing: None, since: now, due: now + LINE }
    }

    /// Loading partition `index` of `count`.
    pub fn partition(name: &str, index: usize, count: usize) -> Self {
        let what = format!("loading {name}, partition {} of {count} (at each start)", index + 1);
        Self { part: Some((index, count)), ..Self::step(what) }
    }

    /// The same step, which now writes weights to `dir` that will have about so many bytes in all.
    pub fn preparing(self, partition: &str, dir: &Path, about: u64) -> Self {
        let what = format!("writing prepared weights for {partition}");
        Self { what, growing: Some((dir.to_owned(), about)), ..self }
    }

    /// The same as the step that follows another: lines keep their distance.
    pub fn after(self, before: Self) -> Self {
        let since = if self.part.is_some() && before.part.is_some() { before.since } else { self.since };
        Self { since, due: before.due, ..self }
    }

    /// Whether it takes long enough to be shown.
    pub fn is_long(&self) -> bool {
        self.since.elapsed() >= LONG
    }

    /// A line about it if one is due.
    pub fn line_now(&mut self) -> Option<String> {
        let now = Instant::now();
        if now < self.due {
            return None;
        }
        self.due = now + LINE;
        Some(self.text())
    }

    /// A bar for it, or a spinner.
    pub fn bar(&self) -> ProgressBar {
        match self.part {
            Some((_, count)) => {
                let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {msg}");
                let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
                ProgressBar::new(count as u64).with_style(style)
            }
            None => ProgressBar::new_spinner(),
        }
    }

    /// Shows it as it is now.
    pub fn draw(&self, bar: &ProgressBar) {
        if let Some((index, count)) = self.part {
            bar.set_length(count as u64);
            bar.set_position(index as u64);
        }
        bar.set_message(self.text());
        bar.tick();
    }

    fn text(&self) -> String {
        let Some((dir, about)) = &self.growing else { return self.what.clone() };
        let written = bytes_in(dir);
        let (done, all) = (ByteSize(written).human(), ByteSize((*about).max(written)).human());
        format!("{}: {done} of about {all}, done once; later starts skip this", self.what)
    }
}

/// Bytes in a directory that somebody writes to meanwhile.
fn bytes_in(dir: &Path) -> u64 {
    let size = |entry: std::fs::DirEntry| match entry.metadata() {
        Ok(about) if about.is_dir() => bytes_in(&entry.path()),
        Ok(about) => about.len(),
        Err(_) => 0,
    };
    std::fs::read_dir(dir).into_iter().flatten().flatten().map(size).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_what_is_done_once_and_keep_their_distance() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("cpu_0")).unwrap();
        std::fs::write(dir.path().join("cpu_0/weights"), vec![0; 3 << 20]).unwrap();
        let mut doing = Doing::partition("cpu_1", 1, 4);
        assert_eq!(doing.text(), "loading cpu_1, partition 2 of 4 (at each start)");
        assert_eq!(doing.line_now(), None, "not at once");
        doing.due = Instant::now();
        assert!(doing.line_now().is_some());
        let mut next = Doing::partition("cpu_2", 2, 4).after(doing).preparing("cpu_2", dir.path(), 12 << 20);
        assert_eq!(next.line_now(), None, "one was just printed");
        next.due = Instant::now();
        let said = "writing prepared weights for cpu_2: 3 MiB of about 12 MiB, done once; later starts skip this";
        assert_eq!(next.line_now().as_deref(), Some(said));
    }
}
