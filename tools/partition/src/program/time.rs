//! Time constraints: the time of a phase is at least each of these, for any order of blocks:
//!
//! - the partition sequence: computing, launches, crossings and state swaps, except copies ahead, one after another; in passes of several sequences
//!   without what GPUs compute, because devices then compute at the same time;
//! - in passes of several sequences, what each GPU computes;
//! - each link: all copies to the GPU, and the contention with the host (see [`crate::bound`]);
//! - slots: before each run of streamed blocks at most one ring of copies can be done. So the partition sequence without the streamed blocks,
//!   and all copies beyond one ring for each run, follow one another. With one slot, copies and streamed blocks follow one another;
//! - the disk, and its contention with the host.

use super::IntegerProgram;
use super::linear::LinearExpr;
use super::memory_constraints::state_and_workspace;
use super::order::{PlacementOrder, Transition};
use crate::memory::may_read_disk;
use crate::transfer::{Tensors, Transfer};
use crate::{BlockPlacement, Contention, Phase, Placement};
use std::ops::Range;

/// Expressions of the time of a phase, milliseconds.
struct PhaseTime {
    /// The variable: the time of the phase.
    ms: LinearExpr,
    /// The partition sequence.
    sequence: LinearExpr,
    /// Compute time of the host.
    host: LinearExpr,
    /// By GPU: boundaries and state copied to it.
    links: Vec<LinearExpr>,
    /// `links` without copies ahead.
    links_in_sequence: Vec<LinearExpr>,
    /// By GPU: compute time and state swaps of the blocks that are streamed to it.
    streamed: Vec<LinearExpr>,
    /// Handover of state after the prompt, which follows everything else; 0 in decoding.
    handover: LinearExpr,
}

impl PhaseTime {
    /// An expression, and then the handover.
    fn with_handover(&self, expression: &LinearExpr) -> LinearExpr {
        expression.clone().plus(&self.handover, 1.0)
    }
}

/// Adds the time of a phase to the program; `cost` is the objective's factor for a millisecond.
pub(super) fn add_time_constraints(program: &mut IntegerProgram, order: &PlacementOrder, phase: Phase, cost: f64) {
    let passes = program.problem.passes(phase) as f64;
    let gpus = program.problem.gpus.len();
    let mut time = PhaseTime {
        ms: program.model.nonnegative(cost),
        sequence: LinearExpr::constant(program.problem.pass_overhead_ms * passes),
        host: LinearExpr::default(),
        links: vec![LinearExpr::default(); gpus],
        links_in_sequence: vec![LinearExpr::default(); gpus],
        streamed: vec![LinearExpr::default(); gpus],
        handover: LinearExpr::default(),
    };
    let mut computing = vec![LinearExpr::default(); gpus];
    // By GPU: compute time of the blocks that are streamed to it.
    let mut in_slots = vec![LinearExpr::default(); gpus];
    for (at, place) in order.places.iter().enumerate() {
        let compute = compute_ms(program, order, phase, at);
        // Overlaps with everything else, at best.
        let overlapping = place.gpu().filter(|_| program.problem.has_pipelines());
        match overlapping {
            Some(gpu) => computing[gpu].add(&compute, 1.0),
            None => time.sequence.add(&compute, 1.0),
        }
        let swaps = swap_ms(program, phase, *place, &mut time);
        time.sequence.add(&swaps, 1.0);
        match *place {
            Placement::Cpu => time.host = compute,
            Placement::Resident(_) => {}
            Placement::Streamed(gpu) => {
                in_slots[gpu].add(&compute, 1.0);
                if overlapping.is_none() {
                    time.streamed[gpu].add(&compute, 1.0);
                }
                time.streamed[gpu].add(&swaps, 1.0);
            }
        }
    }
    add_crossings(program, order, phase, &mut time);
    if phase == Phase::Prefill {
        time.handover = handover_ms(program);
    }
    let sequence = time.with_handover(&time.sequence);
    program.model.at_least(&time.ms, &sequence);
    for computing in computing.iter().filter(|computing| !computing.is_zero()) {
        let with_handover = time.with_handover(computing);
        program.model.at_least(&time.ms, &with_handover);
    }
    for (gpu, in_slots) in in_slots.iter().enumerate() {
        if let Some(place) = order.places.iter().position(|place| *place == Placement::Streamed(gpu)) {
            let copies = weight_copies_ms(program, phase, gpu);
            let link = time.with_handover(&time.links[gpu].clone().plus(&copies, 1.0));
            // The last streamed block may compute while states are copied ahead.
            let before_tail = time.with_handover(&time.links_in_sequence[gpu].clone().plus(&copies, 1.0));
            add_tail_after_copies(program, phase, gpu, &time.ms, &before_tail);
            add_contention(program, program.problem.gpus[gpu].contention(), &time, &sequence, &link);
            let not_streamed = time.sequence.clone().plus(&time.streamed[gpu], -1.0);
            let total = time.with_handover(&not_streamed).plus(&copies, 1.0);
            if program.goal.slots[gpu] == 1 {
                let one_slot = time.with_handover(&in_slots.clone().plus(&copies, 1.0));
                program.model.at_least(&time.ms, &one_slot);
            }
            let runs = order.runs_at(place);
            add_slot_limit(program, gpu, phase, &time.ms, total, &runs);
        }
    }
    add_disk_reads(program, phase, &time, &sequence);
}

