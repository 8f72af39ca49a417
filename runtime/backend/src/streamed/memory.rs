//! The memory that the chunks of one session fill: huge pages, which other sessions leave to it, and small ones beside them.

use super::frames::Frames;
use super::mapping::{HUGE, Mapping, give_back};
use std::ops::Range;
use std::rc::Rc;

/// Memory that comes and goes.
pub(super) struct Memory {
    frames: Rc<Frames>,
    /// Where huge pages may lie, in order, and whether one was taken.
    huge: Vec<(usize, bool)>,
    /// What lies in front of them and behind them.
    beside: Vec<Range<usize>>,
    /// Bytes that chunks may have filled of this.
    filled: usize,
}

impl Memory {
    /// Empty memory of these mappings, in order; what they hold is given back.
    ///
    /// # Safety
    /// They must be memory that [`Mapping::replace`] made, which stays mapped as long as this lives. Nobody else fills it.
    pub unsafe fn new(frames: Rc<Frames>, mappings: &[Mapping]) -> Self {
        let pages = mappings.iter().map(Mapping::huge_pages);
        let huge = pages.clone().flat_map(|pages| pages.step_by(HUGE).map(|at| (at, false))).collect();
        let around = |(mapping, pages): (&Mapping, Range<usize>)| {
            let (start, end) = (mapping.start, mapping.start + mapping.length);
            let (first, last) = if pages.is_empty() { (end, end) } else { (pages.start, pages.end) };
            [start..first, last..end]
        };
        let beside = mappings.iter().zip(pages).flat_map(around).filter(|range| !range.is_empty()).collect();
        // SAFETY: the caller's promise.
        mappings.iter().for_each(|mapping| unsafe { mapping.give_back() });
        Memory { frames, huge, beside, filled: 0 }
    }

    /// Makes room at addresses that are about to be filled.
    ///
    /// # Safety
    /// Nobody needs what a huge page holds that no chunk has filled yet.
    pub unsafe fn make_room(&mut self, fills: &[Range<usize>]) {
        let mut small = 0;
        for fill in fills {
            small += fill.len();
            let first = self.huge.partition_point(|(at, _)| at + HUGE <= fill.start);
            for (at, taken) in self.huge[first..].iter_mut().take_while(|(at, _)| *at < fill.end) {
                small -= fill.end.min(*at + HUGE) - fill.start.max(*at);
                if !std::mem::replace(taken, true) {
                    // SAFETY: the promises made here and at `new`; this is dropped before the memory goes.
                    unsafe { self.frames.take(*at) };
                }
            }
        }
        self.frames.make_room(small);
        self.filled += small;
    }

    /// Leaves huge pages to others and gives small ones back.
    ///
    /// # Safety
    /// Nobody needs what they hold, and nobody fills them.
    pub unsafe fn give_back(&mut self) {
        for (at, taken) in &mut self.huge {
            if std::mem::take(taken) {
                // SAFETY: the promises made here and at `new`; this is dropped before the memory goes.
                unsafe { self.frames.put(*at) };
            }
        }
        for range in &self.beside {
            // SAFETY: the promises made here and at `new`.
            unsafe { give_back(range.clone()) };
        }
        self.frames.given_back(std::mem::take(&mut self.filled));
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: whoever let others fill it has waited for them, as it would before it unmaps it.
        unsafe { self.give_back() };
        self.huge.iter().for_each(|(at, _)| self.frames.forget(*at));
    }
}
