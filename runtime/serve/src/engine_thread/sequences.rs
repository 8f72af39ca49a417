//! Which states a request starts with: those of a kept sequence, stored pages, or none; and which sequences are kept.

use super::{EngineThread, Waiting};
use hpp_engine::Backend;
use hpp_generate::TokenSequence;
use hpp_generate::kv::PageLookup;
use std::time::Instant;

/// What a request starts with.
pub(super) struct Start<B: Backend> {
    /// The sequence with its states; empty if there are none.
    pub sequence: TokenSequence<B>,
    /// Whether it is a kept sequence of an earlier request. Otherwise the states, if any, were restored from pages.
    pub is_kept: bool,
}

impl<B: Backend + 'static> EngineThread<B> {
    /// Sequences with states: running ones, kept ones, and that of a started embedding.
    pub(super) fn with_states(&self) -> usize {
        self.batch.len() + self.kept.len() + usize::from(self.has_started_embedding())
    }

    /// Whether a new sequence can start only if a kept one is dropped.
    pub(super) fn is_full(&self) -> bool {
        self.with_states() >= self.max_sequences
    }

    /// Drops kept sequences beyond the most sequences with states, the least recently used first. Their pages stay in the cache.
    pub(super) fn drop_kept(&mut self) {
        let excess = self.with_states().saturating_sub(self.max_sequences);
        self.kept.drain(..self.kept.len().min(excess));
    }

    /// The states that a request starts with: those of a kept sequence, or stored pages and possibly the prompt end, whichever shares the longest
    /// prefix with its prompt; else an empty sequence. `None` while pages are being read.
    pub(super) fn sequence_for(&mut self, waiting: &mut Waiting) -> Option<Start<B>> {
        if waiting.is_loading {
            return None;
        }
        let (request, hints) = (&waiting.task.request, &waiting.task.hints);
        // A request for the logits of its prompt must compute the whole prompt: logits of earlier prompts are not kept.
        let prompt: &[u32] = if request.prompt_logits { &[] } else { &request.prompt };
        let is_full = self.is_full();
        if let Some(equal) = self.kept_for_equal(prompt, hints.session.as_deref(), is_full) {
            return Some(Start { sequence: self.kept.remove(equal), is_kept: true });
        }
        let shared = |sequence: &TokenSequence<B>| sequence.shared_prefix(prompt, hints.session.as_deref());
        let best = (0..self.kept.len()).max_by_key(|index| shared(&self.kept[*index]));
        let in_best = best.map_or(0, |best| shared(&self.kept[best]));
        let length = best.map_or(0, |best| self.kept[best].tokens().len());
        let looked_up = Instant::now();
        let (mut pages, mut has_all) = (Vec::new(), false);
        let found = self.batch.cache().map(|cache| cache.look_up(prompt, hints.session.as_deref()));
        if let Some((cache, found)) = self.batch.cache().zip(found.as_ref()) {
            // With equally many tokens a kept sequence is better, because it needs no copy. But truncating it to a short common prefix would lose the
            // rest of another conversation, and some states cannot be truncated.
            let is_best = in_best >= self.chunk_tokens && 2 * in_best >= length && !cache.has_snapshots();
            // Copying pages from RAM takes less time than computing the prompt's end.
            let needs_no_pass = found.has_end() && cache.in_ram(found) == found.len();
            if !found.is_empty() && (!is_best || needs_no_pass || found.len() * self.chunk_tokens > in_best) {
                match cache.load(found, hints.priority, waiting.ticket.as_ref()) {
                    PageLookup::Pages(loaded) => pages = loaded,
                    PageLookup::Loading(ticket) => {
                        waiting.ticket = ticket.or(waiting.ticket.take());
                        waiting.is_loading = true;
                        waiting.loads_since.get_or_insert(looked_up);
                        return None;
                    }
                }
            }
            has_all = found.has_end() && pages.len() == found.len();
        }
        if pages.is_empty()
            && !has_all
            && let Some(best) = best
            && in_best >= self.chunk_tokens
            && (is_full || 2 * in_best >= length)
        {
            return Some(Start { sequence: self.kept.remove(best), is_kept: true });
        }
        if let Some((cache, found)) = self.batch.cache().zip(found.as_ref()) {
            cache.count_hits(found, pages.len(), waiting.in_ram);
        }
        if is_full && !self.kept.is_empty() {
            // Drops the kept sequence whose prefix was restored from pages, rather than another conversation.
            let duplicate = best.filter(|_| has_all && in_best >= self.chunk_tokens);
            self.kept.remove(duplicate.unwrap_or(0));
        }
        let restored = found.map(|found| self.batch.restore(prompt, &found, &pages)).transpose();
        let restored = restored.inspect_err(|error| {
            tracing::warn!(
                error = hpp_schema::error_line(error),
                "cannot restore KV pages; the prompt is computed again"
            );
        });
        if (has_all || !pages.is_empty()) && restored.is_ok() {
            match waiting.loads_since {
                Some(since) => self.metrics.restored_from_disk.observe(since.elapsed().as_secs_f64()),
                None => self.metrics.restored_from_ram.observe(looked_up.elapsed().as_secs_f64()),
            }
        }
        Some(Start { sequence: restored.ok().flatten().unwrap_or_default(), is_kept: false })
    }

    /// Counts the whole pages of a prompt that a kept sequence had. `tokens`: prompt tokens that need no pass.
    pub(super) fn count_in_sequence(&self, prompt: usize, tokens: usize, is_kept: bool) {
        let wanted = prompt.saturating_sub(2) / self.chunk_tokens;
        let found = if is_kept { wanted.min(tokens / self.chunk_tokens) } else { 0 };
        self.metrics.cache.count_in_sequence(found, wanted - found);
        if is_kept && let Some(cache) = self.batch.cache() {
            cache.count_misses(wanted - found);
        }
    }

    /// The kept sequence with exactly this prompt, which then needs no pass; the most recently used of several.
    fn kept_for_equal(&self, prompt: &[u32], session: Option<&str>, is_full: bool) -> Option<usize> {
        // While there is room, a long answer of another conversation is not truncated.
        let may_truncate = |sequence: &TokenSequence<B>| {
            let is_own = sequence.session().is_none_or(|other| Some(other) == session);
            is_full || is_own || 2 * prompt.len() >= sequence.tokens().len()
        };
        let engine = self.batch.engine();
        self.kept.iter().rposition(|sequence| may_truncate(sequence) && sequence.has_prompt(engine, prompt, session))
    }

    /// Keeps the sequence of an answered request, unless its client says that no request follows soon.
    pub(super) fn keep(&mut self, sequence: TokenSequence<B>, park: bool) {
        if park && let Some(cache) = self.batch.cache() {
            cache.park(&sequence);
        } else if sequence.tokens().len() >= self.chunk_tokens {
            self.kept.push(sequence);
            // The share may allow fewer sequences than are running.
            self.drop_kept();
        }
    }
}
