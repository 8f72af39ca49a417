//! The command line: names, help and the range of each value. Decides nothing.

mod checks;
mod running;
mod values;

pub use checks::checked;
pub use running::{AdaptArg, WeightReadsArg};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use hpp_generate::kv::EvictionPolicy;
use hpp_schema::{ByteSize, Provider, ProviderLibraryArg, ProviderOptionArg};
use std::ffi::OsString;
use std::path::{Path, PathBuf};
pub use values::SeedArg;
use values::{
    above_zero, at_least_one, context, host_name, max_new, not_negative, origin, probability, prompt_tokens, stop_text,
    temperature, threads, token_id, top_k,
};

/// Run a language model that hpp-split has planned: generate text, chat, run on tensors, verify, benchmark.
///
/// Give a plan (plan.yaml or its directory). Or give a model (a directory or .onnx file): hpp-exec then runs hpp-split,
/// which plans for this machine, keeps the plan in a cache and runs it.
///
/// Generated text is written to stdout. Progress, speed and warnings are written to stderr.
#[derive(Debug, Parser)]
#[command(name = "hpp-exec", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(
    after_help = "Examples:\n  hpp-exec model/ -p \"Once upon a time\" -n 64\n  hpp-exec plan/ --chat -p \"Hello\"\n  \
                        hpp-exec bench model/ --ram 8G -ngl 20\n\n\
                        Exit codes: 0 done, 1 failed (the message says why and what to do), 2 invalid command \
                        line, 74 a mapped weight file was truncated during the run, 130 interrupted (by SIGTERM with nothing to keep: 143)."
)]
pub struct Cli {
    /// What to do instead of generating text.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Generating text.
    #[command(flatten)]
    pub run: RunArgs,
}

const NO_SUBCOMMAND: &str = "generating text needs no subcommand: write `hpp-exec MODEL -p \"...\"`";
const ADVICE: hpp_cli::Advice = hpp_cli::Advice {
    habits: &[
        ("run", NO_SUBCOMMAND),
        ("chat", "write `hpp-exec MODEL --chat`"),
        ("split", "hpp-split MODEL splits; hpp-exec MODEL plans and runs"),
        ("generate", NO_SUBCOMMAND),
        ("-m", "give the model without -m: hpp-exec MODEL -p \"...\", or hpp-exec serve MODEL"),
        ("--model", "give the model without --model: hpp-exec MODEL -p \"...\", or hpp-exec serve MODEL"),
        ("--flash-attn", "ONNX Runtime's attention decides that itself: leave -fa out"),
        ("--model-draft", "--draft PLAN names a smaller model that drafts tokens"),
        ("-r", "--stop TEXT ends an answer before that text; 'hpp-exec bench' has -r for rounds"),
        ("--reverse-prompt", "--stop TEXT ends an answer before that text"),
    ],
    second_word: "give a prompt with -p, as in hpp-exec PLAN -p \"...\"",
};

/// The error for a command line that clap refuses, with advice. `arguments` with the program name.
pub fn explained(error: clap::Error, arguments: &[OsString]) -> clap::Error {
    let arguments: Vec<String> = arguments.iter().skip(1).map(|word| word.to_string_lossy().into_owned()).collect();
    ADVICE.explain(error, &<Cli as clap::CommandFactory>::command(), &arguments)
}

/// The hint for a path at which there is no plan: what to write instead, if the path looks like a subcommand.
pub fn instead_of(path: &Path) -> Option<String> {
    ADVICE.instead_of(path.to_str()?, &<Cli as clap::CommandFactory>::command())
}

/// What to do instead of generating text.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the ONNX Runtime library found here, its execution providers, devices and memory, and why one cannot be used.
    Devices(DevicesArgs),
    /// Compare the tokens and logits of a plan with those of the unsplit model. If they differ, name the first partition that differs.
    Verify(VerifyArgs),
    /// Measure a plan: time to first token, tokens per second, time in each partition, memory.
    Bench(BenchArgs),
    /// Run many prompts together: JSON lines in, JSON lines out. One pass over the weights computes a token of every sequence. After an
    /// interruption, run the same command again: it continues.
    Jobs(JobsArgs),
    /// Serve models over HTTP with OpenAI's API (docs/SERVING.md). Requests share each pass over the weights. A prompt that begins like
    /// an earlier one reuses the KV cache of the common prefix.
    Serve(ServeArgs),
    /// Answer hpp-profile's requests: one JSON object per line on stdin and stdout (schemas/probe.schema.json).
    #[command(hide = true)]
    Probe(LibraryArgs),
}

