//! The table without threads or a disk: what is stored, evicted and transferred, in which order.

use super::*;
use proptest::prelude::*;

const PAGE: u64 = 10_000;

fn table(ram_pages: u64, records: RecordIndex) -> PageTable {
    let limits = TableLimits { ram: ram_pages * PAGE, page: PAGE, records, policy: EvictionPolicy::Lru };
    PageTable::new(Fingerprint::of([]), limits, Vec::new())
}

fn chain(of: u32, pages: u32) -> Vec<PageKey> {
    let mut key = PageKey::root(&Fingerprint::of([]));
    (0..pages)
        .map(|page| {
            key = key.child(&[of, page], None);
            key
        })
        .collect()
}

fn insert(table: &mut PageTable, chain: &[PageKey], now: f64) {
    let mut parent = PageKey::root(&Fingerprint::of([]));
    for (index, key) in chain.iter().enumerate() {
        let facts = PageFacts { last_used: now, uses: 1.0, cost_ms: 1.0, priority: 0 };
        table.insert(*key, parent, index as u32, facts, PageBytes::new(10).unwrap());
        parent = *key;
    }
}

/// Does all transfers; writes succeed or fail.
fn transfer_all(table: &mut PageTable, now: f64, succeeds: bool) {
    while let Some(transfer) = table.next_transfer(now) {
        match transfer {
            PageTransfer::Write { key, record, page, .. } => {
                drop(page);
                table.finish_write(&key, record, succeeds);
            }
            PageTransfer::Read { key, .. } => table.finish_read(&key, succeeds.then(|| PageBytes::new(10).unwrap()), 1),
        }
    }
}

fn ready(found: &ChainLookup) -> Option<usize> {
    if let ChainLookup::Ready(pages) = found { Some(pages.len()) } else { None }
}

#[test]
fn parked_pages_leave_first_and_a_chain_loses_its_end_even_if_that_is_newer() {
    let (a, b, c) = (chain(1, 2), chain(2, 2), chain(3, 2));
    let mut ram_only = table(4, 0);
    insert(&mut ram_only, &b, 1.0);
    insert(&mut ram_only, &a, 2.0);
    ram_only.park(&a);
    insert(&mut ram_only, &c, 3.0);
    assert_eq!((ram_only.stored(&a), ram_only.stored(&b), ram_only.stored(&c)), (0, 2, 2));

    // Pages of one chain that were computed at different times, in RAM and on disk.
    for records in [0, 2] {
        let mut table = table(2, records);
        insert(&mut table, &a[..1], 1.0);
        insert(&mut table, &a, 2.0);
        if let Some(first) = table.pages.get_mut(&a[0]) {
            first.facts.last_used = 1.0;
        }
        transfer_all(&mut table, 2.0, true);
        table.park(&a);
        insert(&mut table, &b[..1], 3.0);
        transfer_all(&mut table, 3.0, true);
        assert_eq!(table.stored(&a), 1, "{records} records");
        assert!(table.contains(&b[0]) && !table.contains(&a[1]), "{records} records");
    }
}

#[test]
fn the_newest_of_two_records_of_a_page_counts() {
    let model = Fingerprint::of([]);
    let parent = PageKey::root(&model);
    let key = chain(1, 1)[0];
    let header = |written| PageHeader { fingerprint: model, key, parent, index: 0, written, cost_ms: 1.0 };
    let limits = TableLimits { ram: 4 * PAGE, page: PAGE, records: 3, policy: EvictionPolicy::Lru };
    let mut table = PageTable::new(model, limits, vec![(0, header(5)), (2, header(7)), (1, header(6))]);
    assert_eq!((table.stats().disk_pages, table.free_records.as_slice()), (1, &[1, 0][..]));
    table.prefetch(&[key], 0, 1.0);
    assert!(matches!(table.next_transfer(1.0), Some(PageTransfer::Read { record: 2, .. })));
}

