//! What requests ask of an engine's thread, their places in its queue, and the events that answer them.

use crate::error::ApiError;
use crate::logprobs::TokenLogprobs;
use hpp_generate::{Generated, GenerationRequest, TokenUsage};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use tokio::sync::mpsc::UnboundedSender;

/// A request for the engine.
pub struct Submission {
    /// What to compute.
    pub task: EngineTask,
    /// Who asked for it.
    pub client: Client,
}

/// What an engine computes for a request.
pub enum EngineTask {
    /// An answer.
    Generate(Box<GenerateTask>),
    /// The embedding of these tokens.
    Embed(Vec<u32>),
}

/// An answer to generate.
pub struct GenerateTask {
    /// What to generate.
    pub request: GenerationRequest,
    /// Reports the logarithms of this many most likely tokens' probabilities, and of the chosen one's.
    pub top_logprobs: Option<usize>,
    /// The session that it continues, and its priority.
    pub hints: CacheHints,
}

/// Who receives the events of a request.
pub struct Client {
    /// Receives them. Dropping the receiver cancels the request.
    pub events: UnboundedSender<RequestEvent>,
    /// When the client stops waiting for the answer.
    pub deadline: Option<Instant>,
    /// When the request arrived.
    pub arrived: Instant,
}

/// Why a request ends before it is answered.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum EarlyEnd {
    /// Its client has disconnected.
    Cancelled,
    /// Its deadline has passed.
    Timeout,
}

impl EarlyEnd {
    /// The outcome in the metrics.
    pub fn outcome(self) -> &'static str {
        match self {
            EarlyEnd::Cancelled => "cancelled",
            EarlyEnd::Timeout => "timeout",
        }
    }
}

impl Client {
    /// Why the client's request ends now, if it does.
    pub(crate) fn early_end(&self, now: Instant) -> Option<EarlyEnd> {
        match self.deadline {
            _ if self.events.is_closed() => Some(EarlyEnd::Cancelled),
            Some(deadline) if now >= deadline => Some(EarlyEnd::Timeout),
            _ => None,
        }
    }

    /// Ends the request with an error.
    pub(crate) fn fail(&self, error: ApiError) {
        let _ = self.events.send(RequestEvent::Failed(error));
    }
}

/// The client's hints about the states of its request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheHints {
    /// The name of the conversation: the states of its answers are saved and reused too, not only those of prompts.
    pub session: Option<String>,
    /// More important requests start first, and their states are kept longer.
    pub priority: i32,
    /// No request follows soon: states are evicted from memory after the answer, to disk if there is one.
    pub park: bool,
    /// Generates nothing: reads pages of the prompt from disk, and answers with the number of tokens found.
    pub prefetch: bool,
}

/// A request that waits for an engine.
pub(crate) struct Queued {
    pub submission: Submission,
    pub place: QueuePlace,
}

/// A place among the waiting requests of a model; dropping it frees the place.
pub(crate) struct QueuePlace(Arc<Occupancy>);

/// How many requests wait for an engine, and how many sequences are free.
#[derive(Debug, Default)]
pub(crate) struct Occupancy {
    /// Requests that wait, in the pool, in the engine's inbox or for a sequence.
    pub waiting: AtomicUsize,
    /// Sequences that no request uses: this many waiting requests can start before the next pass. 0 while the engine is not loaded.
    pub free: AtomicUsize,
}

impl QueuePlace {
    /// Takes `count` places, all or none. There are `limit` places in the queue and one for each free sequence, whose requests start at once. The
    /// error is the number of places in the queue that are taken.
    pub fn take(occupancy: &Arc<Occupancy>, count: usize, limit: usize) -> Result<Vec<QueuePlace>, usize> {
        let free = occupancy.free.load(Ordering::SeqCst);
        let has_room = |waiting: usize| Some(waiting + count).filter(|waiting| *waiting <= limit.saturating_add(free));
        // A request that starts takes a free sequence before it gives its place back, so that more than `limit` seem to wait for a moment.
        let in_queue = |waiting: usize| waiting.saturating_sub(free).min(limit);
        occupancy.waiting.fetch_update(Ordering::SeqCst, Ordering::SeqCst, has_room).map_err(in_queue)?;
        Ok((0..count).map(|_| QueuePlace(Arc::clone(occupancy))).collect())
    }
}

impl Drop for QueuePlace {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An event of a request.
#[derive(Debug)]
pub enum RequestEvent {
    /// Computing starts. The usage has no tokens of the answer yet.
    Started(TokenUsage),
    /// A token of the prompt.
    PromptToken {
        /// The token.
        id: u32,
        /// The probabilities; the first token of a prompt has none.
        logprobs: Option<TokenLogprobs>,
    },
    /// A token was chosen. Its text follows in another event when it is complete.
    Token {
        /// The token.
        id: u32,
        /// The probabilities, if requested.
        logprobs: Option<TokenLogprobs>,
    },
    /// More text; never part of a stop text.
    Text(String),
    /// The answer is complete.
    Finished(Box<Generated>),
    /// The embedding is complete.
    Embedding(Vec<f32>),
    /// There is no answer.
    Failed(ApiError),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_requests_than_the_limit_are_said_to_wait() {
        let taken = |waiting, free, count| {
            let occupancy = Arc::new(Occupancy { waiting: AtomicUsize::new(waiting), free: AtomicUsize::new(free) });
            QueuePlace::take(&occupancy, count, 3).map(|places| places.len())
        };
        assert_eq!(taken(4, 2, 1), Ok(1));
        // Two of the five start at once.
        assert_eq!(taken(5, 2, 1), Err(3));
        // Their sequences are taken, and their places not given back yet.
        assert_eq!(taken(5, 0, 1), Err(3));
        assert_eq!(taken(2, 0, 2), Err(2));
    }
}
