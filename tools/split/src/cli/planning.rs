//! Options that say what to plan with, and for what.

use super::{Stream, VramRange};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// What to plan with, and for what.
#[derive(Debug, Args)]
#[command(next_help_heading = "Planning")]
pub struct PlanningArgs {
    /// Plan with what hpp-profile measured of this model on this machine.
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    pub profile: Option<PathBuf>,
    /// Take a profile that was measured on another machine.
    #[arg(long, requires = "profile")]
    pub allow_other_machine: bool,
    /// Plan for a machine that need not be here: the name of a preset such as rtx4090, or a YAML file with its memory and
    /// rates. `--machine list` lists the presets.
    #[arg(long, value_name = "NAME|FILE")]
    pub machine: Option<PathBuf>,

    /// Which planner decides.
    #[arg(long, value_enum, default_value_t = Planner::Exact)]
    pub planner: Planner,
    /// What to make small.
    #[arg(long, value_enum, default_value_t = Objective::Mixed)]
    pub objective: Objective,
    /// Refuse a plan that is expected to decode fewer tokens a second.
    #[arg(long, value_name = "TOKENS_PER_S", allow_negative_numbers = true)]
    pub at_least: Option<f64>,
    /// Refuse a plan whose first token is expected later than this.
    #[arg(long, value_name = "MS", allow_negative_numbers = true)]
    pub first_token_within: Option<f64>,
    /// What the runtime may do with weights [default: all; resident,cpu,disk with --refine and with --kv cpu].
    #[arg(long, value_enum)]
    pub mechanisms: Option<Mechanisms>,
    /// Stream layers to the GPU: `auto` lets the planner decide which blocks and in which phase; a number, or `all`, streams so
    /// many of the layers that would compute on the host, spread evenly among them so that copies overlap with its work.
    #[arg(long, value_name = "auto|N|all")]
    pub stream: Option<Stream>,
    /// Slots in the ring of streamed weights on each GPU [default: 3 or 4, whichever is faster; 3 by hand].
    #[arg(long, value_name = "N")]
    pub slots: Option<u32>,

    /// Say for each partition why it is here and what it would cost elsewhere, and what more memory or context changes.
    #[arg(long)]
    pub explain: bool,
    /// Print what is possible with each VRAM budget of a range, such as 4G..24G or 4G..24G:2G, and write nothing else.
    #[arg(long, value_name = "FROM..TO[:STEP]")]
    pub sweep_vram: Option<VramRange>,
    /// Write the simulated timeline of a prompt and some tokens: JSON in the Chrome trace format, for Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Run N tokens of the best few plans here, plan again with the measured times, and keep the fastest.
    #[arg(long, value_name = "N")]
    pub refine: Option<u64>,
}

/// `--planner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Planner {
    /// The best plan there is, with a proof where one was found.
    Exact,
    /// One contiguous run of blocks on the GPUs, hottest neighbour first.
    Greedy,
}

/// `--objective`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Objective {
    /// The time of one more token.
    Decode,
    /// The time to the first token.
    Prefill,
    /// The time of a whole answer: --prompt-tokens, then --new-tokens.
    Mixed,
}

/// `--mechanisms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mechanisms {
    /// Weights stay on a GPU or compute on the host, the same in both phases.
    #[value(name = "resident,cpu")]
    ResidentCpu,
    /// What does not fit into --ram is read from disk each time it is needed.
    #[value(name = "resident,cpu,disk")]
    ResidentCpuDisk,
    /// Weights may also be streamed to a GPU, in each phase by itself.
    All,
}

impl PlanningArgs {
    /// Whether the planner is asked to stream weights to a GPU.
    pub fn asks_for_streaming(&self) -> bool {
        self.mechanisms == Some(Mechanisms::All) || self.stream == Some(Stream::Auto)
    }

    /// The same as the planner takes it. Where nobody says, weights may be streamed unless something stands `against` it.
    pub fn options(&self, against: bool) -> hpp_partition::Options {
        hpp_partition::Options {
            planner: match self.planner {
                Planner::Exact => hpp_partition::Planner::Exact,
                Planner::Greedy => hpp_partition::Planner::Greedy,
            },
            objective: match self.objective {
                Objective::Decode => hpp_partition::Objective::Decode,
                Objective::Prefill => hpp_partition::Objective::Prefill,
                Objective::Mixed => hpp_partition::Objective::Mixed,
            },
            mechanisms: match self.mechanisms {
                _ if self.asks_for_streaming() => hpp_partition::Mechanisms::All,
                Some(Mechanisms::ResidentCpu) => hpp_partition::Mechanisms::ResidentCpu,
                Some(Mechanisms::ResidentCpuDisk) => hpp_partition::Mechanisms::ResidentCpuDisk,
                None if against => hpp_partition::Mechanisms::ResidentCpuDisk,
                None | Some(Mechanisms::All) => hpp_partition::Mechanisms::All,
            },
            slots: self.slots,
        }
    }
}
