//! A planning problem in numbers: blocks, their times on each device, the links, the memory budgets, the workload.
//!
//! Units are milliseconds and bytes. This crate does not know the source of the numbers (a profile, a machine file, assumptions).

use crate::{BlockSpec, Budget, Decompression};

/// The input of the planner.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Blocks in execution order.
    pub blocks: Vec<BlockSpec>,
    /// Times on the host, in the order of blocks.
    pub cpu: Vec<Cost>,
    /// Times on each GPU, one entry for each entry of `budget.vram`.
    pub gpus: Vec<GpuCosts>,
    /// Launch cost of a partition on the host, milliseconds.
    pub cpu_launch_ms: f64,
    /// Overhead of a pass outside its partitions (feeding inputs, reading logits, sampling), milliseconds.
    pub pass_overhead_ms: f64,
    /// Disk read rate, bytes per millisecond; `None` if all weights must stay in memory.
    pub disk_bytes_per_ms: Option<f64>,
    /// How much reading from disk and computing on the host slow each other down.
    pub disk_contention: Contention,
    /// The cost of decompressing the weights that are read; `None` if it is not counted.
    pub decompression: Option<Decompression>,
    /// The memory limits.
    pub budget: Budget,
    /// The workload that the times are for.
    pub load: Workload,
    /// Whether the tokens of several sequences can be rows of one run, where everything is computed on the host.
    pub row_batching: RowBatching,
    /// Hit rates of caches of experts, measured on texts. Entry `s` is for `2^s` sequences in turn. Its entry `i` of `n` is for a cache
    /// that holds the share `i / (n - 1)` of all experts. Empty if unknown.
    pub expert_hits: Vec<Vec<f64>>,
    /// Blocks that start a new partition even if the block before is on the same device.
    pub cuts: Vec<usize>,
}

/// Where the tokens of several sequences can be rows of one run: where several rows have the bits of single ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowBatching {
    /// Nowhere.
    Never,
    /// Where no weights are read from disk. Float32 weights that are read from disk stay as the model stores them, and their kernels sum several
    /// rows in another order than one.
    InMemory,
    /// Also where weights are read from disk.
    Always,
}

/// How much computing on the host and moving bytes slow each other down: the time of each while both happen, over its
/// time alone; at least 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Contention {
    /// Of computing.
    pub compute: f64,
    /// Of moving bytes: copies to a GPU, or reads from disk.
    pub transfer: f64,
}

impl Contention {
    /// Neither slows the other down.
    pub const NONE: Contention = Contention { compute: 1.0, transfer: 1.0 };

    /// These factors; below 1 they are noise.
    pub fn new(compute: f64, transfer: f64) -> Self {
        Contention { compute: compute.max(1.0), transfer: transfer.max(1.0) }
    }
}

/// The times of one block on one device; infinite if the device cannot compute it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Cost {
    /// One decoded token, milliseconds, without launch cost.
    pub decode_ms: f64,
    /// A pass of each of [`SHORT_PASS_TOKENS`](crate::SHORT_PASS_TOKENS) tokens at the same context, likewise. Empty if unknown.
    pub short_pass_ms: Vec<f64>,
    /// Each prefill pass, milliseconds, without launch cost; one entry for each of [`Workload::passes`].
    pub prefill_ms: Vec<f64>,
}

impl Cost {
    /// Makes all times infinite: no plan places the block there.
    pub fn make_impossible(&mut self) {
        self.decode_ms = f64::INFINITY;
        self.short_pass_ms.fill(f64::INFINITY);
        self.prefill_ms.fill(f64::INFINITY);
    }
}

/// Times of blocks on one GPU, and its link.
#[derive(Clone, Debug)]
pub struct GpuCosts {
    /// Times, in the order of blocks.
    pub blocks: Vec<Cost>,
    /// Launch cost of a partition, milliseconds.
    pub launch_ms: f64,
    /// Host to device, bytes per millisecond.
    pub to_device: f64,
    /// Device to host, bytes per millisecond.
    pub from_device: f64,
    /// Latency of the copy of one tensor, milliseconds.
    pub latency_ms: f64,
    /// Slowdown of computation on the host while this link is busy, at least 1.
    pub compute_contention: f64,
    /// Slowdown of a copy while the host computes, at least 1.
    pub link_contention: f64,
}