/// Compute time at a place, including launches.
fn compute_ms(program: &IntegerProgram, order: &PlacementOrder, phase: Phase, at: usize) -> LinearExpr {
    let (problem, place) = (program.problem, order.places[at]);
    let launch_ms = problem.launch_ms(place) * problem.passes(phase) as f64;
    let mut compute = LinearExpr::default().plus(&order.partitions(program, at), launch_ms);
    for (region, class) in program.classes() {
        let count = program.count(region, class, |placement| placement.in_phase(phase) == place);
        if !count.is_zero() {
            compute.add(&count, program.min_of_class(region, class, |i| problem.phase_ms(i, place, phase)));
        }
    }
    compute
}

/// Time of state swaps of the blocks at a place in all passes, except copies ahead; adds all copies to GPUs to the links.
fn swap_ms(program: &IntegerProgram, phase: Phase, place: Placement, time: &mut PhaseTime) -> LinearExpr {
    let problem = program.problem;
    let mut swaps = LinearExpr::default();
    for (region, class) in program.classes() {
        for (placement, variable) in
            program.counts[region][class].iter().filter(|(placement, _)| placement.in_phase(phase) == place)
        {
            let count = LinearExpr::sum([*variable]);
            let min_ms = |ms: &dyn Fn(Transfer) -> f64| {
                program
                    .min_of_class(region, class, |i| problem.swap_transfers(i, *placement, phase).map(ms).sum::<f64>())
            };
            swaps.add(&count, min_ms(&|transfer| if transfer.ahead { 0.0 } else { problem.copy_ms(transfer) }));
            for gpu in 0..problem.gpus.len() {
                let upload_ms = |transfer: Transfer| match transfer.to == Some(gpu) {
                    true => problem.upload_ms(gpu, transfer.tensors),
                    false => 0.0,
                };
                time.links[gpu].add(&count, min_ms(&upload_ms));
                let in_sequence = |transfer: Transfer| if transfer.ahead { 0.0 } else { upload_ms(transfer) };
                time.links_in_sequence[gpu].add(&count, min_ms(&in_sequence));
            }
        }
    }
    swaps
}

/// Adds the crossings to the sequence and to the links.
fn add_crossings(program: &IntegerProgram, order: &PlacementOrder, phase: Phase, time: &mut PhaseTime) {
    for transition in &order.inside {
        let blocks = program.regions[transition.region].blocks.clone();
        add_crossing(program, order, phase, time, transition, blocks.start + 1..blocks.end);
    }
    for transition in &order.between {
        let first = program.regions[transition.region].blocks.start;
        add_crossing(program, order, phase, time, transition, first..first + 1);
    }
}

/// Adds the crossings of one transition: the cheapest boundary into any of `blocks`.
fn add_crossing(
    program: &IntegerProgram,
    order: &PlacementOrder,
    phase: Phase,
    time: &mut PhaseTime,
    transition: &Transition,
    blocks: Range<usize>,
) {
    let problem = program.problem;
    let (from, to) = (order.places[transition.from].gpu(), order.places[transition.to].gpu());
    if from == to {
        return;
    }
    let min_ms = |ms: &dyn Fn(Tensors) -> f64| {
        let in_all_passes =
            |block: usize| (0..problem.passes(phase)).map(|pass| ms(problem.boundary(block, phase, pass))).sum::<f64>();
        blocks.clone().map(in_all_passes).fold(f64::INFINITY, f64::min)
    };
    if let Some(gpu) = from {
        time.sequence.add(&transition.times, min_ms(&|tensors| problem.download_ms(gpu, tensors)));
    }
    if let Some(gpu) = to {
        let ms = min_ms(&|tensors| problem.upload_ms(gpu, tensors));
        time.sequence.add(&transition.times, ms);
        time.links[gpu].add(&transition.times, ms);
        time.links_in_sequence[gpu].add(&transition.times, ms);
    }
}

/// Time of the handover of state after the prompt.
fn handover_ms(program: &IntegerProgram) -> LinearExpr {
    let mut total = LinearExpr::default();
    for (region, class) in program.classes() {
        for (placement, variable) in &program.counts[region][class] {
            let ms = program.min_of_class(region, class, |i| program.problem.handover_ms(i, *placement));
            total.add(&LinearExpr::sum([*variable]), ms);
        }
    }
    total
}

