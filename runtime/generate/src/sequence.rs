//! Token sequences on an engine: feeds tokens, reuses the common prefix of two prompts, holds the logits after the last token.
//!
//! Only this file and `batch.rs` call an engine.

use crate::embedding_table::EmbeddingTable;
use crate::error::GenerateError;
use crate::input::{Input, chunk_length};
use crate::kv_cache::{KvCache, PageValue};
use crate::speculate::MAX_DRAFT;
use hpp_engine::{Backend, Engine, EngineError, LogitRows, Logits, NamedTensors, Sequence, StepInput, WorkItem};
use hpp_kv::PageKey;

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
    grid: usize,
    /// The leading tokens that were fed in whole chunks of the grid. Any prompt with this prefix would be fed in the same chunks, so its states
    /// have the same bits.
    on_grid: usize,
    /// The conversation that it belongs to.
    session: Option<String>,
    /// The keys of its leading pages that are saved or cannot be.
    saved: Vec<PageKey>,
}

impl<B: Backend> Default for TokenSequence<B> {
    fn default() -> Self {
        Self {
            sequence: None,
            tokens: Vec::new(),
            logits: Logits::default(),
            embedding_rows: Vec::new(),
            grid: 0,
            on_grid: 0,
            session: None,
            saved: Vec::new(),
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

    /// Truncates the sequence to the prefix that `prompt` can share with it ([`shared_prefix`](Self::shared_prefix)), rounded down to `grid` tokens,
    /// so that at least two tokens remain to be fed: a single one would be computed differently from the end of a longer chunk. From now
    /// on it belongs to `session`.
    pub fn keep_prefix_on_grid(
        &mut self,
        engine: &mut Engine<B>,
        prompt: &[u32],
        session: Option<&str>,
        grid: usize,
    ) -> Result<usize, GenerateError> {
        let grid = grid.max(1);
        let wanted = self.shared_prefix(prompt, session).min(prompt.len().saturating_sub(2)) / grid * grid;
        let left = match self.keep(engine, wanted)? {
            left if left % grid == 0 => left,
            // States that cannot go back to the grid.
            left => self.keep(engine, left / grid * grid)?,
        };
        (self.grid, self.session) = (grid, session.map(str::to_owned));
        Ok(left)
    }

    /// How many tokens a prompt has in common with the start of this sequence.
    pub fn common_prefix(&self, prompt: &[u32]) -> usize {
        self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count()
    }

    /// The leading tokens whose states a prompt may continue: in the session of this sequence all common ones; otherwise those with the
    /// bits that the prompt itself would compute, which excludes generated tokens.
    pub fn shared_prefix(&self, prompt: &[u32], session: Option<&str>) -> usize {
        let common = self.common_prefix(prompt);
        if session.is_some() && session == self.session.as_deref() { common } else { common.min(self.on_grid) }
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
            let grid = self.grid.max(1);
            self.on_grid = self.on_grid.min(left / grid * grid);
            self.saved.truncate(left / grid);
        }
    }

    /// Most tokens that can be fed beside one in one pass, and dropped again.
    pub fn max_draft(&self, engine: &Engine<B>) -> usize {
        let Some(sequence) = &self.sequence else { return 0 };
        let most = sequence.room().min(engine.chunk()).min(engine.max_undo(sequence));
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

    /// The same as an item of a pass with other sequences. After the pass, the caller calls [`fed`](Self::fed).
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
        // Several rows: a draft, some of which may be dropped.
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
        if self.grid > 0 && self.on_grid == self.tokens.len() && tokens.len() == self.grid {
            self.on_grid += self.grid;
        }
        self.tokens.extend_from_slice(tokens);
    }
}

/// For [`KvCache`](crate::KvCache).
impl<B: Backend> TokenSequence<B> {
    /// A sequence whose states were restored for these tokens, which are whole pages with these keys. `on_grid`: how many of the tokens
    /// were fed in chunks of the grid.
    pub(crate) fn restored(
        sequence: Sequence<B>,
        tokens: &[u32],
        saved: Vec<PageKey>,
        on_grid: usize,
        session: Option<&str>,
    ) -> Self {
        let grid = tokens.len().checked_div(saved.len()).unwrap_or(0);
        let (tokens, session) = (tokens.to_vec(), session.map(str::to_owned));
        Self { sequence: Some(sequence), tokens, grid, on_grid, session, saved, ..Self::default() }
    }

    /// The keys of leading pages that are saved or cannot be.
    pub(crate) fn saved(&self) -> &[PageKey] {
        &self.saved
    }

    /// Notes such pages.
    pub(crate) fn add_saved(&mut self, keys: impl IntoIterator<Item = PageKey>) {
        self.saved.extend(keys);
    }

    /// The leading tokens that were fed in whole chunks of the grid.
    pub(crate) fn on_grid(&self) -> usize {
        self.on_grid
    }

