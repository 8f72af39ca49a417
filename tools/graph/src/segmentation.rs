//! The result of dividing a model into blocks: blocks with their classes, the values between them, and states.

use crate::{NodeId, Shard, StatePair, ValueId, WeightUse};
use std::collections::BTreeSet;

/// A unit that the planner places as a whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// `embedding`, `layers.3`, `head`; `stem`, `blocks.3` in models without layers; `layers.3.experts` for the second half of a divided
    /// layer; `layers.3.attention.0` for a shard's part of a layer that is divided by rows.
    pub label: String,
    /// Its kind.
    pub kind: BlockKind,
    /// Its nodes in execution order, without weight-only nodes.
    pub nodes: Vec<NodeId>,
    /// Indices into [`Segmentation::states`].
    pub states: Vec<usize>,
    /// Weights that its nodes use, directly or through weight-only nodes, each once. Weights of globals are not
    /// included.
    pub weights: Vec<ValueId>,
    /// Blocks of one class are the same graph with different weights.
    pub class: ClassId,
    /// Whether it is the second half of a layer that was divided before its mixture.
    pub is_experts: bool,
    /// Which part of a layer that is divided by rows it is, and whose; `None` for other blocks.
    pub shard: Option<Shard>,
}

/// Blocks with equal class are the same graph with different weights. Numbered from 0 in order of first appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockKind {
    /// Computes the first hidden state from the model's inputs.
    Embedding,
    /// One token mixer (attention, convolution, recurrence) and the transformation that follows; numbered from 0.
    Layer(u32),
    /// Everything after the last layer or body block.
    Head,
    /// Everything before the first body block.
    Stem,
    /// A weighted unit of a model without token mixers; numbered from 0.
    Body(u32),
}

/// The values that cross between two neighbouring blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Boundary {
    /// Values produced before the boundary and read after it, in the order of production. Two kinds are not listed:
    /// outputs of globals, which each partition recomputes, and the shapes of earlier values that a later block may
    /// read, which [`crate::cut`] finds.
    pub values: Vec<ValueId>,
}

/// A state and the block that reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// The input, the output and how they relate.
    pub pair: StatePair,
    /// Index of the block that reads it.
    pub block: usize,
    /// The number of that block's layer; `None` where it is not a layer.
    pub layer: Option<u32>,
}

/// A model divided into blocks.
#[derive(Clone, Debug)]
pub struct Segmentation {
    /// Blocks in execution order.
    pub blocks: Vec<Block>,
    /// Nodes that more than one block needs and that each partition recomputes (masks, positions, rotary tables), in
    /// execution order.
    pub globals: Vec<NodeId>,
    /// Entry `i` lists the values that cross from block `i` to block `i + 1`.
    pub boundaries: Vec<Boundary>,
    /// States in the order of the model's inputs.
    pub states: Vec<BlockState>,
    /// Messages for the user about structure that was not clear.
    pub undecided: Vec<String>,
    /// The weights that each node uses.
    pub weights: WeightUse,
    pub(crate) block_of: Vec<Option<usize>>,
}

impl Segmentation {
    /// The block a node belongs to; `None` for globals and weight-only nodes.
    pub fn block_of(&self, node: NodeId) -> Option<usize> {
        self.block_of[node.0 as usize]
    }

    /// How many layers there are; one that is divided counts once.
    pub fn layer_count(&self) -> usize {
        let layer = |block: &Block| if let BlockKind::Layer(layer) = block.kind { Some(layer) } else { None };
        self.blocks.iter().filter_map(layer).collect::<BTreeSet<_>>().len()
    }

    /// Weights that globals use, each once.
    pub fn global_weights(&self) -> Vec<ValueId> {
        self.weights.used_by_all(self.globals.iter().copied())
    }
}
