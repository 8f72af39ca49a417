//! Mixtures that exporters write out, expert by expert, where each adds its result to that of the experts before.
//!
//! Two forms, both Optimum's: every expert computes all tokens, and its result is multiplied with its scores, which are zero for tokens that
//! did not select it (Mixtral); or an expert computes the tokens that a mask says, and their results are scattered into zeros (Qwen3-MoE).
//! Either way an expert that no token selects adds zero.

use super::large_weights;
use super::scores::{Column, Selection};
use crate::{Attribute, Graph, NodeId, ValueId, WeightUse, ops};
use hpp_schema::{DType, Dim};
use std::collections::{BTreeMap, BTreeSet};

/// How many nodes lead from a mask to the indices that are scattered at most.
const MAX_STEPS: usize = 16;

/// A mixture that computes its experts one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenOut {
    /// Its experts, by number.
    pub experts: Vec<WrittenExpert>,
}

/// One of its experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenExpert {
    /// Its scores, one for each token, or a mask. Where all are zero, the expert adds zero.
    pub column: ValueId,
    /// The nodes that nothing else needs, in execution order: those of the expert, and last the sum.
    pub nodes: Vec<NodeId>,
    /// The sum before it.
    pub before: ValueId,
    /// The sum with it.
    pub after: ValueId,
}

/// Every mixture that a graph writes out, with all of its experts, of which a token selects some.
pub fn written_out(graph: &Graph) -> Vec<WrittenOut> {
    let weights = WeightUse::of(graph);
    let mut mixtures: BTreeMap<Selection, BTreeMap<u64, WrittenExpert>> = BTreeMap::new();
    for sum in graph.node_ids() {
        if let Some((column, expert)) = expert(graph, &weights, sum) {
            mixtures.entry(column.selection).or_default().insert(column.expert, expert);
        }
    }
    let is_whole = |(selection, experts): &(Selection, BTreeMap<u64, WrittenExpert>)| {
        let count = experts.len() as u64;
        let is_complete = selection.count(graph) == Some(count) && experts.keys().copied().eq(0..count);
        is_complete && selection.active(graph).is_some_and(|active| (1..count).contains(&active))
    };
    let whole = mixtures.into_iter().filter(is_whole);
    whole.map(|(_, experts)| WrittenOut { experts: experts.into_values().collect() }).collect()
}

/// The expert whose result this node adds to that of the experts before.
fn expert(graph: &Graph, weights: &WeightUse, sum: NodeId) -> Option<(Column, WrittenExpert)> {
    let (added, before, column) = operands(graph, sum, "Add")?.into_iter().find_map(|(added, before)| {
        Some((added, before, weighted(graph, added).or_else(|| scattered(graph, added))?))
    })?;
    let after = graph.node(sum).outputs.first().copied().flatten()?;
    // The sum has the shape of what it adds to: nothing is broadcast.
    let shape = graph.value(before).shape.as_ref().filter(|shape| !shape.contains(&Dim::Unknown))?;
    if added == before || graph.value(after).dtype.is_none() || graph.value(after).shape.as_ref() != Some(shape) {
        return None;
    }
    let nodes = only_for(graph, weights, sum, &[before, column]);
    let large = large_weights(graph, nodes.iter().flat_map(|id| graph.node(*id).reads()));
    // The CPU provider widens 16-bit weights of branches into memory of its own, which cannot be read from a file.
    let is_wide = |id: &ValueId| !matches!(graph.value(*id).dtype, Some(DType::Float16 | DType::Bfloat16));
    let is_large = !large.is_empty() && large.iter().all(is_wide);
    // Nothing else reads what is added.
    let is_alone = nodes.contains(&graph.producer(added)?);
    let part = Column::of(graph, column)?;
    (is_large && is_alone).then_some((part, WrittenExpert { column, nodes, before, after }))
}

/// Both orders of the two inputs of such a node.
fn operands(graph: &Graph, id: NodeId, op_type: &str) -> Option<[(ValueId, ValueId); 2]> {
    let node = graph.node(id);
    match node.inputs[..] {
        [Some(a), Some(b)] if ops::is_standard(node) && node.op_type == op_type => Some([(a, b), (b, a)]),
        _ => None,
    }
}

/// The scores that a value is multiplied with.
fn weighted(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let operands = operands(graph, graph.producer(value)?, "Mul")?;
    let factors = operands.into_iter().map(|(factor, _)| factor);
    factors.into_iter().find(|factor| {
        graph.value(*factor).dtype.is_some_and(|dtype| dtype.is_float()) && Column::of(graph, *factor).is_some()
    })
}

/// The mask of the tokens whose results are scattered into zeros.
fn scattered(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let scatter = graph.node(graph.producer(value)?);
    let input = |at: usize| scatter.inputs.get(at).copied().flatten();
    let zeros = graph.node(graph.producer(input(0)?)?);
    let is_zero = match zeros.attributes.get("value") {
        None => true,
        Some(Attribute::Tensor(constant)) => constant.is_zero,
        Some(_) => false,
    };
    let is_scatter = ops::is_standard(scatter) && matches!(scatter.op_type.as_str(), "ScatterElements" | "ScatterND");
    if !is_scatter || zeros.op_type != "ConstantOfShape" || !is_zero {
        return None;
    }
    // Where no token selects the expert, `NonZero` finds nothing, and reshaping nothing leaves nothing to scatter.
    let mut indices = input(1)?;
    for _ in 0..MAX_STEPS {
        let node = graph.node(graph.producer(indices)?);
        indices = node.inputs.first().copied().flatten()?;
        match node.op_type.as_str() {
            "NonZero" => return uncast(graph, indices),
            "Expand" | "Unsqueeze" | "Squeeze" | "Split" | "Transpose" | "Cast" | "Identity" => {}
            _ => return None,
        }
    }
    None
}

/// The part of a mask that a value is, before its element type was changed.
fn uncast(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let node = graph.node(graph.producer(value)?);
    let value = if node.op_type == "Cast" { node.inputs.first().copied().flatten()? } else { value };
    // Of other types there may be no maximum.
    let is_integer = matches!(graph.value(value).dtype, Some(DType::Int64 | DType::Int32));
    Column::of(graph, value).filter(|_| is_integer).map(|_| value)
}

/// The node and those that only it needs, in execution order. What computes `given` is not among them, and nothing that computes on
/// weights alone.
fn only_for(graph: &Graph, weights: &WeightUse, last: NodeId, given: &[ValueId]) -> Vec<NodeId> {
    let mut found = BTreeSet::from([last]);
    let mut open: BTreeSet<NodeId> = graph.producers_of(last).into_iter().collect();
    while let Some(id) = open.pop_last() {
        let mut written = graph.node(id).writes();
        let is_needed_elsewhere = written.any(|value| {
            let is_read = graph.value(value).consumers.iter().any(|reader| !found.contains(reader));
            is_read || given.contains(&value) || graph.outputs.contains(&value)
        });
        if !is_needed_elsewhere && !weights.is_weight_only(id) {
            found.insert(id);
            open.extend(graph.producers_of(id));
        }
    }
    found.into_iter().collect()
}
