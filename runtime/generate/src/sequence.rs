//! Token sequences on an engine: feeds tokens, reuses the common prefix of two prompts, holds the logits after the last token.
//!
//! Passes are run here and in `batch.rs`. Other files only save and restore states, tap outputs, or change placement and locked memory.

use crate::embedding_table::EmbeddingTable;
use crate::error::GenerateError;
use crate::input::{Input, chunk_length};
use crate::speculate::MAX_DRAFT;
use hpp_engine::{Backend, Engine, EngineError, LogitRows, Logits, NamedTensors, Sequence, StepInput, WorkItem};
use hpp_kv::PageKey;
use hpp_schema::SourceModel;

/// Prompt tokens between two checks for cancellation, if the plan feeds prompts in chunks.
const CHUNK: usize = 64;

/// The model's inputs besides tokens; all sequences of one engine may share them.
#[derive(Default)]
pub struct ModelInputs {
    /// For a model that takes embeddings instead of token ids.
    pub embeddings: Option<EmbeddingTable>,
    /// Further inputs by name.
    pub extra: NamedTensors,
}

/// Tokens, their state on an engine, and the logits after the last of them. Must be used with one engine only.
pub struct TokenSequence<B: Backend> {
    /// Created by the first feed.
    sequence: Option<Sequence<B>>,
    tokens: Vec<u32>,
    logits: Logits,
    /// Buffer for embeddings.
    embedding_rows: Vec<f32>,
    /// Tokens of a page and of a chunk of a prompt; 0 if chunks are not counted.
    chunk_tokens: usize,
    /// The leading tokens that were fed in whole chunks of `chunk_tokens`. Any prompt with this prefix would be fed in the same chunks, so
    /// its states have the same bits.
    in_whole_chunks: usize,
    /// The conversation that it belongs to.
    session: Option<String>,
    /// The keys of its leading pages that were offered to the cache, whether or not they could be saved.
    saved: Vec<PageKey>,
    /// The end of the last prompt fed in chunks.
    prompt_end: Option<PromptEnd>,
}

/// Where a prompt ended, so that an equal prompt needs no pass.
struct PromptEnd {
    /// Tokens up to its end.
    tokens: usize,
    /// The logits `[vocab]` after them.
    logits: Vec<f32>,
    /// Its key in the cache, once it was offered to the cache, whether or not it could be saved.
    key: Option<PageKey>,
}

/// Bytes of the logits that a [`TokenSequence`] of a model keeps: those after its last token and those after its prompt.
pub fn kept_logits_bytes(model: &SourceModel) -> u64 {
    model.vocabulary().unwrap_or(0).saturating_mul(2 * size_of::<f32>() as u64)
}

impl<B: Backend> Default for TokenSequence<B> {
    fn default() -> Self {
        Self {
            sequence: None,
            tokens: Vec::new(),
            logits: Logits::default(),
            embedding_rows: Vec::new(),
            chunk_tokens: 0,
            in_whole_chunks: 0,
            session: None,
            saved: Vec::new(),
            prompt_end: None,
        }
    }
}

impl<B: Backend> TokenSequence<B> {
    /// The tokens fed so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The logits `[vocab]` after the last token fed.
    pub fn logits(&self) -> &[f32] {
        self.logits.last()
    }

    /// The logits `[rows, vocab]` that the last feed asked for.
    pub fn logit_rows(&self) -> &Logits {
        &self.logits
    }

    /// Tokens that still fit the context.
    pub fn room(&self, engine: &Engine<B>) -> u64 {
        self.sequence.as_ref().map_or(engine.context(), Sequence::room)
    }

    /// Bytes reserved for its state.
    pub fn state_bytes(&self) -> u64 {
        self.sequence.as_ref().map_or(0, Sequence::state_bytes)
    }

    /// Frees its states. See [`Engine::free`].
    pub fn free(self, engine: &mut Engine<B>) {
        self.sequence.into_iter().for_each(|sequence| engine.free(sequence));
    }

    /// Drops all tokens and the state.
    pub fn clear(&mut self) {
        self.sequence = None;
        self.truncate_tokens(0);
    }

    /// Truncates the sequence to the longest prefix that it shares with `prompt` and that its states can go back to. Returns the
    /// length kept, which is less than the prompt's, so that at least one token remains to be fed.
    pub fn keep_prefix(&mut self, engine: &mut Engine<B>, prompt: &[u32]) -> Result<usize, GenerateError> {
        let wanted = self.common_prefix(prompt).min(prompt.len().saturating_sub(1));
        self.keep(engine, wanted)
    }

