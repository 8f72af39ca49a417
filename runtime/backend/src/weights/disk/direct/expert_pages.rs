//! The memory of experts: pages that move from evicted experts to those that are read in their place.
//!
//! The slices of experts follow each other in memory and are smaller than huge pages or not aligned to them. But disks fill memory fastest
//! where it is physically contiguous, because a request to a disk takes a limited number of ranges. So pages come from huge pages and are
//! moved (`mremap`) in pieces: each piece stays contiguous wherever it is mapped, is filled by direct reads without a copy, and is
//! neither freed nor allocated again. Reads into small pages ran at a quarter of the rate, and copies to fresh pages took longer than the reads
//! (RUNTIME.md).

use super::address_space::{
    HUGE, allow_access, deny_access, free_pages, map_inaccessible, most_mappings, move_pages, replace,
};
use crate::os::Pages;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

/// Bytes of address space that is reserved at once for new pages.
const ARENA: usize = 64 << 20;
/// Bytes of a small page.
const PAGE: usize = 4096;
/// Divides the process's limit on mappings; the quotient is the most ranges of experts. A range takes one mapping while it has pages. Most
/// ranges have none, and adjacent ranges without pages share one mapping.
const MAPPING_DIVISOR: usize = 2;

/// The pages of the experts of all streamed sessions.
///
/// Invariant: new pages are allocated only while no page is free.
pub(crate) struct ExpertPages(RefCell<State>);

struct State {
    /// How many more ranges may be registered.
    ranges_left: usize,
    /// Address ranges in which new pages are allocated before they move to an expert.
    arenas: Vec<Pages>,
    /// The part of the last arena that was not used yet.
    fresh: Range<usize>,
    /// Pages of evicted experts, by address. They stay where they are until they are needed elsewhere.
    free: BTreeMap<usize, FreePiece>,
    /// Whether the system can move pages.
    movable: bool,
}

#[derive(Clone, Copy)]
struct FreePiece {
    bytes: usize,
    /// Whether it may be accessed.
    is_accessible: bool,
}

impl Default for ExpertPages {
    fn default() -> Self {
        let ranges_left = most_mappings() / MAPPING_DIVISOR;
        let (arenas, free) = (Vec::new(), BTreeMap::new());
        ExpertPages(RefCell::new(State { ranges_left, arenas, fresh: 0..0, free, movable: true }))
    }
}

impl ExpertPages {
    /// Registers address ranges of experts; false if that would exceed the process's limit on mappings.
    pub fn register(&self, ranges: usize) -> bool {
        let state = &mut *self.0.borrow_mut();
        let left = state.ranges_left.checked_sub(ranges);
        state.ranges_left = left.unwrap_or(state.ranges_left);
        left.is_some()
    }

    /// Gives pages to an address range, which may be accessed from now on; returns the pieces that it consists of, for
    /// [`release`](Self::release). Without enough free pages new ones are allocated.
    ///
    /// # Safety
    /// The range must be whole pages that [`map_inaccessible`] made inaccessible, or that were released since, and must stay mapped until
    /// [`discard`](Self::discard). Nothing may need its contents.
    pub unsafe fn acquire(&self, addresses: Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let state = &mut *self.0.borrow_mut();
        let mut pieces = state.take_within(&addresses)?;
        for mut gap in gaps(&addresses, &pieces) {
            while state.movable && !gap.is_empty() {
                let to = gap.start..gap.start + state.longest_move(gap.len());
                // SAFETY: this function's contract for the target; the source is free or new.
                if unsafe { state.move_to(to.clone()) }? {
                    gap.start = to.end;
                    pieces.push(to);
                }
            }
            if !gap.is_empty() {
                // SAFETY: this function's contract.
                unsafe { replace(&gap) }?;
                pieces.push(gap);
            }
        }
        Ok(pieces)
    }

