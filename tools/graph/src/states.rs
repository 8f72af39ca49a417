//! Finds states: pairs of a graph input (`past`) and the graph output (`present`) that replaces it in the next pass.
//! Follows the dataflow from inputs to outputs.
//!
//! Names break ties, and a state that is computed with arithmetic must have a name of a state. Does not know layers or devices.

use crate::ops::{self, FusedState};
use crate::{Graph, NodeId, Origin, ValueId, WeightUse};
use hpp_schema::DType;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A tensor carried from one pass to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePair {
    /// The graph input that receives the state.
    pub past: ValueId,
    /// The graph output that returns the updated state; `None` for a state that is computed once and then only read.
    pub present: Option<ValueId>,
    /// The first node that reads the contents of `past`.
    pub reader: NodeId,
    /// How `present` relates to `past`.
    pub change: StateChange,
}

/// How a state's present relates to its past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateChange {
    /// One operator (the reader) reads past and writes present. Both may share a buffer of fixed capacity.
    SharedBuffer {
        /// The token axis; `None` for paged caches.
        axis: Option<usize>,
    },
    /// Present is past with this pass's tokens appended along `axis`, in a separate buffer.
    Append {
        /// The token axis.
        axis: usize,
    },
    /// Present has the shape of past and replaces it.
    Replace,
    /// Past is only read, or returned unchanged.
    ReadOnly,
}

/// Properties of the path from a past input to a value.
#[derive(Clone, Debug)]
struct DataPath {
    length: usize,
    /// For each axis of the current value, the axis of the past; `None` after a reshape.
    axes: Option<Vec<usize>>,
    appended: Option<Option<usize>>,
    fused: Option<FusedState>,
    /// The path contains a slice, a scatter or another operator that rewrites parts of the state.
    rewritten: bool,
    /// The path contains arithmetic, so shape and name must also indicate a state.
    arithmetic: bool,
    /// Input and output index at the last fused operator, to order several pairs of one operator.
    ports: (usize, usize),
}

/// Finds all states of a model, in the order of its inputs.
pub fn find_states(graph: &Graph, weights: &WeightUse) -> Vec<StatePair> {
    let mut candidates = vec![];
    for (rank, past) in graph.inputs.iter().copied().enumerate().filter(|(_, v)| may_be_state(graph, *v)) {
        for (present, path) in paths_to_outputs(graph, weights, past) {
            candidates.push(StateCandidate::new(graph, rank, past, present, path));
        }
    }
    candidates.retain(|c| c.is_plausible(graph));
    candidates
        .sort_by_key(|c| (c.path.length, c.path.arithmetic, c.port_distance(), !c.same_digits, c.rank_distance()));
    let mut pairs = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for candidate in &candidates {
        if !pairs.contains_key(&candidate.past) && taken.insert(candidate.present) {
            pairs.insert(candidate.past, candidate.to_pair(graph));
        }
    }
    let read_only = find_read_only(graph, weights, &pairs);
    pairs.extend(read_only.into_iter().map(|p| (p.past, p)));
    graph.inputs.iter().filter_map(|v| pairs.remove(v)).collect()
}

fn may_be_state(graph: &Graph, value: ValueId) -> bool {
    !matches!(graph.value(value).dtype, Some(DType::Int64 | DType::Int32 | DType::Bool | DType::String))
        && first_reader(graph, value).is_some()
}

/// The first node that reads the contents of a value.
fn first_reader(graph: &Graph, value: ValueId) -> Option<NodeId> {
    let consumers = &graph.value(value).consumers;
    consumers
        .iter()
        .copied()
        .find(|n| !ops::reads_shape_only(graph.node(*n)) && !graph.node(*n).captures.contains(&value))
}

/// A possible pair of past and present.
struct StateCandidate {
    past: ValueId,
    present: ValueId,
    past_rank: usize,
    present_rank: usize,
    same_digits: bool,
    path: DataPath,
}

impl StateCandidate {
    fn new(graph: &Graph, past_rank: usize, past: ValueId, present: ValueId, path: DataPath) -> Self {
        let present_rank = graph.outputs.iter().position(|v| *v == present).unwrap_or(0);
        let same_digits = digits(&graph.value(past).name) == digits(&graph.value(present).name);
        StateCandidate { past, present, past_rank, present_rank, same_digits, path }
    }

    fn rank_distance(&self) -> usize {
        self.past_rank.abs_diff(self.present_rank)
    }

    fn port_distance(&self) -> usize {
        self.path.ports.0.abs_diff(self.path.ports.1)
    }

