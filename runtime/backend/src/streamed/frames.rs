//! Huge pages that the weights of one stage leave to those of another. The system zeroes each page that it makes, which for all that
//! is read of a model for a token takes a processor longer than finding room for it should: pages move with what they hold.

use super::mapping::{HUGE, give_back, move_page};
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Huge pages that are there and that nobody needs, of all sessions whose weights come and go in turn.
///
/// With them never more memory is held than weights have taken at once: where small pages are made while huge ones are free, of
/// these as many go.
pub(super) struct Frames(RefCell<State>);

struct State {
    /// Where those lie that nobody needs.
    free: BTreeSet<usize>,
    /// Whether the system moves pages.
    movable: bool,
    /// Bytes that weights fill or that are free.
    held: usize,
    /// Most of these at once.
    most: usize,
}

impl Default for Frames {
    fn default() -> Self {
        Frames(RefCell::new(State { free: BTreeSet::new(), movable: true, held: 0, most: 0 }))
    }
}

impl Frames {
    /// Moves a page that nobody needs to where one is needed. Where there is none, the system makes one when it is touched.
    ///
    /// # Safety
    /// There lies memory that [`Mapping::replace`](super::mapping::Mapping::replace) made, [`HUGE`] bytes from a multiple of that
    /// on, which stays mapped until [`forget`](Self::forget) is told. Nobody needs what it holds.
    pub unsafe fn take(&self, at: usize) {
        let state = &mut *self.0.borrow_mut();
        if state.free.remove(&at) {
            return;
        }
        if let Some(from) = state.free.pop_last() {
            // SAFETY: of both, the promise made here and that of `put`.
            if unsafe { move_page(from, at) } {
                return;
            }
            // An old system, or one that has no more room for its list of mappings.
            state.movable = false;
            state.free.insert(from);
            state.shrink(0);
        }
        state.grow(HUGE);
    }

    /// Keeps a page for others.
    ///
    /// # Safety
    /// The same as of [`take`](Self::take).
    pub unsafe fn put(&self, at: usize) {
        let state = &mut *self.0.borrow_mut();
        state.free.insert(at);
        if !state.movable {
            state.shrink(0);
        }
    }

    /// So many bytes of small pages are about to be made.
    pub fn make_room(&self, bytes: usize) {
        let state = &mut *self.0.borrow_mut();
        state.shrink(state.most.saturating_sub(bytes));
        state.grow(bytes);
    }

    /// So many bytes of small pages were given back.
    pub fn given_back(&self, bytes: usize) {
        self.0.borrow_mut().held -= bytes;
    }

    /// This address is about to be unmapped, with the page there if nobody took it.
    pub fn forget(&self, at: usize) {
        let state = &mut *self.0.borrow_mut();
        if state.free.remove(&at) {
            state.held -= HUGE;
        }
    }
}

impl State {
    fn grow(&mut self, bytes: usize) {
        self.held += bytes;
        self.most = self.most.max(self.held);
    }

    /// Gives back pages that nobody needs until so much is held.
    fn shrink(&mut self, held: usize) {
        while self.held > held {
            let Some(at) = self.free.pop_first() else { return };
            // SAFETY: the promise made at `put`.
            unsafe { give_back(at..at + HUGE) };
            self.held -= HUGE;
        }
    }
}
