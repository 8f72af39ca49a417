//! The address ranges that the chunks of one session fill, divided into huge pages and the small pages between them. The pages come from
//! the pool and return to it.

use super::super::mapping::Mapping;
use super::address_space::{HUGE, huge_pages};
use super::page_pool::PagePool;
use std::ops::Range;
use std::rc::Rc;

/// The page regions of one session.
pub(super) struct PageRegions {
    pool: Rc<PagePool>,
    /// Whether its pages come from the pool and return to it.
    moves: bool,
    /// One for each huge page and for each range between huge pages, by address.
    regions: Vec<PageRegion>,
}

struct PageRegion {
    addresses: Range<usize>,
    /// The ranges of pages that it consists of; none while it is empty.
    ranges: Vec<Range<usize>>,
}

impl PageRegions {
    /// The regions of these mappings, by address. Frees the pages that they have.
    ///
    /// # Safety
    /// The mappings must be memory that [`replace`](super::address_space::replace) made, must stay mapped as long as this lives, and nothing else may write to
    /// them.
    pub unsafe fn new(pool: Rc<PagePool>, mappings: &[Mapping]) -> Self {
        // SAFETY: the caller's promise.
        mappings.iter().for_each(|mapping| unsafe { mapping.free_pages() });
        let part = |addresses: Range<usize>| PageRegion { addresses, ranges: Vec::new() };
        let regions: Vec<PageRegion> = mappings.iter().flat_map(around_huge_pages).map(part).collect();
        PageRegions { moves: pool.register(regions.len()), pool, regions }
    }

    /// The bytes of pages that each chunk needs, given the ranges that chunks fill in this order: a region gets all its pages with the
    /// first chunk that fills any of it.
    pub fn bytes_needed<'a>(&self, chunks: impl Iterator<Item = &'a [Range<usize>]>) -> Vec<u64> {
        let mut taken = vec![false; self.regions.len()];
        let mut takes = |fill: &Range<usize>| {
            let first = self.regions.partition_point(|part| part.addresses.end <= fill.start);
            let touched =
                self.regions.iter().zip(&mut taken).skip(first).take_while(|(part, _)| part.addresses.start < fill.end);
            let new =
                touched.filter_map(|(part, taken)| (!std::mem::replace(taken, true)).then_some(part.addresses.len()));
            new.sum::<usize>() as u64
        };
        chunks.map(|fills| fills.iter().map(&mut takes).sum()).collect()
    }

    /// Gives pages to the regions of addresses that will be filled.
    ///
    /// # Safety
    /// Nothing may need the contents of these regions, unless a chunk has filled some of them before.
    pub unsafe fn acquire(&mut self, fills: &[Range<usize>]) {
        for fill in fills {
            let first = self.regions.partition_point(|part| part.addresses.end <= fill.start);
            let touched = self.regions[first..].iter_mut().take_while(|part| part.addresses.start < fill.end);
            for part in touched.filter(|part| part.ranges.is_empty()) {
                let addresses = part.addresses.clone();
                part.ranges = match self.moves {
                    // SAFETY: the contracts of this function and of `new`; `drop` tells the pool when the memory is unmapped.
                    true => unsafe { self.pool.acquire(addresses) },
                    false => vec![self.pool.allocate(addresses)],
                };
            }
        }
    }

    /// Returns all pages to the pool.
    ///
    /// # Safety
    /// Nothing may need their contents, and no read may be filling them.
    pub unsafe fn release(&mut self) {
        for range in self.regions.iter_mut().flat_map(|part| part.ranges.drain(..)) {
            // SAFETY: the contracts of this function and of `new`; `drop` tells the pool when the memory is unmapped.
            unsafe { if self.moves { self.pool.release(range) } else { self.pool.free(range) } };
        }
    }
}

impl Drop for PageRegions {
    fn drop(&mut self) {
        // SAFETY: the owner has waited for all reads, as it must before the memory is unmapped.
        unsafe { self.release() };
        if self.moves {
            self.regions.iter().for_each(|part| self.pool.discard(part.addresses.clone()));
            self.pool.unregister(self.regions.len());
        }
    }
}

