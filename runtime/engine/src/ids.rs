//! Typed indices and vectors indexed by them, so that a stage's index cannot be used for a session, nor a state's for a boundary.

use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// A position in a [`IndexVec`].
pub(crate) trait Id: Copy + PartialEq {
    fn new(index: usize) -> Self;
    fn index(self) -> usize;
}

macro_rules! ids {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
            pub(crate) struct $name(u32);

            impl Id for $name {
                fn new(index: usize) -> Self {
                    $name(index as u32)
                }
                fn index(self) -> usize {
                    self.0 as usize
                }
            }
        )*
    };
}

ids! {
    /// A partition of the plan.
    PartitionId,
    /// A partition loaded in one of its variants.
    StageId,
    /// A backend session; stages of one class share it.
    SessionId,
    /// A model input.
    InputId,
    /// A state of the plan, such as the keys of one layer.
    StateId,
    /// A tensor that a partition produces and that is not a state.
    BoundaryId,
}

/// A vector indexed by one kind of id.
#[derive(Clone, Debug)]
pub(crate) struct IndexVec<I, T> {
    rows: Vec<T>,
    id: PhantomData<I>,
}

impl<I: Id, T> IndexVec<I, T> {
    pub fn push(&mut self, row: T) -> I {
        self.rows.push(row);
        I::new(self.rows.len() - 1)
    }

    pub fn ids(&self) -> impl Iterator<Item = I> + use<I, T> {
        (0..self.rows.len()).map(I::new)
    }

    pub fn iter(&self) -> std::slice::Iter<'_, T> {
        self.rows.iter()
    }

    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.rows.iter_mut()
    }

    /// Rows with their ids.
    pub fn entries(&self) -> impl Iterator<Item = (I, &T)> {
        self.rows.iter().enumerate().map(|(index, row)| (I::new(index), row))
    }

    /// The first row that satisfies a condition.
    pub fn position(&self, is: impl FnMut(&T) -> bool) -> Option<I> {
        self.rows.iter().position(is).map(I::new)
    }
}

impl<I, T> Default for IndexVec<I, T> {
    fn default() -> Self {
        IndexVec { rows: Vec::new(), id: PhantomData }
    }
}

impl<I, T> FromIterator<T> for IndexVec<I, T> {
    fn from_iter<S: IntoIterator<Item = T>>(rows: S) -> Self {
        IndexVec { rows: rows.into_iter().collect(), id: PhantomData }
    }
}

impl<I: Id, T> Index<I> for IndexVec<I, T> {
    type Output = T;
    fn index(&self, id: I) -> &T {
        &self.rows[id.index()]
    }
}

impl<I: Id, T> IndexMut<I> for IndexVec<I, T> {
    fn index_mut(&mut self, id: I) -> &mut T {
        &mut self.rows[id.index()]
    }
}
