//! Estimates the duration of measurements before any was made: bytes and operations over assumed rates. The progress display
//! scales them by the measured pace.

use crate::effort::{Effort, most_held};
use crate::missing::Estimate;
use hpp_model::{Analysis, Scenario};
use hpp_partition::Phase;
use hpp_partition::{BlockSpec, Work};
use hpp_schema::Provider;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// Assumed rates: bytes per second of reading memory and of loading weights, operations per second.
const BANDWIDTH: f64 = 15e9;
const LOADING: f64 = 0.6e9;
const ARITHMETIC: f64 = 100e9;
/// Constant part of a run, seconds.
const LAUNCH: f64 = 1e-4;
/// Constant part of loading a session, seconds.
const SESSION: f64 = 0.05;

/// Estimates for one model.
pub struct RooflineEstimator<'a> {
    analysis: &'a Analysis,
    effort: Effort,
    /// Bytes of the model's weights; about as many are read between two runs.
    all_weights: u64,
    /// Work of all blocks by token count.
    blocks: RefCell<BTreeMap<u64, Rc<[BlockSpec]>>>,
}

impl<'a> RooflineEstimator<'a> {
    /// For a model, measured with this effort.
    pub fn new(analysis: &'a Analysis, effort: Effort, all_weights: u64) -> Self {
        RooflineEstimator { analysis, effort, all_weights, blocks: RefCell::default() }
    }

    pub fn analysis(&self) -> &'a Analysis {
        self.analysis
    }

    /// Bytes that blocks hold in a case as one partition: weights, the filled part of their states, activations.
    pub fn held(&self, blocks: &Range<usize>, phase: Phase, tokens: u64) -> u64 {
        let facts = self.facts(tokens);
        let blocks = facts.get(blocks.clone()).unwrap_or_default();
        let weights: BTreeMap<u32, u64> = blocks.iter().flat_map(|block| &block.weights).copied().collect();
        let context = u128::from(self.analysis.context.max(tokens).max(1));
        let states: u128 = blocks.iter().map(|block| u128::from(block.kv_bytes) * u128::from(tokens) / context).sum();
        // Only one block's activations are alive at a time; those of a single token are negligible.
        let activations = match phase {
            Phase::Decode => 0,
            Phase::Prefill => blocks.iter().map(|block| block.workspace_bytes).max().unwrap_or(0),
        };
        let states = u64::try_from(states).unwrap_or(u64::MAX);
        weights.values().fold(activations.saturating_add(states), |sum, bytes| sum.saturating_add(*bytes))
    }

    /// Work of a block: a decoded token at a context of `tokens`, or a prefill of `tokens` into an empty context.
    pub fn work(&self, phase: Phase, tokens: u64, block: usize) -> Work {
        self.facts(tokens).get(block).map_or(Work::default(), |block| match phase {
            Phase::Decode => block.decode,
            Phase::Prefill => block.prefill,
        })
    }

    fn facts(&self, tokens: u64) -> Rc<[BlockSpec]> {
        let mut cache = self.blocks.borrow_mut();
        cache.entry(tokens).or_insert_with(|| blocks_at(self.analysis, tokens).into()).clone()
    }
}

/// The planner's view of every block at one token count, for decoding and for prefill.
pub fn blocks_at(analysis: &Analysis, tokens: u64) -> Vec<BlockSpec> {
    let context = analysis.context.max(tokens);
    let load = Scenario {
        batch: 1,
        context,
        prompt: tokens,
        new_tokens: 0,
        prefill_chunk: tokens,
        threads: 1,
        divides_prompts: false,
    };
    hpp_model::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load)
}

impl Estimate for RooflineEstimator<'_> {
    fn load(&self, blocks: &Range<usize>, _: Provider) -> f64 {
        let all = &self.analysis.segmentation.blocks[blocks.clone()];
        let weight = |id: &hpp_graph::ValueId| self.analysis.graph.weight(*id).map_or(0, |weight| weight.bytes);
        let bytes: u64 = all.iter().flat_map(|block| &block.weights).map(weight).sum();
        SESSION + bytes as f64 / LOADING
    }

    fn case(&self, blocks: &Range<usize>, _: Provider, phase: Phase, tokens: u64) -> f64 {
        let works = blocks.clone().map(|block| self.work(phase, tokens, block));
        let run: f64 =
            works.map(|w| (w.bytes as f64 / BANDWIDTH).max(w.flops as f64 / ARITHMETIC)).sum::<f64>() + LAUNCH;
        let each = run + self.all_weights as f64 / BANDWIDTH;
        let repeats = self.effort.repeats(phase);
        let fewest = f64::from(repeats.warmup + repeats.min) * each;
        let most = f64::from(repeats.warmup + repeats.max) * each;
        let budget = repeats.budget_ms / 1e3 + f64::from(repeats.warmup) * each;
        budget.clamp(fewest, most.max(fewest))
    }

    fn fits(&self, blocks: &Range<usize>, phase: Phase, tokens: u64) -> bool {
        self.held(blocks, phase, tokens) <= most_held(self.all_weights)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    #[test]
    fn a_case_holds_weights_states_and_activations() {
        let analysis = sample::analysis("genai/llama3-fp32-cpu");
        let roofline = |weights| RooflineEstimator::new(&analysis, Effort::Quick, weights);
        let held = |blocks, phase, tokens| roofline(0).held(&blocks, phase, tokens);
        let weights: u64 = analysis.segmentation.blocks[1].weights.iter().map(|id| weight(&analysis, *id)).sum();
        let states = |layers: u64, tokens| {
            let layer: u64 = analysis.states[..2].iter().map(|s| s.state.bytes.0).sum();
            layers * layer * tokens / analysis.context
        };
        assert_eq!(held(1..2, Phase::Decode, 64), weights + states(1, 64));
        assert_eq!(held(1..2, Phase::Decode, 128), weights + states(1, 128));
        let (one, two) = (held(1..2, Phase::Prefill, 64), held(1..3, Phase::Prefill, 64));
        let activations = one - held(1..2, Phase::Decode, 64);
        assert!(activations > 0, "a pass of many tokens has activations");
        assert_eq!(two - held(1..3, Phase::Decode, 64), activations, "one block's are gone when the next one's come");
        assert!(roofline(1 << 40).fits(&(1..3), Phase::Prefill, 1 << 22));
        assert!(!roofline(0).fits(&(1..3), Phase::Prefill, 1 << 22), "more than anyone has for so small a model");
    }

    fn weight(analysis: &Analysis, id: hpp_graph::ValueId) -> u64 {
        analysis.graph.weight(id).map_or(0, |weight| weight.bytes)
    }
}
