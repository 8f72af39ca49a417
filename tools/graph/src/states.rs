//! Pairs carried inputs (`past`) with the outputs that replace them (`present`), by how they are connected.
//!
//! Names only break ties. Knows nothing of layers or devices.

use crate::ops::{self, FusedState};
use crate::{Graph, NodeId, Origin, ValueId, WeightUse};
use hpp_schema::DType;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A tensor carried from one step to the next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePair {
    /// The graph input that receives the carried value.
    pub past: ValueId,
    /// The graph output that holds the next one; `None` for a value that is computed once and only read.
    pub present: Option<ValueId>,
    /// The first node that reads `past` for its contents.
    pub reader: NodeId,
    /// How `present` relates to `past`.
    pub change: StateChange,
}

/// How a state's present relates to its past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateChange {
    /// One operator (the reader) reads past and writes present, and may do so in one buffer of fixed capacity.
    SharedBuffer {
        /// The token axis, where the state has one (pages have none).
        axis: Option<usize>,
    },
    /// Present is past with this step's tokens after it along `axis`, in another buffer.
    Append {
        /// The token axis.
        axis: usize,
    },
    /// Present has the shape of past and replaces it.
    Replace,
    /// Past is only read (or handed through unchanged).
    ReadOnly,
}

/// What was learned on the way from a past to a value.
#[derive(Clone, Debug)]
struct Trail {
    length: usize,
    /// Where each axis of the current value was in the past; `None` once a reshape has mixed them.
    axes: Option<Vec<usize>>,
    appended: Option<Option<usize>>,
    fused: Option<FusedState>,
    /// Passed a slice, a scatter or another operator that keeps the size.
    rewritten: bool,
    /// Passed arithmetic: evidence enough only together with a telling shape and name.
    arithmetic: bool,
    /// Which input of the last operator was followed, and which output: orders pairs of one operator.
    ports: (usize, usize),
}

/// Finds every state of a model, in the order of its inputs.
pub fn find_states(graph: &Graph, weights: &WeightUse) -> Vec<StatePair> {
    let mut claims = vec![];
    for (rank, past) in graph.inputs.iter().copied().enumerate().filter(|(_, v)| may_carry(graph, *v)) {
        for (present, trail) in trails_to_outputs(graph, weights, past) {
            claims.push(Claim::new(graph, rank, past, present, trail));
        }
    }
    claims.retain(|c| c.is_credible(graph));
    claims.sort_by_key(|c| (c.trail.length, c.trail.arithmetic, c.port_distance(), !c.same_digits, c.rank_distance()));
    let mut pairs = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for claim in &claims {
        if !pairs.contains_key(&claim.past) && taken.insert(claim.present) {
            pairs.insert(claim.past, claim.to_pair(graph));
        }
    }
    let read_only = find_read_only(graph, weights, &pairs);
    pairs.extend(read_only.into_iter().map(|p| (p.past, p)));
    graph.inputs.iter().filter_map(|v| pairs.remove(v)).collect()
}

fn may_carry(graph: &Graph, value: ValueId) -> bool {
    !matches!(graph.value(value).dtype, Some(DType::Int64 | DType::Int32 | DType::Bool | DType::String))
        && first_reader(graph, value).is_some()
}

/// The first node that reads a value for its contents.
fn first_reader(graph: &Graph, value: ValueId) -> Option<NodeId> {
    let consumers = &graph.value(value).consumers;
    consumers
        .iter()
        .copied()
        .find(|n| !ops::reads_shape_only(graph.node(*n)) && !graph.node(*n).captures.contains(&value))
}

/// A possible pair.
struct Claim {
    past: ValueId,
    present: ValueId,
    past_rank: usize,
    present_rank: usize,
    same_digits: bool,
    trail: Trail,
}

impl Claim {
    fn new(graph: &Graph, past_rank: usize, past: ValueId, present: ValueId, trail: Trail) -> Self {
        let present_rank = graph.outputs.iter().position(|v| *v == present).unwrap_or(0);
        let same_digits = digits(&graph.value(past).name) == digits(&graph.value(present).name);
        Claim { past, present, past_rank, present_rank, same_digits, trail }
    }

    fn rank_distance(&self) -> usize {
        self.past_rank.abs_diff(self.present_rank)
    }

    fn port_distance(&self) -> usize {
        self.trail.ports.0.abs_diff(self.trail.ports.1)
    }

    /// Same element type and rank; where only arithmetic connects the two, also a shape that does not grow with the
    /// sequence and a name that says state.
    fn is_credible(&self, graph: &Graph) -> bool {
        let (past, present) = (graph.value(self.past), graph.value(self.present));
        if matches!((past.dtype, present.dtype), (Some(a), Some(b)) if a != b) {
            return false;
        }
        let (Some(a), Some(b)) = (&past.shape, &present.shape) else { return !self.trail.arithmetic };
        if a.len() != b.len() || a.is_empty() {
            return false;
        }
        let changing = (0..a.len()).filter(|i| a[*i] != b[*i]).count();
        let fixed = a.iter().zip(b).skip(1).all(|(x, y)| x.as_fixed().is_some() && x == y);
        match (self.trail.arithmetic, self.trail.fused, self.trail.appended) {
            (true, ..) => fixed && says_state(&past.name) && says_state(&present.name),
            (false, None, None) if !self.trail.rewritten => changing == 0,
            _ => true,
        }
    }