/// Arguments of a plain run.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// A plan (plan.yaml or its directory), or a model (a directory or .onnx file), which hpp-split plans first.
    #[arg(required = true, value_name = "PLAN|MODEL")]
    pub plan: Option<PathBuf>,
    /// Where the prompt comes from.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// How to answer.
    #[command(flatten)]
    pub answer: AnswerArgs,
    /// Speculative decoding: draft tokens and verify several in one pass over the weights. The text stays the same; in models that
    /// round activations, and where a draft is computed on another device, near ties may be decided differently. It is faster if
    /// drafts are often right and a pass of several tokens costs little more than a pass of one, as with streamed weights. Drafting
    /// pauses while it does not pay [default: `draft` with --draft or if the plan has a draft of its model, else `off`].
    #[arg(long, value_enum, value_name = "HOW")]
    pub speculate: Option<SpeculateArg>,
    /// The draft model or its plan: a smaller model with the same tokenizer. Its memory comes on top of this plan's. Or, for a MODEL, int4
    /// or int8: its own quantized weights, made with the plan; they take their part of --ram, and the model gets the rest.
    #[arg(long, value_name = "MODEL|PLAN|int4|int8", value_parser = draft)]
    pub draft: Option<DraftArg>,
    /// Draft up to this many tokens for each pass, even if that does not pay; for comparison [default: the number that pays most]. Drafts end
    /// earlier where a draft model is unsure of them.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=31))]
    pub draft_tokens: Option<u8>,
    /// Print one JSON object instead of text: tokens, text, finish reason, timings, bytes.
    #[arg(long)]
    pub json: bool,
    /// Save the logits of each generated token: float32 [steps, vocab] in a .npy file.
    #[arg(long, value_name = "FILE.npy")]
    pub logits: Option<PathBuf>,
    /// Table [vocab, hidden] of token embeddings, for models that take embeddings instead of token ids.
    #[arg(long, value_name = "FILE.npy")]
    pub embeddings: Option<PathBuf>,
    /// Read input tensors by name: for models that generate no text, and for extra inputs of models that do.
    #[arg(long, value_name = "IN.npz")]
    pub inputs: Option<PathBuf>,
    /// Write the model's outputs here: for models that generate no text.
    #[arg(long, value_name = "OUT.npz", requires = "inputs")]
    #[arg(conflicts_with_all = [
        "chat", "system", "max_new", "stop", "ignore_eos", "json_schema", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed",
        "speculate", "draft", "draft_tokens", "logits", "embeddings", "session",
    ])]
    pub outputs: Option<PathBuf>,
    /// Continue the conversation of this name and save it: its messages and their KV cache. With a prompt, answer that one message.
    #[arg(long, value_name = "NAME", value_parser = session_name)]
    pub session: Option<String>,
    /// Where a session's states are kept.
    #[command(flatten)]
    pub kv: KvArgs,
    /// How to load and run.
    #[command(flatten)]
    pub runtime: RuntimeArgs,
}

/// Parses a name that is valid as a file name.
fn session_name(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match text.len() {
        1..=64 if text.chars().all(is_plain) && !text.starts_with('.') => Ok(text.to_owned()),
        _ => Err("a name has 1 to 64 letters (a to z, A to Z), digits, `-`, `_` and `.`, and does not begin with `.`"
            .to_owned()),
    }
}

/// How to answer a prompt.
#[derive(Clone, Debug, Default, Args)]
pub struct AnswerArgs {
    /// Put the prompt into the model's chat template as the user's turn.
    #[arg(long)]
    pub chat: bool,
    /// System message for the chat template. In `jobs`, prompts are then chats without --chat, too, and `messages` without a
    /// system message get this one; lines of `tokens` stay as they are.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Generate at most N tokens; -1 is no limit [default: until the model ends the text or the context is full].
    #[arg(long, short = 'n', visible_alias = "n-predict", aliases = ["predict", "max-tokens"], value_name = "N")]
    #[arg(value_parser = max_new)]
    #[arg(allow_negative_numbers = true)]
    pub max_new: Option<u64>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// Stop generating at this text, which is left out. May be given several times.
    #[arg(long, value_name = "TEXT", value_parser = stop_text)]
    pub stop: Vec<String>,
    /// Continue after an end-of-text token.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Answer with JSON of the schema in this file, and nothing else. Each token is chosen among those that continue such JSON.
    #[arg(long, value_name = "FILE.json")]
    pub json_schema: Option<PathBuf>,
}

/// Where the prompt comes from: at most one of these.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// Text to continue. Text piped to stdin goes before it. Without any prompt option, hpp-exec chats in a terminal, and otherwise
    /// continues the text on stdin.
    #[arg(long, short = 'p', value_name = "TEXT")]
    pub prompt: Option<String>,
    /// File with the text to continue; `-` is stdin, which is not read beside a file.
    #[arg(long, short = 'f', visible_alias = "file", value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Token ids to continue.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', value_parser = token_id, allow_negative_numbers = true)]
    pub tokens: Option<Vec<u32>>,
}

