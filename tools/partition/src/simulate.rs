//! The schedule simulator: computes the times of a placement from partitions, transfers, ring buffers and contention.
//!
//! A pass runs the partitions in order ([`crate::schedule`]). Meanwhile one copy engine per GPU prefetches the weights of streamed
//! blocks, in order, into a slot ring, also for the next pass; a slot is free when its block has computed. The planner and the
//! timeline (`--trace`) use the same simulation. Reads from disk go on beside the partition sequence, and both slow each other down
//! ([`DiskTimes::beside`]).
//!
//! Passes of several sequences overlap on different devices, and state on the host is copied to GPUs ahead of their runs ([`pipeline`]).

mod machine;
mod pipeline;
mod record;

use crate::bound::lower_bound_beside_transfers;
use crate::memory::{MemoryUsage, usage_with_cuts};
use crate::schedule::{ScheduleStep, copies, copies_ahead, handover, merges, pass_steps, placements_in_phase, steps};
use crate::{BlockPlacement, Decompression, DeviceId, Phase, Placement, Problem};
use hpp_schema::{Span, SpanKind, Timeline};
use machine::{CopyState, Simulator};
use pipeline::QueuedMachine;
use record::{BETWEEN_PASSES, DISK, NoRecorder, SimulationObserver, SpanRecorder, lane_from, lane_to};

/// Maximum number of tokens to simulate. If no period is found, the second half is taken as the steady state.
const MAX_TOKENS: usize = 64;

/// The result of simulating a phase.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Simulation {
    /// Decode: time of one token in the steady state. Prefill: time of all passes from empty rings, and of the handover of
    /// state. Milliseconds; infinite if the phase never finishes (a streamed block without slots).
    pub ms: f64,
    /// Decode: one period of the steady state, which is one or a few tokens. Prefill: everything. Lanes `cpu`, `gpu0`,
    /// `to gpu0`, `from gpu0`, `disk`.
    pub timeline: Timeline,
    /// Compute time of the host including launches, milliseconds; per token in decode.
    pub cpu_ms: f64,
    /// Compute time of each GPU, likewise.
    pub gpu_ms: Vec<f64>,
    /// Busy time of the link of each GPU, sum of both directions, milliseconds.
    pub transfer_ms: Vec<f64>,
    /// Time in which no block computed because the partition sequence waited for weights or the disk, milliseconds.
    pub stall_ms: f64,
    /// Bytes copied between host and GPUs, both directions; per token in decode.
    pub bytes_moved: u64,
    /// Weights read from disk, bytes; per token in decode.
    pub disk_bytes: u64,
}

/// Simulates one phase of a placement. `placements` has one entry per block, `slots` one per GPU.
pub fn simulate(problem: &Problem, placements: &[BlockPlacement], slots: &[u32], phase: Phase) -> Simulation {
    let places = placements_in_phase(placements, phase);
    let per_pass = copies(problem, &places).iter().map(|copies| copies.len() as u64).collect();
    let mut spans = SpanRecorder { problem, copies: per_pass, pass: 0, spans: Vec::new() };
    let mut window = run(problem, placements, slots, phase, &mut spans);
    if !window.end.is_finite() {
        return Simulation { ms: f64::INFINITY, ..Simulation::default() };
    }
    let usage = usage_with_cuts(problem, placements, slots);
    let disk_read_bytes = usage.disk_read_bytes(problem, phase);
    let times = DiskTimes::of(problem, placements, &usage, phase);
    let sequence_ms = window.end - window.start;
    let host_ms = host_ms(problem, placements, phase) * if phase == Phase::Decode { window.passes as f64 } else { 1.0 };
    let beside = times.beside(problem, sequence_ms, host_ms, window.passes as f64);
    let mut extend = |name: &str, kind: SpanKind, ms: f64| {
        if ms > 0.0 {
            spans.push("cpu".to_owned(), name.to_owned(), kind, (window.end, window.end + ms), None);
            window.end += ms;
        }
    };
    extend("decompresses weights", SpanKind::Stall, beside.decompress_ms);
    extend("computes while the disk is read", SpanKind::Compute, beside.slowed_ms);
    extend("waits for the disk", SpanKind::Stall, beside.wait_ms);
    let state_bytes = usage.states_on_disk[phase as usize].read_bytes;
    if disk_read_bytes + state_bytes > 0 {
        let read = (window.start, window.start + beside.disk_ms);
        let what = match (disk_read_bytes, state_bytes) {
            (_, 0) => "weights",
            (0, _) => "KV caches",
            _ => "weights and KV caches",
        };
        let bytes = (disk_read_bytes + state_bytes) * window.passes;
        spans.push(DISK.to_owned(), what.to_owned(), SpanKind::Transfer, read, Some(bytes));
    }
    if phase == Phase::Prefill {
        let mut simulator = Simulator::new(problem, vec![], slots, None, &mut spans);
        simulator.skip_to(window.end);
        simulator.run_steps(&handover(problem, placements), window.passes);
        window.end = simulator.now();
    }
    let bytes_moved = bytes_moved(problem, placements, &places, phase);
    let disk_bytes = disk_read_bytes * problem.passes(phase) as u64;
    Simulation { bytes_moved, disk_bytes, ..summary(problem, window, spans.spans, phase) }
}

