//! The result of planning: the placement of each block, its simulated times, and a lower bound.

use crate::{BlockPlacement, Placement};
use std::fmt;

/// A phase of inference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// All passes of the prompt, from an empty slot ring to the first token.
    Prefill,
    /// Decoding, in the steady state.
    Decode,
}

impl Phase {
    /// Both, in order of execution.
    pub const BOTH: [Phase; 2] = [Phase::Prefill, Phase::Decode];

    /// The other phase.
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
    pub placements: Vec<BlockPlacement>,
    /// Slots in the slot ring of each GPU; 0 if nothing is streamed to it.
    pub slots: Vec<u32>,
    /// One decoded token, milliseconds, in the steady state.
    pub decode_ms: f64,
    /// Time to first token, milliseconds.
    pub prefill_ms: f64,
    /// The objective, milliseconds.
    pub objective_ms: f64,
    /// Lower bound of every placement's objective, milliseconds; equals `objective_ms` if `proven`, 0 if no bound was computed.
    pub bound_ms: f64,
    /// Whether the bound proves that no placement is better by more than one part in a million.
    pub proven: bool,
}

impl Solution {
    /// The relative gap between the objective and its lower bound, 0 to 1.
    pub fn gap(&self) -> f64 {
        match self.objective_ms > 0.0 {
            true => ((self.objective_ms - self.bound_ms) / self.objective_ms).max(0.0),
            false => 0.0,
        }
    }
}

impl BlockPlacement {
    /// One place in both phases.
    pub const fn both(place: Placement) -> BlockPlacement {
        BlockPlacement { prefill: place, decode: place }
    }

    /// The place in this phase.
    pub fn in_phase(self, phase: Phase) -> Placement {
        match phase {
            Phase::Prefill => self.prefill,
            Phase::Decode => self.decode,
        }
    }
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Placement::Cpu => f.write_str("cpu"),
            Placement::Resident(gpu) => write!(f, "gpu{gpu}"),
            Placement::Streamed(gpu) => write!(f, "streamed to gpu{gpu}"),
        }
    }
}
