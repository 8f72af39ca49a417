//! The schedule of a pass: partitions, crossings between devices, transfers of state, and the copies of streamed weights.
//!
//! Neighbours that are resident on one device merge into one partition. A streamed block is its own partition, and so is every GPU
//! block while state is kept on the host; a problem may require more cuts. If neighbours compute on different devices, each boundary
//! tensor is copied separately, from GPU to GPU through the host. State that is not kept on the computing device is copied too:
//! around each run, if both phases compute away from its home or each pass returns it in a new buffer; otherwise it stays on the
//! computing device until all prefill passes, or the decode pass, are done.

use crate::transfer::{StateSwap, Tensors, Way};
use crate::{Choice, KvHome, Phase, Place, Problem, Where};
use std::ops::Range;

/// One step of the sequential chain of a pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Step {
    pub kind: StepKind,
    /// Milliseconds without contention.
    pub ms: f64,
    /// The blocks it belongs to.
    pub blocks: Range<usize>,
}

impl Step {
    /// Bytes copied between host and GPU.
    pub fn bytes(&self) -> u64 {
        match self.kind {
            StepKind::To(_, bytes) | StepKind::From(_, bytes) => bytes,
            _ => 0,
        }
    }
}

/// The action of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepKind {
    /// A partition computes.
    Compute(Place),
    /// A streamed block computes: it waits for its weights, and frees their slot afterwards.
    Streamed(usize),
    /// Copies bytes to a GPU; pauses the copy of weights to it.
    To(usize, u64),
    /// Copies bytes from a GPU.
    From(usize, u64),
    /// Overhead of a pass outside its partitions.
    Pass,
}

/// The copies of weights to one GPU in a pass, in order, as (block, milliseconds).
pub(crate) type Copies = Vec<(usize, f64)>;

/// The partitions of a placement in one phase, as ranges of blocks.
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

/// Whether a block joins the partition of the block before it.
pub(crate) fn merges(problem: &Problem, block: usize, before: Where, place: Where) -> bool {
    before == place && may_merge(problem, place) && !problem.cuts.contains(&block)
}

/// Whether neighbours at this place merge into one partition.
pub(crate) fn may_merge(problem: &Problem, place: Where) -> bool {
    match place {
        Where::Cpu => true,
        Where::Resident(_) => problem.budget.kv == KvHome::Device,
        Where::Streamed(_) => false,
    }
}

/// The steps of one pass.
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
        let ways = |i: usize, visit: StateSwap| problem.ways(i, visit, phase, pass);
        for (i, visit) in visits().filter(|(_, visit)| !visit.stays || phase == Phase::Decode) {
            go(problem, ways(i, visit)[0], i, &mut steps);
        }
        let ms = blocks.clone().map(|i| problem.block_ms(i, place, phase, pass)).sum::<f64>();
        steps.push(Step { kind: compute(place), ms: problem.launch_ms(place) + ms, blocks: blocks.clone() });
        for (i, visit) in visits().filter(|(_, visit)| !visit.stays || phase == Phase::Decode) {
            go(problem, ways(i, visit)[1], i, if visit.stays { &mut last } else { &mut steps });
        }
    }
    steps.append(&mut last);
    steps.push(Step { kind: StepKind::Pass, ms: problem.pass_ms, blocks: 0..places.len() });
    steps
}

fn compute(place: Where) -> StepKind {
    match place {
        Where::Cpu => StepKind::Compute(Place::Cpu),
        Where::Resident(gpu) => StepKind::Compute(Place::Gpu(gpu)),
        Where::Streamed(gpu) => StepKind::Streamed(gpu),
    }
}

fn upload(problem: &Problem, gpu: usize, tensors: Tensors, blocks: Range<usize>) -> Step {
    Step { kind: StepKind::To(gpu, tensors.bytes), ms: problem.upload_ms(gpu, tensors), blocks }
}

fn download(problem: &Problem, gpu: usize, tensors: Tensors, blocks: Range<usize>) -> Step {
    Step { kind: StepKind::From(gpu, tensors.bytes), ms: problem.download_ms(gpu, tensors), blocks }
}

fn cross(problem: &Problem, from: Where, to: Where, block: usize, tensors: Tensors, steps: &mut Vec<Step>) {
    if from.gpu() != to.gpu() {
        go(problem, Way { from: from.gpu(), to: to.gpu(), tensors }, block, steps);
    }
}

/// Copies input or state of a block.
fn go(problem: &Problem, way: Way, block: usize, steps: &mut Vec<Step>) {
    steps.extend(way.from.map(|gpu| download(problem, gpu, way.tensors, block..block + 1)));
    steps.extend(way.to.map(|gpu| upload(problem, gpu, way.tensors, block..block + 1)));
}

/// The place of each block in a phase.
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

/// The transfer of state to its home after the prompt: first all copies from GPUs, then all copies to GPUs. Until then the state is
/// on the device that computes the prompt. It is copied whole, because a cache is not contiguous in tokens.
pub(crate) fn handover(problem: &Problem, choices: &[Choice]) -> Vec<Step> {
    let moved = || (0..choices.len()).filter_map(|i| Some((i, problem.handover(i, choices[i])?)));
    let from = moved().filter_map(|(i, way)| Some(download(problem, way.from?, way.tensors, i..i + 1)));
    let to = moved().filter_map(|(i, way)| Some(upload(problem, way.to?, way.tensors, i..i + 1)));
    from.chain(to).collect()
}

/// Number of device changes in one pass.
pub(crate) fn crossings(places: &[Where]) -> usize {
    places.windows(2).filter(|pair| pair[0].gpu() != pair[1].gpu()).count()
}