    /// Whether element types and ranks match. A path with arithmetic also needs a shape that does not grow with the
    /// sequence and names that indicate a state.
    fn is_plausible(&self, graph: &Graph) -> bool {
        let (past, present) = (graph.value(self.past), graph.value(self.present));
        if matches!((past.dtype, present.dtype), (Some(a), Some(b)) if a != b) {
            return false;
        }
        let (Some(a), Some(b)) = (&past.shape, &present.shape) else { return !self.path.arithmetic };
        if a.len() != b.len() || a.is_empty() {
            return false;
        }
        let changing = (0..a.len()).filter(|i| a[*i] != b[*i]).count();
        let fixed = a.iter().zip(b).skip(1).all(|(x, y)| x.as_fixed().is_some() && x == y);
        match (self.path.arithmetic, self.path.fused, self.path.appended) {
            (true, ..) => fixed && is_state_name(&past.name) && is_state_name(&present.name),
            (false, None, None) if !self.path.rewritten => changing == 0,
            _ => true,
        }
    }

    fn to_pair(&self, graph: &Graph) -> StatePair {
        let reader = first_reader(graph, self.past).expect("only inputs with a reader become candidates");
        StatePair { past: self.past, present: Some(self.present), reader, change: self.change(graph) }
    }

    fn change(&self, graph: &Graph) -> StateChange {
        let path = &self.path;
        match (path.fused, path.appended) {
            (Some(FusedState::SharedBuffer(axis)), _) if path.length == 1 => StateChange::SharedBuffer { axis },
            (Some(FusedState::SharedBuffer(Some(axis)) | FusedState::Append(axis)), _) => StateChange::Append { axis },
            (Some(_), _) => StateChange::Replace,
            (None, Some(axis)) if !path.rewritten => match self.changing_axis(graph).or(axis) {
                Some(axis) => StateChange::Append { axis },
                None => StateChange::Replace,
            },
            (None, None) if !path.rewritten && !path.arithmetic => StateChange::ReadOnly,
            _ => StateChange::Replace,
        }
    }

    /// The axis in which past and present differ in size, if there is exactly one.
    fn changing_axis(&self, graph: &Graph) -> Option<usize> {
        let (a, b) = (graph.value(self.past).shape.as_ref()?, graph.value(self.present).shape.as_ref()?);
        let mut changing = (0..a.len().min(b.len())).filter(|i| a[*i] != b[*i]);
        changing.next().filter(|_| changing.next().is_none())
    }
}

/// The shortest path from a past to each graph output that it reaches through operators that can update a state.
fn paths_to_outputs(graph: &Graph, weights: &WeightUse, past: ValueId) -> Vec<(ValueId, DataPath)> {
    let rank = graph.value(past).shape.as_ref().map(Vec::len);
    let start = DataPath {
        length: 0,
        axes: rank.map(|r| (0..r).collect()),
        appended: None,
        fused: None,
        rewritten: false,
        arithmetic: false,
        ports: (0, 0),
    };
    let mut seen = BTreeSet::from([past]);
    let mut queue = VecDeque::from([(past, start)]);
    let mut found = vec![];
    while let Some((value, path)) = queue.pop_front() {
        if graph.outputs.contains(&value) {
            found.push((value, path.clone()));
        }
        for consumer in &graph.value(value).consumers {
            for (next, path) in step(graph, weights, *consumer, value, &path) {
                if seen.insert(next) {
                    queue.push_back((next, path));
                }
            }
        }
    }
    found
}

/// Extends a path by one operator: the outputs that may hold the updated state, with their paths.
fn step(graph: &Graph, weights: &WeightUse, id: NodeId, from: ValueId, path: &DataPath) -> Vec<(ValueId, DataPath)> {
    let node = graph.node(id);
    let Some(input) = node.inputs.iter().position(|v| *v == Some(from)) else { return vec![] };
    let mut next = DataPath { length: path.length + 1, ..path.clone() };
    let pick = |slot: usize, path: DataPath| node.outputs.get(slot).copied().flatten().map(|v| (v, path));
    if let Some((slot, fused)) = ops::fused_state(node, input) {
        next.fused = Some(fused);
        next.ports = (input, slot);
        return pick(slot, next).into_iter().collect();
    }
    match node.op_type.as_str() {
        "Concat" => {
            let axis = node.int("axis").unwrap_or(0);
            next.appended = Some(next.axes.as_ref().and_then(|axes| original_axis(axes, axis)));
        }
        "Transpose" => next.axes = next.axes.as_ref().and_then(|axes| permuted(axes, node)),
        "Identity" | "Cast" | "CastLike" | "QuantizeLinear" | "DequantizeLinear" if input == 0 => {}
        "Slice" | "Split" | "Pad" | "Trilu" if input == 0 => next.rewritten = true,
        "Reshape" | "Unsqueeze" | "Squeeze" | "Flatten" if input == 0 => next.axes = None,
        "Gather" | "GatherElements" if input == 0 => next.rewritten = true,
        "Scatter" | "ScatterElements" | "ScatterND" | "TensorScatter" if input == 0 => next.rewritten = true,
        "Where" => next.rewritten = true,
        "Add" | "Sub" | "Mul" | "Div" | "Sum" => next.arithmetic = true,
        _ => return step_unknown(graph, weights, id, from, next),
    }
    node.writes().map(|v| (v, next.clone())).collect()
}