    /// Truncates the sequence to the prefix that `prompt` can share with it ([`shared_prefix`](Self::shared_prefix)), in whole chunks of
    /// `chunk_tokens`, so that at least two tokens remain to be fed: a single one would be computed differently from the end of a longer
    /// chunk. From now on it belongs to `session`.
    pub fn keep_whole_chunks(
        &mut self,
        engine: &mut Engine<B>,
        prompt: &[u32],
        session: Option<&str>,
        chunk_tokens: usize,
    ) -> Result<usize, GenerateError> {
        let chunk_tokens = chunk_tokens.max(1);
        let wanted = self.shared_prefix(prompt, session) / chunk_tokens * chunk_tokens;
        let wanted = wanted.min(last_chunk_start(prompt.len(), chunk_tokens));
        let left = match self.keep(engine, wanted)? {
            left if left % chunk_tokens == 0 => left,
            // The states could not go back to the end of that chunk: go back to the end of an earlier one.
            left => self.keep(engine, left / chunk_tokens * chunk_tokens)?,
        };
        (self.chunk_tokens, self.session) = (chunk_tokens, session.map(str::to_owned));
        Ok(left)
    }

    /// Notes that a prompt ends after the last token fed, and that it was fed in chunks of `chunk_tokens`. If this sequence counts chunks
    /// of this size, an equal prompt needs no pass then ([`keep_prompt`](Self::keep_prompt)).
    pub fn end_prompt(&mut self, chunk_tokens: usize) {
        let (tokens, logits) = (self.tokens.len(), self.logits.last());
        if chunk_tokens > 0 && chunk_tokens == self.chunk_tokens && !logits.is_empty() {
            self.prompt_end = Some(PromptEnd { tokens, logits: logits.to_vec(), key: None });
        }
    }

    /// Whether [`keep_prompt`](Self::keep_prompt) would keep all of `prompt`: the sequence begins with the prompt, its states can go back
    /// to the end of the prompt, and it has the logits there, with the bits that computing the prompt after its last whole chunk would
    /// give.
    pub fn has_prompt(&self, engine: &Engine<B>, prompt: &[u32], session: Option<&str>) -> bool {
        let ends_here = self.prompt_end.as_ref().is_some_and(|end| end.tokens == prompt.len());
        let length = prompt.len() as u64;
        let goes_back = |sequence| engine.truncated_length(sequence, length) == Some(length);
        ends_here
            && self.tokens.starts_with(prompt)
            && self.shared_prefix(prompt, session) >= last_chunk_start(prompt.len(), self.chunk_tokens.max(1))
            && self.sequence.as_ref().is_some_and(goes_back)
    }

    /// Truncates the sequence to `prompt` and returns true if it [has](Self::has_prompt) all of it. Then [`logits`](Self::logits) are those
    /// after the prompt, and it belongs to `session` from now on.
    pub fn keep_prompt(
        &mut self,
        engine: &mut Engine<B>,
        prompt: &[u32],
        session: Option<&str>,
    ) -> Result<bool, GenerateError> {
        if !self.has_prompt(engine, prompt, session) || self.keep(engine, prompt.len())? < prompt.len() {
            return Ok(false);
        }
        let Some(end) = &self.prompt_end else { return Ok(false) };
        self.logits.rows = 1;
        self.logits.vocab = end.logits.len();
        self.logits.data.clone_from(&end.logits);
        if self.session.as_deref() != session {
            // Pages beyond the whole chunks were saved for the other session, and this one does not find them.
            self.saved.truncate(self.in_whole_chunks / self.chunk_tokens.max(1));
            self.session = session.map(str::to_owned);
        }
        Ok(true)
    }

    /// How many tokens a prompt has in common with the start of this sequence.
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    /// The leading tokens whose states a prompt may continue: in the session of this sequence all common ones; otherwise those with the
    /// bits that the prompt itself would compute, which excludes generated tokens.
    pub fn shared_prefix(&self, prompt: &[u32], session: Option<&str>) -> usize {
        let common = self.common_prefix(prompt);
        if session.is_some() && session == self.session.as_deref() { common } else { common.min(self.in_whole_chunks) }
    }

