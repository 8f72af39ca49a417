//! A store on a real disk: pages survive a restart, broken and foreign records do not count, limits hold.

use hpp_kv::{
    DiskSettings, EvictionPolicy, Fingerprint, LoadTicket, NewPage, PageKey, PageLookup, PageStore, PageStoreError,
    StoreSettings,
};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const PAYLOAD: usize = 10_000;
/// A header and the payload, in whole sectors.
const RECORD: u64 = 4096 * 4;
const WAIT: Duration = Duration::from_secs(60);

struct Store {
    store: PageStore,
    woken: Receiver<()>,
}

fn model(name: &str) -> Fingerprint {
    Fingerprint::of([("model", name)])
}

fn open(directory: &Path, name: &str, ram_pages: u64, disk_pages: u64) -> Result<Store, PageStoreError> {
    let (wake, woken) = channel();
    let settings = StoreSettings {
        fingerprint: model(name),
        page_bytes: PAYLOAD,
        ram: ram_pages * RECORD,
        disk: Some(DiskSettings {
            directory: directory.to_owned(),
            bytes: disk_pages * RECORD,
            share: disk_pages * RECORD,
        }),
        policy: EvictionPolicy::Lru,
    };
    Ok(Store {
        store: PageStore::open(settings, move || {
            let _ = wake.send(());
        })?,
        woken,
    })
}

fn chain(name: &str, of: u32, pages: u32) -> Vec<PageKey> {
    let mut key = PageKey::root(&model(name));
    (0..pages)
        .map(|page| {
            key = key.child(&[of, page], None);
            key
        })
        .collect()
}

fn content(of: u32, page: usize) -> Vec<u8> {
    (0..PAYLOAD).map(|at| (at as u32 * 31 + of * 7 + page as u32) as u8).collect()
}

impl Store {
    fn insert(&self, name: &str, of: u32, pages: u32) {
        let mut parent = PageKey::root(&model(name));
        for (index, key) in chain(name, of, pages).into_iter().enumerate() {
            let mut page = self.store.new_page().unwrap();
            page.payload_mut().copy_from_slice(&content(of, index));
            self.store.insert(NewPage { key, parent, index: index as u32, cost_ms: 1.0, priority: 0 }, page);
            parent = key;
        }
    }

    /// The pages found, read from disk if need be, whose contents must be right.
    fn find(&self, name: &str, of: u32, pages: u32) -> usize {
        let mut ticket: Option<Arc<LoadTicket>> = None;
        loop {
            match self.store.find(&chain(name, of, pages), 0, ticket.as_ref()) {
                PageLookup::Pages(found) => {
                    for (index, page) in found.iter().enumerate() {
                        assert_eq!(page.payload(), content(of, index), "page {index} of {of}");
                    }
                    return found.len();
                }
                PageLookup::Loading(given) => {
                    ticket = Some(given.expect("nobody else reads"));
                    self.woken.recv_timeout(WAIT).expect("the store wakes who waits");
                }
            }
        }
    }
}

#[test]
fn pages_survive_a_restart_and_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path(), "a", 4, 100).unwrap();
    for of in 0..5 {
        first.insert("a", of, 3);
        assert!(first.store.flush(WAIT));
    }
    assert_eq!(first.find("a", 0, 3), 3, "from disk");
    assert!(first.store.stats().ram_bytes <= 4 * RECORD);
    assert!(matches!(open(dir.path(), "a", 4, 100), Err(PageStoreError::InUse(_))), "one process at a time");
    drop(first);
    let second = open(dir.path(), "a", 4, 100).unwrap();
    assert_eq!(second.store.stats().disk_pages, 15);
    assert_eq!((0..6).map(|of| second.find("a", of, 3)).sum::<usize>(), 15);
    drop(second);
    let smaller = open(dir.path(), "a", 4, 7).unwrap();
    assert!(smaller.store.stats().disk_pages <= 7);
    smaller.insert("a", 9, 3);
    assert!(smaller.store.flush(WAIT) && smaller.store.stats().disk_pages <= 7);
    drop(smaller);
    let bytes = std::fs::metadata(dir.path().join(model("a").short()).join("pages.kv")).unwrap().len();
    assert!(bytes <= 7 * RECORD, "{bytes}");
}

