//! `POST /v1/completions`.

use super::{Settings, read};
use crate::error::ApiError;
use serde::Deserialize;
use serde_json::Value;

/// Most prompts of one request.
const MAX_PROMPTS: usize = 128;
/// Most tokens whose probabilities are reported.
const MAX_LOGPROBS: usize = 20;

/// A request to continue texts.
#[derive(Clone, Debug, Deserialize)]
pub struct CompletionRequest {
    /// The texts.
    pub prompt: CompletionPrompt,
    /// Whether the answer begins with the prompt.
    pub echo: Option<bool>,
    /// The number of most likely tokens to report with probabilities.
    pub logprobs: Option<usize>,
    /// Not supported.
    pub suffix: Option<String>,
    /// Not supported beyond `n`.
    pub best_of: Option<u64>,
    /// The fields shared with chat completions, which are read separately.
    #[serde(skip)]
    pub settings: Settings,
}

/// The texts or tokens to continue.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "it must be a text, a list of texts, token ids, or a list of lists of token ids")]
pub enum CompletionPrompt {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
    /// Several texts.
    Texts(Vec<String>),
    /// Several lists of token ids.
    TokenLists(Vec<Vec<u32>>),
}

/// One text to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OnePrompt {
    /// A text.
    Text(String),
    /// Token ids.
    Tokens(Vec<u32>),
}

impl OnePrompt {
    /// Whether it has neither text nor tokens.
    pub fn is_empty(&self) -> bool {
        match self {
            OnePrompt::Text(text) => text.is_empty(),
            OnePrompt::Tokens(tokens) => tokens.is_empty(),
        }
    }
}

impl CompletionPrompt {
    /// Each text or list of tokens.
    pub fn each(&self) -> Vec<OnePrompt> {
        match self.clone() {
            CompletionPrompt::Text(text) => vec![OnePrompt::Text(text)],
            CompletionPrompt::Tokens(tokens) => vec![OnePrompt::Tokens(tokens)],
            CompletionPrompt::Texts(texts) => texts.into_iter().map(OnePrompt::Text).collect(),
            CompletionPrompt::TokenLists(lists) => lists.into_iter().map(OnePrompt::Tokens).collect(),
        }
    }
}

impl CompletionRequest {
    /// Reads the body of a request.
    pub fn read(body: &Value) -> Result<Self, ApiError> {
        Ok(Self { settings: read(body)?, ..read(body)? })
    }

    /// The texts to continue.
    pub fn prompts(&self) -> Result<Vec<OnePrompt>, ApiError> {
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::field("suffix", "`suffix` is not supported: leave it out"));
        }
        let answers = self.settings.n.unwrap_or(1);
        if self.best_of.is_some_and(|number| number > answers) {
            let message = format!("`best_of` above `n`, here {answers}, is not supported: leave it out");
            return Err(ApiError::field("best_of", message));
        }
        let prompts = self.prompt.each();
        match prompts.len() {
            1..=MAX_PROMPTS => Ok(prompts),
            _ => Err(ApiError::field("prompt", format!("give from 1 to {MAX_PROMPTS} prompts"))),
        }
    }

    /// Whether to report probabilities of the prompt's tokens too.
    pub fn scores_prompt(&self) -> bool {
        self.echo == Some(true) && self.logprobs.is_some()
    }

    /// The number of most likely tokens to report; `None` for no probabilities.
    pub fn top_logprobs(&self) -> Result<Option<usize>, ApiError> {
        match self.logprobs {
            Some(top) if top > MAX_LOGPROBS => {
                Err(ApiError::field("logprobs", format!("`logprobs` is at most {MAX_LOGPROBS}")))
            }
            top => Ok(top),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_texts_or_tokens_one_or_many() {
        let prompts = |json: &str| {
            let body = serde_json::from_str(&format!("{{\"prompt\": {json}}}")).unwrap();
            CompletionRequest::read(&body)?.prompts()
        };
        assert_eq!(prompts("\"a\"").unwrap(), [OnePrompt::Text("a".into())]);
        assert_eq!(prompts("[1, 2]").unwrap(), [OnePrompt::Tokens(vec![1, 2])]);
        assert_eq!(prompts("[\"a\", \"b\"]").unwrap().len(), 2);
        assert_eq!(prompts("[[1], [2, 3]]").unwrap()[1], OnePrompt::Tokens(vec![2, 3]));
        assert!(prompts("{\"a\": 1}").is_err());
    }
}
