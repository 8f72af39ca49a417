//! How long a measurement will take, before any was made: bytes and operations over round rates. What the machine really does
//! shows while measuring (`progress`).

use crate::derive::Phase;
use crate::effort::Effort;
use crate::jobs::Estimate;
use hpp_model::{Analysis, Load};
use hpp_partition::{Block, Work};
use hpp_schema::Provider;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes per second of reading memory, of loading weights, and operations per second.
const BANDWIDTH: f64 = 15e9;
const LOADING: f64 = 0.6e9;
const ARITHMETIC: f64 = 100e9;
/// Seconds of a run whatever it computes.
const LAUNCH: f64 = 1e-4;
/// Seconds of a session whatever it loads.
const SESSION: f64 = 0.05;

/// Estimates for one model.
pub struct Roofline<'a> {
    analysis: &'a Analysis,
    effort: Effort,
    /// Bytes read between two runs.
    evict_bytes: u64,
    /// Costs by token count.
    blocks: RefCell<BTreeMap<u64, Vec<Block>>>,
}

impl<'a> Roofline<'a> {
    /// For a model, measured with this effort.
    pub fn new(analysis: &'a Analysis, effort: Effort, evict_bytes: u64) -> Self {
        Roofline { analysis, effort, evict_bytes, blocks: RefCell::default() }
    }

    /// The model.
    pub fn analysis(&self) -> &'a Analysis {
        self.analysis
    }

    /// Work of each block: one more token with which the context has `tokens`, or a pass of `tokens` into an empty one.
    pub fn work(&self, phase: Phase, tokens: u64, block: usize) -> Work {
        let mut cache = self.blocks.borrow_mut();
        let blocks = cache.entry(tokens).or_insert_with(|| blocks_at(self.analysis, tokens));
        blocks.get(block).map_or(Work::default(), |block| match phase {
            Phase::Decode => block.decode,
            Phase::Prefill => block.prefill,
        })
    }
}

/// The planner's view of every block at one token count, for decoding and for prefill.
pub fn blocks_at(analysis: &Analysis, tokens: u64) -> Vec<Block> {
    let context = analysis.context.max(tokens);
    let load = Load { batch: 1, context, prompt: tokens, new_tokens: 0, chunk: tokens };
    hpp_model::blocks(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, load)
}

impl Estimate for Roofline<'_> {
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
        let each = run + self.evict_bytes as f64 / BANDWIDTH;
        let repeats = self.effort.repeats(phase);
        let fewest = f64::from(repeats.warmup + repeats.min) * each;
        let most = f64::from(repeats.warmup + repeats.max) * each;
        let budget = repeats.budget_ms / 1e3 + f64::from(repeats.warmup) * each;
        budget.clamp(fewest, most.max(fewest))
    }
}
