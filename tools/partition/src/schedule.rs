//! The order of things in a pass: partitions, crossings between devices, visits of state, and the copies that feed streamed
//! blocks.
//!
//! Neighbours on one device whose weights are there for good merge into one partition. A streamed block is a partition of
//! its own, and so is every GPU block while state lies on the host; a problem may ask for more cuts. Where neighbours
//! compute on different devices, the boundary is copied, each of its tensors by itself; from one GPU to another it goes
//! through the host. State is copied so too: around each run where both phases compute on it away from home, or where each
//! pass makes another buffer of it; else a prompt's stays until all passes are over, a token's until its pass is.

use crate::moving::{Tensors, Visit, Way};
use crate::{Choice, KvHome, Phase, Place, Problem, Where};
use std::ops::Range;

/// One thing on the chain of a pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub what: What,
    /// Milliseconds while nothing else goes on.
    pub ms: f64,
    /// The blocks it is about.
    pub blocks: Range<usize>,
}

impl Step {
    /// Bytes it moves between host and GPU.
    pub fn bytes(&self) -> u64 {
        match self.what {
            What::To(_, bytes) | What::From(_, bytes) => bytes,
            _ => 0,
        }
    }
}

/// What a step does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum What {
    /// A partition computes.
    Compute(Place),
    /// A partition of one streamed block computes: it waits for its weights and frees their slot.
    Streamed(usize),
    /// Bytes go to a GPU; a copy of weights to it stands still meanwhile.
    To(usize, u64),
    /// Bytes come from a GPU.
    From(usize, u64),
    /// What no partition bears.
    Pass,
}

/// The copies that feed one GPU in a pass, in order: block and milliseconds.
pub(crate) type Copies = Vec<(usize, f64)>;

/// Partitions of a placement in one phase, by blocks.
pub(crate) fn partitions(problem: &Problem, places: &[Where]) -> Vec<Range<usize>> {
    let mut partitions: Vec<Range<usize>> = Vec::new();
    for (i, place) in places.iter().enumerate() {
        match partitions.last_mut() {
            Some(last) if merges(problem, i, places[i - 1], *place) => last.end = i + 1,
            _ => partitions.push(i..i + 1),
        }
    }
    partitions
}

/// Whether a block joins the partition of the one before it.
pub(crate) fn merges(problem: &Problem, block: usize, before: Where, place: Where) -> bool {
    before == place && may_merge(problem, place) && !problem.cuts.contains(&block)
}

/// Whether neighbours at this place are one partition.
pub(crate) fn may_merge(problem: &Problem, place: Where) -> bool {
    match place {
        Where::Cpu => true,
        Where::Resident(_) => problem.budget.kv == KvHome::Device,
        Where::Streamed(_) => false,
    }
}

/// The chain of one pass.
pub(crate) fn steps(problem: &Problem, choices: &[Choice], phase: Phase, pass: usize) -> Vec<Step> {
    let places = places(choices, phase);
    let mut steps = Vec::new();
    let mut last = Vec::new();
    for blocks in partitions(problem, &places) {
        let (first, place) = (blocks.start, places[blocks.start]);
        if first > 0 {
            cross(problem, places[first - 1], place, first, problem.boundary(first, phase, pass), &mut steps);
        }
        let visits = || blocks.clone().filter_map(|i| Some((i, problem.visit(i, choices[i], phase)?)));
        let ways = |i: usize, visit: Visit| problem.ways(i, visit, phase, pass);
        for (i, visit) in visits().filter(|(_, visit)| !visit.stays || phase == Phase::Decode) {
            go(problem, ways(i, visit)[0], i, &mut steps);
        }
        let ms = blocks.clone().map(|i| problem.block_ms(i, place, phase, pass)).sum::<f64>();
        steps.push(Step { what: compute(place), ms: problem.launch_ms(place) + ms, blocks: blocks.clone() });
        for (i, visit) in visits().filter(|(_, visit)| !visit.stays || phase == Phase::Decode) {
            go(problem, ways(i, visit)[1], i, if visit.stays { &mut last } else { &mut steps });
        }
    }
    steps.append(&mut last);
    steps.push(Step { what: What::Pass, ms: problem.pass_ms, blocks: 0..places.len() });
    steps
}

fn compute(place: Where) -> What {
    match place {
        Where::Cpu => What::Compute(Place::Cpu),
        Where::Resident(gpu) => What::Compute(Place::Gpu(gpu)),
        Where::Streamed(gpu) => What::Streamed(gpu),
    }
}

fn upload(problem: &Problem, gpu: usize, tensors: Tensors, blocks: Range<usize>) -> Step {
    Step { what: What::To(gpu, tensors.bytes), ms: problem.upload_ms(gpu, tensors), blocks }
}

fn download(problem: &Problem, gpu: usize, tensors: Tensors, blocks: Range<usize>) -> Step {
    Step { what: What::From(gpu, tensors.bytes), ms: problem.download_ms(gpu, tensors), blocks }
}

fn cross(problem: &Problem, from: Where, to: Where, block: usize, tensors: Tensors, steps: &mut Vec<Step>) {
    if from.gpu() != to.gpu() {
        go(problem, Way { from: from.gpu(), to: to.gpu(), tensors }, block, steps);
    }
}

/// Copies something that a block needs or leaves.
fn go(problem: &Problem, way: Way, block: usize, steps: &mut Vec<Step>) {
    steps.extend(way.from.map(|gpu| download(problem, gpu, way.tensors, block..block + 1)));
    steps.extend(way.to.map(|gpu| upload(problem, gpu, way.tensors, block..block + 1)));
}

/// Where each block computes in a phase.
pub(crate) fn places(choices: &[Choice], phase: Phase) -> Vec<Where> {
    choices.iter().map(|choice| choice.of(phase)).collect()
}

/// The copies of weights to each GPU in one pass.
pub(crate) fn copies(problem: &Problem, places: &[Where]) -> Vec<Copies> {
    let to = |gpu: usize| {
        let streamed = (0..places.len()).filter(move |i| places[*i] == Where::Streamed(gpu));
        streamed.map(|i| (i, problem.stream_ms(i, gpu))).collect()
    };
    (0..problem.gpus.len()).map(to).collect()
}

/// State that goes home once the prompt is in, to where decoding computes or to the host: what comes from GPUs first, then what
/// goes to them. It lies where the prompt is taken in until then, and is copied whole, because a cache is not contiguous in
/// tokens.
pub(crate) fn handover(problem: &Problem, choices: &[Choice]) -> Vec<Step> {
    let moved = || (0..choices.len()).filter_map(|i| Some((i, problem.handover(i, choices[i])?)));
    let from = moved().filter_map(|(i, way)| Some(download(problem, way.from?, way.tensors, i..i + 1)));
    let to = moved().filter_map(|(i, way)| Some(upload(problem, way.to?, way.tensors, i..i + 1)));
    from.chain(to).collect()
}

/// Times a token changes device on its way through one pass.
pub(crate) fn crossings(places: &[Where]) -> usize {
    places.windows(2).filter(|pair| pair[0].gpu() != pair[1].gpu()).count()
}
