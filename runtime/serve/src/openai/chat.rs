//! `POST /v1/chat/completions`.

use super::{Settings, read};
use crate::error::ApiError;
use hpp_generate::text::{ChatMessage, Message, conversation};
use serde::Deserialize;
use serde_json::Value;

/// Most tokens whose probabilities are reported.
const MAX_TOP_LOGPROBS: usize = 20;

/// A request for the next turn of a conversation.
#[derive(Clone, Debug, Deserialize)]
pub struct ChatRequest {
    /// The conversation.
    pub messages: Vec<ChatMessage>,
    /// Whether to report probabilities.
    pub logprobs: Option<bool>,
    /// The number of most likely tokens to report.
    pub top_logprobs: Option<usize>,
    /// The fields shared with completions. They are read separately, because errors of flattened fields would not name the field.
    #[serde(skip)]
    pub settings: Settings,
}

impl ChatRequest {
    /// Reads the body of a request.
    pub fn read(body: &Value) -> Result<Self, ApiError> {
        Ok(Self { settings: read(body)?, ..read(body)? })
    }

    /// The conversation for the chat template.
    pub fn conversation(&self) -> Result<Vec<Message>, ApiError> {
        conversation(&self.messages).map_err(|error| ApiError::field(error.field, error.why))
    }

    /// The number of most likely tokens to report; `None` for no probabilities.
    pub fn top_logprobs(&self) -> Result<Option<usize>, ApiError> {
        match (self.logprobs.unwrap_or(false), self.top_logprobs) {
            (_, Some(top)) if top > MAX_TOP_LOGPROBS => {
                Err(ApiError::field("top_logprobs", format!("`top_logprobs` is at most {MAX_TOP_LOGPROBS}")))
            }
            (false, Some(1..)) => Err(ApiError::field("top_logprobs", "`top_logprobs` needs `logprobs`: true")),
            (false, _) => Ok(None),
            (true, top) => Ok(Some(top.unwrap_or(0))),
        }
    }
}
