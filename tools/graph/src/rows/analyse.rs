//! Decides for each node which part of each value a shard has, and how the shards' copies of the node differ from it.

use super::error::{RowsError, RowsReason};
use super::{InputDivision, NodeDivision, ShardLayout};
use crate::flow::Flow;
use crate::segmentation::Segmentation;
use crate::{Graph, Node, NodeId, ValueId, ops};
use std::collections::{BTreeMap, BTreeSet};

/// The result of the analysis of the divided nodes.
pub(super) struct Analysed {
    pub shards: usize,
    pub nodes: BTreeMap<NodeId, NodeDivision>,
    pub layouts: BTreeMap<ValueId, ShardLayout>,
    pub pasts: BTreeMap<ValueId, usize>,
}

/// The analysis of a graph in which the nodes of some blocks are divided.
pub(super) struct Analysis<'a> {
    pub graph: &'a Graph,
    pub segmentation: &'a Segmentation,
    pub shards: u64,
    /// Whether each block is divided.
    divided: Vec<bool>,
    /// The state input of each state, with the state's index in the segmentation.
    pub states: BTreeMap<ValueId, usize>,
    pub layouts: BTreeMap<ValueId, ShardLayout>,
    /// The same for divided states only.
    pub pasts: BTreeMap<ValueId, usize>,
    flow: Flow<'a>,
}

/// How a node is divided and the layouts of its outputs, or the reason why the node cannot be divided.
pub(super) type Divided = Result<(NodeDivision, Vec<ShardLayout>), RowsReason>;

pub(super) fn analyse(
    graph: &Graph,
    segmentation: &Segmentation,
    blocks: &[usize],
    shards: usize,
) -> Result<Analysed, RowsError> {
    let pairs: Vec<_> = segmentation.states.iter().map(|state| state.pair.clone()).collect();
    let mut analysis = Analysis {
        graph,
        segmentation,
        shards: shards as u64,
        divided: (0..segmentation.blocks.len()).map(|block| blocks.contains(&block)).collect(),
        states: pairs.iter().enumerate().map(|(index, pair)| (pair.past, index)).collect(),
        layouts: BTreeMap::new(),
        pasts: BTreeMap::new(),
        flow: Flow::new(graph, &segmentation.weights, &pairs),
    };
    analysis.check_mixtures(blocks)?;
    let divided: Vec<NodeId> = graph.node_ids().filter(|id| analysis.is_divided(*id)).collect();
    for id in &divided {
        analysis.check_kind(*id).map_err(|reason| analysis.error(*id, reason))?;
    }
    let mut nodes = BTreeMap::new();
    for id in divided {
        let (division, layouts) = analysis.divide(id).map_err(|reason| analysis.error(id, reason))?;
        for (output, layout) in graph.node(id).outputs.iter().zip(layouts) {
            analysis.layouts.extend(output.map(|output| (output, layout)));
        }
        nodes.insert(id, division);
    }
    analysis.check_readers()?;
    let Analysis { layouts, pasts, .. } = analysis;
    Ok(Analysed { shards, nodes, layouts, pasts })
}

