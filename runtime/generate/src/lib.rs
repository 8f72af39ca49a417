//! Text generation on an engine, shared by the server, batch jobs and the command line.
//!
//! - [`PlanFile`] reads a plan; [`PromptEncoder`] turns text and conversations into tokens ([`text`]).
//! - [`Generation`] is the state machine of one request. It says which tokens to feed next and takes the logits after them. It holds
//!   no engine, so a caller may drive many generations on one engine, one step of one request at a time.
//! - [`TokenSequence`] runs an engine: it feeds tokens, reuses the common prefix with the next prompt, and holds the logits.
//! - [`Batch`] runs many generations on one engine and fetches the weights once per pass for all.
//! - [`PrefixCache`] saves the states of prompts as pages of a store, and restores them for later prompts with the same prefix. With the ends of
//!   prompts, an equal prompt needs no pass.
//! - [`SingleSequence`] and [`generate`] are the convenience for programs that run one request at a time.
//! - [`adapt`] keeps an engine to the memory that the system allows, and near the times that its plan predicts.
//! - [`grammar`] restricts answers to JSON that a schema describes, or to calls of tools.
//! - [`speculate`] drafts tokens that one pass verifies.
//!
//! Knows no terminal, no signals, no command line and no backend. Reads plans and the files that they name; the cache of KV pages also uses its directory.

pub mod adapt;
mod batch;
mod embedding_table;
mod error;
mod generate;
mod generation;
pub mod grammar;
mod input;
mod plan_file;
mod prefix_cache;
mod prompt;
mod prompt_ends;
/// The store of pages that a [`PrefixCache`] uses.
pub use hpp_kv as kv;
pub mod sampling;
mod sequence;
mod single_sequence;
pub mod speculate;
pub mod text;
mod text_embedding;

pub use batch::{Batch, Finished, RequestId};
pub use embedding_table::{EmbeddingError, EmbeddingTable};
pub use error::{GenerateError, PromptError};
pub use generate::generate;
pub use generation::{
    FinishReason, Generated, Generation, GenerationEvent, GenerationRequest, GenerationTimings, TokenUsage,
};
pub use input::{Input, chunk_length};
pub use plan_file::{PLAN_NAME, PlanFile, PlanFileError};
pub use prefix_cache::{PageValue, PrefixCache, PrefixCacheSettings, PromptPages};
pub use prompt::{PromptEncoder, check_language_model, check_prompt};
pub use sequence::{ModelInputs, TokenSequence, kept_logits_bytes, prompt_chunk};
pub use single_sequence::{Prefill, SingleSequence};
pub use text_embedding::{TextEmbedding, hidden_states_output};
