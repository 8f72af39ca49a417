//! The command line as it is typed: names, help and what a single value may be. Decides nothing.

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};
use hpp_schema::ByteSize;
use std::path::PathBuf;

/// Runs a plan made by hpp-split: text, chat, tensors, verification and benchmarks.
///
/// Text goes to stdout and nothing else does; progress, speed and warnings go to stderr.
#[derive(Debug, Parser)]
#[command(name = "hpp-exec", version, args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed and the message says why and what to do, 2 the command line was not \
                        understood, 130 interrupted."
)]
pub struct Cli {
    /// What to do instead of running the plan.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Running the plan.
    #[command(flatten)]
    pub run: RunArgs,
}

/// What to do instead of running the plan.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the ONNX Runtime found here, its providers, devices and memory, and why one is unusable.
    Devices(DevicesArgs),
    /// Compare a plan with the unsplit model: tokens, logits and, where they differ, the first boundary that does.
    Verify(VerifyArgs),
    /// Measure a plan: time to first token, tokens per second, time per stage, memory.
    Bench(BenchArgs),
    /// Answer hpp-profile's requests, one JSON object a line from stdin to stdout (schemas/probe.schema.json).
    #[command(hide = true)]
    Probe(LibraryArgs),
}

/// Arguments of a plain run.
#[derive(Debug, Args)]
pub struct RunArgs {
    /// The plan: a plan.yaml, or the directory that holds one.
    #[arg(required = true)]
    pub plan: Option<PathBuf>,
    /// What the model reads.
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Put the prompt into the model's chat template as the user's turn.
    #[arg(long)]
    pub chat: bool,
    /// System message for the chat template.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Most tokens to generate [default: until the model ends the text or the context is full].
    #[arg(long, value_name = "N")]
    pub max_new: Option<u64>,
    /// How tokens are chosen.
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// End the text before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on after the tokens that end a text.
    #[arg(long)]
    pub ignore_eos: bool,
    /// Print one JSON object instead of text: tokens, text, finish reason, timings, bytes.
    #[arg(long)]
    pub json: bool,
    /// Save the scores each token was chosen from: float32 [steps, vocab] in a .npy file.
    #[arg(long, value_name = "FILE.npy")]
    pub logits: Option<PathBuf>,
    /// Table [vocab, hidden] of token embeddings, for models that take embeddings instead of token ids.
    #[arg(long, value_name = "FILE.npy")]
    pub embeddings: Option<PathBuf>,
    /// Named input tensors, for models that generate no text and for further inputs of those that do.
    #[arg(long, value_name = "IN.npz")]
    pub inputs: Option<PathBuf>,
    /// Where the model's outputs go, for models that generate no text.
    #[arg(long, value_name = "OUT.npz", requires = "inputs")]
    pub outputs: Option<PathBuf>,
    /// How to load and run.
    #[command(flatten)]
    pub runtime: RuntimeArgs,
}

/// What the model reads: at most one of these.
#[derive(Clone, Debug, Default, Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// Text to continue, after text piped to stdin if there is any; without any prompt, a chat in a terminal, else the text on
    /// stdin.
    #[arg(long, short = 'p', value_name = "TEXT")]
    pub prompt: Option<String>,
    /// File with the text to continue; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,
    /// Token ids to continue.
    #[arg(long, value_name = "1,2,3", value_delimiter = ',', value_parser = token_id, allow_negative_numbers = true)]
    pub tokens: Option<Vec<u32>>,
}

