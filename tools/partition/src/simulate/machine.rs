//! The simulated machine: a chain of steps, and for each GPU a copy engine that fills a ring of slots.
//!
//! An event simulation with constant rates between two events: a step on the host runs at `1 / compute_contention` while weights
//! are copied, a copy at `1 / link_contention` while the host computes, and a copy pauses while a boundary or state is copied in the
//! same direction (weights are copied in pieces, so boundaries overtake them).

use super::record::{Copied, Recorder};
use crate::schedule::{Copies, Step, StepKind};
use crate::{Place, Problem};

/// Smaller remainders of a copy are rounding errors, milliseconds.
const ROUNDING: f64 = 1e-12;

/// The engine that copies weights to one GPU.
#[derive(Clone, Debug)]
struct CopyEngine {
    copies: Copies,
    slots: u64,
    /// Number of copies in total; unlimited in decoding.
    most: u64,
    /// Number of copies begun and done, and of slots freed.
    begun: u64,
    done: u64,
    freed: u64,
    /// Remaining milliseconds of the current copy, and its start.
    left: f64,
    since: f64,
    compute_contention: f64,
    link_contention: f64,
}

impl CopyEngine {
    fn busy(&self) -> bool {
        self.begun > self.done
    }

    /// The block of the current copy.
    fn block(&self) -> usize {
        self.copies[(self.done % self.copies.len() as u64) as usize].0
    }

    /// Occupied slots, and the remainder of the current copy.
    fn state(&self) -> (u64, f64) {
        (self.begun - self.freed, if self.busy() { self.left } else { 0.0 })
    }

    fn begin(&mut self, now: f64) {
        let wanted = !self.copies.is_empty() && self.begun < self.most;
        if wanted && !self.busy() && self.begun - self.freed < self.slots {
            self.left = self.copies[(self.begun % self.copies.len() as u64) as usize].1;
            self.since = now;
            self.begun += 1;
        }
    }
}

/// What the chain does.
#[derive(Clone, Copy)]
enum Activity {
    /// Computes on the host.
    Host,
    /// Does something without contention.
    Other,
    /// Waits for a copy of weights.
    Waits,
    /// Copies to this GPU.
    CopiesTo(usize),
}

/// The machine at a point in time.
pub(super) struct Simulator<'a, R: Recorder> {
    now: f64,
    copy_engines: Vec<CopyEngine>,
    recorder: &'a mut R,
}

/// State of the copy engines between two passes: for each GPU the number of occupied slots, and the remainder of the current copy.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct CopyState(Vec<(u64, f64)>);

impl CopyState {
    /// Whether both states have the same future.
    pub fn is_like(&self, other: &CopyState, tolerance: f64) -> bool {
        let pairs = self.0.iter().zip(&other.0);
        pairs.into_iter().all(|(a, b)| a.0 == b.0 && (a.1 - b.1).abs() <= tolerance)
    }
}

impl<'a, R: Recorder> Simulator<'a, R> {
    /// A machine with empty rings. The copies are repeated `passes` times; `None` is unlimited.
    pub fn new(
        problem: &Problem,
        copies: Vec<Copies>,
        slots: &[u32],
        passes: Option<u64>,
        recorder: &'a mut R,
    ) -> Self {
        let engine = |(gpu, copies): (usize, Copies)| CopyEngine {
            most: passes.map_or(u64::MAX, |passes| passes * copies.len() as u64),
            // A ring never holds the same weights twice.
            slots: u64::from(slots[gpu]).min(copies.len() as u64),
            copies,
            begun: 0,
            done: 0,
            freed: 0,
            left: 0.0,
            since: 0.0,
            compute_contention: problem.gpus[gpu].compute_contention.max(1.0),
            link_contention: problem.gpus[gpu].link_contention.max(1.0),
        };
        Simulator { now: 0.0, copy_engines: copies.into_iter().enumerate().map(engine).collect(), recorder }
    }

