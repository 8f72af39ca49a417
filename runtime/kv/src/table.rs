//! The page table: where each page is, which one to evict, and which one to transfer next. It transfers nothing itself.
//!
//! A page is in RAM, on disk, or in both. A new page is written to disk as soon as a thread is free, so that most pages in RAM can be
//! evicted at once; until it is written it stays in RAM. Reads have priority over writes, unless there is no room to read into: then only
//! writes can make room, so they come first. The `read_queue` orders reads.

use crate::key::{Fingerprint, PageKey};
use crate::page::{PageBytes, PageHeader};
use crate::policy::{EvictionPolicy, PageFacts, UsualCost};
use crate::read_queue::{ReadQueue, ReadUrgency};
use crate::record_file::RecordIndex;
use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

/// Most writes at a time, so that reads find a free thread.
const MOST_WRITES: usize = 2;
/// One part in this many of a table's pages is chosen to be evicted at a time: choosing looks at all pages, and a large store would otherwise
/// do that for each page that it stores. A store with fewer pages chooses one at a time.
const CHOSEN_SHARE: usize = 1024;

/// The limits of a table.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TableLimits {
    /// Bytes of RAM.
    pub ram: u64,
    /// Bytes of RAM that a page takes.
    pub page: u64,
    /// Most records on disk; 0 if there is no disk.
    pub records: RecordIndex,
    /// Which pages are evicted first.
    pub policy: EvictionPolicy,
}

/// Counts since the store was opened, and sizes now. Bytes are those of memory or records, headers included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Pages in RAM.
    pub ram_pages: u64,
    /// Bytes in RAM.
    pub ram_bytes: u64,
    /// Pages on disk, including those that are also in RAM.
    pub disk_pages: u64,
    /// Bytes of their records.
    pub disk_bytes: u64,
    /// Pages that prompts found in RAM.
    pub ram_hits: u64,
    /// Pages that prompts found on disk.
    pub disk_hits: u64,
    /// Pages that prompts found in no tier.
    pub misses: u64,
    /// Pages evicted from RAM, whether or not they are on disk.
    pub ram_evictions: u64,
    /// Pages evicted from disk.
    pub disk_evictions: u64,
    /// Pages that found no room: in RAM, and were not stored, or on disk, and stay in RAM only.
    pub refused: u64,
    /// Pages written to disk.
    pub writes: u64,
    /// Pages read from disk.
    pub reads: u64,
    /// Microseconds from the start to the end of these reads, added up.
    pub read_micros: u64,
    /// Writes that failed.
    pub write_errors: u64,
    /// Reads that failed or found a broken record.
    pub read_errors: u64,
}

/// One page.
struct Entry {
    parent: PageKey,
    index: u32,
    facts: PageFacts,
    ram: Option<Arc<PageBytes>>,
    disk: Option<RecordIndex>,
    transfer: TransferState,
    /// Whether its last write failed.
    write_failed: bool,
    /// Whether it is evicted from RAM before pages that are not parked.
    parked: bool,
}

/// How a page may be evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Eviction {
    /// From RAM, if the page is also on disk or no stored page follows it: all other stored pages can still be found.
    KeepsChain,
    /// From RAM, even if later pages of its chain can then not be found any more.
    BreaksChain,
    /// From disk.
    FromDisk,
}

/// A page that was chosen to be evicted, and when it had been used last: if it was used since then, it stays.
type Chosen = (PageKey, f64);
/// What decides which page is evicted first: whether it is not parked, its value, its place in the sequence. With the page itself.
type EvictionRank = ((bool, f64, Reverse<u32>), Chosen);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TransferState {
    None,
    WriteQueued,
    Writing,
    ReadQueued,
    Reading,
}

/// A transfer for a thread to do, without holding the table.
pub(crate) enum PageTransfer {
    /// Ends with [`PageTable::finish_write`].
    Write { key: PageKey, record: RecordIndex, header: PageHeader, page: Arc<PageBytes> },
    /// Ends with [`PageTable::finish_read`].
    Read { key: PageKey, record: RecordIndex },
}

/// Stands for pages that are being read for one prompt. They stay in RAM until the holder drops the ticket.
#[derive(Debug)]
pub struct LoadTicket(());

