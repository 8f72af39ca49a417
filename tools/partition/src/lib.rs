//! Decides where each block of a model computes: a cost model, memory budgets, a schedule simulator and a planner.
//!
//! All functions are pure: no files, no protobuf, no clock. The same problem always gives the same placement.

mod arrange;
mod bound;
mod budget;
mod condense;
mod cost;
mod evaluate;
mod exhaust;
mod experts;
mod explain;
mod few_choices;
mod greedy;
mod host_reads;
mod improve;
mod manual;
mod memory;
mod neurons;
mod plan;
mod problem;
mod program;
mod refuse;
mod regions;
mod runs;
mod schedule;
mod search;
mod simulate;
mod solution;
mod starts;
mod sweep;
mod throughput;
mod transfer;
#[cfg(test)]
mod trials;

pub use budget::{Budget, Decompression, Demand, KvHome, OverBudget, Packing};
pub use condense::condensed;
pub use cost::{BlockRole, BlockSpec, FilledState, GrowingState, Streamed, Work, slot};
pub use experts::{EXPERT_WINDOW, ExpertMemory, ExpertReads, Experts};
pub use explain::{Alternative, Bottleneck, FindCuts, RunExplanation, bottleneck, explain_runs};
pub use host_reads::HostReads;
pub use manual::{Assign, AssignError, gpu_layers, stream_layers};
pub use memory::{MemoryUsage, fits, usage, usage_of_partitions};
pub use neurons::{NeuronReads, ReadCosts};
pub use plan::{best, evaluate, plan};
pub use problem::{
    BlockPlacement, Contention, Cost, GpuCosts, Mechanisms, Objective, Options, Placement, Planner, Problem,
    RowBatching, Workload,
};
pub use refuse::useless_gpus;
pub use runs::{Run, runs};
pub use simulate::{Simulation, simulate};
pub use solution::{Phase, Solution};
pub use sweep::{SweepPoint, sweep};
pub use throughput::{
    MOST_SEQUENCES, PassTime, SHORT_PASS_TOKENS, Throughput, plan_throughput, throughput, tokens_per_second,
};

use std::fmt;

/// Where a block computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceId {
    /// On the host.
    Cpu,
    /// On the accelerator with this index.
    Gpu(usize),
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceId::Cpu => f.write_str("cpu"),
            DeviceId::Gpu(index) => write!(f, "gpu{index}"),
        }
    }
}
