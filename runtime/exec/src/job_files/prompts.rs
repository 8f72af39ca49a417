//! The file of prompts: reads one JSON object a line, without holding the file in memory.

use hpp_generate::grammar::{FormatError, ResponseFormat};
use hpp_generate::sampling::{JsonSeed, JsonTopK, SamplingOverrides};
use hpp_generate::text::{ChatMessage, conversation};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

/// Longest line read: more than any context holds.
const MAX_LINE: u64 = 64 << 20;

/// What names a prompt and its answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(untagged, expecting = "`id` must be a text or a whole number")]
pub enum JobId {
    /// A number.
    Number(i64),
    /// A text.
    Text(String),
}

impl fmt::Display for JobId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            JobId::Number(number) => number.fmt(f),
            JobId::Text(text) => write!(f, "{text:?}"),
        }
    }
}

/// A prompt with its settings.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Job {
    /// Names the answer.
    pub id: JobId,
    /// Text to continue.
    #[serde(alias = "text")]
    pub prompt: Option<String>,
    /// Token ids to continue.
    pub tokens: Option<Vec<u32>>,
    /// A conversation for the chat template.
    pub messages: Option<Vec<ChatMessage>>,
    /// See `AnswerArgs::chat`.
    pub chat: Option<bool>,
    /// See `AnswerArgs::system`.
    pub system: Option<String>,
    /// See `AnswerArgs::max_new`.
    #[serde(alias = "max_tokens", alias = "max_completion_tokens")]
    pub max_new: Option<i64>,
    /// See [`SamplingOverrides`]; so are the next five.
    pub temperature: Option<f64>,
    /// See above.
    pub top_k: Option<JsonTopK>,
    /// See above.
    pub top_p: Option<f64>,
    /// See above.
    pub min_p: Option<f64>,
    /// See above.
    pub repetition_penalty: Option<f64>,
    /// See above.
    pub seed: Option<JsonSeed>,
    /// See `AnswerArgs::stop`.
    pub stop: Option<OneOrMany>,
    /// See `AnswerArgs::ignore_eos`.
    pub ignore_eos: Option<bool>,
    /// See [`ResponseFormat`].
    pub response_format: Option<Value>,
}

/// A text or a list of texts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "`stop` must be a text or a list of texts")]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Any number.
    Many(Vec<String>),
}

impl OneOrMany {
    /// The list.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            OneOrMany::One(text) => vec![text],
            OneOrMany::Many(texts) => texts,
        }
    }
}

impl Job {
    /// The sampling settings that the line gives.
    pub fn sampling(&self) -> SamplingOverrides {
        SamplingOverrides {
            temperature: self.temperature,
            top_k: self.top_k.map(JsonTopK::value),
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            seed: self.seed.map(JsonSeed::value),
        }
    }

    /// The form of the answer, if the line gives one.
    pub fn response_format(&self) -> Result<Option<ResponseFormat>, FormatError> {
        self.response_format.as_ref().map(ResponseFormat::from_json).transpose()
    }

    /// What is wrong with the line, if anything.
    fn check(&self) -> Result<(), String> {
        let prompts = [self.prompt.is_some(), self.tokens.is_some(), self.messages.is_some()];
        match prompts.iter().filter(|given| **given).count() {
            1 => {}
            0 => return Err("no prompt: give one of `prompt`, `tokens` and `messages`".into()),
            _ => return Err("give only one of `prompt`, `tokens` and `messages`".into()),
        }
        if self.prompt.as_deref() == Some("") {
            return Err("`prompt` is empty".into());
        }
        if self.tokens.as_ref().is_some_and(Vec::is_empty) {
            return Err("`tokens` is empty".into());
        }
        self.messages.as_deref().map(conversation).transpose().map_err(|error| error.why)?;
        if self.prompt.is_none() && (self.chat == Some(true) || self.system.is_some()) {
            return Err("`chat` and `system` need `prompt`".into());
        }
        if self.system.is_some() && self.chat == Some(false) {
            return Err("`system` needs `chat`".into());
        }
        if self.max_new.is_some_and(|tokens| tokens < -1) {
            return Err("`max_new` must be a number of tokens, or -1 for no limit".into());
        }
        if self.stop.clone().is_some_and(|stop| stop.into_vec().iter().any(String::is_empty)) {
            return Err("a text of `stop` is empty".into());
        }
        self.response_format().map_err(|error| error.to_string())?;
        self.sampling().check().map_err(|(name, expected)| format!("`{name}` must be {expected}"))
    }
}

