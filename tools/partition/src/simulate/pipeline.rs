//! Passes of several sequences: devices compute for different sequences at the same time.
//!
//! Follows the runtime: one thread issues all runs and copies. A run on a GPU returns while the GPU computes; a copy waits for the GPUs
//! concerned. Consecutive partitions on different devices are a pipeline: in each turn every partition of it gets the sequence that
//! the partition before it had in the turn before; first boundaries are copied, then the runs of GPUs start, then the host computes.
//! A partition whose state is copied for its runs is never part of a pipeline, and a pipeline has at most one streamed partition of
//! each GPU.
//!
//! State on the host is copied ahead to the GPU that needs it: the copy is issued as soon as the previous run with such a copy has been
//! issued. The GPU waits for it before the run, and copies of weights pause meanwhile.
//!
//! Weights of a streamed partition are copied to a slot once per pass. Copies to a GPU are issued, in order, when a pass starts and when
//! a partition has issued its last run, as far as slots are free. Each starts when the previous copy is done and the GPU has computed
//! all runs that were issued before the copy. A GPU waits for the weights of its next run, the thread does not. Rates are those of
//! [`machine`](super::machine).

use super::Machine;
use super::machine::CopyState;
use super::record::{SimulatedCopy, SimulationObserver};
use crate::schedule::{Copies, PartitionSteps, PassSteps, ScheduleStep, StepKind};
use crate::{DeviceId, Problem};
use std::collections::VecDeque;

/// Smaller remainders are rounding errors, milliseconds.
const ROUNDING_MS: f64 = 1e-12;

/// The thread that issues runs, the queues of the GPUs and the copies of weights to them.
pub(super) struct QueuedMachine<'a, R: SimulationObserver> {
    /// When the thread goes on, milliseconds.
    now: f64,
    gpus: Vec<Gpu>,
    /// For each run of the pass that needs states copied ahead: its copies, until they are issued.
    ahead: VecDeque<Vec<ScheduleStep>>,
    /// Sequences of a pass.
    sequences: u64,
    recorder: &'a mut R,
}

/// A GPU: what it computes, and the weights that are copied to it.
struct Gpu {
    /// In order; the first is in progress.
    queue: VecDeque<Queued>,
    /// When the first of the queue started, milliseconds.
    started: f64,
    /// Numbers of runs issued and computed.
    issued_runs: u64,
    computed_runs: u64,
    copies: Copies,
    slots: u64,
    /// Total number of copies; `u64::MAX` in decoding.
    max_copies: u64,
    /// Copies of weights issued and not done, in order; the first is in progress once its slot is free.
    in_flight: VecDeque<InFlight>,
    /// Copies of states issued and not done, in order. The first is in progress once the weights that earlier runs wait for are copied;
    /// copies of other weights pause while it is.
    states: VecDeque<StatesInFlight>,
    /// Numbers of copies issued and done, of copies awaited by runs, and of slots freed.
    issued: u64,
    done: u64,
    awaited: u64,
    freed: u64,
    /// Numbers of copies of states done, and of those awaited by runs.
    done_states: u64,
    awaited_states: u64,
    compute_contention: f64,
    link_contention: f64,
}

/// What a GPU has in its queue.
enum Queued {
    Run {
        step: ScheduleStep,
        remaining_ms: f64,
    },
    /// Waits for the copy with this number.
    Weights(u64),
    /// Waits for the copy of states with this number.
    States(u64),
}

/// A copy of states.
struct StatesInFlight {
    step: ScheduleStep,
    /// Without contention, milliseconds.
    remaining_ms: f64,
    /// Number of copies of weights that must be done before it starts.
    after: u64,
    /// When it started, milliseconds.
    started: Option<f64>,
}

/// A copy of weights.
struct InFlight {
    block: usize,
    /// Without contention, milliseconds.
    remaining_ms: f64,
    /// Number of runs that the GPU must have computed before it starts.
    after_runs: u64,
    /// When it started, milliseconds.
    started: Option<f64>,
}

