//! The ends of prompts: the states of the tokens that follow a prompt's last whole page, and the logits after them.
//!
//! These tokens are computed after the whole pages of the prompt, so an equal prompt that starts from the same pages would give them the same
//! bits. With its end it needs no pass. Ends are kept in RAM only: none is written to disk, and after a restart they are computed again.

use hpp_kv::{PageBytes, PageKey};
use std::collections::HashMap;
use std::sync::Arc;

/// Ends may take one part in `SHARE` of the RAM for pages and ends. An end takes at most about as much as a page: where prompts have eight
/// pages or more, there is room for the ends of all prompts whose pages are in RAM.
const SHARE: u64 = 8;

/// The end of a prompt.
pub(crate) struct SavedEnd {
    /// The states of its tokens, laid out as a page with these tokens alone.
    pub states: PageBytes,
    /// The logits `[vocab]` after the last.
    pub logits: Vec<f32>,
}

impl SavedEnd {
    /// Bytes of RAM of an end with `states` bytes of states and this number of logits.
    pub fn memory_for(states: usize, logits: usize) -> u64 {
        PageBytes::memory_for(states).saturating_add((logits * size_of::<f32>()) as u64)
    }

    fn bytes(&self) -> u64 {
        Self::memory_for(self.states.payload().len(), self.logits.len())
    }
}

/// An end that is kept.
struct Entry {
    end: Arc<SavedEnd>,
    last_used: u64,
}

/// Ends of prompts by their keys. The least recently used one leaves first.
pub(crate) struct PromptEnds {
    entries: HashMap<PageKey, Entry>,
    /// Bytes of RAM for pages and ends.
    ram: u64,
    /// Bytes of RAM of a page.
    page: u64,
    /// Bytes of all ends.
    bytes: u64,
    /// Counts uses, from 1.
    uses: u64,
}

impl PromptEnds {
    /// Without ends. `ram`: bytes for pages and ends together; `page`: bytes of a page.
    pub fn new(ram: u64, page: u64) -> Self {
        PromptEnds { entries: HashMap::new(), ram, page, bytes: 0, uses: 0 }
    }

    /// Changes the RAM for pages and ends together, bytes. Ends beyond their share leave at once.
    pub fn set_ram(&mut self, bytes: u64) {
        self.ram = bytes;
        self.evict_down_to(self.limit(1));
    }

    /// Bytes of RAM that pages may take beside the ends.
    pub fn ram_for_pages(&self) -> u64 {
        self.ram.saturating_sub(self.bytes)
    }

    /// Bytes of RAM of all ends.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Most bytes of all ends beside `pages` pages (counted as one if 0): their share, or what the pages leave if that is less.
    fn limit(&self, pages: usize) -> u64 {
        let pages = self.page.saturating_mul(pages.max(1) as u64);
        (self.ram / SHARE).min(self.ram.saturating_sub(pages))
    }

    /// Drops ends until there is room for `pages` pages.
    pub fn leave_room(&mut self, pages: usize) {
        self.evict_down_to(self.limit(pages));
    }

    /// Whether there is an end.
    pub fn contains(&self, key: &PageKey) -> bool {
        self.entries.contains_key(key)
    }

    /// Whether an end of `bytes` bytes that follows `pages` pages should be stored: it is not stored yet, and it is not larger than the
    /// limit of all ends beside its pages. If it is stored already, it counts as used.
    pub fn wants(&mut self, key: &PageKey, bytes: u64, pages: usize) -> bool {
        self.get(key).is_none() && bytes <= self.limit(pages)
    }

    /// The end with this key, which counts as used from now on.
    pub fn get(&mut self, key: &PageKey) -> Option<Arc<SavedEnd>> {
        self.uses += 1;
        let entry = self.entries.get_mut(key)?;
        entry.last_used = self.uses;
        Some(Arc::clone(&entry.end))
    }

    /// Keeps an end that follows `pages` pages, unless it is larger than the limit of all ends beside them.
    pub fn insert(&mut self, key: PageKey, end: SavedEnd, pages: usize) {
        self.remove(&key);
        let bytes = end.bytes();
        let Some(others) = self.limit(pages).checked_sub(bytes) else { return };
        self.evict_down_to(others);
        self.uses += 1;
        self.bytes += bytes;
        self.entries.insert(key, Entry { end: Arc::new(end), last_used: self.uses });
    }

