//! Finds calls in streamed answers, and holds text back while it may be the start of one.
//!
//! Invariant: the parts do not depend on where the stream is cut into pieces. What looks like a call and is none stays text.

use super::ToolFormat;
use super::json_end::JsonEnd;
use serde::Deserialize;
use serde_json::value::RawValue;

/// A part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text for the user.
    Text(String),
    /// A call.
    Call {
        /// The function's name.
        name: String,
        /// The arguments, as JSON.
        arguments: String,
    },
}

/// Finds the calls in one answer.
#[derive(Clone, Debug)]
pub struct ToolCallParser {
    format: ToolFormat,
    /// The functions that exist. Without a marker, JSON is a call only if it names one of these.
    names: Vec<String>,
    state: State,
    /// Text that was not released yet.
    held: String,
    /// Whether anything was released.
    has_parts: bool,
    calls: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// Outside of calls.
    Text,
    /// After a marker, in front of JSON. `marked` is the marker with the white space in front of it, or nothing where a call has none.
    Opened { marked: String },
    /// Within JSON, which begins at byte `start` of the held text; `read` bytes of that were read.
    Json { marked: String, start: usize, read: usize, end: JsonEnd },
    /// After a call.
    Closed,
}

/// A call as models write it.
#[derive(Deserialize)]
struct Written {
    name: String,
    #[serde(alias = "parameters")]
    arguments: Option<Box<RawValue>>,
}

impl ToolCallParser {
    /// A parser at the start of an answer. `names` are the names of the functions that exist.
    pub fn new(format: ToolFormat, names: Vec<String>) -> Self {
        Self { format, names, state: State::Text, held: String::new(), has_parts: false, calls: 0 }
    }

    /// The number of calls so far.
    pub fn calls(&self) -> usize {
        self.calls
    }

    /// Adds text. Returns the parts that are complete.
    pub fn push(&mut self, piece: &str) -> Vec<AnswerPart> {
        self.held.push_str(piece);
        let mut parts = Vec::new();
        while self.step(&mut parts) {}
        self.has_parts |= !parts.is_empty();
        parts
    }

    /// Ends the answer. Returns what was held back.
    pub fn finish(&mut self) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let rest = std::mem::take(&mut self.held);
        match std::mem::replace(&mut self.state, State::Text) {
            State::Text if self.calls > 0 && rest.trim().is_empty() => {}
            State::Text => text(&mut parts, &rest),
            State::Opened { marked } | State::Json { marked, .. } => text(&mut parts, &format!("{marked}{rest}")),
            State::Closed => {}
        }
        parts
    }

    /// One step. False if it needs more text.
    fn step(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        match self.state.clone() {
            State::Text => self.find_marker(parts),
            State::Opened { marked } => self.find_json(marked, parts),
            State::Json { marked, start, read, mut end } => {
                let Some(length) = end.push(&self.held[start + read..]) else {
                    let read = self.held.len() - start;
                    self.state = State::Json { marked, start, read, end };
                    return false;
                };
                self.take_call(&marked, start, start + read + length, parts);
                true
            }
            State::Closed => self.after_call(),
        }
    }

    fn find_marker(&mut self, parts: &mut Vec<AnswerPart>) -> bool {
        let marker = self.format.open_marker();
        if let Some(at) = self.held.find(marker) {
            let before = self.held[..at].trim_end().len();
            text(parts, &self.held[..before]);
            let marked = self.held.drain(..at + marker.len()).collect::<String>().split_off(before);
            self.state = State::Opened { marked };
            return true;
        }
        let is_start = !self.has_parts && parts.is_empty();
        if is_start && self.format == ToolFormat::Llama && self.held.trim_start().starts_with('{') {
            self.state = State::Opened { marked: String::new() };
            return true;
        }
        // White space in front of a call is not text.
        let longest = marker.len().min(self.held.len());
        let starts = (1..=longest).rev().find(|n| self.held.ends_with(&marker[..*n])).unwrap_or(0);
        let keep = self.held[..self.held.len() - starts].trim_end().len();
        text(parts, &self.held[..keep]);
        self.held.drain(..keep);
        false
    }

    fn find_json(&mut self, marked: String, parts: &mut Vec<AnswerPart>) -> bool {
        let is_named = self.format == ToolFormat::MistralArgs || self.format == ToolFormat::Mistral;
        let blank = self.held.len() - self.held.trim_start().len();
        let start = match self.held[blank..].chars().next() {
            None => return false,
            Some('{' | '[') => Some(blank),
            // A name comes first.
            Some(_) if is_named => match self.held.find('{') {
                Some(at) => Some(at),
                None => return false,
            },
            Some(_) => None,
        };
        match start {
            Some(start) => self.state = State::Json { marked, start, read: 0, end: JsonEnd::default() },
            None => {
                text(parts, &marked);
                self.state = State::Text;
            }
        }
        true
    }

    /// Takes the calls out of the JSON at `start..end` of the held text. If the JSON is no call, it becomes text.
    fn take_call(&mut self, marked: &str, start: usize, end: usize, parts: &mut Vec<AnswerPart>) {
        let rest = self.held.split_off(end);
        let whole = std::mem::replace(&mut self.held, rest);
        let (before, json) = whole.split_at(start);
        let calls = read_calls(before, json);
        let is_known = |name: &String| !marked.is_empty() || self.names.contains(name);
        match calls.filter(|calls| calls.iter().all(|(name, _)| is_known(name))) {
            Some(calls) => {
                self.calls += calls.len();
                parts.extend(calls.into_iter().map(|(name, arguments)| AnswerPart::Call { name, arguments }));
                self.state = State::Closed;
            }
            None => {
                text(parts, &format!("{marked}{whole}"));
                self.state = State::Text;
            }
        }
    }

    fn after_call(&mut self) -> bool {
        let blank = self.held.len() - self.held.trim_start().len();
        self.held.drain(..blank);
        if self.held.is_empty() {
            return false;
        }
        match (self.format, self.format.close_marker()) {
            (_, Some(close)) if self.held.starts_with(close) => {
                self.held.drain(..close.len());
                self.state = State::Text;
                // White space after a call is not text either.
                let blank = self.held.len() - self.held.trim_start().len();
                self.held.drain(..blank);
            }
            (_, Some(close)) if close.starts_with(self.held.as_str()) => return false,
            (ToolFormat::Llama, _) if self.held.starts_with([';', ',']) => {
                self.held.drain(..1);
            }
            (ToolFormat::Llama, _) if self.held.starts_with('{') => {
                self.state = State::Opened { marked: String::new() }
            }
            _ => self.state = State::Text,
        }
        true
    }
}

