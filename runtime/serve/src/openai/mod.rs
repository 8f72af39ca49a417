//! The types of OpenAI's API: the fields that are read from requests and written to answers.
//!
//! The server ignores unknown fields, as OpenAI's clients expect. It refuses fields that would change the answer and that it does not
//! support.

mod body;
mod chat;
mod completion;
mod embedding;
mod settings;
mod tools;

pub use body::read;
pub use chat::{ChatMessage, ChatRequest, Content, ContentPart};
pub use completion::{CompletionPrompt, CompletionRequest, OnePrompt};
pub use embedding::{EmbeddingRequest, EncodingFormat};
pub use settings::{OneOrMany, Settings, StreamOptions, time_limit};
pub use tools::Tools;

use serde::Serialize;

/// Counts of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Of the prompt.
    pub prompt_tokens: usize,
    /// Of all answers.
    pub completion_tokens: usize,
    /// The sum.
    pub total_tokens: usize,
    /// Of the prompt, by where they came from.
    pub prompt_tokens_details: PromptTokensDetails,
}

/// Where prompt tokens came from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    /// Tokens whose states were reused from an earlier request.
    pub cached_tokens: usize,
}

impl Usage {
    /// The sum over answers. The tokens of a prompt count once for its `each` answers.
    pub fn of(answers: &[hpp_generate::TokenUsage], each: usize) -> Self {
        let sum = |tokens: fn(&hpp_generate::TokenUsage) -> usize| answers.iter().map(tokens).sum::<usize>();
        let each = each.max(1);
        let prompt_tokens = sum(|usage| usage.prompt_tokens) / each;
        let completion_tokens = sum(|usage| usage.completion_tokens);
        let cached_tokens = sum(|usage| usage.reused_tokens) / each;
        Usage {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
        }
    }
}
