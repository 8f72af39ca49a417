//! The file of answers: one JSON object per line, written as soon as an answer is known. A prompt with a line here counts as answered.

use super::prompts::{Answered, JobId};
use hpp_generate::FinishReason;
use serde::{Deserialize, Serialize};
use std::fs::{File, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// How each answer begins.
const START: &[u8] = b"{\"id\":";

/// An answer.
#[derive(Debug, Serialize)]
pub struct Answer<'a> {
    /// The prompt's id; null for a line without one.
    pub id: Option<&'a JobId>,
    /// The number of the line in the file of prompts, if the line is no prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub line: Option<u64>,
    /// Number of tokens in the prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_tokens: Option<usize>,
    /// The tokens generated, the one that ended the text included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<&'a [u32]>,
    /// The text generated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<&'a str>,
    /// Why the text ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finish: Option<FinishReason>,
    /// The seed that reproduces the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
    /// Why there is no text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<&'a str>,
}

impl<'a> Answer<'a> {
    /// An answer that consists of an error.
    pub fn error(id: Option<&'a JobId>, error: &'a str) -> Self {
        let (line, prompt_tokens, tokens, text, finish, seed) = (None, None, None, None, None, None);
        Self { id, line, prompt_tokens, tokens, text, finish, seed, error: Some(error) }
    }
}

/// The fields of an answer that a resumed run reads.
#[derive(Deserialize)]
struct Written {
    id: Option<JobId>,
    line: Option<u64>,
    finish: Option<String>,
    error: Option<String>,
}

/// Why answers cannot be written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum AnswersError {
    #[error("cannot write answers to {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("another process writes answers to {}", path.display())]
    Locked { path: PathBuf },
    #[error("line {line} of {} is not an answer", path.display())]
    Foreign { path: PathBuf, line: u64 },
    #[error("the prompts and the answers are the same file, {}", path.display())]
    SameFile { path: PathBuf },
    #[error("{} is not a regular file", path.display())]
    NotAFile { path: PathBuf },
    #[error("answers go to a file, not to standard output")]
    Stdout,
}

impl AnswersError {
    /// What the user can do next.
    pub fn hint(&self) -> &'static str {
        match self {
            AnswersError::Write { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                "the directory does not exist: create it, or correct --out"
            }
            AnswersError::Write { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => {
                "you may not write there: give another --out, or change the permissions"
            }
            AnswersError::Write { source, .. } if hpp_io::is_full_disk(source) => {
                "make room, and run the same command again: it continues after the answers that are there"
            }
            AnswersError::Write { .. } => {
                "mend that or give another --out; the same command continues after the answers that are there"
            }
            AnswersError::Locked { .. } => "wait until it ends, or give another --out",
            AnswersError::Foreign { .. } => {
                "a file of answers is continued, never overwritten: give another --out, or move the file away"
            }
            AnswersError::SameFile { .. } => "give another --out",
            AnswersError::NotAFile { .. } | AnswersError::Stdout => {
                "answers are read again when a run is continued: give --out a file, and follow it with `tail -f` if that is what you want"
            }
        }
    }
}

/// The file, locked for this process.
#[derive(Debug)]
pub struct Answers {
    file: File,
    path: PathBuf,
    /// Bytes of complete answers.
    complete: u64,
}

