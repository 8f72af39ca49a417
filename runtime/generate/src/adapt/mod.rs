//! Keeps a running engine true to its plan where the machine changes: follows the memory that the system allows, and moves partitions while
//! passes are slower than planned. Each change happens between two passes and needs no new session. No token changes unless partitions may
//! compute on other devices ([`Devices::Other`]).
//!
//! - [`HostLimit`] is the memory that may be taken, and [`shares`] what engines do without for it.
//! - [`DriftDetector`] compares passes with the plan's predictions, and [`Moves`] decides which partition moves.
//! - [`Adaptation`] applies both to one engine, and says what and why.

mod drift;
mod limit;
mod memory;
mod moves;
mod share;

pub use drift::{Cause, Drift, DriftDetector, PassObservation, PredictedTimes, Window};
pub use limit::{AllowedMemoryFn, HostLimit, MEMORY_INTERVAL};
pub use memory::HostMemory;
pub use moves::{Decision, Devices, Move, Moves, Why};
pub use share::{EngineShare, Reclaimable, shares};

use drift::{AS_PLANNED, SLOWER};
use hpp_engine::{Backend, Engine, EngineError};
use hpp_schema::Plan;
use memory::MemoryFollower;
use std::time::Instant;

/// Keeps one engine true to its plan.
pub struct Adaptation {
    memory: Option<MemoryFollower>,
    drift: Option<(DriftDetector, Moves)>,
    /// Takes lines for people.
    report: Box<dyn Fn(&str)>,
    /// Whether the current slowdown was reported.
    is_reported: bool,
    /// The slowdown of the last window.
    slowdown: f64,
}

/// The size of a pass: sequences, and tokens of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PassSize {
    /// Sequences.
    pub sequences: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Tokens of the longest text, those of the pass included.
    pub context: u64,
}

impl Adaptation {
    /// An adaptation of an engine with this plan. `report` takes a line for each change.
    pub fn new(plan: &Plan, devices: Devices, report: Box<dyn Fn(&str)>) -> Self {
        let drift = DriftDetector::new(plan).map(|detector| (detector, Moves::of(plan, devices)));
        Adaptation { memory: None, drift, report, is_reported: false, slowdown: 1.0 }
    }

    /// Follows the memory that the system allows.
    pub fn follow_memory(mut self, memory: HostMemory) -> Self {
        self.memory = Some(MemoryFollower::new(memory, Instant::now()));
        self
    }

    /// What the engine may take now of what it can do without, if the system limits it.
    pub fn share(&self) -> Option<&EngineShare> {
        self.memory.as_ref().filter(|memory| memory.is_reduced()).map(MemoryFollower::share)
    }

    /// The time of recent passes over the planned time, or the usual time where the plan's was not measured.
    pub fn slowdown(&self) -> f64 {
        self.slowdown
    }

    /// Whether passes are slower than planned, and that was reported.
    pub fn is_reported_slow(&self) -> bool {
        self.is_reported
    }

    /// Looks at the engine's last pass, and changes the engine if that is due. Returns whether passes may take another time from now on.
    pub(crate) fn after_pass<B: Backend>(
        &mut self,
        engine: &mut Engine<B>,
        size: Option<PassSize>,
        now: Instant,
    ) -> Result<bool, EngineError> {
        let has_memory_changed = self.follow(engine, now)?;
        let has_moved = match size {
            Some(size) => self.compare(engine, size)?,
            None => false,
        };
        Ok(has_memory_changed || has_moved)
    }

    fn follow<B: Backend>(&mut self, engine: &mut Engine<B>, now: Instant) -> Result<bool, EngineError> {
        let Some(memory) = &mut self.memory else { return Ok(false) };
        let Some(change) = memory.observe(now) else { return Ok(false) };
        engine.set_locked(change.share.locked)?;
        (self.report)(&change.line);
        if let Some((detector, _)) = &mut self.drift {
            detector.recalibrate();
            self.is_reported = false;
        }
        Ok(true)
    }

    fn compare<B: Backend>(&mut self, engine: &mut Engine<B>, size: PassSize) -> Result<bool, EngineError> {
        let Some((detector, moves)) = &mut self.drift else { return Ok(false) };
        let pass = PassObservation::new(engine.last_pass(), size);
        let Some(window) = detector.observe(&pass) else { return Ok(false) };
        self.slowdown = detector.slowdown(&window);
        let cause = detector.drift().filter(|_| self.slowdown >= SLOWER).map(|drift| drift.cause);
        if let Some(decision) = moves.next(self.slowdown, cause) {
            let line = line(&decision, detector);
            match make(engine, &decision.change) {
                Ok(()) => {
                    detector.unsettle();
                    (self.report)(&line);
                    return Ok(true);
                }
                // A device without room, for instance.
                Err(EngineError::Memory { .. } | EngineError::CannotMove { .. }) => moves.failed(),
                Err(error) => return Err(error),
            }
        }
        let Some(drift) = detector.drift().filter(|drift| moves.is_exhausted(drift.cause)) else {
            self.is_reported &= self.slowdown > AS_PLANNED;
            return Ok(false);
        };
        if !std::mem::replace(&mut self.is_reported, true) {
            (self.report)(&format!(
                "{drift}. Nothing that this run can change helps; hpp-exec bench PLAN --json > run.json measures it, \
                 and hpp-split MODEL --from-telemetry run.json plans for it"
            ));
        }
        Ok(false)
    }
}

fn make<B: Backend>(engine: &mut Engine<B>, change: &Move) -> Result<(), EngineError> {
    match change {
        Move::Residency { partition, residency } => engine.set_residency(partition, *residency),
        Move::DecodeOn { partition, device } => engine.decode_on(partition, device),
    }
}

fn line(Decision { change, why }: &Decision, detector: &DriftDetector) -> String {
    let usual = if detector.compares_with_plan() { "planned" } else { "usual" };
    match (why, detector.drift()) {
        (Why::Slow(_), Some(drift)) => format!("{drift}; {change} now, if that is faster"),
        (Why::AsPlanned, _) => format!("passes take the {usual} time; {change} again, if that is no slower"),
        (Why::Slow(_) | Why::NoGain, _) => format!("{change} again: the other way was not faster"),
    }
}