impl Analysis<'_> {
    /// Whether a node is in a divided layer.
    pub fn is_divided(&self, id: NodeId) -> bool {
        self.segmentation.block_of(id).is_some_and(|block| self.divided[block])
    }

    fn error(&self, id: NodeId, reason: RowsReason) -> RowsError {
        let node = self.graph.node(id);
        let block = self.segmentation.block_of(id).map(|block| self.segmentation.blocks[block].label.clone());
        RowsError { block: block.unwrap_or_else(|| "the layers".to_owned()), node: label(node), reason }
    }

    /// The name of a value.
    pub fn name(&self, id: ValueId) -> String {
        self.graph.value(id).name.clone()
    }

    /// Fixed sizes of a value's shape; `None` if one is not fixed.
    pub fn sizes(&self, id: ValueId) -> Option<Vec<u64>> {
        self.graph.value(id).shape.as_ref()?.iter().map(|dim| dim.as_fixed()).collect()
    }

    /// What a node that reads the value gets: for summands, that is their sum.
    pub fn seen(&self, id: ValueId) -> &ShardLayout {
        match self.layouts.get(&id) {
            None | Some(ShardLayout::Partial) => &ShardLayout::Replicated,
            Some(layout) => layout,
        }
    }

    /// The first input of which a shard has only a part.
    pub fn first_part(&self, node: &Node) -> Option<ValueId> {
        node.reads().find(|value| *self.seen(*value) != ShardLayout::Replicated)
    }

    /// Refuses layers with mixtures of experts, whatever the router is.
    fn check_mixtures(&self, blocks: &[usize]) -> Result<(), RowsError> {
        for block in blocks.iter().map(|block| &self.segmentation.blocks[*block]) {
            if crate::experts::has_mixture(self.graph, block) {
                let operator = block.nodes.iter().map(|id| self.graph.node(*id)).find(|node| is_mixture(node));
                let node = operator.map(label).unwrap_or_else(|| "a group of If nodes".to_owned());
                return Err(RowsError { block: block.label.clone(), node, reason: RowsReason::Mixture });
            }
        }
        Ok(())
    }

    /// Refuses nodes that cannot be copied and nodes that read a state which cannot be divided.
    fn check_kind(&self, id: NodeId) -> Result<(), RowsReason> {
        let node = self.graph.node(id);
        let is_cache = node.op_type == "GroupQueryAttention";
        let state = node.reads().find(|value| self.states.contains_key(value)).filter(|_| !is_cache);
        match state {
            _ if ops::has_body(node) => Err(RowsReason::Body),
            _ if !ops::is_recomputable(node) => Err(RowsReason::Random),
            Some(state) => Err(RowsReason::OtherState { state: self.name(state) }),
            None => Ok(()),
        }
    }

    fn divide(&mut self, id: NodeId) -> Divided {
        let node = self.graph.node(id);
        match node.op_type.as_str() {
            "GroupQueryAttention" => return self.attention(id),
            "MatMul" | "FusedMatMul" | "Gemm" | "MatMulNBits" => {
                if let Some(divided) = self.product(node)? {
                    return Ok(divided);
                }
            }
            _ => {}
        }
        match self.first_part(node) {
            None => self.replicated(id),
            Some(part) => self.on_parts(node, part),
        }
    }

    /// A node that every shard computes unchanged. Refuses products with a matrix.
    fn replicated(&self, id: NodeId) -> Divided {
        let node = self.graph.node(id);
        let weights = &self.segmentation.weights;
        let matrix = node.reads().find(|value| weights.is_matrix(self.graph, *value));
        match matrix.filter(|_| self.flow.is_weighted(id)) {
            Some(weight) => Err(RowsReason::Matrix { weight: self.name(weight) }),
            None => Ok((unchanged(node), vec![ShardLayout::Replicated; node.outputs.len()])),
        }
    }

    /// Divides a node that is not a matrix product and reads a value of which a shard has only a part.
    fn on_parts(&self, node: &Node, part: ValueId) -> Divided {
        match node.op_type.as_str() {
            _ if *self.seen(part) == ShardLayout::State => Err(RowsReason::Operator { value: self.name(part) }),
            "Reshape" => self.reshape(node),
            "Split" => self.split(node),
            "Slice" => self.slice(node),
            "RotaryEmbedding" => self.rotary(node),
            "SimplifiedLayerNormalization" | "LayerNormalization" | "RMSNormalization" => self.norm(node),
            _ if is_elementwise(node) => self.elementwise(node, part),
            _ => Err(RowsReason::Operator { value: self.name(part) }),
        }
    }

    /// Refuses nodes outside the divided layers that read a value of which a shard has only a part, and model outputs
    /// that are such values. States may be such outputs.
    fn check_readers(&self) -> Result<(), RowsError> {
        let is_part = |value: &ValueId| *self.seen(*value) != ShardLayout::Replicated || self.pasts.contains_key(value);
        for id in self.graph.node_ids().filter(|id| !self.is_divided(*id)) {
            if let Some(value) = self.graph.node(id).reads().find(is_part) {
                return Err(self.error(id, RowsReason::ReadOutside { value: self.name(value) }));
            }
        }
        let presents: BTreeSet<ValueId> =
            self.pasts.values().filter_map(|state| self.segmentation.states[*state].pair.present).collect();
        let returned = self.graph.outputs.iter().find(|value| is_part(value) && !presents.contains(value));
        match returned.and_then(|value| Some((self.graph.producer(*value)?, *value))) {
            Some((id, value)) => Err(self.error(id, RowsReason::Returned { value: self.name(value) })),
            None => Ok(()),
        }
    }
}

fn is_mixture(node: &Node) -> bool {
    matches!(node.op_type.as_str(), "MoE" | "QMoE")
}

/// Whether the node computes each element from the elements at the same place.
pub(super) fn is_elementwise(node: &Node) -> bool {
    super::elementwise::OPERATORS.contains(&node.op_type.as_str())
}

/// The division of a node whose copies differ from it only in names.
pub(super) fn unchanged(node: &Node) -> NodeDivision {
    let inputs = vec![InputDivision::Own; node.inputs.len()];
    NodeDivision { inputs, attributes: vec![], is_partial: false }
}

/// Operator and name of a node.
fn label(node: &Node) -> String {
    match node.name.as_str() {
        "" => format!("a {} node", node.op_type),
        name => format!("{} {name:?}", node.op_type),
    }
}
