//! The prefix cache: finds the saved pages of a prompt, restores sequences from them, and saves the pages of a sequence.
//!
//! The bits of a page that was fed as one chunk of a prompt depend only on the tokens up to its end, so every prompt with this prefix may
//! use it. A page with generated tokens has other bits; it is saved for a session and found only by that session. The end of a prompt, after
//! its last whole page, is kept in RAM beside the pages with the logits after it, so that an equal prompt needs no pass.

use crate::error::GenerateError;
use crate::prompt_ends::{PromptEnds, SavedEnd};
use crate::sequence::{TokenSequence, last_chunk_start};
use hpp_engine::{Backend, Engine, EngineError, PageLayout, PageToSave};
use hpp_kv::{
    DiskSettings, EvictionPolicy, Fingerprint, LoadTicket, NewPage, PageBytes, PageKey, PageLookup, PageStore,
    PageStoreError, StoreSettings, StoreStats,
};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Most pages copied out at once, because the store does not count them against its limit of RAM until they are inserted.
const MOST_AT_ONCE: usize = 8;

/// The settings of a cache.
#[derive(Clone, Debug)]
pub struct PrefixCacheSettings {
    /// Tokens of a page: the chunk of prompts.
    pub page_tokens: usize,
    /// Bytes of RAM for pages and ends of prompts together.
    pub ram: u64,
    /// The disk below it.
    pub disk: Option<DiskSettings>,
    /// Which pages are evicted first.
    pub policy: EvictionPolicy,
    /// Hash of everything except tokens that decides the bits of states: weights, plan, library, threads.
    pub fingerprint: Fingerprint,
}

/// The value of a page for eviction.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PageValue {
    /// The time of computing it, milliseconds.
    pub cost_ms: f64,
    /// The priority of its request; a larger number is more important.
    pub priority: i32,
}

/// The stored pages of a prompt's prefix, and whether its end is stored too.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPages {
    keys: Vec<PageKey>,
    /// How many of them any prompt may use.
    shared: usize,
    /// Pages that the prompt could use if they were stored.
    wanted: usize,
    /// The prompt's end, if that and all pages before it are stored.
    end: Option<PageKey>,
    session: Option<String>,
}

impl PromptPages {
    /// Stored pages.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether no page is stored.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether all pages of the prompt and its end are stored: restored with all of them, the prompt needs no pass.
    pub fn has_end(&self) -> bool {
        self.end.is_some()
    }
}

/// The end of a prompt that is to be saved.
struct UnsavedEnd {
    key: PageKey,
    /// The layout of a page with its tokens alone.
    layout: PageLayout,
    /// The position of the first of its tokens.
    first: usize,
    /// The keys of the pages before it.
    pages: Vec<PageKey>,
}

/// Saves and restores the states of one model's sequences.
pub struct PrefixCache {
    store: PageStore,
    layout: PageLayout,
    root: PageKey,
    ends: Mutex<PromptEnds>,
}

