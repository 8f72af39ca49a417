//! Decides what to measure from the command line, the model and the host, with a note for everything left out. Pure.

use crate::cli::Cli;
use crate::error::ProfileError;
use hpp_model::{Analysis, Scenario};
use hpp_schema::{Activations, Host, InputRole, ModelKind, Profile, ProfileSettings, Provider, provider_options};
use std::time::Duration;

/// Default token counts; those beyond the model's context are left out.
const USUAL_TOKENS: [u64; 6] = [16, 64, 128, 512, 1024, 2048];
/// Default token counts with `--quick`.
const QUICK_CONTEXTS: [u64; 2] = [128, 2048];
const QUICK_PREFILL: [u64; 4] = [32, 128, 512, 2048];
/// Short passes such as those that verify drafts. Added to the default token counts of models that generate.
const SHORT_PASSES: [u64; 5] = [2, 4, 8, 16, 32];
/// Longest context if the model does not declare one.
const USUAL_CONTEXT: u64 = 8192;
/// Most prompts with `--quick`.
const QUICK_PROMPTS: u64 = 8;

/// The resolved settings, with notes for the user.
#[derive(Clone, Debug, PartialEq)]
pub struct Settled {
    /// The settings as the profile records them.
    pub settings: ProfileSettings,
    /// What was left out and why.
    pub notes: Vec<String>,
}

/// Limits of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelLimits {
    /// Longest context, tokens.
    pub context: u64,
    /// Whether it decodes token by token.
    pub generates: bool,
    /// The fixed number of tokens of a pass, if it is fixed.
    pub pass: Option<u64>,
}

pub fn limits(analysis: &Analysis) -> ModelLimits {
    let context = analysis.config.context_length.unwrap_or(USUAL_CONTEXT).max(1);
    let load = Scenario {
        batch: 1,
        context,
        prompt: 1,
        new_tokens: 0,
        prefill_chunk: context,
        threads: 1,
        divides_prompts: false,
    };
    let tokens = analysis.inputs.iter().find(|i| matches!(i.role, InputRole::TokenIds | InputRole::Embeddings));
    let fixed = tokens.and_then(|input| match input.shape.len() {
        0 => None,
        1 => input.shape[0].as_fixed(),
        _ => input.shape[1].as_fixed(),
    });
    let pass = analysis.prefill_chunk(load).or(fixed).or(if tokens.is_none() { Some(1) } else { None });
    ModelLimits { context, generates: analysis.kind != ModelKind::SingleRun, pass }
}

/// Resolves the settings of a new profile.
pub fn settle(cli: &Cli, limits: ModelLimits, host: &Host, activations: Activations) -> Result<Settled, ProfileError> {
    let mut notes = Vec::new();
    if cli.int8_activations && activations.are_exported() {
        notes.push(
            "--int8-activations has no effect: no MatMulNBits or QMoE of the model computes with activations in floats that can be rounded"
                .to_owned(),
        );
    }
    let contexts = contexts(cli, limits, &mut notes)?;
    let prefill_tokens = prefill_tokens(cli, limits, &mut notes)?;
    let providers = if cli.providers.is_empty() { usable(host) } else { unique(cli.providers.iter().copied()) };
    let settings = ProfileSettings {
        providers,
        provider_options: provider_options(&cli.ep_option),
        contexts,
        prefill_tokens,
        quick: cli.quick,
        all_blocks: cli.all_blocks,
        activations,
        decode_tokens: cli.decode_tokens.unwrap_or(if cli.quick { 8 } else { 32 }),
    };
    Ok(Settled { settings, notes })
}

/// Resolves the settings of a resumed profile: keeps its settings and adds new token counts and providers. Returns every setting
/// that conflicts.
pub fn settle_again(
    cli: &Cli,
    limits: ModelLimits,
    before: &Profile,
    activations: Activations,
) -> Result<Result<Settled, Vec<String>>, ProfileError> {
    let mut settings = before.settings.clone();
    let mut notes = Vec::new();
    let mut differences = Vec::new();
    if cli.quick && !settings.quick {
        differences.push("it was begun without --quick".to_owned());
    }
    if cli.all_blocks && !settings.all_blocks {
        differences.push("it was begun without --all-blocks".to_owned());
    }
    if settings.activations != activations {
        let how = if settings.activations.are_exported() { "without" } else { "with" };
        differences.push(format!("it was begun {how} --int8-activations"));
    }
    if let Some(asked) = cli.decode_tokens.filter(|asked| *asked != settings.decode_tokens) {
        differences.push(format!("it was begun with --decode-tokens {}, not {asked}", settings.decode_tokens));
    }
    let options = provider_options(&cli.ep_option);
    for (provider, before) in &settings.provider_options {
        if options.get(provider).is_some_and(|options| options != before) {
            differences.push(format!("{} was measured with other options ({before:?})", provider.id()));
        }
    }
    settings.provider_options.extend(options);
    let asked = Cli { quick: settings.quick, ..cli.clone() };
    if !cli.contexts.is_empty() {
        settings.contexts = joined(&settings.contexts, contexts(&asked, limits, &mut notes)?);
    }
    if !cli.prefill_tokens.is_empty() {
        settings.prefill_tokens = joined(&settings.prefill_tokens, prefill_tokens(&asked, limits, &mut notes)?);
    }
    settings.providers = unique(settings.providers.into_iter().chain(cli.providers.iter().copied()));
    Ok(if differences.is_empty() { Ok(Settled { settings, notes }) } else { Err(differences) })
}

