//! The command line, as clap parses it. `settings` checks combinations of options.

mod planning;
mod quantize;
mod values;

pub use planning::{CompressArg, ExpertsArg, MechanismsArg, ObjectiveArg, PlanningArgs};
pub use quantize::{BitsArg, DraftArg, QuantizeArgs};
pub use values::{GpuExpertsArg, KvHomeArg, LayerCount, SplitModeArg, VramRange};

use clap::{ArgAction, Args, Parser, Subcommand};
use hpp_model::LogitsMode;
use hpp_partition::Assign;
use hpp_schema::ByteSize;
use std::path::PathBuf;

/// Plan where each part of an ONNX model computes, and write the partitions and plan.yaml that hpp-exec runs.
#[derive(Debug, Parser)]
#[command(name = "hpp-split", version, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed (the message says why and what to do), 2 invalid command line, \
                  130 interrupted.")]
pub struct Cli {
    /// A subcommand that runs instead of splitting.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Log steps and decisions on stderr; -vv adds details, -vvv everything. HPP_LOG overrides it: a level, or levels by
    /// module, such as HPP_LOG=info,hpp_partition=debug.
    #[arg(long, short = 'v', global = true, action = ArgAction::Count, display_order = 900)]
    pub verbose: u8,
    /// Print only errors on stderr.
    #[arg(long, short = 'q', global = true, conflicts_with = "verbose", display_order = 901)]
    pub quiet: bool,
    // Last, because clap puts whatever follows under the last heading of these options.
    /// Split (the default).
    #[command(flatten)]
    pub split: SplitArgs,
}

/// Subcommands; without one, `hpp-split` splits.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print the model's blocks, boundaries, classes, weights, KV bytes per token, and notes on ambiguous structure.
    Inspect(InspectArgs),
}

/// The default of `--prompt-tokens`.
pub const DEFAULT_PROMPT: u64 = 512;
/// The default of `--new-tokens`.
pub const DEFAULT_NEW_TOKENS: u64 = 128;

/// Options of `hpp-split inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// An ONNX file, or the directory that an exporter wrote.
    pub model: PathBuf,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Write a Graphviz picture of blocks and boundaries to this file.
    #[arg(long, value_name = "FILE")]
    pub dot: Option<PathBuf>,
    /// Show every layer in the table and the picture, instead of one row for adjacent identical layers.
    #[arg(long)]
    pub all: bool,
}

/// Options of `hpp-split`.
#[derive(Clone, Debug, Args)]
pub struct SplitArgs {
    /// An ONNX file, or the directory that an exporter wrote.
    #[arg(required_unless_present = "machine")]
    pub model: Option<PathBuf>,