/// How tokens are chosen. The default of a setting is the model's recommended one, else greedy; --top-k, --top-p, --min-p and --seed draw
/// tokens, at temperature 1 if no other is known.
#[derive(Clone, Debug, Default, Args)]
pub struct SamplingArgs {
    /// Flatten (above 1) or sharpen (below 1) the distribution; 0 always takes the most likely token.
    #[arg(long, visible_alias = "temp", value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Sample from the N most likely tokens; 0 or -1 is all. Like --top-p, --min-p and --seed it draws tokens, at temperature 1 where neither
    /// --temperature nor the model says another.
    #[arg(long, value_name = "N", value_parser = top_k, allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Sample from the fewest most likely tokens whose probabilities add up to P.
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Sample from tokens at least P times as likely as the most likely one.
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub min_p: Option<f64>,
    /// Make tokens already in the text less likely; 1 changes nothing.
    #[arg(long, visible_alias = "repeat-penalty", value_name = "R", value_parser = above_zero)]
    #[arg(allow_negative_numbers = true)]
    pub repetition_penalty: Option<f64>,
    /// Seed of the random numbers, -1 for a new one; the same seed gives the same text. Without --temperature and without one that the model
    /// recommends, tokens are then drawn at temperature 1 instead of chosen greedily.
    #[arg(long, short = 's', value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<SeedArg>,
}

/// How to load and run.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Runtime")]
pub struct RuntimeArgs {
    /// The library and its threads.
    #[command(flatten)]
    pub library: LibraryArgs,
    /// Fail if a partition cannot run on the execution provider that the plan prefers.
    #[arg(long)]
    pub strict: bool,
    /// How to read weights that the plan does not keep in memory. `prefetch` is fastest; the others are for comparison.
    #[arg(long, value_enum, default_value_t = WeightReadsArg::Prefetch, value_name = "HOW")]
    pub weights: WeightReadsArg,
    /// Do not prefetch: copy streamed weights to a GPU, and read weights from disk, only when their partition is about to
    /// run. The same as --weights on-demand; for comparison.
    #[arg(long, conflicts_with = "weights")]
    pub no_prefetch: bool,
    /// Wait for a CUDA device after each partition instead of once a pass, and copy streamed weights in a thread; for
    /// comparison.
    #[arg(long)]
    pub wait_each_run: bool,
    /// Host memory that may be pinned for weights streamed to GPUs; the other streamed weights are copied through a small
    /// pinned buffer [default: as much as they need].
    #[arg(long, value_name = "SIZE")]
    pub pinned: Option<ByteSize>,
    /// The directory for KV caches that the plan keeps on disk (hpp-split --kv disk), in a temporary file that is deleted when the process ends [default: the
    /// plan's].
    #[arg(long, value_name = "DIR", env = "HPP_STATE_DIR")]
    pub state_dir: Option<PathBuf>,
    /// What may change while the plan runs. `exact`: what changes no token, which is how many weights are locked and how many sequences run
    /// while the system allows less memory, and which weights stay on a GPU while passes are slower than planned; `devices`: also where
    /// tokens are computed; `off`: nothing.
    #[arg(long, value_enum, default_value_t = AdaptArg::Exact, value_name = "WHAT")]
    pub adapt: AdaptArg,
    /// Stream to host memory where there is no GPU, instead of running the partition's file for the host.
    #[arg(long, hide = true)]
    pub slots_on_host: bool,
    /// Overwrite slots with ones before each copy of weights, to detect reads that come too early.
    #[arg(long, hide = true)]
    pub poison_slots: bool,
    /// Verify every byte of the plan's files, prepared weights included, against the recorded hashes. Without it, hpp-exec verifies
    /// files completely if they are small (256 MiB in all), new on this machine or modified, and samples of the others.
    #[arg(long)]
    pub verify_weights: bool,
    /// Execution providers to try, best first, instead of the plan's list: cuda, webgpu, openvino, cpu or any other that hpp-exec
    /// devices lists. Partitions on the host take those of the list that compute from host memory.
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub providers: Vec<Provider>,
    /// Size of the context in tokens, prompt and answer together, such as 4096 or 8k [default: the plan's]. A prompt that fills it is answered
    /// with one token.
    #[arg(long, short = 'c', visible_alias = "ctx-size", value_name = "N", value_parser = context)]
    pub context: Option<u64>,
    /// How to plan a model.
    #[command(flatten)]
    pub planning: AutoPlanArgs,
}