/// How tokens are chosen; what is not said is as the model's authors recommend, else greedy.
#[derive(Clone, Debug, Default, Args)]
pub struct SamplingArgs {
    /// Flatten (above 1) or sharpen (below 1) the choice; 0 always takes the best token.
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f64>,
    /// Choose among the N best tokens; 0 is all.
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Choose among the fewest best tokens whose probabilities reach P.
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub top_p: Option<f64>,
    /// Choose among tokens at least P times as likely as the best.
    #[arg(long, value_name = "P", value_parser = probability, allow_negative_numbers = true)]
    pub min_p: Option<f64>,
    /// Make tokens already in the text less likely; 1 changes nothing.
    #[arg(long, value_name = "R", value_parser = above_zero, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f64>,
    /// Where chance starts; the same seed gives the same text.
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// How to load and run.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Runtime")]
pub struct RuntimeArgs {
    /// The library and how much it may use.
    #[command(flatten)]
    pub library: LibraryArgs,
    /// Fail where a partition would run on another provider than the plan prefers.
    #[arg(long)]
    pub strict: bool,
    /// When weights are read that the plan does not keep in memory. `ahead` is fastest; the others are there to compare with.
    #[arg(long, value_enum, default_value_t = WeightReadsArg::Ahead, value_name = "WHEN")]
    pub weights: WeightReadsArg,
    /// Copy streamed weights to a GPU, and read those on disk, only when their partition is about to run: the same as
    /// --weights on-time, to compare with.
    #[arg(long, conflicts_with = "weights")]
    pub no_prefetch: bool,
    /// Wait for a CUDA device after each partition, not once a pass, and let a thread copy streamed weights: to compare with.
    #[arg(long)]
    pub wait_each_run: bool,
    /// Host memory that may be pinned for weights streamed to GPUs; the others are read and copied through a small part of it
    /// [default: as much as they need].
    #[arg(long, value_name = "SIZE")]
    pub pinned: Option<ByteSize>,
    /// Stream to the host where a GPU is not to be had, instead of running the partition's file for the host.
    #[arg(long, hide = true)]
    pub slots_on_host: bool,
    /// Overwrite slots with ones before each copy of weights, so that reading one too early shows.
    #[arg(long, hide = true)]
    pub poison_slots: bool,
    /// Compare every byte of the plan's files, and of `prepared/`, with the plan's hashes at this start. Without it that is done where the
    /// files are small (256 MiB in all), new here, or were written to since; otherwise samples are compared.
    #[arg(long)]
    pub verify_weights: bool,
    /// Providers to try for partitions on a GPU, best first, instead of the plan's list.
    #[arg(long, value_name = "LIST", value_delimiter = ',', value_enum)]
    pub providers: Vec<ProviderArg>,
    /// Tokens one text may grow to [default: what the plan was made for].
    #[arg(long, value_name = "N")]
    pub context: Option<u64>,
}

/// The library, and how much is said about it.
#[derive(Clone, Debug, Default, Args)]
pub struct LibraryArgs {
    /// The ONNX Runtime library to use (libonnxruntime.so, .dylib or .dll).
    #[arg(long, value_name = "PATH")]
    pub ort_lib: Option<PathBuf>,
    /// Threads for all partitions together [default: one for each physical core].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub threads: Option<u16>,
    /// Say more on stderr.
    #[arg(long, short = 'v', action = ArgAction::Count)]
    pub verbose: u8,
    /// Say only errors on stderr.
    #[arg(long, short = 'q', conflicts_with = "verbose")]
    pub quiet: bool,
}

/// `--weights`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum WeightReadsArg {
    /// While other partitions compute.
    #[default]
    Ahead,
    /// When their partition is about to run (no prefetch).
    OnTime,
    /// Page by page, mapped from their files, the system deciding what stays.
    Mapped,
}

