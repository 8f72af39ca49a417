//! Decides which partition moves where when passes are slower than planned. One move is made at a time. It is kept only if passes become
//! faster; else it is undone and tried again ever more rarely. This module has no clock: windows of passes bring their times.

use super::drift::Cause;
use hpp_schema::{Plan, Residency};

/// Windows that a move is judged by.
const TRIAL_WINDOWS: u32 = 2;
/// A move is kept if it leaves at most this part of the time.
const GAIN: f64 = 0.95;
/// Moving a partition back is kept if passes then take at most this many times the time.
const LOSS: f64 = 1.05;
/// The first number of windows until a move that failed is tried again, and of windows as planned until a move is undone. Both numbers
/// double each time, up to `LONGEST_WAIT`.
const FIRST_WAIT: u32 = 16;
const LONGEST_WAIT: u32 = 1 << 16;

/// Where partitions may compute tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// Where the plan says, so that no bit changes.
    Planned,
    /// Also where they compute prompts. Another device rounds differently, so that near ties between tokens may be decided differently.
    Other,
}

/// A change of an engine that needs no new session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Move {
    /// A partition's weights stay on their device, or are copied there for each run.
    Residency {
        /// The partition.
        partition: String,
        /// Its residency from now on.
        residency: Residency,
    },
    /// A partition computes tokens on a device.
    DecodeOn {
        /// The partition.
        partition: String,
        /// The device from now on.
        device: String,
    },
}

impl std::fmt::Display for Move {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Move::Residency { partition, residency: Residency::Resident } => {
                write!(f, "the weights of {partition} stay on their device")
            }
            Move::Residency { partition, .. } => write!(f, "the weights of {partition} are copied for each run"),
            Move::DecodeOn { partition, device } => write!(f, "{partition} decodes on {device}"),
        }
    }
}

/// A move that may help, and the one that undoes it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Candidate {
    /// What takes less time after it.
    helps: Cause,
    there: Move,
    back: Move,
    is_moved: bool,
    /// Windows until the move may be tried, and how many there will be after its next failure.
    wait: u32,
    next_wait: u32,
}

/// A move that is being judged.
#[derive(Clone, Copy, Debug)]
struct Trial {
    candidate: usize,
    /// Whether it undoes a move.
    is_back: bool,
    /// The slowdown before it.
    before: f64,
    windows: u32,
}

/// A decision, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decision {
    /// What the engine does now.
    pub change: Move,
    /// Why.
    pub why: Why,
}

/// The reason of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Passes are slower than planned for this cause.
    Slow(Cause),
    /// The opposite move did not make passes faster.
    NoGain,
    /// Passes are as planned, so the plan's own placement is tried again.
    AsPlanned,
}

/// The moves of one engine.
#[derive(Clone, Debug)]
pub struct Moves {
    candidates: Vec<Candidate>,
    trial: Option<Trial>,
    /// Successive windows that were as planned, and how many must be before a move is undone.
    calm: u32,
    calm_wait: u32,
}

impl Moves {
    /// What a plan's partitions can do: weights that are inputs can stay on their device and, with `Devices::Other`, a partition that computes
    /// prompts elsewhere can compute tokens there.
    pub fn of(plan: &Plan, devices: Devices) -> Self {
        let is_host =
            |device: &str| plan.devices.iter().any(|d| d.name == device && d.kind == hpp_schema::DeviceKind::Cpu);
        let mut candidates = Vec::new();
        for partition in &plan.partitions {
            let (name, device) = (&partition.name, &partition.device);
            let mut candidate = |helps, there, back| {
                let (wait, next_wait) = (0, FIRST_WAIT);
                candidates.push(Candidate { helps, there, back, is_moved: false, wait, next_wait });
            };
            let is_copied = !is_host(device) && partition.residency == Residency::Streamed;
            if is_copied && !partition.weights.is_empty() {
                let to = |residency| Move::Residency { partition: name.clone(), residency };
                candidate(Cause::Transfers, to(Residency::Resident), to(Residency::Streamed));
            }
            if let Some(prefill) =
                partition.prefill.as_ref().filter(|prefill| devices == Devices::Other && prefill.device != *device)
            {
                let on = |device: &str| Move::DecodeOn { partition: name.clone(), device: device.to_owned() };
                let helps = match is_host(device) {
                    true => Cause::Host,
                    false if is_copied => Cause::Transfers,
                    false => Cause::Devices,
                };
                candidate(helps, on(&prefill.device), on(device));
            }
        }
        Moves { candidates, trial: None, calm: 0, calm_wait: FIRST_WAIT }
    }

    /// Takes the slowdown of a window, and the cause if it lasts. Returns what the engine should change now. If the engine cannot make this
    /// change, the caller calls [`failed`](Self::failed).
    pub fn next(&mut self, slowdown: f64, cause: Option<Cause>) -> Option<Decision> {
        if let Some(trial) = self.trial.take() {
            return self.judge(Trial { windows: trial.windows + 1, ..trial }, slowdown);
        }
        self.candidates.iter_mut().for_each(|candidate| candidate.wait = candidate.wait.saturating_sub(1));
        self.calm = if cause.is_some() { 0 } else { self.calm.saturating_add(1) };
        let (candidate, why) = match cause {
            Some(cause) => (self.candidates.iter().position(|it| it.can_help(cause))?, Why::Slow(cause)),
            None if self.calm >= self.calm_wait => {
                (self.candidates.iter().rposition(|it| it.is_moved)?, Why::AsPlanned)
            }
            None => return None,
        };
        let is_back = why == Why::AsPlanned;
        self.calm = 0;
        self.trial = Some(Trial { candidate, is_back, before: slowdown, windows: 0 });
        Some(self.set(candidate, !is_back, why))
    }