    /// Takes back the pages of a piece. They may still be accessed until [`deny_access_to_free_pages`](Self::deny_access_to_free_pages).
    ///
    /// # Safety
    /// Nothing may need their contents, no read may be filling them, and they must stay mapped until [`discard`](Self::discard).
    pub unsafe fn release(&self, piece: Range<usize>) {
        let state = &mut *self.0.borrow_mut();
        if state.movable {
            state.free.insert(piece.start, FreePiece { bytes: piece.len(), is_accessible: true });
        } else {
            // SAFETY: this function's contract. If the system refuses, the pages are freed at least.
            unsafe {
                free_pages(piece.clone());
                drop(map_inaccessible(&piece));
            }
        }
    }

    /// Forbids any access to free pages: a kernel that reads an expert that was not selected must not compute with them.
    pub fn deny_access_to_free_pages(&self) -> io::Result<()> {
        let open = |(at, piece): (&usize, &mut FreePiece)| {
            // SAFETY: nothing needs the contents of free pages, which are mapped (the contract of `release`).
            unsafe { deny_access(&(*at..*at + piece.bytes)) }.map(|()| piece.is_accessible = false)
        };
        self.0.borrow_mut().free.iter_mut().filter(|(_, piece)| piece.is_accessible).try_for_each(open)
    }

    /// Unregisters an address range that will be unmapped, and drops the free pages in it.
    pub fn discard(&self, addresses: Range<usize>) {
        let state = &mut *self.0.borrow_mut();
        state.ranges_left += 1;
        state.free.retain(|at, _| !addresses.contains(at));
    }
}

impl State {
    /// Removes all free pages within a range, and allows access to them; their ranges, in order.
    fn take_within(&mut self, addresses: &Range<usize>) -> io::Result<Vec<Range<usize>>> {
        let found: Vec<_> = self.free.range(addresses.clone()).map(|(at, piece)| (*at, *piece)).collect();
        let mut taken = Vec::new();
        for (at, piece) in found {
            let range = at..at + piece.bytes;
            if !piece.is_accessible {
                // SAFETY: free pages are mapped (the contract of `release`).
                unsafe { allow_access(&range) }?;
            }
            self.free.remove(&at);
            taken.push(range);
        }
        Ok(taken)
    }

    /// How many of `bytes` the next move can fill.
    fn longest_move(&self, bytes: usize) -> usize {
        let largest = self.free.values().map(|piece| piece.bytes).max().unwrap_or(ARENA);
        bytes.min(largest)
    }

    /// Moves free or new pages to an address range that is not longer than [`longest_move`](Self::longest_move) allows. Returns false if
    /// the system cannot move pages; then none are moved from now on.
    ///
    /// # Safety
    /// The range must be mapped, and nothing may need its contents.
    unsafe fn move_to(&mut self, to: Range<usize>) -> io::Result<bool> {
        let smallest =
            self.free.iter().filter(|(_, piece)| piece.bytes >= to.len()).min_by_key(|(_, piece)| piece.bytes);
        let (from, piece) = match smallest.map(|(at, piece)| (*at, *piece)) {
            Some((at, piece)) => {
                self.free.remove(&at);
                if piece.bytes > to.len() {
                    let rest = FreePiece { bytes: piece.bytes - to.len(), ..piece };
                    self.free.insert(at + to.len(), rest);
                }
                (at, Some(piece))
            }
            None => (self.allocate(to.len())?, None),
        };
        let source = from..from + to.len();
        // SAFETY: the contracts of this function and of `release`.
        self.movable = unsafe { move_pages(from, &to) };
        if piece.is_some() {
            // SAFETY: nothing needs what is left there, and it stays mapped (the contract of `release`).
            unsafe { map_inaccessible(&source) }?;
        }
        if !self.movable {
            self.free_all();
        } else if piece.is_some_and(|piece| !piece.is_accessible) {
            // SAFETY: the pages that were just moved.
            unsafe { allow_access(&to) }?;
        }
        Ok(self.movable)
    }