/// What the thread does.
#[derive(Clone, Copy, PartialEq)]
enum Activity {
    HostCompute,
    /// Copies a boundary or state to this GPU.
    CopyTo(usize),
    Other,
}

impl Gpu {
    fn new(problem: &Problem, gpu: usize, copies: Copies, slots: u32, passes: Option<u64>) -> Self {
        Gpu {
            queue: VecDeque::new(),
            started: 0.0,
            issued_runs: 0,
            computed_runs: 0,
            slots: u64::from(slots).min(copies.len() as u64),
            max_copies: passes.map_or(u64::MAX, |passes| passes * copies.len() as u64),
            copies,
            in_flight: VecDeque::new(),
            states: VecDeque::new(),
            issued: 0,
            done: 0,
            awaited: 0,
            freed: 0,
            done_states: 0,
            awaited_states: 0,
            compute_contention: problem.gpus[gpu].compute_contention.max(1.0),
            link_contention: problem.gpus[gpu].link_contention.max(1.0),
        }
    }

    /// Issues copies to free slots.
    fn fill_slots(&mut self) {
        while !self.copies.is_empty() && self.issued < self.max_copies && self.issued - self.freed < self.slots {
            let (block, remaining_ms) = self.copies[(self.issued % self.copies.len() as u64) as usize];
            let copy = InFlight { block, remaining_ms, after_runs: self.issued_runs, started: None };
            self.in_flight.push_back(copy);
            self.issued += 1;
        }
    }

    /// Whether states or weights are copied.
    fn is_copying(&self) -> bool {
        self.states().is_some() || self.copying().is_some()
    }

    /// The copy of states in progress.
    fn states(&self) -> Option<&StatesInFlight> {
        self.states.front().filter(|states| states.after <= self.done)
    }

    /// Milliseconds of work until the copy in progress is done.
    fn remaining_ms(&self) -> Option<f64> {
        let states = self.states().map(|states| states.remaining_ms);
        states.or_else(|| self.copying().map(|copy| copy.remaining_ms))
    }

    /// The copy of weights in progress, which pauses while states are copied.
    fn copying(&self) -> Option<&InFlight> {
        self.in_flight.front().filter(|copy| copy.after_runs <= self.computed_runs)
    }

    /// Progress of the copy in progress per millisecond.
    fn copy_rate(&self, gpu: usize, activity: Activity) -> f64 {
        match activity {
            Activity::CopyTo(other) if other == gpu => 0.0,
            Activity::HostCompute => 1.0 / self.link_contention,
            _ => 1.0,
        }
    }
}

impl<'a, R: SimulationObserver> QueuedMachine<'a, R> {
    /// An idle machine with empty slots. The copies to each GPU repeat `passes` times; `None` is unlimited.
    pub fn new(
        problem: &Problem,
        copies: Vec<Copies>,
        slots: &[u32],
        passes: Option<u64>,
        recorder: &'a mut R,
    ) -> Self {
        let gpu = |(gpu, copies)| Gpu::new(problem, gpu, copies, slots.get(gpu).copied().unwrap_or(0), passes);
        let gpus = copies.into_iter().enumerate().map(gpu).collect();
        QueuedMachine { now: 0.0, gpus, ahead: VecDeque::new(), sequences: problem.load.sequences, recorder }
    }

    /// Runs one pass of all sequences, and waits for all GPUs. `steps` are those of one sequence. Returns false if the pass
    /// never ends.
    pub fn run_pass(&mut self, steps: &PassSteps, pass: u64) -> bool {
        self.recorder.pass(pass);
        self.gpus.iter_mut().for_each(Gpu::fill_slots);
        // The copies ahead of every sequence, in the order of runs.
        let ahead = |partition: &&PartitionSteps| partition.swaps_in.iter().any(is_ahead);
        let staged = steps.partitions.iter().filter(ahead);
        let states =
            |partition: &PartitionSteps| partition.swaps_in.iter().filter(|step| is_ahead(step)).cloned().collect();
        self.ahead = staged.flat_map(|partition| (0..self.sequences).map(move |_| states(partition))).collect();
        self.issue_states();
        let mut partitions = &steps.partitions[..];
        while !partitions.is_empty() {
            let (pipeline, rest) = partitions.split_at(pipeline_length(partitions));
            match pipeline {
                [alone] => self.run_alone(alone),
                _ => self.run_pipeline(pipeline),
            }
            partitions = rest;
        }
        (0..self.gpus.len()).for_each(|gpu| self.wait_for(gpu));
        (0..self.sequences).for_each(|_| self.copy(&steps.end));
        self.now.is_finite()
    }

