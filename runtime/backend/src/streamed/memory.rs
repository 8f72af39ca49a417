//! The memory that the chunks of one session fill: huge pages and the small ones beside them, which sessions leave to each other.

use super::frames::Frames;
use super::mapping::{HUGE, Mapping};
use std::ops::Range;
use std::rc::Rc;

/// Memory that comes and goes.
pub(super) struct Memory {
    frames: Rc<Frames>,
    /// Whether its pages come from others and go to others.
    moves: bool,
    /// Huge pages and what lies between them, in order.
    parts: Vec<Part>,
}

struct Part {
    addresses: Range<usize>,
    /// The stretches of pages that were put together there; none while it is empty.
    stretches: Vec<Range<usize>>,
}

impl Memory {
    /// Empty memory of these mappings, in order; what they hold is given back.
    ///
    /// # Safety
    /// They must be memory that [`Mapping::replace`] made, which stays mapped as long as this lives. Nobody else fills it.
    pub unsafe fn new(frames: Rc<Frames>, mappings: &[Mapping]) -> Self {
        // SAFETY: the caller's promise.
        mappings.iter().for_each(|mapping| unsafe { mapping.give_back() });
        let part = |addresses: Range<usize>| Part { addresses, stretches: Vec::new() };
        let parts: Vec<Part> = mappings.iter().flat_map(around_huge_pages).map(part).collect();
        Memory { moves: frames.reserve(parts.len()), frames, parts }
    }

    /// Bytes that each chunk takes, given what they fill, where they are filled in this order: a part comes as a whole, with the
    /// first chunk that fills any of it.
    pub fn taken_by<'a>(&self, chunks: impl Iterator<Item = &'a [Range<usize>]>) -> Vec<u64> {
        let mut taken = vec![false; self.parts.len()];
        let mut takes = |fill: &Range<usize>| {
            let first = self.parts.partition_point(|part| part.addresses.end <= fill.start);
            let touched =
                self.parts.iter().zip(&mut taken).skip(first).take_while(|(part, _)| part.addresses.start < fill.end);
            let new =
                touched.filter_map(|(part, taken)| (!std::mem::replace(taken, true)).then_some(part.addresses.len()));
            new.sum::<usize>() as u64
        };
        chunks.map(|fills| fills.iter().map(&mut takes).sum()).collect()
    }

    /// Makes room at addresses that are about to be filled.
    ///
    /// # Safety
    /// Nobody needs what these parts hold, where no chunk has filled any of it yet.
    pub unsafe fn make_room(&mut self, fills: &[Range<usize>]) {
        for fill in fills {
            let first = self.parts.partition_point(|part| part.addresses.end <= fill.start);
            let touched = self.parts[first..].iter_mut().take_while(|part| part.addresses.start < fill.end);
            for part in touched.filter(|part| part.stretches.is_empty()) {
                let addresses = part.addresses.clone();
                part.stretches = match self.moves {
                    // SAFETY: the promises made here and at `new`; `drop` tells when the memory goes.
                    true => unsafe { self.frames.take(addresses) },
                    false => vec![self.frames.make(addresses)],
                };
            }
        }
    }

    /// Leaves all pages to others.
    ///
    /// # Safety
    /// Nobody needs what they hold, and nobody fills them.
    pub unsafe fn leave(&mut self) {
        for stretch in self.parts.iter_mut().flat_map(|part| part.stretches.drain(..)) {
            // SAFETY: the promises made here and at `new`; `drop` tells when the memory goes.
            unsafe { if self.moves { self.frames.put(stretch) } else { self.frames.unmake(stretch) } };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: whoever let others fill it has waited for them, as it must before it unmaps it.
        unsafe { self.leave() };
        if self.moves {
            self.parts.iter().for_each(|part| self.frames.forget(part.addresses.clone()));
            self.frames.release(self.parts.len());
        }
    }
}

