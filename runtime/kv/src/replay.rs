//! A replay of many conversations over the page table, on virtual time: what the eviction policies are worth.
//!
//! Conversations of 2,048 tokens over a RAM tier that holds a tenth of them. A few conversations return often and most rarely (Zipf's law).
//! Half of them begin with the same system prompt.

use crate::key::{Fingerprint, PageKey};
use crate::page::PageBytes;
use crate::policy::{EvictionPolicy, PageFacts};
use crate::table::{ChainLookup, PageTable, PageTransfer, TableLimits};

const PAGES: u32 = 16;
const SYSTEM_PAGES: u32 = 4;
/// Milliseconds for a page: to compute it, to read it from disk, to copy it from RAM. Of the 350 M fp32 model on two cores
/// (docs/BENCHMARKS.md), rounded.
const COMPUTE_MS: f64 = 600.0;
const DISK_MS: f64 = 8.0;
const RAM_MS: f64 = 1.0;
const PAGE: u64 = 64;

/// How much is replayed.
#[derive(Clone, Copy, Debug)]
struct Trace {
    conversations: usize,
    turns: usize,
}

/// When pages leave RAM.
#[derive(Clone, Copy, Debug)]
enum Leave {
    /// When another page needs the room.
    OnDemand,
    /// As soon as more than `high` percent of RAM are taken, until at most `low` percent are.
    Watermarks { high: u64, low: u64 },
}

/// What a replay found.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    ram_hits: f64,
    disk_hits: f64,
    first_token_ms: f64,
    /// Pages that leave RAM in a turn.
    evictions: f64,
}

/// Numbers from 0 to 1 in a fixed order (a linear congruential generator with the constants of MMIX).
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}

fn chain(conversation: usize, pages: u32) -> Vec<PageKey> {
    let own = conversation as u32 + 1;
    let has_system = conversation.is_multiple_of(2);
    let mut parent = PageKey::root(&Fingerprint::of([]));
    let token = |page: u32| if has_system && page < SYSTEM_PAGES { 0 } else { own };
    (0..pages)
        .map(|page| {
            parent = parent.child(&[token(page), page], None);
            parent
        })
        .collect()
}

/// Replays the same turns with a policy. `records`: pages that the disk holds.
fn replay(Trace { conversations, turns }: Trace, policy: EvictionPolicy, records: u32, leave: Leave) -> Outcome {
    let ram = conversations as u64 / 10 * u64::from(PAGES) * PAGE;
    let limits = TableLimits { ram, page: PAGE, records, policy };
    let mut table = PageTable::new(Fingerprint::of([]), limits, Vec::new());
    let weights: Vec<f64> = (1..=conversations).map(|rank| 1.0 / rank as f64).collect();
    let total: f64 = weights.iter().sum();
    let (mut chance, mut now) = (Chance(1), 0.0);
    let (mut found, mut wanted, mut waited, mut before) = ((0.0, 0.0), 0.0, 0.0, 0);
    for turn in 0..turns {
        now += -20.0 * (1.0 - chance.next()).ln();
        let mut left = chance.next() * total;
        let conversation = weights.iter().position(|weight| {
            left -= weight;
            left <= 0.0
        });
        let conversation = conversation.unwrap_or(conversations - 1);
        // One conversation in ten is important.
        let priority = i32::from(conversation.is_multiple_of(10));
        let keys = chain(conversation, PAGES);
        if turn == turns / 3 {
            before = table.stats().ram_evictions;
        }
        let in_ram = table.in_ram(&keys[..table.stored(&keys)]);
        let stored = load(&mut table, &keys, priority, now);
        make_room_ahead(&mut table, ram, leave, now);
        let in_ram = in_ram.min(stored);
        for index in stored..keys.len() {
            let parent = if index == 0 { PageKey::root(&Fingerprint::of([])) } else { keys[index - 1] };
            let facts = PageFacts { last_used: now, uses: 1.0, cost_ms: COMPUTE_MS, priority };
            table.insert(keys[index], parent, index as u32, facts, PageBytes::new(8).unwrap());
            transfer_all(&mut table, now);
            make_room_ahead(&mut table, ram, leave, now);
        }
        // The first turns fill the tiers.
        if turn >= turns / 3 {
            found = (found.0 + in_ram as f64, found.1 + (stored - in_ram) as f64);
            wanted += keys.len() as f64;
            let missing = (keys.len() - stored) as f64;
            waited += missing * COMPUTE_MS + (stored - in_ram) as f64 * DISK_MS + in_ram as f64 * RAM_MS;
        }
    }
    let counted = (turns - turns / 3) as f64;
    let evictions = (table.stats().ram_evictions - before) as f64 / counted;
    Outcome { ram_hits: found.0 / wanted, disk_hits: found.1 / wanted, first_token_ms: waited / counted, evictions }
}