/// Bytes of boundaries, state swaps, weights and, for a prompt, the handover of state.
fn bytes_moved(problem: &Problem, placements: &[BlockPlacement], places: &[Placement], phase: Phase) -> u64 {
    let copied_bytes = |steps: Vec<ScheduleStep>| -> u64 { steps.iter().map(ScheduleStep::bytes).sum() };
    let weights: u64 = copies(problem, places).iter().flatten().map(|(block, _)| problem.streamed_bytes(*block)).sum();
    let in_pass = |pass| copied_bytes(steps(problem, placements, phase, pass)) + weights;
    let handover_bytes = if phase == Phase::Prefill { copied_bytes(handover(problem, placements)) } else { 0 };
    (0..problem.passes(phase)).map(in_pass).sum::<u64>() + handover_bytes
}

/// Time that the host computes in a phase, with the launches of its partitions and without contention, milliseconds; per token in decode.
pub(crate) fn host_ms(problem: &Problem, placements: &[BlockPlacement], phase: Phase) -> f64 {
    let places = placements_in_phase(placements, phase);
    let passes = problem.passes(phase) as f64;
    let block_ms = |block: usize| {
        let joins = block > 0 && merges(problem, block, places[block - 1], places[block]);
        let launch_ms = if joins { 0.0 } else { passes * problem.launch_ms(Placement::Cpu) };
        problem.phase_ms(block, Placement::Cpu, phase) + launch_ms
    };
    (0..places.len()).filter(|block| places[*block] == Placement::Cpu).map(block_ms).sum()
}

/// Time of the partition sequence of a phase, milliseconds, without disk and handover of state; per token in decode.
pub(crate) fn sequence_ms(problem: &Problem, placements: &[BlockPlacement], slots: &[u32], phase: Phase) -> f64 {
    run(problem, placements, slots, phase, &mut NoRecorder).per_unit(phase)
}

/// Times that a pass needs for reads from disk, beside its partitions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DiskTimes {
    /// Reading for a pass, milliseconds; infinite without a disk.
    read_ms: f64,
    /// Time that the partitions of a pass wait for the experts that routers select, milliseconds. Meanwhile only sequences whose experts are
    /// in memory compute.
    expert_ms: f64,
    /// Reading these experts, for a pass, milliseconds.
    expert_read_ms: f64,
    /// Waiting for states on disk, for a pass, milliseconds.
    state_ms: f64,
    /// Time to decompress the weights of a pass while nothing computes, milliseconds.
    decompress_ms: f64,
    /// Threads that decompress, as a share of the host's cores.
    host_share: f64,
}

/// Times of a partition sequence with reads from disk beside it, milliseconds for some passes together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BesideDisk {
    /// The total time.
    pub ms: f64,
    /// Time that decompressing takes from the host's computing.
    decompress_ms: f64,
    /// How much longer the host computes because the disk is read.
    slowed_ms: f64,
    /// Waits for the disk.
    wait_ms: f64,
    /// Time of the reads, slowed down by the host's computing.
    disk_ms: f64,
}