    /// Allocates `bytes` of new pages, at most [`ARENA`]; their address.
    fn allocate(&mut self, bytes: usize) -> io::Result<usize> {
        if self.fresh.len() < bytes {
            let pages = Pages::reserve(ARENA + HUGE)?;
            let start = (pages.address() as usize).next_multiple_of(HUGE);
            self.fresh = start..start + ARENA;
            // SAFETY: the range lies within the pages just reserved, which are not in use yet.
            unsafe { replace(&self.fresh) }?;
            self.arenas.push(pages);
        }
        let start = self.fresh.start;
        self.fresh.start += bytes;
        // SAFETY: each address lies within the arena, in pages that nothing has. Writing allocates the page.
        (start..start + bytes).step_by(PAGE).for_each(|at| unsafe { (at as *mut u8).write_volatile(0) });
        Ok(start)
    }

    /// Frees all free pages, which cannot be moved.
    fn free_all(&mut self) {
        for (at, piece) in std::mem::take(&mut self.free) {
            let range = at..at + piece.bytes;
            // SAFETY: nothing needs the contents of free pages, which are mapped (the contract of `release`).
            unsafe {
                free_pages(range.clone());
                drop(map_inaccessible(&range));
            }
        }
    }
}

/// The parts of a range that `pieces` do not cover. `pieces` must be in order.
fn gaps(addresses: &Range<usize>, pieces: &[Range<usize>]) -> Vec<Range<usize>> {
    let starts = std::iter::once(addresses.start).chain(pieces.iter().map(|piece| piece.end));
    let ends = pieces.iter().map(|piece| piece.start).chain([addresses.end]);
    starts.zip(ends).map(|(start, end)| start..end).filter(|gap| !gap.is_empty()).collect()
}

#[cfg(test)]
impl ExpertPages {
    /// Bytes of pages that were allocated, and of those that are free.
    fn account(&self) -> (usize, usize) {
        let state = self.0.borrow();
        let used = (state.arenas.len() * ARENA).saturating_sub(state.fresh.len());
        (used, state.free.values().map(|piece| piece.bytes).sum())
    }