#[test]
fn broken_and_foreign_records_are_no_pages() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), "a", 8, 100).unwrap();
    store.insert("a", 1, 4);
    assert!(store.store.flush(WAIT));
    drop(store);
    let pages = dir.path().join(model("a").short()).join("pages.kv");
    let whole = std::fs::read(&pages).unwrap();
    let records = whole.len() / RECORD as usize;
    // A bit in each record's payload, then in each header, then files that end anywhere.
    for (offset, stored) in [(4096 + 777, 4), (20, 0)] {
        let mut changed = whole.clone();
        (0..records).for_each(|record| changed[record * RECORD as usize + offset] ^= 4);
        std::fs::write(&pages, &changed).unwrap();
        let store = open(dir.path(), "a", 8, 100).unwrap();
        assert_eq!(store.store.stored(&chain("a", 1, 4)), stored);
        assert_eq!(store.find("a", 1, 4), 0);
        store.insert("a", 1, 4);
        assert!(store.store.flush(WAIT));
        assert_eq!(store.find("a", 1, 4), 4, "and they are written anew");
    }
    for length in [0, 1, 4096, RECORD as usize - 1, whole.len() - 1] {
        std::fs::write(&pages, &whole[..length]).unwrap();
        let store = open(dir.path(), "a", 8, 100).unwrap();
        assert!(store.find("a", 1, 4) < 4);
    }
    let other = dir.path().join(model("b").short());
    std::fs::create_dir_all(&other).unwrap();
    std::fs::write(other.join("pages.kv"), &whole).unwrap();
    assert_eq!(open(dir.path(), "b", 8, 100).unwrap().store.stats().disk_pages, 0, "another model's pages");
}

#[test]
fn models_leave_each_other_alone_while_there_is_room() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        let store = open(dir.path(), name, 4, 100).unwrap();
        store.insert(name, 1, 4);
        assert!(store.store.flush(WAIT));
    }
    for name in ["a", "b"] {
        assert_eq!(open(dir.path(), name, 4, 100).unwrap().find(name, 1, 4), 4, "{name}");
    }
    // In a smaller directory the one written longest ago leaves, and what is in use stays.
    let second = open(dir.path(), "b", 4, 5).unwrap();
    assert_eq!(second.find("b", 1, 4), 4);
    assert!(!dir.path().join(model("a").short()).exists());
    assert!(matches!(open(dir.path(), "a", 4, 4), Err(PageStoreError::Full { .. })));
}

#[test]
fn limits_that_no_page_fits_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    for (ram, disk) in [(0, 100), (1, 0)] {
        assert!(matches!(open(dir.path(), "a", ram, disk), Err(PageStoreError::TooSmall { .. })), "{ram} {disk}");
    }
    std::fs::write(dir.path().join("file"), "x").unwrap();
    assert!(matches!(open(&dir.path().join("file"), "a", 1, 1), Err(PageStoreError::Io { .. })));
}

#[test]
fn many_threads_of_requests_find_what_was_stored() {
    let dir = tempfile::tempdir().unwrap();
    let store = open(dir.path(), "a", 6, 64).unwrap();
    for round in 0..40u32 {
        store.insert("a", round % 12, 1 + round % 5);
        // Pages that are being written cannot be evicted: on a slow disk all later ones would be refused.
        assert!(store.store.flush(WAIT));
        let found = store.find("a", (round * 5) % 12, 5);
        assert!(found <= 5);
    }
    assert!(store.store.flush(WAIT));
    let stats = store.store.stats();
    assert!(stats.read_errors == 0 && stats.write_errors == 0 && stats.reads > 0, "{stats:?}");
}