/// The ranges of a mapping: each huge page, and what lies before and after them.
fn around_huge_pages(mapping: &Mapping) -> Vec<Range<usize>> {
    let (start, end) = (mapping.start, mapping.start + mapping.length);
    let huge = huge_pages(mapping).step_by(HUGE).flat_map(|at| [at, at + HUGE]);
    let mut bounds: Vec<usize> = std::iter::once(start).chain(huge).chain([end]).collect();
    bounds.dedup();
    bounds.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::address_space::replace;
    use super::*;
    use crate::os::Pages;
    use std::path::PathBuf;

    const PAGE: usize = 4096;

    /// The memory of sessions, with this many pages each, at addresses that are not aligned to huge pages.
    fn sessions(pool: &Rc<PagePool>, pages: &[usize]) -> (Pages, Vec<(PageRegions, Range<usize>)>) {
        let all = Pages::reserve(pages.iter().map(|pages| (pages + 1) * PAGE).sum()).unwrap();
        let mut at = all.address() as usize;
        let sessions = pages.iter().map(|pages| {
            let mapping = Mapping { start: at + PAGE, length: pages * PAGE, offset: 0, path: PathBuf::new() };
            at += (pages + 1) * PAGE;
            let addresses = mapping.start..at;
            // SAFETY: pages just reserved, which the caller keeps longer.
            let memory = unsafe {
                replace(&addresses).unwrap();
                PageRegions::new(Rc::clone(pool), &[mapping])
            };
            (memory, addresses)
        });
        let sessions = sessions.collect();
        (all, sessions)
    }

    /// The first number of each page.
    fn marks(addresses: &Range<usize>) -> impl Iterator<Item = &'static mut usize> {
        // SAFETY: whole pages of these tests, which outlive the references.
        addresses.clone().step_by(PAGE).map(|at| unsafe { &mut *(at as *mut usize) })
    }

    /// The number of resident pages.
    fn present(all: &Pages) -> usize {
        let mut resident = vec![0_u8; all.len().div_ceil(PAGE)];
        // SAFETY: the range is that of the pages, and `resident` has a byte for each.
        assert_eq!(unsafe { libc::mincore(all.address().cast(), all.len(), resident.as_mut_ptr().cast()) }, 0);
        resident.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn pages_have_one_owner_and_never_exceed_the_peak_in_use() {
        // Fewer ranges than the six sessions have together, so some sessions do not take part.
        let pool = Rc::new(PagePool::with_ranges(19));
        let (all, mut sessions) = sessions(&pool, &[3000, 700, 1300, 2100, 90, 1700]);
        let mut taken = vec![Vec::new(); sessions.len()];
        let (mut most, mut random, mut moved) = (0, 1_u64, 0);
        let refused = 350;
        for round in 1..400_usize {
            if round == refused {
                pool.refuse_to_move();
            }
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (random >> 33) as usize % sessions.len();
            let (memory, addresses) = &mut sessions[number];
            match &mut taken[number] {
                marked if marked.is_empty() => {
                    // The first half, the second half or both, as chunks fill them.
                    let middle = addresses.start + addresses.len() / PAGE / 2 * PAGE;
                    let [front, back] = [addresses.start..middle, middle..addresses.end];
                    let fills = match random >> 60 {
                        0..4 => vec![front],
                        4..8 => vec![back],
                        _ => vec![back, front],
                    };
                    let takes: u64 = memory.bytes_needed(fills.chunks(1)).iter().sum();
                    // SAFETY: nothing needs the contents.
                    unsafe { memory.acquire(&fills) };
                    let took = memory.regions.iter().filter(|part| !part.ranges.is_empty());
                    assert_eq!(takes, took.map(|part| part.addresses.len() as u64).sum::<u64>());
                    moved += fills.iter().flat_map(marks).filter(|mark| **mark != 0).count();
                    fills.iter().flat_map(marks).for_each(|mark| *mark = round);
                    *marked = fills.into_iter().map(|fill| (fill, round)).collect();
                }
                marked => {
                    marked.clear();
                    // SAFETY: nothing needs the contents any more.
                    unsafe { memory.release() };
                }
            }
            let in_use = |(memory, _): &(PageRegions, _)| {
                let regions = memory.regions.iter().filter(|part| !part.ranges.is_empty());
                regions.map(|part| part.addresses.len() / PAGE).sum::<usize>()
            };
            let now: usize = sessions.iter().map(in_use).sum();
            let (movable, free, held) = pool.account();
            assert!((3..6).contains(&sessions.iter().filter(|(memory, _)| memory.moves).count()));
            assert!(
                movable == (round < refused) && held == now * PAGE + free,
                "{held} bytes, {free} free, {now} pages"
            );
            most = most.max(now);
            assert!(present(&all) <= most, "{} pages, the peak in use is {most}", present(&all));
            for (fill, round) in taken.iter().flatten() {
                assert!(marks(fill).all(|mark| *mark == *round), "{number} in round {round}");
            }
        }
        assert!(moved > 50_000, "{moved} pages were moved with their contents");
        assert!(most > 4000 && pool.account().1 == 0, "pages that cannot move are freed");
        drop(sessions);
        let (_all, mut sessions) = self::sessions(&pool, &[2000]);
        let (memory, addresses) = &mut sessions[0];
        // SAFETY: nothing needs the contents.
        unsafe { memory.acquire(std::slice::from_ref(addresses)) };
        assert!(marks(addresses).all(|mark| *mark == 0), "pages of unmapped memory are forgotten");
    }
}
