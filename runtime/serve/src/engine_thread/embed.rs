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

impl<B: Backend> EngineThread<B> {
    /// Whether a chunk of an embedding is next: a sequence is free for it, and it is its turn. While answers go on, embeddings and prompts
    /// take turns, so that no answer waits for both.
    pub(super) fn embeds_next(&self) -> bool {
        let is_possible = !self.embeddings.is_empty() && self.batch.len() < self.max_sequences;
        let takes_turns = self.batch.is_answering() && self.batch.reads_prompts();
        is_possible && !(takes_turns && self.embedded_last)
    }

    /// The next chunk of the first embedding.
    pub(super) fn embed(&mut self) {
        if self.batch.len() + self.kept.len() >= self.max_sequences && !self.kept.is_empty() {
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
            Err(error) => {
                self.is_closed |= error.needs_reload();
                self.metrics.ended("failed");
                RequestEvent::Failed(error.into())
            }
        };
        if let Some(done) = self.embeddings.pop_front() {
            let _ = done.client.events.send(event);
        }
    }
}
