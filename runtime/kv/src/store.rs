//! The store: a page table behind a lock, and threads that transfer pages.

use crate::directory::ModelDirectory;
use crate::error::PageStoreError;
use crate::key::{Fingerprint, PageKey};
use crate::page::{PageBytes, PageHeader, record_bytes};
use crate::policy::{EvictionPolicy, PageFacts};
use crate::record_file::{RecordFile, RecordIndex};
use crate::table::{ChainLookup, LoadTicket, PageTable, PageTransfer, StoreStats, TableLimits};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Threads that read and write. A fast disk needs several reads at a time.
const THREADS: usize = 8;

/// Room for new pages that a model gets if other models fill the directory: `FIRST_PAGES` pages, but at most one part in `FIRST_SHARE` of the
/// model's share.
const FIRST_PAGES: u64 = 256;
const FIRST_SHARE: u64 = 4;
/// How long a thread with pending reads waits for room before it checks again: requests that release pages do not wake it.
const ROOM_CHECK: Duration = Duration::from_millis(50);

/// The directory for pages, and how many bytes it may hold.
#[derive(Clone, Debug)]
pub struct DiskSettings {
    /// The directory of all models' pages.
    pub directory: PathBuf,
    /// Most bytes of all models together.
    pub bytes: u64,
    /// Most bytes of this model.
    pub share: u64,
}

/// The settings of a store.
#[derive(Clone, Debug)]
pub struct StoreSettings {
    /// Hash of everything except tokens that decides the bits of pages.
    pub fingerprint: Fingerprint,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Bytes of RAM for pages.
    pub ram: u64,
    /// Where new pages are written, so that they can leave RAM; `None` without a disk.
    pub disk: Option<DiskSettings>,
    /// Which pages are evicted first.
    pub policy: EvictionPolicy,
}

/// A page to be stored.
#[derive(Clone, Copy, Debug)]
pub struct NewPage {
    /// Its key.
    pub key: PageKey,
    /// The key of the page before it.
    pub parent: PageKey,
    /// Its place in the sequence, counted in pages.
    pub index: u32,
    /// The time that computing it took, milliseconds.
    pub cost_ms: f64,
    /// The priority of the request that computed it.
    pub priority: i32,
}

/// The result of looking up a chain of pages.
pub enum PageLookup {
    /// The longest start of the chain that is stored. Its pages stay in RAM while the caller holds them.
    Pages(Vec<Arc<PageBytes>>),
    /// Some pages are being read. The store calls `wake` after each transfer; then look up again with this ticket, or drop it.
    Loading(Option<Arc<LoadTicket>>),
}

/// Pages in RAM and on disk. Dropping it ends its threads after everything is written.
pub struct PageStore {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    page_bytes: usize,
    /// Locked for as long as the store is open.
    _directory: Option<ModelDirectory>,
}

struct Shared {
    table: Mutex<PageTable>,
    changed: Condvar,
    file: Option<RecordFile>,
    fingerprint: Fingerprint,
    opened: Instant,
    wake: Box<dyn Fn() + Send + Sync>,
    stop: Mutex<bool>,
}

impl PageStore {
    /// Opens a store with the pages that its directory has. `wake` is called, on a thread of the store, when a page has been read
    /// or written.
    ///
    /// # Errors
    /// A tier is too small for a page, or the directory cannot be used or is in use.
    pub fn open(settings: StoreSettings, wake: impl Fn() + Send + Sync + 'static) -> Result<Self, PageStoreError> {
        let StoreSettings { fingerprint, page_bytes, ram, disk, policy } = settings;
        let page = PageBytes::memory_for(page_bytes);
        if ram < page {
            return Err(PageStoreError::TooSmall { limit: ram, page });
        }
        let (directory, file, records) = match disk {
            None => (None, None, Vec::new()),
            Some(disk) => {
                let OpenDisk { directory, file, records } = OpenDisk::open(disk, &fingerprint, page_bytes)?;
                (Some(directory), Some(file), records)
            }
        };
        let limit = file.as_ref().map_or(0, RecordFile::limit);
        let table = PageTable::new(fingerprint, TableLimits { ram, page, records: limit, policy }, records);
        let shared = Arc::new(Shared {
            table: Mutex::new(table),
            changed: Condvar::new(),
            file,
            fingerprint,
            opened: Instant::now(),
            wake: Box::new(wake),
            stop: Mutex::new(false),
        });
        let mut store = PageStore { shared, threads: Vec::new(), page_bytes, _directory: directory };
        let count = if limit == 0 { 0 } else { THREADS };
        for _ in 0..count {
            let shared = Arc::clone(&store.shared);
            let thread = std::thread::Builder::new().name("hpp-kv".to_owned()).spawn(move || shared.work());
            store.threads.push(thread.map_err(PageStoreError::Thread)?);
        }
        Ok(store)
    }

