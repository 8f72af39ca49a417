//! The fields that chat completions and completions share.

use super::Tools;
use crate::engine_thread::CacheHints;
use crate::error::ApiError;
use crate::model::RequestOptions;
use hpp_generate::grammar::{GrammarSource, ResponseFormat};
use hpp_generate::sampling::{JsonSeed, JsonTopK, SamplingOverrides};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// Most answers to one prompt.
const MAX_ANSWERS: u64 = 128;
/// Most texts that end an answer.
const MAX_STOPS: usize = 64;
/// Longest text that ends an answer, bytes.
const MAX_STOP_BYTES: usize = 1024;
/// Longest name of a conversation, bytes.
const MAX_SESSION_ID: usize = 256;
/// How important a request may be.
const PRIORITIES: std::ops::RangeInclusive<i32> = -10..=10;

/// How to answer.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Settings {
    /// The model; may be left out if there is one only.
    pub model: Option<String>,
    /// Most tokens to generate.
    pub max_tokens: Option<u64>,
    /// The newer name of `max_tokens`.
    pub max_completion_tokens: Option<u64>,
    /// 0 always takes the most likely token.
    pub temperature: Option<f64>,
    /// Sample from the fewest most likely tokens whose probabilities add up to this.
    pub top_p: Option<f64>,
    /// Sample from this many most likely tokens.
    pub top_k: Option<JsonTopK>,
    /// Sample from tokens at least this many times as likely as the most likely one.
    pub min_p: Option<f64>,
    /// Makes tokens already in the text less likely.
    pub repetition_penalty: Option<f64>,
    /// Seed of the random numbers.
    pub seed: Option<JsonSeed>,
    /// Texts that end the answer.
    pub stop: Option<OneOrMany>,
    /// Number of answers.
    pub n: Option<u64>,
    /// Whether to send the answer as it is generated.
    #[serde(default)]
    pub stream: Option<bool>,
    /// Options of a stream.
    pub stream_options: Option<StreamOptions>,
    /// Whether to continue after the tokens that end a text.
    pub ignore_eos: Option<bool>,
    /// The conversation: states of its answers are kept for its next request.
    pub session_id: Option<String>,
    /// More important requests start first, and their states are kept longer.
    pub priority: Option<i32>,
    /// Whether states are evicted from memory after the answer, because no request follows soon.
    pub park: Option<bool>,
    /// Whether only to read the states of the prompt into memory, for a later request.
    pub prefetch: Option<bool>,
    /// Time limit of the request, seconds.
    pub timeout: Option<f64>,
    /// Not supported unless 0.
    pub frequency_penalty: Option<f64>,
    /// Not supported unless 0.
    pub presence_penalty: Option<f64>,
    /// Not supported unless empty.
    pub logit_bias: Option<Value>,
    /// See [`ResponseFormat`].
    pub response_format: Option<Value>,
    /// See [`Tools`], and so are the next two. Chat completions only.
    pub tools: Option<Value>,
    /// See above.
    pub tool_choice: Option<Value>,
    /// See above.
    pub parallel_tool_calls: Option<bool>,
    /// The older form of `tools`, not supported unless empty.
    pub functions: Option<Value>,
}

/// The contents of a stream besides the answer.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    /// A last event with counts of tokens.
    #[serde(default)]
    pub include_usage: bool,
}

/// A text or a list of texts.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "it must be a text or a list of texts")]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Any number.
    Many(Vec<String>),
}

impl Settings {
    /// Whether to send the answer as it is generated.
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether a stream ends with counts of tokens.
    pub fn includes_usage(&self) -> bool {
        self.stream_options.is_some_and(|options| options.include_usage)
    }

    /// Number of answers to each prompt.
    pub fn answers(&self) -> Result<u64, ApiError> {
        match self.n.unwrap_or(1) {
            n @ 1..=MAX_ANSWERS => Ok(n),
            _ => Err(ApiError::field("n", format!("`n` must be from 1 to {MAX_ANSWERS}"))),
        }
    }

    /// The request for the engine. `top_logprobs`: see [`RequestOptions`](crate::RequestOptions).
    pub fn options(&self, top_logprobs: Option<usize>) -> Result<RequestOptions, ApiError> {
        self.refuse_unsupported()?;
        let stop = match &self.stop {
            None => vec![],
            Some(OneOrMany::One(text)) => vec![text.clone()],
            Some(OneOrMany::Many(texts)) => texts.clone(),
        };
        if stop.len() > MAX_STOPS || stop.iter().any(|text| !(1..=MAX_STOP_BYTES).contains(&text.len())) {
            let what = format!("`stop` must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_BYTES} bytes");
            return Err(ApiError::field("stop", what));
        }
        let timeout = time_limit(self.timeout)?;
        Ok(RequestOptions {
            max_tokens: self.max_completion_tokens.or(self.max_tokens),
            stop,
            sampling: SamplingOverrides {
                temperature: self.temperature,
                top_k: self.top_k.map(JsonTopK::value),
                top_p: self.top_p,
                min_p: self.min_p,
                repetition_penalty: self.repetition_penalty,
                seed: self.seed.map(JsonSeed::value),
            },
            ignore_eos: self.ignore_eos == Some(true),
            top_logprobs,
            timeout,
            hints: self.hints()?,
            grammar: None,
            visible_tokens: vec![],
            scores_prompt: false,
        })
    }

