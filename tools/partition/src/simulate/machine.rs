//! The simulated machine: a sequence of steps, and for each GPU a copy engine that fills a slot ring.
//!
//! An event simulation with constant rates between two events: a step on the host runs at `1 / compute_contention` while weights
//! are copied, a copy at `1 / link_contention` while the host computes, and a copy pauses while a boundary or state is copied in the
//! same direction (weights are copied in pieces, between which other copies run).

use super::Machine;
use super::record::{SimulatedCopy, SimulationObserver};
use crate::schedule::{Copies, ScheduleStep, StepKind};
use crate::{DeviceId, Problem};

/// Smaller remainders of a copy are rounding errors, milliseconds.
const ROUNDING_MS: f64 = 1e-12;

/// The engine that copies weights to one GPU.
#[derive(Clone, Debug)]
struct CopyEngine {
    copies: Copies,
    slots: u64,
    /// Total number of copies; `u64::MAX` in decoding.
    max_copies: u64,
    /// Numbers of copies started and done, and of slots freed. Invariant: `freed <= done <= started <= done + 1`.
    started: u64,
    done: u64,
    freed: u64,
    /// Remaining time of the current copy without contention, milliseconds.
    remaining_ms: f64,
    /// Start of the current copy, milliseconds.
    start: f64,
    compute_contention: f64,
    link_contention: f64,
}

impl CopyEngine {
    fn is_busy(&self) -> bool {
        self.started > self.done
    }

    /// The block of the current copy.
    fn block(&self) -> usize {
        self.copies[(self.done % self.copies.len() as u64) as usize].0
    }

    /// Occupied slots, and the remainder of the current copy.
    fn state(&self) -> (u64, f64) {
        (self.started - self.freed, if self.is_busy() { self.remaining_ms } else { 0.0 })
    }

    /// Starts the next copy if the engine is idle and a slot is free.
    fn try_start(&mut self, now: f64) {
        let has_work = !self.copies.is_empty() && self.started < self.max_copies;
        if has_work && !self.is_busy() && self.started - self.freed < self.slots {
            self.remaining_ms = self.copies[(self.started % self.copies.len() as u64) as usize].1;
            self.start = now;
            self.started += 1;
        }
    }
}

/// What the partition sequence does at a point in time.
#[derive(Clone, Copy)]
enum SequenceActivity {
    /// Computes on the host.
    HostCompute,
    /// Copies a boundary or state to this GPU.
    CopyTo(usize),
    /// Waits for a copy of weights.
    Wait,
    /// Anything else, which no copy of weights slows down.
    Other,
}

/// The machine at a point in time.
pub(super) struct Simulator<'a, R: SimulationObserver> {
    now: f64,
    copy_engines: Vec<CopyEngine>,
    recorder: &'a mut R,
}

/// State of the copy engines between two passes: for each GPU the number of occupied slots, and the remainder of the current copy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CopyState(pub(super) Vec<(u64, f64)>);

impl CopyState {
    /// Whether both states are equal within a tolerance in milliseconds, so that the simulation repeats.
    pub fn equals(&self, other: &CopyState, tolerance: f64) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        pairs.into_iter().all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() <= tolerance)
    }
}

impl<'a, R: SimulationObserver> Simulator<'a, R> {
    /// A machine with empty rings. The copies repeat `passes` times; `None` is unlimited.
    pub fn new(
        problem: &Problem,
        copies: Vec<Copies>,
        slots: &[u32],
        passes: Option<u64>,
        recorder: &'a mut R,
    ) -> Self {
        let engine = |(gpu, copies): (usize, Copies)| CopyEngine {
            max_copies: passes.map_or(u64::MAX, |passes| passes * copies.len() as u64),
            // A ring never holds the same weights twice.
            slots: u64::from(slots[gpu]).min(copies.len() as u64),
            copies,
            started: 0,
            done: 0,
            freed: 0,
            remaining_ms: 0.0,
            start: 0.0,
            compute_contention: problem.gpus[gpu].compute_contention.max(1.0),
            link_contention: problem.gpus[gpu].link_contention.max(1.0),
        };
        Simulator { now: 0.0, copy_engines: copies.into_iter().enumerate().map(engine).collect(), recorder }
    }

    /// Runs the steps of one pass. Returns false if one of them waits forever.
    pub fn run_steps(&mut self, steps: &[ScheduleStep], pass: u64) -> bool {
        self.recorder.pass(pass);
        steps.iter().all(|step| self.step(step))
    }