impl DiskTimes {
    /// The times of a pass of a phase.
    pub fn of(problem: &Problem, placements: &[BlockPlacement], usage: &MemoryUsage, phase: Phase) -> Self {
        let (states, experts) = (usage.states_on_disk[phase as usize], usage.expert_read_bytes(problem, phase));
        let others = usage.disk_read_bytes(problem, phase).saturating_sub(experts);
        let read_ms = disk_ms(problem, others) + disk_ms(problem, states.read_bytes) / STATE_READ_RATE;
        let state_ms = states.evictions as f64 * EVICTION_MS;
        let expert_read_ms = disk_ms(problem, experts);
        let expert_ms = match phase {
            Phase::Decode => expert_read_ms - hidden_expert_ms(problem, placements, usage, expert_read_ms),
            Phase::Prefill => expert_read_ms,
        };
        let Some(Decompression { bytes_per_ms, host_share }) = problem.decompression else {
            return DiskTimes { read_ms, expert_ms, expert_read_ms, state_ms, decompress_ms: 0.0, host_share: 0.0 };
        };
        let decompress_ms = usage.decompressed_bytes(problem, phase) / bytes_per_ms;
        DiskTimes { read_ms, expert_ms, expert_read_ms, state_ms, decompress_ms, host_share }
    }

    /// The times of `passes` passes, whose partition sequence takes `sequence_ms` without the disk and computes on the host for `host_ms` of that.
    /// Waits for states prolong the sequence. Weights are prefetched all the time, beside the sequence. Experts are read between two partitions, or
    /// while other sequences compute. The disk does one thing at a time, so the total is at least the time of all reads.
    ///
    /// While C threads compute on C cores and T threads decompress, each runs at `C / (C + T)` of its speed. With D milliseconds of
    /// decompressing and H of computing, the longer of both ends after `D + H T / C` or `H + D T / C`.
    pub fn beside(self, problem: &Problem, sequence_ms: f64, host_ms: f64, passes: f64) -> BesideDisk {
        let contention = problem.disk_contention;
        let decompress_ms = self.decompress_ms * self.host_share * passes;
        let decompressed_ms = match self.decompress_ms > 0.0 {
            true => self.decompress_ms * passes + host_ms * self.host_share,
            false => 0.0,
        };
        let state_wait_ms = self.state_ms * passes;
        let (sequence_ms, host_ms) = (sequence_ms + decompress_ms + state_wait_ms, host_ms + decompress_ms);
        let prefetch_ms = (self.read_ms * passes).max(decompressed_ms);
        let with_prefetch_ms = lower_bound_beside_transfers(sequence_ms, host_ms, prefetch_ms, contention);
        let slowed_ms = match prefetch_ms > 0.0 {
            true => (with_prefetch_ms - sequence_ms).min(host_ms * (contention.compute - 1.0)),
            false => 0.0,
        };
        // Experts are read when a router has run: they count as if nothing prefetched them.
        let (expert_wait_ms, expert_read_ms) = (self.expert_ms * passes, self.expert_read_ms * passes);
        let ms = (with_prefetch_ms + expert_wait_ms).max(prefetch_ms + expert_read_ms);
        let wait_ms = ms - sequence_ms - slowed_ms + state_wait_ms;
        // The time in which the host computes during reads.
        let overlap_ms = (contention.compute * host_ms).min(contention.transfer * prefetch_ms);
        let prefetching_ms = (prefetch_ms + overlap_ms * (1.0 - 1.0 / contention.transfer)).min(with_prefetch_ms);
        BesideDisk { ms, decompress_ms, slowed_ms, wait_ms, disk_ms: prefetching_ms + expert_read_ms }
    }
}