/// The result of looking up a chain of pages.
pub(crate) enum ChainLookup {
    /// The longest start of the chain that is stored, all of it in RAM.
    Ready(Vec<Arc<PageBytes>>),
    /// Some pages are being read.
    Loading(Option<Arc<LoadTicket>>),
}

/// All stored pages of one model, and the pending transfers.
pub(crate) struct PageTable {
    fingerprint: Fingerprint,
    limits: TableLimits,
    pages: HashMap<PageKey, Entry>,
    /// The number of stored pages that follow a page; the page itself need not be stored.
    children: HashMap<PageKey, u32>,
    /// The number of pages that follow a page and are on disk or being written.
    children_on_disk: HashMap<PageKey, u32>,
    reads: ReadQueue,
    writes: VecDeque<PageKey>,
    writing: usize,
    free_records: Vec<RecordIndex>,
    /// For each [`Eviction`], the pages that are evicted next, the least valuable last.
    chosen: [Vec<Chosen>; 3],
    /// RAM of pages that are stored or being read.
    ram_bytes: u64,
    /// The value of [`written`](PageHeader::written) in the next header.
    next_written: u64,
    /// The chain that is being read, and its ticket. One at a time, because two could each hold the room that the other needs.
    loading: Option<(Vec<PageKey>, Weak<LoadTicket>)>,
    usual_cost: UsualCost,
    counts: StoreStats,
}

impl PageTable {
    /// A table of the records that a file has.
    pub fn new(fingerprint: Fingerprint, limits: TableLimits, mut records: Vec<(RecordIndex, PageHeader)>) -> Self {
        let mut table = PageTable {
            fingerprint,
            limits,
            pages: HashMap::new(),
            children: HashMap::new(),
            children_on_disk: HashMap::new(),
            reads: ReadQueue::default(),
            writes: VecDeque::new(),
            writing: 0,
            free_records: Vec::new(),
            chosen: Default::default(),
            ram_bytes: 0,
            next_written: 1,
            loading: None,
            usual_cost: UsualCost::default(),
            counts: StoreStats::default(),
        };
        records.sort_by_key(|(_, header)| Reverse(header.written));
        let mut used = vec![false; limits.records as usize];
        for (age, (record, header)) in records.into_iter().enumerate() {
            if table.pages.contains_key(&header.key) || record >= limits.records {
                continue;
            }
            used[record as usize] = true;
            table.next_written = table.next_written.max(header.written + 1);
            // The order of writing, not the clock, says which is older.
            let facts = PageFacts {
                last_used: -(age as f64) - 1.0,
                uses: 1.0,
                cost_ms: f64::from(header.cost_ms),
                priority: 0,
            };
            table.usual_cost.note(facts.cost_ms);
            let (parent, index) = (header.parent, header.index);
            let entry = Entry {
                parent,
                index,
                facts,
                ram: None,
                disk: Some(record),
                transfer: TransferState::None,
                write_failed: false,
                parked: false,
            };
            table.add(header.key, entry);
        }
        table.free_records = (0..limits.records).rev().filter(|record| !used[*record as usize]).collect();
        table
    }

    /// Counts and sizes.
    pub fn stats(&self) -> StoreStats {
        let count = |is: &dyn Fn(&Entry) -> bool| self.pages.values().filter(|entry| is(entry)).count() as u64;
        let disk_pages = count(&|entry| entry.disk.is_some());
        StoreStats {
            ram_pages: count(&|entry| entry.ram.is_some()),
            ram_bytes: self.ram_bytes,
            disk_pages,
            // A record is a page with its header, as in RAM.
            disk_bytes: disk_pages * self.limits.page,
            ..self.counts
        }
    }

    /// Whether a page is stored.
    pub fn contains(&self, key: &PageKey) -> bool {
        self.pages.contains_key(key)
    }

    /// Whether nothing waits to be written.
    pub fn is_written(&self) -> bool {
        self.writes.is_empty() && self.writing == 0
    }

    /// Changes the limit of RAM. Pages beyond it leave now if they may, else as soon as they are written or released.
    pub fn set_ram(&mut self, bytes: u64, now: f64) {
        self.limits.ram = bytes;
        self.hold_limit(now);
    }

    /// Evicts pages that could not leave yet when the limit was lowered. Returns whether the limit holds.
    pub fn hold_limit(&mut self, now: f64) -> bool {
        self.evict_down_to(self.limits.ram, now)
    }

