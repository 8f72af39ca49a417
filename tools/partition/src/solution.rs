//! What a planner answers: a choice for each block, what it takes, and what is proven of it.

use crate::{Choice, Where};
use std::fmt;

/// Taking a prompt in, or giving one more token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// All passes of the prompt, from cold, to the first token.
    Prefill,
    /// One token after the other, in the steady state.
    Decode,
}

impl Phase {
    /// Both, in the order they happen.
    pub const BOTH: [Phase; 2] = [Phase::Prefill, Phase::Decode];

    /// The other one.
    pub fn other(self) -> Phase {
        match self {
            Phase::Prefill => Phase::Decode,
            Phase::Decode => Phase::Prefill,
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        })
    }
}

/// A placement with its simulated times.
#[derive(Clone, Debug, PartialEq)]
pub struct Solution {
    /// One for each block.
    pub choices: Vec<Choice>,
    /// Slots in the ring of each GPU; 0 where nothing is streamed to it.
    pub slots: Vec<u32>,
    /// One more token, milliseconds, steady state.
    pub decode_ms: f64,
    /// To the first token, milliseconds.
    pub prefill_ms: f64,
    /// What was made small, milliseconds.
    pub objective_ms: f64,
    /// No placement takes less than this, milliseconds; equals `objective_ms` where `proven`. A planner that proves
    /// nothing says 0.
    pub bound_ms: f64,
    /// Whether no placement is better, within one part in a million.
    pub proven: bool,
}

impl Solution {
    /// How far from the best it can be, as a part of the objective: 0 when proven, at most 1.
    pub fn gap(&self) -> f64 {
        match self.objective_ms > 0.0 {
            true => ((self.objective_ms - self.bound_ms) / self.objective_ms).max(0.0),
            false => 0.0,
        }
    }
}

impl Choice {
    /// The same place in both phases.
    pub const fn both(place: Where) -> Choice {
        Choice { prefill: place, decode: place }
    }

    /// Where it computes in this phase.
    pub fn of(self, phase: Phase) -> Where {
        match phase {
            Phase::Prefill => self.prefill,
            Phase::Decode => self.decode,
        }
    }
}

impl fmt::Display for Where {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Where::Cpu => f.write_str("cpu"),
            Where::Resident(gpu) => write!(f, "gpu{gpu}"),
            Where::Streamed(gpu) => write!(f, "streamed to gpu{gpu}"),
        }
    }
}