/// An operator without a rule, or a loop, may update a state if it reads a past directly and writes a graph output.
fn step_unknown(
    graph: &Graph,
    weights: &WeightUse,
    id: NodeId,
    from: ValueId,
    next: DataPath,
) -> Vec<(ValueId, DataPath)> {
    let node = graph.node(id);
    let foreign = !ops::is_standard(node) && node.domain != "com.microsoft";
    let direct = matches!(graph.value(from).origin, Origin::Input);
    let mixes = node.reads().any(|v| v != from && !weights.is_weight_like(graph, v));
    if !direct || !mixes || !(foreign || matches!(node.op_type.as_str(), "Loop" | "Scan")) {
        return vec![];
    }
    let input = node.inputs.iter().position(|v| *v == Some(from)).unwrap_or(0);
    let outputs = node.outputs.iter().enumerate().filter_map(|(slot, v)| Some((slot, (*v)?)));
    let outputs = outputs.filter(|(_, v)| graph.outputs.contains(v));
    outputs.map(|(slot, v)| (v, DataPath { ports: (input, slot), rewritten: true, ..next.clone() })).collect()
}

fn original_axis(axes: &[usize], axis: i64) -> Option<usize> {
    let axis = if axis < 0 { axis + axes.len() as i64 } else { axis };
    axes.get(usize::try_from(axis).ok()?).copied()
}

fn permuted(axes: &[usize], node: &crate::Node) -> Option<Vec<usize>> {
    match node.attributes.get("perm") {
        Some(crate::Attribute::Ints(perm)) => {
            perm.iter().map(|p| axes.get(usize::try_from(*p).ok()?).copied()).collect()
        }
        _ => Some(axes.iter().rev().copied().collect()),
    }
}

/// Finds read-only states (cross-attention caches): inputs that have type and rank of a state already found, and that
/// reach an attention through nothing but data movement and elementwise operators.
fn find_read_only(graph: &Graph, weights: &WeightUse, pairs: &BTreeMap<ValueId, StatePair>) -> Vec<StatePair> {
    let resembles_state = |v: ValueId| {
        let value = graph.value(v);
        let rank = value.shape.as_ref().map(Vec::len);
        rank.is_some_and(|r| r >= 3)
            && pairs.keys().any(|p| {
                let past = graph.value(*p);
                past.dtype == value.dtype && past.shape.as_ref().map(Vec::len) == rank
            })
    };
    let candidates = graph.inputs.iter().copied().filter(|v| !pairs.contains_key(v) && may_be_state(graph, *v));
    candidates
        .filter(|v| resembles_state(*v) && reaches_only_attention(graph, weights, *v))
        .filter_map(|past| {
            Some(StatePair { past, present: None, reader: first_reader(graph, past)?, change: StateChange::ReadOnly })
        })
        .collect()
}

fn reaches_only_attention(graph: &Graph, weights: &WeightUse, input: ValueId) -> bool {
    let mut todo = vec![input];
    let mut seen = BTreeSet::new();
    let mut attends = false;
    while let Some(value) = todo.pop() {
        for id in graph.value(value).consumers.iter().copied().filter(|id| seen.insert(*id)) {
            let node = graph.node(id);
            if ops::reads_shape_only(node) {
                continue;
            }
            let with_matrix = node.reads().any(|v| weights.is_matrix(graph, v));
            if ops::is_attention(node) || (ops::is_contraction(node) && !with_matrix) {
                attends = true;
            } else if ops::is_movement(node) || ops::is_elementwise_or_reduction(node) {
                todo.extend(node.writes());
            } else {
                return false;
            }
        }
    }
    attends
}

/// The decimal numbers in a name.
pub(crate) fn digits(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

fn is_state_name(name: &str) -> bool {
    let name = name.to_lowercase();
    ["past", "present", "state", "cache", "conv", "recurrent", "ssm", "memory", "mem_", "hidden_in", "hidden_out"]
        .iter()
        .any(|word| name.contains(word))
}