/// Time of the copies of weights to a GPU in all passes.
fn weight_copies_ms(program: &IntegerProgram, phase: Phase, gpu: usize) -> LinearExpr {
    let passes = program.problem.passes(phase) as f64;
    let mut copies = LinearExpr::default();
    for (region, class) in program.classes() {
        let count = program.streamed_count(region, class, phase, gpu);
        if !count.is_zero() {
            copies.add(&count, passes * program.min_of_class(region, class, |i| program.problem.stream_ms(i, gpu)));
        }
    }
    copies
}

/// Contention between transfers and the host: the three inequalities of [`crate::bound`], with the overlap as a variable. `sequence`
/// and `transfers` include the handover.
fn add_contention(
    program: &mut IntegerProgram,
    contention: Contention,
    time: &PhaseTime,
    sequence: &LinearExpr,
    transfers: &LinearExpr,
) {
    let Contention { compute: a, transfer: b } = contention;
    let (ms, host) = (&time.ms, &time.host);
    if contention == Contention::NONE {
        program.model.at_least(ms, transfers);
        return;
    }
    let overlap = program.model.nonnegative(0.0);
    let model = &mut program.model;
    model.at_least(&LinearExpr::default().plus(host, a), &overlap);
    model.at_least(ms, &sequence.clone().plus(&overlap, 1.0 - 1.0 / a));
    model.at_least(ms, &transfers.clone().plus(&overlap, 1.0 - 1.0 / b));
    model.at_least(ms, &transfers.clone().plus(host, 1.0).plus(&overlap, 1.0 - 1.0 / a - 1.0 / b));
}

/// A prompt ends after the last copy, the last streamed block and all blocks after it. The solution decides which region streams last:
/// the tail of a region is reduced if a later region streams.
fn add_tail_after_copies(program: &mut IntegerProgram, phase: Phase, gpu: usize, ms: &LinearExpr, link: &LinearExpr) {
    let (problem, place) = (program.problem, Placement::Streamed(gpu));
    if phase == Phase::Decode || problem.passes(phase) == 0 {
        return;
    }
    let last_pass = problem.passes(phase) - 1;
    // With several sequences on several devices, only the last sequence is sure to go through later blocks after the
    // streamed block.
    let after_share = if problem.has_pipelines() { 1.0 / problem.load.sequences as f64 } else { 1.0 };
    // Lower bound of the time after the blocks of the current region.
    let mut rest_ms = problem.pass_overhead_ms * after_share;
    let mut later_tails: Vec<(f64, LinearExpr)> = Vec::new();
    for region in (0..program.regions.len()).rev() {
        let mut streamed = LinearExpr::default();
        let mut block_ms = f64::INFINITY;
        for class in 0..program.regions[region].classes.len() {
            let count = program.streamed_count(region, class, phase, gpu);
            if !count.is_zero() {
                let class_ms = program.min_of_class(region, class, |i| problem.block_ms(i, place, phase, last_pass));
                block_ms = block_ms.min(class_ms);
                streamed.add(&count, 1.0);
            }
        }
        if !streamed.is_zero() {
            let tail_ms = block_ms + problem.launch_ms(place) + rest_ms;
            let streams = program.indicator(region, streamed);
            let mut end = link.clone().plus(&streams, tail_ms);
            for (later_ms, later_streams) in &later_tails {
                end.add(later_streams, -(tail_ms - later_ms).max(0.0));
            }
            program.model.at_least(ms, &end);
            later_tails.push((tail_ms, streams));
        }
        rest_ms += program.min_region_ms(region, phase, last_pass) * after_share;
    }
}

/// Limit from the slots: before each of the `runs` of streamed blocks at most one ring of copies can be complete. `total` is the
/// time of the partition sequence without streamed blocks, plus that of all copies.
fn add_slot_limit(
    program: &mut IntegerProgram,
    gpu: usize,
    phase: Phase,
    ms: &LinearExpr,
    total: LinearExpr,
    runs: &LinearExpr,
) {
    let problem = program.problem;
    let mut largest_ms = 0.0f64;
    for (region, class) in program.classes() {
        if !program.streamed_count(region, class, phase, gpu).is_zero() {
            let members = program.regions[region].classes[class].iter();
            largest_ms = members.map(|block| problem.stream_ms(*block, gpu)).fold(largest_ms, f64::max);
        }
    }
    let ring_ms = f64::from(program.goal.slots[gpu]) * largest_ms * problem.passes(phase) as f64;
    program.model.at_least(ms, &total.plus(runs, -ring_ms));
}

