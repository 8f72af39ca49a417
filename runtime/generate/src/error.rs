//! The errors of generating text. Each variant is the error of one module, with its causes as sources.

use crate::embedding_table::EmbeddingError;
use crate::sampling::SamplingError;
use crate::text::{TemplateError, TokenizerError};
use hpp_engine::{BackendError, EngineError};

/// Why a generation failed.
#[derive(Debug, thiserror::Error)]
pub enum GenerateError {
    /// The engine could not run the model.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// The prompt cannot be used.
    #[error(transparent)]
    Prompt(#[from] PromptError),
    /// The tokenizer failed.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// No token could be chosen.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// A token has no embedding.
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
}

impl GenerateError {
    /// Whether a cancel handle ended an engine's pass.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, GenerateError::Engine(EngineError::Cancelled))
    }

    /// Whether memory for a sequence's states was short.
    pub fn is_out_of_memory(&self) -> bool {
        let GenerateError::Engine(EngineError::Memory { source, .. }) = self else { return false };
        matches!(source, BackendError::OutOfMemory { .. })
    }
}

/// Why a prompt cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// The prompt has no tokens.
    #[error("the prompt is empty")]
    Empty,
    /// The model came without a tokenizer.
    #[error("this plan has no tokenizer, so text cannot be turned into tokens")]
    NoTokenizer,
    /// The model came without a chat template.
    #[error("this model has no chat template")]
    NoTemplate,
    /// The model is not a language model.
    #[error("this model generates no text")]
    NotALanguageModel,
    /// More tokens than the context holds.
    #[error("the prompt has {tokens} tokens and the context holds {context}")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that the context holds.
        context: u64,
    },
}