    /// All sequences through one partition, one after the other.
    fn run_alone(&mut self, partition: &PartitionSteps) {
        (0..self.sequences).for_each(|_| self.copy(&partition.crossing));
        for sequence in 0..self.sequences {
            self.receive(&partition.swaps_in);
            if sequence == 0 {
                self.await_weights(&partition.compute);
            }
            self.compute(&partition.compute);
            if partition.swaps_in.iter().any(is_ahead) {
                self.issue_states();
            }
            if sequence + 1 == self.sequences {
                self.release(&partition.compute);
            }
            self.copy(&partition.swaps_out);
        }
    }

    fn run_pipeline(&mut self, pipeline: &[PartitionSteps]) {
        let turns = self.sequences + pipeline.len() as u64 - 1;
        for turn in 0..turns {
            let sequence = |position: usize| turn.checked_sub(position as u64).filter(|at| *at < self.sequences);
            let active = pipeline.iter().enumerate().filter_map(|(at, partition)| Some((partition, sequence(at)?)));
            let active: Vec<(&PartitionSteps, u64)> = active.collect();
            for (partition, sequence) in &active {
                self.copy(&partition.crossing);
                if *sequence == 0 {
                    self.await_weights(&partition.compute);
                }
            }
            let (on_host, on_gpus): (Vec<_>, Vec<_>) =
                active.into_iter().partition(|(partition, _)| is_on_host(partition));
            for (partition, sequence) in on_gpus.into_iter().chain(on_host) {
                self.compute(&partition.compute);
                if sequence + 1 == self.sequences {
                    self.release(&partition.compute);
                }
            }
        }
    }

    /// Issues the copy of the states that the next run needs.
    fn issue_states(&mut self) {
        for step in self.ahead.pop_front().into_iter().flatten() {
            if let StepKind::Ahead(gpu, _) = step.kind {
                let states =
                    StatesInFlight { remaining_ms: step.ms, step, after: self.gpus[gpu].awaited, started: None };
                self.gpus[gpu].states.push_back(states);
            }
        }
    }

    /// Gets the states of a run to its device: the thread makes the copies that are not made ahead, such as those from another GPU, and the
    /// GPU waits for the copies ahead.
    fn receive(&mut self, swaps_in: &[ScheduleStep]) {
        let (ahead, now): (Vec<&ScheduleStep>, Vec<&ScheduleStep>) = swaps_in.iter().partition(|step| is_ahead(step));
        self.copy(&now.into_iter().cloned().collect::<Vec<_>>());
        for step in ahead {
            if let StepKind::Ahead(gpu, _) = step.kind {
                let awaited = self.gpus[gpu].awaited_states;
                self.gpus[gpu].awaited_states += 1;
                self.enqueue(gpu, Queued::States(awaited));
            }
        }
    }

    fn enqueue(&mut self, gpu: usize, work: Queued) {
        let gpu = &mut self.gpus[gpu];
        if gpu.queue.is_empty() {
            gpu.started = self.now;
        }
        gpu.queue.push_back(work);
        self.advance_queues();
    }

    /// Before the first run of a partition: its GPU waits for its weights, if they are streamed.
    fn await_weights(&mut self, step: &ScheduleStep) {
        if let StepKind::Streamed(gpu) = step.kind {
            let awaited = self.gpus[gpu].awaited;
            self.gpus[gpu].awaited += 1;
            self.enqueue(gpu, Queued::Weights(awaited));
        }
    }

