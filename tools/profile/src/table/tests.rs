//! The table that the user reads at the end.

use super::*;
use crate::derive::derive;
use crate::doubt::doubts;
use crate::sample;
use hpp_schema::{BandwidthCurve, BandwidthPoint, Provider, Statistics};

#[test]
fn costs_machine_and_corpus_are_said() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU, Provider::WEBGPU]));
    sample::time_all(&mut profile, Provider::CPU, 2.0);
    derive(&mut profile);
    profile.classes[0].providers[1].failure = Some("it crashed with signal 11".into());
    profile.classes[1].providers[0].decode.points[0].ms = None;
    profile.machine.curves = vec![BandwidthCurve {
        path: BandwidthPath::Link { provider: Provider::WEBGPU, to_device: true, pinned: false },
        points: vec![BandwidthPoint { bytes: 1 << 20, gb_per_s: 3.25 }],
    }];
    let statistics = Statistics { prompts: 2, prompt_tokens: 19, generated_tokens: 16, ..Statistics::default() };
    profile.corpus = Some(CorpusStatistics {
        hash: String::new(),
        prompts_hash: None,
        prompts_done: 3,
        prompts_in_all: Some(3),
        skipped: vec![],
        skipped_in_all: 1,
        statistics,
    });
    let text = summary(&profile);
    for words in [
        "decode at 200",
        "prefill 10",
        "2.40 ms",
        "failed: it crashed with signal 11",
        "0.100 ms",
        "host to webgpu device, pageable: 3.25 GB/s in pieces of 1 MiB",
        "corpus: 2 prompts with 19 tokens, 16 tokens generated; lines left out: 1",
        "hotness of the layers: flat",
    ] {
        assert!(text.contains(words), "{words:?} is not in\n{text}");
    }
    let layer = text.lines().find(|line| line.contains("layers.1 ")).unwrap();
    assert!(layer.contains(" 2 "), "it stands for two: {layer}");
}

#[test]
fn times_that_contradict_each_other_are_doubted() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    sample::time_all(&mut profile, Provider::CPU, 2.0);
    derive(&mut profile);
    assert!(!doubts(&profile).concat().contains("contradict"), "{:?}", doubts(&profile));
    let fit = profile.classes[1].providers[0].decode.fit.as_mut().unwrap();
    fit.worst_relative_error = 0.43;
    let block = profile.classes[1].block.clone();
    let text = doubts(&profile).concat();
    assert!(text.contains(&format!("the times of {block} on cpu vary")), "{text}");
    // A block whose time is within the launch cost cannot be timed.
    profile.classes[1].providers[0].decode.points.iter_mut().for_each(|point| point.ms = Some(0.001));
    assert!(!doubts(&profile).concat().contains("contradict"));
}

#[test]
fn a_block_that_takes_less_than_a_launch_has_no_time_and_no_fit_error() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    sample::time_all(&mut profile, Provider::CPU, 2.0);
    derive(&mut profile);
    for phase in PHASES {
        let costs = crate::derive::phase_costs_mut(&mut profile.classes[0].providers[0], phase);
        costs.points.iter_mut().for_each(|point| point.ms = Some(0.0));
        costs.fit.as_mut().unwrap().worst_relative_error = 0.999;
    }
    let text = summary(&profile);
    let row = text.lines().find(|line| line.contains(&profile.classes[0].block)).unwrap();
    assert!(row.contains("< launch") && !row.contains("99.9 %") && row.trim_end().ends_with('-'), "{row}");
}

#[test]
fn times_that_vary_from_run_to_run_are_doubted() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    sample::time_all(&mut profile, Provider::CPU, 2.0);
    derive(&mut profile);
    let single = profile.classes[1].providers[0].decode.points[0].single.as_mut().unwrap();
    single.p90_ms = 64.0 * single.median_ms;
    assert!(doubts(&profile).concat().contains("vary from run to run"), "{:?}", doubts(&profile));
}

/// A percentage of the median that is larger than 100 helps nobody.
#[test]
fn layers_that_differ_much_have_no_percentage() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    sample::time_all(&mut profile, Provider::CPU, 2.0);
    derive(&mut profile);
    let slow = profile.classes.iter().position(|entry| entry.block == "layers.0").unwrap();
    let costs = &mut profile.classes[slow].providers[0].decode;
    costs.fit.as_mut().unwrap().constant_ms = 20.0;
    let text = summary(&profile);
    assert!(text.contains("hotness of the layers: not flat\n  layers differ: "), "{text}");
    let single = profile.classes[slow].providers[0].decode.points[0].single.as_mut().unwrap();
    single.p90_ms = 64.0 * single.median_ms;
    let text = summary(&profile);
    let verdict = text.lines().find(|line| line.starts_with("hotness")).unwrap();
    assert!(verdict.contains("cannot be told: layers seem to differ") && !verdict.contains('%'), "{verdict}");
    assert!(verdict.ends_with("--quick vary as much: profile without it, on an idle machine"), "{verdict}");
    let doubts = doubts(&profile);
    assert!(doubts.iter().any(|doubt| doubt.contains("--quick makes few runs")), "{doubts:?}");
}

#[test]
fn a_busy_machine_is_named_with_its_share() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    profile.others_cpu_share = Some(0.05);
    assert!(!doubts(&profile).concat().contains("other programs"));
    profile.others_cpu_share = Some(0.37);
    assert!(doubts(&profile).concat().contains("other programs took 37 % of the CPU time"), "{:?}", doubts(&profile));
}

#[test]
fn a_bandwidth_is_the_one_that_planning_uses() {
    let analysis = sample::analysis("genai/llama3-fp32-cpu");
    let mut profile = sample::profile(&analysis, sample::settings(&[Provider::CPU]));
    let points =
        vec![BandwidthPoint { bytes: 1 << 20, gb_per_s: 1.75 }, BandwidthPoint { bytes: 1 << 24, gb_per_s: 1.5 }];
    let curve = |path| hpp_schema::BandwidthCurve { path, points: points.clone() };
    profile.machine.curves = vec![curve(BandwidthPath::RamRead), curve(BandwidthPath::DiskRead)];
    let text = summary(&profile);
    // Weights stream through memory in one piece; a disk may be read in pieces of any size.
    assert!(text.contains("memory read with 2 threads: 1.50 GB/s in pieces of 16 MiB"), "{text}");
    assert!(text.contains("disk read past the page cache: 1.75 GB/s in pieces of 1 MiB"), "{text}");
}

#[test]
fn three_digits_count() {
    assert_eq!([0.02345, 0.9996, 1.234, 9.96, 99.7].map(ms), ["0.023 ms", "1.00 ms", "1.23 ms", "10.0 ms", "100 ms"]);
}