    /// As on a system that cannot move pages.
    fn immovable() -> Self {
        let pages = ExpertPages::default();
        pages.0.borrow_mut().movable = false;
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Address ranges of these pages, with a page between them, that may not be accessed.
    fn ranges(pages: &[usize]) -> (Pages, Vec<Range<usize>>) {
        let all = Pages::reserve(pages.iter().map(|pages| (pages + 1) * PAGE).sum()).unwrap();
        let mut at = all.address() as usize;
        // SAFETY: the ranges lie within the pages just reserved.
        unsafe { map_inaccessible(&(at..at + all.len())) }.unwrap();
        let ranges = pages.iter().map(|pages| {
            let start = at + PAGE;
            at = start + pages * PAGE;
            start..at
        });
        let ranges = ranges.collect();
        (all, ranges)
    }

    /// Marks each page of a range, or checks its marks.
    fn mark(addresses: &Range<usize>, number: usize) {
        // SAFETY: whole pages of these tests that may be accessed.
        addresses.clone().step_by(PAGE).for_each(|at| unsafe { *(at as *mut usize) = number });
    }

    fn has_mark(addresses: &Range<usize>, number: usize) -> bool {
        // SAFETY: whole pages of these tests that may be accessed.
        addresses.clone().step_by(PAGE).all(|at| unsafe { *(at as *const usize) == number })
    }

    /// Whether the system may read an address, asked without reading it here.
    fn is_accessible(at: usize) -> bool {
        let (_from, mut to) = io::pipe().unwrap();
        // SAFETY: the bytes are only passed to the system, which checks them.
        to.write(unsafe { std::slice::from_raw_parts(at as *const u8, 1) }).is_ok()
    }

    #[test]
    fn pages_move_from_evicted_experts_to_others_and_leave_nothing_behind() {
        let pages = ExpertPages::default();
        let (_all, ranges) = ranges(&[300, 40, 300, 40]);
        // SAFETY: ranges that may not be accessed; nothing needs their contents.
        let [large, small] = [0, 1].map(|number| unsafe { pages.acquire(ranges[number].clone()) }.unwrap());
        assert_eq!((&large[..], &small[..]), (&ranges[..1], &ranges[1..2]), "each is one piece");
        (0..2).for_each(|number| mark(&ranges[number], 7 + number));
        // SAFETY: nothing needs the contents, and nothing reads them.
        large.into_iter().chain(small).for_each(|piece| unsafe { pages.release(piece) });
        // The same length finds the same pages, also if more are free.
        // SAFETY: as above.
        unsafe { pages.acquire(ranges[3].clone()) }.unwrap();
        assert!(has_mark(&ranges[3], 8) && !is_accessible(ranges[1].start));
        assert!(is_accessible(ranges[0].start));
        pages.deny_access_to_free_pages().unwrap();
        assert!(!is_accessible(ranges[0].start) && !is_accessible(ranges[0].end - 1));
        // SAFETY: as above.
        unsafe { pages.acquire(ranges[2].clone()) }.unwrap();
        assert!(has_mark(&ranges[2], 7) && !is_accessible(ranges[0].start));
        assert_eq!(pages.account(), (340 * PAGE, 0));
    }

    #[test]
    fn no_more_ranges_are_registered_than_the_process_may_have_mappings() {
        let pages = ExpertPages::default();
        pages.0.borrow_mut().ranges_left = 3;
        assert!(pages.register(2) && !pages.register(2) && pages.register(1));
        let (_all, ranges) = ranges(&[1, 1]);
        ranges.into_iter().for_each(|range| pages.discard(range));
        assert!(pages.register(2) && !pages.register(1));
    }

    #[test]
    fn pages_have_one_owner_and_no_more_are_allocated_than_were_in_use_at_once() {
        for pages in [ExpertPages::default(), ExpertPages::immovable()] {
            let lengths: Vec<usize> = (0..40).map(|number| [96, 97, 30, 31, 7][number % 5]).collect();
            let (_all, ranges) = ranges(&lengths);
            let mut pieces: Vec<Vec<Range<usize>>> = vec![Vec::new(); ranges.len()];
            let (mut random, mut most) = (1_u64, 0);
            for round in 1..3000 {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                let number = (random >> 33) as usize % ranges.len();
                if pieces[number].is_empty() {
                    // SAFETY: it has no pages, and nothing needs its contents.
                    pieces[number] = unsafe { pages.acquire(ranges[number].clone()) }.unwrap();
                    assert_eq!(pieces[number].iter().map(Range::len).sum::<usize>(), ranges[number].len());
                    mark(&ranges[number], number);
                } else {
                    assert!(has_mark(&ranges[number], number), "{number} in round {round}");
                    // SAFETY: nothing needs the contents any more.
                    pieces[number].drain(..).for_each(|piece| unsafe { pages.release(piece) });
                }
                if random >> 62 == 0 {
                    pages.deny_access_to_free_pages().unwrap();
                    let absent = ranges.iter().zip(&pieces).filter(|(_, pieces)| pieces.is_empty());
                    assert!(absent.into_iter().all(|(range, _)| !is_accessible(range.start)), "round {round}");
                }
                let used: usize = pieces.iter().flatten().map(Range::len).sum();
                most = most.max(used);
                let (allocated, free) = pages.account();
                assert!(allocated == 0 || (allocated == used + free && allocated <= most), "{allocated} of {most}");
            }
            ranges.iter().for_each(|range| pages.discard(range.clone()));
            assert_eq!(pages.account().1, 0);
        }
    }
}
