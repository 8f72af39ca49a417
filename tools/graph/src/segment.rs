//! Divides a model into blocks by structure: embedding, layers in order, head; or stem, body and head without layers.
//!
//! Names decide nothing here but ties. Knows no files, devices or budgets.

use crate::assign;
use crate::blocks::{self, Cuts};
use crate::class::{self, ClassId};
use crate::flow::Flow;
use crate::spine::Spine;
use crate::{Graph, NodeId, StatePair, ValueId, WeightUse, find_states};

/// A repeated unit of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// `embedding`, `layers.3`, `head`; `stem`, `blocks.3` in models without layers.
    pub label: String,
    /// What it is.
    pub kind: BlockKind,
    /// Its nodes, in execution order, weight-only nodes aside.
    pub nodes: Vec<NodeId>,
    /// Indices into [`Segmentation::states`].
    pub states: Vec<usize>,
    /// Weights its nodes draw on, each once, globals' weights aside.
    pub weights: Vec<ValueId>,
    /// Blocks of one class are the same graph with other weights.
    pub class: ClassId,
}

/// What a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum BlockKind {
    /// Makes the hidden state.
    Embedding,
    /// Mixes tokens once and transforms them; numbered from 0.
    Layer(u32),
    /// Everything after the last layer or body block.
    Head,
    /// What comes before the first body block.
    Stem,
    /// A weighted unit of a model without token mixers; numbered from 0.
    Body(u32),
}

/// The values that cross between two neighbouring blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Boundary {
    /// Values made before and read after, in the order they are made. Globals are not among them: they are recomputed.
    /// Nor are the few tiny shapes a later block may need of an earlier one's values: [`crate::cut`] finds those.
    pub values: Vec<ValueId>,
}

/// A state and the block that carries it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockState {
    /// Past, present and how they relate.
    pub pair: StatePair,
    /// Index of the block that reads it.
    pub block: usize,
    /// Its layer number, where that block is a layer.
    pub layer: Option<u32>,
}

/// A model divided into blocks.
#[derive(Clone, Debug)]
pub struct Segmentation {
    /// Blocks in execution order.
    pub blocks: Vec<Block>,
    /// Light nodes more than one block needs, in execution order.
    pub globals: Vec<NodeId>,
    /// What crosses between block `i` and block `i + 1`.
    pub boundaries: Vec<Boundary>,
    /// States in the order of the model's inputs.
    pub states: Vec<BlockState>,
    /// What could not be decided, for people.
    pub undecided: Vec<String>,
    /// Weights behind every node.
    pub weights: WeightUse,
    pub(crate) block_of: Vec<Option<usize>>,
}

impl Segmentation {
    /// The block a node belongs to; `None` for globals and weight-only nodes.
    pub fn block_of(&self, node: NodeId) -> Option<usize> {
        self.block_of[node.0 as usize]
    }

    /// How many layers there are.
    pub fn layer_count(&self) -> usize {
        self.blocks.iter().filter(|b| matches!(b.kind, BlockKind::Layer(_))).count()
    }

    /// Weights that globals draw on, each once.
    pub fn global_weights(&self) -> Vec<ValueId> {
        self.weights.drawn_by_all(self.globals.iter().copied())
    }
}

/// Divides a model into blocks. Never fails: what has no structure we know becomes one block, with a note.
pub fn segment(graph: &Graph) -> Segmentation {
    let weights = WeightUse::of(graph);
    let states = find_states(graph, &weights);
    let spine = Spine::new(Flow::new(graph, &weights, &states), &states);
    let cuts = spine.as_ref().map_or_else(Cuts::nothing, |spine| blocks::choose_cuts(spine, &states));
    let assignment = assign::assign(graph, &weights, spine.as_ref(), &cuts);
    let mut segmentation = assign::build(graph, weights.clone(), states, cuts, assignment);
    class::classify(graph, &mut segmentation);
    segmentation
}
