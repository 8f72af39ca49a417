//! Divides layers by rows: each of several devices computes a part of every matrix product of a layer.
//!
//! The nodes of a layer are copied once for each shard. Matrices at the start of a path are divided by columns: each shard gets some of the heads
//! or neurons. Matrices at its end are divided by rows: each shard gets one summand of the result. Shards exchange nothing but summands. This
//! module decides how each value, weight and node is divided, or why it cannot be, and to which block each copy belongs; `hpp-onnx` rewrites the
//! model. Does not know protobuf or files.

mod analyse;
mod attention;
mod elementwise;
mod error;
mod parts;
mod products;
mod reshape;
mod sections;
mod segmentation;

pub use error::{RowsError, RowsReason};
pub use segmentation::shard_name;

use crate::segmentation::{BlockKind, Segmentation};
use crate::{Graph, NodeId, ValueId};
use std::collections::BTreeMap;

/// The part of a divided layer that a block computes, and the shard that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Shard {
    /// The part of the layer, from 0. A part ends where shards exchange summands.
    pub part: usize,
    /// The shard, from 0.
    pub index: usize,
    /// How many shards there are.
    pub count: usize,
}

/// What a shard has of a value that the nodes of a divided layer produce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ShardLayout {
    /// All of it, computed by every shard.
    Replicated,
    /// A summand of the same shape. Nodes read the sum, which every shard computes.
    Partial,
    /// A part of the last axis. The numbers are the sizes of its sections, over all shards. Each section is divided into as many equal ranges as
    /// there are shards, and a shard has one range of each section.
    Columns(Vec<u64>),
    /// Some of the heads. The last axis is one head; the heads are in the axis before it, alone or multiplied with tokens.
    Heads {
        /// Elements of all heads of all shards.
        width: u64,
        /// Elements of a head.
        head: u64,
    },
    /// Keys or values of some of the heads: `[batch, heads, tokens, elements of a head]`.
    State,
}

/// The part of a weight that each shard has. The weight is treated as a matrix of `rows` times `columns` units of equal size, in the order in which
/// it is stored. The columns form `sections`; each section is divided into as many equal ranges as there are shards, and a shard has one range of
/// each.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WeightSlice {
    /// Number of rows. Every shard has a part of every row.
    pub rows: u64,
    /// Widths of the sections of a row, in units. Each is a multiple of the number of shards.
    pub sections: Vec<u64>,
    /// The axis of the tensor whose size is divided.
    pub axis: usize,
}

impl WeightSlice {
    /// Units in a row.
    pub fn columns(&self) -> u64 {
        self.sections.iter().sum()
    }

    /// The ranges of a row that belong to a shard: first unit and number of units of each.
    pub fn ranges(&self, shard: usize, shards: usize) -> Vec<(u64, u64)> {
        let (shard, shards) = (shard as u64, shards as u64);
        let starts = self.sections.iter().scan(0, |end, width| {
            *end += width;
            Some(*end - width)
        });
        starts.zip(&self.sections).map(|(start, width)| (start + shard * (width / shards), width / shards)).collect()
    }
}

/// What a shard's copy of a node reads for one input.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InputDivision {
    /// The shard's own value, or a value that is not divided.
    Own,
    /// The shard's part of a weight.
    Slice(WeightSlice),
    /// The input in shard 0, nothing in the others: a bias, which must be added to one summand only.
    FirstOnly,
    /// These integers (sizes, starts, ends) instead of the constants of the original node.
    Ints(Vec<i64>),
}

/// How the copies of a node differ from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeDivision {
    /// One for each input.
    pub inputs: Vec<InputDivision>,
    /// Attributes with other values.
    pub attributes: Vec<(&'static str, i64)>,
    /// Whether the first output is a summand.
    pub is_partial: bool,
}

/// A node of the rewritten graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RowNode {
    /// A node that is not divided.
    Whole(NodeId),
    /// A shard's copy of a node.
    Copy(NodeId, usize),
    /// A node with which a shard adds up the summands that the copies of a node produce.
    Sum(NodeId, usize),
}

/// How some layers are divided.
#[derive(Clone, Debug)]
pub struct RowDivision {
    shards: usize,
    nodes: BTreeMap<NodeId, NodeDivision>,
    layouts: BTreeMap<ValueId, ShardLayout>,
    /// Inputs that are divided states, with the state's index.
    pasts: BTreeMap<ValueId, usize>,
    parts: parts::Parts,
}

/// Decides how these blocks are divided among `shards` shards. `blocks` are indices of layers in the segmentation. `graph` must have inferred
/// shapes.
///
/// # Errors
/// The first node that cannot be divided, with its reason.
pub fn divide_rows(
    graph: &Graph,
    segmentation: &Segmentation,
    blocks: &[usize],
    shards: usize,
) -> Result<RowDivision, RowsError> {
    for block in blocks {
        let kind = segmentation.blocks.get(*block).map(|block| block.kind);
        if !matches!(kind, Some(BlockKind::Layer(_))) || shards < 2 {
            let label = segmentation.blocks.get(*block).map_or_else(|| block.to_string(), |block| block.label.clone());
            return Err(RowsError { block: label, node: String::new(), reason: RowsReason::NotALayer { shards } });
        }
    }
    let analysed = analyse::analyse(graph, segmentation, blocks, shards)?;
    let parts = parts::Parts::of(graph, segmentation, blocks, &analysed)?;
    let analyse::Analysed { nodes, layouts, pasts, .. } = analysed;
    Ok(RowDivision { shards, nodes, layouts, pasts, parts })
}

impl RowDivision {
    /// How many shards there are.
    pub fn shards(&self) -> usize {
        self.shards
    }

    /// How a node's copies differ from it; `None` for a node that is not divided.
    pub fn node(&self, id: NodeId) -> Option<&NodeDivision> {
        self.nodes.get(&id)
    }

    /// What a shard has of a value; `None` for values that no divided node produces.
    pub fn layout(&self, id: ValueId) -> Option<&ShardLayout> {
        self.layouts.get(&id)
    }

    /// Whether a model input is a state of which each shard has some heads.
    pub fn is_divided_past(&self, id: ValueId) -> bool {
        self.pasts.contains_key(&id)
    }

    /// Whether a node of the rewritten graph is needed. After the last summands of a run of divided layers, only the nodes of shard 0 are.
    pub fn is_kept(&self, node: RowNode) -> bool {
        self.parts.place(node).is_some()
    }

    /// Whether two nodes are in consecutive divided layers, so that each shard's copy of one reads its own copy of the other.
    pub fn is_same_run(&self, a: NodeId, b: NodeId) -> bool {
        self.parts.run(a).is_some_and(|run| self.parts.run(b) == Some(run))
    }
}