impl PrefixCache {
    /// Opens the cache of an engine. `None` if the model's states cannot be saved. `wake` is called, on another thread, whenever a page has
    /// been read from disk or written.
    ///
    /// # Errors
    /// See [`PageStore::open`].
    pub fn open<B: Backend>(
        engine: &Engine<B>,
        settings: PrefixCacheSettings,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Result<Option<Self>, PageStoreError> {
        let PrefixCacheSettings { page_tokens, ram, disk, policy, fingerprint } = settings;
        let Some(layout) = engine.page_layout(page_tokens as u64) else { return Ok(None) };
        let page_bytes = usize::try_from(layout.bytes()).unwrap_or(usize::MAX);
        let store = PageStore::open(StoreSettings { fingerprint, page_bytes, ram, disk, policy }, wake)?;
        let ends = Mutex::new(PromptEnds::new(ram, PageBytes::memory_for(page_bytes)));
        Ok(Some(PrefixCache { store, layout, root: PageKey::root(&fingerprint), ends }))
    }

    fn ends(&self) -> MutexGuard<'_, PromptEnds> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens of a page.
    pub fn page_tokens(&self) -> usize {
        self.layout.tokens() as usize
    }

    /// Whether a sequence cannot go back to an earlier page, because a state mixes or drops tokens: then restored pages are better
    /// than a kept sequence.
    pub fn has_snapshots(&self) -> bool {
        self.layout.has_snapshots()
    }

    /// Finds the stored pages of a prompt's prefix, in RAM or on disk. Leaves at least two tokens of the prompt: a single token would be
    /// computed differently from the end of a longer chunk. If all pages before the tokens that are left are stored, looks in RAM for the
    /// prompt's end too.
    pub fn look_up(&self, prompt: &[u32], session: Option<&str>) -> PromptPages {
        let mut found = PromptPages { session: session.map(str::to_owned), ..PromptPages::default() };
        let usable = &prompt[..prompt.len().saturating_sub(2)];
        let pages = usable.chunks_exact(self.page_tokens());
        found.wanted = pages.len();
        let mut parent = self.root;
        for tokens in pages {
            // A session continues after its own answer even if another prompt had the same tokens.
            let own = session.map(|_| parent.child(tokens, session));
            let shared = || Some(parent.child(tokens, None)).filter(|_| found.shared == found.keys.len());
            let stored = |key: &PageKey| self.store.contains(key);
            let key = match own.filter(stored) {
                Some(key) => key,
                None => match shared().filter(stored) {
                    Some(key) => {
                        found.shared += 1;
                        key
                    }
                    None => break,
                },
            };
            found.keys.push(key);
            parent = key;
        }
        if self.store.stored(&found.keys) < found.keys.len() {
            // The ends of other prompts must not take the RAM that these pages need.
            self.ends().leave_room(found.keys.len());
            self.divide_ram();
        }
        found.keys.truncate(self.store.stored(&found.keys));
        found.shared = found.shared.min(found.keys.len());
        if found.keys.len() == found.wanted {
            let tail = &prompt[found.wanted * self.page_tokens()..];
            let key = found.keys.last().unwrap_or(&self.root).prompt_end(tail);
            found.end = self.ends().contains(&key).then_some(key);
        }
        found
    }

    /// Loads these pages into RAM. See [`PageStore::find`]: while pages are being read, call again with the ticket.
    pub fn load(&self, pages: &PromptPages, priority: i32, ticket: Option<&Arc<LoadTicket>>) -> PageLookup {
        self.store.find(&pages.keys, priority, ticket)
    }

    /// Like [`load`](Self::load), but waits until the pages are in RAM.
    pub fn load_waiting(&self, pages: &PromptPages) -> Vec<Arc<PageBytes>> {
        self.store.find_waiting(&pages.keys, 0)
    }

    /// Starts to load pages into RAM for a request of this priority. See [`PageStore::prefetch`].
    pub fn prefetch(&self, pages: &PromptPages, priority: i32) {
        self.store.prefetch(&pages.keys, priority);
    }

    /// How many of these pages are in RAM.
    pub fn in_ram(&self, pages: &PromptPages) -> usize {
        self.store.in_ram(&pages.keys)
    }

    /// Counts a prompt that used `used` of its pages; `in_ram` of them were in RAM when it arrived.
    pub fn count_hits(&self, pages: &PromptPages, used: usize, in_ram: usize) {
        let from_ram = used.min(in_ram);
        self.store.count_hits(pages.wanted, from_ram, used - from_ram);
    }

    /// Counts pages of a prompt that neither the sequence that it continues nor the store had.
    pub fn count_misses(&self, pages: usize) {
        self.store.count_hits(pages, 0, 0);
    }

    /// A sequence that holds the first pages of a prompt, and continues with the same bits as the sequence that saved them. If `pages` are
    /// all pages that were found, and the prompt's end was found too, the sequence holds the whole prompt with the logits after it
    /// ([`TokenSequence::keep_prompt`]). Empty without pages and end.
    ///
    /// # Errors
    /// Memory for the states is short.
    pub fn restore<B: Backend>(
        &self,
        engine: &mut Engine<B>,
        prompt: &[u32],
        found: &PromptPages,
        pages: &[Arc<PageBytes>],
    ) -> Result<TokenSequence<B>, GenerateError> {
        let count = pages.len().min(found.keys.len());
        let (tokens, tail) = prompt.split_at(count * self.page_tokens());
        let end = found.end.filter(|_| count == found.keys.len()).and_then(|key| self.stored_end(engine, key, tail));
        if count == 0 && end.is_none() {
            return Ok(TokenSequence::default());
        }
        let mut parts: Vec<(&PageLayout, &[u8])> =
            pages[..count].iter().map(|page| (&self.layout, page.payload())).collect();
        parts.extend(end.iter().map(|(_, layout, end)| (layout, end.states.payload())));
        let states = engine.restore_pages(&parts)?;
        let (keys, page) = (found.keys[..count].to_vec(), self.page_tokens());
        let (in_whole_chunks, session) = (found.shared.min(count) * page, found.session.as_deref());
        let mut sequence = TokenSequence::restored(states, tokens, keys, page, in_whole_chunks, session);
        if let Some((key, _, end)) = end {
            sequence.restored_end(tail, &end.logits, key);
        }
        Ok(sequence)
    }

    /// The end of a prompt with its key and layout. `None` if the end was evicted since it was found.
    fn stored_end<B: Backend>(
        &self,
        engine: &Engine<B>,
        key: PageKey,
        tail: &[u32],
    ) -> Option<(PageKey, PageLayout, Arc<SavedEnd>)> {
        let layout = engine.page_layout(tail.len() as u64)?;
        let end = self.ends().get(&key);
        Some((key, layout, end?))
    }

    /// Saves the pages that a sequence has completed and the store does not have, and the end of its prompt. `is_last`: no token follows
    /// for now, so that states on a device, which are copied whole, are saved too. If something cannot be saved, later prompts take longer,
    /// and nothing else happens.
    pub fn save<B: Backend>(
        &self,
        engine: &mut Engine<B>,
        sequence: &mut TokenSequence<B>,
        value: PageValue,
        is_last: bool,
    ) {
        let page = self.page_tokens();
        let is_prompt_end = !sequence.tokens().len().is_multiple_of(page);
        if !self.layout.is_on_host() && !self.layout.has_snapshots() && !is_last && !is_prompt_end {
            return;
        }
        loop {
            let batch = self.unsaved(sequence);
            let end = self.unsaved_end(engine, sequence, &batch);
            if batch.is_empty() && end.is_none() {
                return;
            }
            let end_key = end.as_ref().map(|end| end.key);
            if let Err(error) = self.save_states(engine, sequence, &batch, end, value) {
                tracing::warn!(error = hpp_schema::error_line(&error), "cannot save KV pages or the end of a prompt");
            }
            sequence.add_saved(batch);
            end_key.into_iter().for_each(|key| sequence.set_saved_end(key));
        }
    }

    /// The keys of the next pages to look at.
    fn unsaved<B: Backend>(&self, sequence: &TokenSequence<B>) -> Vec<PageKey> {
        let (page, tokens) = (self.page_tokens(), sequence.tokens());
        let first = sequence.saved().len();
        let mut parent = sequence.saved().last().copied().unwrap_or(self.root);
        let mut keys = Vec::new();
        for (index, tokens) in tokens.chunks_exact(page).enumerate().skip(first).take(MOST_AT_ONCE) {
            let is_shared = (index + 1) * page <= sequence.in_whole_chunks();
            if !is_shared && sequence.session().is_none() {
                break;
            }
            parent = parent.child(tokens, sequence.session().filter(|_| !is_shared));
            keys.push(parent);
        }
        keys
    }

    /// The end of a sequence's prompt, if it is to be saved with the next pages, which have the keys `batch`. The sequence must still hold
    /// the states at this end, and any prompt must be allowed to use the pages before it: not so after a page of a session, whose bits
    /// depend on how it was generated.
    fn unsaved_end<B: Backend>(
        &self,
        engine: &Engine<B>,
        sequence: &TokenSequence<B>,
        batch: &[PageKey],
    ) -> Option<UnsavedEnd> {
        let page = self.page_tokens();
        let (end, _) = sequence.unsaved_end(page)?;
        let first = last_chunk_start(end, page);
        // States on a device are copied whole. An end alone is worth that only where each page needs such a copy anyway.
        let is_worth_a_copy = self.layout.is_on_host() || self.layout.has_snapshots() || !batch.is_empty();
        let is_held = !self.layout.has_snapshots() || end == sequence.tokens().len();
        if !is_worth_a_copy || !is_held || sequence.in_whole_chunks() < first {
            return None;
        }
        let pages: Vec<PageKey> = sequence.saved().iter().chain(batch).take(first / page).copied().collect();
        if pages.len() < first / page {
            return None;
        }
        let layout = engine.page_layout((end - first) as u64)?;
        let key = pages.last().unwrap_or(&self.root).prompt_end(&sequence.tokens()[first..end]);
        Some(UnsavedEnd { key, layout, first, pages })
    }

    /// Saves the next pages of a sequence, which have these keys, and the end of its prompt.
    fn save_states<B: Backend>(
        &self,
        engine: &mut Engine<B>,
        sequence: &TokenSequence<B>,
        keys: &[PageKey],
        end: Option<UnsavedEnd>,
        value: PageValue,
    ) -> Result<(), EngineError> {
        let (page, first) = (self.page_tokens(), sequence.saved().len());
        let Some(states) = sequence.states() else { return Ok(()) };
        let is_whole = |index: usize| !self.layout.has_snapshots() || (index + 1) * page == sequence.tokens().len();
        let wanted = |offset: &usize| is_whole(first + offset) && !self.store.contains(&keys[*offset]);
        let start = (0..keys.len()).find(wanted).unwrap_or(keys.len());
        let Ok(mut pages) = (start..keys.len()).map(|_| self.store.new_page()).collect::<Result<Vec<_>, _>>() else {
            tracing::warn!("no memory for KV pages");
            return Ok(());
        };
        let mut end = end.and_then(|end| Some((self.new_end(sequence, &end)?, end)));
        let mut copies = Vec::with_capacity(pages.len() + 1);
        for (index, bytes) in (first + start..).zip(&mut pages) {
            let bytes = bytes.payload_mut();
            copies.push(PageToSave { layout: &self.layout, first: (index * page) as u64, bytes });
        }
        if let Some((copy, end)) = &mut end {
            let bytes = copy.states.payload_mut();
            copies.push(PageToSave { layout: &end.layout, first: end.first as u64, bytes });
        }
        engine.save_pages(states, copies)?;
        self.insert_pages(sequence, &keys[..start], &keys[start..], pages, value);
        end.into_iter().for_each(|(copy, end)| self.insert_end(end, copy));
        Ok(())
    }

    /// Stores pages that were copied out of a sequence. They follow its saved ones and those that were `skipped`.
    fn insert_pages<B: Backend>(
        &self,
        sequence: &TokenSequence<B>,
        skipped: &[PageKey],
        keys: &[PageKey],
        pages: Vec<PageBytes>,
        PageValue { cost_ms, priority }: PageValue,
    ) {
        let mut parent = skipped.last().or(sequence.saved().last()).copied().unwrap_or(self.root);
        let first = sequence.saved().len() + skipped.len();
        for ((index, key), page) in (first..).zip(keys).zip(pages) {
            let index = u32::try_from(index).unwrap_or(u32::MAX);
            self.store.insert(NewPage { key: *key, parent, index, cost_ms, priority }, page);
            parent = *key;
        }
    }

    /// Memory for the end of a sequence's prompt, with the logits after it. `None` if the end is stored already or too large.
    fn new_end<B: Backend>(&self, sequence: &TokenSequence<B>, end: &UnsavedEnd) -> Option<SavedEnd> {
        let (_, logits) = sequence.unsaved_end(self.page_tokens())?;
        let bytes = usize::try_from(end.layout.bytes()).ok()?;
        let memory = SavedEnd::memory_for(bytes, logits.len());
        if !self.ends().wants(&end.key, memory, end.pages.len()) {
            return None;
        }
        let states = PageBytes::new(bytes);
        let states = states.inspect_err(|error| tracing::warn!(%error, "no memory for the end of a prompt")).ok()?;
        Some(SavedEnd { states, logits: logits.to_vec() })
    }

    /// Stores the end of a prompt if all pages before it are stored: else it would not be found.
    fn insert_end(&self, UnsavedEnd { key, pages, .. }: UnsavedEnd, end: SavedEnd) {
        if self.store.stored(&pages) == pages.len() {
            self.ends().insert(key, end, pages.len());
            self.divide_ram();
        }
    }

    /// Makes the pages of a sequence, and the end of its prompt, the first to be evicted from RAM.
    pub fn park<B: Backend>(&self, sequence: &TokenSequence<B>) {
        self.store.park(sequence.saved());
        if let Some(end) = sequence.saved_end() {
            self.ends().park(&end);
        }
    }

    /// Changes the RAM for pages and ends of prompts together, bytes. See [`PageStore::set_ram`]; ends beyond their share leave at once.
    pub fn set_ram(&self, bytes: u64) -> bool {
        self.ends().set_ram(bytes);
        self.divide_ram()
    }

    /// Gives pages the RAM that ends do not take. Returns whether the limit holds already.
    fn divide_ram(&self) -> bool {
        let left = self.ends().ram_for_pages();
        self.store.set_ram(left)
    }

    /// Counts and sizes.
    pub fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// Bytes of RAM of the ends of prompts, beside the pages.
    pub fn prompt_end_bytes(&self) -> u64 {
        self.ends().bytes()
    }

    /// Waits until everything is on disk, at most this long. Returns whether it is.
    pub fn flush(&self, at_most: Duration) -> bool {
        self.store.flush(at_most)
    }
}
