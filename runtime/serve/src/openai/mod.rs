//! The types of OpenAI's API: the fields that are read from requests and written to answers.
//!
//! The server ignores unknown fields, as OpenAI's clients expect. It refuses fields that it does not support and that would change the answer.

mod body;
mod chat;
mod completion;
mod embedding;
mod settings;
mod tools;

pub use body::read;
pub use chat::ChatRequest;
pub use completion::{CompletionPrompt, CompletionRequest, OnePrompt};
pub use embedding::{EmbeddingRequest, EncodingFormat};
pub use settings::{OneOrMany, Settings, StreamOptions, time_limit};
pub use tools::Tools;

use hpp_generate::TokenUsage;
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
    /// The sum over answers; an answer that never started is `None`. The prompt tokens of each group of `each` answers to one prompt count once; its cached
    /// tokens count as the mean over the group.
    pub fn of(answers: &[Option<TokenUsage>], each: usize) -> Self {
        let mut sum = Usage::default();
        for of_prompt in answers.chunks(each.max(1)) {
            let started: Vec<&TokenUsage> = of_prompt.iter().flatten().collect();
            let Some(first) = started.first() else { continue };
            let cached = started.iter().map(|usage| usage.reused_tokens).sum::<usize>() / started.len();
            sum.prompt_tokens += first.prompt_tokens;
            sum.completion_tokens += started.iter().map(|usage| usage.completion_tokens).sum::<usize>();
            sum.prompt_tokens_details.cached_tokens += cached;
        }
        sum.total_tokens = sum.prompt_tokens + sum.completion_tokens;
        sum
    }
}
