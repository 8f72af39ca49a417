//! Planning options: cost sources, objective, planner, streaming, and planner reports.

use super::{LayerCount, VramRange};
use clap::{Args, ValueEnum};
use hpp_schema::{Provider, ProviderOptionArg};
use std::path::PathBuf;

/// Cost sources, objective and planner options.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Planning")]
pub struct PlanningArgs {
    /// Plan with times that hpp-profile measured for this model on this machine.
    #[arg(long, value_name = "FILE", conflicts_with = "machine")]
    pub profile: Option<PathBuf>,
    /// Accept a profile that was measured on another machine.
    #[arg(long, requires = "profile")]
    pub allow_other_machine: bool,
    /// Plan for a described machine: the name of a preset such as rtx4090, or a YAML file with memory sizes and rates.
    /// `--machine list` lists the presets.
    #[arg(long, value_name = "NAME|FILE")]
    pub machine: Option<PathBuf>,
    /// Correct these times by those that a run of an earlier plan of the model took: the output of `hpp-exec bench PLAN --json`.
    #[arg(long, value_name = "FILE")]
    pub from_telemetry: Option<PathBuf>,

    /// Execution providers that partitions may use, best first. Those on GPUs list all of them [default: docs/PROVIDERS.md]; on the
    /// host, --profile decides among those that it measured and that compute from host memory [default: all that it measured].
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub providers: Vec<Provider>,
    /// An option of a provider, as the provider documents it; the plan records it. Repeatable. Options that name files are given to
    /// hpp-exec instead.
    #[arg(long, value_name = "NAME.KEY=VALUE")]
    pub ep_option: Vec<ProviderOptionArg>,

    /// Planning algorithm.
    #[arg(long, value_enum, default_value_t = PlannerArg::Exact)]
    pub planner: PlannerArg,
    /// What to optimise.
    #[arg(long, value_enum, default_value_t = ObjectiveArg::Mixed)]
    pub objective: ObjectiveArg,
    /// Refuse a plan that is expected to decode fewer tokens per second.
    #[arg(long, value_name = "TOKENS_PER_S", value_parser = tokens_per_second, allow_negative_numbers = true)]
    pub at_least: Option<f64>,
    /// Refuse a plan whose first token is expected later than this.
    #[arg(long, value_name = "MS", value_parser = milliseconds, allow_negative_numbers = true)]
    pub first_token_within: Option<f64>,
    /// Ways in which the plan may hold weights [default: all; resident,cpu,disk with --refine, --kv cpu or
    /// --split-mode row].
    #[arg(long, value_enum)]
    pub mechanisms: Option<MechanismsArg>,
    /// Stream layers to the GPU: `auto` lets the planner choose blocks and phases; a number, or `all`, streams that
    /// many of the layers that would compute on the host to the first GPU, evenly spaced so that copies overlap with host
    /// computation; `--assign layers.3=gpu1:stream` streams to another GPU.
    #[arg(long, value_name = "auto|N|all")]
    pub stream: Option<LayerCount>,
    /// Which experts of a mixture a pass reads from disk if memory does not hold all of them.
    #[arg(long, value_enum, default_value_t = ExpertsArg::Auto)]
    pub experts: ExpertsArg,
    /// Whether weights that are read from disk in each pass are stored compressed, without loss, and decompressed in memory: `auto` where
    /// that is faster by the rates of this disk and processor.
    #[arg(long, value_enum, default_value_t = CompressArg::Auto)]
    pub compress: CompressArg,
    /// Slots in the ring of streamed weights on each GPU [default: 1 to 4, whichever is fastest; 3 for models of more than 90 blocks, with --stream N, and if --assign names every block].
    #[arg(long, value_name = "N")]
    pub slots: Option<u32>,

    /// Explain for each partition why it is on its device and what other devices would cost, and what more memory or
    /// another context length would change.
    #[arg(long)]
    pub explain: bool,
    /// Print expected speed for each VRAM budget of a range, such as 4G..24G or 4G..24G:2G, the same for each GPU, and write no plan.
    #[arg(long, value_name = "FROM..TO[:STEP]")]
    pub sweep_vram: Option<VramRange>,
    /// Write the simulated timeline of a prompt and some tokens to this file, in the Chrome trace format (for
    /// Perfetto).
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Run N tokens of the best few plans on this machine, plan again with the measured times, and keep the fastest
    /// plan.
    #[arg(long, value_name = "N")]
    pub refine: Option<u64>,
}