    fn to_pair(&self, graph: &Graph) -> StatePair {
        let reader = first_reader(graph, self.past).expect("only inputs with a reader become claims");
        StatePair { past: self.past, present: Some(self.present), reader, change: self.change(graph) }
    }

    fn change(&self, graph: &Graph) -> StateChange {
        let trail = &self.trail;
        match (trail.fused, trail.appended) {
            (Some(FusedState::SharedBuffer(axis)), _) if trail.length == 1 => StateChange::SharedBuffer { axis },
            (Some(FusedState::SharedBuffer(Some(axis)) | FusedState::Append(axis)), _) => StateChange::Append { axis },
            (Some(_), _) => StateChange::Replace,
            (None, Some(axis)) if !trail.rewritten => match self.changing_axis(graph).or(axis) {
                Some(axis) => StateChange::Append { axis },
                None => StateChange::Replace,
            },
            (None, None) if !trail.rewritten && !trail.arithmetic => StateChange::ReadOnly,
            _ => StateChange::Replace,
        }
    }

    /// The one axis along which past and present differ in size, if there is exactly one.
    fn changing_axis(&self, graph: &Graph) -> Option<usize> {
        let (a, b) = (graph.value(self.past).shape.as_ref()?, graph.value(self.present).shape.as_ref()?);
        let mut changing = (0..a.len().min(b.len())).filter(|i| a[*i] != b[*i]);
        changing.next().filter(|_| changing.next().is_none())
    }
}

/// The shortest trail from a past to each graph output that it reaches through operators that carry state.
fn trails_to_outputs(graph: &Graph, weights: &WeightUse, past: ValueId) -> Vec<(ValueId, Trail)> {
    let rank = graph.value(past).shape.as_ref().map(Vec::len);
    let start = Trail {
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
    while let Some((value, trail)) = queue.pop_front() {
        if graph.outputs.contains(&value) {
            found.push((value, trail.clone()));
        }
        for consumer in &graph.value(value).consumers {
            for (next, trail) in step(graph, weights, *consumer, value, &trail) {
                if seen.insert(next) {
                    queue.push_back((next, trail));
                }
            }
        }
    }
    found
}

/// What lies one operator further.
fn step(graph: &Graph, weights: &WeightUse, id: NodeId, from: ValueId, trail: &Trail) -> Vec<(ValueId, Trail)> {
    let node = graph.node(id);
    let Some(input) = node.inputs.iter().position(|v| *v == Some(from)) else { return vec![] };
    let mut next = Trail { length: trail.length + 1, ..trail.clone() };
    let pick = |slot: usize, trail: Trail| node.outputs.get(slot).copied().flatten().map(|v| (v, trail));
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
        _ => return unknown_carrier(graph, weights, id, from, next),
    }
    node.writes().map(|v| (v, next.clone())).collect()
}

/// An operator we have no table for, or a loop, carries a state if it reads a past and itself writes a graph output of
/// the same type.
fn unknown_carrier(
    graph: &Graph,
    weights: &WeightUse,
    id: NodeId,
    from: ValueId,
    next: Trail,
) -> Vec<(ValueId, Trail)> {
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
    outputs.map(|(slot, v)| (v, Trail { ports: (input, slot), rewritten: true, ..next.clone() })).collect()
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

/// Inputs like the states found (same type and rank) that only move into an attention: cross-attention caches.
fn find_read_only(graph: &Graph, weights: &WeightUse, pairs: &BTreeMap<ValueId, StatePair>) -> Vec<StatePair> {
    let like_a_state = |v: ValueId| {
        let value = graph.value(v);
        let rank = value.shape.as_ref().map(Vec::len);
        rank.is_some_and(|r| r >= 3)
            && pairs.keys().any(|p| {
                let past = graph.value(*p);
                past.dtype == value.dtype && past.shape.as_ref().map(Vec::len) == rank
            })
    };
    let candidates = graph.inputs.iter().copied().filter(|v| !pairs.contains_key(v) && may_carry(graph, *v));
    candidates
        .filter(|v| like_a_state(*v) && moves_into_attention(graph, weights, *v))
        .filter_map(|past| {
            Some(StatePair { past, present: None, reader: first_reader(graph, past)?, change: StateChange::ReadOnly })
        })
        .collect()
}

fn moves_into_attention(graph: &Graph, weights: &WeightUse, input: ValueId) -> bool {
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
            } else if ops::is_movement(node) || ops::is_elementwise(node) {
                todo.extend(node.writes());
            } else {
                return false;
            }
        }
    }
    attends
}

/// The numbers in a name.
pub(crate) fn digits(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect()
}

fn says_state(name: &str) -> bool {
    let name = name.to_lowercase();
    ["past", "present", "state", "cache", "conv", "recurrent", "ssm", "memory", "mem_", "hidden_in", "hidden_out"]
        .iter()
        .any(|word| name.contains(word))
}
