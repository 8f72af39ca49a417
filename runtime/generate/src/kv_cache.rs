//! The KV cache: finds the saved pages of a prompt, restores sequences from them, and saves the pages of a sequence.
//!
//! The bits of a page that was fed as one chunk of a prompt depend only on the tokens up to its end, so every prompt with this prefix may
//! use it. A page with generated tokens has other bits; it is saved for a session and found only by that session.

use crate::error::GenerateError;
use crate::sequence::TokenSequence;
use hpp_engine::{Backend, Engine, EngineError, PageLayout, PageToSave};
use hpp_kv::{
    DiskSettings, EvictionPolicy, Fingerprint, LoadTicket, NewPage, PageBytes, PageKey, PageLookup, PageStore,
    PageStoreError, StoreSettings, StoreStats,
};
use std::sync::Arc;
use std::time::Duration;

/// Most pages copied out at once; they are not in the store's limit of RAM yet.
const MOST_AT_ONCE: usize = 8;

/// The settings of a cache.
#[derive(Clone, Debug)]
pub struct KvSettings {
    /// Tokens of a page: the chunk of prompts.
    pub page_tokens: usize,
    /// Bytes of RAM for pages.
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

/// The stored pages of a prompt's prefix.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptPages {
    keys: Vec<PageKey>,
    /// How many of them any prompt may use.
    shared: usize,
    /// Pages that the prompt could use if they were stored.
    wanted: usize,
    session: Option<String>,
}

impl PromptPages {
    /// Stored pages.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Whether none is stored.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

/// Saves and restores the states of one model's sequences.
pub struct KvCache {
    store: PageStore,
    layout: PageLayout,
    root: PageKey,
}

impl KvCache {
    /// Opens the cache of an engine. `None` if the model's states cannot be saved. `wake` is called, on another thread, whenever a page has
    /// been read from disk or written.
    ///
    /// # Errors
    /// See [`PageStore::open`].
    pub fn open<B: Backend>(
        engine: &Engine<B>,
        settings: KvSettings,
        wake: impl Fn() + Send + Sync + 'static,
    ) -> Result<Option<Self>, PageStoreError> {
        let KvSettings { page_tokens, ram, disk, policy, fingerprint } = settings;
        let Some(layout) = engine.page_layout(page_tokens as u64) else { return Ok(None) };
        let page_bytes = usize::try_from(layout.bytes()).unwrap_or(usize::MAX);
        let store = PageStore::open(StoreSettings { fingerprint, page_bytes, ram, disk, policy }, wake)?;
        Ok(Some(KvCache { store, layout, root: PageKey::root(&fingerprint) }))
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

    /// Finds the stored pages of a prompt's prefix, in RAM or on disk. At least two tokens of the prompt are left: a
    /// single one would be computed differently from the end of a longer chunk.
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
        found.keys.truncate(self.store.stored(&found.keys));
        found.shared = found.shared.min(found.keys.len());
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

    /// A sequence that holds the first pages of a prompt, and continues with the same bits as the sequence that saved them.
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
        let parts: Vec<(&PageLayout, &[u8])> = pages.iter().map(|page| (&self.layout, page.payload())).collect();
        let sequence = engine.restore_pages(&parts)?;
        let (count, page) = (pages.len().min(found.keys.len()), self.page_tokens());
        let (keys, in_whole_chunks) = (found.keys[..count].to_vec(), found.shared.min(count) * page);
        Ok(TokenSequence::restored(sequence, &prompt[..count * page], keys, in_whole_chunks, found.session.as_deref()))
    }

    /// Saves the pages that a sequence has completed and the store does not have. `is_last`: no token follows now, so that states on a
    /// device, which are copied whole, are saved too. A page that cannot be saved costs its later users time and nothing else.
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
            if batch.is_empty() {
                return;
            }
            if let Err(error) = self.save_pages(engine, sequence, &batch, value) {
                tracing::warn!(error = hpp_schema::error_line(&error), "cannot save KV pages");
            }
            sequence.add_saved(batch);
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

    fn save_pages<B: Backend>(
        &self,
        engine: &mut Engine<B>,
        sequence: &TokenSequence<B>,
        keys: &[PageKey],
        PageValue { cost_ms, priority }: PageValue,
    ) -> Result<(), EngineError> {
        let (page, first) = (self.page_tokens(), sequence.saved().len());
        let Some(states) = sequence.states() else { return Ok(()) };
        let is_whole = |index: usize| !self.layout.has_snapshots() || (index + 1) * page == sequence.tokens().len();
        let wanted = |offset: &usize| is_whole(first + offset) && !self.store.contains(&keys[*offset]);
        let Some(start) = (0..keys.len()).find(wanted) else { return Ok(()) };
        let Ok(mut pages) = (start..keys.len()).map(|_| self.store.new_page()).collect::<Result<Vec<_>, _>>() else {
            tracing::warn!("no memory for KV pages");
            return Ok(());
        };
        let mut copies = Vec::with_capacity(pages.len());
        for (index, bytes) in (first + start..).zip(&mut pages) {
            let bytes = bytes.payload_mut();
            copies.push(PageToSave { layout: &self.layout, first: (index * page) as u64, bytes });
        }
        engine.save_pages(states, copies)?;
        for (offset, page) in (start..).zip(pages) {
            let parent = match offset {
                0 => sequence.saved().last().copied().unwrap_or(self.root),
                _ => keys[offset - 1],
            };
            let index = u32::try_from(first + offset).unwrap_or(u32::MAX);
            self.store.insert(NewPage { key: keys[offset], parent, index, cost_ms, priority }, page);
        }
        Ok(())
    }

    /// Makes the pages of a sequence the first to be evicted from RAM.
    pub fn park<B: Backend>(&self, sequence: &TokenSequence<B>) {
        self.store.park(sequence.saved());
    }

    /// Changes the RAM for pages, bytes. See [`PageStore::set_ram`].
    pub fn set_ram(&self, bytes: u64) -> bool {
        self.store.set_ram(bytes)
    }

    /// Counts and sizes.
    pub fn stats(&self) -> StoreStats {
        self.store.stats()
    }

    /// Waits until everything is on disk, at most this long. Returns whether it is.
    pub fn flush(&self, at_most: Duration) -> bool {
        self.store.flush(at_most)
    }
}
