//! Pages that the weights of one stage leave to those of another. The system charges, zeroes and later frees each page that it makes,
//! which for all that is read of a model for a token takes a processor longer than expanding it: pages move with what they hold.

use super::mapping::{HUGE, give_back, move_pages, replace};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Fewer bytes of small pages are not worth a call to the system.
const LEAST: usize = 64 << 10;
/// Most mappings a process may have where the system does not say.
const MAPPINGS: usize = 65_530;
/// Of these, one in so many may be a place that pages move to and from: each is a mapping or a few, and others need some.
const SHARE: usize = 4;

/// Pages that are there and that nobody needs, of all sessions whose weights come and go in turn.
///
/// With them never more memory is held than weights have taken at once: where pages of one kind are made while there are some of
/// the other, of these as many go.
pub(crate) struct Frames(RefCell<State>);

struct State {
    /// How many more places there may be.
    places: usize,
    /// Where huge pages lie.
    huge: BTreeSet<usize>,
    /// Where small pages lie: where each stretch of them begins, and its bytes.
    small: BTreeMap<usize, usize>,
    /// Whether the system moves pages.
    movable: bool,
    /// Bytes that weights take or that are free.
    held: usize,
    /// Most of these at once.
    most: usize,
}

impl Default for Frames {
    fn default() -> Self {
        let allowed =
            std::fs::read_to_string("/proc/sys/vm/max_map_count").ok().and_then(|text| text.trim().parse().ok());
        Frames::with_places(allowed.unwrap_or(MAPPINGS) / SHARE)
    }
}

impl Frames {
    /// With room for so many places.
    pub fn with_places(places: usize) -> Self {
        let (huge, small) = (BTreeSet::new(), BTreeMap::new());
        Frames(RefCell::new(State { places, huge, small, movable: true, held: 0, most: 0 }))
    }

    /// Whether pages may move to and from so many places more: a process has room for so many mappings.
    pub fn reserve(&self, places: usize) -> bool {
        let state = &mut *self.0.borrow_mut();
        let left = state.places.checked_sub(places);
        state.places = left.unwrap_or(state.places);
        left.is_some()
    }

    /// So many places are no more.
    pub fn release(&self, places: usize) {
        self.0.borrow_mut().places += places;
    }

    /// The system makes pages here when they are touched: of those that nobody needs as many go.
    pub fn make(&self, addresses: Range<usize>) -> Range<usize> {
        self.0.borrow_mut().grow(addresses.len());
        addresses
    }

    /// Gives such pages back.
    ///
    /// # Safety
    /// They must be mapped, and nobody needs what they hold.
    pub unsafe fn unmake(&self, addresses: Range<usize>) {
        self.0.borrow_mut().let_go(addresses);
    }

    /// Moves pages that nobody needs to where they are needed: to a huge page's place, or to less than one. Where there are too few,
    /// the system makes them when they are touched. The stretches that were put together so, for [`put`](Self::put).
    ///
    /// # Safety
    /// There lies memory that [`replace`] made, which stays mapped until [`forget`](Self::forget) is told. Nobody needs what it
    /// holds.
    pub unsafe fn take(&self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let state = &mut *self.0.borrow_mut();
        // SAFETY: the caller's promise.
        unsafe { if is_huge(&addresses) { state.take_huge(addresses) } else { state.take_small(addresses) } }
    }

    /// Keeps a stretch of pages for others.
    ///
    /// # Safety
    /// The same as of [`take`](Self::take).
    pub unsafe fn put(&self, stretch: Range<usize>) {
        let state = &mut *self.0.borrow_mut();
        state.put(stretch);
        if !state.movable {
            state.shrink(0);
        }
    }

    /// These addresses are about to be unmapped, with the pages there that nobody took.
    pub fn forget(&self, addresses: Range<usize>) {
        let state = &mut *self.0.borrow_mut();
        state.held -= state.huge.range(addresses.clone()).count() * HUGE;
        state.huge.retain(|at| !addresses.contains(at));
        let small = state.small_within(addresses);
        state.held -= small.iter().map(Range::len).sum::<usize>();
    }
}

#[cfg(test)]
impl Frames {
    /// As where the system refuses to move pages from now on.
    pub fn refuse_to_move(&self) {
        self.0.borrow_mut().movable = false;
    }

    /// Whether the system moves pages, bytes that nobody needs, and all that are held.
    pub fn account(&self) -> (bool, usize, usize) {
        let state = self.0.borrow();
        (state.movable, state.huge.len() * HUGE + state.small.values().sum::<usize>(), state.held)
    }
}