    /// Truncates to at most `wanted` tokens, to a length that its states can go back to. Returns that length.
    fn keep(&mut self, engine: &mut Engine<B>, wanted: usize) -> Result<usize, GenerateError> {
        let left = match &mut self.sequence {
            Some(sequence) if wanted > 0 => engine.truncate(sequence, wanted as u64)?.unwrap_or(0),
            _ => 0,
        };
        if left == 0 {
            self.clear();
        }
        self.truncate_tokens(left as usize);
        Ok(left as usize)
    }

    fn truncate_tokens(&mut self, left: usize) {
        let before = self.tokens.len();
        self.tokens.truncate(left);
        if left < before {
            let chunk_tokens = self.chunk_tokens.max(1);
            self.in_whole_chunks = self.in_whole_chunks.min(left / chunk_tokens * chunk_tokens);
            self.saved.truncate(left / chunk_tokens);
            self.prompt_end.take_if(|end| end.tokens > left);
        }
    }

    /// Most tokens that can be fed beside one in one pass, and dropped again.
    pub fn max_draft(&self, engine: &Engine<B>) -> usize {
        let Some(sequence) = &self.sequence else { return 0 };
        let length = self.tokens.len() as u64;
        // A draft that crosses this length would compute the tokens before it with the tables for those beyond.
        let change = engine.plan().model.tables_change_after.and_then(|change| change.checked_sub(length));
        let most = sequence.room().min(engine.chunk()).min(engine.max_undo(sequence)).min(change.unwrap_or(u64::MAX));
        most.saturating_sub(1).min(MAX_DRAFT as u64) as usize
    }

    /// Drops the last `count` tokens. Returns how many are left, which may be fewer where states cannot go back to each token: then the
    /// caller feeds the others again.
    pub fn drop_last(&mut self, engine: &mut Engine<B>, count: usize) -> Result<usize, GenerateError> {
        let length = self.tokens.len().saturating_sub(count);
        let left = match &mut self.sequence {
            Some(sequence) => engine.truncate(sequence, length as u64)?,
            None => None,
        };
        match left {
            Some(left) => self.truncate_tokens(left as usize),
            None => self.clear(),
        }
        Ok(self.tokens.len())
    }

    /// Appends tokens and computes the logits of some of them. A cancelled pass leaves half a pass's state, so it clears the sequence.
    pub fn feed(
        &mut self,
        engine: &mut Engine<B>,
        inputs: &ModelInputs,
        Input { tokens, rows }: Input<'_>,
    ) -> Result<(), GenerateError> {
        let WorkItem { sequence, input, logits, .. } = self.work_item(engine, inputs, Input { tokens, rows })?;
        let step = engine.step_with(sequence, input, rows, &inputs.extra, logits);
        if matches!(step, Err(EngineError::Cancelled)) {
            self.clear();
        }
        step?;
        self.fed(tokens);
        Ok(())
    }

    /// Makes the sequence equal to `text`, reusing their common prefix, but feeds at most `most` chunks. Returns whether it is equal now; a
    /// cancelled pass ends this early.
    pub fn read(
        &mut self,
        engine: &mut Engine<B>,
        inputs: &ModelInputs,
        text: &[u32],
        most: usize,
    ) -> Result<bool, GenerateError> {
        let chunk = prompt_chunk(engine);
        let mut rest = &text[self.keep_prefix(engine, text)?..];
        for _ in 0..most {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(chunk_length(rest.len(), chunk));
            match self.feed(engine, inputs, Input { tokens: now, rows: LogitRows::Last }) {
                Err(error) if error.is_cancelled() => return Ok(false),
                fed => fed?,
            }
            rest = later;
        }
        Ok(rest.is_empty())
    }

    /// What [`feed`](Self::feed) computes, as an item of a pass with other sequences. After the pass, the caller calls [`fed`](Self::fed).
    pub fn work_item<'a>(
        &'a mut self,
        engine: &mut Engine<B>,
        inputs: &'a ModelInputs,
        Input { tokens, rows }: Input<'a>,
    ) -> Result<WorkItem<'a, B>, GenerateError> {
        let sequence = match &mut self.sequence {
            Some(sequence) => sequence,
            empty => empty.insert(engine.new_sequence()?),
        };
        // Several rows are those of a draft, of which tokens may be dropped.
        sequence.keep_snapshots(matches!(rows, LogitRows::LastN(2..)));
        let input = match &inputs.embeddings {
            None => StepInput::Tokens(tokens),
            Some(table) => {
                table.read_rows(tokens, &mut self.embedding_rows)?;
                StepInput::Embeddings { tokens: tokens.len(), data: &self.embedding_rows }
            }
        };
        Ok(WorkItem { sequence, input, rows, extra: &inputs.extra, logits: &mut self.logits })
    }

    /// Notes the tokens of an item that succeeded.
    pub fn fed(&mut self, tokens: &[u32]) {
        if self.chunk_tokens > 0 && self.in_whole_chunks == self.tokens.len() && tokens.len() == self.chunk_tokens {
            self.in_whole_chunks += self.chunk_tokens;
        }
        self.tokens.extend_from_slice(tokens);
    }
}

