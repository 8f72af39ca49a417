//! The errors of generating text. Each variant is the error of one module, with its causes as sources.

use crate::embedding_table::EmbeddingError;
use crate::grammar::{GrammarError, SCHEMA_HINT};
use crate::sampling::SamplingError;
use crate::text::{ConversationError, LimitError, TemplateError, TokenizerError};
use hpp_engine::{BackendError, EngineError};
use hpp_schema::ByteSize;
use std::io;

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
    /// The conversation cannot be used.
    #[error(transparent)]
    Conversation(#[from] ConversationError),
    /// The chat template failed.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// No token could be chosen.
    #[error(transparent)]
    Sampling(#[from] SamplingError),
    /// The answer's grammar is invalid or cannot be followed.
    #[error(transparent)]
    Grammar(#[from] GrammarError),
    /// A token has no embedding.
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
}

/// Hint for a file that a plan names and that does not exist.
const MOVED: &str = "a plan refers to the model's files by paths relative to itself, so neither can be moved alone: move it back, or \
                     make the plan again with hpp-split MODEL --out DIR --force, which also restores files of the plan itself; hpp-split \
                     --pack makes a plan that can be moved";

/// Hint for a file that is there and that this user may not read.
pub(crate) const UNREADABLE: &str = "make it readable for this user, and the directories above it too";

fn is_denied(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::PermissionDenied
}

impl GenerateError {
    /// Whether a cancel handle ended an engine's pass.
    pub fn is_cancelled(&self) -> bool {
        matches!(self, GenerateError::Engine(EngineError::Cancelled))
    }

    /// The next step for a person, where there is one.
    pub fn hint(&self) -> Option<&'static str> {
        Some(match self {
            GenerateError::Engine(EngineError::Files { unreadable: Some(io::ErrorKind::NotFound), .. }) => MOVED,
            GenerateError::Engine(EngineError::Files { unreadable: Some(io::ErrorKind::PermissionDenied), .. }) => {
                UNREADABLE
            }
            GenerateError::Engine(e) => return e.hint(),
            GenerateError::Tokenizer(TokenizerError::Load { source, .. })
                if source.downcast_ref::<io::Error>().is_some_and(is_denied) =>
            {
                UNREADABLE
            }
            GenerateError::Tokenizer(TokenizerError::Load { path, .. }) if !path.exists() => MOVED,
            GenerateError::Tokenizer(TokenizerError::UnknownToken(_)) => "give ids of tokens that tokenizer.json has",
            GenerateError::Tokenizer(_) => {
                "get tokenizer.json again from the model's source; hpp-exec PLAN --tokens 1,2,3 runs without it"
            }
            GenerateError::Template(TemplateError::Read { source, .. }) if is_denied(source) => UNREADABLE,
            GenerateError::Template(TemplateError::Read { path, .. }) if !path.exists() => MOVED,
            GenerateError::Template(TemplateError::Template { .. } | TemplateError::Limit { .. }) => {
                "leave --chat out to send the prompt as it is, or get the template again from the model's source"
            }
            GenerateError::Conversation(_) | GenerateError::Template(_) => return None,
            GenerateError::Sampling(_) => "compare the plan with the unsplit model: hpp-exec verify PLAN",
            GenerateError::Grammar(GrammarError::Schema(_)) => SCHEMA_HINT,
            GenerateError::Embedding(_) => {
                "give --embeddings the table that the model was exported with, [vocab, hidden]"
            }
            GenerateError::Grammar(_) => return None,
            GenerateError::Prompt(e) => match e {
                PromptError::Empty => "give --prompt TEXT or --prompt-file FILE; outside of chats also --tokens 1,2,3",
                PromptError::NoTokenizer => {
                    "give --tokens 1,2,3, or put tokenizer.json beside the model and split it again"
                }
                PromptError::NoTemplate => "leave --chat out to send the prompt as it is",
                PromptError::NotALanguageModel { why: Some(_) } => {
                    "run it on tensors, with both options: hpp-exec PLAN --inputs in.npz --outputs out.npz"
                }
                PromptError::NotALanguageModel { why: None } => {
                    "run it on tensors, with both options: hpp-exec PLAN --inputs in.npz --outputs out.npz. Text needs an input input_ids and an \
                     output logits [batch, positions, vocabulary]: if the model computes them under other names, export it again with these"
                }
                PromptError::TooLong { context, most: Some(most), .. } if most <= context => {
                    "shorten the prompt: the model was built for no longer context"
                }
                PromptError::TooLong { .. } | PromptError::TextTooLong { .. } => {
                    "shorten the prompt, or give a longer --context, as far as the model was built for one"
                }
            },
        })
    }

    /// Whether the same work may succeed later: it exceeded limits of time or memory, perhaps because of other work in the process.
    pub fn is_transient(&self) -> bool {
        let limit: Option<&LimitError> = match self {
            GenerateError::Template(TemplateError::Limit { source, .. }) => Some(source),
            GenerateError::Grammar(GrammarError::Limit(source)) => Some(source),
            GenerateError::Tokenizer(
                TokenizerError::Load { source, .. }
                | TokenizerError::Encode { source, .. }
                | TokenizerError::Decode { source, .. },
            ) => source.downcast_ref(),
            _ => None,
        };
        limit.is_some_and(LimitError::is_transient)
    }

    /// Whether the engine cannot go on and must be loaded again: its files changed, or its device was lost.
    pub fn needs_reload(&self) -> bool {
        matches!(self, GenerateError::Engine(EngineError::Changed { .. } | EngineError::Device { .. }))
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
    #[error("this model generates no text{}", .why.as_ref().map(|why| format!(": {why}")).unwrap_or_default())]
    NotALanguageModel {
        /// The plan's reason, where a user may expect text.
        why: Option<String>,
    },
    /// So much text that it cannot fit the context, however it is tokenized.
    #[error("the prompt has {} of text and the context holds {context} tokens", ByteSize(*bytes).human())]
    TextTooLong {
        /// Bytes of the text.
        bytes: u64,
        /// Tokens that the context holds.
        context: u64,
    },
    /// More tokens than the context holds.
    #[error("the prompt has {tokens} tokens and the context holds {context}")]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that the context holds.
        context: u64,
        /// Tokens that the model was built for, where that is known.
        most: Option<u64>,
    },
}

impl PromptError {
    /// Adds to the error for how many tokens the model was built.
    pub fn of_model_for(self, built_for: Option<u64>) -> Self {
        match self {
            PromptError::TooLong { tokens, context, .. } => PromptError::TooLong { tokens, context, most: built_for },
            other => other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_files_and_files_that_may_not_be_read_get_different_hints() {
        let hints = |kind: io::ErrorKind| {
            let files = EngineError::Files { problems: vec![], unreadable: Some(kind) };
            let source = io::Error::from(kind).into();
            let tokenizer = TokenizerError::Load { path: "no/such/file".into(), source };
            let template = TemplateError::Read { path: "no/such/file".into(), source: kind.into() };
            let errors = [GenerateError::from(files), tokenizer.into(), template.into()];
            errors.map(|error| error.hint().unwrap_or_default())
        };
        assert_eq!(hints(io::ErrorKind::NotFound), [MOVED; 3]);
        assert_eq!(hints(io::ErrorKind::PermissionDenied), [UNREADABLE; 3]);
    }
}
