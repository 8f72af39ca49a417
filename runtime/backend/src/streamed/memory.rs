//! The memory that the chunks of one session fill: huge pages and the small ones beside them, which sessions leave to each other.

use super::frames::Frames;
use super::mapping::{HUGE, Mapping};
use std::ops::Range;
use std::rc::Rc;

/// Memory that comes and goes.
pub(super) struct Memory {
    frames: Rc<Frames>,
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
        Memory { frames, parts: mappings.iter().flat_map(around_huge_pages).map(part).collect() }
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
                // SAFETY: the promises made here and at `new`; `drop` tells when the memory goes.
                part.stretches = unsafe { self.frames.take(part.addresses.clone()) };
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
            unsafe { self.frames.put(stretch) };
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: whoever let others fill it has waited for them, as it must before it unmaps it.
        unsafe { self.leave() };
        self.parts.iter().for_each(|part| self.frames.forget(part.addresses.clone()));
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
