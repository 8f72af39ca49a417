//! What each block of a graph costs, in the planner's terms: bytes to hold, work per phase, activations alive.

use crate::states::PlannedState;
use crate::symbols::{Pass, symbols};
use hpp_graph::{BlockKind, Graph, NodeId, Segmentation, ValueId, infer};
use hpp_partition as plan;
use hpp_schema::{ModelInput, State, StateUpdate, Symbols};
use std::collections::BTreeSet;

/// What the costs are counted for.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Sequences in one pass.
    pub batch: u64,
    /// Tokens a sequence may grow to: what memory is planned for.
    pub context: u64,
    /// Tokens of the prompt the predictions speak of.
    pub prompt: u64,
    /// Tokens generated after it.
    pub new_tokens: u64,
    /// Most tokens one prefill pass takes.
    pub chunk: u64,
}

impl Load {
    /// Tokens of context at which a decoded token is priced: the middle of the answer.
    pub fn decode_context(&self) -> u64 {
        self.prompt.saturating_add(self.new_tokens / 2).clamp(1, self.context.max(1))
    }
}

/// The planner's view of every block. Of streaming it knows only how many bytes there are.
pub fn blocks(
    graph: &Graph,
    segmentation: &Segmentation,
    states: &[PlannedState],
    inputs: &[ModelInput],
    load: Load,
) -> Vec<plan::Block> {
    let counter = Counter::new(graph, segmentation, states, inputs, load.batch);
    // Where nothing is carried from pass to pass, a token costs a pass over all there is so far.
    let decode = match states.is_empty() {
        true => Moment::new(&counter, load.decode_context(), 0),
        false => Moment::new(&counter, 1, load.decode_context() - 1),
    };
    let one = Moment::new(&counter, 1, load.decode_context() - 1);
    let prompt = Moment::new(&counter, load.prompt, 0);
    let widest = Moment::new(&counter, load.chunk, load.context.saturating_sub(load.chunk));
    let block = |index: usize| {
        let block = &segmentation.blocks[index];
        let weight = |id: &ValueId| (id.0, graph.weight(*id).map_or(0, |weight| weight.bytes));
        let weights: Vec<(u32, u64)> = block.weights.iter().map(weight).collect();
        let before = index.checked_sub(1).map(|before| &segmentation.boundaries[before].values);
        let entering = || before.into_iter().flatten().copied().filter(|id| !counter.is_at_home(*id));
        plan::Block {
            label: block.label.clone(),
            kind: kind(block.kind),
            streamed: plan::Streamed::whole(weights.iter().map(|(_, bytes)| bytes).sum()),
            weights,
            kv_bytes: counter.state_bytes(index, u64::MAX),
            kv_tensors: counter.states_of(index).count() as u64,
            kv_grows: counter.grows(index),
            kv_filled: counter.filled(index, load.context),
            workspace_bytes: counter.workspace(&block.nodes, &widest.symbols),
            boundary_bytes: entering().map(|id| counter.bytes(id, &one.symbols)).sum(),
            boundary_tensors: entering().count() as u64,
            decode: counter.work(index, &decode),
            prefill: counter.work(index, &prompt),
        }
    };
    (0..segmentation.blocks.len()).map(block).collect()
}

/// A pass at one moment of a sequence's life.
pub(crate) struct Moment {
    /// Tokens in the states when it ends.
    total: u64,
    /// Sizes of everything in it.
    symbols: Symbols,
}

impl Moment {
    /// A pass of `tokens` after `past` others.
    pub fn new(counter: &Counter, tokens: u64, past: u64) -> Self {
        let pass = Pass { batch: counter.batch, tokens, past };
        Moment { total: past.saturating_add(tokens), symbols: symbols(counter.inputs, &counter.plain, pass) }
    }
}

/// Counts what blocks compute and read.
pub(crate) struct Counter<'a> {
    graph: &'a Graph,
    segmentation: &'a Segmentation,
    states: &'a [PlannedState],
    inputs: &'a [ModelInput],
    plain: Vec<State>,
    batch: u64,
}