    /// Takes back the last decision, because the engine could not make the change.
    pub fn failed(&mut self) {
        let Some(trial) = self.trial.take() else { return };
        self.candidates[trial.candidate].is_moved = trial.is_back;
        self.candidates[trial.candidate].defer();
    }

    /// Whether nothing can be changed at present for this cause.
    pub fn is_exhausted(&self, cause: Cause) -> bool {
        self.trial.is_none() && !self.candidates.iter().any(|candidate| candidate.can_help(cause))
    }

    fn judge(&mut self, trial: Trial, slowdown: f64) -> Option<Decision> {
        if trial.windows < TRIAL_WINDOWS {
            self.trial = Some(trial);
            return None;
        }
        let is_kept = slowdown <= trial.before * if trial.is_back { LOSS } else { GAIN };
        if trial.is_back != is_kept {
            // The partition stays where the plan did not put it: the plan's own placement is tried ever more rarely.
            self.calm_wait = (self.calm_wait * 2).min(LONGEST_WAIT);
        }
        if is_kept {
            return None;
        }
        self.candidates[trial.candidate].defer();
        Some(self.set(trial.candidate, trial.is_back, Why::NoGain))
    }

    fn set(&mut self, candidate: usize, is_moved: bool, why: Why) -> Decision {
        let candidate = &mut self.candidates[candidate];
        candidate.is_moved = is_moved;
        let change = if is_moved { &candidate.there } else { &candidate.back };
        Decision { change: change.clone(), why }
    }
}

impl Candidate {
    fn can_help(&self, cause: Cause) -> bool {
        self.helps == cause && !self.is_moved && self.wait == 0
    }

    fn defer(&mut self) {
        self.wait = self.next_wait;
        self.next_wait = (self.next_wait * 2).min(LONGEST_WAIT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(device: &str) -> Move {
        Move::DecodeOn { partition: "cpu_0".into(), device: device.into() }
    }

    fn moves() -> Moves {
        let candidate = Candidate {
            helps: Cause::Host,
            there: on("gpu0"),
            back: on("cpu"),
            is_moved: false,
            wait: 0,
            next_wait: FIRST_WAIT,
        };
        Moves { candidates: vec![candidate], trial: None, calm: 0, calm_wait: FIRST_WAIT }
    }

    /// Windows of a machine where the partition takes `cpu(window)` or `gpu(window)` times the usual time. Returns the changes and when.
    fn run(moves: &mut Moves, windows: u32, cpu: impl Fn(u32) -> f64, gpu: impl Fn(u32) -> f64) -> Vec<(u32, Move)> {
        let (mut device, mut changes) = (on("cpu"), vec![]);
        for window in 0..windows {
            let slowdown = if device == on("cpu") { cpu(window) } else { gpu(window) };
            let cause = (slowdown >= 1.5).then_some(Cause::Host);
            if let Some(decision) = moves.next(slowdown, cause) {
                device = decision.change;
                changes.push((window, device.clone()));
            }
        }
        changes
    }

    #[test]
    fn a_partition_moves_away_while_the_host_is_slow_and_back_later() {
        let slow = |window: u32| if (5..60).contains(&window) { 2.0 } else { 1.0 };
        let changes = run(&mut moves(), 200, slow, |_| 1.3);
        let devices: Vec<&Move> = changes.iter().map(|(_, change)| change).collect();
        assert_eq!(changes[0], (5, on("gpu0")));
        assert_eq!(*devices.last().unwrap(), &on("cpu"), "{changes:?}");
        assert!(changes.last().unwrap().0 >= 60 && changes.len() <= 5, "{changes:?}");
    }

    #[test]
    fn a_move_that_does_not_help_is_undone_and_tried_ever_more_rarely() {
        let changes = run(&mut moves(), 1000, |_| 2.0, |_| 2.1);
        assert_eq!(changes[1], (2, on("cpu")));
        assert!(changes.len() <= 2 * 7, "{changes:?}");
        let tries: Vec<u32> = changes.iter().step_by(2).map(|(window, _)| *window).collect();
        assert!(tries.windows(3).all(|w| w[2] - w[1] > w[1] - w[0]), "{tries:?}");
    }

    #[test]
    fn load_that_comes_and_goes_does_not_flap() {
        let changes = run(&mut moves(), 4000, |window| if window / 20 % 2 == 0 { 2.0 } else { 1.0 }, |_| 1.2);
        assert!(changes.len() <= 30, "{}", changes.len());
    }

    #[test]
    fn a_change_that_the_engine_refuses_waits() {
        let mut moves = moves();
        assert!(!moves.is_exhausted(Cause::Host) && moves.is_exhausted(Cause::Disk));
        assert!(moves.next(2.0, Some(Cause::Host)).is_some());
        moves.failed();
        assert!(moves.is_exhausted(Cause::Host));
        let again = (1..100).find(|_| moves.next(2.0, Some(Cause::Host)).is_some());
        assert_eq!(again, Some(FIRST_WAIT));
    }
}