    /// After the last run of a partition was issued: frees its slot, if its weights are streamed.
    fn release(&mut self, step: &ScheduleStep) {
        if let StepKind::Streamed(gpu) = step.kind {
            self.gpus[gpu].freed += 1;
            self.gpus[gpu].fill_slots();
        }
    }

    /// One sequence's run: the host computes, or a GPU gets it into its queue.
    fn compute(&mut self, step: &ScheduleStep) {
        match step.kind {
            StepKind::Compute(DeviceId::Gpu(gpu)) | StepKind::Streamed(gpu) => {
                self.gpus[gpu].issued_runs += 1;
                self.enqueue(gpu, Queued::Run { step: step.clone(), remaining_ms: step.ms });
            }
            _ => self.pass_time(step),
        }
    }

    /// Copies of one sequence, one after the other, which wait for the GPUs at both ends; and the overhead of a pass.
    fn copy(&mut self, steps: &[ScheduleStep]) {
        for step in steps {
            if let StepKind::To(gpu, _) | StepKind::From(gpu, _) = step.kind {
                self.wait_for(gpu);
            }
        }
        steps.iter().for_each(|step| self.pass_time(step));
    }

    /// Waits until the queue of a GPU is empty.
    fn wait_for(&mut self, gpu: usize) {
        while !self.gpus[gpu].queue.is_empty() && self.now.is_finite() {
            self.advance(Activity::Other, f64::INFINITY);
        }
    }

    /// The thread does a step.
    fn pass_time(&mut self, step: &ScheduleStep) {
        let activity = match step.kind {
            StepKind::Compute(DeviceId::Cpu) => Activity::HostCompute,
            StepKind::To(gpu, _) => Activity::CopyTo(gpu),
            _ => Activity::Other,
        };
        let (start, mut remaining_ms) = (self.now, step.ms);
        while remaining_ms > 0.0 && self.now.is_finite() {
            let rate = match activity {
                Activity::HostCompute => {
                    let copying = self.gpus.iter().filter(|gpu| gpu.is_copying());
                    1.0 / copying.map(|gpu| gpu.compute_contention).fold(1.0, f64::max)
                }
                _ => 1.0,
            };
            let max_ms = remaining_ms / rate;
            let passed = self.advance(activity, max_ms);
            remaining_ms = if passed >= max_ms { 0.0 } else { remaining_ms - passed * rate };
        }
        self.recorder.step(step, start, self.now);
    }

    /// Advances the time until a run or a copy is done, at most by `max_ms`; returns the milliseconds that passed.
    fn advance(&mut self, activity: Activity, max_ms: f64) -> f64 {
        let mut passed = max_ms;
        for (number, gpu) in self.gpus.iter_mut().enumerate() {
            if let Some(Queued::Run { remaining_ms, .. }) = gpu.queue.front() {
                passed = passed.min(*remaining_ms);
            }
            let rate = gpu.copy_rate(number, activity);
            if let Some(remaining_ms) = gpu.remaining_ms().filter(|_| rate > 0.0) {
                passed = passed.min(remaining_ms / rate);
            }
        }
        let start = self.now;
        self.now += passed;
        for (number, gpu) in self.gpus.iter_mut().enumerate() {
            let rate = gpu.copy_rate(number, activity);
            let computed_runs = gpu.computed_runs;
            let done = gpu.done;
            if let Some(states) = gpu.states.front_mut().filter(|states| states.after <= done) {
                states.started.get_or_insert(start);
                states.remaining_ms -= passed * rate;
            } else if let Some(copy) = gpu.in_flight.front_mut().filter(|copy| copy.after_runs <= computed_runs) {
                copy.started.get_or_insert(start);
                copy.remaining_ms -= passed * rate;
            }
            if let Some(Queued::Run { remaining_ms, .. }) = gpu.queue.front_mut() {
                *remaining_ms -= passed;
            }
        }
        self.advance_queues();
        passed
    }

