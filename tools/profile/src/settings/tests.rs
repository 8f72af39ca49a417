//! What is measured with explicit settings, and without.

use super::*;
use crate::sample;
use clap::Parser;

const DECODER: ModelLimits = ModelLimits { context: 4096, generates: true, pass: None };

fn cli(arguments: &str) -> Cli {
    Cli::parse_from(["hpp-profile", "m"].into_iter().chain(arguments.split_whitespace()))
}

fn settled(arguments: &str, limits: ModelLimits) -> Settled {
    settle(&cli(arguments), limits, &sample::host(), Activations::Exported).unwrap()
}

fn refusal(arguments: &str, limits: ModelLimits) -> String {
    settle(&cli(arguments), limits, &sample::host(), Activations::Exported).unwrap_err().to_string()
}

#[test]
fn the_usual_counts_end_where_the_context_does() {
    let usual = settled("", DECODER).settings;
    assert_eq!(usual.contexts, USUAL_TOKENS);
    assert_eq!(usual.prefill_tokens, joined(&USUAL_TOKENS, SHORT_PASSES.to_vec()));
    assert_eq!((usual.providers, usual.decode_tokens), (vec![Provider::CPU, Provider::WEBGPU], 32));
    let quick = settled("--quick", DECODER).settings;
    assert_eq!((quick.contexts, quick.decode_tokens), (QUICK_CONTEXTS.to_vec(), 8));
    let short = settled("--quick", ModelLimits { context: 100, ..DECODER });
    assert_eq!(
        (short.settings.contexts, short.settings.prefill_tokens),
        (vec![25, 100], vec![2, 4, 8, 16, 25, 32, 100])
    );
    assert!(short.notes.is_empty(), "nobody asked for more");
    assert_eq!(settled("", ModelLimits { context: 1, ..DECODER }).settings.contexts, [1]);
}

#[test]
fn what_is_asked_for_is_measured_and_what_cannot_be_is_said() {
    let asked = settled("--contexts 2048,128,128 --prefill-tokens 7 --providers webgpu,cpu,webgpu", DECODER);
    assert_eq!((asked.settings.contexts, asked.settings.prefill_tokens), (vec![128, 2048], vec![7]));
    assert_eq!(asked.settings.providers, [Provider::WEBGPU, Provider::CPU]);
    let longer = settled("--contexts 128,8192", DECODER);
    assert_eq!(longer.settings.contexts, [128]);
    assert!(longer.notes[0].contains("8192 was left out") && longer.notes[0].contains("4096"), "{:?}", longer.notes);
    assert!(refusal("--contexts 8192", DECODER).contains("4096"));
    assert!(refusal("--contexts 0", DECODER).contains("0 tokens"));
    assert!(refusal("--prefill-tokens 5,0", DECODER).contains("0 tokens"));
}

#[test]
fn models_that_do_not_decode_have_no_contexts() {
    let encoder = ModelLimits { context: 512, generates: false, pass: None };
    assert_eq!(settled("", encoder).settings.contexts, [] as [u64; 0]);
    assert!(refusal("--contexts 128", encoder).contains("does not generate"));
    let one = ModelLimits { pass: Some(1), ..DECODER };
    assert_eq!(settled("", one).settings.prefill_tokens, [1]);
    assert!(refusal("--prefill-tokens 64", one).contains("always takes 1"));
}

#[test]
fn models_say_what_they_allow() {
    let limits_of = |name: &str| limits(&sample::analysis(name));
    assert!(limits_of("genai/llama3-fp32-cpu").generates && limits_of("genai/llama3-fp32-cpu").pass.is_none());
    assert!(!limits_of("optimum/bert").generates);
    assert_eq!(limits_of("optimum/bert").pass, None, "its sequence has any length");
}

#[test]
fn a_profile_that_is_continued_keeps_its_settings() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let before = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    let again = |arguments: &str| settle_again(&cli(arguments), DECODER, &before, Activations::Exported).unwrap();
    assert_eq!(again("--quick").unwrap().settings, before.settings);
    assert_eq!(again("").unwrap().settings, before.settings);
    let more = again("--contexts 300 --prefill-tokens 20 --providers webgpu").unwrap().settings;
    assert_eq!((more.contexts, more.prefill_tokens), (vec![100, 200, 300], vec![10, 20]));
    assert_eq!(more.providers, [Provider::CPU, Provider::WEBGPU]);
    let mut slow = before.clone();
    slow.settings.quick = false;
    let differences = settle_again(&cli("--quick --all-blocks --decode-tokens 9"), DECODER, &slow, Activations::Int8)
        .unwrap()
        .unwrap_err();
    assert_eq!(differences.len(), 4, "{differences:?}");
    assert!(differences[2].contains("without --int8-activations"), "{differences:?}");
}

#[test]
fn times_and_counts_that_make_no_sense_are_refused() {
    for text in ["--timeout 0", "--timeout=-1", "--timeout nan", "--timeout inf"] {
        assert!(reply_timeout(&cli(text)).is_err(), "{text}");
    }
    assert_eq!(reply_timeout(&cli("--timeout 0.5")).unwrap(), Duration::from_millis(500));
    assert!(most_prompts(&cli("--max-prompts 0")).is_err());
    assert_eq!(most_prompts(&cli("--quick")).unwrap(), Some(QUICK_PROMPTS));
    assert_eq!(most_prompts(&cli("")).unwrap(), None);
}

#[test]
fn providers_without_a_device_are_named() {
    assert_eq!(unusable(Provider::CPU, &sample::host()), None);
    assert_eq!(unusable(Provider::WEBGPU, &sample::host()), None);
    assert!(unusable(Provider::CUDA, &sample::host()).unwrap().contains("cuda"));
}