/// The part of `read_ms`, the time of reading experts for a decode pass, that is hidden: sequences compute whose experts are in memory already.
/// The reads of the first sequence are not hidden: at most one sequence's share of the experts that all sequences select. While the last
/// sequence computes, nothing is left to read. The experts' part of a block's computing time is their share of the bytes that the block reads
/// for a token.
fn hidden_expert_ms(problem: &Problem, placements: &[BlockPlacement], usage: &MemoryUsage, read_ms: f64) -> f64 {
    let visited = usage.expert_reads[Phase::Decode as usize].visited;
    if problem.load.sequences < 2 || visited == 0 || !read_ms.is_finite() {
        return 0.0;
    }
    let (mut computing_ms, mut of_one) = (0.0, 0);
    for (block, _) in placements.iter().enumerate().filter(|(_, at)| **at == BlockPlacement::both(Placement::Cpu)) {
        let spec = &problem.blocks[block];
        let Some(bytes) = spec.experts.map(|experts| experts.visited_bytes(1)) else { continue };
        let share = (bytes as f64 / spec.decode.bytes.max(1) as f64).min(1.0);
        computing_ms += share * problem.cpu[block].decode_ms;
        of_one += problem.budget.packing.packed(bytes);
    }
    let behind_first = 1.0 - (of_one as f64 / visited as f64).min(1.0);
    let before_last = 1.0 - 1.0 / problem.load.sequences as f64;
    (read_ms * behind_first).min(computing_ms * before_last)
}

/// Rate of reading states from disk, as a share of the rate of reading weights: states are read through the page cache, one head at a
/// time, and prefetched no further than for the next layer. Measured on a virtual machine's disk (docs/BENCHMARKS.md, "KV caches on
/// disk").
const STATE_READ_RATE: f64 = 0.65;

/// Milliseconds that a run waits if its states are written and evicted: until the writes of the previous run are on disk, and to issue writes
/// and reads. Measured once on the same disk while weights were read too (docs/BENCHMARKS.md, "KV caches on disk").
const EVICTION_MS: f64 = 0.26;

/// Time to read this many bytes from disk, milliseconds; infinite without a disk.
fn disk_ms(problem: &Problem, bytes: u64) -> f64 {
    match (bytes, problem.disk_bytes_per_ms) {
        (0, _) => 0.0,
        (_, Some(rate)) if rate > 0.0 => bytes as f64 / rate,
        _ => f64::INFINITY,
    }
}

/// The simulated interval that is reported, milliseconds.
#[derive(Clone, Copy, Debug)]
struct MeasuredPasses {
    start: f64,
    end: f64,
    /// Number of passes in it.
    passes: u64,
}

impl MeasuredPasses {
    /// The window of a phase that never finishes.
    const UNFINISHED: MeasuredPasses = MeasuredPasses { start: 0.0, end: f64::INFINITY, passes: 1 };

    /// Decode: milliseconds per token; prefill: milliseconds in total.
    fn per_unit(self, phase: Phase) -> f64 {
        match phase {
            Phase::Decode => (self.end - self.start) / self.passes as f64,
            Phase::Prefill => self.end - self.start,
        }
    }
}

/// Simulates the partition sequence of a phase.
fn run<R: SimulationObserver>(
    problem: &Problem,
    placements: &[BlockPlacement],
    slots: &[u32],
    phase: Phase,
    recorder: &mut R,
) -> MeasuredPasses {
    let places = placements_in_phase(placements, phase);
    let copies = copies(problem, &places);
    // The thread that issues runs and copies goes on while GPUs compute and states are copied ahead.
    if problem.has_pipelines() || copies_ahead(problem, placements, phase).contains(&true) {
        return run_queued(problem, placements, slots, phase, recorder);
    }
    match phase {
        Phase::Prefill => {
            let passes = problem.passes(phase);
            let mut simulator = Simulator::new(problem, copies, slots, Some(passes as u64), recorder);
            let finishes =
                (0..passes).all(|pass| simulator.run_steps(&steps(problem, placements, phase, pass), pass as u64));
            if finishes {
                MeasuredPasses { start: 0.0, end: simulator.now(), passes: passes as u64 }
            } else {
                MeasuredPasses::UNFINISHED
            }
        }
        Phase::Decode => {
            let steps = steps(problem, placements, phase, 0);
            decode(Simulator::new(problem, copies, slots, None, recorder), |simulator, token| {
                simulator.run_steps(&steps, token)
            })
        }
    }
}

