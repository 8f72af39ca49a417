//! Inputs for a piece: shapes from the symbols of a pass, contents from the role of each input.

use super::{Piece, Pieces};
use hpp_graph::ValueId;
use hpp_model::{PassSize, PlannedState, symbol_values};
use hpp_partition::Phase;
use hpp_schema::probe::{Carried, Case, Feed, Fill, OutputSpec};
use hpp_schema::{DType, Dim, InputRole, ModelInput, ModelKind, Shape, State, StateUpdate, Symbols};

/// Number of runs of a case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repeats {
    pub warmup: u32,
    pub min: u32,
    pub max: u32,
    /// No further run starts after this time, milliseconds.
    pub budget_ms: f64,
}

/// Token ids are below this if the size of the vocabulary is unknown.
const SAFE_IDS: u64 = 32;

impl Pieces<'_> {
    /// One case: a token at which the context has `tokens` tokens, or a pass of `tokens` into an empty context. Returns the
    /// reason if an input cannot be generated.
    pub fn case(
        &self,
        piece: &Piece,
        phase: Phase,
        tokens: u64,
        repeats: Repeats,
        evict_bytes: u64,
    ) -> Result<Case, String> {
        let sizes = Sizes::new(self, self.pass(phase, tokens));
        let part = &piece.part;
        let inputs = part.inputs.iter().enumerate().map(|(at, id)| sizes.feed(*id, at as u64));
        let inputs = inputs.collect::<Result<Vec<Feed>, String>>()?;
        let states: Vec<&PlannedState> = self
            .analysis
            .states
            .iter()
            .filter(|s| part.inputs.contains(&s.past) && part.outputs.contains(&s.present))
            .collect();
        let carried = states.iter().map(|s| Carried {
            past: s.state.past.clone(),
            present: s.state.present.clone(),
            in_place: matches!(s.state.update, StateUpdate::InPlace { .. }),
        });
        Ok(Case {
            name: format!("{phase} {tokens}"),
            inputs,
            outputs: part.outputs.iter().filter_map(|id| sizes.output(*id)).collect(),
            carried: carried.collect(),
            evict_bytes,
            warmup: repeats.warmup,
            min_runs: repeats.min,
            max_runs: repeats.max,
            budget_ms: repeats.budget_ms,
        })
    }

    /// A model that keeps no state computes the whole sequence for each token.
    fn pass(&self, phase: Phase, tokens: u64) -> PassSize {
        let keeps_state = self.analysis.kind == ModelKind::Decoder;
        match phase {
            Phase::Decode if keeps_state => PassSize { batch: 1, tokens: 1, past: tokens.saturating_sub(1) },
            _ => PassSize { batch: 1, tokens, past: 0 },
        }
    }
}

/// The shapes of one pass.
struct Sizes<'a> {
    pieces: &'a Pieces<'a>,
    pass: PassSize,
    symbols: Symbols,
}

impl<'a> Sizes<'a> {
    fn new(pieces: &'a Pieces<'a>, pass: PassSize) -> Self {
        let states_of_kind = |in_place: bool| {
            let states = pieces.analysis.states.iter().map(|s| &s.state);
            states.filter(move |s| matches!(s.update, StateUpdate::InPlace { .. }) == in_place)
        };
        let growing: Vec<State> = states_of_kind(false).cloned().collect();
        let mut sizes = Sizes { pieces, pass, symbols: symbol_values(&pieces.analysis.inputs, &growing, pass) };
        // A buffer that is updated in place is bound as a whole, however much of it is filled.
        for state in states_of_kind(true) {
            if let Some(first) = state.shape.first().and_then(Dim::as_symbol) {
                sizes.symbols.entry(first.to_owned()).or_insert(pass.batch);
            }
            let StateUpdate::InPlace { axis, .. } = state.update else { continue };
            if let Some(name) = state.shape.get(axis).and_then(Dim::as_symbol) {
                let capacity = sizes.length(state, Moment::Before);
                sizes.symbols.entry(name.to_owned()).or_insert(capacity);
            }
        }
        sizes
    }