    /// Device memory of each GPU, such as 24G or 24G,12G; 0 for no GPU [default: the memory of the machine in --machine
    /// or --profile, else the free memory of this machine's GPUs].
    #[arg(long, value_name = "SIZE[,SIZE]", value_delimiter = ',', allow_negative_numbers = true, value_parser = ByteSize::typed)]
    pub vram: Vec<ByteSize>,
    /// Host memory the plan may use [default: 15/16 of the memory of the machine in --machine or --profile; without
    /// them, 15/16 of this machine's free memory if the model needs more than that, else no limit].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = ByteSize::typed)]
    pub ram: Option<ByteSize>,
    /// Device memory to leave unused on each GPU [default: a sixteenth, 1 GiB at most].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true, value_parser = ByteSize::typed)]
    pub margin: Option<ByteSize>,
    /// Tokens a sequence may grow to, such as 8192 or 8k (k is 1024) [default: the model's, 8192 at most].
    #[arg(long, short = 'c', visible_alias = "ctx-size", value_name = "TOKENS", value_parser = values::tokens)]
    pub context: Option<u64>,
    /// Sequences in one run, as rows of the input tensors, for programs that always compute that many. `hpp-exec jobs` and `serve` combine
    /// requests themselves: leave it at 1.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch: u64,
    /// Prompt length that predictions and the objective assume.
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_PROMPT, value_parser = values::tokens)]
    pub prompt_tokens: u64,
    /// Number of generated tokens that predictions and the objective assume; the time per token is the one at the
    /// middle of the answer.
    #[arg(long, value_name = "TOKENS", default_value_t = DEFAULT_NEW_TOKENS, value_parser = values::tokens)]
    pub new_tokens: u64,

    /// Directory to write; must not hold a plan yet [default: MODEL's name with `.hpp`, in the current directory].
    #[arg(short, long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace an existing plan. Refused if its directory holds other files, which would be deleted.
    #[arg(long)]
    pub force: bool,
    /// Write a self-contained directory: copy the weight bytes that the partitions read.
    #[arg(long)]
    pub pack: bool,
    /// Refer to the model's weight files by path instead of linking them into the plan directory. Weights embedded in
    /// the .onnx file and weights streamed to a GPU still need a file beside the plan. hpp-exec can open the partitions
    /// of such a plan; stock ONNX Runtime cannot.
    #[arg(long, conflicts_with_all = ["pack", "quantize"])]
    pub in_place: bool,
    /// Record full hashes of all weight files, so that `hpp-exec` detects any damage. By default files
    /// get full hashes until 1 GiB has been hashed, and files that hpp-split writes always; the others get hashes of samples.
    #[arg(long)]
    pub hash_weights: bool,
    /// Print the table and write nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the plan as JSON on stdout instead of the table.
    #[arg(long)]
    pub json: bool,

    /// What of the model each GPU computes, in llama.cpp's words.
    #[arg(long, value_enum, default_value_t = SplitModeArg::Layer)]
    pub split_mode: SplitModeArg,
    /// Place the last N layers on the GPU, or on several in proportion to their budgets: a number, `all`, or `auto` to let the planner decide
    /// within the budget.
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N|all|auto", allow_negative_numbers = true)]
    pub gpu_layers: Option<LayerCount>,
    /// Place blocks by hand, such as `layers.0-11=gpu,layers.12=stream,head=cpu`; overrides all other placement
    /// options but --cpu-moe, --n-cpu-moe and --gpu-experts. `stream` means `gpu0:stream`. Of two entries for a block the later counts. The planner
    /// places blocks without an entry; without `--vram` they stay on the CPU.
    #[arg(long, value_name = "BLOCKS=DEVICE,...")]
    pub assign: Option<Assign>,
    /// Compute the experts of all mixtures on the CPU and let the planner, or --gpu-layers, place the rest of these layers.
    #[arg(long, conflicts_with = "n_cpu_moe")]
    pub cpu_moe: bool,
    /// The same for the experts of the first N layers.
    #[arg(long, value_name = "N")]
    pub n_cpu_moe: Option<u32>,
    /// Keep N experts of each layer on the GPU and compute the others on the CPU: those that a profile with a corpus counted most, else the
    /// first; `auto` is as many as the GPU holds beside the rest of the layers. Needs experts in QMoE operators; their results differ in the
    /// last digits. With --n-cpu-moe, of its layers only; without, of all.
    #[arg(long, value_name = "N|auto", conflicts_with = "in_place")]
    pub gpu_experts: Option<GpuExpertsArg>,
    /// Make each GPU layer a partition of its own and keep its weights apart from ONNX Runtime's session, so that they can be
    /// moved between device and host while it runs. Costs one launch per layer.
    #[arg(long)]
    pub movable: bool,
    /// Accept operators and element types that ONNX Runtime lacks, because a custom operator library provides them.
    #[arg(long)]
    pub allow_unknown_operators: bool,
    /// What holds the KV caches.
    #[arg(long, value_enum, default_value_t = KvHomeArg::Auto)]
    pub kv: KvHomeArg,
    /// Refuse a placement that needs more partitions than this.
    #[arg(long, value_name = "N")]
    pub max_partitions: Option<usize>,
    /// Cut into at least this many partitions of similar size (at most one per block).
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub partitions: usize,
    /// Compute logits for every position of a pass, as the source model does, instead of only for requested positions.
    #[arg(long)]
    pub all_logits: bool,

    // Groups with a heading are last, because clap puts all later options under it, too.
    /// Cost sources, objective and planner options.
    #[command(flatten)]
    pub planning: PlanningArgs,

    /// Quantization of weights.
    #[command(flatten)]
    pub quantize: QuantizeArgs,

    /// Round the activations that 4- and 8-bit weights multiply on the CPU to 8 bits, block by block, also where the model does not
    /// state that (`accuracy_level` 4): GenAI's builder states it for matrices and not for experts. Faster, with other logits;
    /// `hpp-exec verify PLAN --kl FILE --against MODEL` measures the difference.
    #[arg(long)]
    pub int8_activations: bool,

    /// On the host, read and compute only the neurons that a ReLU leaves active, in float32 and float16 models such as OPT or ReLU-Llama:
    /// faster if few are active (a profile with a corpus tells how many). Sums are added in another order, so logits differ in their last digits.
    #[arg(long)]
    pub active_neurons: bool,
}

