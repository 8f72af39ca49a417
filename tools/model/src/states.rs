//! Turns the state tensors of a graph into the states of a plan, with concrete sizes and capacities.

use crate::config::ModelConfig;
use crate::sliding_cache::{SlidingCaches, growing_axis};
use hpp_graph::{Graph, StateChange, StatePair, ValueId};
use hpp_schema::{ByteSize, DType, Dim, Shape, State, StateUpdate, Symbols};

/// Capacities to plan for.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Tokens one sequence may grow to.
    pub context: u64,
}

/// A state of the graph and its entry in the plan, whose `partition` and `device` are set after placement.
#[derive(Clone, Debug)]
pub struct PlannedState {
    /// The graph input.
    pub past: ValueId,
    /// The graph output.
    pub present: ValueId,
    /// The plan's entry.
    pub state: State,
}

/// Whether the runtime carries this pair from pass to pass. The caller supplies others: cross-attention keys that
/// another model computes, and paged caches with a block table.
pub fn is_carried(pair: &StatePair) -> bool {
    let rank_one_buffer = matches!(pair.change, StateChange::SharedBuffer { axis: None });
    pair.present.is_some() && !rank_one_buffer && pair.change != StateChange::ReadOnly
}

/// The plan entry of a state of `layer`; `None` if the runtime does not carry it.
pub fn plan_state(
    graph: &Graph,
    pair: &StatePair,
    layer: u32,
    config: &ModelConfig,
    capacity: Capacity,
    sliding: &SlidingCaches,
) -> Option<PlannedState> {
    let present = pair.present.filter(|_| is_carried(pair))?;
    let value = graph.value(pair.past);
    let dtype = value.dtype.unwrap_or(DType::Float32);
    let mut shape = value.shape.clone().unwrap_or_default();
    let update = update(graph, pair, capacity, sliding);
    resolve_head_size(graph, pair, config, update.tokens().map(|(axis, _)| axis), &mut shape);
    let bytes = ByteSize(bytes_at_capacity(dtype, &shape, update, capacity.context).unwrap_or(u64::MAX));
    let state = State {
        past: value.name.clone(),
        present: graph.value(present).name.clone(),
        partition: String::new(),
        layer,
        dtype,
        shape,
        update,
        any_capacity: takes_any_capacity(graph, pair, update, capacity),
        device: String::new(),
        on_disk: false,
        bytes,
    };
    Some(PlannedState { past: pair.past, present, state })
}

fn update(graph: &Graph, pair: &StatePair, capacity: Capacity, sliding: &SlidingCaches) -> StateUpdate {
    match pair.change {
        StateChange::SharedBuffer { axis: Some(axis) } => {
            let reader = graph.node(pair.reader);
            // A sliding-window cache holds only the window.
            let window = reader.int("local_window_size").filter(|_| reader.int("sliding_window_cache") == Some(1));
            let window = window.and_then(|size| u64::try_from(size).ok()).filter(|size| *size > 0);
            StateUpdate::InPlace { axis, capacity: window.unwrap_or(capacity.context) }
        }
        StateChange::Append { axis } => StateUpdate::Append { axis, capacity: capacity.context },
        StateChange::Replace => match growing_axis(graph, pair) {
            Some(axis) => match sliding.followed(pair.past) {
                Some(kept) => StateUpdate::Sliding { axis, capacity: kept },
                None => StateUpdate::Append { axis, capacity: capacity.context },
            },
            None => StateUpdate::Replace,
        },
        StateChange::SharedBuffer { axis: None } | StateChange::ReadOnly => StateUpdate::ReadOnly,
    }
}

/// Whether the operator that reads a cache accepts a buffer of any capacity that the tokens fit in.
fn takes_any_capacity(graph: &Graph, pair: &StatePair, update: StateUpdate, capacity: Capacity) -> bool {
    let reader = graph.node(pair.reader);
    let whole = matches!(update, StateUpdate::InPlace { capacity: own, .. } if own == capacity.context);
    whole && reader.op_type == "GroupQueryAttention" && reader.int("sliding_window_cache") != Some(1)
}

/// Resolves the head size, which GenAI's builder leaves symbolic, from the number of heads and the width of the query.
fn resolve_head_size(
    graph: &Graph,
    pair: &StatePair,
    config: &ModelConfig,
    token_axis: Option<usize>,
    shape: &mut Shape,
) {
    let last = shape.len().saturating_sub(1);
    let Some(dim) = shape.get_mut(last).filter(|dim| dim.as_fixed().is_none()) else { return };
    if token_axis == Some(last) {
        return;
    }
    if let Some(size) = head_size_from_query(graph, pair).or(config.head_size) {
        *dim = Dim::fixed(size);
    }
}

fn head_size_from_query(graph: &Graph, pair: &StatePair) -> Option<u64> {
    let reader = graph.node(pair.reader);
    let heads = u64::try_from(reader.int("num_heads")?).ok()?;
    let kv_heads = u64::try_from(reader.int("kv_num_heads").unwrap_or(reader.int("num_heads")?)).ok()?;
    let query = graph.value((*reader.inputs.first()?)?);
    let width = query.shape.as_ref()?.last()?.as_fixed()?;
    let packed = reader.inputs.get(1).is_none_or(Option::is_none);
    let parts = if packed { heads.checked_add(kv_heads.checked_mul(2)?)? } else { heads };
    (parts > 0 && width.is_multiple_of(parts)).then(|| width / parts)
}

/// Bytes of one sequence's state at full capacity, in a context of `context` tokens: 0 if a size is unknown, `None` beyond 64 bits.
pub(crate) fn bytes_at_capacity(dtype: DType, shape: &Shape, update: StateUpdate, context: u64) -> Option<u64> {
    let (token_axis, capacity) = match update {
        StateUpdate::Sliding { axis, capacity } => (Some(axis), capacity.min(context)),
        _ => update.tokens().map_or((None, 1), |(axis, capacity)| (Some(axis), capacity)),
    };
    // The first symbol outside the token axis is the batch, which is 1 for one sequence. The check of plans counts alike.
    let others = || shape.iter().enumerate().filter(|(axis, _)| token_axis != Some(*axis));
    let batch = others().find_map(|(_, dim)| dim.as_symbol());
    let size = |(axis, dim): (usize, &Dim)| match dim.as_symbol() {
        _ if token_axis == Some(axis) => Some(capacity),
        Some(name) => (batch == Some(name)).then_some(1),
        None => dim.eval(&Symbols::new()).or((axis == 0).then_some(1)),
    };
    let Some(sizes) = shape.iter().enumerate().map(size).collect::<Option<Vec<u64>>>() else { return Some(0) };
    let elements = sizes.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
    if dtype.bits().is_none() { Some(0) } else { dtype.bytes_for(elements) }
}