    /// The number of leading pages of a chain that are stored and fit RAM together.
    pub fn stored(&self, chain: &[PageKey]) -> usize {
        let most = (self.limits.ram / self.limits.page) as usize;
        chain.iter().take(most).take_while(|key| self.pages.contains_key(key)).count()
    }

    /// Stores a page that was computed, unless there is no room. Replaces a read that has not ended, as its record may be broken.
    pub fn insert(&mut self, key: PageKey, parent: PageKey, index: u32, facts: PageFacts, page: PageBytes) {
        self.usual_cost.note(facts.cost_ms);
        if let Some(known) = self.pages.get_mut(&key) {
            known.facts.touch(facts.last_used, facts.priority);
            known.facts.cost_ms = facts.cost_ms;
            known.parked = false;
            let transfer = known.transfer;
            if transfer == TransferState::Reading
                || transfer == TransferState::ReadQueued && self.make_room(facts.last_used)
            {
                self.replace_read(&key, page);
            }
            return;
        }
        if !self.make_room(facts.last_used) {
            self.counts.refused += 1;
            return;
        }
        self.ram_bytes += self.limits.page;
        let has_disk = self.limits.records > 0;
        let transfer = if has_disk { TransferState::WriteQueued } else { TransferState::None };
        if has_disk {
            self.writes.push_back(key);
        }
        let ram = Some(Arc::new(page));
        let entry = Entry { parent, index, facts, ram, disk: None, transfer, write_failed: false, parked: false };
        self.add(key, entry);
    }

    /// Looks up the start of a chain. Requests reads of its pages that are only on disk, which come before all prefetches. `ticket`: from an
    /// earlier call for the same chain.
    pub fn find(
        &mut self,
        chain: &[PageKey],
        priority: i32,
        now: f64,
        ticket: Option<&Arc<LoadTicket>>,
    ) -> ChainLookup {
        let chain = &chain[..self.stored(chain)];
        let in_ram: Option<Vec<_>> = chain.iter().map(|key| self.pages.get(key)?.ram.clone()).collect();
        if let Some(pages) = in_ram {
            for key in chain {
                if let Some(entry) = self.pages.get_mut(key) {
                    entry.facts.touch(now, priority);
                    entry.parked = false;
                }
            }
            if ticket.is_some() {
                self.loading = None;
            }
            return ChainLookup::Ready(pages);
        }
        let is_ours = match &self.loading {
            Some((_, holder)) => match (holder.upgrade(), ticket) {
                (Some(holder), Some(ticket)) => Arc::ptr_eq(&holder, ticket),
                (Some(_), None) => false,
                (None, _) => true,
            },
            None => true,
        };
        if !is_ours {
            return ChainLookup::Loading(None);
        }
        let ticket = ticket.cloned().unwrap_or_else(|| Arc::new(LoadTicket(())));
        self.loading = Some((chain.to_vec(), Arc::downgrade(&ticket)));
        self.request_reads(chain, ReadUrgency { is_awaited: true, priority });
        ChainLookup::Loading(Some(ticket))
    }

    /// Whether pages are to be read as soon as there is room.
    pub fn wants_room(&self) -> bool {
        !self.reads.is_empty()
    }

    /// Forgets reads that have not begun.
    pub fn drop_reads(&mut self) {
        for key in self.reads.take_all() {
            self.set_transfer(&key, TransferState::None);
        }
    }

    /// Prefetches pages for a request of this priority. The pages count as used now, so that reading the last ones does not evict the first ones.
    pub fn prefetch(&mut self, chain: &[PageKey], priority: i32, now: f64) {
        let stored = self.stored(chain);
        for key in &chain[..stored] {
            if let Some(entry) = self.pages.get_mut(key) {
                entry.facts.last_used = entry.facts.last_used.max(now);
            }
        }
        self.request_reads(&chain[..stored], ReadUrgency { is_awaited: false, priority });
    }

    /// Counts a prompt of `wanted` whole pages that found these.
    pub fn count_hits(&mut self, wanted: usize, from_ram: usize, from_disk: usize) {
        self.counts.ram_hits += from_ram as u64;
        self.counts.disk_hits += from_disk as u64;
        self.counts.misses += wanted.saturating_sub(from_ram + from_disk) as u64;
    }

