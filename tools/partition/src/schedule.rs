//! The schedule of a pass: partitions, crossings between devices, transfers of state, and the copies of streamed weights.
//!
//! Neighbours that are resident on one device merge into one partition. A streamed block is its own partition, and so is every GPU
//! block while state is kept on the host; a problem may require more cuts. If neighbours compute on different devices, each boundary
//! tensor is copied separately, from GPU to GPU through the host. State that another device keeps is copied too: before and after each
//! run, if neither phase computes on that device or if each pass returns the state in a new buffer; otherwise the state stays on the
//! computing device until all prefill passes, or the decode pass, are done.

use crate::transfer::{StateSwap, Tensors, Transfer};
use crate::{BlockPlacement, DeviceId, KvHome, Phase, Placement, Problem};
use std::ops::Range;

/// One step of the partition sequence of a pass.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ScheduleStep {
    pub kind: StepKind,
    /// Milliseconds without contention.
    pub ms: f64,
    /// The blocks it belongs to.
    pub blocks: Range<usize>,
}

impl ScheduleStep {
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
    Compute(DeviceId),
    /// A streamed block computes: it waits for its weights, and frees their slot afterwards.
    Streamed(usize),
    /// Copies bytes to a GPU; pauses the copy of weights to this GPU.
    To(usize, u64),
    /// Copies bytes from a GPU.
    From(usize, u64),
    /// Overhead of a pass outside its partitions.
    Pass,
}

/// The copies of weights to one GPU in a pass, in order, as (block, milliseconds).
pub(crate) type Copies = Vec<(usize, f64)>;

/// The partitions of a placement in one phase, as ranges of blocks.
pub(crate) fn partitions(problem: &Problem, places: &[Placement]) -> Vec<Range<usize>> {
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
pub(crate) fn merges(problem: &Problem, block: usize, before: Placement, place: Placement) -> bool {
    before == place && may_merge(problem, place) && !problem.cuts.contains(&block)
}

/// Whether neighbours at this place merge into one partition.
pub(crate) fn may_merge(problem: &Problem, place: Placement) -> bool {
    match place {
        Placement::Cpu => true,
        Placement::Resident(_) => problem.budget.kv == KvHome::Device,
        Placement::Streamed(_) => false,
    }
}

/// The steps of one pass.
pub(crate) fn steps(problem: &Problem, placements: &[BlockPlacement], phase: Phase, pass: usize) -> Vec<ScheduleStep> {
    let places = placements_in_phase(placements, phase);
    let mut steps = Vec::new();
    let mut at_end_of_phase = Vec::new();
    for blocks in partitions(problem, &places) {
        let (first, place) = (blocks.start, places[blocks.start]);
        if first > 0 && places[first - 1].gpu() != place.gpu() {
            let (from, to) = (places[first - 1].gpu(), place.gpu());
            let crossing = Transfer { from, to, tensors: problem.boundary(first, phase, pass) };
            push_transfer(problem, crossing, first, &mut steps);
        }
        let swaps: Vec<(usize, StateSwap)> = (blocks.clone())
            .filter_map(|block| Some((block, problem.state_swap(block, placements[block], phase)?)))
            .filter(|(_, swap)| !swap.until_phase_ends || phase == Phase::Decode)
            .collect();
        for (block, swap) in &swaps {
            let [swap_in, _] = problem.pass_transfers(*block, *swap, phase, pass);
            push_transfer(problem, swap_in, *block, &mut steps);
        }
        let ms = blocks.clone().map(|block| problem.block_ms(block, place, phase, pass)).sum::<f64>();
        steps.push(ScheduleStep { kind: compute(place), ms: problem.launch_ms(place) + ms, blocks });
        for (block, swap) in &swaps {
            let [_, swap_out] = problem.pass_transfers(*block, *swap, phase, pass);
            let steps = if swap.until_phase_ends { &mut at_end_of_phase } else { &mut steps };
            push_transfer(problem, swap_out, *block, steps);
        }
    }
    steps.append(&mut at_end_of_phase);
    steps.push(ScheduleStep { kind: StepKind::Pass, ms: problem.pass_overhead_ms, blocks: 0..places.len() });
    steps
}

fn compute(place: Placement) -> StepKind {
    match place {
        Placement::Cpu => StepKind::Compute(DeviceId::Cpu),
        Placement::Resident(gpu) => StepKind::Compute(DeviceId::Gpu(gpu)),
        Placement::Streamed(gpu) => StepKind::Streamed(gpu),
    }
}

fn upload(problem: &Problem, gpu: usize, tensors: Tensors, blocks: Range<usize>) -> ScheduleStep {
    ScheduleStep { kind: StepKind::To(gpu, tensors.bytes), ms: problem.upload_ms(gpu, tensors), blocks }
}

fn download(problem: &Problem, gpu: usize, tensors: Tensors, blocks: Range<usize>) -> ScheduleStep {
    ScheduleStep { kind: StepKind::From(gpu, tensors.bytes), ms: problem.download_ms(gpu, tensors), blocks }
}

/// Adds the copies of a transfer that belongs to this block.
fn push_transfer(problem: &Problem, transfer: Transfer, block: usize, steps: &mut Vec<ScheduleStep>) {
    let Transfer { from, to, tensors } = transfer;
    steps.extend(from.map(|gpu| download(problem, gpu, tensors, block..block + 1)));
    steps.extend(to.map(|gpu| upload(problem, gpu, tensors, block..block + 1)));
}

/// The place of each block in a phase.
pub(crate) fn placements_in_phase(placements: &[BlockPlacement], phase: Phase) -> Vec<Placement> {
    placements.iter().map(|placement| placement.in_phase(phase)).collect()
}

/// The copies of weights to each GPU in one pass.
pub(crate) fn copies(problem: &Problem, places: &[Placement]) -> Vec<Copies> {
    let copies_to = |gpu: usize| {
        let streamed = (0..places.len()).filter(move |i| places[*i] == Placement::Streamed(gpu));
        streamed.map(|i| (i, problem.stream_ms(i, gpu))).collect()
    };
    (0..problem.gpus.len()).map(copies_to).collect()
}

/// The transfers of state after the prompt, from the devices that computed the prompt to the devices that keep the state: first all
/// copies from GPUs, then all copies to GPUs. State is copied whole, because a cache is not contiguous in tokens.
pub(crate) fn handover(problem: &Problem, placements: &[BlockPlacement]) -> Vec<ScheduleStep> {
    let (mut steps, mut uploads) = (Vec::new(), Vec::new());
    for (block, placement) in placements.iter().enumerate() {
        if let Some(Transfer { from, to, tensors }) = problem.handover(block, *placement) {
            steps.extend(from.map(|gpu| download(problem, gpu, tensors, block..block + 1)));
            uploads.extend(to.map(|gpu| upload(problem, gpu, tensors, block..block + 1)));
        }
    }
    steps.append(&mut uploads);
    steps
}

/// Number of device changes in one pass.
pub(crate) fn crossings(places: &[Placement]) -> usize {
    places.windows(2).filter(|pair| pair[0].gpu() != pair[1].gpu()).count()
}
