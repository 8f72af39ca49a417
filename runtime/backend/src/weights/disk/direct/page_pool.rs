//! A pool of physical pages shared by all streamed sessions. Allocating, zeroing and freeing pages for every token costs more CPU than
//! decompressing the weights, so the pages of a finished stage are moved (`mremap`) into the address range of the next.

use super::address_space::{HUGE, free_pages, most_mappings, move_pages, replace};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Ranges of small pages with fewer bytes are freed: moving them costs more than allocating.
const MIN_RANGE: usize = 64 << 10;
/// Divides the process's limit on mappings; the quotient is the most ranges that pages move to and from. Each of them takes one mapping or
/// a few, and the rest of the process needs some too.
const MAPPING_DIVISOR: usize = 4;

/// Free pages of all streamed sessions.
///
/// Invariant: pages in use and free pages together never exceed the peak of pages in use. Allocating in one size class (huge or small
/// pages) releases as many free bytes of the other.
pub(crate) struct PagePool(RefCell<PoolState>);

struct PoolState {
    /// How many more ranges may be registered.
    ranges_left: usize,
    /// Addresses of free huge pages.
    huge: BTreeSet<usize>,
    /// Ranges of free small pages: start address and bytes.
    small: BTreeMap<usize, usize>,
    /// Whether the system can move pages.
    movable: bool,
    /// Bytes of pages in use and free pages.
    held: usize,
    /// Most bytes of pages in use so far. `held` exceeds it only when no page is free, and then raises it.
    peak: usize,
}

impl Default for PagePool {
    fn default() -> Self {
        PagePool::with_ranges(most_mappings() / MAPPING_DIVISOR)
    }
}

impl PagePool {
    /// A pool for at most `ranges` address ranges.
    pub fn with_ranges(ranges: usize) -> Self {
        let (huge, small) = (BTreeSet::new(), BTreeMap::new());
        PagePool(RefCell::new(PoolState { ranges_left: ranges, huge, small, movable: true, held: 0, peak: 0 }))
    }

    /// Registers address ranges that pages move to and from; false if that would exceed the process's limit on mappings.
    pub fn register(&self, ranges: usize) -> bool {
        let state = &mut *self.0.borrow_mut();
        let left = state.ranges_left.checked_sub(ranges);
        state.ranges_left = left.unwrap_or(state.ranges_left);
        left.is_some()
    }

    /// Unregisters address ranges.
    pub fn unregister(&self, ranges: usize) {
        self.0.borrow_mut().ranges_left += ranges;
    }

    /// Counts pages that the system will allocate when they are touched, and frees free pages so that the peak is not exceeded.
    pub fn allocate(&self, addresses: Range<usize>) -> Range<usize> {
        self.0.borrow_mut().grow(addresses.len());
        addresses
    }

    /// Frees pages that [`allocate`](Self::allocate) counted.
    ///
    /// # Safety
    /// They must be mapped, and nothing may need their contents.
    pub unsafe fn free(&self, addresses: Range<usize>) {
        self.0.borrow_mut().free(addresses);
    }

    /// Moves free pages to an address range: one huge page, or a range of small pages. If there are too few free pages, the system
    /// allocates pages when they are touched. Returns the parts that the range consists of, for [`release`](Self::release).
    ///
    /// # Safety
    /// The range must be memory that [`replace`] made, and must stay mapped until [`discard`](Self::discard). Nothing may need its
    /// contents.
    pub unsafe fn acquire(&self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let state = &mut *self.0.borrow_mut();
        // SAFETY: the caller's promise.
        unsafe { if is_huge(&addresses) { state.acquire_huge(addresses) } else { state.acquire_small(addresses) } }
    }

    /// Adds a range of pages to the free ones.
    ///
    /// # Safety
    /// As for [`acquire`](Self::acquire).
    pub unsafe fn release(&self, range: Range<usize>) {
        let state = &mut *self.0.borrow_mut();
        state.release(range);
        if !state.movable {
            state.shrink(0);
        }
    }

    /// Discards the free pages in an address range that will be unmapped.
    pub fn discard(&self, addresses: Range<usize>) {
        let state = &mut *self.0.borrow_mut();
        state.held -= state.huge.range(addresses.clone()).count() * HUGE;
        state.huge.retain(|at| !addresses.contains(at));
        let small = state.small_within(addresses);
        state.held -= small.iter().map(Range::len).sum::<usize>();
    }
}

#[cfg(test)]
impl PagePool {
    /// Behaves from now on as on a system that cannot move pages.
    pub fn refuse_to_move(&self) {
        self.0.borrow_mut().movable = false;
    }