/// The calls in JSON. `before` is what stands between the marker and the JSON: in some formats the name.
fn read_calls(before: &str, json: &str) -> Option<Vec<(String, String)>> {
    let name = before.split("[ARGS]").next().unwrap_or_default();
    let name = name.split("[CALL_ID]").next().unwrap_or_default().trim();
    if !name.is_empty() {
        let arguments: Box<RawValue> = serde_json::from_str(json).ok()?;
        return Some(vec![(name.to_owned(), arguments.get().to_owned())]);
    }
    let written: Vec<Written> = match json.starts_with('[') {
        true => serde_json::from_str(json).ok()?,
        false => vec![serde_json::from_str(json).ok()?],
    };
    let calls = written.into_iter().map(|call| {
        let arguments = call.arguments.map_or("{}".to_owned(), |arguments| arguments.get().to_owned());
        // Some models write the arguments as a text of JSON.
        let inner: Option<String> = serde_json::from_str(&arguments).ok();
        (call.name, inner.unwrap_or(arguments))
    });
    Some(calls.collect())
}

/// Adds text, to the last part if that is text too.
fn text(parts: &mut Vec<AnswerPart>, more: &str) {
    match parts.last_mut() {
        _ if more.is_empty() => {}
        Some(AnswerPart::Text(text)) => text.push_str(more),
        _ => parts.push(AnswerPart::Text(more.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn said(text: &str) -> AnswerPart {
        AnswerPart::Text(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> AnswerPart {
        AnswerPart::Call { name: name.to_owned(), arguments: arguments.to_owned() }
    }

    /// The parts of an answer that arrives in these pieces, neighbouring texts joined.
    fn parse<'a>(format: ToolFormat, pieces: impl IntoIterator<Item = &'a str>) -> Vec<AnswerPart> {
        let mut parser = ToolCallParser::new(format, vec!["f".to_owned(), "g".to_owned()]);
        let mut parts: Vec<AnswerPart> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
        parts.extend(parser.finish());
        let calls = parts.iter().filter(|part| matches!(part, AnswerPart::Call { .. })).count();
        assert_eq!(calls, parser.calls());
        let mut joined = Vec::new();
        for part in parts {
            match part {
                AnswerPart::Text(more) => text(&mut joined, &more),
                call => joined.push(call),
            }
        }
        joined
    }

    /// Answers in each format, and their parts.
    fn examples() -> Vec<(ToolFormat, &'static str, Vec<AnswerPart>)> {
        use ToolFormat::{Hermes, Llama, Mistral, MistralArgs};
        vec![
            (Hermes, "Hello.\n", vec![said("Hello.\n")]),
            (
                Hermes,
                "Let me see.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>}\"}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"other\", \"arguments\": {}}\n</tool_call>\n",
                vec![said("Let me see."), call("f", r#"{"a": "</tool_call>}"}"#), call("other", "{}")],
            ),
            (Hermes, "<tool_call>{\"name\": \"f\"}", vec![call("f", "{}")]),
            (Hermes, "a <tool_call>b</tool_call>", vec![said("a <tool_call>b</tool_call>")]),
            (Hermes, "<tool_call>{\"name\": 3}</tool_call>", vec![said("<tool_call>{\"name\": 3}</tool_call>")]),
            (Hermes, "<tool_call>\n{\"name\": \"f\", \"argu", vec![said("<tool_call>\n{\"name\": \"f\", \"argu")]),
            (Hermes, "1 <tool 2 < 3", vec![said("1 <tool 2 < 3")]),
            (Hermes, "{\"name\": \"f\", \"arguments\": {}}", vec![said("{\"name\": \"f\", \"arguments\": {}}")]),
            (Llama, "{\"name\": \"f\", \"parameters\": {\"n\": 1e400}}", vec![call("f", "{\"n\": 1e400}")]),
            (
                Llama,
                "<|python_tag|>{\"name\": \"x\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {}}",
                vec![call("x", "{}"), call("g", "{}")],
            ),
            (Llama, "{\"name\": \"x\", \"parameters\": {}}", vec![said("{\"name\": \"x\", \"parameters\": {}}")]),
            (Llama, "{\"answer\": 3} yes", vec![said("{\"answer\": 3} yes")]),
            (Llama, "See {\"name\": \"f\"}", vec![said("See {\"name\": \"f\"}")]),
            (
                Mistral,
                "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\", \"id\": \"123456789\"}, {\"name\": \"g\"}]",
                vec![call("f", "{\"a\": 1}"), call("g", "{}")],
            ),
            (
                MistralArgs,
                "[TOOL_CALLS]f[CALL_ID]abc[ARGS]{\"a\": [1]}[TOOL_CALLS]g[ARGS]{}",
                vec![call("f", "{\"a\": [1]}"), call("g", "{}")],
            ),
            (Mistral, "[TOOL_CALLS] nothing", vec![said("[TOOL_CALLS] nothing")]),
        ]
    }

    #[test]
    fn calls_are_found_and_the_rest_is_text() {
        for (format, answer, parts) in examples() {
            assert_eq!(parse(format, [answer]), parts, "{answer}");
        }
    }

    #[test]
    fn text_is_released_as_soon_as_it_cannot_be_a_call() {
        let mut parser = ToolCallParser::new(ToolFormat::Hermes, vec![]);
        assert_eq!(parser.push("a "), [said("a")]);
        assert_eq!(parser.push("b<tool"), [said(" b")]);
        assert_eq!(parser.push("box"), [said("<toolbox")]);
        assert_eq!(parser.push("\n<tool_call>{\"name\": \"f\"}"), [call("f", "{}")]);
    }

    proptest! {
        #[test]
        fn parts_do_not_depend_on_how_the_answer_is_cut(cuts in prop::collection::vec(1usize..9, 0..80)) {
            for (format, answer, parts) in examples() {
                let (mut pieces, mut rest) = (Vec::new(), answer);
                for cut in &cuts {
                    let (piece, left) = rest.split_at((*cut).min(rest.len()));
                    pieces.push(piece);
                    rest = left;
                }
                pieces.push(rest);
                prop_assert_eq!(parse(format, pieces), parts, "{}", answer);
            }
        }

        #[test]
        fn an_answer_without_calls_is_kept_whole(answer in "[a-z <{}\\[\\]\":,\n]{0,60}") {
            for format in [ToolFormat::Hermes, ToolFormat::Llama, ToolFormat::Mistral, ToolFormat::MistralArgs] {
                let whole: Vec<AnswerPart> = Some(answer.as_str()).filter(|text| !text.is_empty()).map(said).into_iter().collect();
                prop_assert_eq!(parse(format, answer.split_inclusive(' ')), whole);
            }
        }
    }
}
