//! Where each block computes: a cost model, memory budgets and a planner, all of them pure.
//!
//! This room knows no files, no protobuf and no clock: the same blocks and budgets always give the same placement.

mod budget;
mod cost;
mod greedy;
mod manual;
mod problem;
mod runs;

pub use budget::{Budget, Demand, KvHome, NoFit, check, demand};
pub use cost::{Block, BlockKind, Rates, Work, decode_ms, prefill_ms};
pub use greedy::{Hotness, greedy, hotness};
pub use manual::{Assign, AssignError, gpu_layers};
pub use problem::{Choice, Cost, GpuCosts, Mechanisms, Objective, Options, Planner, Problem, Where, Workload};
pub use runs::{Run, one_gpu_block_each, runs};

use std::fmt;

/// Where a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Place {
    /// On the host.
    Cpu,
    /// On the accelerator with this index.
    Gpu(usize),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Gpu(index) => write!(f, "gpu{index}"),
        }
    }
}
