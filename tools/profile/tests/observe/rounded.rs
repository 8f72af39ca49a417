//! Rounded variants of real exports, compared through the real runtime.

use crate::child::{Probe, tokens};
use crate::recorded::{analysis, recorded_prompt};
use hpp_model::Analysis;
use hpp_profile::sensitivity::{Rounded, VariantDir, Variants};
use hpp_schema::probe::{CompareProbe, Reply, Request};
use std::path::{Path, PathBuf};

fn variant(variants: &Variants, block: usize, bits: u32) -> VariantDir {
    match variants.round(block, bits).unwrap() {
        Rounded::Plan(variant) => variant,
        Rounded::Refused(why) => panic!("{why}"),
    }
}

fn refusal(variants: &Variants, block: usize) -> String {
    match variants.round(block, 4).unwrap() {
        Rounded::Plan(_) => panic!("block {block} was rounded"),
        Rounded::Refused(why) => why,
    }
}

fn compare(variants: &Variants, other: &Path, prompts: &[Vec<u32>], positions: u64) -> CompareProbe {
    let reference = variants.reference().to_owned();
    CompareProbe { reference, other: other.to_owned(), prompts: tokens(prompts), positions }
}

fn files(dir: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Every block: 8 bits move the scores less than 4, 16 hardly; the model itself not at all.
fn fewer_bits_move_scores_more(analysis: &Analysis, prompt: Vec<u32>) -> usize {
    let dir = tempfile::tempdir().unwrap();
    let variants = Variants::begin(analysis, dir.path()).unwrap();
    let before = files(dir.path());
    let prompts = [prompt, vec![3, 1, 4, 1, 5, 9, 2, 6]];
    let mut probe = Probe::start();
    let same = probe.compare(compare(&variants, variants.reference(), &prompts, 6));
    assert_eq!(same, (12, 0.0, 0.0), "the model as it is");
    for block in 0..variants.blocks().len() {
        let mut kl = |bits| {
            let variant = variant(&variants, block, bits);
            let (positions, kl, changed) = probe.compare(compare(&variants, variant.plan(), &prompts, 6));
            assert!(positions == 12 && (0.0..=1.0).contains(&changed));
            kl
        };
        let (four, eight) = (kl(4), kl(8));
        let label = variants.blocks()[block];
        assert!(four > eight && eight > 0.0, "{label}: {four} {eight}");
        if block == 1 {
            // Cut in three but hardly rounded.
            let sixteen = kl(16);
            assert!(sixteen < four / 1e4, "{label}: {four} {eight} {sixteen}");
        }
    }
    assert_eq!(files(dir.path()), before, "variants are removed");
    variants.blocks().len()
}

#[test]
fn external_weights() {
    let analysis = analysis("genai/llama3-fp32-cpu", 64);
    assert_eq!(fewer_bits_move_scores_more(&analysis, recorded_prompt("genai/llama3-fp32-cpu")), 6);
}

#[test]
fn embedded_weights() {
    let analysis = analysis("optimum/llama-with-past", 64);
    assert_eq!(fewer_bits_move_scores_more(&analysis, recorded_prompt("optimum/llama-with-past")), 6);
}

#[test]
fn a_model_without_a_cache() {
    let analysis = analysis("torch/gpt-dynamo", 64);
    assert_eq!(fewer_bits_move_scores_more(&analysis, recorded_prompt("torch/gpt-dynamo")), 6);
}

#[test]
fn divergence_is_what_numpy_says() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/observe/expected/llama3-fp32-cpu-rounded.json");
    let expected: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
    let prompt: Vec<u32> = expected["tokens"].as_array().unwrap().iter().map(|t| t.as_u64().unwrap() as u32).collect();
    let analysis = analysis("genai/llama3-fp32-cpu", 64);
    let dir = tempfile::tempdir().unwrap();
    let variants = Variants::begin(&analysis, dir.path()).unwrap();
    let block = variants.blocks().iter().position(|label| *label == expected["block"]).unwrap();
    let mut probe = Probe::start();
    for bits in [8u32, 4] {
        let variant = variant(&variants, block, bits);
        let positions = expected["positions"].as_u64().unwrap();
        let have = probe.compare(compare(&variants, variant.plan(), std::slice::from_ref(&prompt), positions));
        let want = &expected["bits"][bits.to_string()];
        let kl = want["kl"].as_f64().unwrap();
        assert_eq!((have.0, Some(have.2)), (positions, want["top1_changed"].as_f64()), "{bits} bits");
        assert!((have.1 - kl).abs() < 0.01 * kl, "{bits} bits: {} instead of {kl}", have.1);
    }
}

#[test]
fn quantized_blocks_are_refused() {
    let analysis = analysis("genai/llama3-int4-cpu", 64);
    let dir = tempfile::tempdir().unwrap();
    let variants = Variants::begin(&analysis, dir.path()).unwrap();
    let last = variants.blocks().len() - 1;
    for block in 1..=last {
        let why = refusal(&variants, block);
        assert!(why.contains("already") && why.contains("bits"), "{why}");
    }
    variant(&variants, 0, 4);
    let moe = super::recorded::analysis("genai/gpt-oss-int4-cpu", 64);
    let dir = tempfile::tempdir().unwrap();
    assert_eq!(refusal(&Variants::begin(&moe, dir.path()).unwrap(), 1), "already 4 bits");
}

#[test]
fn prompts_that_do_not_fit_are_left_out_each_time() {
    let analysis = analysis("optimum/llama-with-past", 16);
    let dir = tempfile::tempdir().unwrap();
    let variants = Variants::begin(&analysis, dir.path()).unwrap();
    let variant = variant(&variants, 1, 4);
    let mut probe = Probe::start();
    let prompts = [vec![1; 17], vec![1, 2, 3]];
    for _ in 0..2 {
        let replies = probe.ask(&Request::Compare(compare(&variants, variant.plan(), &prompts, 8)));
        assert!(
            matches!(&replies[0], Reply::PromptFailed { line: 1, reason } if reason.contains("17 tokens")),
            "{replies:?}"
        );
        assert!(matches!(replies[1], Reply::Progress { line: 2, .. }), "{replies:?}");
        assert!(matches!(replies[2], Reply::Compared { positions: 3, .. }), "{replies:?}");
    }
    let replies = probe.ask(&Request::Compare(compare(&variants, variant.plan(), &prompts[..1], 8)));
    assert!(matches!(replies.last(), Some(Reply::Failed { reason }) if reason.contains("no prompt")), "{replies:?}");
}