#[test]
fn a_computed_page_replaces_a_read_that_fails() {
    let a = chain(1, 2);
    for begun in [0, 1, 2] {
        let mut table = table(2, 100);
        insert(&mut table, &a, 1.0);
        table.park(&a);
        transfer_all(&mut table, 1.0, true);
        assert_eq!(table.in_ram(&a), 0);
        table.prefetch(&a, 0, 2.0);
        let reads: Vec<PageKey> = (0..begun)
            .map(|_| match table.next_transfer(2.0) {
                Some(PageTransfer::Read { key, .. }) => key,
                _ => panic!("two pages are to be read"),
            })
            .collect();
        insert(&mut table, &a, 2.0);
        assert_eq!((table.in_ram(&a), table.stats().ram_bytes), (2, 2 * PAGE), "{begun} begun");
        reads.iter().for_each(|key| table.finish_read(key, None, 1));
        transfer_all(&mut table, 3.0, true);
        let stats = table.stats();
        assert_eq!((stats.ram_pages, stats.disk_pages, stats.read_errors), (2, 2, begun), "{begun} begun");
        assert_eq!(table.free_records.len(), 98);
    }
}

#[test]
fn pages_go_to_disk_and_come_back() {
    let mut table = table(4, 100);
    let (a, b) = (chain(1, 3), chain(2, 3));
    insert(&mut table, &a, 1.0);
    transfer_all(&mut table, 1.0, true);
    insert(&mut table, &b, 2.0);
    assert_eq!((table.in_ram(&a), table.in_ram(&b)), (1, 3), "the last pages of the older chain left");
    transfer_all(&mut table, 2.0, true);
    let ChainLookup::Loading(Some(ticket)) = table.find(&a, 0, 3.0, None) else { panic!("two pages are on disk") };
    assert!(matches!(table.find(&b, 0, 3.0, None), ChainLookup::Ready(_)), "whoever needs no read goes on");
    transfer_all(&mut table, 3.0, true);
    assert_eq!(ready(&table.find(&a, 0, 4.0, Some(&ticket))), Some(3));
    assert_eq!(table.in_ram(&b), 1);
    let stats = table.stats();
    assert_eq!((stats.disk_pages, stats.reads, stats.writes, stats.ram_bytes), (6, 2, 6, 4 * PAGE));
    assert_eq!(table.stored(&chain(1, 5)), 3, "what was never computed is not found");
}

#[test]
fn chains_are_read_one_after_the_other_and_a_lost_waiter_blocks_nobody() {
    let mut table = table(3, 100);
    let chains = [chain(1, 3), chain(2, 3), chain(3, 3)];
    for (now, chain) in chains.iter().enumerate() {
        insert(&mut table, chain, now as f64);
        transfer_all(&mut table, now as f64, true);
    }
    let ChainLookup::Loading(Some(first)) = table.find(&chains[0], 0, 5.0, None) else { panic!() };
    assert!(matches!(table.find(&chains[1], 0, 5.0, None), ChainLookup::Loading(None)));
    transfer_all(&mut table, 5.0, true);
    drop(first);
    let ChainLookup::Loading(Some(second)) = table.find(&chains[1], 0, 6.0, None) else { panic!() };
    transfer_all(&mut table, 6.0, true);
    assert_eq!(ready(&table.find(&chains[1], 0, 7.0, Some(&second))), Some(3));
}

/// Starts the next reads and says which chain each is of.
fn begin_reads(table: &mut PageTable, count: usize, chains: &[Vec<PageKey>]) -> Vec<usize> {
    let reads = (0..count).map(|_| match table.next_transfer(9.0) {
        Some(PageTransfer::Read { key, .. }) => chains.iter().position(|chain| chain.contains(&key)).unwrap(),
        _ => panic!("more pages are to be read"),
    });
    reads.collect()
}

#[test]
fn pages_that_a_request_waits_for_are_read_first_then_those_of_important_ones() {
    let mut table = table(100, 100);
    let chains: Vec<Vec<PageKey>> = (0..4).map(|of| chain(of, 2)).collect();
    for chain in &chains {
        insert(&mut table, chain, 1.0);
        table.park(chain);
    }
    transfer_all(&mut table, 1.0, true);
    assert_eq!(table.stats().ram_pages, 0);
    // Prefetches for requests in the queue. The last request is important, and another request asked for its first page before.
    table.prefetch(&chains[0], 0, 2.0);
    table.prefetch(&chains[2][..1], -1, 2.0);
    table.prefetch(&chains[1], 0, 2.0);
    table.prefetch(&chains[2], 5, 2.0);
    assert_eq!(begin_reads(&mut table, 1, &chains), [2], "the important one overtakes");
    // A request of least priority that has a sequence waits for pages of which one is queued already.
    table.prefetch(&chains[3][1..], 0, 3.0);
    let ChainLookup::Loading(Some(_ticket)) = table.find(&chains[3], -10, 3.0, None) else { panic!() };
    assert_eq!(begin_reads(&mut table, 7, &chains), [3, 3, 2, 0, 0, 1, 1]);
    assert!(table.next_transfer(9.0).is_none(), "each is read once");
}