    /// Memory for a page.
    ///
    /// # Errors
    /// The system has no memory left.
    pub fn new_page(&self) -> io::Result<PageBytes> {
        PageBytes::new(self.page_bytes)
    }

    /// Whether a page is stored in any tier.
    pub fn contains(&self, key: &PageKey) -> bool {
        self.shared.table().contains(key)
    }

    /// The number of leading pages of a chain that are stored.
    pub fn stored(&self, chain: &[PageKey]) -> usize {
        self.shared.table().stored(chain)
    }

    /// Stores a page; it is written to disk later. If there is no room, it is not stored, and that is counted.
    pub fn insert(&self, new: NewPage, page: PageBytes) {
        let facts = PageFacts { last_used: self.shared.now(), uses: 1.0, cost_ms: new.cost_ms, priority: new.priority };
        self.shared.table().insert(new.key, new.parent, new.index, facts, page);
        // Wakes all, because callers wait for the same condition as the threads.
        self.shared.changed.notify_all();
    }

    /// Looks up the leading pages of a chain that are stored. Those that are only on disk are read into RAM before the pages are returned.
    pub fn find(&self, chain: &[PageKey], priority: i32, ticket: Option<&Arc<LoadTicket>>) -> PageLookup {
        let found = self.shared.table().find(chain, priority, self.shared.now(), ticket);
        match found {
            ChainLookup::Ready(pages) => PageLookup::Pages(pages),
            ChainLookup::Loading(ticket) => {
                self.shared.changed.notify_all();
                PageLookup::Loading(ticket)
            }
        }
    }