impl Answers {
    /// Opens or creates the file, and reads which prompts are answered. Removes an answer at the end that is incomplete.
    pub fn open(path: &Path, prompts: &Path) -> Result<(Self, Answered), AnswersError> {
        let failed = |source| AnswersError::Write { path: path.to_owned(), source };
        if path == Path::new("-") {
            return Err(AnswersError::Stdout);
        }
        if hpp_io::is_same_file(path, prompts) {
            return Err(AnswersError::SameFile { path: path.to_owned() });
        }
        // Reading from a pipe to find earlier answers would wait forever.
        if path.metadata().is_ok_and(|metadata| !metadata.is_file()) {
            return Err(AnswersError::NotAFile { path: path.to_owned() });
        }
        let file = File::options().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(AnswersError::Locked { path: path.to_owned() }),
            Err(TryLockError::Error(source)) => return Err(failed(source)),
        }
        let mut answers = Self { file, path: path.to_owned(), complete: 0 };
        let answered = answers.read()?;
        answers.drop_incomplete().map_err(failed)?;
        Ok((answers, answered))
    }

    /// Appends an answer.
    pub fn write(&mut self, answer: &Answer<'_>) -> Result<(), AnswersError> {
        let written = serde_json::to_vec(answer).map_err(io::Error::other).and_then(|mut line| {
            line.push(b'\n');
            self.file.write_all(&line)?;
            self.complete += line.len() as u64;
            Ok(())
        });
        written.map_err(|source| {
            // If the incomplete answer cannot be removed here, the next run removes it.
            let _ = self.drop_incomplete();
            AnswersError::Write { path: self.path.clone(), source }
        })
    }

    /// Waits until all answers are on disk.
    pub fn sync(&self) -> Result<(), AnswersError> {
        self.file.sync_data().map_err(|source| AnswersError::Write { path: self.path.clone(), source })
    }

    fn read(&mut self) -> Result<Answered, AnswersError> {
        let foreign = |line| AnswersError::Foreign { path: self.path.clone(), line };
        let mut answered = Answered::default();
        let (mut lines, mut text) = (BufReader::new(&self.file), Vec::new());
        for number in 1.. {
            text.clear();
            let bytes = lines.read_until(b'\n', &mut text);
            let bytes = bytes.map_err(|source| AnswersError::Write { path: self.path.clone(), source })? as u64;
            if bytes == 0 {
                break;
            }
            if !text.ends_with(b"\n") {
                // The last line is incomplete. It is removed only if it is an answer: another file must not be damaged.
                let is_answer = text.starts_with(START) || START.starts_with(&text);
                return if is_answer { Ok(answered) } else { Err(foreign(number)) };
            }
            let written: Option<Written> = serde_json::from_slice(&text).ok();
            let written = written.filter(|written| written.finish.is_some() || written.error.is_some());
            let written = written.ok_or_else(|| foreign(number))?;
            answered.errors += usize::from(written.error.is_some());
            match written {
                // Earlier versions wrote the error of a repeated id with that id, which does not answer the line before.
                Written { line: Some(line), error: Some(error), .. } if error == "another line before has this id" => {
                    _ = answered.lines.insert(line);
                }
                Written { id: Some(id), .. } => _ = answered.ids.insert(id),
                Written { line: Some(line), .. } => _ = answered.lines.insert(line),
                Written { .. } => return Err(foreign(number)),
            }
            self.complete += bytes;
        }
        Ok(answered)
    }

    fn drop_incomplete(&mut self) -> io::Result<()> {
        self.file.set_len(self.complete)?;
        self.file.seek(SeekFrom::Start(self.complete)).map(|_| ())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(id: i64) -> (JobId, &'static str) {
        (JobId::Number(id), "why")
    }

    #[test]
    fn answers_are_continued_and_a_torn_one_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("answers.jsonl");
        let prompts = dir.path().join("prompts.jsonl");
        let (mut answers, answered) = Answers::open(&path, &prompts).unwrap();
        assert_eq!(answered, Answered::default());
        // The second is the error of a line that is no prompt.
        for (line, (id, why)) in [(None, error(1)), (Some(3), error(2))] {
            answers.write(&Answer { line, ..Answer::error(Some(&id), why) }).unwrap();
        }
        answers.write(&Answer { line: Some(7), ..Answer::error(None, "no id") }).unwrap();
        assert!(matches!(Answers::open(&path, &prompts), Err(AnswersError::Locked { .. })));
        drop(answers);
        let whole = std::fs::read(&path).unwrap();
        let last = whole.len() - 1 - whole[..whole.len() - 1].iter().rev().position(|byte| *byte == b'\n').unwrap();
        for cut in 1..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let (mut answers, answered) = Answers::open(&path, &prompts).unwrap();
            assert_eq!(answered.lines.len(), usize::from(cut == whole.len()), "{cut}");
            assert!(answered.ids.len() == 2 || cut < last, "{cut}");
            let id = JobId::Text("new".into());
            answers.write(&Answer::error(Some(&id), "why")).unwrap();
            drop(answers);
            let (_, again) = Answers::open(&path, &prompts).unwrap();
            assert_eq!(again.count(), answered.count() + 1, "{cut}");
        }
    }

    #[test]
    fn a_file_that_holds_something_else_is_not_touched() {
        let dir = tempfile::tempdir().unwrap();
        let (path, prompts) = (dir.path().join("a"), dir.path().join("p"));
        for text in ["my notes", "my notes\n", "{\"id\": 1, \"prompt\": \"x\"}\n", "{\"id\":1,\"error\":\"x\"}\nnotes"]
        {
            std::fs::write(&path, text).unwrap();
            let error = Answers::open(&path, &prompts).unwrap_err();
            assert!(matches!(error, AnswersError::Foreign { .. }), "{text}: {error}");
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        assert!(matches!(Answers::open(&path, &path).unwrap_err(), AnswersError::SameFile { .. }));
        assert!(matches!(Answers::open(Path::new("-"), &prompts).unwrap_err(), AnswersError::Stdout));
    }
}