/// Time without a reply after which the child counts as hung.
pub fn reply_timeout(cli: &Cli) -> Result<Duration, ProfileError> {
    let seconds = cli.timeout.unwrap_or(if cli.quick { 120.0 } else { 300.0 });
    Duration::try_from_secs_f64(seconds).ok().filter(|timeout| !timeout.is_zero()).ok_or_else(|| {
        ProfileError::setting(format!("--timeout {seconds} is not a valid time"), "give a number of seconds above 0")
    })
}

/// Most prompts of the corpus.
pub fn most_prompts(cli: &Cli) -> Result<Option<u64>, ProfileError> {
    match cli.max_prompts {
        Some(0) => Err(ProfileError::setting("--max-prompts 0 runs nothing", "leave --prompts out to run no corpus")),
        None if cli.quick => Ok(Some(QUICK_PROMPTS)),
        most => Ok(most),
    }
}

fn contexts(cli: &Cli, limits: ModelLimits, notes: &mut Vec<String>) -> Result<Vec<u64>, ProfileError> {
    if !limits.generates {
        return match cli.contexts.is_empty() {
            true => Ok(vec![]),
            false => Err(ProfileError::setting(
                "--contexts is for decoding, and this model does not generate tokens",
                "leave --contexts out",
            )),
        };
    }
    let usual: &[u64] = if cli.quick { &QUICK_CONTEXTS } else { &USUAL_TOKENS };
    chosen("--contexts", &cli.contexts, usual, limits.context, notes)
}

fn prefill_tokens(cli: &Cli, limits: ModelLimits, notes: &mut Vec<String>) -> Result<Vec<u64>, ProfileError> {
    if let Some(only) = limits.pass {
        if cli.prefill_tokens.iter().any(|tokens| *tokens != only) {
            return Err(ProfileError::setting(
                format!("--prefill-tokens: a pass of this model always takes {only}"),
                "leave --prefill-tokens out",
            ));
        }
        return Ok(vec![only]);
    }
    let usual: &[u64] = if cli.quick { &QUICK_PREFILL } else { &USUAL_TOKENS };
    let passes = chosen("--prefill-tokens", &cli.prefill_tokens, usual, limits.context, notes)?;
    let short = SHORT_PASSES.into_iter().filter(|tokens| limits.generates && *tokens <= limits.context / 2);
    Ok(if cli.prefill_tokens.is_empty() { joined(&passes, short.collect()) } else { passes })
}

/// The requested token counts, or the default ones, within the context; sorted, without duplicates.
fn chosen(
    flag: &str,
    asked: &[u64],
    usual: &[u64],
    most: u64,
    notes: &mut Vec<String>,
) -> Result<Vec<u64>, ProfileError> {
    if asked.contains(&0) {
        return Err(ProfileError::setting(format!("{flag} 0: nothing happens in 0 tokens"), "give numbers from 1 up"));
    }
    if asked.is_empty() {
        let mut fitting: Vec<u64> = usual.iter().copied().filter(|tokens| *tokens <= most).collect();
        // At least two points, so that a curve can be fitted.
        if fitting.len() < 2 {
            fitting.extend([most.div_ceil(4), most]);
        }
        return Ok(joined(&fitting, vec![]));
    }
    let (fitting, longer): (Vec<u64>, Vec<u64>) = asked.iter().partition(|tokens| **tokens <= most);
    if fitting.is_empty() {
        return Err(ProfileError::setting(
            format!("{flag}: every requested count exceeds the {most} tokens of this model's context"),
            "ask for at most what the model's configuration allows",
        ));
    }
    notes.extend(
        longer.iter().map(|tokens| {
            format!("{flag} {tokens} was left out: it exceeds the {most} tokens of this model's context")
        }),
    );
    Ok(joined(&fitting, vec![]))
}

fn joined(before: &[u64], more: Vec<u64>) -> Vec<u64> {
    let all: std::collections::BTreeSet<u64> = before.iter().copied().chain(more).collect();
    all.into_iter().collect()
}

/// The CPU, and every provider with a device on this machine.
fn usable(host: &Host) -> Vec<Provider> {
    let devices = host.devices.iter().map(|device| device.provider);
    unique([Provider::CPU].into_iter().chain(devices))
}

/// Each provider once, in order of first occurrence.
pub fn unique(providers: impl IntoIterator<Item = Provider>) -> Vec<Provider> {
    let mut seen = Vec::new();
    for provider in providers {
        if !seen.contains(&provider) {
            seen.push(provider);
        }
    }
    seen
}

/// Why a provider cannot be measured on this machine; `None` if it can.
pub fn unusable(provider: Provider, host: &Host) -> Option<String> {
    let there = provider == Provider::CPU || host.devices.iter().any(|device| device.provider == provider);
    let name = provider.id();
    (!there).then(|| format!("there is no device for {name} here; `hpp-exec devices` says why"))
}

#[cfg(test)]
mod tests;