/// Where the last chunk of a prompt begins at the latest: at least two tokens follow, because a single one would be computed differently
/// from the end of a longer chunk. At most `chunk_tokens + 1` tokens follow; that many are computed in two chunks.
pub(crate) fn last_chunk_start(prompt: usize, chunk_tokens: usize) -> usize {
    prompt.saturating_sub(2) / chunk_tokens * chunk_tokens
}

/// What [`PrefixCache`](crate::PrefixCache) needs to save and restore the states of a sequence.
impl<B: Backend> TokenSequence<B> {
    /// A sequence whose states were restored for these tokens, which are whole pages of `chunk_tokens` tokens with these keys.
    /// `in_whole_chunks`: how many of the tokens were fed in whole chunks.
    pub(crate) fn restored(
        sequence: Sequence<B>,
        tokens: &[u32],
        saved: Vec<PageKey>,
        chunk_tokens: usize,
        in_whole_chunks: usize,
        session: Option<&str>,
    ) -> Self {
        let (tokens, session) = (tokens.to_vec(), session.map(str::to_owned));
        Self { sequence: Some(sequence), tokens, chunk_tokens, in_whole_chunks, session, saved, ..Self::default() }
    }

    /// Notes that its states hold the last tokens of a prompt too, and the logits `[vocab]` after them: what the cache has under this key.
    pub(crate) fn restored_end(&mut self, tokens: &[u32], logits: &[f32], key: PageKey) {
        self.fed(tokens);
        self.logits = Logits { rows: 1, vocab: logits.len(), data: logits.to_vec() };
        self.prompt_end = Some(PromptEnd { tokens: self.tokens.len(), logits: logits.to_vec(), key: Some(key) });
    }

    /// How many tokens there are up to the end of its last prompt, and the logits `[vocab]` after them. `None` if this end was offered to
    /// the cache already, or if the prompt was not fed in chunks of `chunk_tokens`.
    pub(crate) fn unsaved_end(&self, chunk_tokens: usize) -> Option<(usize, &[f32])> {
        let end = self.prompt_end.as_ref().filter(|end| end.key.is_none() && chunk_tokens == self.chunk_tokens)?;
        Some((end.tokens, end.logits.as_slice()))
    }

    /// Notes that the end of its last prompt was offered to the cache under this key.
    pub(crate) fn set_saved_end(&mut self, key: PageKey) {
        if let Some(end) = &mut self.prompt_end {
            end.key = Some(key);
        }
    }

    /// The key of the end of its last prompt, if that was offered to the cache.
    pub(crate) fn saved_end(&self) -> Option<PageKey> {
        self.prompt_end.as_ref()?.key
    }

    /// The keys of its leading pages that were offered to the cache.
    pub(crate) fn saved(&self) -> &[PageKey] {
        &self.saved
    }

    /// Notes that the next pages were offered to the cache under these keys.
    pub(crate) fn add_saved(&mut self, keys: impl IntoIterator<Item = PageKey>) {
        self.saved.extend(keys);
    }

    /// The leading tokens that were fed in whole chunks.
    pub(crate) fn in_whole_chunks(&self) -> usize {
        self.in_whole_chunks
    }

    /// The conversation that it belongs to.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// Its states, if it has any tokens.
    pub(crate) fn states(&self) -> Option<&Sequence<B>> {
        self.sequence.as_ref()
    }
}

/// The most tokens of a prompt to feed in one step: all of them, unless the plan splits prompts into chunks (`prefill_chunk`). Then a
/// multiple of its chunk, so that a caller can check for cancellation between steps.
pub fn prompt_chunk<B: Backend>(engine: &Engine<B>) -> usize {
    let chunk = engine.plan().schedule.prefill_chunk.and_then(|chunk| usize::try_from(chunk).ok());
    chunk.map_or(usize::MAX, |chunk| CHUNK.next_multiple_of(chunk.max(1)))
}
