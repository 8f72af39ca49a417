//! The corpus: one prompt per line, read as a stream, so that memory does not grow with its size.
//!
//! It is read twice: once before measuring, to report every invalid line, and once while its prompts run.

use hpp_schema::probe::{Prompt, PromptContent};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Most invalid lines that are listed; the rest are counted.
pub const MOST_NAMED: usize = 20;
/// Longest valid line, bytes.
const LONGEST_LINE: u64 = 16 << 20;

/// The file format of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CorpusFormat {
    /// One JSON object per line: `{"prompt": ...}`, `{"text": ...}`, `{"messages": [...]}` or `{"tokens": [...]}`.
    JsonLines,
    /// One prompt per line.
    Text,
}

/// Why a corpus cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CorpusError {
    #[error("cannot tell the format of {}", path.display())]
    Format { path: PathBuf },
    #[error("cannot read the corpus {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("the corpus {} has no prompts", path.display())]
    Empty { path: PathBuf },
    #[error("{} of the corpus {} cannot be used:{}", lines(*bad), path.display(), named(reasons, *bad))]
    Bad { path: PathBuf, bad: u64, reasons: Vec<String> },
    #[error("no line of the corpus {} can be used:{}", path.display(), named(reasons, *bad))]
    AllBad { path: PathBuf, bad: u64, reasons: Vec<String> },
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
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            CorpusError::Format { .. } => {
                Some("name it .jsonl for one JSON object per line, .txt for one prompt per line")
            }
            CorpusError::Empty { .. } => Some("write at least one prompt into it, or leave --prompts out"),
            CorpusError::AllBad { .. } => Some("correct these lines"),
            CorpusError::Bad { .. } => Some("correct these lines, or skip them with --skip-bad"),
            CorpusError::Read { source, .. } if source.kind() == io::ErrorKind::InvalidInput => {
                Some("save the prompts in a file: a corpus is read more than once")
            }
            CorpusError::Read { .. } => None,
        }
    }
}

/// A corpus after the first scan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Corpus {
    path: PathBuf,
    format: CorpusFormat,
    /// Number of prompts, at most the requested number.
    pub prompts: u64,
    /// Hash of these prompts.
    pub prompts_hash: String,
    /// Whether more prompts follow them.
    pub has_more: bool,
    /// Number of invalid lines among them.
    pub bad: u64,
    /// The first invalid lines, with number and reason.
    pub reasons: Vec<String>,
}

impl Corpus {
    /// Reads a corpus up to `most` prompts. Fails with all invalid lines unless `skip_bad`.
    pub fn scan(path: &Path, most: Option<u64>, skip_bad: bool) -> Result<Corpus, CorpusError> {
        let format = match path.extension().and_then(|extension| extension.to_str()) {
            Some("jsonl" | "ndjson") => CorpusFormat::JsonLines,
            Some("txt") => CorpusFormat::Text,
            _ => return Err(CorpusError::Format { path: path.to_owned() }),
        };
        let mut corpus = Corpus {
            path: path.to_owned(),
            format,
            prompts: 0,
            prompts_hash: String::new(),
            has_more: false,
            bad: 0,
            reasons: Vec::new(),
        };
        let (mut lines, mut hash) = (corpus.lines()?, PromptsHash::default());
        while most.is_none_or(|most| corpus.prompts < most) {
            match lines.next_prompt()? {
                None => break,
                Some(Ok(prompt)) => {
                    corpus.prompts += 1;
                    hash.add(&prompt.content);
                }
                Some(Err(reason)) => {
                    corpus.bad += 1;
                    if corpus.reasons.len() < MOST_NAMED {
                        corpus.reasons.push(reason);
                    }
                }
            }
        }
        corpus.prompts_hash = hash.finish();
        corpus.has_more = most == Some(corpus.prompts) && lines.next_valid()?.is_some();
        match (corpus.bad, corpus.prompts) {
            (0, 0) => Err(CorpusError::Empty { path: path.to_owned() }),
            (bad, 0) => Err(CorpusError::AllBad { path: path.to_owned(), bad, reasons: corpus.reasons }),
            (bad, _) if bad > 0 && !skip_bad => {
                Err(CorpusError::Bad { path: path.to_owned(), bad, reasons: corpus.reasons })
            }
            _ => Ok(corpus),
        }
    }

    /// The prompts after the first `done`, without invalid lines.
    pub fn prompts_after(&self, done: u64) -> Result<CorpusPrompts, CorpusError> {
        Ok(CorpusPrompts { lines: self.lines()?, skip: done, left: self.prompts.saturating_sub(done) })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn lines(&self) -> Result<Lines, CorpusError> {
        let failed = |source| CorpusError::Read { path: self.path.clone(), source };
        let file = File::open(&self.path).map_err(failed)?;
        // A corpus is read more than once and to its end, which pipes and devices do not allow.
        if !file.metadata().map_err(failed)?.is_file() {
            return Err(failed(io::Error::new(io::ErrorKind::InvalidInput, "it is not a regular file")));
        }
        Ok(Lines { path: self.path.clone(), format: self.format, file: BufReader::new(file), number: 0 })
    }
}

/// The prompt of a line, or the reason why it is invalid.
fn content(format: CorpusFormat, line: &[u8]) -> Result<PromptContent, String> {
    let text = std::str::from_utf8(line).map_err(|e| format!("it is not UTF-8 at byte {}", e.valid_up_to() + 1))?;
    match format {
        CorpusFormat::Text => Ok(PromptContent::Text(text.trim_end_matches(['\r', '\n']).to_owned())),
        CorpusFormat::JsonLines => PromptContent::of_json_line(text.trim()),
    }
}

/// The hash of prompts in order: the same wherever a corpus is divided or however its lines are written.
#[derive(Default)]
pub struct PromptsHash(blake3::Hasher);

impl PromptsHash {
    /// Adds the next prompt.
    pub fn add(&mut self, content: &PromptContent) {
        let text = serde_json::to_vec(content).unwrap_or_default();
        self.0.update(&(text.len() as u64).to_le_bytes()).update(&text);
    }

    /// BLAKE3, in hexadecimal.
    pub fn finish(&self) -> String {
        self.0.finalize().to_hex().to_string()
    }
}

/// Iterator over the prompts of a corpus.
pub struct CorpusPrompts {
    lines: Lines,
    skip: u64,
    left: u64,
}

impl Iterator for CorpusPrompts {
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

/// Reader of lines, with line numbers.
struct Lines {
    path: PathBuf,
    format: CorpusFormat,
    file: BufReader<File>,
    number: u64,
}

impl Lines {
    /// The next prompt; skips invalid lines.
    fn next_valid(&mut self) -> Result<Option<Prompt>, CorpusError> {
        loop {
            match self.next_prompt()? {
                None => return Ok(None),
                Some(Ok(prompt)) => return Ok(Some(prompt)),
                Some(Err(_)) => {}
            }
        }
    }

    /// The next prompt, or the reason why its line is invalid; skips blank lines.
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
            return Ok(Some(match content(self.format, text) {
                Ok(content) => Ok(Prompt { line, content }),
                Err(why) => Err(format!("line {line}: {why}")),
            }));
        }
    }
}

#[cfg(test)]
mod tests;