/// Planning options for a model that is given instead of a plan. hpp-split parses the values, so they are passed on as typed.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Planning of a MODEL")]
pub struct AutoPlanArgs {
    /// Host memory that the plan may use, such as 24G [default: 15/16 of the free memory of this machine if the
    /// model needs more than that, else no limit].
    #[arg(long, value_name = "SIZE", allow_negative_numbers = true)]
    pub ram: Option<String>,
    /// Memory of each GPU that the plan may use, such as 24G or 24G,12G [default: the free memory of each GPU].
    #[arg(long, value_name = "SIZE[,SIZE]", allow_negative_numbers = true)]
    pub vram: Option<String>,
    /// Place the last N layers on the GPU: a number, `all`, or `auto`. Also: -ngl N [default: auto].
    #[arg(long, visible_alias = "n-gpu-layers", value_name = "N|all|auto")]
    pub gpu_layers: Option<String>,
    /// Round the activations that 4- and 8-bit weights multiply on the CPU to 8 bits, those of experts too: faster, with other logits
    /// (hpp-split --help).
    #[arg(long)]
    pub int8_activations: bool,
    /// Plan again even if the cache has a plan, for example after memory was freed or a GPU was added.
    #[arg(long)]
    pub replan: bool,
    /// Directory for plans and their prepared weights; removing it is safe while no hpp-exec runs
    /// [default: $HPP_CACHE, else hpp in $XDG_CACHE_HOME or ~/.cache].
    #[arg(long, value_name = "DIR")]
    pub cache: Option<PathBuf>,
    /// Size limit of the plans in the cache, and of OpenVINO's compiled models there. Beyond it, hpp-exec removes the least recently used
    /// plans, except those in use and the last one used, and the oldest compiled models
    /// [default: $HPP_CACHE_LIMIT, else 50G].
    #[arg(long, value_name = "SIZE", value_parser = ByteSize::typed)]
    pub cache_limit: Option<ByteSize>,
    /// Bits of the weights of a draft made of the model itself.
    #[arg(skip)]
    pub draft_bits: Option<DraftBits>,
}

/// Bits of the weights of a draft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DraftBits {
    /// Four.
    Int4,
    /// Eight.
    Int8,
}

impl DraftBits {
    /// The name, as hpp-split's --quantize takes it.
    pub fn name(self) -> &'static str {
        match self {
            DraftBits::Int4 => "int4",
            DraftBits::Int8 => "int8",
        }
    }

    /// The bits of this name.
    pub fn named(name: &Path) -> Option<Self> {
        [DraftBits::Int4, DraftBits::Int8].into_iter().find(|bits| name.as_os_str() == bits.name())
    }
}

/// The library, its threads, and how much is printed.
#[derive(Clone, Debug, Default, Args)]
pub struct LibraryArgs {
    /// The ONNX Runtime library to use (libonnxruntime.so, .dylib or .dll).
    #[arg(long, value_name = "PATH")]
    pub ort_lib: Option<PathBuf>,
    /// The library of a plug-in provider, by the name that plans and --providers use. Repeatable; before HPP_EP_LIBS, which has the
    /// same form, and before the Python packages beside ONNX Runtime.
    #[arg(long, value_name = "NAME=PATH")]
    pub ep_lib: Vec<ProviderLibraryArg>,
    /// An option of a provider, as the provider documents it. Repeatable; replaces the plan's. `device_type` chooses among its devices
    /// (hpp-exec devices).
    #[arg(long, value_name = "NAME.KEY=VALUE")]
    pub ep_option: Vec<ProviderOptionArg>,
    /// Threads that all partitions share [default: one for each physical core].
    #[arg(long, short = 't', value_name = "N", value_parser = threads)]
    pub threads: Option<u16>,
    /// Log steps and decisions on stderr; -vv adds details, -vvv everything. HPP_LOG overrides it: a level, or levels by module, such as
    /// HPP_LOG=info,hpp_backend=debug. HPP_LOG also applies to hpp-split, which plans a MODEL.
    #[arg(long, short = 'v', action = ArgAction::Count)]
    pub verbose: u8,
    /// Print only errors on stderr.
    #[arg(long, short = 'q', conflicts_with = "verbose")]
    pub quiet: bool,
}

/// `--draft`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DraftArg {
    /// Another model, or its plan.
    Model(PathBuf),
    /// The model itself with weights of so many bits.
    Own(DraftBits),
}

/// Parses `--draft`. A file with the name of a number of bits is a model.
fn draft(text: &str) -> Result<DraftArg, String> {
    let path = PathBuf::from(text);
    let bits = DraftBits::named(&path).filter(|_| !path.exists());
    Ok(bits.map_or(DraftArg::Model(path), DraftArg::Own))
}

/// `--speculate`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SpeculateArg {
    /// `draft` if there is a draft, else `ngram`.
    Auto,
    /// One token per pass.
    Off,
    /// Draft the tokens that followed the previous occurrence of the last tokens (prompt lookup).
    Ngram,
    /// Draft with the plan's own draft of its model (hpp-split --draft), or with the model that --draft names (not in jobs and serve).
    Draft,
}

