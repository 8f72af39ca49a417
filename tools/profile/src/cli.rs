//! The command line as clap parses it. The module `settings` turns it into what to measure.

use clap::{ArgAction, Args, Parser, Subcommand};
use hpp_schema::{Provider, ProviderLibraryArg, ProviderOptionArg};
use std::path::PathBuf;

/// Parses a number of tokens.
fn tokens(text: &str) -> Result<u64, String> {
    hpp_cli::tokens(text).ok_or_else(|| "give a number of tokens, such as 512 or 2k (k is 1024)".to_owned())
}

/// Measure an ONNX model on this machine: the time of each part under each execution provider, the bandwidth of memory, links
/// and disk, and statistics of a prompt corpus. Writes a profile for hpp-split --profile.
#[derive(Clone, Debug, Parser)]
#[command(name = "hpp-profile", version, args_conflicts_with_subcommands = true, arg_required_else_help = true)]
#[command(after_help = "Exit codes: 0 done, 1 failed (the message says why and what to do), 2 invalid command \
                        line, 130 interrupted.")]
pub struct Cli {
    /// A subcommand that runs instead of measuring.
    #[command(subcommand)]
    pub command: Option<Command>,

    /// An ONNX file, or the directory that an exporter wrote.
    #[arg(required = true)]
    pub model: Option<PathBuf>,

    /// Prompts to run: a .jsonl file of {"prompt": ..}, {"text": ..}, {"messages": [..]} or {"tokens": [..]} lines, with `chat` and
    /// `system` as `hpp-exec jobs` reads them, or a .txt file with one prompt per line. Without it only block times and the machine
    /// are measured.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Execution providers to measure [default: cpu, and every provider with a device on this machine].
    #[arg(long, value_name = "cpu,cuda,openvino,..", value_delimiter = ',')]
    pub providers: Vec<Provider>,
    /// The library of a plug-in provider, by the name that --providers uses. Repeatable; for hpp-exec, which measures.
    #[arg(long, value_name = "NAME=PATH")]
    pub ep_lib: Vec<ProviderLibraryArg>,
    /// An option of a provider, as the provider documents it. Repeatable; for hpp-exec, and recorded in the profile.
    #[arg(long, value_name = "NAME.KEY=VALUE")]
    pub ep_option: Vec<ProviderOptionArg>,
    /// The profile to write.
    #[arg(short, long, value_name = "FILE", default_value = "profile.yaml")]
    pub out: PathBuf,
    /// Tokens to generate after each prompt [default: 32; 8 with --quick].
    #[arg(long, value_name = "N")]
    pub decode_tokens: Option<u64>,
    /// Run at most this many prompts [default: all; 8 with --quick].
    #[arg(long, value_name = "N")]
    pub max_prompts: Option<u64>,
    /// Context lengths at which decoding is measured [default: 16 to 2048 tokens, up to the model's context].
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', value_parser = tokens)]
    pub contexts: Vec<u64>,
    /// Prompt lengths at which prefill is measured [default: 16 to 2048 tokens, up to the model's context].
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', value_parser = tokens)]
    pub prefill_tokens: Vec<u64>,
    /// Fewer runs of fewer cases: takes half a minute to a few minutes.
    #[arg(long)]
    pub quick: bool,
    /// Measure every block instead of one block of each class of equal blocks.
    #[arg(long)]
    pub all_blocks: bool,
    /// Measure for plans with `hpp-split --int8-activations`: round the activations that 4- and 8-bit weights multiply to 8 bits.
    #[arg(long)]
    pub int8_activations: bool,
    /// Also measure the entropy of each layer's attention (needs --prompts, and a model with attention scores in its graph).
    #[arg(long, requires = "prompts")]
    pub attention_entropy: bool,
    /// Also measure how much the logits change when the weights of one block are rounded to 8 and 4 bits, for each block.
    #[arg(long, requires = "prompts")]
    pub sensitivity: bool,
    /// Skip invalid lines of the corpus instead of refusing it.
    #[arg(long, requires = "prompts")]
    pub skip_bad: bool,