#[test]
fn without_room_the_last_pages_leave_and_parked_ones_first() {
    let mut ram_only = table(3, 0);
    let (a, b) = (chain(1, 3), chain(2, 1));
    insert(&mut ram_only, &a, 1.0);
    insert(&mut ram_only, &b, 0.0);
    assert_eq!((ram_only.stored(&a), ram_only.stored(&b)), (2, 1), "a chain loses its end");
    assert_eq!((ram_only.stats().ram_evictions, ram_only.stats().disk_evictions), (1, 0));
    let mut with_disk = table(4, 100);
    insert(&mut with_disk, &a, 9.0);
    with_disk.park(&a);
    transfer_all(&mut with_disk, 9.0, true);
    assert_eq!((with_disk.in_ram(&a), with_disk.stored(&a)), (0, 3));
}

#[test]
fn a_full_disk_keeps_what_is_worth_more() {
    let mut table = table(2, 4);
    let (a, b) = (chain(1, 3), chain(2, 3));
    for (now, chain) in [(1.0, &a), (2.0, &b)] {
        for length in 1..=3 {
            insert(&mut table, &chain[..length], now);
            transfer_all(&mut table, now, true);
        }
    }
    let stats = table.stats();
    assert!(stats.disk_pages <= 4 && stats.ram_bytes <= 2 * PAGE && stats.disk_evictions >= 2);
    assert!(table.contains(&b[0]) && !table.contains(&a[2]), "{stats:?}");
}

/// The newest chains are written to disk even if RAM holds all pages, because after a restart only pages on disk are left.
#[test]
fn the_newest_chains_are_on_disk_also_where_ram_holds_all() {
    for (records, newest) in [(4, 3), (3, 3), (2, 2)] {
        let mut table = table(100, records);
        let chains: Vec<_> = (1..=5).map(|of| chain(of, 3)).collect();
        for (chain, now) in chains.iter().zip(1..) {
            insert(&mut table, chain, f64::from(now));
            transfer_all(&mut table, f64::from(now), true);
        }
        let on_disk = |chain: &[PageKey]| chain.iter().filter(|key| table.pages[key].disk.is_some()).count();
        assert_eq!(on_disk(&chains[4]), newest, "{records} records");
        assert_eq!(table.stats().disk_pages, u64::from(records));
        // What is on disk of a chain is its start, or it could not be found.
        for chain in &chains {
            assert!(chain[..on_disk(chain)].iter().all(|key| table.pages[key].disk.is_some()), "{records} records");
            assert_eq!(table.in_ram(chain), 3);
        }
    }
}

/// The time of computing a page varies by a half; no policy may prefer old conversations for that.
#[test]
fn noise_in_costs_does_not_keep_old_conversations() {
    for policy in EvictionPolicy::NAMES.map(|(_, policy)| policy) {
        let limits = TableLimits { ram: 100 * PAGE, page: PAGE, records: 9, policy };
        let mut table = PageTable::new(Fingerprint::of([]), limits, Vec::new());
        let chains: Vec<_> = (1..=8).map(|of| chain(of, 3)).collect();
        for (number, chain) in (0u32..).zip(&chains) {
            let (now, mut parent) = (f64::from(number), PageKey::root(&Fingerprint::of([])));
            for (index, key) in (0u32..).zip(chain) {
                let cost_ms = 100.0 + f64::from((number * 3 + index) * 37 % 101) - 50.0;
                let facts = PageFacts { last_used: now, uses: 1.0, cost_ms, priority: 0 };
                table.insert(*key, parent, index, facts, PageBytes::new(10).unwrap());
                parent = *key;
            }
            transfer_all(&mut table, now, true);
        }
        let on_disk = |chain: &Vec<PageKey>| chain.iter().filter(|key| table.pages[key].disk.is_some()).count();
        assert_eq!(chains.iter().map(on_disk).collect::<Vec<_>>(), [0, 0, 0, 0, 0, 3, 3, 3], "{policy:?}");
    }
}

