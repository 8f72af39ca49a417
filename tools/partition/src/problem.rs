//! A planning problem in numbers: blocks, what they cost at each place, the machine's links, the limits, the wish.
//!
//! Everything is milliseconds and bytes. Where the numbers come from (a profile, a machine file, assumptions) is not known here.

use crate::{Block, Budget};

/// Everything a planner needs. Pure numbers: the same problem always has the same solution.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Blocks in execution order.
    pub blocks: Vec<Block>,
    /// What each block costs on the host, in the order of blocks.
    pub cpu: Vec<Cost>,
    /// What each block costs on each GPU: one list for each entry of `budget.vram`.
    pub gpus: Vec<GpuCosts>,
    /// Cost of starting a partition on the host, milliseconds.
    pub cpu_launch_ms: f64,
    /// Cost of a pass that no partition bears: feeding, reading scores, choosing a token, milliseconds.
    pub pass_ms: f64,
    /// Reading weights from disk, bytes per millisecond; absent where everything must lie in memory.
    pub disk_bytes_per_ms: Option<f64>,
    /// The limits.
    pub budget: Budget,
    /// What the costs were counted for.
    pub load: Workload,
    /// Blocks before which a partition begins even where its neighbour is in the same place.
    pub cuts: Vec<usize>,
}

/// What one block costs at one place; infinite where it cannot be computed there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// One more token, milliseconds, the cost of starting a partition apart.
    pub decode_ms: f64,
    /// Each pass of the prompt in turn, milliseconds; [`Workload::passes`] entries.
    pub prefill_ms: Vec<f64>,
}

/// What blocks cost on one GPU, and its link.
#[derive(Clone, Debug)]
pub struct GpuCosts {
    /// In the order of blocks.
    pub blocks: Vec<Cost>,
    /// Cost of starting a partition, milliseconds.
    pub launch_ms: f64,
    /// Host to device, bytes per millisecond.
    pub to_device: f64,
    /// Device to host, bytes per millisecond.
    pub from_device: f64,
    /// Cost of starting a copy of one tensor, milliseconds.
    pub latency_ms: f64,
    /// Factor on the host's compute time while this link is busy, at least 1.
    pub compute_contention: f64,
    /// Factor on a copy's time while the host computes, at least 1.
    pub link_contention: f64,
}

/// What a plan is asked to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Sequences in one pass.
    pub batch: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated after it.
    pub new_tokens: u64,
    /// Tokens of each prefill pass, in order; they add up to `prompt_tokens`.
    pub passes: Vec<u64>,
}

/// Where a block's weights are when it computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Where {
    /// Computed on the host.
    Cpu,
    /// Computed on a GPU that holds its weights for good.
    Resident(usize),
    /// Computed on a GPU to which its weights are copied each time.
    Streamed(usize),
}

/// Where a block computes in each phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Choice {
    /// Taking the prompt in.
    pub prefill: Where,
    /// One more token.
    pub decode: Where,
}

/// What to make small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Milliseconds per decoded token.
    Decode,
    /// Milliseconds to the first token.
    Prefill,
    /// Milliseconds for the whole answer: time to first token, then `new_tokens` more.
    Mixed,
}

/// What the runtime may do with weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanisms {
    /// Resident on a GPU or computed on the host, the same in both phases.
    ResidentCpu,
    /// Also read from disk in each pass, where host memory is too small.
    ResidentCpuDisk,
    /// Also streamed to a GPU, each phase by itself.
    All,
}

impl Mechanisms {
    /// Whether weights may be streamed to a GPU.
    pub fn streams(self) -> bool {
        self == Mechanisms::All
    }

    /// Whether weights may be read from disk in each pass.
    pub fn reads_disk(self) -> bool {
        self != Mechanisms::ResidentCpu
    }
}

/// Which planner decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planner {
    /// The best there is, with a proof where one was found.
    Exact,
    /// One contiguous run of blocks on the GPUs, hottest neighbour first.
    Greedy,
}

/// How to plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which planner.
    pub planner: Planner,
    /// What to make small.
    pub objective: Objective,
    /// What the runtime may do.
    pub mechanisms: Mechanisms,
    /// Slots in a ring of streamed weights; `None` lets the planner choose 3 or 4.
    pub slots: Option<u32>,
}

impl Where {
    /// A small number for each place: what is fast to compare and to hash.
    pub(crate) fn code(self) -> u16 {
        let of = |gpu: usize| u16::try_from(2 * gpu).expect("no machine has thousands of GPUs");
        match self {
            Where::Cpu => 0,
            Where::Resident(gpu) => 1 + of(gpu),
            Where::Streamed(gpu) => 2 + of(gpu),
        }
    }

    /// The GPU it computes on.
    pub fn gpu(self) -> Option<usize> {
        match self {
            Where::Cpu => None,
            Where::Resident(gpu) | Where::Streamed(gpu) => Some(gpu),
        }
    }
}
