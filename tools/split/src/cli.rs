//! The command line, as clap sees it. Nothing here decides anything: `settings` turns it into what to do.

mod planning;
mod values;

pub use planning::PlanningArgs;
pub use values::{GpuLayers, KvPlace, Stream, VramRange};

use crate::lifted::Which;
use clap::{Args, Parser, Subcommand};
use hpp_partition::Assign;
use hpp_schema::ByteSize;
use std::path::PathBuf;

/// Plan where each part of an ONNX model computes, and write the partitions and plan.yaml that hpp-exec runs.
#[derive(Debug, Parser)]
#[command(name = "hpp-split", version, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed and the message says why and what to do, 2 the command line was not \
                        understood, 130 interrupted."
)]
pub struct Cli {
    /// Look instead of splitting.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Split (the default).
    #[command(flatten)]
    pub split: SplitArgs,
}

/// What to do instead of splitting.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Print blocks, boundaries, classes, weights, KV bytes per token, and what could not be decided.
    Inspect(InspectArgs),
}

/// Options of `hpp-split inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// An ONNX file, or the directory an exporter left.
    pub model: PathBuf,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Write a Graphviz picture of blocks and boundaries to this file.
    #[arg(long, value_name = "FILE")]
    pub dot: Option<PathBuf>,
    /// Show every layer by itself, in the table and the picture, instead of one row for neighbours that are alike.
    #[arg(long)]
    pub all: bool,
}

/// Options of `hpp-split`.
#[derive(Debug, Args)]
pub struct SplitArgs {
    /// An ONNX file, or the directory an exporter left.
    #[arg(required_unless_present = "machine")]
    pub model: Option<PathBuf>,

    /// Device memory of each GPU, such as 24G or 24G,12G; 0 for none [default: what the machine of --machine or --profile
    /// has, else what the GPUs of this machine have free].
    #[arg(long, value_name = "SIZE[,SIZE]", value_delimiter = ',', value_parser = values::memory)]
    pub vram: Vec<ByteSize>,
    /// Host memory the plan may use [default: fifteen sixteenths of what the machine of --machine or --profile has, else of
    /// what this machine has free, where the model needs more].
    #[arg(long, value_name = "SIZE", value_parser = values::memory)]
    pub ram: Option<ByteSize>,
    /// Device memory to leave unused on each GPU [default: a sixteenth, 1 GiB at most].
    #[arg(long, value_name = "SIZE", value_parser = values::memory)]
    pub margin: Option<ByteSize>,
    /// Tokens a sequence may grow to, such as 8192 or 8k (k is 1024) [default: the model's, 8192 at most].
    #[arg(long, value_name = "TOKENS", value_parser = values::tokens)]
    pub context: Option<u64>,
    /// Sequences in one pass.
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub batch: u64,
    /// Prompt length the predictions and the objective speak of.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = values::tokens)]
    pub prompt_tokens: u64,
    /// Tokens generated after it; a token is priced in the middle of the answer.
    #[arg(long, value_name = "TOKENS", default_value_t = 128, value_parser = values::tokens)]
    pub new_tokens: u64,

    /// What to plan with, and for what.
    #[command(flatten)]
    pub planning: PlanningArgs,

    /// Directory to write; must not hold a plan yet [default: MODEL's name with `.hpp`, here].
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    /// Replace the plan that is there.
    #[arg(long)]
    pub force: bool,
    /// Write a directory that needs nothing else: copies the weight bytes the partitions read.
    #[arg(long)]
    pub pack: bool,
    /// Refer to the model's weight files where they are instead of linking them into the plan, where possible: weights inside
    /// the .onnx file and weights streamed to a GPU still need a file beside the plan. Stock ONNX Runtime cannot open the
    /// partitions of such a plan; hpp-exec can.
    #[arg(long, conflicts_with = "pack")]
    pub in_place: bool,
    /// Record whole hashes of all weight files, so that `hpp-exec` finds any damage. Without it that is done for the first 1 GiB of files and
    /// for files written here; of others hashes of samples are recorded.
    #[arg(long)]
    pub hash_weights: bool,
    /// Print the table and write nothing.
    #[arg(long)]
    pub dry_run: bool,
    /// Print the plan as JSON on stdout instead of the table.
    #[arg(long)]
    pub json: bool,

    /// Put the last N layers on the GPU: a number, `all`, or `auto` to let the budget decide.
    #[arg(long, value_name = "N|auto")]
    pub gpu_layers: Option<GpuLayers>,
    /// Place blocks by hand, such as `layers.0-11=gpu,layers.12=stream,head=cpu`; applied after everything else. `stream` is
    /// `gpu0:stream`.
    #[arg(long, value_name = "BLOCKS=DEVICE,...")]
    pub assign: Option<Assign>,
    /// Write layers that stay on a GPU so that hpp-exec can move each of them at any time: a partition of its own, with weights
    /// in a slot instead of in the session. Costs a launch for each layer.
    #[arg(long)]
    pub movable: bool,
    /// Split a model with operators or element types that ONNX Runtime lacks, because a library of custom operators has them.
    #[arg(long)]
    pub allow_unknown_operators: bool,
    /// Where the KV cache of GPU layers lies.
    #[arg(long, value_enum, default_value_t = KvPlace::Follow)]
    pub kv: KvPlace,
    /// Refuse a placement that needs more partitions than this.
    #[arg(long, value_name = "N")]
    pub max_partitions: Option<usize>,
    /// Cut into at least this many partitions of similar size (as many as there are blocks at most).
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub partitions: usize,
    /// Compute logits for every position of a pass, as the source model does, instead of only those asked for.
    #[arg(long)]
    pub all_logits: bool,
}

impl SplitArgs {
    /// Which pieces have their weights as inputs.
    pub fn lifted(&self) -> Which {
        if self.movable { Which::Movable } else { Which::Streamed }
    }

    /// Whether weights may be streamed to a GPU: planned so, or by hand.
    pub fn streams(&self) -> bool {
        let assigned = self.assign.as_ref().is_some_and(Assign::streams);
        let planned = self.planning.mechanisms.is_none() && !self.by_hand() && !self.stands_against_streaming();
        self.planning.asks_for_streaming() || self.planning.stream.is_some() || assigned || planned
    }

    /// Whether weights are not to be streamed where nobody asks for it: what is refined must run as it was measured, and state
    /// that lies on the host visits where a block computes.
    pub fn stands_against_streaming(&self) -> bool {
        self.planning.refine.is_some() || self.kv == KvPlace::Cpu
    }

    /// Whether a person places blocks.
    pub fn by_hand(&self) -> bool {
        let streams = matches!(self.planning.stream, Some(Stream::Count(_)));
        streams || matches!(self.gpu_layers, Some(GpuLayers::Count(_))) || self.assign.is_some()
    }
}