/// The request that a plan is optimized for.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Sequences in one run of a partition.
    pub batch: u64,
    /// Sequences that share a pass over the weights, one run of each partition for each.
    pub sequences: u64,
    /// Tokens of the prompt.
    pub prompt_tokens: u64,
    /// Tokens generated after the prompt.
    pub new_tokens: u64,
    /// Tokens of each prefill pass, in order. Invariant: the sum is `prompt_tokens`.
    pub passes: Vec<u64>,
}

impl Workload {
    /// Generated tokens that take a pass of their own: the prompt's last pass gives the first.
    pub fn decoded_tokens(&self) -> u64 {
        self.new_tokens.saturating_sub(1)
    }

    /// The time of a whole answer, from those of the prompt and of a decoded token, milliseconds.
    pub fn answer_ms(&self, prompt_ms: f64, token_ms: f64) -> f64 {
        match self.decoded_tokens() {
            // A token may take forever where none is decoded.
            0 => prompt_ms,
            tokens => prompt_ms + tokens as f64 * token_ms,
        }
    }
}

/// Where a block computes in one phase, and how its weights get there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Placement {
    /// Computed on the host.
    Cpu,
    /// Computed on a GPU where its weights are resident.
    Resident(usize),
    /// Computed on a GPU, its weights copied there in every pass.
    Streamed(usize),
}

/// Where a block computes in each phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockPlacement {
    /// For the prompt.
    pub prefill: Placement,
    /// For each generated token.
    pub decode: Placement,
}

/// What the planner minimizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Milliseconds per decoded token.
    Decode,
    /// Milliseconds to the first token.
    Prefill,
    /// Milliseconds of the whole answer: time to first token plus those of the other generated tokens.
    Mixed,
    /// Milliseconds of the whole answers of many sequences together, in the problem that [`Problem::with_sequences`] makes.
    Throughput,
}

/// What the runtime may do with weights that do not fit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanisms {
    /// Weights are resident on a GPU or on the host, the same in both phases.
    ResidentCpu,
    /// Also: weights that exceed host memory are read from disk in every pass.
    ResidentCpuDisk,
    /// Also: weights are streamed to a GPU, in each phase separately.
    All,
}

impl Mechanisms {
    /// Whether weights may be streamed to a GPU.
    pub fn streams(self) -> bool {
        self == Mechanisms::All
    }

    /// Whether weights may be read from disk in every pass.
    pub fn reads_disk(self) -> bool {
        self != Mechanisms::ResidentCpu
    }
}

/// Which planner to use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planner {
    /// Integer program and search: the best placement found, with a lower bound.
    Exact,
    /// One contiguous run of blocks on the GPUs, hottest neighbour first.
    Greedy,
}

/// How to plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Which planner.
    pub planner: Planner,
    /// What the planner minimizes.
    pub objective: Objective,
    /// What the runtime may do with weights.
    pub mechanisms: Mechanisms,
    /// Slots of the slot ring for streamed weights; `None` lets the planner choose 1 to 4.
    pub slots: Option<u32>,
}

impl GpuCosts {
    /// The contention of its link with the host.
    pub(crate) fn contention(&self) -> Contention {
        Contention::new(self.compute_contention, self.link_contention)
    }
}

impl Placement {
    /// A small number for each place, fast to compare and to hash.
    pub(crate) fn code(self) -> u16 {
        let offset = |gpu: usize| u16::try_from(2 * gpu).expect("no machine has thousands of GPUs");
        match self {
            Placement::Cpu => 0,
            Placement::Resident(gpu) => 1 + offset(gpu),
            Placement::Streamed(gpu) => 2 + offset(gpu),
        }
    }

    /// The GPU it computes on.
    pub fn gpu(self) -> Option<usize> {
        match self {
            Placement::Cpu => None,
            Placement::Resident(gpu) | Placement::Streamed(gpu) => Some(gpu),
        }
    }
}