#[test]
fn a_conversation_that_goes_on_is_written_again_from_its_start() {
    let mut table = table(100, 4);
    let (a, b) = (chain(1, 4), chain(2, 4));
    insert(&mut table, &a[..3], 1.0);
    transfer_all(&mut table, 1.0, true);
    insert(&mut table, &b, 2.0);
    transfer_all(&mut table, 2.0, true);
    let on_disk = |table: &PageTable, chain: &[PageKey]| -> Vec<bool> {
        chain.iter().map(|key| table.pages[key].disk.is_some()).collect()
    };
    assert_eq!((on_disk(&table, &a[..3]), on_disk(&table, &b)), (vec![false; 3], vec![true; 4]));
    insert(&mut table, &a, 3.0);
    transfer_all(&mut table, 3.0, true);
    assert_eq!((on_disk(&table, &a), on_disk(&table, &b)), (vec![true; 4], vec![false; 4]));
    // After a fault, the next page writes those before it, too.
    let c = chain(3, 2);
    insert(&mut table, &c[..1], 4.0);
    transfer_all(&mut table, 4.0, false);
    insert(&mut table, &c, 5.0);
    transfer_all(&mut table, 5.0, true);
    assert_eq!((on_disk(&table, &c), table.stats().refused), (vec![false; 2], 1), "it has just failed");
    let c = chain(3, 3);
    insert(&mut table, &c, 6.0);
    transfer_all(&mut table, 6.0, true);
    assert_eq!(on_disk(&table, &c), vec![true; 3]);
}

#[test]
fn the_record_of_a_page_stays_while_the_next_page_is_being_written() {
    let mut table = table(100, 2);
    let (a, b) = (chain(1, 2), chain(2, 1));
    insert(&mut table, &a[..1], 1.0);
    transfer_all(&mut table, 1.0, true);
    insert(&mut table, &a, 2.0);
    let Some(PageTransfer::Write { key, record, .. }) = table.next_transfer(2.0) else {
        panic!("a page is to be written")
    };
    assert_eq!(key, a[1]);
    insert(&mut table, &b, 3.0);
    assert!(table.next_transfer(3.0).is_none(), "the only page on disk is needed");
    table.finish_write(&key, record, true);
    assert_eq!((table.stats().disk_pages, table.stats().refused), (2, 1));
    assert!(a.iter().all(|key| table.pages[key].disk.is_some()));
}

#[test]
fn faults_cost_pages_and_nothing_else() {
    let mut table = table(4, 100);
    let a = chain(1, 3);
    insert(&mut table, &a, 1.0);
    transfer_all(&mut table, 1.0, false);
    // Without the first page on disk nobody would find the others there. The third tries it again.
    let stats = table.stats();
    assert_eq!((stats.write_errors, stats.refused, stats.disk_pages, table.in_ram(&a)), (2, 2, 0, 3));
    insert(&mut table, &chain(2, 4), 2.0);
    assert_eq!(table.in_ram(&chain(2, 4)), 4);
    transfer_all(&mut table, 2.0, true);
    insert(&mut table, &chain(3, 4), 3.0);
    transfer_all(&mut table, 3.0, true);
    let ChainLookup::Loading(ticket) = table.find(&chain(2, 4), 0, 4.0, None) else { panic!() };
    transfer_all(&mut table, 4.0, false);
    assert_eq!(ready(&table.find(&chain(2, 4), 0, 5.0, ticket.as_ref())), Some(0));
    assert_eq!(table.stats().read_errors, 4);
    assert_eq!(table.stats().ram_bytes, table.stats().ram_pages * PAGE);
}

#[test]
fn a_page_that_the_disk_has_no_room_for_is_counted() {
    let mut table = table(6, 1);
    insert(&mut table, &chain(1, 3), 1.0);
    transfer_all(&mut table, 1.0, true);
    let stats = table.stats();
    assert_eq!((stats.ram_pages, stats.disk_pages, stats.refused), (3, 1, 2));
}