    /// How many of these pages are in RAM now.
    pub fn in_ram(&self, chain: &[PageKey]) -> usize {
        chain.iter().filter(|key| self.pages.get(key).is_some_and(|entry| entry.ram.is_some())).count()
    }

    /// Evicts pages from RAM: now if they are on disk, else as soon as they are written. Pages that someone holds, and pages without a disk, are the first
    /// to be evicted when room is needed.
    pub fn park(&mut self, chain: &[PageKey]) {
        for key in chain.iter().filter(|key| !self.is_awaited(key)).copied().collect::<Vec<_>>() {
            if let Some(entry) = self.pages.get_mut(&key) {
                entry.parked = true;
                if entry.transfer == TransferState::None && entry.disk.is_some() {
                    self.evict_from_ram(key);
                }
            }
        }
    }

    /// The next transfer that can be done now.
    pub fn next_transfer(&mut self, now: f64) -> Option<PageTransfer> {
        while let Some(key) = self.reads.first() {
            let record = match self.pages.get(&key) {
                Some(entry) if entry.transfer == TransferState::ReadQueued => entry.disk,
                _ => None,
            };
            let Some(record) = record else {
                self.reads.remove(&key);
                continue;
            };
            if !self.make_room(now) {
                break;
            }
            self.reads.remove(&key);
            self.ram_bytes += self.limits.page;
            self.set_transfer(&key, TransferState::Reading);
            return Some(PageTransfer::Read { key, record });
        }
        while self.writing < MOST_WRITES
            && let Some(key) = self.writes.pop_front()
        {
            if self.pages.get(&key).is_none_or(|entry| entry.transfer != TransferState::WriteQueued) {
                continue;
            }
            let Some(write) = self.first_unwritten(key).and_then(|first| self.begin_write(first, now)) else {
                self.counts.refused += 1;
                self.set_transfer(&key, TransferState::None);
                continue;
            };
            if !matches!(&write, PageTransfer::Write { key: written, .. } if *written == key) {
                self.writes.push_front(key);
            }
            return Some(write);
        }
        None
    }

    /// The first page of the chain up to this page that is neither on disk nor being written: without it, later pages could not be found on disk.
    /// `None` if that page is lost, or if its write has just failed: then the next page of the chain tries again.
    fn first_unwritten(&mut self, mut key: PageKey) -> Option<PageKey> {
        loop {
            let entry = self.pages.get(&key)?;
            let (index, parent) = (entry.index, entry.parent);
            let is_there = |entry: &Entry| entry.disk.is_some() || entry.transfer == TransferState::Writing;
            if index == 0 || self.pages.get(&parent).is_some_and(is_there) {
                break;
            }
            key = parent;
        }
        let first = self.pages.get_mut(&key)?;
        (!std::mem::take(&mut first.write_failed)).then_some(key)
    }

    /// Begins to write a page; `None` if there is no record for it.
    fn begin_write(&mut self, key: PageKey, now: f64) -> Option<PageTransfer> {
        let entry = self.pages.get(&key)?;
        let (parent, index, cost_ms) = (entry.parent, entry.index, entry.facts.cost_ms as f32);
        let page = entry.ram.clone()?;
        let record = self.take_record(&parent, now)?;
        let header =
            PageHeader { fingerprint: self.fingerprint, key, parent, index, written: self.next_written, cost_ms };
        self.next_written += 1;
        self.writing += 1;
        count_up(&mut self.children_on_disk, parent);
        self.set_transfer(&key, TransferState::Writing);
        Some(PageTransfer::Write { key, record, header, page })
    }

    /// A write has ended. Returns how many have failed so far.
    pub fn finish_write(&mut self, key: &PageKey, record: RecordIndex, is_written: bool) -> u64 {
        self.writing -= 1;
        match self.pages.get_mut(key) {
            Some(entry) if is_written => {
                entry.transfer = TransferState::None;
                entry.disk = Some(record);
                self.counts.writes += 1;
                if entry.parked {
                    self.evict_from_ram(*key);
                }
            }
            found => {
                if let Some(entry) = found {
                    (entry.transfer, entry.write_failed) = (TransferState::None, true);
                    count_down(&mut self.children_on_disk, &entry.parent);
                }
                self.counts.write_errors += u64::from(!is_written);
                self.free_records.push(record);
            }
        }
        self.counts.write_errors
    }

