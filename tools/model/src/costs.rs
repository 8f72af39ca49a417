//! Work of each block for the planner: operations, bytes of weights and state, activations. Times are added later
//! ([`crate::problem`]).

use crate::Analysis;
use crate::problem::{largest_widened, session_copies};
use crate::rows;
use crate::states::PlannedState;
use crate::symbols::{PassSize, symbol_values};
use hpp_graph::{BlockKind, Graph, Mixture, Node, NodeId, Origin, Segmentation, ValueId, WeightUse, infer};
use hpp_partition as plan;
use hpp_schema::{ModelInput, State, StateUpdate, Symbols};
use std::collections::BTreeSet;

/// The workload that costs are computed for.
#[derive(Clone, Copy, Debug)]
pub struct Scenario {
    /// Sequences in one run: rows of the input tensors.
    pub batch: u64,
    /// Longest sequence, tokens: memory is planned for it.
    pub context: u64,
    /// Prompt length that predictions assume, tokens.
    pub prompt: u64,
    /// Answer length that predictions assume, tokens.
    pub new_tokens: u64,
    /// Limit on the tokens of one prefill pass.
    pub prefill_chunk: u64,
    /// Threads that share the work of one operator on the CPU: some kernels take memory for each.
    pub threads: u64,
    /// Whether passes take parts of a prompt. A model that runs once takes its whole input, whatever that needs.
    pub divides_prompts: bool,
}

impl Scenario {
    /// Context length at which the time of a generated token is computed: the middle of the answer.
    pub fn decode_context(&self) -> u64 {
        self.prompt.saturating_add(self.new_tokens / 2).clamp(1, self.context.max(1))
    }
}

/// The planner's view of every block. `streamed` is only a default, all weights of the block; [`crate::problem`] sets
/// the exact value.
pub fn blocks(
    graph: &Graph,
    segmentation: &Segmentation,
    states: &[PlannedState],
    inputs: &[ModelInput],
    scenario: Scenario,
) -> Vec<plan::BlockSpec> {
    let counter = CostCounter::new(graph, segmentation, states, inputs, scenario.batch);
    // Without states each token recomputes the whole sequence.
    let decode = match states.is_empty() {
        true => PassPoint::new(&counter, scenario.decode_context(), 0),
        false => PassPoint::new(&counter, 1, scenario.decode_context() - 1),
    };
    let one_token = PassPoint::new(&counter, 1, scenario.decode_context() - 1);
    let prompt = PassPoint::new(&counter, scenario.prompt, 0);
    let widest = counter.widest(scenario);
    let block = |index: usize| {
        let block = &segmentation.blocks[index];
        let weight = |id: &ValueId| (id.0, graph.weight(*id).map_or(0, |weight| weight.bytes));
        let weights: Vec<(u32, u64)> = block.weights.iter().map(weight).collect();
        let entering = counter.entering(index);
        // Twice, as all activations count.
        let folded = counter.folded(&block.nodes, &widest.symbols).saturating_mul(2);
        let of_passes = counter.workspace(&block.nodes, &widest.symbols, scenario);
        plan::BlockSpec {
            label: block.label.clone(),
            kind: kind(block.kind),
            streamed: plan::Streamed::whole(weights.iter().map(|(_, bytes)| bytes).sum()),
            experts: Mixture::of(graph, block).map(|mixture| plan::Experts {
                bytes: mixture.bytes(graph),
                count: mixture.count,
                active: mixture.expected(graph),
            }),
            weights,
            kv_bytes: counter.state_memory(index),
            kv_tensors: counter.states_of(index).count() as u64,
            kv_grows: counter.growth(index),
            // Only `Analysis::with_experts_apart` makes such blocks.
            kept_on_host: block.is_experts,
            assigned: None,
            needs_gpu: false,
            kv_filled: counter.filled_state(index, scenario.context),
            workspace_bytes: of_passes.saturating_add(folded),
            folded_bytes: folded,
            widened_bytes: largest_widened(graph, block.weights.iter().copied()),
            session_bytes: session_copies(graph, &block.nodes),
            score_bytes: counter.scores(&block.nodes, &widest.symbols, scenario),
            boundary_bytes: entering.iter().map(|id| counter.bytes(*id, &one_token.symbols)).sum(),
            boundary_tensors: entering.len() as u64,
            decode: counter.work(index, &decode),
            prefill: counter.work(index, &prompt),
        }
    };
    (0..segmentation.blocks.len()).map(block).collect()
}

/// Host memory for the activations of the widest pass of a scenario, bytes: of the block that needs the most.
pub fn widest_workspace(analysis: &Analysis, scenario: Scenario) -> u64 {
    let Analysis { graph, segmentation, states, inputs, .. } = analysis;
    let counter = CostCounter::new(graph, segmentation, states, inputs, scenario.batch);
    let symbols = counter.widest(scenario).symbols;
    let blocks = segmentation.blocks.iter();
    let bytes =
        |nodes| counter.workspace(nodes, &symbols, scenario).saturating_add(counter.scores(nodes, &symbols, scenario));
    blocks.map(|block| bytes(&block.nodes)).max().unwrap_or(0)
}