    /// Like [`find`](Self::find), but waits until the pages have been read.
    pub fn find_waiting(&self, chain: &[PageKey], priority: i32) -> Vec<Arc<PageBytes>> {
        let mut table = self.shared.table();
        let mut ticket = None;
        loop {
            match table.find(chain, priority, self.shared.now(), ticket.as_ref()) {
                ChainLookup::Ready(pages) => return pages,
                ChainLookup::Loading(new) => ticket = new.or(ticket),
            }
            self.shared.changed.notify_all();
            table = self.shared.changed.wait(table).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Starts to read the pages of a chain that are only on disk, after the pages that requests wait for and the pages of more important requests.
    pub fn prefetch(&self, chain: &[PageKey], priority: i32) {
        self.shared.table().prefetch(chain, priority, self.shared.now());
        self.shared.changed.notify_all();
    }

    /// How many of these pages are in RAM.
    pub fn in_ram(&self, chain: &[PageKey]) -> usize {
        self.shared.table().in_ram(chain)
    }

    /// Counts a prompt of `wanted` whole pages, and how many of them were found in RAM and on disk.
    pub fn count_hits(&self, wanted: usize, from_ram: usize, from_disk: usize) {
        self.shared.table().count_hits(wanted, from_ram, from_disk);
    }

    /// Evicts pages from RAM: now if they are on disk, else as soon as they are written. Pages that someone holds, and pages without a disk, are the first
    /// to be evicted when room is needed.
    pub fn park(&self, chain: &[PageKey]) {
        self.shared.table().park(chain);
    }

    /// Changes the limit of RAM, bytes; with less than a page, nothing is kept there. Pages beyond the limit leave at once if they are on disk or
    /// the store has no disk, else when they are written. Returns whether the limit holds already.
    pub fn set_ram(&self, bytes: u64) -> bool {
        let mut table = self.shared.table();
        table.set_ram(bytes, self.shared.now());
        let holds = table.hold_limit(self.shared.now());
        drop(table);
        // More room lets pending reads begin.
        self.shared.changed.notify_all();
        holds
    }

    /// Counts and sizes.
    pub fn stats(&self) -> StoreStats {
        self.shared.table().stats()
    }

    /// Waits until everything is written, at most this long. Returns whether it is.
    pub fn flush(&self, at_most: Duration) -> bool {
        let end = Instant::now() + at_most;
        let mut table = self.shared.table();
        while !table.is_written() {
            let Some(left) = end.checked_duration_since(Instant::now()) else { return false };
            let waited = self.shared.changed.wait_timeout(table, left);
            table = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

/// The disk of a store that is being opened.
struct OpenDisk {
    directory: ModelDirectory,
    file: RecordFile,
    /// The records that the file has.
    records: Vec<(RecordIndex, PageHeader)>,
}

impl OpenDisk {
    /// Opens the model's directory and its file, with room for as many records as the limits and other models leave.
    fn open(disk: DiskSettings, fingerprint: &Fingerprint, page_bytes: usize) -> Result<Self, PageStoreError> {
        let directory = ModelDirectory::open(&disk.directory, fingerprint)?;
        let record_bytes = record_bytes(page_bytes) as u64;
        let share = disk.share.min(disk.bytes);
        if share < record_bytes {
            return Err(PageStoreError::TooSmall { limit: share, page: record_bytes });
        }
        // Room for its present pages and for some new ones: only for that are pages of other models removed.
        let first = (share / FIRST_SHARE).clamp(record_bytes, FIRST_PAGES * record_bytes);
        let wanted = share.min(directory.bytes() + first);
        let bytes = share.min(directory.make_room(&disk.directory, wanted, disk.bytes));
        let limit = RecordIndex::try_from(bytes / record_bytes).unwrap_or(RecordIndex::MAX);
        if limit == 0 {
            return Err(PageStoreError::Full { path: disk.directory, limit: disk.bytes });
        }
        let path = directory.pages();
        let opened = RecordFile::open(&path, fingerprint, page_bytes, limit);
        let (file, records) = opened.map_err(|source| PageStoreError::Io { path, source })?;
        Ok(OpenDisk { directory, file, records })
    }
}

impl Drop for PageStore {
    fn drop(&mut self) {
        *self.shared.stop.lock().unwrap_or_else(PoisonError::into_inner) = true;
        // Takes the lock, so that no thread misses the stop between checking for it and waiting. Pending reads are no longer needed.
        self.shared.table().drop_reads();
        self.shared.changed.notify_all();
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, PageTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Seconds since the store was opened.
    fn now(&self) -> f64 {
        self.opened.elapsed().as_secs_f64()
    }

    /// Does transfers until the store is dropped and everything is written.
    fn work(&self) {
        let Some(file) = &self.file else { return };
        let mut table = self.table();
        loop {
            match table.next_transfer(self.now()) {
                Some(transfer) => {
                    drop(table);
                    self.transfer(file, transfer);
                    table = self.table();
                }
                None if *self.stop.lock().unwrap_or_else(PoisonError::into_inner) => return,
                None if table.wants_room() => {
                    let waited = self.changed.wait_timeout(table, ROOM_CHECK);
                    table = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
                None => table = self.changed.wait(table).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn transfer(&self, file: &RecordFile, transfer: PageTransfer) {
        match transfer {
            PageTransfer::Write { key, record, header, page } => {
                let written = file.write(record, &header, &page);
                // The table counts the holders of a page to decide whether it may be evicted.
                drop(page);
                let errors = self.table().finish_write(&key, record, written.is_ok());
                // A full disk fails many times: one line for the first, the second, the fourth...
                if let Err(error) = &written
                    && errors.is_power_of_two()
                {
                    tracing::warn!(%error, errors, "cannot write a KV page; it stays in RAM only");
                }
            }
            PageTransfer::Read { key, record } => {
                let started = Instant::now();
                let page = match file.read(record) {
                    Ok(page) if page.is_page(&self.fingerprint, &key) => Some(page),
                    Ok(_) => {
                        tracing::warn!("a KV page on disk is broken; its tokens are computed again");
                        None
                    }
                    Err(error) => {
                        tracing::warn!(%error, "cannot read a KV page; its tokens are computed again");
                        None
                    }
                };
                let micros = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
                self.table().finish_read(&key, page, micros);
            }
        }
        // The limit may have been lowered meanwhile.
        self.table().hold_limit(self.now());
        self.changed.notify_all();
        (self.wake)();
    }
}
