//! Predicts which experts a later layer selects: an earlier layer computes the later layer's router with its own hidden state.
//!
//! Hidden states change little from layer to layer, so the later router selects mostly the same experts from the earlier hidden state. The
//! prediction only says which experts to read ahead; no result of the model depends on it.

use super::Mixture;
use crate::{Graph, Node, NodeId, ValueId, ops};
use hpp_schema::SelectedBy;
use std::collections::{BTreeMap, BTreeSet};

/// The most nodes that a router and its normalisation have. A longer path computes more than a router.
const MOST_NODES: usize = 16;
/// The router's weights must be smaller than the experts' weights divided by this.
const ROUTER_DIVISOR: u64 = 16;
/// Prefix of the names of copied values.
const PREFIX: &str = "hpp.predicted.";

/// The router of a later mixture with the normalisation before it. An earlier part computes a copy of them with its own hidden state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EarlyRouter {
    /// The nodes to copy, in execution order.
    pub nodes: Vec<NodeId>,
    /// The hidden states that these nodes read, each with the hidden state that the copy reads instead.
    pub replaced: BTreeMap<ValueId, ValueId>,
    /// What the copies compute.
    pub prediction: Prediction,
}

/// The logits of an [`EarlyRouter`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prediction {
    /// Their name, which no value of the graph has.
    pub name: String,
    /// The logits that they predict, which have the same element type and shape.
    pub router: ValueId,
}

impl EarlyRouter {
    /// The router of `later`, computed with the hidden state that the normalisation before `earlier` reads. `None` if the graph has predictions
    /// already, or has another form than a normalisation followed by a router with constant weights that are small beside the experts' weights.
    pub fn of(graph: &Graph, earlier: &Mixture, later: &Mixture) -> Option<EarlyRouter> {
        let is_ranked = matches!(later.selected_by, SelectedBy::Logits | SelectedBy::Probabilities);
        let hidden = hidden_state(graph, norm_before(graph, earlier)?)?;
        let norm = norm_before(graph, later).filter(|_| is_ranked)?;
        let nodes = router_nodes(graph, later.router, norm)?;
        let read = hidden_inputs(graph.node(norm));
        let is_alike = |id: &ValueId| graph.value(*id).dtype == graph.value(hidden).dtype;
        let has_predictions = graph.values.iter().any(|value| value.name.starts_with(PREFIX));
        let is_small = weight_bytes(graph, &nodes) < later.bytes(graph) / ROUTER_DIVISOR;
        let name = format!("{PREFIX}{}", graph.value(later.router).name);
        let prediction = Prediction { name, router: later.router };
        let replaced = read.iter().map(|id| (*id, hidden)).collect();
        let is_possible = read.iter().all(is_alike) && is_small && !has_predictions;
        is_possible.then_some(EarlyRouter { nodes, replaced, prediction })
    }

    /// Bytes of the weights that the copies read.
    pub fn weight_bytes(&self, graph: &Graph) -> u64 {
        weight_bytes(graph, &self.nodes)
    }

    /// The hidden state of the earlier part that the copies read.
    pub fn hidden_state(&self) -> Option<ValueId> {
        self.replaced.values().next().copied()
    }
}

/// Bytes of the weights that nodes read.
fn weight_bytes(graph: &Graph, nodes: &[NodeId]) -> u64 {
    let read: BTreeSet<ValueId> = nodes.iter().flat_map(|id| graph.node(*id).reads()).collect();
    read.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).sum()
}

/// The normalisation whose output a mixture operator reads.
fn norm_before(graph: &Graph, mixture: &Mixture) -> Option<NodeId> {
    let mut value = graph.node(*mixture.nodes.first()?).inputs.first().copied().flatten()?;
    loop {
        let id = graph.producer(value)?;
        let node = graph.node(id);
        if is_norm(node) {
            return Some(id);
        }
        value = node.inputs.first().copied().flatten().filter(|_| ops::is_movement(node))?;
    }
}

fn is_norm(node: &Node) -> bool {
    adds(node) && !has_bias(node)
        || matches!(node.op_type.as_str(), "SimplifiedLayerNormalization" | "LayerNormalization" | "RMSNormalization")
}

/// Whether the normalisation first adds its first two inputs.
fn adds(node: &Node) -> bool {
    matches!(node.op_type.as_str(), "SkipSimplifiedLayerNormalization" | "SkipLayerNormalization")
}

/// Whether a normalisation that adds its first two inputs also adds a bias.
fn has_bias(norm: &Node) -> bool {
    let bias = if norm.op_type == "SkipLayerNormalization" { 4 } else { 3 };
    norm.inputs.get(bias).is_some_and(Option::is_some)
}

/// The hidden states that a normalisation reads. In the copy of a normalisation that adds two of them, both are replaced by the same hidden state:
/// the sum of a state with itself has the same normalisation as the state.
fn hidden_inputs(norm: &Node) -> Vec<ValueId> {
    norm.inputs.iter().take(if adds(norm) { 2 } else { 1 }).copied().flatten().collect()
}

/// The hidden state that a normalisation normalises: its input, or, if it adds two inputs, their sum, which is its fourth output.
fn hidden_state(graph: &Graph, norm: NodeId) -> Option<ValueId> {
    let node = graph.node(norm);
    if adds(node) { node.outputs.get(3).copied().flatten() } else { node.inputs.first().copied().flatten() }
}

/// All nodes from a normalisation to the logits of a router, the normalisation included, in execution order. `None` if the logits depend on
/// anything but the normalisation's hidden states and constants.
fn router_nodes(graph: &Graph, router: ValueId, norm: NodeId) -> Option<Vec<NodeId>> {
    let mut nodes = BTreeSet::new();
    let mut open = vec![graph.producer(router)?];
    while let Some(id) = open.pop() {
        let node = graph.node(id);
        if !nodes.insert(id) {
            continue;
        }
        if nodes.len() > MOST_NODES || !node.captures.is_empty() || !ops::is_recomputable(node) {
            return None;
        }
        let hidden = if id == norm { hidden_inputs(node) } else { vec![] };
        for value in node.reads().filter(|value| !hidden.contains(value) && graph.weight(*value).is_none()) {
            open.push(graph.producer(value)?);
        }
    }
    nodes.contains(&norm).then(|| nodes.into_iter().collect())
}