    /// The conversation that it belongs to.
    pub(crate) fn session(&self) -> Option<&str> {
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

/// The outcome of a prefill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Prefill {
    /// The sequence is the prompt.
    Complete {
        /// Tokens kept from the sequence before.
        reused: usize,
    },
    /// The caller or a cancel handle stopped it.
    Cancelled,
}

/// An engine with one sequence, for programs that run one request at a time.
pub struct SingleSequence<B: Backend> {
    engine: Engine<B>,
    sequence: TokenSequence<B>,
    inputs: ModelInputs,
    session: Option<SavedSession>,
}

/// Where the states of the sequence are saved, and for which conversation.
struct SavedSession {
    cache: KvCache,
    name: String,
}

impl<B: Backend> SingleSequence<B> {
    /// An empty sequence on this engine.
    pub fn new(engine: Engine<B>, inputs: ModelInputs) -> Self {
        Self { engine, sequence: TokenSequence::default(), inputs, session: None }
    }

    /// From now on saves all states for a conversation, and starts prompts from their saved pages. Prompts must be fed in chunks
    /// of a page ([`KvCache::page_tokens`]).
    pub fn save_in(&mut self, cache: KvCache, session: &str) {
        self.session = Some(SavedSession { cache, name: session.to_owned() });
    }

    /// Where states are saved.
    pub fn cache(&self) -> Option<&KvCache> {
        self.session.as_ref().map(|session| &session.cache)
    }

    /// The engine.
    pub fn engine(&mut self) -> &mut Engine<B> {
        &mut self.engine
    }

    /// The tokens fed so far.
    pub fn tokens(&self) -> &[u32] {
        self.sequence.tokens()
    }

    /// The logits `[vocab]` after the last token fed.
    pub fn logits(&self) -> &[f32] {
        self.sequence.logits()
    }

    /// The logits `[rows, vocab]` that the last feed asked for.
    pub fn logit_rows(&self) -> &Logits {
        self.sequence.logit_rows()
    }

    /// Most tokens of the sequence.
    pub fn context(&self) -> u64 {
        self.engine.context()
    }

    /// Tokens that still fit the context.
    pub fn room(&self) -> u64 {
        self.sequence.room(&self.engine)
    }

    /// Bytes reserved for the sequence's state.
    pub fn state_bytes(&self) -> u64 {
        self.sequence.state_bytes()
    }

    /// Drops all tokens and the state.
    pub fn clear(&mut self) {
        self.sequence.clear();
    }

    /// Keeps the prefix that the sequence or the saved pages have in common with a prompt. See [`TokenSequence::keep_prefix`].
    pub fn keep_prefix(&mut self, prompt: &[u32]) -> Result<usize, GenerateError> {
        let Some(SavedSession { cache, name }) = &self.session else {
            return self.sequence.keep_prefix(&mut self.engine, prompt);
        };
        let (session, page) = (Some(name.as_str()), cache.page_tokens());
        let found = cache.look_up(prompt, session);
        let kept = self.sequence.shared_prefix(prompt, session) / page;
        if found.len() > kept || (cache.has_snapshots() && !found.is_empty()) {
            let pages = cache.load_waiting(&found);
            self.sequence = cache.restore(&mut self.engine, prompt, &found, &pages)?;
        }
        self.sequence.keep_prefix_on_grid(&mut self.engine, prompt, session, page)
    }

    /// See [`TokenSequence::max_draft`].
    pub fn max_draft(&self) -> usize {
        self.sequence.max_draft(&self.engine)
    }

    /// See [`TokenSequence::drop_last`].
    pub fn drop_last(&mut self, count: usize) -> Result<usize, GenerateError> {
        self.sequence.drop_last(&mut self.engine, count)
    }

    /// Appends tokens and computes the logits after the last. See [`TokenSequence::feed`].
    pub fn feed(&mut self, tokens: &[u32]) -> Result<(), GenerateError> {
        self.feed_input(Input { tokens, rows: LogitRows::Last })
    }

    /// See [`TokenSequence::feed`].
    pub fn feed_input(&mut self, input: Input<'_>) -> Result<(), GenerateError> {
        self.sequence.feed(&mut self.engine, &self.inputs, input)
    }

    /// Saves the pages that are complete. `is_last`: see [`KvCache::save`]. Call it when no token will be dropped any more.
    pub fn save(&mut self, is_last: bool) {
        if let Some(SavedSession { cache, .. }) = &self.session {
            cache.save(&mut self.engine, &mut self.sequence, PageValue::default(), is_last);
        }
    }

    /// Makes the sequence equal to `prompt`, reusing their common prefix. Checks `cancelled` before each chunk.
    pub fn prefill(&mut self, prompt: &[u32], cancelled: &dyn Fn() -> bool) -> Result<Prefill, GenerateError> {
        let reused = self.keep_prefix(prompt)?;
        let chunk = prompt_chunk(&self.engine);
        let mut rest = &prompt[reused..];
        while !rest.is_empty() {
            if cancelled() {
                return Ok(Prefill::Cancelled);
            }
            let (now, later) = rest.split_at(chunk_length(rest.len(), chunk));
            match self.feed(now) {
                Err(error) if error.is_cancelled() => return Ok(Prefill::Cancelled),
                fed => fed?,
            }
            rest = later;
        }
        Ok(Prefill::Complete { reused })
    }
}
