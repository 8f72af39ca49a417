//! Builds the segmentation of the rewritten graph: blocks in the order of the parts, with states and boundaries.

use super::parts::Place;
use super::{RowDivision, RowNode};
use crate::assign;
use crate::segmentation::Segmentation;
use crate::{Graph, NodeId, StatePair, ValueId, WeightUse, class};
use std::collections::HashMap;

/// A state in the rewritten graph: the names of its input and output.
struct NewState<'a> {
    old: &'a StatePair,
    past: String,
    present: Option<String>,
    reader: RowNode,
}

/// The name of a shard's part or copy of a value or state.
pub fn shard_name(name: &str, shard: usize) -> String {
    format!("{name}.shard{shard}")
}

impl RowDivision {
    /// The segmentation of the rewritten graph `graph`, whose nodes `nodes` describes in order. `old` is the segmentation of the original graph,
    /// `before`. A shard's part of a divided state is named like the state, with `.shard` and the shard's number appended.
    pub fn segmentation(&self, before: &Graph, old: &Segmentation, graph: &Graph, nodes: &[RowNode]) -> Segmentation {
        let weights = WeightUse::of(graph);
        let block_of = self.blocks_of(old, &weights, nodes);
        let mut blocks = self.parts.empty_blocks(old);
        for id in graph.node_ids() {
            if let Some(block) = block_of[id.0 as usize] {
                blocks[block].nodes.push(id);
            }
        }
        for block in &mut blocks {
            block.weights = weights.used_by_all(block.nodes.iter().copied());
        }
        let globals =
            graph.node_ids().filter(|id| block_of[id.0 as usize].is_none() && !weights.is_weight_only(*id)).collect();
        let boundaries = assign::boundaries(graph, &weights, &block_of, blocks.len());
        let pairs = self.state_pairs(before, old, graph, nodes);
        let mut undecided = old.undecided.clone();
        let states = assign::place_states(graph, pairs, &block_of, &mut blocks, &mut undecided);
        let mut segmentation = Segmentation { blocks, globals, boundaries, states, undecided, weights, block_of };
        class::classify(graph, &mut segmentation);
        segmentation
    }

    fn blocks_of(&self, old: &Segmentation, weights: &WeightUse, nodes: &[RowNode]) -> Vec<Option<usize>> {
        let block = |(index, node): (usize, &RowNode)| match (self.parts.place(*node), node) {
            _ if weights.is_weight_only(NodeId(index as u32)) => None,
            (Some(Place::Block(block)), _) => Some(block),
            (_, RowNode::Whole(id)) => old.block_of(*id).map(|block| self.parts.whole(block)),
            (_, RowNode::Copy(..) | RowNode::Sum(..)) => None,
        };
        nodes.iter().enumerate().map(block).collect()
    }

    /// The states in the order of the model's inputs.
    fn state_pairs(&self, before: &Graph, old: &Segmentation, graph: &Graph, nodes: &[RowNode]) -> Vec<StatePair> {
        let values: HashMap<&str, ValueId> = graph.value_ids().map(|id| (&*graph.value(id).name, id)).collect();
        let ids: HashMap<RowNode, NodeId> = nodes.iter().zip(0..).map(|(node, id)| (*node, NodeId(id))).collect();
        let new = old.states.iter().flat_map(|state| self.new_states(before, &state.pair));
        let pair = |state: NewState| {
            let present = state.present.and_then(|name| values.get(name.as_str()).copied());
            let past = *values.get(state.past.as_str())?;
            Some(StatePair { past, present, reader: *ids.get(&state.reader)?, change: state.old.change })
        };
        let mut pairs: Vec<StatePair> = new.filter_map(pair).collect();
        let rank: HashMap<ValueId, usize> = graph.inputs.iter().copied().zip(0..).collect();
        pairs.sort_by_key(|pair| rank.get(&pair.past).copied());
        pairs
    }

    /// The state unchanged, or one state for each shard.
    fn new_states<'a>(&self, before: &Graph, pair: &'a StatePair) -> Vec<NewState<'a>> {
        let name = |id: ValueId| before.value(id).name.clone();
        let (past, present) = (name(pair.past), pair.present.map(name));
        if !self.is_divided_past(pair.past) {
            return vec![NewState { old: pair, past, present, reader: RowNode::Whole(pair.reader) }];
        }
        let of_shard = |shard: usize| NewState {
            old: pair,
            past: shard_name(&past, shard),
            present: present.as_ref().map(|present| shard_name(present, shard)),
            reader: RowNode::Copy(pair.reader, shard),
        };
        (0..self.shards).map(of_shard).collect()
    }
}