#[test]
fn a_lowered_limit_evicts_what_is_on_disk_at_once_and_the_rest_when_it_is_written() {
    let mut table = table(6, 100);
    let (a, b) = (chain(1, 3), chain(2, 3));
    insert(&mut table, &a, 1.0);
    transfer_all(&mut table, 1.0, true);
    insert(&mut table, &b, 2.0);
    table.set_ram(2 * PAGE, 3.0);
    assert_eq!((table.in_ram(&a), table.in_ram(&b)), (0, 3), "those of b are not written yet");
    assert!(!table.hold_limit(3.0));
    transfer_all(&mut table, 3.0, true);
    assert!(table.hold_limit(3.0));
    assert_eq!((table.stored(&a), table.in_ram(&b)), (2, 2), "a chain that is used must fit RAM");
    table.set_ram(0, 4.0);
    assert_eq!((table.stats().ram_bytes, table.stored(&a), table.stats().disk_pages), (0, 0, 6));
    insert(&mut table, &chain(3, 1), 5.0);
    assert_eq!((table.stats().refused, table.stats().ram_bytes), (1, 0));
    table.set_ram(6 * PAGE, 6.0);
    let ChainLookup::Loading(ticket) = table.find(&a, 0, 6.0, None) else { panic!("it is on disk") };
    transfer_all(&mut table, 6.0, true);
    assert_eq!(ready(&table.find(&a, 0, 7.0, ticket.as_ref())), Some(3));
}

#[test]
fn a_limit_lowered_below_what_a_prompt_waits_for_does_not_hold_it_up() {
    let mut table = table(6, 100);
    let a = chain(1, 4);
    insert(&mut table, &a, 1.0);
    transfer_all(&mut table, 1.0, true);
    table.set_ram(0, 2.0);
    table.set_ram(6 * PAGE, 2.0);
    let ChainLookup::Loading(ticket) = table.find(&a, 0, 3.0, None) else { panic!("it is on disk") };
    table.set_ram(2 * PAGE, 4.0);
    transfer_all(&mut table, 4.0, true);
    assert_eq!(ready(&table.find(&a, 0, 5.0, ticket.as_ref())), Some(2));
    assert_eq!(table.stats().ram_bytes, 2 * PAGE);
}

/// A table of this many records on disk, all taken, in chains of 20 pages, with `ram` pages of them in RAM.
fn large_table(records: u32, ram: usize, policy: EvictionPolicy) -> (PageTable, Vec<Vec<PageKey>>) {
    let model = Fingerprint::of([]);
    let chains: Vec<Vec<PageKey>> = (0..records / 20).map(|of| chain(of, 20)).collect();
    let headers = chains.iter().enumerate().flat_map(|(of, chain)| {
        chain.iter().enumerate().map(move |(at, key)| {
            let parent = if at == 0 { PageKey::root(&model) } else { chain[at - 1] };
            let record = (of * 20 + at) as u32;
            let written = u64::from(record);
            (record, PageHeader { fingerprint: model, key: *key, parent, index: at as u32, written, cost_ms: 1.0 })
        })
    });
    let limits = TableLimits { ram: ram as u64 * PAGE, page: PAGE, records, policy };
    let mut table = PageTable::new(model, limits, headers.collect());
    for chain in chains.iter().take(ram / 20) {
        table.prefetch(chain, 0, 1.0);
        transfer_all(&mut table, 1.0, true);
    }
    (table, chains)
}

#[test]
fn a_large_store_evicts_what_was_used_longest_ago_and_keeps_the_starts_of_chains() {
    let (mut table, chains) = large_table(5_000, 400, EvictionPolicy::Lru);
    // Four at a time are chosen now. The second half of the chains is used.
    for chain in &chains[125..] {
        chain.iter().for_each(|key| table.pages.get_mut(key).unwrap().facts.touch(5.0, 0));
    }
    let mut used = None;
    for step in 0..100 {
        insert(&mut table, &chain(5_000 + step, 10), 10.0);
        transfer_all(&mut table, 10.0, true);
        // One that is used after it was chosen stays.
        if step == 50 {
            let (key, _) = *table.chosen[Eviction::FromDisk as usize].first().expect("more are chosen than leave");
            table.pages.get_mut(&key).unwrap().facts.touch(10.0, 0);
            used = Some(key);
        }
    }
    assert!(used.is_some_and(|key| table.contains(&key)), "what is used after it was chosen stays");
    let stats = table.stats();
    assert_eq!((stats.disk_pages, stats.disk_evictions, stats.ram_pages), (5_000, 1_000, 400));
    assert!(chains[125..].iter().all(|chain| table.stored(chain) == 20), "what was used is kept");
    let kept: Vec<usize> = chains[..125].iter().map(|chain| table.stored(chain)).collect();
    let present = |chain: &Vec<PageKey>| chain.iter().filter(|key| table.contains(key)).count();
    assert!(chains[..125].iter().zip(&kept).all(|(chain, kept)| present(chain) == *kept), "no page without its start");
    assert_eq!(kept.iter().sum::<usize>(), 2_500 - 1_000);
}

