//! The command line, as clap sees it. Nothing here decides anything: `settings` turns it into what to measure.

use clap::Parser;
use hpp_schema::Provider;
use std::path::PathBuf;

/// Measure an ONNX model on this machine: what each part of it costs under each provider, what the machine's memory and
/// links give, and what a corpus of prompts shows. Writes a profile that hpp-split --profile plans with.
#[derive(Clone, Debug, Parser)]
#[command(name = "hpp-profile", version, arg_required_else_help = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 failed and the message says why and what to do, 2 the command line was not \
                        understood, 130 interrupted."
)]
pub struct Cli {
    /// An ONNX file, or the directory an exporter left.
    pub model: PathBuf,

    /// Prompts to run: a .jsonl file of {"prompt": ..}, {"text": ..} or {"messages": [..]} lines, or a .txt file with a prompt
    /// a line. Without it only costs and the machine are measured.
    #[arg(long, value_name = "FILE")]
    pub prompts: Option<PathBuf>,
    /// Execution providers to measure [default: cpu, and each that has a device here].
    #[arg(long, value_name = "cpu,webgpu,cuda", value_delimiter = ',', value_parser = provider)]
    pub providers: Vec<Provider>,
    /// The profile to write.
    #[arg(long, value_name = "FILE", default_value = "profile.yaml")]
    pub out: PathBuf,
    /// Tokens to generate after each prompt [default: 32; 8 with --quick].
    #[arg(long, value_name = "N")]
    pub decode_tokens: Option<u64>,
    /// Run at most this many prompts [default: all; 8 with --quick].
    #[arg(long, value_name = "N")]
    pub max_prompts: Option<u64>,
    /// Context lengths at which decoding is measured [default: 16 to 2048 tokens, as the model allows].
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',')]
    pub contexts: Vec<u64>,
    /// Token counts at which prefill is measured [default: 16 to 2048 tokens, as the model allows].
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',')]
    pub prefill_tokens: Vec<u64>,
    /// Fewer runs of fewer cases: minutes for a small model.
    #[arg(long)]
    pub quick: bool,
    /// Measure every block instead of one of each class of equal blocks.
    #[arg(long)]
    pub all_blocks: bool,
    /// Also measure how spread each layer's attention is (needs --prompts, and a model that shows its attention).
    #[arg(long, requires = "prompts")]
    pub attention_entropy: bool,
    /// Also measure how much the scores change when one block's weights are rounded to 8 and 4 bits, block by block.
    #[arg(long, requires = "prompts")]
    pub sensitivity: bool,
    /// Leave out lines of the corpus that cannot be read, instead of refusing it.
    #[arg(long, requires = "prompts")]
    pub skip_bad: bool,

    /// Continue the profile that is there: what is measured is not measured again.
    #[arg(long, conflicts_with = "force")]
    pub resume: bool,
    /// With --resume, try again what failed.
    #[arg(long, requires = "resume")]
    pub retry_failures: bool,
    /// With --resume, continue a profile from another machine.
    #[arg(long, requires = "resume")]
    pub allow_other_machine: bool,
    /// Replace the profile that is there.
    #[arg(long)]
    pub force: bool,

    /// Write a page for people: one HTML file that needs no network.
    #[arg(long, value_name = "FILE")]
    pub report: Option<PathBuf>,
    /// Print the profile as JSON on stdout instead of a table.
    #[arg(long)]
    pub json: bool,
    /// Say nothing but errors on stderr.
    #[arg(short, long)]
    pub quiet: bool,

    /// Threads to compute with [default: one for each core].
    #[arg(long, value_name = "N")]
    pub threads: Option<u32>,
    /// The ONNX Runtime library to use.
    #[arg(long, value_name = "PATH")]
    pub ort_lib: Option<PathBuf>,
    /// Longest a measurement may stay silent before it counts as hung, in seconds [default: 300; 120 with --quick].
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<f64>,
}

fn provider(text: &str) -> Result<Provider, String> {
    match text.trim().to_ascii_lowercase().as_str() {
        "cpu" => Ok(Provider::Cpu),
        "webgpu" => Ok(Provider::Webgpu),
        "cuda" => Ok(Provider::Cuda),
        _ => Err("providers are cpu, webgpu and cuda".to_owned()),
    }
}

/// A provider as people write it.
pub fn provider_name(provider: Provider) -> &'static str {
    match provider {
        Provider::Cpu => "cpu",
        Provider::Webgpu => "webgpu",
        Provider::Cuda => "cuda",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_holds_together() {
        Cli::command().debug_assert();
        let cli = Cli::parse_from([
            "hpp-profile",
            "m",
            "--providers",
            "cpu,WebGPU",
            "--contexts",
            "128,2048",
            "--quick",
            "-q",
        ]);
        assert_eq!(cli.providers, [Provider::Cpu, Provider::Webgpu]);
        assert_eq!((cli.contexts, cli.quick, cli.quiet), (vec![128, 2048], true, true));
        for wrong in [&["--providers", "tpu"][..], &["--skip-bad"], &["--resume", "--force"], &["--retry-failures"]] {
            let arguments = ["hpp-profile", "m"].iter().chain(wrong);
            assert!(Cli::try_parse_from(arguments).is_err(), "{wrong:?}");
        }
    }
}