    /// A read has ended. `page` is `None` if the record is damaged: then the table frees the record.
    pub fn finish_read(&mut self, key: &PageKey, page: Option<PageBytes>, micros: u64) {
        let Some(entry) = self.pages.get_mut(key) else { return };
        entry.transfer = TransferState::None;
        match page {
            Some(page) => {
                entry.ram.get_or_insert_with(|| Arc::new(page));
                self.counts.reads += 1;
                self.counts.read_micros += micros;
            }
            None if entry.ram.is_some() => {
                self.counts.read_errors += 1;
                entry.transfer = TransferState::WriteQueued;
                self.writes.push_back(*key);
                let record = self.take_off_disk(key);
                self.free_records.extend(record);
            }
            None => {
                self.counts.read_errors += 1;
                self.ram_bytes -= self.limits.page;
                self.remove(key);
            }
        }
    }

    /// Queues reads of the pages that are only on disk; reads that are already queued become at least as urgent as this one.
    fn request_reads(&mut self, chain: &[PageKey], urgency: ReadUrgency) {
        for key in chain {
            let Some(entry) = self.pages.get_mut(key) else { continue };
            if entry.ram.is_none() && matches!(entry.transfer, TransferState::None | TransferState::ReadQueued) {
                entry.transfer = TransferState::ReadQueued;
                self.reads.request(*key, urgency);
            }
        }
    }

    /// Evicts pages from RAM until one more fits.
    fn make_room(&mut self, now: f64) -> bool {
        self.limits.ram.checked_sub(self.limits.page).is_some_and(|most| self.evict_down_to(most, now))
    }

    /// Evicts pages from RAM until at most `most` bytes are taken. False if none of the rest may leave now.
    fn evict_down_to(&mut self, most: u64, now: f64) -> bool {
        while self.ram_bytes > most {
            // If there is none: a page that could not be written. Pages after it that are on disk can then not be found any more.
            let victim = self.worth_least(Eviction::KeepsChain, now);
            match victim.or_else(|| self.worth_least(Eviction::BreaksChain, now)) {
                Some(victim) => self.evict_from_ram(victim),
                None => return false,
            }
        }
        true
    }

    /// Whether a page is in RAM and nothing holds, transfers or awaits it.
    fn is_idle(&self, key: &PageKey, entry: &Entry) -> bool {
        let is_free = entry.ram.as_ref().is_some_and(|page| Arc::strong_count(page) == 1);
        is_free && entry.transfer == TransferState::None && !self.is_awaited(key)
    }

    fn is_awaited(&self, key: &PageKey) -> bool {
        self.loading.as_ref().is_some_and(|(chain, holder)| holder.strong_count() > 0 && chain.contains(key))
    }

    fn is_last(&self, key: &PageKey) -> bool {
        !self.children.contains_key(key)
    }

    fn evict_from_ram(&mut self, key: PageKey) {
        let Some(entry) = self.pages.get_mut(&key) else { return };
        if entry.ram.as_ref().is_none_or(|page| Arc::strong_count(page) > 1) {
            return;
        }
        entry.ram = None;
        self.ram_bytes -= self.limits.page;
        self.counts.ram_evictions += 1;
        if entry.disk.is_none() {
            self.remove(&key);
        }
    }

    /// A record for a page after `parent`: a free one, or else the record of the least valuable page that no page on disk follows. `None` if there
    /// is no such page, or if it is the parent, without which the new page could not be found.
    fn take_record(&mut self, parent: &PageKey, now: f64) -> Option<RecordIndex> {
        if let Some(record) = self.free_records.pop() {
            return Some(record);
        }
        let victim = self.worth_least(Eviction::FromDisk, now).filter(|victim| victim != parent)?;
        let record = self.take_off_disk(&victim);
        self.counts.disk_evictions += 1;
        if self.pages.get(&victim).is_some_and(|entry| entry.ram.is_none()) {
            self.remove(&victim);
        }
        record
    }

    /// Takes its record from a page, if it has one.
    fn take_off_disk(&mut self, key: &PageKey) -> Option<RecordIndex> {
        let entry = self.pages.get_mut(key)?;
        let (record, parent) = (entry.disk.take()?, entry.parent);
        count_down(&mut self.children_on_disk, &parent);
        Some(record)
    }