/// How several sequences share a pass.
#[derive(Clone, Copy, Debug, Args)]
pub struct BatchArgs {
    /// Compute the next tokens of several sequences as rows of one matrix product, which is several times faster.
    #[arg(long, value_name = "HOW", value_enum, default_value_t = RowBatchingArg::Exact)]
    pub row_batching: RowBatchingArg,
}

/// Values of `--row-batching`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RowBatchingArg {
    /// If it changes no bit. Checked when a new number of sequences runs for the first time.
    Exact,
    /// Even if sums round differently: a text may then depend on the number of other sequences.
    On,
    /// Never: one sequence after the other.
    Off,
}

/// Arguments of `jobs`.
#[derive(Debug, Args)]
#[command(after_help = "A line of PROMPTS.jsonl: {\"id\": \"a\", \"prompt\": \"Once upon a time\", \"max_new\": 64}\n\
                        with `prompt`, `tokens` or `messages` ([{\"role\": \"user\", \"content\": \"...\"}]), and settings \
                        that replace those of this command: chat, system, max_new, temperature, top_k, top_p, min_p, \
                        repetition_penalty, seed, stop, ignore_eos, response_format.\n\
                        A line of ANSWERS.jsonl: {\"id\": \"a\", \"tokens\": [...], \"text\": \"...\", \"finish\": \"eos\"}, or \
                        {\"id\": \"a\", \"error\": \"...\"}.")]
pub struct JobsArgs {
    /// A plan (plan.yaml or its directory), or a model (a directory or .onnx file), which hpp-split plans first.
    #[arg(value_name = "PLAN|MODEL")]
    pub plan: PathBuf,
    /// The prompts, one JSON object per line.
    #[arg(long = "in", value_name = "PROMPTS.jsonl")]
    pub input: PathBuf,
    /// The answers, one JSON object per line, in the order in which they finish. Prompts whose id has an answer in this file are skipped.
    #[arg(short = 'o', long = "out", value_name = "ANSWERS.jsonl")]
    pub output: PathBuf,
    /// Most sequences at once; fewer if memory is short [default: the plan's number; at least 16 without a profile, except for
    /// a mixture that is read from disk].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub max_sequences: Option<u64>,
    /// How sequences share a pass.
    #[command(flatten)]
    pub batch: BatchArgs,
    /// Speculative decoding of each sequence, while it pays [default: off].
    #[arg(long, value_enum, value_name = "HOW")]
    pub speculate: Option<SpeculateArg>,
    /// Default settings of the prompts.
    #[command(flatten)]
    pub defaults: AnswerArgs,
    /// Table [vocab, hidden] of token embeddings, for models that take embeddings instead of token ids.
    #[arg(long, value_name = "FILE.npy")]
    pub embeddings: Option<PathBuf>,
    /// Write the timeline of the first passes (100,000 spans) in the Chrome trace format, for Perfetto.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Print a summary as one JSON object on stdout.
    #[arg(long)]
    pub json: bool,
    /// How to load and run.
    #[command(flatten)]
    pub runtime: RuntimeArgs,
}

/// Arguments of `serve`.
#[derive(Clone, Debug, Args)]
#[command(
    after_help = "Example:\n  hpp-exec serve plan/ --port 8080\n  curl localhost:8080/v1/chat/completions -H 'content-type: \
                        application/json' -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'"
)]
pub struct ServeArgs {
    /// Plans or models. NAME=PATH sets the name that requests use [default: the model's name].
    #[arg(required = true, value_name = "[NAME=]PLAN|MODEL", value_parser = named_plan)]
    pub plans: Vec<NamedPlan>,
    /// Address to listen on; 0.0.0.0 means all networks of this machine.
    #[arg(long, default_value = "127.0.0.1", value_name = "ADDRESS")]
    pub host: std::net::IpAddr,
    /// Port to listen on; 0 chooses a free one.
    #[arg(long, default_value_t = 8080, value_name = "N")]
    pub port: u16,
    /// Key that requests must send as `Authorization: Bearer KEY`; may be given several times. Other users of this machine can see the
    /// command line: HPP_API_KEY in the environment is safer.
    #[arg(long, value_name = "KEY")]
    pub api_key: Vec<String>,
    /// Most sequences of a model, running and kept; fewer if memory is short [default: the plan's number, at least 8].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub max_sequences: Option<u64>,
    /// How sequences share a pass.
    #[command(flatten)]
    pub batch: BatchArgs,
    /// Host memory for all models together; those that it does not hold beside others are loaded when a request needs them, and idle ones
    /// unloaded for them [default: the free memory of this machine].
    #[arg(long, value_name = "SIZE")]
    pub memory: Option<ByteSize>,
    /// Load each model when a request needs it, none at the start [default: those that fit are loaded at the start].
    #[arg(long)]
    pub on_demand: bool,
    /// Unload a model that had no request for so many seconds; the next request loads it again [default: only to make room for
    /// another model].
    #[arg(long, value_name = "SECONDS", value_parser = at_least_one::<u64>)]
    pub idle_timeout: Option<u64>,
    /// Most waiting requests of a model; further ones get status 429.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub queue: usize,
    /// Time limit of a request, seconds [default: none].
    #[arg(long, value_name = "SECONDS", value_parser = at_least_one::<u64>)]
    pub timeout: Option<u64>,
    /// Largest request body.
    #[arg(long, default_value = "8M", value_name = "SIZE")]
    pub max_body: ByteSize,
    /// Origin of pages that may use this server from a browser, such as http://localhost:3000, or `*`; may be given several times.
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub cors_origin: Vec<String>,
    /// Another name of this machine that requests may use, such as one in /etc/hosts; may be given several times. On a loopback address
    /// without a key, only localhost and loopback addresses are answered, so that no page can use the server under a name of its own.
    #[arg(long, alias = "allow-host", value_name = "NAME", value_parser = host_name)]
    pub allowed_host: Vec<String>,
    /// Most connections at a time; the longest idle one is closed for a new one.
    #[arg(long, default_value_t = 512, value_name = "N", value_parser = at_least_one::<u32>)]
    pub max_connections: u32,
    /// Most requests per minute of each API key, or of each client address without keys; further ones get status 429
    /// [default: no limit].
    #[arg(long, value_name = "N", value_parser = at_least_one::<u32>)]
    pub rate_limit: Option<u32>,
    /// Where states of prompts are kept.
    #[command(flatten)]
    pub kv: KvArgs,
    /// Speculative decoding, while it pays. Answers of fp32 models stay the same. In models that round activations, near ties between
    /// tokens may be decided differently from run to run [default: `draft` if the plan has a draft of its model, else `off`].
    #[arg(long, value_enum, value_name = "HOW")]
    pub speculate: Option<SpeculateArg>,
    /// The same as --speculate ngram.
    #[arg(long, conflicts_with = "speculate")]
    pub ngram: bool,
    /// Seconds for requests to finish after Ctrl-C or SIGTERM.
    #[arg(long, default_value_t = 30, value_name = "SECONDS")]
    pub grace: u64,
    /// How to load and run.
    #[command(flatten)]
    pub runtime: RuntimeArgs,
}

