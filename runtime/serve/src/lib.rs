//! An HTTP server with OpenAI's API over a language model.
//!
//! - [`serve`] listens, checks API keys and sizes, and routes requests ([`openai`] has the types of the API).
//! - A [`ServedModel`] turns a request's text into tokens and submits it to its engine.
//! - The [`EnginePool`] loads the engine if it is not loaded, and unloads idle ones to make room.
//! - The engine's thread (`engine_thread`) runs one pass after the other over a [`Batch`](hpp_generate::Batch). Requests join and leave
//!   between passes. It keeps the states of answered requests, so that a prompt with the same prefix starts after it.
//!
//! Knows no command line, no signals and no backend. Opens no file: paths come from the command line only, never from a request.

mod answer;
mod connections;
mod engine_pool;
mod engine_thread;
mod error;
mod host_check;
mod json_body;
mod logprobs;
mod metrics;
mod model;
mod offsets;
pub mod openai;
mod page;
mod rate_limit;
mod server;
mod weight_placement;

pub use connections::ConnectionLimits;
pub use engine_pool::{EnginePool, EngineReport, EngineSource, EngineState};
pub use engine_pool::{MemoryNeeds, PoolSettings};
pub use engine_thread::{CacheHints, LoadContext, LoadError, LoadFn, LoadedEngine, WakeFn};
pub use error::{ApiError, ServeError, check_address};
pub use metrics::{Metrics, ModelMetrics};
pub use model::{ModelSettings, RequestOptions, ServedModel};
pub use server::{ServeSettings, Shutdown, serve};
pub use weight_placement::WeightPlacement;
