//! Embeddings on the thread of an engine: one text at a time, a chunk of it after each pass over the other requests.

use super::{Client, EngineThread, QueuePlace, RequestEvent, Unanswered};
use hpp_engine::Backend;
use hpp_generate::TextEmbedding;

/// A request for an embedding.
pub(super) struct Embedding<B: Backend> {
    text: TextEmbedding<B>,
    pub client: Client,
    _place: QueuePlace,
    _unanswered: Unanswered,
}

impl<B: Backend> Embedding<B> {
    pub fn new(tokens: Vec<u32>, chunk: usize, client: Client, place: QueuePlace, unanswered: Unanswered) -> Self {
        Embedding { text: TextEmbedding::new(tokens, chunk), client, _place: place, _unanswered: unanswered }
    }
}

impl<B: Backend + 'static> EngineThread<B> {
    /// Whether the first embedding is partly computed and holds the states of a sequence.
    pub(super) fn has_started_embedding(&self) -> bool {
        self.embeddings.front().is_some_and(|first| first.text.is_started())
    }

    /// How many answers may run beside embeddings. While embeddings wait, one sequence is reserved for them, so that a steady flow of answers does
    /// not take every sequence. With a single sequence, answers and embeddings take turns.
    pub(super) fn answer_places(&self) -> usize {
        match self.max_sequences {
            all if self.embeddings.is_empty() => all,
            0 | 1 => usize::from(!self.has_started_embedding() && !self.is_turn_of_embedding),
            all => all - 1,
        }
    }

    /// Whether a chunk of an embedding is computed next. The embedding must have started or a sequence must be free for it. While answers go on and
    /// prompts are read, embeddings and prompts take turns, so that no answer waits for both.
    pub(super) fn embeds_next(&self) -> bool {
        let has_place = self.has_started_embedding() || self.batch.len() < self.max_sequences;
        let is_possible = !self.embeddings.is_empty() && has_place;
        let takes_turns = self.batch.is_decoding() && self.batch.is_prefilling();
        is_possible && !(takes_turns && self.embedded_last)
    }

    /// Computes the next chunk of the first embedding.
    pub(super) fn embed(&mut self) {
        if !self.has_started_embedding() && self.is_full() && !self.kept.is_empty() {
            self.kept.remove(0);
        }
        let Some(first) = self.embeddings.front_mut() else { return };
        let event = match self.batch.embed(&mut first.text) {
            Ok(None) => return,
            Ok(Some(vector)) => {
                self.metrics.prompt_tokens.inc_by(first.text.tokens() as u64);
                self.metrics.ended("stop");
                RequestEvent::Embedding(vector)
            }
            Err(error) if error.needs_reload() => {
                // The failure ends all requests of this engine. The next request loads the engine again.
                self.failure = Some(error.into());
                return;
            }
            Err(error) => {
                self.metrics.ended("failed");
                RequestEvent::Failed(error.into())
            }
        };
        self.is_turn_of_embedding = false;
        if let Some(done) = self.embeddings.pop_front() {
            let _ = done.client.events.send(event);
        }
    }
}
