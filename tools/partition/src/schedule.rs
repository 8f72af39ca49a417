//! The order of things in a pass: partitions, crossings between devices, visits of state, and the copies that feed streamed
//! blocks.
//!
//! Neighbours on one device whose weights are there for good merge into one partition. A streamed block is a partition of
//! its own, and so is every GPU block while state lies on the host; a problem may ask for more cuts. Where neighbours
//! compute on different devices, the boundary is copied, each of its tensors by itself; from one GPU to another it goes
//! through the host. State is copied so too.

use crate::moving::Tensors;
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
pub(crate) fn steps(problem: &Problem, places: &[Where], phase: Phase, pass: usize) -> Vec<Step> {
    let mut steps = Vec::new();
    for blocks in partitions(problem, places) {
        let (first, place) = (blocks.start, places[blocks.start]);
        if first > 0 {
            cross(problem, places[first - 1], place, first, problem.boundary(first, phase, pass), &mut steps);
        }
        let visit = place.gpu().zip(problem.visiting(first));
        steps.extend(visit.map(|(gpu, state)| upload(problem, gpu, state, blocks.clone())));
        let ms = blocks.clone().map(|i| problem.block_ms(i, place, phase, pass)).sum::<f64>();
        steps.push(Step { what: compute(place), ms: problem.launch_ms(place) + ms, blocks: blocks.clone() });
        steps.extend(visit.map(|(gpu, state)| download(problem, gpu, state, blocks.clone())));
    }
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
        steps.extend(from.gpu().map(|gpu| download(problem, gpu, tensors, block..block + 1)));
        steps.extend(to.gpu().map(|gpu| upload(problem, gpu, tensors, block..block + 1)));
    }
}

/// The copies of weights to each GPU in one pass.
pub(crate) fn copies(problem: &Problem, places: &[Where]) -> Vec<Copies> {
    let to = |gpu: usize| {
        let streamed = (0..places.len()).filter(move |i| places[*i] == Where::Streamed(gpu));
        streamed.map(|i| (i, problem.stream_ms(i, gpu))).collect()
    };
    (0..problem.gpus.len()).map(to).collect()
}

/// State that moves once the prompt is in, to where decoding computes: what comes from GPUs first, then what goes to them.
/// It lies where the prompt is taken in until then, and is copied whole, because a cache is not contiguous in tokens.
pub(crate) fn handover(problem: &Problem, choices: &[Choice]) -> Vec<Step> {
    let moved = || (0..choices.len()).filter_map(|i| Some((i, problem.moving(i, choices[i])?)));
    let from = moved().filter_map(|(i, state)| Some(download(problem, choices[i].prefill.gpu()?, state, i..i + 1)));
    let to = moved().filter_map(|(i, state)| Some(upload(problem, choices[i].decode.gpu()?, state, i..i + 1)));
    from.chain(to).collect()
}

/// Times a token changes device on its way through one pass.
pub(crate) fn crossings(places: &[Where]) -> usize {
    places.windows(2).filter(|pair| pair[0].gpu() != pair[1].gpu()).count()
}