/// A line that is no prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct BadLine {
    /// Its id; `None` if it has none, or if a line before has it.
    pub id: Option<JobId>,
    /// Its number, from 1 on.
    pub line: u64,
    /// What is wrong with it.
    pub error: String,
}

/// Reads the prompts of a file and skips those that are answered.
pub struct PromptReader {
    path: PathBuf,
    lines: BufReader<File>,
    line: u64,
    /// Ids of the lines so far.
    ids: HashSet<JobId>,
    answered: Answered,
    /// Whether a line without an id has its number as id.
    numbers_lines: bool,
    /// A line that was read ahead.
    ahead: Option<Result<Job, BadLine>>,
}

/// What an earlier run has answered.
#[derive(Debug, Default, PartialEq)]
pub struct Answered {
    /// Ids of answered lines.
    pub ids: HashSet<JobId>,
    /// Numbers of answered lines that are no prompts and have no id.
    pub lines: HashSet<u64>,
    /// How many of the answers are errors.
    pub errors: usize,
}

impl Answered {
    /// Number of answers in all.
    pub fn count(&self) -> usize {
        self.ids.len() + self.lines.len()
    }
}

impl PromptReader {
    /// Refuses anything but a regular file: prompts are read twice, and again by a run that continues an interrupted one.
    pub fn check(path: &Path) -> io::Result<()> {
        if path == Path::new("-") {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "prompts are read twice, and again by a run that continues, so standard input will not do: save them in a file first",
            ));
        }
        match File::open(path)?.metadata()?.is_file() {
            true => Ok(()),
            false => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is not a regular file, and prompts are read twice: save them in a file first",
            )),
        }
    }

    /// Opens the file. Also returns its number of lines that are not blank.
    pub fn open(path: &Path, answered: Answered) -> io::Result<(Self, usize)> {
        Self::check(path)?;
        let mut lines = BufReader::new(File::open(path)?);
        let (mut total, mut line) = (0, Vec::new());
        while read_line(&mut lines, &mut line)?.is_some() {
            total += usize::from(!is_blank(&line));
        }
        let lines = BufReader::new(File::open(path)?);
        let (path, ids) = (path.to_owned(), HashSet::new());
        Ok((Self { path, lines, line: 0, ids, answered, numbers_lines: false, ahead: None }, total))
    }

    /// Gives lines without an id their number as id, for callers that write no answers; two lines may then have the same id.
    pub fn with_numbered_lines(self) -> Self {
        Self { numbers_lines: true, ..self }
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether each prompt has an answer.
    pub fn is_done(&mut self) -> io::Result<bool> {
        if self.ahead.is_none() {
            self.ahead = self.next_job()?;
        }
        Ok(self.ahead.is_none())
    }

    /// The next prompt without an answer. `None` at the end.
    pub fn next_job(&mut self) -> io::Result<Option<Result<Job, BadLine>>> {
        if let Some(job) = self.ahead.take() {
            return Ok(Some(job));
        }
        let mut text = Vec::new();
        loop {
            let Some(is_whole) = read_line(&mut self.lines, &mut text)? else { return Ok(None) };
            self.line += 1;
            if is_blank(&text) {
                continue;
            }
            let job = match is_whole {
                true => self.parse(&text),
                false => Err(self.bad(None, format!("the line is longer than {} MiB", MAX_LINE >> 20))),
            };
            let is_answered = match &job {
                Ok(job) => self.answered.ids.contains(&job.id),
                Err(BadLine { id: Some(id), .. }) => self.answered.ids.contains(id),
                Err(BadLine { line, .. }) => self.answered.lines.contains(line),
            };
            if !is_answered {
                return Ok(Some(job));
            }
        }
    }

    fn parse(&mut self, text: &[u8]) -> Result<Job, BadLine> {
        // Editors on Windows begin a file with a byte-order mark.
        let text = if self.line == 1 { text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text) } else { text };
        let text = text.trim_ascii();
        if !text.starts_with(b"{") {
            return Err(self.bad(None, "not a job: a line is one JSON object, {...}".into()));
        }
        let job = match read_job(text, self.numbers_lines.then_some(self.line)) {
            Ok(job) => job,
            Err(why) => {
                let id = serde_json::from_slice::<OnlyId>(text).ok().map(|line| line.id);
                // The error is written as the answer of this id, so a later prompt with the same id is a duplicate.
                let id = id.filter(|id| self.ids.insert(id.clone()));
                return Err(self.bad(id, why));
            }
        };
        if !self.numbers_lines && !self.ids.insert(job.id.clone()) {
            // With the id, the error would be a second answer of the line before.
            return Err(self.bad(None, format!("another line before has the id {}", job.id)));
        }
        match job.check() {
            Ok(()) => Ok(job),
            Err(error) => Err(self.bad(Some(job.id), error)),
        }
    }

    fn bad(&self, id: Option<JobId>, error: String) -> BadLine {
        BadLine { id, line: self.line, error }
    }
}