impl IntegerProgram<'_> {
    /// Number of blocks of a class that are streamed to a GPU in a phase.
    fn streamed_count(&self, region: usize, class: usize, phase: Phase, gpu: usize) -> LinearExpr {
        self.count(region, class, |placement| placement.in_phase(phase) == Placement::Streamed(gpu))
    }

    /// 1 if the count of a region is above 0, else 0.
    fn indicator(&mut self, region: usize, count: LinearExpr) -> LinearExpr {
        let blocks = self.regions[region].blocks.len();
        if blocks == 1 {
            return count;
        }
        let indicator = self.model.integer(1);
        self.model.at_least(&LinearExpr::default().plus(&indicator, blocks as f64), &count);
        self.model.at_least(&count, &indicator);
        indicator
    }

    /// Compute time of a region in one pass with each block at its fastest place, milliseconds.
    fn min_region_ms(&self, region: usize, phase: Phase, pass: usize) -> f64 {
        let class_ms = |class: usize| {
            let members = self.regions[region].classes[class].len() as f64;
            let places = self.counts[region][class].iter().map(|(placement, _)| placement.in_phase(phase));
            let ms = |place| self.min_of_class(region, class, |i| self.problem.block_ms(i, place, phase, pass));
            members * places.map(ms).fold(f64::INFINITY, f64::min)
        };
        (0..self.regions[region].classes.len()).map(class_ms).sum()
    }
}

/// Adds the time of reading the weights that exceed host memory: a lower bound of that of [`crate::MemoryUsage::disk_read_bytes`].
///
/// Let W be the packed weights of a phase, G the part of them that is copied to GPUs, B the other demand on host memory, M the memory,
/// L what stays locked, D what is decompressed, c the share of the weights that may be, and d the bytes read for each decompressed byte. The
/// program has w and g bytes of the model, at most those of the evaluator. Packed they are p times as large, rounded up: `W >= w p` and
/// `G >= g p`.
///
/// - If all of W stays locked, nothing is read and `W + B <= M`: both expressions below are at most `W + B - M`, not above 0.
/// - Else `L <= M - B`, because the rest of one block and the read-ahead buffers need memory too (or L is 0 and a placement
///   that fits has `B <= M`). The evaluator reads `W - L - (1 - d) D`, with `D <= c (W - G)` and `D <= W - L`. That is
///   - at least `W - L - (1 - d) c (W - G)`, so with `k = (1 - d) c` at least `(1 - k) w p + k g p + B - M`;
///   - at least `d (W - L)`, so at least `d (w p + B - M)`.
///
/// The evaluator also rounds up the bytes that are read. Where experts are read by demand, the evaluator reads less than that, and the
/// program counts no reads. Reads and the host slow each other down as copies do; the simulated time grows with each of its parts
/// ([`crate::bound`]), so it is at least that of these smaller ones.
fn add_disk_reads(program: &mut IntegerProgram, phase: Phase, time: &PhaseTime, sequence: &LinearExpr) {
    let problem = program.problem;
    if problem.blocks.iter().any(|block| block.experts.is_some()) {
        return;
    }
    let (Some(rate), Some(ram)) = (problem.disk_bytes_per_ms, problem.budget.host()) else { return };
    if !may_read_disk(problem, program.goal.mechanisms) {
        return;
    }
    let reads_whole = |i: usize| !problem.is_lookup_table(i);
    let ms_per_unit = problem.passes(phase) as f64 * program.memory_unit / rate;
    let is_read = |placement: BlockPlacement| !matches!(placement.in_phase(phase), Placement::Resident(_));
    let reads = program.distinct_bytes(|block| &block.weights, reads_whole, is_read);
    // B - M.
    let excess = state_and_workspace(program).plus(&LinearExpr::constant(ram as f64 / program.memory_unit), -1.0);
    let packing = problem.budget.packing;
    let (growth, k) = (packing.growth_factor(), packing.unread_share() * packing.decompressed_share());
    let mut read = excess.clone().plus(&reads, growth * (1.0 - k));
    if k > 0.0 {
        let is_copied = |placement: BlockPlacement| matches!(placement.in_phase(phase), Placement::Streamed(_));
        let copied = program.distinct_bytes(|block| &block.weights, reads_whole, is_copied);
        read.add(&copied, growth * k);
        let read_if_all_decompressed = excess.plus(&reads, growth);
        let ms_per_unit = ms_per_unit * (1.0 - packing.unread_share());
        let reads = time.handover.clone().plus(&read_if_all_decompressed, ms_per_unit);
        add_contention(program, problem.disk_contention, time, sequence, &reads);
    }
    let reads = time.handover.clone().plus(&read, ms_per_unit);
    add_contention(program, problem.disk_contention, time, sequence, &reads);
}