    fn may_leave(&self, eviction: Eviction, key: &PageKey, entry: &Entry) -> bool {
        let is_idle = || self.is_idle(key, entry);
        match eviction {
            Eviction::KeepsChain => is_idle() && (entry.disk.is_some() || self.is_last(key)),
            Eviction::BreaksChain => is_idle(),
            Eviction::FromDisk => {
                let is_free = entry.disk.is_some() && entry.transfer == TransferState::None;
                // Pages after it that are in RAM only need it in RAM, not on disk.
                let is_needed = self.children_on_disk.contains_key(key) || entry.ram.is_none() && !self.is_last(key);
                is_free && !is_needed && !self.is_awaited(key)
            }
        }
    }

    /// The least valuable page that may be evicted: parked pages first, later pages of a sequence before earlier ones. In a large store, one of the
    /// pages that were the least valuable when pages were last chosen.
    fn worth_least(&mut self, eviction: Eviction, now: f64) -> Option<PageKey> {
        loop {
            let Some((key, last_used)) = self.chosen[eviction as usize].pop() else {
                self.choose(eviction, now);
                return self.chosen[eviction as usize].pop().map(|(key, _)| key);
            };
            let found = self.pages.get(&key).filter(|entry| entry.facts.last_used == last_used);
            if found.is_some_and(|entry| self.may_leave(eviction, &key, entry)) {
                return Some(key);
            }
        }
    }

    /// Chooses the pages that are evicted next.
    fn choose(&mut self, eviction: Eviction, now: f64) {
        let rank = |entry: &Entry| {
            let facts = PageFacts { cost_ms: self.usual_cost.comparable(entry.facts.cost_ms), ..entry.facts };
            (!entry.parked, self.limits.policy.value(&facts, now), Reverse(entry.index))
        };
        let candidates = self.pages.iter().filter(|(key, entry)| self.may_leave(eviction, key, entry));
        let mut chosen: Vec<_> = candidates.map(|(key, entry)| (rank(entry), (*key, entry.facts.last_used))).collect();
        let more_first =
            |(a, _): &EvictionRank, (b, _): &EvictionRank| b.0.cmp(&a.0).then(b.1.total_cmp(&a.1)).then(b.2.cmp(&a.2));
        let most = (self.pages.len() / CHOSEN_SHARE).max(1);
        if let Some(left) = chosen.len().checked_sub(most).filter(|left| *left > 0) {
            chosen.select_nth_unstable_by(left, more_first);
            chosen.drain(..left);
        }
        chosen.sort_by(more_first);
        self.chosen[eviction as usize] = chosen.into_iter().map(|(_, chosen)| chosen).collect();
    }

    fn add(&mut self, key: PageKey, entry: Entry) {
        count_up(&mut self.children, entry.parent);
        if entry.disk.is_some() {
            count_up(&mut self.children_on_disk, entry.parent);
        }
        self.pages.insert(key, entry);
    }

    fn remove(&mut self, key: &PageKey) {
        let record = self.take_off_disk(key);
        self.free_records.extend(record);
        let Some(entry) = self.pages.remove(key) else { return };
        count_down(&mut self.children, &entry.parent);
    }

    /// Replaces a page that is being read, or waits to be, by a computed one.
    fn replace_read(&mut self, key: &PageKey, page: PageBytes) {
        let Some(entry) = self.pages.get_mut(key) else { return };
        entry.ram = Some(Arc::new(page));
        // A read that has begun has its room in RAM already, and ends later.
        if entry.transfer == TransferState::ReadQueued {
            entry.transfer = TransferState::None;
            self.reads.remove(key);
            self.ram_bytes += self.limits.page;
        }
    }

    fn set_transfer(&mut self, key: &PageKey, transfer: TransferState) {
        if let Some(entry) = self.pages.get_mut(key) {
            entry.transfer = transfer;
        }
    }
}

fn count_up(counts: &mut HashMap<PageKey, u32>, key: PageKey) {
    *counts.entry(key).or_default() += 1;
}

/// A count of 0 is not kept.
fn count_down(counts: &mut HashMap<PageKey, u32>, key: &PageKey) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

#[cfg(test)]
mod tests;