/// Reads the job of a line. `id` is used if the line has none.
///
/// # Errors
/// Why the line is no job: names the field that is wrong, in the terms of the file's format.
fn read_job(text: &[u8], id: Option<u64>) -> Result<Job, String> {
    let not_json = |error: &serde_json::Error| hpp_io::json_line_mistake(error);
    let read = match id {
        None => {
            let mut line = serde_json::Deserializer::from_slice(text);
            let job = serde_path_to_error::deserialize(&mut line);
            if let (Ok(_), Err(error)) = (&job, line.end()) {
                return Err(not_json(&error).unwrap_or_else(|| plain(&error)));
            }
            job
        }
        Some(id) => {
            let mut job: serde_json::Map<String, Value> =
                serde_json::from_slice(text).map_err(|error| not_json(&error).unwrap_or_else(|| plain(&error)))?;
            job.entry("id").or_insert_with(|| id.into());
            serde_path_to_error::deserialize(Value::from(job))
        }
    };
    read.map_err(|error| match not_json(error.inner()) {
        Some(mistake) => mistake,
        None => {
            let (path, what) = (error.path().to_string(), plain(error.inner()));
            // The error itself names a field that is unknown or given twice.
            let names_field = what.contains(&format!("`{path}`"));
            let place = if path == "." || names_field { String::new() } else { format!("`{path}`: ") };
            format!("not a job: {place}{what}")
        }
    })
}

/// A type error in the terms of the file's format, without Rust's names of types.
fn plain(error: &serde_json::Error) -> String {
    // serde_json counts lines within one JSON text, which is always line 1 here: the position is removed.
    let text = error.to_string();
    let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
    let types = [("expected u32", "expected a whole number"), ("expected u64", "expected a whole number")];
    let types = types.into_iter().chain([
        ("expected usize", "expected a whole number from 0 on"),
        ("expected i64", "expected a whole number"),
        ("duplicate field ", "two values for "),
        ("expected f32", "expected a number"),
        ("expected f64", "expected a number"),
        ("expected a sequence", "expected a list"),
        ("expected a boolean", "expected true or false"),
        ("missing field ", "there is no "),
        ("unknown field ", "no such field: "),
        ("invalid type: string ", "wrong kind of value: the string "),
        ("invalid type: map", "wrong kind of value: an object"),
        ("invalid type: sequence", "wrong kind of value: a list"),
        ("invalid type: ", "wrong kind of value: "),
        ("invalid value: ", "wrong value: "),
    ]);
    types.fold(what.to_owned(), |text, (rust, plain)| text.replace(rust, plain))
}

/// The id of a line that is otherwise wrong.
#[derive(Deserialize)]
struct OnlyId {
    id: JobId,
}

