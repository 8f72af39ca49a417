//! States of sequences in common buffers, a row for each sequence. One run can update the states of several sequences, and the next sequence takes
//! over the memory of one that has ended.

use super::{Buffer, BufferPool, StateBuffers, StateLayout, about, size_of};
use crate::error::EngineError;
use crate::ids::{IndexVec, StateId};
use crate::port::{Backend, Dims};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

/// A buffer `[rows, ...]` for each state of a plan. Invariant: all states are updated in place.
pub(crate) struct StateArena<B: Backend> {
    states: IndexVec<StateId, ArenaState<B>>,
    free: Rc<RefCell<BTreeSet<u64>>>,
}

struct ArenaState<B: Backend> {
    buffer: Buffer<B>,
    row_bytes: u64,
}

/// A row that one sequence owns until this is dropped.
#[derive(Debug)]
pub(crate) struct ArenaRow {
    pub index: u64,
    free: Rc<RefCell<BTreeSet<u64>>>,
}

impl Drop for ArenaRow {
    fn drop(&mut self) {
        self.free.borrow_mut().insert(self.index);
    }
}

impl<B: Backend> StateArena<B> {
    /// Reserves buffers with one row per sequence. Those on the host take memory when they are first written, those on devices at once.
    /// `None` where a device's memory cannot be divided into rows.
    pub fn new(
        layouts: &IndexVec<StateId, StateLayout>,
        pool: &BufferPool<B>,
        rows: u64,
    ) -> Result<Option<Self>, EngineError> {
        let reserve = |layout: &StateLayout| {
            let row_bytes = size_of(&layout.past, layout.dtype, &layout.full)?;
            let buffer = pool.reserve(layout.memory, row_bytes.saturating_mul(rows)).map_err(about(&layout.past))?;
            Ok(ArenaState { buffer, row_bytes })
        };
        let states: IndexVec<StateId, ArenaState<B>> =
            layouts.iter().map(reserve).collect::<Result<_, EngineError>>()?;
        let has_rows = states.iter().all(|state| (0..rows).all(|row| state.slice(pool, row..row + 1).is_some()));
        Ok(has_rows.then(|| StateArena { states, free: Rc::new(RefCell::new((0..rows).collect())) }))
    }

    /// The first free row. `None` if all are taken.
    pub fn take(&self) -> Option<ArenaRow> {
        let index = self.free.borrow_mut().pop_first()?;
        Some(ArenaRow { index, free: Rc::clone(&self.free) })
    }

    /// Whether no sequence has a row.
    pub fn is_free(&self, row: u64) -> bool {
        self.free.borrow().contains(&row)
    }

    /// The states of the sequence that has a row.
    pub fn states_of(
        &self,
        layouts: &IndexVec<StateId, StateLayout>,
        pool: &BufferPool<B>,
        row: u64,
    ) -> Option<IndexVec<StateId, StateBuffers<B>>> {
        let slices = self.states.iter().zip(layouts.iter());
        let own = slices.map(|(state, layout)| Some(StateBuffers::in_place(layout, state.slice(pool, row..row + 1)?)));
        own.collect()
    }

    /// The states of the sequences in consecutive rows, as the states of one batch.
    pub fn states_of_rows(
        &self,
        layouts: &IndexVec<StateId, StateLayout>,
        pool: &BufferPool<B>,
        rows: Range<u64>,
    ) -> Option<IndexVec<StateId, StateBuffers<B>>> {
        let batch = |(state, layout): (&ArenaState<B>, &StateLayout)| {
            let mut dims: Dims = layout.full.clone();
            *dims.first_mut()? = rows.end - rows.start;
            Some(StateBuffers::Rows { buffer: state.slice(pool, rows.clone())?, dims })
        };
        self.states.iter().zip(layouts.iter()).map(batch).collect()
    }
}

impl<B: Backend> ArenaState<B> {
    fn slice(&self, pool: &BufferPool<B>, rows: Range<u64>) -> Option<Buffer<B>> {
        pool.slice(&self.buffer, rows.start * self.row_bytes, (rows.end - rows.start) * self.row_bytes)
    }
}