/// Whether these are the addresses of a huge page.
fn is_huge(addresses: &Range<usize>) -> bool {
    addresses.start.is_multiple_of(HUGE) && addresses.len() == HUGE
}

impl State {
    /// # Safety
    /// That of [`Frames::take`].
    unsafe fn take_huge(&mut self, addresses: Range<usize>) -> Vec<Range<usize>> {
        if !self.huge.remove(&addresses.start) {
            // SAFETY: of both, the promise made here and that of `put`.
            let moved = self.huge.pop_last().is_some_and(|from| unsafe { self.moved(from, addresses.clone()) });
            if !moved {
                self.grow(HUGE);
            }
        }
        vec![addresses]
    }

    /// # Safety
    /// That of [`Frames::take`].
    unsafe fn take_small(&mut self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let mut stretches = self.small_within(addresses.clone());
        let ends = stretches.iter().map(|own| own.start).chain([addresses.end]);
        let starts = [addresses.start].into_iter().chain(stretches.iter().map(|own| own.end));
        let gaps: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
        for mut gap in gaps {
            while let Some(from) = Some(gap.len()).filter(|bytes| *bytes > 0).and_then(|bytes| self.best(bytes)) {
                let to = gap.start..gap.end.min(gap.start + from.len());
                self.put(from.start + to.len()..from.end);
                // SAFETY: of both, the promise made here and that of `put`.
                if unsafe { self.moved(from.start, to.clone()) } {
                    gap.start = to.end;
                    stretches.push(to);
                }
            }
            if !gap.is_empty() {
                self.grow(gap.len());
                // Pages that came here before, and left, came to several mappings; only of one can they leave together before
                // Linux 6.17. Where there is no more room for mappings, they will not be moved.
                // SAFETY: the caller's promise.
                let _ = unsafe { replace(&gap) };
                stretches.push(gap);
            }
        }
        stretches
    }

    /// Takes all stretches of small pages at these addresses, in order.
    fn small_within(&mut self, addresses: Range<usize>) -> Vec<Range<usize>> {
        let found: Vec<_> = self.small.range(addresses.clone()).map(|(at, bytes)| *at..at + bytes).collect();
        self.small.retain(|at, _| !addresses.contains(at));
        found
    }

    /// Takes the stretch of small pages out of which so many bytes are cut best.
    fn best(&mut self, bytes: usize) -> Option<Range<usize>> {
        let enough = self.small.iter().filter(|(_, has)| **has >= bytes).min_by_key(|(_, has)| **has);
        let (at, has) =
            enough.or_else(|| self.small.iter().max_by_key(|(_, has)| **has)).map(|(at, has)| (*at, *has))?;
        self.small.remove(&at);
        Some(at..at + has)
    }

    fn put(&mut self, stretch: Range<usize>) {
        if is_huge(&stretch) {
            self.huge.insert(stretch.start);
        } else if stretch.len() >= LEAST {
            self.small.insert(stretch.start, stretch.len());
        } else {
            self.let_go(stretch);
        }
    }

    /// Moves pages that are in none of the lists, or lets go of them.
    ///
    /// # Safety
    /// That of [`move_pages`].
    unsafe fn moved(&mut self, from: usize, to: Range<usize>) -> bool {
        // SAFETY: the caller's promise.
        let moved = self.movable && unsafe { move_pages(from, &to) };
        if !moved {
            // An old system, or one that has no more room in its list of mappings.
            self.movable = false;
            self.let_go(from..from + to.len());
        }
        moved
    }

    /// So many bytes will be made.
    fn grow(&mut self, bytes: usize) {
        self.shrink(self.most.saturating_sub(bytes));
        self.held += bytes;
        self.most = self.most.max(self.held);
    }

    /// Lets go of pages until so much is held.
    fn shrink(&mut self, held: usize) {
        while self.held > held {
            let huge = self.huge.pop_first().map(|at| at..at + HUGE);
            let small = || self.small.pop_first().map(|(at, bytes)| at..at + bytes);
            let Some(stretch) = huge.or_else(small) else { return };
            self.let_go(stretch);
        }
    }

    fn let_go(&mut self, stretch: Range<usize>) {
        self.held -= stretch.len();
        // SAFETY: the promise made at `unmake`, or at `put`: they are mapped, until `forget`, and nobody needs what they hold.
        unsafe { give_back(stretch) };
    }
}