/// A pass at a given length of the sequence.
pub(crate) struct PassPoint {
    /// Tokens in the states after the pass.
    total: u64,
    /// Values of the symbolic dimensions.
    symbols: Symbols,
}

impl PassPoint {
    /// A pass of `tokens` new tokens after `past` tokens.
    pub fn new(counter: &CostCounter, tokens: u64, past: u64) -> Self {
        let pass = PassSize { batch: counter.batch, tokens, past };
        PassPoint { total: past.saturating_add(tokens), symbols: symbol_values(counter.inputs, &counter.plain, pass) }
    }
}

/// Computes work and bytes of blocks.
pub(crate) struct CostCounter<'a> {
    graph: &'a Graph,
    segmentation: &'a Segmentation,
    states: &'a [PlannedState],
    inputs: &'a [ModelInput],
    plain: Vec<State>,
    /// For each node, whether it computes on constants alone.
    folded: Vec<bool>,
    batch: u64,
}

impl<'a> CostCounter<'a> {
    pub fn new(
        graph: &'a Graph,
        segmentation: &'a Segmentation,
        states: &'a [PlannedState],
        inputs: &'a [ModelInput],
        batch: u64,
    ) -> Self {
        let plain = states.iter().map(|s| s.state.clone()).collect();
        CostCounter { graph, segmentation, states, inputs, plain, folded: folded(graph), batch }
    }

    /// Values that enter a block from the block before, which may be on another device. What a shard reads of its own blocks stays on its device.
    fn entering(&self, index: usize) -> Vec<ValueId> {
        let crossing = match self.segmentation.blocks[index].shard {
            Some(_) => rows::entering(self.graph, self.segmentation, index),
            None => {
                let before = index.checked_sub(1).map(|before| &self.segmentation.boundaries[before].values);
                before.into_iter().flatten().copied().collect()
            }
        };
        crossing.into_iter().filter(|id| !self.is_stored(*id)).collect()
    }

    /// Operations of a block in a pass, and bytes of weights and state that it reads.
    pub fn work(&self, index: usize, pass: &PassPoint) -> plan::Work {
        let nodes = &self.segmentation.blocks[index].nodes;
        let sum = |count: fn(&Graph, NodeId, &Symbols) -> Option<u64>| {
            let counts = nodes.iter().filter_map(|node| count(self.graph, *node, &pass.symbols));
            counts.fold(0, u64::saturating_add)
        };
        let states = self.state_bytes(index, pass.total);
        plan::Work { flops: sum(infer::flops), bytes: sum(infer::bytes_read).saturating_add(states) }
    }

    /// Bytes of memory that a block's states take, for the whole batch.
    fn state_memory(&self, index: usize) -> u64 {
        let held = self.states_of(index).map(|planned| planned.state.memory().saturating_mul(self.batch));
        held.fold(0, u64::saturating_add)
    }

    /// Bytes of a block's states after `tokens` tokens, at most their capacity, for the whole batch. A state that slides counts as full, because
    /// costs that grow by a token know no limit.
    fn state_bytes(&self, index: usize, tokens: u64) -> u64 {
        let bytes_of_one = |planned: &PlannedState| match planned.state.update {
            StateUpdate::InPlace { capacity, .. } | StateUpdate::Append { capacity, .. } if tokens < capacity => {
                let part = u128::from(planned.state.bytes.0) * u128::from(tokens) / u128::from(capacity);
                u64::try_from(part).unwrap_or(u64::MAX)
            }
            _ => planned.state.bytes.0,
        };
        let held = self.states_of(index).map(|planned| bytes_of_one(planned).saturating_mul(self.batch));
        held.fold(0, u64::saturating_add)
    }

    /// Growth of a block's states per token; `None` if all of them are updated in place.
    fn growth(&self, index: usize) -> Option<plan::GrowingState> {
        let in_place = |planned: &PlannedState| matches!(planned.state.update, StateUpdate::InPlace { .. });
        let [empty, one_token] = [0, 1].map(|tokens| self.state_bytes(index, tokens));
        let growth = plan::GrowingState { fixed: empty, token: one_token.saturating_sub(empty) };
        (!self.states_of(index).all(in_place)).then_some(growth)
    }

    /// Bytes to copy for a block's in-place states. Where the operator accepts any capacity, only the filled part is copied.
    fn filled_state(&self, index: usize, context: u64) -> Option<plan::FilledState> {
        let bytes = |any_capacity: bool| {
            let states = self.states_of(index).filter(|planned| planned.state.any_capacity == any_capacity);
            states.map(|planned| planned.state.bytes.0.saturating_mul(self.batch)).fold(0, u64::saturating_add)
        };
        let (fixed, growing) = (bytes(false), bytes(true));
        (growing > 0 && context > 0).then(|| plan::FilledState { fixed, token: growing / context, capacity: context })
    }