    /// The grammar of the answer, if it is restricted.
    pub fn grammar(&self) -> Result<Option<GrammarSource>, ApiError> {
        let format = self.response_format.as_ref().map(ResponseFormat::from_json).transpose();
        let format = format.map_err(|error| ApiError::field("response_format", error.to_string()))?;
        Ok(format.and_then(ResponseFormat::grammar))
    }

    /// The tools that the model may call.
    pub fn tools(&self) -> Result<Option<Tools>, ApiError> {
        Tools::read(self.tools.as_ref(), self.tool_choice.as_ref(), self.parallel_tool_calls)
    }

    fn hints(&self) -> Result<CacheHints, ApiError> {
        let session = self.session_id.clone().filter(|session| !session.is_empty());
        if session.as_ref().is_some_and(|session| session.len() > MAX_SESSION_ID) {
            return Err(ApiError::field("session_id", format!("`session_id` has at most {MAX_SESSION_ID} bytes")));
        }
        let priority = self.priority.unwrap_or(0);
        if !PRIORITIES.contains(&priority) {
            let (least, most) = (PRIORITIES.start(), PRIORITIES.end());
            return Err(ApiError::field("priority", format!("`priority` is from {least} to {most}")));
        }
        let (park, prefetch) = (self.park == Some(true), self.prefetch == Some(true));
        if park && prefetch {
            let message = "`prefetch` reads states into memory, and `park` evicts them: give one";
            return Err(ApiError::field("prefetch", message));
        }
        Ok(CacheHints { session, priority, park, prefetch })
    }

    /// Refuses fields that would change the answer.
    fn refuse_unsupported(&self) -> Result<(), ApiError> {
        let is_nothing = |value: &Option<Value>| match value {
            None | Some(Value::Null) => true,
            Some(Value::Array(list)) => list.is_empty(),
            Some(Value::Object(map)) => map.is_empty(),
            Some(_) => false,
        };
        let is_zero = |number: Option<f64>| number.is_none_or(|number| number == 0.0);
        let fields = [
            ("frequency_penalty", is_zero(self.frequency_penalty), "use `repetition_penalty`"),
            ("presence_penalty", is_zero(self.presence_penalty), "use `repetition_penalty`"),
            ("logit_bias", is_nothing(&self.logit_bias), "leave it out"),
            ("functions", is_nothing(&self.functions), "use `tools`"),
        ];
        match fields.into_iter().find(|(_, is_supported, _)| !is_supported) {
            None => Ok(()),
            Some((name, _, hint)) => Err(ApiError::field(name, format!("`{name}` is not supported: {hint}"))),
        }
    }
}

/// Reads the `timeout` of a request, which is in seconds.
pub fn time_limit(seconds: Option<f64>) -> Result<Option<Duration>, ApiError> {
    let Some(seconds) = seconds else { return Ok(None) };
    match Duration::try_from_secs_f64(seconds) {
        Ok(limit) if !limit.is_zero() => Ok(Some(limit)),
        _ => Err(ApiError::field("timeout", "`timeout` must be a number of seconds above 0 and below 1e19")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::borrow::Cow;

    fn settings(json: &str) -> Settings {
        serde_json::from_str(json).unwrap()
    }

    fn refused(json: &str) -> Option<String> {
        match settings(json).options(None) {
            Err(ApiError::Invalid { param, .. }) => param.map(Cow::into_owned),
            other => panic!("{json}: {other:?}"),
        }
    }

    #[test]
    fn unknown_fields_are_ignored_and_those_that_change_the_answer_are_refused() {
        let options = settings(r#"{"user": "x", "max_tokens": 5, "stop": "a", "tools": [], "presence_penalty": 0}"#);
        let options = options.options(Some(2)).unwrap();
        assert_eq!((options.max_tokens, options.stop, options.top_logprobs), (Some(5), vec!["a".to_owned()], Some(2)));
        let object = settings(r#"{"response_format": {"type": "json_object"}}"#).grammar();
        assert_eq!(object, Ok(Some(GrammarSource::JsonObject)));
        let wrong = settings(r#"{"response_format": {"type": "xml"}}"#).grammar();
        assert!(
            matches!(&wrong, Err(ApiError::Invalid { param: Some(param), .. }) if param == "response_format"),
            "{wrong:?}"
        );
        assert_eq!(refused(r#"{"functions": [{"name": "f"}]}"#), Some("functions".to_owned()));
        assert_eq!(refused(r#"{"frequency_penalty": 0.5}"#), Some("frequency_penalty".to_owned()));
        assert_eq!(refused(r#"{"stop": [""]}"#), Some("stop".to_owned()));
        assert_eq!(refused(&format!("{{\"stop\": \"{}\"}}", "x".repeat(1025))), Some("stop".to_owned()));
        let seed = |json: &str| settings(json).options(None).unwrap().sampling.seed;
        assert_eq!(seed(r#"{"seed": -5}"#), Some(u64::MAX - 4));
        assert_eq!(seed(r#"{"seed": 18446744073709551615}"#), Some(u64::MAX));
        assert_eq!(refused(r#"{"park": true, "prefetch": true}"#), Some("prefetch".to_owned()));
        for timeout in ["-1", "0", "1e30"] {
            assert_eq!(refused(&format!(r#"{{"timeout": {timeout}}}"#)), Some("timeout".to_owned()), "{timeout}");
        }
        assert!(settings(r#"{"n": 0}"#).answers().is_err() && settings(r#"{"n": 4}"#).answers() == Ok(4));
    }
}