    /// Continue the existing profile: keep its measurements and add what is missing.
    #[arg(long, conflicts_with = "force")]
    pub resume: bool,
    /// With --resume, retry failed measurements.
    #[arg(long, requires = "resume")]
    pub retry_failures: bool,
    /// With --resume, continue a profile that was measured on another machine.
    #[arg(long, requires = "resume")]
    pub allow_other_machine: bool,
    /// Replace the existing profile.
    #[arg(long)]
    pub force: bool,

    /// Write an HTML report: one file that needs no network.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print the profile as JSON on stdout instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Print only errors on stderr.
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Log steps and decisions on stderr; -vv adds details, -vvv everything. HPP_LOG overrides it: a level, or levels by module,
    /// such as HPP_LOG=info,hpp_model=debug. HPP_LOG also applies to hpp-exec, whose log appears at level debug.
    #[arg(short, long, action = ArgAction::Count)]
    pub verbose: u8,

    /// Threads to compute with [default: one per core].
    #[arg(long, value_name = "N")]
    pub threads: Option<u32>,
    /// The ONNX Runtime library to use.
    #[arg(long, value_name = "PATH")]
    pub ort_lib: Option<PathBuf>,
    /// Seconds without a reply after which a measurement counts as hung [default: 300; 120 with --quick].
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<f64>,
}

/// Subcommands; without one, `hpp-profile` measures.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Merge profiles of one model whose corpora are the parts of one corpus, in order, as several machines have run them. Times and
    /// rates are those of the first, or of --times.
    Merge(MergeArgs),
}

/// Options of `hpp-profile merge`.
#[derive(Clone, Debug, Args)]
pub struct MergeArgs {
    /// The profiles, in the order of their parts of the corpus.
    #[arg(required = true, value_name = "PROFILE")]
    pub parts: Vec<PathBuf>,
    /// The whole corpus.
    #[arg(long, value_name = "FILE")]
    pub prompts: PathBuf,
    /// Which of the profiles to take times and rates from (default: the first).
    #[arg(long, value_name = "PROFILE")]
    pub times: Option<PathBuf>,
    /// The profile to write.
    #[arg(short, long, value_name = "FILE", default_value = "profile.yaml")]
    pub out: PathBuf,
    /// Leave out invalid lines of the corpus, as the parts have.
    #[arg(long)]
    pub skip_bad: bool,
    /// Replace the existing profile.
    #[arg(long)]
    pub force: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_parses() {
        Cli::command().debug_assert();
        let cli = Cli::parse_from([
            "hpp-profile",
            "m",
            "--providers",
            "cpu,webgpu,npu",
            "--contexts",
            "128,2048",
            "--quick",
            "-q",
        ]);
        assert_eq!(cli.providers, [Provider::CPU, Provider::WEBGPU, "npu".parse().unwrap()]);
        assert_eq!((cli.contexts, cli.quick, cli.quiet), (vec![128, 2048], true, true));
        for wrong in [
            &["--providers", "T P U"][..],
            &["--ep-lib", "npu"],
            &["--ep-option", "npu"],
            &["--skip-bad"],
            &["--resume", "--force"],
            &["--retry-failures"],
            &["-q", "-v"],
            &["merge"],
        ] {
            let arguments = ["hpp-profile", "m"].iter().chain(wrong);
            assert!(Cli::try_parse_from(arguments).is_err(), "{wrong:?}");
        }
        assert!(Cli::try_parse_from(["hpp-profile", "--quick"]).is_err(), "no model");
        let merge = Cli::try_parse_from(["hpp-profile", "merge", "a.yaml", "b.yaml", "--prompts", "c.txt"]).unwrap();
        assert!(matches!(merge.command, Some(Command::Merge(args)) if args.parts.len() == 2));
    }
}