    /// Milliseconds since the start.
    pub fn now(&self) -> f64 {
        self.now
    }

    pub fn copy_state(&self) -> CopyState {
        CopyState(self.copy_engines.iter().map(CopyEngine::state).collect())
    }

    /// Runs the steps of one pass; false if one of them waits for ever.
    pub fn take(&mut self, steps: &[Step], pass: u64) -> bool {
        self.recorder.pass(pass);
        steps.iter().all(|step| self.step(step))
    }

    /// Records the copies that are not finished.
    pub fn record_unfinished(&mut self) {
        for (gpu, engine) in self.copy_engines.iter().enumerate().filter(|(_, engine)| engine.busy()) {
            self.recorder.copy(
                Copied { gpu, block: engine.block(), number: engine.done, whole: false },
                engine.since,
                self.now,
            );
        }
    }

    /// Sets the time.
    pub fn skip_to(&mut self, now: f64) {
        self.now = now;
    }

    fn step(&mut self, step: &Step) -> bool {
        if let StepKind::Streamed(gpu) = step.kind
            && !self.wait(gpu)
        {
            return false;
        }
        let start = self.now;
        let activity = match step.kind {
            StepKind::Compute(Place::Cpu) => Activity::Host,
            StepKind::To(gpu, _) => Activity::CopiesTo(gpu),
            _ => Activity::Other,
        };
        let mut left = step.ms;
        while left > 0.0 {
            let rate = self.chain_rate(activity);
            let most = left / rate;
            let passed = self.advance(activity, most);
            left = if passed >= most { 0.0 } else { left - passed * rate };
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

    fn wait(&mut self, gpu: usize) -> bool {
        let start = self.now;
        while self.copy_engines[gpu].done <= self.copy_engines[gpu].freed {
            self.advance(Activity::Waits, f64::INFINITY);
            if !self.now.is_finite() {
                return false;
            }
        }
        self.recorder.stall(gpu, start, self.now);
        true
    }

    fn chain_rate(&mut self, activity: Activity) -> f64 {
        self.begin();
        match activity {
            Activity::Host => {
                let slow =
                    self.copy_engines.iter().filter(|engine| engine.busy()).map(|engine| engine.compute_contention);
                1.0 / slow.fold(1.0, f64::max)
            }
            _ => 1.0,
        }
    }

    fn begin(&mut self) {
        let now = self.now;
        self.copy_engines.iter_mut().for_each(|engine| engine.begin(now));
    }

    /// Advances the time until a copy is done, at most by `most` milliseconds; returns the milliseconds that passed.
    fn advance(&mut self, activity: Activity, most: f64) -> f64 {
        self.begin();
        let rate = |(gpu, engine): (usize, &CopyEngine)| match activity {
            _ if !engine.busy() => 0.0,
            Activity::CopiesTo(other) if other == gpu => 0.0,
            Activity::Host => 1.0 / engine.link_contention,
            _ => 1.0,
        };
        let until = |(gpu, engine)| {
            let rate = rate((gpu, engine));
            if rate > 0.0 { engine.left / rate } else { f64::INFINITY }
        };
        let next = self.copy_engines.iter().enumerate().map(until).fold(f64::INFINITY, f64::min);
        let passed = next.min(most);
        let moved: Vec<f64> = self.copy_engines.iter().enumerate().map(|at| passed * rate(at)).collect();
        self.now += passed;
        for (gpu, moved) in moved.into_iter().enumerate() {
            let engine = &mut self.copy_engines[gpu];
            if engine.busy() && moved > 0.0 || engine.busy() && engine.left <= ROUNDING {
                engine.left -= moved;
                if engine.left <= ROUNDING * self.now.max(1.0) {
                    let copied = Copied { gpu, block: engine.block(), number: engine.done, whole: true };
                    self.recorder.copy(copied, engine.since, self.now);
                    engine.done += 1;
                    engine.left = 0.0;
                }
            }
        }
        passed
    }
}