/// Where the KV caches of prompts are kept after their sequences end, for later prompts with the same prefix.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "KV cache")]
pub struct KvArgs {
    /// RAM for saved KV caches; 0 disables saving, also on disk [default: 5 % of the plan's --ram (of what this process may use, if that is less) or of --memory, the smaller, at most what the model leaves of the former; else 10 % of the free memory; at most 4G].
    #[arg(long, value_name = "SIZE", env = "HPP_KV_RAM")]
    pub kv_ram: Option<ByteSize>,
    /// Also save KV caches in this directory, so that they survive a restart. They reveal the prompts to anyone who can read the
    /// directory [default: none; with --session, `hpp` in the user's data directory].
    #[arg(long, value_name = "DIR", env = "HPP_KV_DIR")]
    pub kv_dir: Option<PathBuf>,
    /// Most bytes in --kv-dir for all models together; 0 saves nothing there [default: 16G].
    #[arg(long, value_name = "SIZE", env = "HPP_KV_DISK")]
    pub kv_disk: Option<ByteSize>,
    /// Eviction policy: `lru` evicts the least recently used pages first, `priority` those of the least important requests, `hybrid`
    /// those that are rarely used and cheap to compute again [default: hybrid].
    #[arg(long, value_name = "POLICY", env = "HPP_KV_POLICY")]
    #[arg(value_parser = <EvictionPolicy as std::str::FromStr>::from_str)]
    pub kv_policy: Option<EvictionPolicy>,
    /// Tokens per page, the unit of saving, and per chunk of a prompt [default: 128, or the plan's prefill_chunk if that is smaller].
    #[arg(long, value_name = "TOKENS", env = "HPP_KV_PAGE")]
    #[arg(value_parser = clap::value_parser!(u64).range(16..=4096))]
    pub kv_page: Option<u64>,
    /// Memory of all models, of which pages take a share where the plan has no smaller limit.
    #[arg(skip)]
    pub limit: Option<ByteSize>,
}

/// A plan with the name that requests give it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedPlan {
    /// The name, if given.
    pub name: Option<String>,
    /// The plan or model.
    pub path: PathBuf,
}

fn named_plan(text: &str) -> Result<NamedPlan, String> {
    match text.split_once('=') {
        Some(("", _)) => Err("the name before `=` is empty".to_owned()),
        Some((_, "")) => Err("the path after `=` is empty".to_owned()),
        Some((name, path)) => Ok(NamedPlan { name: Some(name.to_owned()), path: path.into() }),
        None if text.is_empty() => Err("the path is empty".to_owned()),
        None => Ok(NamedPlan { name: None, path: text.into() }),
    }
}