/// Simulates passes of several sequences.
fn run_queued<R: SimulationObserver>(
    problem: &Problem,
    placements: &[BlockPlacement],
    slots: &[u32],
    phase: Phase,
    recorder: &mut R,
) -> MeasuredPasses {
    let sequences = problem.load.sequences;
    let copies = copies(problem, &placements_in_phase(placements, phase));
    let steps = |pass| pass_steps(problem, placements, phase, pass).of_one(sequences);
    match phase {
        Phase::Prefill => {
            let passes = problem.passes(phase);
            let mut machine = QueuedMachine::new(problem, copies, slots, Some(passes as u64), recorder);
            let finishes = (0..passes).all(|pass| machine.run_pass(&steps(pass), pass as u64));
            match finishes {
                true => MeasuredPasses { start: 0.0, end: machine.now(), passes: passes as u64 },
                false => MeasuredPasses::UNFINISHED,
            }
        }
        Phase::Decode => {
            let steps = steps(0);
            decode(QueuedMachine::new(problem, copies, slots, None, recorder), |machine, token| {
                machine.run_pass(&steps, token)
            })
        }
    }
}

/// The time of a phase of one sequence, milliseconds, on the machine that simulates several.
#[cfg(test)]
pub(crate) fn queued_ms(problem: &Problem, placements: &[BlockPlacement], slots: &[u32], phase: Phase) -> f64 {
    run_queued(problem, placements, slots, phase, &mut NoRecorder).per_unit(phase)
}

/// A machine that runs passes.
trait Machine {
    /// Milliseconds since the start.
    fn now(&self) -> f64;
    /// The copies of weights between two passes.
    fn copy_state(&self) -> CopyState;
    /// Records the copies that are not finished.
    fn record_unfinished(&mut self);
}

/// Simulates tokens until the state of the copy engines repeats: the tokens in between are one period of the steady state. `run` simulates
/// the pass of the token with this number; false if it never ends.
fn decode<M: Machine>(mut machine: M, run: impl Fn(&mut M, u64) -> bool) -> MeasuredPasses {
    // The time and state before each token.
    let mut history = vec![(0.0, machine.copy_state())];
    for token in 0..MAX_TOKENS {
        if !run(&mut machine, token as u64) {
            return MeasuredPasses::UNFINISHED;
        }
        let (now, state) = (machine.now(), machine.copy_state());
        let tolerance = 1e-9 * now / (token + 1) as f64;
        let repeated = history.iter().rposition(|(_, earlier)| state.equals(earlier, tolerance));
        if let Some(start) = repeated {
            machine.record_unfinished();
            return MeasuredPasses { start: history[start].0, end: now, passes: (history.len() - start) as u64 };
        }
        history.push((now, state));
    }
    machine.record_unfinished();
    MeasuredPasses { start: history[MAX_TOKENS / 2].0, end: machine.now(), passes: (MAX_TOKENS / 2) as u64 }
}

/// Clips the spans to the window and adds them up, per token (decode) or in total (prefill).
fn summary(problem: &Problem, window: MeasuredPasses, all: Vec<Span>, phase: Phase) -> Simulation {
    let (start, end) = (1e3 * window.start, 1e3 * window.end);
    let clip = |mut span: Span| {
        let until = (span.start_us + span.duration_us).min(end);
        span.start_us = span.start_us.max(start);
        span.duration_us = until - span.start_us;
        span.start_us -= start;
        (span.duration_us > 0.0).then_some(span)
    };
    let tokens = if phase == Phase::Decode { window.passes } else { 1 };
    let mut spans: Vec<Span> = all.into_iter().filter_map(clip).collect();
    spans.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
    // Milliseconds of the selected spans.
    let sum_ms = |selects: &dyn Fn(&Span) -> bool| -> f64 {
        spans.iter().filter(|span| selects(span)).map(|span| span.duration_us).sum::<f64>() / 1e3 / tokens as f64
    };
    let compute_ms = |lane: String| {
        sum_ms(&|span| span.kind == SpanKind::Compute && span.lane == lane && span.name != BETWEEN_PASSES)
    };
    let gpus = 0..problem.gpus.len();
    Simulation {
        ms: window.per_unit(phase),
        cpu_ms: compute_ms(DeviceId::Cpu.to_string()),
        gpu_ms: gpus.clone().map(|gpu| compute_ms(DeviceId::Gpu(gpu).to_string())).collect(),
        transfer_ms: gpus.map(|gpu| sum_ms(&|span| span.lane == lane_to(gpu) || span.lane == lane_from(gpu))).collect(),
        stall_ms: sum_ms(&|span| span.kind == SpanKind::Stall),
        timeline: Timeline { spans },
        ..Simulation::default()
    }
}
