//! Mixtures that exporters write out expert by expert: each expert adds its result to the sum of the experts before it.
//!
//! Optimum exports two forms. In Mixtral, every expert computes all tokens and multiplies its result with its scores, which are zero for tokens
//! that did not select it. In Qwen3-MoE, an expert computes only the tokens that a mask selects, and scatters their results into zeros. In both, an
//! expert that no token selects adds zero.

use super::large_weights;
use super::scores::{ExpertSelector, Selection};
use crate::{Attribute, Graph, NodeId, ValueId, WeightUse, ops};
use hpp_schema::{DType, Dim};
use std::collections::{BTreeMap, BTreeSet};

/// At most this many nodes lead from a mask to the indices of the scatter.
const MAX_STEPS: usize = 16;

/// A mixture that computes its experts one after the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenOut {
    /// The experts, by number.
    pub experts: Vec<WrittenExpert>,
}

/// An expert of a mixture that is written out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WrittenExpert {
    /// The expert's scores, one for each token, or the mask of its tokens. If all are zero, the expert adds zero.
    pub column: ValueId,
    /// The nodes that only this expert needs, in execution order. The last one adds the expert's result to the sum.
    pub nodes: Vec<NodeId>,
    /// The sum of the experts before this one.
    pub before: ValueId,
    /// The sum with this expert's result.
    pub after: ValueId,
}

/// Every mixture that a graph writes out and of which all experts are found. A token selects only some of the experts.
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

/// The expert whose result the node `sum` adds to the sum of the experts before.
fn expert(graph: &Graph, weights: &WeightUse, sum: NodeId) -> Option<(ExpertSelector, WrittenExpert)> {
    let (added, before, column) = operands(graph, sum, "Add")?.into_iter().find_map(|(added, before)| {
        Some((added, before, weighted(graph, added).or_else(|| scattered(graph, added))?))
    })?;
    let after = graph.node(sum).outputs.first().copied().flatten()?;
    // Nothing is broadcast: the new sum has the shape of the sum before.
    let shape = graph.value(before).shape.as_ref().filter(|shape| !shape.contains(&Dim::Unknown))?;
    if added == before || graph.value(after).dtype.is_none() || graph.value(after).shape.as_ref() != Some(shape) {
        return None;
    }
    let nodes = only_for(graph, weights, sum, &[before, column]);
    let large = large_weights(graph, nodes.iter().flat_map(|id| graph.node(*id).reads()));
    // The CPU provider widens 16-bit weights of branches into memory of its own, which cannot be read from a file.
    let is_wide = |id: &ValueId| !matches!(graph.value(*id).dtype, Some(DType::Float16 | DType::Bfloat16));
    let is_large = !large.is_empty() && large.iter().all(is_wide);
    // Only this sum reads the expert's result.
    let is_alone = nodes.contains(&graph.producer(added)?);
    let part = ExpertSelector::of(graph, column)?;
    (is_large && is_alone).then_some((part, WrittenExpert { column, nodes, before, after }))
}

/// The two inputs of a node of type `op_type`, in both orders.
fn operands(graph: &Graph, id: NodeId, op_type: &str) -> Option<[(ValueId, ValueId); 2]> {
    let node = graph.node(id);
    match node.inputs[..] {
        [Some(a), Some(b)] if ops::is_standard(node) && node.op_type == op_type => Some([(a, b), (b, a)]),
        _ => None,
    }
}

/// The scores with which a value was multiplied.
fn weighted(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let operands = operands(graph, graph.producer(value)?, "Mul")?;
    let factors = operands.into_iter().map(|(factor, _)| factor);
    factors.into_iter().find(|factor| {
        graph.value(*factor).dtype.is_some_and(|dtype| dtype.is_float()) && ExpertSelector::of(graph, *factor).is_some()
    })
}

/// The mask of the tokens whose results this value scatters into zeros.
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
    // Where no token selects the expert, `NonZero` finds no index, and nothing is scattered.
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

/// The row of a mask that `value` is, without the cast behind it.
fn uncast(graph: &Graph, value: ValueId) -> Option<ValueId> {
    let node = graph.node(graph.producer(value)?);
    let value = if node.op_type == "Cast" { node.inputs.first().copied().flatten()? } else { value };
    // `ReduceMax`, which the condition uses, may not exist for other element types.
    let is_integer = matches!(graph.value(value).dtype, Some(DType::Int64 | DType::Int32));
    ExpertSelector::of(graph, value).filter(|_| is_integer).map(|_| value)
}

/// The node `last` and all nodes that only it needs, in execution order. Nodes that compute a value of `given` and weight-only nodes are left out.
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