/// Arguments of `devices`.
#[derive(Debug, Args)]
pub struct DevicesArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// The library.
    #[command(flatten)]
    pub library: LibraryArgs,
}

/// Arguments of `verify`.
#[derive(Debug, Args)]
#[command(mut_arg("prompt", |prompt| prompt.help("Text that both models read; without any prompt option, random tokens from --seed")))]
#[command(mut_arg("prompt_file", |file| file.help("File with the text that both models read; `-` is stdin")))]
#[command(mut_arg("tokens", |tokens| tokens.help("Token ids that both models read")))]
#[command(mut_arg("adapt", |adapt| adapt.hide(true)))]
pub struct VerifyArgs {
    /// A plan (plan.yaml or its directory), or a model (a directory or .onnx file), which hpp-split plans first.
    #[arg(value_name = "PLAN|MODEL")]
    pub plan: PathBuf,
    /// What both models read [default: a short sequence of random tokens from --seed].
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Named input tensors, for models that generate no text [default: random, from --seed].
    #[arg(long, value_name = "IN.npz")]
    pub inputs: Option<PathBuf>,
    /// Tokens to generate and compare.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 16, value_parser = at_least_one::<u64>)]
    pub steps: u64,
    /// Largest difference allowed, relative to the largest magnitude in the tensor (at least 0.001) [default: by element type and
    /// provider].
    #[arg(long, value_name = "X", value_parser = not_negative, allow_negative_numbers = true)]
    pub tolerance: Option<f64>,
    /// Seed of random inputs.
    #[arg(long, short = 's', value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Table [vocab, hidden] of token embeddings, for models that take embeddings instead of token ids.
    #[arg(long, value_name = "FILE.npy")]
    pub embeddings: Option<PathBuf>,
    /// Compare the distributions of the next token over the prompts of this file, JSON lines as `jobs` reads them, instead of
    /// logits step by step: divergence, most likely tokens, perplexity. For plans whose weights were rounded on purpose.
    #[arg(long, value_name = "PROMPTS.jsonl", conflicts_with_all = ["prompt", "prompt_file", "tokens", "inputs", "steps", "tolerance", "seed"])]
    pub kl: Option<PathBuf>,
    /// What `--kl` compares with, such as the model before it was quantized [default: the plan's unsplit model].
    #[arg(long, value_name = "PLAN|MODEL")]
    pub against: Option<PathBuf>,
    /// Write a page with the result of `--kl` and a picture of it.
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// How to load and run.
    #[command(flatten)]
    pub runtime: RuntimeArgs,
}

/// Arguments of `bench`.
#[derive(Debug, Args)]
#[command(mut_arg("adapt", |adapt| adapt.hide(true)))]
pub struct BenchArgs {
    /// A plan (plan.yaml or its directory), or a model (a directory or .onnx file), which hpp-split plans first.
    #[arg(value_name = "PLAN|MODEL")]
    pub plan: PathBuf,
    /// Tokens in the prompt [default: as many as the plan predicts times for, or fewer if --context is shorter].
    #[arg(long, short = 'p', value_name = "N", value_parser = prompt_tokens)]
    pub prompt_tokens: Option<u64>,
    /// Tokens to generate.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 64, value_parser = at_least_one::<u64>)]
    pub new_tokens: u64,
    /// Measured runs, after one warm-up run; medians are printed.
    #[arg(long, short = 'r', value_name = "N", default_value_t = 3, value_parser = at_least_one::<u32>)]
    pub runs: u32,
    /// Leave out the warm-up run, so that the first run is measured too.
    #[arg(long)]
    pub no_warmup: bool,
    /// Measure the unsplit model through the same runtime instead.
    #[arg(long)]
    pub unsplit: bool,
    /// Write the timeline of the last run in the Chrome trace format, for Perfetto.
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Table [vocab, hidden] of token embeddings, for models that take embeddings instead of token ids.
    #[arg(long, value_name = "FILE.npy")]
    pub embeddings: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
    /// How to load and run.
    #[command(flatten)]
    pub runtime: RuntimeArgs,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, String> {
        let words = line.split(' ').filter(|w| !w.is_empty());
        Cli::try_parse_from(["hpp-exec"].into_iter().chain(words)).and_then(checked).map_err(|e| e.to_string())
    }

    #[test]
    fn the_definition_is_valid() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_plan_needs_no_subcommand() {
        let cli = parse("plan.yaml --prompt hi --temperature 0.5").unwrap();
        assert!(cli.command.is_none());
        assert_eq!(cli.run.plan.unwrap().to_str(), Some("plan.yaml"));
        assert_eq!(cli.run.prompt.prompt.as_deref(), Some("hi"));
    }