#[test]
#[ignore = "prints times: the figures of docs/measurements"]
fn times_of_evictions_from_large_stores() {
    for (name, policy) in EvictionPolicy::NAMES {
        for records in [2_000, 20_000, 200_000] {
            let (mut table, _) = large_table(records, 400, policy);
            assert_eq!((table.stats().ram_pages, table.stats().disk_pages), (400, u64::from(records)));
            let mut times: Vec<f64> = (0..40)
                .map(|step| {
                    let started = std::time::Instant::now();
                    insert(&mut table, &chain(records + step, 5), 10.0 + f64::from(step));
                    transfer_all(&mut table, 10.0 + f64::from(step), true);
                    started.elapsed().as_secs_f64() * 1e6 / 5.0
                })
                .collect();
            times.sort_by(f64::total_cmp);
            let (median, mean) = (times[20], times.iter().sum::<f64>() / 40.0);
            println!(
                "{name}, {records} pages: a new page takes {median:.0} us, {mean:.0} us on average, {:.0} at most",
                times[39]
            );
            assert!(table.stats().disk_evictions >= 190 && table.stats().ram_evictions >= 190);
        }
    }
}

proptest! {
    #[test]
    fn limits_hold_whatever_happens(
        steps in proptest::collection::vec((0u8..9, 0u32..5, 1u32..6, proptest::bool::weighted(0.8)), 1..60),
        ram in 1u64..6,
        records in 0u32..8,
    ) {
        let mut table = table(ram, records);
        let (mut tickets, mut ram) = (Vec::new(), ram);
        for (now, (action, of, pages, succeeds)) in steps.into_iter().enumerate() {
            let (now, chain) = (now as f64, chain(of, pages));
            let before = table.stats().ram_bytes;
            match action {
                0 | 1 => insert(&mut table, &chain, now),
                2 => transfer_all(&mut table, now, succeeds),
                3 => match table.find(&chain, 0, now, None) {
                    ChainLookup::Loading(ticket) => tickets.extend(ticket),
                    ChainLookup::Ready(pages) => prop_assert!(pages.len() <= chain.len()),
                },
                4 => tickets.clear(),
                5 => {
                    // Lower, higher, or none at all.
                    ram = u64::from(of);
                    table.set_ram(ram * PAGE, now);
                }
                6 => table.prefetch(&chain, of as i32, now),
                _ => table.park(&chain),
            }
            let stats = table.stats();
            // Above a limit that was lowered, nothing is added.
            prop_assert!(stats.ram_bytes <= before.max(ram * PAGE) && stats.disk_pages <= u64::from(records));
        }
        // Whoever waits gets an answer once the transfers are done, and nothing is above the limit.
        tickets.clear();
        transfer_all(&mut table, 99.0, true);
        table.set_ram(ram * PAGE, 99.0);
        prop_assert!(table.stats().ram_bytes <= ram * PAGE);
        let chain = chain(0, 5);
        let mut ticket = None;
        for now in 100..103 {
            match table.find(&chain, 0, f64::from(now), ticket.as_ref()) {
                ChainLookup::Ready(_) => break,
                ChainLookup::Loading(given) => ticket = given,
            }
            prop_assert!(now < 102, "the chain is never ready");
            transfer_all(&mut table, f64::from(now), true);
        }
        let mut used: Vec<RecordIndex> = table.pages.values().filter_map(|entry| entry.disk).chain(table.free_records.iter().copied()).collect();
        used.sort_unstable();
        prop_assert_eq!(used, (0..records).collect::<Vec<_>>(), "each record has one owner");
        prop_assert_eq!(table.stats().ram_bytes, table.stats().ram_pages * PAGE);
    }
}