/// The huge pages of a mapping, each for itself, and what lies in front of them and behind them.
fn around_huge_pages(mapping: &Mapping) -> Vec<Range<usize>> {
    let (start, end) = (mapping.start, mapping.start + mapping.length);
    let huge = mapping.huge_pages().step_by(HUGE).flat_map(|at| [at, at + HUGE]);
    let mut bounds: Vec<usize> = std::iter::once(start).chain(huge).chain([end]).collect();
    bounds.dedup();
    bounds.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

#[cfg(test)]
mod tests {
    use super::super::mapping::replace;
    use super::*;
    use crate::os::Pages;
    use std::path::PathBuf;

    const PAGE: usize = 4096;

    /// Memory at odd addresses of sessions, of so many pages each, and what it lies in.
    fn sessions(frames: &Rc<Frames>, pages: &[usize]) -> (Pages, Vec<(Memory, Range<usize>)>) {
        let all = Pages::reserve(pages.iter().map(|pages| (pages + 1) * PAGE).sum()).unwrap();
        let mut at = all.address() as usize;
        let sessions = pages.iter().map(|pages| {
            let mapping = Mapping { start: at + PAGE, length: pages * PAGE, offset: 0, path: PathBuf::new() };
            at += (pages + 1) * PAGE;
            let addresses = mapping.start..at;
            // SAFETY: pages just reserved, which the caller keeps longer.
            let memory = unsafe {
                replace(&addresses).unwrap();
                Memory::new(Rc::clone(frames), &[mapping])
            };
            (memory, addresses)
        });
        let sessions = sessions.collect();
        (all, sessions)
    }

    /// The first number of each page.
    fn marks(addresses: &Range<usize>) -> impl Iterator<Item = &'static mut usize> {
        // SAFETY: whole pages of these tests, which outlive what they hand out.
        addresses.clone().step_by(PAGE).map(|at| unsafe { &mut *(at as *mut usize) })
    }

    /// Pages that are in memory.
    fn present(all: &Pages) -> usize {
        let mut there = vec![0_u8; all.len().div_ceil(PAGE)];
        // SAFETY: the range is that of the pages, and there is a byte for each.
        assert_eq!(unsafe { libc::mincore(all.address().cast(), all.len(), there.as_mut_ptr().cast()) }, 0);
        there.iter().filter(|there| **there & 1 == 1).count()
    }

    #[test]
    fn whoever_has_pages_has_them_alone_and_never_more_are_there_than_were_taken_at_once() {
        // The six have more places than that together.
        let frames = Rc::new(Frames::with_places(19));
        let (all, mut sessions) = sessions(&frames, &[3000, 700, 1300, 2100, 90, 1700]);
        let mut taken = vec![Vec::new(); sessions.len()];
        let (mut most, mut random, mut moved) = (0, 1_u64, 0);
        let refused = 350;
        for round in 1..400_usize {
            if round == refused {
                frames.refuse_to_move();
            }
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let number = (random >> 33) as usize % sessions.len();
            let (memory, addresses) = &mut sessions[number];
            match &mut taken[number] {
                marked if marked.is_empty() => {
                    // The front, the back or all of it, as chunks fill it.
                    let middle = addresses.start + addresses.len() / PAGE / 2 * PAGE;
                    let [front, back] = [addresses.start..middle, middle..addresses.end];
                    let fills = match random >> 60 {
                        0..4 => vec![front],
                        4..8 => vec![back],
                        _ => vec![back, front],
                    };
                    let takes: u64 = memory.taken_by(fills.chunks(1)).iter().sum();
                    // SAFETY: nobody needs anything of it.
                    unsafe { memory.make_room(&fills) };
                    let took = memory.parts.iter().filter(|part| !part.stretches.is_empty());
                    assert_eq!(takes, took.map(|part| part.addresses.len() as u64).sum::<u64>());
                    moved += fills.iter().flat_map(marks).filter(|mark| **mark != 0).count();
                    fills.iter().flat_map(marks).for_each(|mark| *mark = round);
                    *marked = fills.into_iter().map(|fill| (fill, round)).collect();
                }
                marked => {
                    marked.clear();
                    // SAFETY: nobody looks at it any more.
                    unsafe { memory.leave() };
                }
            }
            let in_use = |(memory, _): &(Memory, _)| {
                let parts = memory.parts.iter().filter(|part| !part.stretches.is_empty());
                parts.map(|part| part.addresses.len() / PAGE).sum::<usize>()
            };
            let now: usize = sessions.iter().map(in_use).sum();
            let (movable, free, held) = frames.account();
            assert!((3..6).contains(&sessions.iter().filter(|(memory, _)| memory.moves).count()));
            assert!(
                movable == (round < refused) && held == now * PAGE + free,
                "{held} bytes, {free} free, {now} pages"
            );
            most = most.max(now);
            assert!(present(&all) <= most, "{} pages, {most} were taken at once", present(&all));
            for (fill, round) in taken.iter().flatten() {
                assert!(marks(fill).all(|mark| *mark == *round), "{number} in round {round}");
            }
        }
        assert!(moved > 50_000, "{moved} pages came with what they held");
        assert!(most > 4000 && frames.account().1 == 0, "pages that cannot move are given back");
        drop(sessions);
        let (_all, mut sessions) = self::sessions(&frames, &[2000]);
        let (memory, addresses) = &mut sessions[0];
        // SAFETY: nobody needs anything of it.
        unsafe { memory.make_room(std::slice::from_ref(addresses)) };
        assert!(marks(addresses).all(|mark| *mark == 0), "pages of memory that is gone are forgotten");
    }
}
