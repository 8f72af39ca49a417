//! The prompts of `--calibration`: one JSON object a line, as `hpp-exec verify --kl` reads them.

use hpp_schema::probe::{Prompt, PromptContent};
use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

/// Largest corpus, bytes. It is held in memory: measuring needs a few thousand positions, not a training set.
const MAX_BYTES: u64 = 64 << 20;
/// Most invalid lines that are listed; the rest are counted.
const MOST_NAMED: usize = 20;

/// Why a corpus cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CorpusError {
    #[error("cannot read the corpus {}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} of the corpus {} cannot be used:{}", lines(*bad), path.display(), named(reasons, *bad))]
    Bad { path: PathBuf, bad: usize, reasons: Vec<String> },
    #[error("the corpus {} has no prompts", path.display())]
    Empty { path: PathBuf },
}

impl CorpusError {
    /// What the user can do.
    pub fn hint(&self) -> &'static str {
        match self {
            CorpusError::Bad { .. } => {
                "correct these lines, or remove them: each line is one JSON object, such as {\"prompt\": \"...\"}"
            }
            CorpusError::Read { .. } | CorpusError::Empty { .. } => {
                "give --calibration a file with one JSON object a line, such as {\"prompt\": \"...\"}; texts like those the model is for"
            }
        }
    }
}

fn lines(bad: usize) -> String {
    if bad == 1 { "1 line".to_owned() } else { format!("{bad} lines") }
}

fn named(reasons: &[String], bad: usize) -> String {
    let mut text: String = reasons.iter().map(|reason| format!("\n  {reason}")).collect();
    if bad > reasons.len() {
        let _ = write!(text, "\n  and {} more", bad - reasons.len());
    }
    text
}

/// Prompts in two halves, so that what is chosen by one is judged by the other.
pub struct Corpus {
    /// Prompts to learn how much each matrix matters.
    pub sensitivity: Vec<Prompt>,
    /// Prompts to choose among proposals; the same one if there is only one.
    pub choice: Vec<Prompt>,
}

impl Corpus {
    /// Whether the same prompt is used for both, because there is only one.
    pub fn is_one_prompt(&self) -> bool {
        matches!((&self.sensitivity[..], &self.choice[..]), ([a], [b]) if a.line == b.line)
    }

    /// Reads a corpus. Refuses it, with all invalid lines, if one line is not a prompt.
    pub fn read(path: &Path) -> Result<Self, CorpusError> {
        let failed = |source| CorpusError::Read { path: path.to_owned(), source };
        let text = hpp_io::read_text(path, MAX_BYTES).map_err(failed)?;
        let mut corpus = Corpus { sensitivity: Vec::new(), choice: Vec::new() };
        let (mut bad, mut reasons) = (0, Vec::new());
        let lines = text.lines().zip(1..).filter(|(text, _)| !text.trim().is_empty());
        for (at, (text, line)) in lines.enumerate() {
            match PromptContent::of_json_line(text) {
                Ok(content) if at % 2 == 0 => corpus.sensitivity.push(Prompt { line, content }),
                Ok(content) => corpus.choice.push(Prompt { line, content }),
                Err(why) => {
                    bad += 1;
                    if reasons.len() < MOST_NAMED {
                        reasons.push(format!("line {line}: {why}"));
                    }
                }
            }
        }
        if bad > 0 {
            return Err(CorpusError::Bad { path: path.to_owned(), bad, reasons });
        }
        if corpus.sensitivity.is_empty() {
            return Err(CorpusError::Empty { path: path.to_owned() });
        }
        if corpus.choice.is_empty() {
            corpus.choice.clone_from(&corpus.sensitivity);
        }
        Ok(corpus)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::probe::ChatTurn;

    fn read(text: &str) -> Result<Corpus, CorpusError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("corpus.jsonl");
        std::fs::write(&path, text).unwrap();
        Corpus::read(&path)
    }

    #[test]
    fn prompts_are_dealt_to_two_halves() {
        let corpus = read("{\"prompt\": \"a\"}\n\n{\"tokens\": [1, 2], \"id\": 7}\n{\"messages\": [{\"role\": \"user\", \"content\": \"c\"}]}\n").unwrap();
        let lines = |prompts: &[Prompt]| prompts.iter().map(|prompt| prompt.line).collect::<Vec<_>>();
        assert_eq!((lines(&corpus.sensitivity), lines(&corpus.choice)), (vec![1, 4], vec![3]));
        let one = read("{\"text\": \"a\"}").unwrap();
        assert_eq!(one.sensitivity, one.choice);
        assert!(one.is_one_prompt() && !corpus.is_one_prompt());
    }

    #[test]
    fn a_chat_is_a_conversation() {
        let corpus = read("{\"prompt\": \"a\", \"system\": \"s\"}\n{\"prompt\": \"a\", \"chat\": false}").unwrap();
        let turn = |role: &str, content: &str| ChatTurn { role: role.to_owned(), content: content.to_owned() };
        assert_eq!(
            corpus.sensitivity[0].content,
            PromptContent::Messages(vec![turn("system", "s"), turn("user", "a")])
        );
        assert_eq!(corpus.choice[0].content, PromptContent::Text("a".to_owned()));
        assert!(read("{\"prompt\": \"a\", \"chat\": \"yes\"}").is_err(), "a wrong type is refused");
    }

    #[test]
    fn bad_lines_are_refused_with_their_number() {
        for line in
            ["[]", "{}", "{\"prompt\": \"\"}", "{\"prompt\": \"a\", \"tokens\": [1]}", "{\"messages\": []}", "x"]
        {
            let error = read(&format!("{{\"prompt\": \"a\"}}\n{line}")).err().map(|error| error.to_string());
            let is_named = |error: &String| error.starts_with("1 line of") && error.contains("\n  line 2: ");
            assert!(error.as_ref().is_some_and(is_named), "{line}: {error:?}");
        }
        let many = read(&"x\n".repeat(22)).err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            many.starts_with("22 lines of") && many.contains("line 20: ") && many.ends_with("and 2 more"),
            "{many}"
        );
        assert!(matches!(read("\n"), Err(CorpusError::Empty { .. })));
    }
}