    fn feed(&self, id: ValueId, seed: u64) -> Result<Feed, String> {
        let value = self.pieces.analysis.graph.value(id);
        let name = value.name.clone();
        let dtype = value.dtype.ok_or_else(|| format!("the element type of {name:?} is not known"))?;
        let unsized_input = || format!("the size of {name:?} ({}) is not known", shown(value.shape.as_ref()));
        if let Some(planned) = self.pieces.analysis.states.iter().find(|s| s.past == id) {
            let shape = self.state(&planned.state, Moment::Before).ok_or_else(unsized_input)?;
            return Ok(Feed { name, dtype, shape, fill: self.past(&planned.state, dtype, seed) });
        }
        if let Some(input) = self.pieces.analysis.inputs.iter().find(|input| input.name == name) {
            let shape = self.input(input).ok_or_else(unsized_input)?;
            return Ok(Feed { name, dtype, fill: self.fill(input, seed), shape });
        }
        let shape = self.shape(value.shape.as_ref()).ok_or_else(unsized_input)?;
        let fill = match self.numbers(id) {
            Some(values) if values.len() as u64 == shape.iter().product::<u64>() => Fill::Values { values },
            _ if dtype.is_float() => Fill::Normal { seed },
            _ if dtype == DType::Bool => Fill::Ones,
            _ => return Err(format!("the contents of {name:?} ({dtype}) do not follow from shapes")),
        };
        Ok(Feed { name, dtype, shape, fill })
    }

    /// An output with a known shape; `None` for states that are updated in place, which share the buffer of their past.
    fn output(&self, id: ValueId) -> Option<OutputSpec> {
        let value = self.pieces.analysis.graph.value(id);
        let shape = match self.pieces.analysis.states.iter().find(|s| s.present == id) {
            Some(s) if matches!(s.state.update, StateUpdate::InPlace { .. }) => return None,
            Some(s) => self.state(&s.state, Moment::After),
            None => self.shape(value.shape.as_ref()),
        };
        Some(OutputSpec { name: value.name.clone(), dtype: value.dtype?, shape: shape? })
    }

    fn shape(&self, shape: Option<&Shape>) -> Option<Vec<u64>> {
        shape?.iter().map(|dim| dim.eval(&self.symbols)).collect()
    }

    fn state(&self, state: &State, moment: Moment) -> Option<Vec<u64>> {
        let length = self.length(state, moment);
        let axis = state.update.tokens().map(|(axis, _)| axis);
        let size = |(at, dim): (usize, &Dim)| match (Some(at) == axis, at) {
            (true, _) => Some(length),
            (false, 0) => Some(dim.eval(&self.symbols).unwrap_or(self.pass.batch)),
            (false, _) => dim.eval(&self.symbols),
        };
        state.shape.iter().enumerate().map(size).collect()
    }

    /// Number of tokens along a state's axis. If a buffer has the capacity of the planned context, it gets the capacity that the longest case
    /// needs. A smaller buffer is a sliding window and keeps its capacity.
    fn length(&self, state: &State, moment: Moment) -> u64 {
        match (state.update, moment) {
            (StateUpdate::InPlace { capacity, .. }, _) if capacity == self.pieces.analysis.context => {
                self.pieces.capacity
            }
            (StateUpdate::InPlace { capacity, .. }, _) => capacity,
            (StateUpdate::Sliding { capacity, .. }, moment) => self.tokens_at(moment).min(capacity),
            (_, moment) => self.tokens_at(moment),
        }
    }

    /// Tokens of the sequence.
    fn tokens_at(&self, moment: Moment) -> u64 {
        match moment {
            Moment::Before => self.pass.past,
            Moment::After => self.pass.past + self.pass.tokens,
        }
    }