    /// Removes finished work from the queues.
    fn advance_queues(&mut self) {
        let now = self.now;
        let is_done = |remaining_ms: f64| remaining_ms <= ROUNDING_MS * now.max(1.0);
        for number in 0..self.gpus.len() {
            let gpu = &mut self.gpus[number];
            loop {
                if gpu.states().is_some_and(|states| is_done(states.remaining_ms)) {
                    if let Some(StatesInFlight { step, started, .. }) = gpu.states.pop_front() {
                        self.recorder.step(&step, started.unwrap_or(now), now);
                    }
                    gpu.done_states += 1;
                    continue;
                }
                let may_copy = gpu.states().is_none();
                if let Some(copy) = gpu.copying().filter(|copy| may_copy && is_done(copy.remaining_ms)) {
                    let (block, started) = (copy.block, copy.started.unwrap_or(now));
                    let copy = SimulatedCopy { gpu: number, block, number: gpu.done, is_complete: true };
                    self.recorder.copy(copy, started, now);
                    gpu.in_flight.pop_front();
                    gpu.done += 1;
                    continue;
                }
                match gpu.queue.front() {
                    Some(Queued::Run { step, remaining_ms }) if is_done(*remaining_ms) => {
                        self.recorder.step(step, gpu.started, now);
                        gpu.computed_runs += 1;
                    }
                    Some(Queued::Weights(copy)) if *copy < gpu.done => self.recorder.stall(number, gpu.started, now),
                    Some(Queued::States(copy)) if *copy < gpu.done_states => {}
                    _ => break,
                }
                gpu.queue.pop_front();
                gpu.started = now;
            }
        }
    }
}

impl<R: SimulationObserver> Machine for QueuedMachine<'_, R> {
    fn now(&self) -> f64 {
        self.now
    }

    fn copy_state(&self) -> CopyState {
        let state = |gpu: &Gpu| {
            let remaining: f64 = gpu.in_flight.iter().map(|copy| copy.remaining_ms).sum();
            (gpu.issued - gpu.freed, remaining)
        };
        CopyState(self.gpus.iter().map(state).collect())
    }

    fn record_unfinished(&mut self) {
        for (number, gpu) in self.gpus.iter().enumerate() {
            if let Some((block, started)) = gpu.copying().and_then(|copy| Some((copy.block, copy.started?))) {
                let copy = SimulatedCopy { gpu: number, block, number: gpu.done, is_complete: false };
                self.recorder.copy(copy, started, self.now);
            }
        }
    }
}

/// Number of partitions, counted from the first, that form a pipeline.
fn pipeline_length(partitions: &[PartitionSteps]) -> usize {
    let is_alone = |partition: &PartitionSteps| !(partition.swaps_in.is_empty() && partition.swaps_out.is_empty());
    let streams = |partition: &PartitionSteps| match partition.compute.kind {
        StepKind::Streamed(gpu) => Some(gpu),
        _ => None,
    };
    let mut length = 1;
    while let [.., last, next] = &partitions[..partitions.len().min(length + 1)] {
        let streams_twice = streams(next)
            .is_some_and(|gpu| partitions[..length].iter().any(|partition| streams(partition) == Some(gpu)));
        let joins = length < partitions.len() && device(last) != device(next) && !is_alone(last) && !is_alone(next);
        if !joins || streams_twice {
            break;
        }
        length += 1;
    }
    length
}

/// Whether a step is a copy of states that is issued before the partition runs.
fn is_ahead(step: &ScheduleStep) -> bool {
    matches!(step.kind, StepKind::Ahead(..))
}

/// Where a partition computes.
fn device(partition: &PartitionSteps) -> DeviceId {
    match partition.compute.kind {
        StepKind::Compute(device) => device,
        StepKind::Streamed(gpu) => DeviceId::Gpu(gpu),
        _ => DeviceId::Cpu,
    }
}

fn is_on_host(partition: &PartitionSteps) -> bool {
    device(partition) == DeviceId::Cpu
}