impl<'a> Counter<'a> {
    pub fn new(
        graph: &'a Graph,
        segmentation: &'a Segmentation,
        states: &'a [PlannedState],
        inputs: &'a [ModelInput],
        batch: u64,
    ) -> Self {
        let plain = states.iter().map(|s| s.state.clone()).collect();
        Counter { graph, segmentation, states, inputs, plain, batch }
    }

    /// Operations of a block in a pass, and bytes of weights and state it reads.
    pub fn work(&self, index: usize, moment: &Moment) -> plan::Work {
        let nodes = &self.segmentation.blocks[index].nodes;
        let sum = |count: fn(&Graph, NodeId, &Symbols) -> Option<u64>| {
            let counts = nodes.iter().filter_map(|node| count(self.graph, *node, &moment.symbols));
            counts.fold(0, u64::saturating_add)
        };
        let states = self.state_bytes(index, moment.total);
        plan::Work { flops: sum(infer::flops), bytes: sum(infer::bytes_read).saturating_add(states) }
    }

    /// Bytes a block's states hold after so many tokens, at most their capacity, for the whole batch.
    fn state_bytes(&self, index: usize, tokens: u64) -> u64 {
        let bytes = |planned: &PlannedState| match planned.state.update {
            StateUpdate::InPlace { capacity, .. } | StateUpdate::Append { capacity, .. } if tokens < capacity => {
                let part = u128::from(planned.state.bytes.0) * u128::from(tokens) / u128::from(capacity);
                u64::try_from(part).unwrap_or(u64::MAX)
            }
            _ => planned.state.bytes.0,
        };
        let held = self.states_of(index).map(|planned| bytes(planned).saturating_mul(self.batch));
        held.fold(0, u64::saturating_add)
    }

    /// What there is of a block's states, unless they are updated in place.
    fn grows(&self, index: usize) -> Option<plan::GrowingState> {
        let in_place = |planned: &PlannedState| matches!(planned.state.update, StateUpdate::InPlace { .. });
        let [none, one] = [0, 1].map(|tokens| self.state_bytes(index, tokens));
        let grows = plan::GrowingState { fixed: none, token: one.saturating_sub(none) };
        (!self.states_of(index).all(in_place)).then_some(grows)
    }

    /// What is copied of a block's states that are updated in place, where only what is filled is.
    fn filled(&self, index: usize, context: u64) -> Option<plan::FilledState> {
        let of = |any_capacity: bool| {
            let states = self.states_of(index).filter(|planned| planned.state.any_capacity == any_capacity);
            states.map(|planned| planned.state.bytes.0.saturating_mul(self.batch)).fold(0, u64::saturating_add)
        };
        let (fixed, grows) = (of(false), of(true));
        (grows > 0 && context > 0).then(|| plan::FilledState { fixed, token: grows / context, capacity: context })
    }

    /// A block's states.
    fn states_of(&self, index: usize) -> impl Iterator<Item = &PlannedState> {
        let own = &self.segmentation.blocks[index].states;
        let pasts: BTreeSet<ValueId> = own.iter().map(|s| self.segmentation.states[*s].pair.past).collect();
        self.states.iter().filter(move |planned| pasts.contains(&planned.past))
    }

    /// The most bytes any node reads and writes at once, twice, because the allocator rounds up and kernels want scratch.
    fn workspace(&self, nodes: &[NodeId], symbols: &Symbols) -> u64 {
        let around = |id: &NodeId| {
            let node = self.graph.node(*id);
            node.reads().chain(node.writes()).map(|value| self.bytes(value, symbols)).fold(0, u64::saturating_add)
        };
        nodes.iter().map(around).max().unwrap_or(0).saturating_mul(2)
    }

    /// Whether it lies where it is used, as weights and states do.
    fn is_at_home(&self, id: ValueId) -> bool {
        let is_state = || self.segmentation.states.iter().any(|s| s.pair.past == id || s.pair.present == Some(id));
        self.graph.weight(id).is_some() || is_state()
    }

    /// Bytes of an activation; 0 for weights, states and what has no known size.
    fn bytes(&self, id: ValueId, symbols: &Symbols) -> u64 {
        let value = self.graph.value(id);
        if self.is_at_home(id) {
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

#[cfg(test)]
mod tests;