    /// The shape of a model input; its role determines the sizes that its declared shape leaves open.
    fn input(&self, input: &ModelInput) -> Option<Vec<u64>> {
        let PassSize { batch, tokens, past } = self.pass;
        let known: Vec<Option<u64>> = input.shape.iter().map(|dim| dim.eval(&self.symbols)).collect();
        let by_role: &[u64] = match (input.role, input.shape.len()) {
            (InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::PositionIds, 1) => &[tokens],
            (InputRole::PositionIds, 3) => &[3, batch, tokens],
            (InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::PositionIds, _) => &[batch, tokens],
            (InputRole::Embeddings, _) => &[batch, tokens],
            (InputRole::AttentionMask, _) => &[batch, past + tokens],
            (InputRole::PastLengths | InputRole::TotalLengths, _) => &[batch],
            (InputRole::LogitPositions, _) => &[1],
            (InputRole::UseCacheBranch | InputRole::Zeros | InputRole::Free, _) => &[batch],
        };
        known.iter().enumerate().map(|(at, size)| size.or(by_role.get(at).copied())).collect()
    }

    fn fill(&self, input: &ModelInput, seed: u64) -> Fill {
        let PassSize { tokens, past, .. } = self.pass;
        let start = i64::try_from(past).unwrap_or(0);
        match input.role {
            InputRole::TokenIds => {
                Fill::Integers { below: self.pieces.analysis.vocab_size.unwrap_or(SAFE_IDS).max(1), seed }
            }
            InputRole::AttentionMask | InputRole::UseCacheBranch => Fill::Ones,
            InputRole::PositionIds => Fill::Positions { start },
            InputRole::PastLengths => {
                Fill::Values { values: vec![start; usize::try_from(self.pass.batch).unwrap_or(1)] }
            }
            InputRole::TotalLengths => {
                let total = i64::try_from(past + tokens).unwrap_or(0);
                Fill::Values { values: vec![total; usize::try_from(self.pass.batch).unwrap_or(1)] }
            }
            InputRole::LogitPositions => Fill::Values { values: vec![i64::try_from(tokens).unwrap_or(1) - 1] },
            InputRole::TokenTypeIds | InputRole::Zeros => Fill::Zeros,
            InputRole::Embeddings | InputRole::Free => noise(input.dtype, seed),
        }
    }

    /// Contents of a state before this pass. Only the past tokens of an in-place buffer are filled, so that the rest occupies no memory.
    fn past(&self, state: &State, dtype: DType, seed: u64) -> Fill {
        match state.update {
            StateUpdate::InPlace { axis, .. } if dtype.is_float() => {
                Fill::PartlyNormal { seed, axis, filled: self.pass.past }
            }
            _ => noise(dtype, seed),
        }
    }

    /// Contents of a small integer tensor in this pass.
    fn numbers(&self, id: ValueId) -> Option<Vec<i64>> {
        let elements = self.pieces.contents.get(id.0 as usize)?.as_ref()?;
        elements.iter().map(|element| signed(element, &self.symbols)).collect()
    }
}

/// Before or after a run.
#[derive(Clone, Copy)]
enum Moment {
    Before,
    After,
}

/// Noise for floats, zeros for integers: index zero is always valid.
fn noise(dtype: DType, seed: u64) -> Fill {
    if dtype.is_float() { Fill::Normal { seed } } else { Fill::Zeros }
}

/// Evaluates a size that may be negative, as in slices and reshapes.
fn signed(dim: &Dim, symbols: &Symbols) -> Option<i64> {
    let Dim::Known(terms) = dim else { return None };
    let mut sum = 0i64;
    for (product, coefficient) in terms {
        let factors = product.iter().map(|name| symbols.get(name).and_then(|size| i64::try_from(*size).ok()));
        let term = factors.into_iter().try_fold(*coefficient, |term, factor| term.checked_mul(factor?))?;
        sum = sum.checked_add(term)?;
    }
    Some(sum)
}

fn shown(shape: Option<&Shape>) -> String {
    shape.map_or("of unknown rank".to_owned(), |shape| format!("{shape:?}"))
}