    /// Whether the system can move pages, bytes of free pages, and bytes held in all.
    pub fn account(&self) -> (bool, usize, usize) {
        let state = self.0.borrow();
        (state.movable, state.huge.len() * HUGE + state.small.values().sum::<usize>(), state.held)
    }
}

/// Whether the range is that of a huge page.
fn is_huge(addresses: &Range<usize>) -> bool {
    addresses.start.is_multiple_of(HUGE) && addresses.len() == HUGE
}

impl PoolState {
    /// # Safety
    /// That of [`PagePool::acquire`].
    unsafe fn acquire_huge(&mut self, addresses: Range<usize>) -> Vec<Range<usize>> {
        if !self.huge.remove(&addresses.start) {
            // SAFETY: this function's contract for the target, and that of `release` for the source.
            let moved = self.huge.pop_last().is_some_and(|from| unsafe { self.try_move(from, addresses.clone()) });
            if !moved {
                self.grow(HUGE);
            }
        }
        vec![addresses]
    }

    /// # Safety
    /// That of [`PagePool::acquire`].
    unsafe fn acquire_small(&mut self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let mut parts = self.small_within(addresses.clone());
        let ends = parts.iter().map(|part| part.start).chain([addresses.end]);
        let starts = [addresses.start].into_iter().chain(parts.iter().map(|part| part.end));
        let gaps: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
        for mut gap in gaps {
            while let Some(from) = Some(gap.len()).filter(|bytes| *bytes > 0).and_then(|bytes| self.best_fit(bytes)) {
                let to = gap.start..gap.end.min(gap.start + from.len());
                self.release(from.start + to.len()..from.end);
                // SAFETY: this function's contract for the target, and that of `release` for the source.
                if unsafe { self.try_move(from.start, to.clone()) } {
                    gap.start = to.end;
                    parts.push(to);
                }
            }
            if !gap.is_empty() {
                self.grow(gap.len());
                // Pages that were moved here before belong to several mappings. Before Linux 6.17 `mremap` moves pages of one mapping
                // only, so the range is mapped anew; if the process may not have another mapping, its pages will not be moved.
                // SAFETY: this function's contract.
                let _ = unsafe { replace(&gap) };
                parts.push(gap);
            }
        }
        parts
    }

    /// Removes and returns all ranges of free small pages within one, in order.
    fn small_within(&mut self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let found: Vec<_> = self.small.range(addresses.clone()).map(|(at, bytes)| *at..at + bytes).collect();
        self.small.retain(|at, _| !addresses.contains(at));
        found
    }

    /// Removes and returns the smallest range of at least `bytes`, or else the largest.
    fn best_fit(&mut self, bytes: usize) -> Option<Range<usize>> {
        let enough = self.small.iter().filter(|(_, has)| **has >= bytes).min_by_key(|(_, has)| **has);
        let (at, has) =
            enough.or_else(|| self.small.iter().max_by_key(|(_, has)| **has)).map(|(at, has)| (*at, *has))?;
        self.small.remove(&at);
        Some(at..at + has)
    }

    fn release(&mut self, range: Range<usize>) {
        if is_huge(&range) {
            self.huge.insert(range.start);
        } else if range.len() >= MIN_RANGE {
            self.small.insert(range.start, range.len());
        } else {
            self.free(range);
        }
    }

    /// Moves pages that are in neither list; frees them if the system cannot.
    ///
    /// # Safety
    /// That of [`move_pages`].
    unsafe fn try_move(&mut self, from: usize, to: Range<usize>) -> bool {
        // SAFETY: the caller's promise.
        let moved = self.movable && unsafe { move_pages(from, &to) };
        if !moved {
            // An old kernel, or the process may not have another mapping.
            self.movable = false;
            self.free(from..from + to.len());
        }
        moved
    }

    /// Counts bytes that will be allocated.
    fn grow(&mut self, bytes: usize) {
        self.shrink(self.peak.saturating_sub(bytes));
        self.held += bytes;
        self.peak = self.peak.max(self.held);
    }

    /// Frees pages until at most `held` bytes are held.
    fn shrink(&mut self, held: usize) {
        while self.held > held {
            let huge = self.huge.pop_first().map(|at| at..at + HUGE);
            let small = || self.small.pop_first().map(|(at, bytes)| at..at + bytes);
            let Some(range) = huge.or_else(small) else { return };
            self.free(range);
        }
    }

    fn free(&mut self, range: Range<usize>) {
        self.held -= range.len();
        // SAFETY: the contract of `PagePool::free` or `PagePool::release`: the pages are mapped until `discard`, and nothing needs their
        // contents.
        unsafe { free_pages(range) };
    }
}