impl SplitArgs {
    /// The rows of logits that the plan computes.
    pub fn logits_mode(&self) -> LogitsMode {
        if self.all_logits { LogitsMode::All } else { LogitsMode::Requested }
    }

    /// The number of first layers whose experts compute on the CPU.
    pub fn layers_with_host_experts(&self) -> Option<u32> {
        match self.n_cpu_moe {
            Some(layers) => Some(layers).filter(|layers| *layers > 0),
            None => (self.cpu_moe || self.gpu_experts.is_some()).then_some(u32::MAX),
        }
    }

    /// The number of experts of each layer that stay on the GPU; `None` if none do, or before `auto` is replaced by a number.
    pub fn experts_on_gpu(&self) -> Option<u64> {
        match self.gpu_experts {
            Some(GpuExpertsArg::Count(experts)) => Some(experts).filter(|experts| *experts > 0),
            Some(GpuExpertsArg::Auto) | None => None,
        }
    }

    /// Whether weights may be streamed to a GPU, by the planner or by manual placement.
    pub fn may_stream(&self) -> bool {
        let by_default = self.planning.mechanisms.is_none() && !self.has_manual_placement() && !self.avoids_streaming();
        self.planning.requests_streaming() || self.names_streamed_blocks() || by_default
    }

    /// Whether the planner must not stream weights by default. `--refine` attributes a partition's time to its blocks,
    /// which waits for streamed weights would distort; `--kv cpu` already copies state to the device around each block; layers that are
    /// divided by rows stay on their GPUs.
    pub fn avoids_streaming(&self) -> bool {
        let avoids = self.planning.refine.is_some() || self.kv == KvHomeArg::Host || self.divides_rows();
        avoids && !self.names_streamed_blocks()
    }

    /// Whether `--stream` or `--assign` streams weights to a GPU.
    pub fn names_streamed_blocks(&self) -> bool {
        self.planning.stream.is_some() || self.assign.as_ref().is_some_and(Assign::streams)
    }

    /// Whether each GPU computes a part of every layer.
    pub fn divides_rows(&self) -> bool {
        self.split_mode == SplitModeArg::Row
    }

    /// Whether the user places blocks, so that the planner has nothing to decide.
    pub fn has_manual_placement(&self) -> bool {
        let streams = matches!(self.planning.stream, Some(LayerCount::Count(_)));
        streams || matches!(self.gpu_layers, Some(LayerCount::Count(_))) || self.assign.is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    /// clap puts an option under the heading of whatever was declared before it.
    #[test]
    fn options_are_under_the_heading_of_their_group() {
        let mut command = Cli::command();
        command.build();
        let inspect = command.find_subcommand("inspect").unwrap();
        let heading = |command: &clap::Command, name: &str| {
            let option = command.get_arguments().find(|option| option.get_long() == Some(name)).unwrap();
            option.get_help_heading().unwrap_or_default().to_owned()
        };
        for name in ["vram", "out", "dry-run", "kv", "all-logits", "verbose", "quiet"] {
            assert_eq!(heading(&command, name), "", "--{name}");
        }
        for (name, under) in [("profile", "Planning"), ("max-kl", "Quantization"), ("int8-activations", "Quantization")]
        {
            assert_eq!(heading(&command, name), under, "--{name}");
        }
        assert_eq!((heading(inspect, "verbose"), heading(inspect, "quiet")), (String::new(), String::new()));
    }
}
