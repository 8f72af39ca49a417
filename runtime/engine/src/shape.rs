//! Symbolic shapes made ready for the pass: names are resolved once at load, so that a pass only does arithmetic.

use crate::port::Dims;
use hpp_schema::{Dim, InputRole, Plan, State, StateUpdate};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// Sizes that differ from pass to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    /// Sequences in the pass.
    pub batch: u64,
    /// Tokens in the pass.
    pub sequence: u64,
    /// Tokens so far, without those of the pass.
    pub past: u64,
    /// Positions whose scores are wanted.
    pub rows: u64,
}

impl Sizes {
    /// Tokens so far, with those of the pass.
    pub fn total(&self) -> u64 {
        self.past + self.sequence
    }

    fn get(&self, size: Size) -> u64 {
        match size {
            Size::Batch => self.batch,
            Size::Sequence => self.sequence,
            Size::Total => self.total(),
            Size::Past => self.past,
            Size::Rows => self.rows,
        }
    }
}

/// A name's meaning in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Size {
    Batch,
    Sequence,
    Total,
    Past,
    Rows,
}

/// What the symbols of a plan's shapes mean.
#[derive(Debug, Default)]
pub(crate) struct Vocabulary {
    sizes: BTreeMap<String, Size>,
    fixed: BTreeMap<String, Dim>,
}

impl Vocabulary {
    /// Reads the meaning of each symbol from the inputs it stands in; the first meaning wins.
    pub fn of(plan: &Plan) -> Self {
        let mut vocabulary = Vocabulary::default();
        for input in &plan.model.inputs {
            let dims = input.shape.as_slice();
            let meanings: &[Size] = match input.role {
                InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::PositionIds => {
                    &[Size::Batch, Size::Sequence]
                }
                InputRole::Embeddings => &[Size::Batch, Size::Sequence],
                InputRole::AttentionMask => &[Size::Batch, Size::Total],
                InputRole::LogitPositions => &[Size::Rows],
                InputRole::UseCacheBranch | InputRole::Free => &[],
            };
            // Three-axis positions put their axis before the batch; a lone axis of tokens has no batch before it.
            let before = usize::from(input.role == InputRole::PositionIds && dims.len() == 3);
            let missing = usize::from(dims.len() == 1 && meanings.len() == 2);
            for (dim, meaning) in dims.iter().skip(before).zip(meanings.iter().skip(missing)) {
                vocabulary.learn(dim, *meaning);
            }
        }
        for state in &plan.states {
            vocabulary.learn_state(state);
        }
        vocabulary
    }

    fn learn(&mut self, dim: &Dim, meaning: Size) {
        if let Some(name) = dim.as_symbol()
            && !self.fixed.contains_key(name)
        {
            self.sizes.entry(name.to_owned()).or_insert(meaning);
        }
    }

    fn learn_state(&mut self, state: &State) {
        match state.update {
            StateUpdate::Append { axis, .. } => {
                if let Some(dim) = state.shape.get(axis) {
                    self.learn(dim, Size::Past);
                }
            }
            StateUpdate::InPlace { axis, capacity } => {
                if let Some(name) = state.shape.get(axis).and_then(Dim::as_symbol)
                    && !self.sizes.contains_key(name)
                {
                    self.fixed.insert(name.to_owned(), Dim::fixed(capacity));
                }
            }
            StateUpdate::Replace | StateUpdate::ReadOnly => {}
        }
        if let Some(dim) = state.shape.first() {
            self.learn(dim, Size::Batch);
        }
    }

    /// The shape with every name resolved, or nothing where one is unknown.
    pub fn resolve(&self, shape: &[Dim]) -> Option<PassShape> {
        shape.iter().map(|dim| self.resolve_dim(dim)).collect::<Option<_>>().map(PassShape)
    }

    fn resolve_dim(&self, dim: &Dim) -> Option<PassDim> {
        let Dim::Known(terms) = dim.substitute(&self.fixed) else { return None };
        let term = |(product, coefficient): (&Vec<String>, &i64)| {
            let factors = product.iter().map(|name| self.sizes.get(name).copied()).collect::<Option<_>>()?;
            Some(Term { coefficient: *coefficient, factors })
        };
        terms.iter().map(term).collect::<Option<_>>().map(PassDim)
    }

    /// Sizes of a state for one sequence with `length` at its token axis.
    pub fn state_dims(&self, state: &State, length: u64) -> Option<Dims> {
        let one = Sizes { batch: 1, sequence: 1, past: 0, rows: 1 };
        let axis = token_axis(state.update);
        let size = |(at, dim): (usize, &Dim)| {
            if Some(at) == axis { Some(length) } else { self.resolve_dim(dim)?.eval(&one) }
        };
        state.shape.iter().enumerate().map(size).collect()
    }
}

/// The axis along which a state holds tokens, if it does.
pub(crate) fn token_axis(update: StateUpdate) -> Option<usize> {
    match update {
        StateUpdate::InPlace { axis, .. } | StateUpdate::Append { axis, .. } => Some(axis),
        StateUpdate::Replace | StateUpdate::ReadOnly => None,
    }
}

/// A shape that a pass can evaluate.
#[derive(Clone, Debug)]
pub(crate) struct PassShape(Vec<PassDim>);

#[derive(Clone, Debug)]
struct PassDim(Vec<Term>);

#[derive(Clone, Debug)]
struct Term {
    coefficient: i64,
    factors: SmallVec<[Size; 2]>,
}

impl PassShape {
    /// The sizes in this pass; `None` where one is negative or leaves 64 bits.
    pub fn eval(&self, sizes: &Sizes) -> Option<Dims> {
        self.0.iter().map(|dim| dim.eval(sizes)).collect()
    }
}

impl PassDim {
    fn eval(&self, sizes: &Sizes) -> Option<u64> {
        let mut sum = 0i128;
        for term in &self.0 {
            let mut product = i128::from(term.coefficient);
            for factor in &term.factors {
                product = product.checked_mul(i128::from(sizes.get(*factor)))?;
            }
            sum = sum.checked_add(product)?;
        }
        u64::try_from(sum).ok()
    }
}
