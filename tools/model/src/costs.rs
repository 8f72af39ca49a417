//! What each block of a graph costs, in the planner's terms: bytes to hold, work per phase, activations alive.

use crate::states::PlannedState;
use crate::symbols::{Pass, symbols};
use hpp_graph::{BlockKind, Graph, NodeId, Segmentation, ValueId, infer};
use hpp_partition as plan;
use hpp_schema::{ModelInput, State, Symbols};
use std::collections::BTreeSet;

/// What the costs are counted for.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sequences in one pass.
    pub batch: u64,
    /// Tokens of context when one more is decoded.
    pub context: u64,
    /// Tokens of the prompt the predictions speak of.
    pub prompt: u64,
    /// Most tokens one prefill pass takes.
    pub chunk: u64,
}

/// The planner's view of every block.
pub fn blocks(
    graph: &Graph,
    segmentation: &Segmentation,
    states: &[PlannedState],
    inputs: &[ModelInput],
    load: Load,
) -> Vec<plan::Block> {
    let plain: Vec<State> = states.iter().map(|s| s.state.clone()).collect();
    let pass = |tokens, past| symbols(inputs, &plain, Pass { batch: load.batch, tokens, past });
    let counter = Counter {
        graph,
        segmentation,
        decode: pass(1, load.context.saturating_sub(1)),
        prompt: pass(load.prompt, 0),
        widest: pass(load.chunk, load.context.saturating_sub(load.chunk)),
    };
    let kv = |index: usize| -> u64 {
        let pasts: BTreeSet<ValueId> =
            segmentation.blocks[index].states.iter().map(|s| segmentation.states[*s].pair.past).collect();
        let held = states.iter().filter(|s| pasts.contains(&s.past));
        held.map(|s| s.state.bytes.0.saturating_mul(load.batch)).fold(0, u64::saturating_add)
    };
    (0..segmentation.blocks.len()).map(|index| counter.block(index, kv(index))).collect()
}

/// Counts one block after another under the same symbols.
struct Counter<'a> {
    graph: &'a Graph,
    segmentation: &'a Segmentation,
    decode: Symbols,
    prompt: Symbols,
    widest: Symbols,
}

impl Counter<'_> {
    fn block(&self, index: usize, kv_bytes: u64) -> plan::Block {
        let block = &self.segmentation.blocks[index];
        let weight = |id: &ValueId| (id.0, self.graph.weight(*id).map_or(0, |weight| weight.bytes));
        let entering = index.checked_sub(1).map(|before| &self.segmentation.boundaries[before].values);
        plan::Block {
            label: block.label.clone(),
            kind: kind(block.kind),
            weights: block.weights.iter().map(weight).collect(),
            kv_bytes,
            workspace_bytes: self.workspace(&block.nodes),
            boundary_bytes: entering.into_iter().flatten().map(|id| self.bytes(*id, &self.decode)).sum(),
            decode: self.work(&block.nodes, &self.decode, kv_bytes),
            prefill: self.work(&block.nodes, &self.prompt, 0),
        }
    }

    fn work(&self, nodes: &[NodeId], symbols: &Symbols, state_bytes: u64) -> plan::Work {
        let sum = |count: fn(&Graph, NodeId, &Symbols) -> Option<u64>| {
            nodes.iter().filter_map(|node| count(self.graph, *node, symbols)).fold(0, u64::saturating_add)
        };
        plan::Work { flops: sum(infer::flops), bytes: sum(infer::bytes_read).saturating_add(state_bytes) }
    }

    /// The most bytes any node reads and writes at once, twice, because the allocator rounds up and kernels want scratch.
    fn workspace(&self, nodes: &[NodeId]) -> u64 {
        let around = |id: &NodeId| {
            let node = self.graph.node(*id);
            node.reads().chain(node.writes()).map(|value| self.bytes(value, &self.widest)).fold(0, u64::saturating_add)
        };
        nodes.iter().map(around).max().unwrap_or(0).saturating_mul(2)
    }

    /// Bytes of an activation; 0 for weights, states and what has no known size.
    fn bytes(&self, id: ValueId, symbols: &Symbols) -> u64 {
        let value = self.graph.value(id);
        let is_state = || self.segmentation.states.iter().any(|s| s.pair.past == id || s.pair.present == Some(id));
        if self.graph.weight(id).is_some() || is_state() {
            return 0;
        }
        let sizes = value.shape.iter().flatten().map(|dim| dim.eval(symbols));
        let elements = sizes.into_iter().try_fold(1u64, |product, size| product.checked_mul(size?));
        value.shape.as_ref().and(elements).and_then(|n| value.dtype?.bytes_for(n)).unwrap_or(0)
    }
}

fn kind(kind: BlockKind) -> plan::BlockKind {
    match kind {
        BlockKind::Embedding => plan::BlockKind::Embedding,
        BlockKind::Layer(index) => plan::BlockKind::Layer(index),
        BlockKind::Head => plan::BlockKind::Head,
        BlockKind::Stem | BlockKind::Body(_) => plan::BlockKind::Other,
    }
}