/// An execution provider, as typed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ProviderArg {
    /// NVIDIA CUDA.
    Cuda,
    /// The WebGPU plugin.
    Webgpu,
    /// The processor.
    Cpu,
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
#[command(mut_arg("prompt", |prompt| prompt.help("Text both models read; without any prompt, tokens made up from --seed")))]
#[command(mut_arg("prompt_file", |file| file.help("File with the text both models read; `-` is stdin")))]
#[command(mut_arg("tokens", |tokens| tokens.help("Token ids both models read")))]
pub struct VerifyArgs {
    /// The plan: a plan.yaml, or the directory that holds one.
    pub plan: PathBuf,
    /// What both models read [default: a short sequence of tokens made up from --seed].
    #[command(flatten)]
    pub prompt: PromptArgs,
    /// Named input tensors, for models that generate no text [default: made up from --seed].
    #[arg(long, value_name = "IN.npz")]
    pub inputs: Option<PathBuf>,
    /// Tokens to generate and compare.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    pub steps: u64,
    /// Largest difference allowed, relative to the largest score [default: by element type and provider].
    #[arg(long, value_name = "X", value_parser = above_or_zero, allow_negative_numbers = true)]
    pub tolerance: Option<f64>,
    /// Where made-up inputs start.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
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

/// Arguments of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The plan: a plan.yaml, or the directory that holds one.
    pub plan: PathBuf,
    /// Tokens in the prompt.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u64).range(1..))]
    pub prompt_tokens: u64,
    /// Tokens to generate.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..))]
    pub new_tokens: u64,
    /// Measured runs, after one that is not measured; medians are printed.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub runs: u32,
    /// Measure the unsplit model through the same runtime instead.
    #[arg(long)]
    pub unsplit: bool,
    /// Write what happened when in the last run, in the Chrome trace format (open it in Perfetto).
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

fn token_id(text: &str) -> Result<u32, String> {
    text.trim().parse().map_err(|_| "token ids are whole numbers from 0 to 4294967295, such as 1,2,3".to_owned())
}

fn number(text: &str, fits: impl Fn(f64) -> bool, want: &str) -> Result<f64, String> {
    text.parse().ok().filter(|n: &f64| n.is_finite() && fits(*n)).ok_or_else(|| format!("it must be {want}"))
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |n| n == 0.0 || n >= 1e-6, "zero or a number from 0.000001 up")
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, |n| (0.0..=1.0).contains(&n), "a number from 0 to 1")
}

fn above_zero(text: &str) -> Result<f64, String> {
    number(text, |n| n > 0.0, "a number above 0")
}

fn above_or_zero(text: &str) -> Result<f64, String> {
    number(text, |n| n >= 0.0, "a number from 0 up")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn parse(line: &str) -> Result<Cli, String> {
        let words = line.split(' ').filter(|w| !w.is_empty());
        Cli::try_parse_from(["hpp-exec"].into_iter().chain(words)).map_err(|e| e.to_string())
    }

    #[test]
    fn the_definition_is_sound() {
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
    fn usage_errors_say_what_is_wanted() {
        for (line, says) in [
            ("", "<PLAN>"),
            ("p --prompt a --tokens 1", "cannot be used with"),
            ("p --tokens 1,x", "token ids are whole numbers"),
            ("p --tokens -1", "token ids"),
            ("p --temperature -1", "zero or a number"),
            ("p --temperature nan", "zero or a number"),
            ("p --top-p 1.5", "from 0 to 1"),
            ("p --repetition-penalty 0", "above 0"),
            ("p --outputs o.npz", "--inputs"),
            ("p --threads 0", "1.."),
            ("p --providers vulkan", "webgpu"),
            ("p -q -v", "cannot be used with"),
            ("verify", "<PLAN>"),
            ("verify p --steps 0", "1.."),
            ("devices --wait-each-run", "--wait-each-run"),
        ] {
            let error = parse(line).expect_err(line);
            assert!(error.contains(says), "{line}: {error}");
        }
    }

    #[test]
    fn help_of_a_prompt_says_what_comes_without_one() {
        let help = |line: &str| parse(line).unwrap_err();
        assert!(help("--help").contains("a chat in a terminal"), "{}", help("--help"));
        let verify = help("verify --help");
        assert!(verify.contains("tokens made up from --seed") && !verify.contains("terminal"), "{verify}");
        assert!(help("bench --help").contains("--wait-each-run"));
        assert!(!help("devices --help").contains("--wait-each-run"));
    }

    #[test]
    fn every_sampling_setting_is_read() {
        let s = parse("p --temperature 0 --top-k 5 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.1 --seed 7").unwrap();
        let s = s.run.sampling;
        assert_eq!((s.temperature, s.top_k, s.top_p, s.min_p), (Some(0.0), Some(5), Some(0.9), Some(0.1)));
        assert_eq!((s.repetition_penalty, s.seed), (Some(1.1), Some(7)));
    }
}