/// `--planner`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PlannerArg {
    /// Search for the best plan, and prove it optimal where possible.
    Exact,
    /// Grow one contiguous run of blocks on the GPUs, the most beneficial neighbour first.
    Greedy,
}

/// `--objective`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ObjectiveArg {
    /// Time per generated token.
    Decode,
    /// Time to the first token.
    Prefill,
    /// Time of a whole answer: --prompt-tokens, then --new-tokens.
    Mixed,
    /// Tokens per second of many sequences that share each pass over the weights, as `hpp-exec jobs` runs them; chooses
    /// their number.
    Throughput,
}

impl From<hpp_partition::Objective> for ObjectiveArg {
    fn from(objective: hpp_partition::Objective) -> Self {
        match objective {
            hpp_partition::Objective::Decode => ObjectiveArg::Decode,
            hpp_partition::Objective::Prefill => ObjectiveArg::Prefill,
            hpp_partition::Objective::Mixed => ObjectiveArg::Mixed,
            hpp_partition::Objective::Throughput => ObjectiveArg::Throughput,
        }
    }
}

/// `--experts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExpertsArg {
    /// Those that its tokens select; the experts used last and most stay in memory as far as there is room. While a layer computes, an expert
    /// that the next mixture probably selects is prefetched.
    Auto,
    /// As auto, but none is prefetched.
    Selected,
    /// All of them in every pass, in order.
    All,
}

/// `--compress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompressArg {
    /// Weights for which reading less saves more time than decompressing takes.
    Auto,
    /// All weights that become smaller.
    Always,
    /// None.
    Never,
}

/// `--mechanisms`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MechanismsArg {
    /// Blocks compute on a GPU that holds their weights or on the host, the same in both phases.
    #[value(name = "resident,cpu")]
    ResidentCpu,
    /// Weights that do not fit in --ram are also read from disk in each pass.
    #[value(name = "resident,cpu,disk")]
    ResidentCpuDisk,
    /// Weights may also be streamed to a GPU, chosen separately for each phase.
    All,
}

impl PlanningArgs {
    /// Whether the options ask the planner to stream weights to a GPU.
    pub fn requests_streaming(&self) -> bool {
        self.mechanisms == Some(MechanismsArg::All) || self.stream == Some(LayerCount::Auto)
    }

    /// These options for `hpp-partition`. Without `--mechanisms`, weights may be streamed unless `avoid_streaming`.
    pub fn options(&self, avoid_streaming: bool) -> hpp_partition::Options {
        hpp_partition::Options {
            planner: match self.planner {
                PlannerArg::Exact => hpp_partition::Planner::Exact,
                PlannerArg::Greedy => hpp_partition::Planner::Greedy,
            },
            objective: match self.objective {
                ObjectiveArg::Decode => hpp_partition::Objective::Decode,
                ObjectiveArg::Prefill => hpp_partition::Objective::Prefill,
                ObjectiveArg::Mixed => hpp_partition::Objective::Mixed,
                ObjectiveArg::Throughput => hpp_partition::Objective::Throughput,
            },
            mechanisms: match self.mechanisms {
                _ if self.requests_streaming() => hpp_partition::Mechanisms::All,
                Some(MechanismsArg::ResidentCpu) => hpp_partition::Mechanisms::ResidentCpu,
                Some(MechanismsArg::ResidentCpuDisk) => hpp_partition::Mechanisms::ResidentCpuDisk,
                None if avoid_streaming => hpp_partition::Mechanisms::ResidentCpuDisk,
                None | Some(MechanismsArg::All) => hpp_partition::Mechanisms::All,
            },
            slots: self.slots,
        }
    }
}

fn tokens_per_second(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "it is a number of tokens per second, such as 12.5".to_owned())
}

fn milliseconds(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "it is a number of milliseconds without a unit, such as 500".to_owned())
}
