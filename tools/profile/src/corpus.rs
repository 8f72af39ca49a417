//! The corpus: one prompt a line, read in a stream, so that memory does not grow with it.
//!
//! It is read twice: once to the end, to say everything that is wrong with it before anything is measured, and once while it runs.

mod line;

use hpp_schema::probe::Prompt;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Bad lines that are named; the others are counted.
pub const MOST_NAMED: usize = 20;
/// Longest line that is read, bytes.
const LONGEST_LINE: u64 = 16 << 20;

/// How a corpus is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorpusFormat {
    /// A JSON object a line: `{"prompt": ...}`, `{"text": ...}` or `{"messages": [...]}`.
    JsonLines,
    /// A prompt a line.
    Text,
}

/// Why a corpus cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// Its name does not say how it is written.
    #[error("cannot tell how {} is written", path.display())]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// It cannot be opened or read.
    #[error("cannot read the corpus {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Nothing is in it.
    #[error("the corpus {} has no prompts", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// Some lines cannot be used.
    #[error("{} of the corpus {} cannot be used:{}", lines(*bad), path.display(), named(reasons, *bad))]
    Bad {
        /// The file.
        path: PathBuf,
        /// How many lines.
        bad: u64,
        /// The first of them, each with its number and the reason.
        reasons: Vec<String>,
    },
}

fn lines(bad: u64) -> String {
    if bad == 1 { "1 line".to_owned() } else { format!("{bad} lines") }
}

fn named(reasons: &[String], bad: u64) -> String {
    let mut text: String = reasons.iter().map(|reason| format!("\n  {reason}")).collect();
    if bad > reasons.len() as u64 {
        let _ = write!(text, "\n  and {} more", bad - reasons.len() as u64);
    }
    text
}

impl CorpusError {
    /// What to do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            CorpusError::Format { .. } => Some("name it .jsonl for a JSON object a line, .txt for a prompt a line"),
            CorpusError::Empty { .. } => Some("write at least one prompt into it, or leave --prompts out"),
            CorpusError::Bad { .. } => Some("correct these lines, or leave them out with --skip-bad"),
            CorpusError::Read { source, .. } if source.kind() == io::ErrorKind::InvalidInput => {
                Some("save the prompts in a file: a corpus is read more than once")
            }
            CorpusError::Read { .. } => None,
        }
    }
}

/// A corpus that was read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    path: PathBuf,
    format: CorpusFormat,
    /// Prompts in it, at most as many as were asked for.
    pub prompts: u64,
    /// Lines that cannot be used, among those prompts.
    pub bad: u64,
    /// The first of them, each with its number and the reason.
    pub reasons: Vec<String>,
}

impl Corpus {
    /// Reads a corpus as far as `most` prompts reach. Every bad line is reported at once, unless bad lines are skipped.
    pub fn scan(path: &Path, most: Option<u64>, skip_bad: bool) -> Result<Corpus, CorpusError> {
        let format = match path.extension().and_then(|extension| extension.to_str()) {
            Some("jsonl" | "ndjson") => CorpusFormat::JsonLines,
            Some("txt") => CorpusFormat::Text,
            _ => return Err(CorpusError::Format { path: path.to_owned() }),
        };
        let mut corpus = Corpus { path: path.to_owned(), format, prompts: 0, bad: 0, reasons: Vec::new() };
        let mut lines = corpus.lines()?;
        while most.is_none_or(|most| corpus.prompts < most) {
            match lines.next_prompt()? {
                None => break,
                Some(Ok(_)) => corpus.prompts += 1,
                Some(Err(reason)) => {
                    corpus.bad += 1;
                    if corpus.reasons.len() < MOST_NAMED {
                        corpus.reasons.push(reason);
                    }
                }
            }
        }
        match (corpus.bad, corpus.prompts) {
            (0, 0) => Err(CorpusError::Empty { path: path.to_owned() }),
            (bad, prompts) if bad > 0 && (!skip_bad || prompts == 0) => {
                Err(CorpusError::Bad { path: path.to_owned(), bad, reasons: corpus.reasons })
            }
            _ => Ok(corpus),
        }
    }

    /// The prompts after the first `done`, bad lines left out.
    pub fn prompts_after(&self, done: u64) -> Result<Prompts, CorpusError> {
        Ok(Prompts { lines: self.lines()?, skip: done, left: self.prompts.saturating_sub(done) })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn lines(&self) -> Result<Lines, CorpusError> {
        let failed = |source| CorpusError::Read { path: self.path.clone(), source };
        let file = File::open(&self.path).map_err(failed)?;
        // It is read to its end, and more than once: a pipe cannot be, and a device may have none.
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        Ok(Lines { path: self.path.clone(), format: self.format, file: BufReader::new(file), number: 0 })
    }
}

/// Prompts of a corpus, one after another.
pub struct Prompts {
    lines: Lines,
    skip: u64,
    left: u64,
}

impl Iterator for Prompts {
    type Item = Result<Prompt, CorpusError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.left > 0 {
            match self.lines.next_prompt() {
                Err(error) => {
                    self.left = 0;
                    return Some(Err(error));
                }
                Ok(None) => return None,
                Ok(Some(Err(_))) => {}
                Ok(Some(Ok(_))) if self.skip > 0 => self.skip -= 1,
                Ok(Some(Ok(prompt))) => {
                    self.left -= 1;
                    return Some(Ok(prompt));
                }
            }
        }
        None
    }
}

/// Lines of a corpus with their numbers.
struct Lines {
    path: PathBuf,
    format: CorpusFormat,
    file: BufReader<File>,
    number: u64,
}

impl Lines {
    /// The next prompt, or why its line holds none; blank lines are passed over.
    fn next_prompt(&mut self) -> Result<Option<Result<Prompt, String>>, CorpusError> {
        loop {
            let mut bytes = Vec::new();
            let failed = |source| CorpusError::Read { path: self.path.clone(), source };
            let read = (&mut self.file).take(LONGEST_LINE).read_until(b'\n', &mut bytes).map_err(failed)?;
            if read == 0 {
                return Ok(None);
            }
            self.number += 1;
            let line = self.number;
            if read as u64 == LONGEST_LINE && bytes.last() != Some(&b'\n') {
                self.file.skip_until(b'\n').map_err(failed)?;
                return Ok(Some(Err(format!("line {line}: it is longer than {} MiB", LONGEST_LINE >> 20))));
            }
            let text = bytes.strip_prefix(b"\xef\xbb\xbf").filter(|_| line == 1).unwrap_or(&bytes);
            if text.trim_ascii().is_empty() {
                continue;
            }
            let content = line::content(self.format, text);
            return Ok(Some(match content {
                Ok(content) => Ok(Prompt { line, content }),
                Err(why) => Err(format!("line {line}: {why}")),
            }));
        }
    }
}

#[cfg(test)]
mod tests;