    #[test]
    fn subcommands_need_no_plan_before_them() {
        assert!(matches!(parse("devices --json").unwrap().command, Some(Command::Devices(_))));
        let Some(Command::Verify(verify)) = parse("verify p --steps 3 --tokens 1,2").unwrap().command else { panic!() };
        assert_eq!((verify.steps, verify.prompt.tokens), (3, Some(vec![1, 2])));
        assert!(matches!(parse("bench p --unsplit").unwrap().command, Some(Command::Bench(_))));
    }

    #[test]
    fn usage_errors_say_what_is_expected() {
        for (line, says) in [
            ("", "<PLAN|MODEL>"),
            ("p --prompt a --tokens 1", "cannot be used with"),
            ("p --tokens 1,x", "token ids are whole numbers"),
            ("p --tokens -1", "token ids"),
            ("p --temperature -1", "zero or a number"),
            ("p --temperature nan", "zero or a number"),
            ("p --top-p 1.5", "from 0 to 1"),
            ("p --repetition-penalty 0", "above 0"),
            ("p --outputs o.npz", "--inputs"),
            ("p --threads 0", "from 1 to "),
            ("p --threads 5000", "from 1 to "),
            ("p --top-k -2", "0 or -1 for all"),
            ("p --providers Vulkan", "cannot be the name"),
            ("p -q -v", "cannot be used with"),
            ("verify", "<PLAN|MODEL>"),
            ("p -c 8x", "4k"),
            ("p -n many", "-1 for no limit"),
            ("verify p --steps 0", "1 or more"),
            ("verify p --report y.html", "--report needs --kl"),
            ("verify p -p hi -n 1 --report y.html", "--report needs --kl"),
            ("verify p --tokens 1 --against m", "--against needs --kl"),
            ("bench p -p What", "invalid value 'What' for '--prompt-tokens <N>': here it is the number of tokens"),
            ("bench p -p 0", "at least one"),
            ("devices --wait-each-run", "--wait-each-run"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn help_of_a_prompt_describes_its_default() {
        let help = |line: &str| parse(line).unwrap_err();
        assert!(help("--help").contains("chats in a terminal"), "{}", help("--help"));
        let verify = help("verify --help");
        assert!(verify.contains("random tokens from --seed") && !verify.contains("terminal"), "{verify}");
        assert!(help("bench --help").contains("--wait-each-run"));
        assert!(!help("devices --help").contains("--wait-each-run"));
    }

    #[test]
    fn short_options_are_those_of_llama_cpp() {
        let run = parse("p -p hi -n 12 -c 8k -t 3 --temp 0.5 -s 7 --repeat-penalty 1.2 --n-gpu-layers 20").unwrap().run;
        assert_eq!((run.prompt.prompt.as_deref(), run.answer.max_new), (Some("hi"), Some(12)));
        assert_eq!((run.runtime.context, run.runtime.library.threads), (Some(8192), Some(3)));
        let sampling = &run.answer.sampling;
        let sampling = (sampling.temperature, sampling.seed, sampling.repetition_penalty);
        assert_eq!(sampling, (Some(0.5), Some(SeedArg::Fixed(7)), Some(1.2)));
        assert_eq!(run.runtime.planning.gpu_layers.as_deref(), Some("20"));
        assert_eq!(parse("p -f x.txt -n -1").unwrap().run.answer.max_new, Some(u64::MAX));
        let Some(Command::Bench(bench)) = parse("bench p -p 16 -n 8 -r 2 --no-warmup").unwrap().command else {
            panic!()
        };
        assert_eq!((bench.prompt_tokens, bench.new_tokens, bench.runs, bench.no_warmup), (Some(16), 8, 2, true));
    }

    #[test]
    fn every_sampling_setting_is_read() {
        let s = parse("p --temperature 0 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 7").unwrap();
        let s = s.run.answer.sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p), (Some(0.0), Some(5), Some(0.9), Some(0.1)));
        assert_eq!((s.repetition_penalty, s.seed), (Some(1.1), Some(SeedArg::Fixed(7))));
    }

    #[test]
    fn a_word_behind_the_plan_is_not_called_a_subcommand() {
        for line in ["plan hello", "file plan"] {
            let arguments: Vec<OsString> =
                ["hpp-exec"].into_iter().chain(line.split(' ')).map(OsString::from).collect();
            let text = explained(Cli::try_parse_from(&arguments).unwrap_err(), &arguments).to_string();
            assert!(text.contains("give a prompt with -p") && !text.contains("subcommand"), "{text}");
        }
        let arguments = ["hpp-exec", "plan", "--nonsense"].map(OsString::from);
        let error = Cli::try_parse_from(&arguments).unwrap_err();
        assert!(explained(error, &arguments).to_string().contains("--nonsense"));
    }
}