/// Evicts pages before their room is needed, if pages leave at watermarks.
fn make_room_ahead(table: &mut PageTable, ram: u64, leave: Leave, now: f64) {
    let Leave::Watermarks { high, low } = leave else { return };
    if table.stats().ram_bytes > ram * high / 100 {
        table.set_ram(ram * low / 100, now);
        table.set_ram(ram, now);
    }
}

/// Brings the stored start of a chain into RAM; returns its number of pages.
fn load(table: &mut PageTable, keys: &[PageKey], priority: i32, now: f64) -> usize {
    let mut ticket = None;
    for _ in 0..1000 {
        match table.find(keys, priority, now, ticket.as_ref()) {
            ChainLookup::Ready(pages) => return pages.len(),
            ChainLookup::Loading(new) => ticket = new.or(ticket),
        }
        transfer_all(table, now);
    }
    panic!("the pages are never read")
}

fn transfer_all(table: &mut PageTable, now: f64) {
    while let Some(transfer) = table.next_transfer(now) {
        match transfer {
            PageTransfer::Write { key, record, page, .. } => {
                drop(page);
                table.finish_write(&key, record, true);
            }
            PageTransfer::Read { key, .. } => table.finish_read(&key, Some(PageBytes::new(8).unwrap()), 1),
        }
    }
}

impl Outcome {
    fn print(&self, what: &str) {
        let [ram, disk] = [self.ram_hits, self.disk_hits].map(|share| 100.0 * share);
        let Outcome { first_token_ms, evictions, .. } = self;
        println!(
            "{what}: {ram:.1} % found in RAM, {disk:.1} % on disk, first token {first_token_ms:.0} ms, \
             {evictions:.2} pages leave RAM in a turn"
        );
    }
}

/// Compares pages that leave RAM when their room is needed with pages that leave ahead of that; prints a line for each.
fn compare_watermarks(trace: Trace) {
    let all = trace.conversations as u32 * PAGES + PAGES;
    for (what, records) in [("RAM only", 0), ("disk for all", all)] {
        let of = |leave| replay(trace, EvictionPolicy::Hybrid, records, leave);
        let [demand, ahead] = [Leave::OnDemand, Leave::Watermarks { high: 90, low: 80 }].map(of);
        demand.print(&format!("{what}, on demand"));
        ahead.print(&format!("{what}, watermarks of 90 and 80 %"));
        assert!(demand.ram_hits > ahead.ram_hits && demand.first_token_ms < ahead.first_token_ms, "{what}");
    }
}

/// Compares the policies; prints a line for each.
fn compare(trace: Trace) {
    let half = trace.conversations as u32 / 2 * PAGES;
    for (what, records) in [("RAM only", 0), ("disk for half", half), ("disk for all", 2 * half + PAGES)] {
        let of = |policy| replay(trace, policy, records, Leave::OnDemand);
        let outcomes = EvictionPolicy::NAMES.map(|(name, policy)| (name, of(policy)));
        outcomes.iter().for_each(|(name, outcome)| outcome.print(&format!("{what}, {name}")));
        let [(_, lru), (_, priority), (_, hybrid)] = outcomes;
        let best = lru.first_token_ms.min(priority.first_token_ms);
        assert!(hybrid.first_token_ms <= best * 1.005, "{what}: {outcomes:?}");
    }
}

#[test]
fn the_default_policy_is_no_worse_than_the_better_of_the_others() {
    compare(Trace { conversations: 40, turns: 600 });
}

#[test]
#[ignore = "minutes: the figures of docs/measurements"]
fn the_same_of_200_conversations() {
    compare(Trace { conversations: 200, turns: 6000 });
}

#[test]
fn room_made_ahead_of_need_costs_hits() {
    compare_watermarks(Trace { conversations: 40, turns: 600 });
}

#[test]
#[ignore = "minutes: the figures of docs/measurements"]
fn the_same_of_200_conversations_with_watermarks() {
    compare_watermarks(Trace { conversations: 200, turns: 6000 });
}

#[test]
#[ignore = "the figures of docs/measurements"]
fn the_time_to_free_a_page() {
    // 128 tokens of 24 layers with 8 heads of 64 for keys and values, fp32.
    let bytes = 128 * 24 * 2 * 8 * 64 * 4;
    let mut pages: Vec<PageBytes> = (0..32).map(|_| PageBytes::new(bytes).unwrap()).collect();
    pages.iter_mut().for_each(|page| page.payload_mut().fill(1));
    let mut micros: Vec<u128> = Vec::new();
    while let Some(page) = pages.pop() {
        let started = std::time::Instant::now();
        drop(page);
        micros.push(started.elapsed().as_micros());
    }
    micros.sort_unstable();
    println!("freeing a page of {bytes} bytes: median {} us, most {} us", micros[16], micros[31]);
}
