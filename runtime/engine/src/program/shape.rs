//! Symbolic shapes, compiled at load: names are resolved once, so that a pass only does arithmetic.

use crate::port::Dims;
use hpp_schema::{Dim, InputRole, Plan, State, StateUpdate};
use smallvec::SmallVec;
use std::collections::BTreeMap;

/// The sizes that vary from pass to pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PassSizes {
    /// Sequences in the pass.
    pub batch: u64,
    /// Tokens in the pass.
    pub sequence: u64,
    /// Tokens in the sequence before the pass.
    pub past: u64,
    /// Positions whose logits are computed.
    pub rows: u64,
}

impl PassSizes {
    /// Tokens in the sequence after the pass.
    pub fn total(&self) -> u64 {
        self.past + self.sequence
    }

    fn get(&self, size: DimMeaning) -> u64 {
        match size {
            DimMeaning::Batch => self.batch,
            DimMeaning::Sequence => self.sequence,
            DimMeaning::Total => self.total(),
            DimMeaning::Past => self.past,
            DimMeaning::Kept(capacity) => self.past.min(capacity),
            DimMeaning::Rows => self.rows,
        }
    }
}

/// What a symbol stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DimMeaning {
    Batch,
    Sequence,
    Total,
    Past,
    /// Of the tokens before the pass, those that a sliding state keeps: at most this many.
    Kept(u64),
    Rows,
}

/// The meaning of each symbol in a plan's shapes.
#[derive(Debug, Default)]
pub(crate) struct SymbolTable {
    sizes: BTreeMap<String, DimMeaning>,
    fixed: BTreeMap<String, Dim>,
}

impl SymbolTable {
    /// Infers the meaning of each symbol from the inputs and states whose shapes contain it; the first meaning wins.
    pub fn new(plan: &Plan) -> Self {
        let mut symbols = SymbolTable::default();
        for input in &plan.model.inputs {
            let dims = input.shape.as_slice();
            let meanings: &[DimMeaning] = match input.role {
                InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::PositionIds => {
                    &[DimMeaning::Batch, DimMeaning::Sequence]
                }
                InputRole::Embeddings => &[DimMeaning::Batch, DimMeaning::Sequence],
                InputRole::AttentionMask => &[DimMeaning::Batch, DimMeaning::Total],
                InputRole::PastLengths | InputRole::TotalLengths => &[DimMeaning::Batch],
                InputRole::LogitPositions => &[DimMeaning::Rows],
                InputRole::UseCacheBranch | InputRole::Zeros | InputRole::Free => &[],
            };
            // Position ids with three axes have one before the batch; an input with one axis has no batch axis.
            let before = usize::from(input.role == InputRole::PositionIds && dims.len() == 3);
            let missing = usize::from(dims.len() == 1 && meanings.len() == 2);
            for (dim, meaning) in dims.iter().skip(before).zip(meanings.iter().skip(missing)) {
                symbols.learn(dim, *meaning);
            }
        }
        for state in &plan.states {
            symbols.learn_state(state);
        }
        symbols
    }

    fn learn(&mut self, dim: &Dim, meaning: DimMeaning) {
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
                    self.learn(dim, DimMeaning::Past);
                }
            }
            StateUpdate::Sliding { axis, capacity } => {
                if let Some(dim) = state.shape.get(axis) {
                    self.learn(dim, DimMeaning::Kept(capacity));
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
            self.learn(dim, DimMeaning::Batch);
        }
    }

    /// The shape with every symbol resolved; `None` if one is unknown.
    pub fn resolve(&self, shape: &[Dim]) -> Option<PassShape> {
        shape.iter().map(|dim| self.resolve_dim(dim)).collect::<Option<_>>().map(PassShape)
    }

    /// Whether a dimension is the number of sequences.
    pub fn is_batch(&self, dim: &Dim) -> bool {
        dim.as_symbol().is_some_and(|name| self.sizes.get(name) == Some(&DimMeaning::Batch))
    }

    fn resolve_dim(&self, dim: &Dim) -> Option<PassDim> {
        let Dim::Known(terms) = dim.substitute(&self.fixed) else { return None };
        let term = |(product, coefficient): (&Vec<String>, &i64)| {
            let factors = product.iter().map(|name| self.sizes.get(name).copied()).collect::<Option<_>>()?;
            Some(Term { coefficient: *coefficient, factors })
        };
        terms.iter().map(term).collect::<Option<_>>().map(PassDim)
    }

    /// Sizes of a state of one sequence with `length` along its token axis; `None` if a symbol is unknown.
    pub fn state_dims(&self, state: &State, length: u64) -> Option<Dims> {
        let one = PassSizes { batch: 1, sequence: 1, past: 0, rows: 1 };
        let axis = token_axis(state.update);
        let size = |(at, dim): (usize, &Dim)| {
            if Some(at) == axis { Some(length) } else { self.resolve_dim(dim)?.eval(&one) }
        };
        state.shape.iter().enumerate().map(size).collect()
    }
}

/// The axis along which a state holds tokens, if it has one.
pub(crate) fn token_axis(update: StateUpdate) -> Option<usize> {
    update.tokens().map(|(axis, _)| axis)
}

/// A shape that a pass evaluates.
#[derive(Clone, Debug)]
pub(crate) struct PassShape(Vec<PassDim>);

#[derive(Clone, Debug)]
struct PassDim(Vec<Term>);

#[derive(Clone, Debug)]
struct Term {
    coefficient: i64,
    factors: SmallVec<[DimMeaning; 2]>,
}

impl PassShape {
    /// The sizes in a pass; `None` if one is negative or exceeds 64 bits.
    pub fn eval(&self, sizes: &PassSizes) -> Option<Dims> {
        self.0.iter().map(|dim| dim.eval(sizes)).collect()
    }
}

impl PassDim {
    fn eval(&self, sizes: &PassSizes) -> Option<u64> {
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