    /// A block's states.
    fn states_of(&self, index: usize) -> impl Iterator<Item = &PlannedState> {
        let own = &self.segmentation.blocks[index].states;
        let pasts: BTreeSet<ValueId> = own.iter().map(|s| self.segmentation.states[*s].pair.past).collect();
        self.states.iter().filter(move |planned| pasts.contains(&planned.past))
    }

    /// The pass with the most tokens, at the end of the context.
    fn widest(&self, scenario: Scenario) -> PassPoint {
        PassPoint::new(self, scenario.prefill_chunk, scenario.context.saturating_sub(scenario.prefill_chunk))
    }

    /// Memory that the operators need while they compute: the most that one of them needs, twice, because the allocator rounds up and
    /// other kernels need scratch memory too. Without what is [folded](Self::folded).
    fn workspace(&self, nodes: &[NodeId], symbols: &Symbols, scenario: Scenario) -> u64 {
        let is_counted = |value: &ValueId| !self.is_folded(*value);
        let needed = |id: &NodeId| {
            let node = self.graph.node(*id);
            let operands = node.reads().chain(node.writes()).filter(is_counted);
            let operands = operands.map(|value| self.bytes(value, symbols));
            let scratch = infer::expert_scratch(self.graph, *id, symbols, scenario.threads).unwrap_or(0);
            operands.fold(scratch, u64::saturating_add)
        };
        nodes.iter().map(needed).max().unwrap_or(0).saturating_mul(2)
    }

    /// Bytes of the values that a block's passes read and that depend on weights alone. Passes compute these values only where weights
    /// are inputs of a session.
    fn folded(&self, nodes: &[NodeId], symbols: &Symbols) -> u64 {
        let passes = nodes
            .iter()
            .map(|id| self.graph.node(*id))
            .filter(|node| !node.writes().any(|value| self.is_folded(value)));
        let read: BTreeSet<ValueId> = passes.flat_map(Node::reads).filter(|value| self.is_folded(*value)).collect();
        read.into_iter().map(|value| self.bytes(value, symbols)).fold(0, u64::saturating_add)
    }

    /// Whether ONNX Runtime computes a value when it creates a session, because it depends on constants alone.
    fn is_folded(&self, id: ValueId) -> bool {
        matches!(self.graph.value(id).origin, Origin::Node { node, .. } if self.folded[node.0 as usize])
    }

    /// The largest scores of an attention on the host, whose memory the allocator keeps for the next attention. Counted twice, as in
    /// [`workspace`](Self::workspace), if prompts are divided into passes; once for a model without states that takes its whole input (measured: 5.0 times
    /// the scores, of which `workspace` counts 4.5); not at all for a model with states that takes its whole input, whatever memory that needs.
    fn scores(&self, nodes: &[NodeId], symbols: &Symbols, scenario: Scenario) -> u64 {
        let scores = nodes.iter().filter_map(|id| infer::score_bytes(self.graph, *id, symbols));
        let times = match scenario.divides_prompts {
            true => 2,
            false => u64::from(self.states.is_empty()),
        };
        scores.max().unwrap_or(0).saturating_mul(times)
    }

    /// Whether a value is a weight or state, which is stored on the device that uses it and never crosses a boundary.
    fn is_stored(&self, id: ValueId) -> bool {
        let is_state = || self.segmentation.states.iter().any(|s| s.pair.past == id || s.pair.present == Some(id));
        self.graph.weight(id).is_some() || is_state()
    }

    /// Bytes of an activation; 0 for weights, states and values of unknown size.
    fn bytes(&self, id: ValueId, symbols: &Symbols) -> u64 {
        let value = self.graph.value(id);
        if self.is_stored(id) {
            return 0;
        }
        let sizes = value.shape.iter().flatten().map(|dim| dim.eval(symbols));
        let elements = sizes.into_iter().try_fold(1u64, |product, size| product.checked_mul(size?));
        value.shape.as_ref().and(elements).and_then(|n| value.dtype?.bytes_for(n)).unwrap_or(0)
    }
}

/// For each node, whether ONNX Runtime computes it when it creates a session, because it computes on constants alone. Quantized weights stay as
/// they are.
fn folded(graph: &Graph) -> Vec<bool> {
    let weights = WeightUse::of(graph);
    let mut folded = vec![false; graph.nodes.len()];
    // Nodes are in topological order.
    for id in graph.node_ids() {
        let is_known = |read: ValueId| match graph.value(read).origin {
            Origin::Node { node, .. } => folded[node.0 as usize],
            _ => graph.weight(read).is_some(),
        };
        let node = graph.node(id);
        let is_folded = weights.is_weight_only(id) && node.op_type != "DequantizeLinear" && node.reads().all(is_known);
        folded[id.0 as usize] = is_folded;
    }
    folded
}

fn kind(kind: BlockKind) -> plan::BlockRole {
    match kind {
        BlockKind::Embedding => plan::BlockRole::Embedding,
        BlockKind::Layer(index) => plan::BlockRole::Layer(index),
        BlockKind::Head => plan::BlockRole::Head,
        BlockKind::Stem | BlockKind::Body(_) => plan::BlockRole::Other,
    }
}

#[cfg(test)]
mod tests;