/// Reads a line without its line break. `None` at the end of the file. False if the line is too long: then `line` holds its start only.
fn read_line(lines: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<bool>> {
    line.clear();
    if lines.by_ref().take(MAX_LINE).read_until(b'\n', line)? == 0 {
        return Ok(None);
    }
    let is_whole = line.ends_with(b"\n") || (line.len() as u64) < MAX_LINE;
    if !is_whole {
        lines.skip_until(b'\n')?;
    }
    Ok(Some(is_whole))
}

fn is_blank(line: &[u8]) -> bool {
    line.iter().all(u8::is_ascii_whitespace)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, answered: Answered) -> (usize, Vec<Result<Job, BadLine>>) {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let (mut prompts, total) = PromptReader::open(file.path(), answered).unwrap();
        let mut jobs = vec![];
        while let Some(job) = prompts.next_job().unwrap() {
            jobs.push(job);
        }
        (total, jobs)
    }

    #[test]
    fn each_line_is_a_prompt_or_says_what_is_wrong_with_it() {
        let text = r#"{"id": 1, "text": "a", "max_new": -1, "stop": "x", "temperature": 0.5}

            {"id": "b", "tokens": [1, 2], "stop": ["x", "y"]}
            {"id": 1, "prompt": "again"}
            {"id": 2}
            {"prompt": "no id"}
            {"id": 3, "prompt": "x", "tokens": [1]}
            {"id": 4, "prompt": "x", "top_p": 2}
            {"id": 5, "prompt": "x", "colour": "red"}
            not json
            {"id": 6, "messages": [{"role": "developer", "content": [{"type": "text", "text": "hi"}]}], "max_tokens": 3}
            {"id": 7, "messages": []}
            {"id": 8, "prompt": ""}
            {"id": 9, "prompt": "untermin
            {"id": 9, "prompt" "x"}
            {"id": 9, "prompt": "x", "max_new": 1, "max_tokens": 2}
            [1, 2]
            {"id": 10, "prompt": "x", "stop": ["x", ""]}
            {"id": 11, "messages": [{"role": "user", "contents": "x"}]}
            {"id": 12, "prompt": "x", "top_k": "a"}
            {"id": 16, "messages": [{"role": "user", "content": "a"}, {"content": "a"}]}
            {"id": 13, "messages": [{"role": "user", "content": 5}]}
            {"id": 14, "tokens": []}
            {"id": 15, "prompt": "x"} x"#;
        let (total, jobs) = read(text, Answered::default());
        assert_eq!((total, jobs.len()), (23, 23));
        let good: Vec<&JobId> = jobs.iter().flatten().map(|job| &job.id).collect();
        assert_eq!(good, [&JobId::Number(1), &JobId::Text("b".into()), &JobId::Number(6)]);
        assert_eq!(jobs[0].as_ref().unwrap().prompt.as_deref(), Some("a"), "`text` is another name of `prompt`");
        let bad: Vec<&BadLine> = jobs.iter().filter_map(|job| job.as_ref().err()).collect();
        let says = [
            "another line",
            "no prompt",
            "not a job: there is no `id`",
            "only one",
            "`top_p` must be",
            "no such field: `colour`, expected one of",
            "a line is one JSON object",
            "`messages` is empty",
            "`prompt` is empty",
            "not JSON: it ends too early",
            "not JSON: a mistake at character 20",
            "two values for `max_new`",
            "a line is one JSON object",
            "a text of `stop` is empty",
            "`messages[0].content`: the message has none",
            "not a job: `top_k`: wrong kind of value: the string \"a\", expected a whole number",
            "not a job: `messages[1]`: there is no `role`",
            "not a job: `messages[0].content`: it must be a text or a list of parts",
            "`tokens` is empty",
            "not JSON: a mistake at character",
        ];
        let lines: Vec<u64> = bad.iter().map(|bad| bad.line).collect();
        assert_eq!(lines, [4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24]);
        for (bad, says) in bad.iter().zip(says) {
            assert!(bad.error.contains(says), "{bad:?}");
        }
        assert_eq!((&bad[4].id, &bad[2].id), (&Some(JobId::Number(4)), &None));
    }

    #[test]
    fn the_id_of_a_line_that_is_no_prompt_is_taken_too() {
        let text = "{\"id\": 1, \"prompt\": 3}\n{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 2, \"prompt\": \"a\"}\n\
                    {\"id\": 2, \"prompt\": 3}\n";
        let (_, jobs) = read(text, Answered::default());
        let errors: Vec<Option<&str>> = jobs.iter().map(|job| job.as_ref().err().map(|bad| &*bad.error)).collect();
        assert!(errors[0].is_some_and(|error| error.contains("wrong kind of value")), "{errors:?}");
        assert!(errors[1].is_some_and(|error| error.contains("another line before has the id 1")), "{errors:?}");
        assert_eq!(errors[2], None);
        // Its own mistake says more than its id.
        assert!(errors[3].is_some_and(|error| error.contains("wrong kind of value")), "{errors:?}");
    }

    #[test]
    fn ids_need_not_differ_where_lines_are_numbered() {
        let text = "{\"prompt\": \"a\"}\n{\"id\": 1, \"prompt\": \"b\"}\n{\"id\": 1, \"prompt\": \"c\"}\n";
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let mut prompts = PromptReader::open(file.path(), Answered::default()).unwrap().0.with_numbered_lines();
        let jobs: Vec<_> = std::iter::from_fn(|| prompts.next_job().unwrap()).collect();
        assert!(jobs.len() == 3 && jobs.iter().all(Result::is_ok));
    }

    #[test]
    fn a_byte_order_mark_begins_a_file_and_no_other_line() {
        let (_, jobs) =
            read("\u{feff}{\"id\": 1, \"prompt\": \"a\"}\n\u{feff}{\"id\": 2, \"prompt\": \"a\"}", Answered::default());
        assert!(jobs[0].is_ok() && jobs[1].is_err());
    }

    #[test]
    fn answered_prompts_and_lines_are_left_out() {
        let text =
            "{\"id\": 1, \"prompt\": \"a\"}\nbroken\n{\"id\": 2, \"prompt\": \"a\"}\n{\"id\": 1, \"prompt\": \"b\"}\n";
        let answered = Answered { ids: HashSet::from([JobId::Number(1)]), lines: HashSet::from([2]), errors: 1 };
        let (total, jobs) = read(text, answered);
        assert_eq!(total, 4);
        assert_eq!(jobs.len(), 2);
        assert_eq!(jobs[0].as_ref().unwrap().id, JobId::Number(2));
        assert_eq!(jobs[1].as_ref().unwrap_err().line, 4, "a repeated id has an answer of its own");
    }

    #[test]
    fn a_corrected_line_keeps_the_error_of_its_id() {
        let answered = Answered { ids: HashSet::from([JobId::Number(1)]), lines: HashSet::new(), errors: 1 };
        for text in [
            "{\"id\": 1, \"prompt\": \"a\"}",
            "{\"id\": 1, \"prompt\": 3}",
            "{\"id\": 1, \"prompt\": \"a\", \"top_p\": 2}",
        ] {
            let answered = Answered { ids: answered.ids.clone(), ..Answered::default() };
            assert!(read(text, answered).1.is_empty(), "{text}");
        }
    }

    /// Otherwise a continued run would take the line before for answered.
    #[test]
    fn the_error_of_a_repeated_id_has_no_id() {
        for second in ["{\"id\": 1, \"prompt\": \"b\"}", "{\"id\": 1, \"prompt\": 3}"] {
            let (_, jobs) = read(&format!("{{\"id\": 1, \"prompt\": \"a\"}}\n{second}"), Answered::default());
            assert_eq!(jobs[1].as_ref().unwrap_err().id, None);
        }
    }

    #[test]
    fn reading_ahead_loses_no_line() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "{\"id\": 1, \"prompt\": \"a\"}\n{\"id\": 2, \"prompt\": \"a\"}\n").unwrap();
        let answered = Answered { ids: HashSet::from([JobId::Number(1)]), lines: HashSet::from([7, 8]), errors: 2 };
        let (mut prompts, _) = PromptReader::open(file.path(), answered).unwrap();
        assert!(!prompts.is_done().unwrap() && !prompts.is_done().unwrap());
        assert_eq!(prompts.next_job().unwrap().unwrap().unwrap().id, JobId::Number(2));
        assert!(prompts.is_done().unwrap());
    }

    #[test]
    fn a_line_without_end_is_a_line_and_a_long_one_is_cut() {
        assert_eq!(read("{\"id\": 1, \"prompt\": \"a\"}", Answered::default()).1.len(), 1);
        let mut text = vec![b'x'; MAX_LINE as usize + 9];
        text.extend_from_slice(b"\nnext");
        let (mut reader, mut line) = (&text[..], vec![]);
        assert_eq!(read_line(&mut reader, &mut line).unwrap(), Some(false));
        assert_eq!(read_line(&mut reader, &mut line).unwrap(), Some(true));
        assert_eq!(line, b"next");
    }
}
