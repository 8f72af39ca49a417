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
            StepKind::To(_, bytes) | StepKind::From(_, bytes) | StepKind::Ahead(_, bytes) => bytes,
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
    /// Waits until this many bytes of state are on a GPU. Their copy takes the time of the step. It is issued after the previous run that
    /// such a step precedes, or when the pass starts.
    Ahead(usize, u64),
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

/// The steps of one pass, by partition.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct PassSteps {
    pub partitions: Vec<PartitionSteps>,
    /// Transfers of state at the end of the phase, and the overhead of the pass.
    pub end: Vec<ScheduleStep>,
}

impl PassSteps {
    /// The steps of one sequence, from the steps of a pass over this many sequences.
    pub fn of_one(mut self, sequences: u64) -> Self {
        let partitions = self.partitions.iter_mut().flat_map(|partition| {
            let PartitionSteps { crossing, swaps_in, compute, swaps_out } = partition;
            crossing.iter_mut().chain(swaps_in).chain([compute]).chain(swaps_out)
        });
        for step in partitions.chain(&mut self.end) {
            step.ms /= sequences as f64;
            if let StepKind::To(_, bytes) | StepKind::From(_, bytes) | StepKind::Ahead(_, bytes) = &mut step.kind {
                *bytes /= sequences;
            }
        }
        self
    }
}

/// The steps of one partition.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct PartitionSteps {
    /// Copies of boundaries from another device.
    pub crossing: Vec<ScheduleStep>,
    /// Transfers of state before the run.
    pub swaps_in: Vec<ScheduleStep>,
    pub compute: ScheduleStep,
    /// Transfers of state after the run.
    pub swaps_out: Vec<ScheduleStep>,
}

/// The steps of one pass, in order.
pub(crate) fn steps(problem: &Problem, placements: &[BlockPlacement], phase: Phase, pass: usize) -> Vec<ScheduleStep> {
    let PassSteps { partitions, end } = pass_steps(problem, placements, phase, pass);
    let in_order = |PartitionSteps { crossing, swaps_in, compute, swaps_out }| {
        crossing.into_iter().chain(swaps_in).chain([compute]).chain(swaps_out)
    };
    partitions.into_iter().flat_map(in_order).chain(end).collect()
}

/// The steps of one pass, by partition.
pub(crate) fn pass_steps(problem: &Problem, placements: &[BlockPlacement], phase: Phase, pass: usize) -> PassSteps {
    let places = placements_in_phase(placements, phase);
    let mut steps = PassSteps::default();
    let copies_ahead = copies_ahead(problem, placements, phase);
    for blocks in partitions(problem, &places) {
        let (first, place) = (blocks.start, places[blocks.start]);
        let mut crossing = Vec::new();
        if first > 0 && places[first - 1].gpu() != place.gpu() {
            let (from, to) = (places[first - 1].gpu(), place.gpu());
            let transfer = Transfer { from, to, tensors: problem.boundary(first, phase, pass), ahead: false };
            push_transfer(problem, transfer, first, &mut crossing);
        }
        let (mut swaps_in, mut swaps_out) = (Vec::new(), Vec::new());
        for block in blocks.clone() {
            let Some(swap) = problem.state_swap(block, placements[block], phase) else { continue };
            if swap.until_phase_ends && phase == Phase::Prefill {
                continue;
            }
            let [swap_in, swap_out] = problem.pass_transfers(block, swap, phase, pass);
            match swap_in.to.filter(|gpu| swap_in.ahead && copies_ahead[*gpu]) {
                Some(gpu) => push_ahead(upload(problem, gpu, swap_in.tensors, block..block + 1), &mut swaps_in),
                None => push_transfer(problem, swap_in, block, &mut swaps_in),
            }
            let out = if swap.until_phase_ends { &mut steps.end } else { &mut swaps_out };
            push_transfer(problem, swap_out, block, out);
        }
        let ms = blocks.clone().map(|block| problem.block_ms(block, place, phase, pass)).sum::<f64>();
        let compute = ScheduleStep { kind: compute(place), ms: problem.launch_ms(place) + ms, blocks };
        steps.partitions.push(PartitionSteps { crossing, swaps_in, compute, swaps_out });
    }
    steps.end.push(ScheduleStep { kind: StepKind::Pass, ms: problem.pass_overhead_ms, blocks: 0..places.len() });
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

/// Adds a copy ahead, merged with the copy ahead of the blocks before it in its partition.
fn push_ahead(copy: ScheduleStep, steps: &mut Vec<ScheduleStep>) {
    let StepKind::To(gpu, bytes) = copy.kind else { return };
    match steps.last_mut() {
        Some(ScheduleStep { kind: StepKind::Ahead(_, all), ms, blocks }) => {
            (*all, *ms, blocks.end) = (*all + bytes, *ms + copy.ms, copy.blocks.end);
        }
        _ => steps.push(ScheduleStep { kind: StepKind::Ahead(gpu, bytes), ..copy }),
    }
}

/// For each GPU, whether passes of a phase copy states from the host ahead of their partition. They do if at least two partitions
/// share the GPU's staging buffers, of which there are two sets then (double buffering).
pub(crate) fn copies_ahead(problem: &Problem, placements: &[BlockPlacement], phase: Phase) -> Vec<bool> {
    // State that is kept with its layer needs no shared staging buffers: it stays on the layer's device, or on the host
    // if the host decodes the layer.
    if problem.budget.kv == KvHome::Device {
        return vec![false; problem.gpus.len()];
    }
    let places = placements_in_phase(placements, phase);
    let mut sharing = vec![0; problem.gpus.len()];
    for mut blocks in partitions(problem, &places) {
        let place = places[blocks.start];
        let swap = |block: usize| problem.state_swap(block, placements[block], phase);
        if blocks.any(|block| swap(block).is_some_and(StateSwap::is_shared_upload)) {
            place.gpu().into_iter().for_each(|gpu| sharing[gpu] += 1);
        }
    }
    sharing.into_iter().map(|partitions| partitions > 1).collect()
}

/// Adds the copies of a transfer that belongs to this block.
fn push_transfer(problem: &Problem, transfer: Transfer, block: usize, steps: &mut Vec<ScheduleStep>) {
    let Transfer { from, to, tensors, .. } = transfer;
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
        if let Some(Transfer { from, to, tensors, .. }) = problem.handover(block, *placement) {
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