    /// Makes an end the first to leave.
    pub fn park(&mut self, key: &PageKey) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.last_used = 0;
        }
    }

    fn evict_down_to(&mut self, most: u64) {
        while self.bytes > most {
            let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_used).map(|(key, _)| *key);
            let Some(oldest) = oldest else { return };
            self.remove(&oldest);
        }
    }

    fn remove(&mut self, key: &PageKey) {
        if let Some(entry) = self.entries.remove(key) {
            self.bytes -= entry.end.bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_kv::Fingerprint;

    /// Bytes of each end below.
    const END: u64 = 2 * 4096 + 16;
    const PAGE: u64 = 4 * 4096;

    fn key(of: u32) -> PageKey {
        PageKey::root(&Fingerprint::of([])).prompt_end(&[of])
    }

    fn end(of: u32) -> SavedEnd {
        let mut states = PageBytes::new(100).unwrap();
        states.payload_mut().fill(of as u8);
        SavedEnd { states, logits: vec![of as f32; 4] }
    }

    /// Without ends, and with room for `room` of them.
    fn ends(room: u64) -> PromptEnds {
        PromptEnds::new(room * END * SHARE, PAGE)
    }

    fn held(ends: &PromptEnds) -> Vec<u32> {
        (0..9).filter(|of| ends.contains(&key(*of))).collect()
    }

    #[test]
    fn the_least_recently_used_end_leaves_first() {
        let mut ends = ends(3);
        (0..3).for_each(|of| ends.insert(key(of), end(of), 0));
        assert_eq!((held(&ends), ends.bytes), (vec![0, 1, 2], 3 * END));
        let found = ends.get(&key(0)).unwrap();
        assert_eq!((found.states.payload(), &found.logits[..]), (&[0; 100][..], &[0.0; 4][..]));
        assert!(!ends.wants(&key(1), END, 0), "it is here, and used now");
        ends.insert(key(3), end(3), 0);
        assert_eq!((held(&ends), ends.bytes), (vec![0, 1, 3], 3 * END));
        ends.park(&key(3));
        assert!(ends.get(&key(4)).is_none() && ends.wants(&key(4), END, 0));
        ends.insert(key(4), end(4), 0);
        assert_eq!(held(&ends), [0, 1, 4]);
        // Again under the same key.
        ends.insert(key(4), end(5), 0);
        assert_eq!((held(&ends), ends.bytes), (vec![0, 1, 4], 3 * END));
        assert_eq!(ends.get(&key(4)).unwrap().logits[0], 5.0);
    }

    #[test]
    fn pages_and_ends_share_the_ram() {
        let mut ends = ends(2);
        let ram = 2 * END * SHARE;
        assert_eq!(ends.ram_for_pages(), ram, "without ends all is for pages");
        (0..3).for_each(|of| ends.insert(key(of), end(of), 0));
        assert_eq!((held(&ends), ends.ram_for_pages()), (vec![1, 2], ram - 2 * END));
        // One that is larger than all may be is not kept, and costs no other.
        assert!(!ends.wants(&key(7), 2 * END + 1, 0) && ends.wants(&key(7), 2 * END, 0));
        let large = SavedEnd { states: PageBytes::new(6 * 4096).unwrap(), logits: vec![] };
        ends.insert(key(7), large, 0);
        assert_eq!(held(&ends), [1, 2]);
        ends.set_ram(ram - 1);
        assert_eq!((held(&ends), ends.ram_for_pages()), (vec![2], ram - 1 - END));
        ends.set_ram(0);
        assert_eq!((held(&ends), ends.ram_for_pages(), ends.bytes), (vec![], 0, 0));
        ends.insert(key(1), end(1), 0);
        assert_eq!(held(&ends), [0; 0]);
        // Room for a page is left.
        assert!(!PromptEnds::new(PAGE, PAGE).wants(&key(1), 1, 0));
    }

    #[test]
    fn an_end_leaves_room_for_the_pages_before_it() {
        let mut ends = PromptEnds::new(10 * PAGE, PAGE);
        (0..2).for_each(|of| ends.insert(key(of), end(of), 0));
        assert_eq!(held(&ends), [0, 1]);
        assert!(!ends.wants(&key(2), END, 10) && ends.wants(&key(2), END, 9));
        ends.insert(key(2), end(2), 10);
        assert_eq!(held(&ends), [0, 1]);
        ends.insert(key(2), end(2), 9);
        assert_eq!(held(&ends), [2]);
        assert!(ends.ram_for_pages() >= 9 * PAGE);
        ends.leave_room(9);
        assert_eq!(held(&ends), [2]);
        ends.leave_room(10);
        assert_eq!((held(&ends), ends.ram_for_pages()), (vec![], 10 * PAGE));
    }
}