    /// Sets the time.
    pub fn skip_to(&mut self, now: f64) {
        self.now = now;
    }

    fn step(&mut self, step: &ScheduleStep) -> bool {
        if let StepKind::Streamed(gpu) = step.kind
            && !self.wait_for_weights(gpu)
        {
            return false;
        }
        let start = self.now;
        let activity = match step.kind {
            StepKind::Compute(DeviceId::Cpu) => SequenceActivity::HostCompute,
            StepKind::To(gpu, _) => SequenceActivity::CopyTo(gpu),
            _ => SequenceActivity::Other,
        };
        let mut remaining_ms = step.ms;
        while remaining_ms > 0.0 {
            let rate = self.step_rate(activity);
            let max_ms = remaining_ms / rate;
            let passed = self.advance(activity, max_ms);
            remaining_ms = if passed >= max_ms { 0.0 } else { remaining_ms - passed * rate };
            if !self.now.is_finite() {
                return false;
            }
        }
        if let StepKind::Streamed(gpu) = step.kind {
            self.copy_engines[gpu].freed += 1;
        }
        self.recorder.step(step, start, self.now);
        true
    }

    /// Waits until the weights of the next streamed block of this GPU are copied. Returns false if that never happens.
    fn wait_for_weights(&mut self, gpu: usize) -> bool {
        let start = self.now;
        while self.copy_engines[gpu].done <= self.copy_engines[gpu].freed {
            self.advance(SequenceActivity::Wait, f64::INFINITY);
            if !self.now.is_finite() {
                return false;
            }
        }
        self.recorder.stall(gpu, start, self.now);
        true
    }

    /// Progress of a step per millisecond: below 1 if copies slow it down.
    fn step_rate(&mut self, activity: SequenceActivity) -> f64 {
        self.start_copies();
        match activity {
            SequenceActivity::HostCompute => {
                let busy = self.copy_engines.iter().filter(|engine| engine.is_busy());
                1.0 / busy.map(|engine| engine.compute_contention).fold(1.0, f64::max)
            }
            _ => 1.0,
        }
    }

    fn start_copies(&mut self) {
        let now = self.now;
        self.copy_engines.iter_mut().for_each(|engine| engine.try_start(now));
    }

    /// Advances the time until a copy is done, at most by `max_ms` milliseconds; returns the milliseconds that passed.
    fn advance(&mut self, activity: SequenceActivity, max_ms: f64) -> f64 {
        self.start_copies();
        let rate = |(gpu, engine): (usize, &CopyEngine)| match activity {
            _ if !engine.is_busy() => 0.0,
            SequenceActivity::CopyTo(other) if other == gpu => 0.0,
            SequenceActivity::HostCompute => 1.0 / engine.link_contention,
            _ => 1.0,
        };
        let ms_until_done = |(gpu, engine)| {
            let rate = rate((gpu, engine));
            if rate > 0.0 { engine.remaining_ms / rate } else { f64::INFINITY }
        };
        let next_done = self.copy_engines.iter().enumerate().map(ms_until_done).fold(f64::INFINITY, f64::min);
        let passed = next_done.min(max_ms);
        let progress: Vec<f64> = self.copy_engines.iter().enumerate().map(|engine| passed * rate(engine)).collect();
        self.now += passed;
        for (gpu, progress) in progress.into_iter().enumerate() {
            let engine = &mut self.copy_engines[gpu];
            if engine.is_busy() && (progress > 0.0 || engine.remaining_ms <= ROUNDING_MS) {
                engine.remaining_ms -= progress;
                if engine.remaining_ms <= ROUNDING_MS * self.now.max(1.0) {
                    let copy = SimulatedCopy { gpu, block: engine.block(), number: engine.done, is_complete: true };
                    self.recorder.copy(copy, engine.start, self.now);
                    engine.done += 1;
                    engine.remaining_ms = 0.0;
                }
            }
        }
        passed
    }
}

impl<R: SimulationObserver> Machine for Simulator<'_, R> {
    fn now(&self) -> f64 {
        self.now
    }

    fn copy_state(&self) -> CopyState {
        CopyState(self.copy_engines.iter().map(CopyEngine::state).collect())
    }

    fn record_unfinished(&mut self) {
        for (gpu, engine) in self.copy_engines.iter().enumerate().filter(|(_, engine)| engine.is_busy()) {
            let copy = SimulatedCopy { gpu, block: engine.block(), number: engine.done, is_complete: false };
            self.recorder.copy(copy, engine.start, self.now);
        }
    }
}
