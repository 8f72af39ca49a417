//! Profiles for tests.

use crate::begin::{begin, profiled_model};
use crate::missing::point_mut;
use crate::settings::Settled;
use crate::targets::{BlockFacts, BlockTarget, RunBytes, facts, targets};
use hpp_model::{Analysis, LogitsMode, analyse};
use hpp_partition::Phase;
use hpp_schema::{ByteSize, Host, HostDevice, Profile, ProfileSettings, Provider, TimingStats};
use std::path::{Path, PathBuf};

/// A model of this repository.
pub fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
}

/// The analysis of a model of this repository.
pub fn analysis(name: &str) -> Analysis {
    analyse(&fixture(name), None, LogitsMode::Requested).unwrap()
}

/// A host with a WebGPU device.
pub fn host() -> Host {
    let device = |provider, memory| HostDevice { provider, name: "some".into(), memory };
    Host {
        cpu: "some".into(),
        cores: 2,
        memory: ByteSize(8 << 30),
        system: "linux x86_64".into(),
        threads: 2,
        onnxruntime: "1.31.1".into(),
        hpp: "0.1.0".into(),
        devices: vec![device(Provider::CPU, Some(ByteSize(8 << 30))), device(Provider::WEBGPU, None)],
    }
}

/// Decoding at 100 and 200 tokens, prefill of 10.
pub fn settings(providers: &[Provider]) -> ProfileSettings {
    ProfileSettings {
        provider_options: Default::default(),
        providers: providers.to_vec(),
        contexts: vec![100, 200],
        prefill_tokens: vec![10],
        quick: true,
        all_blocks: false,
        activations: Default::default(),
        decode_tokens: 4,
    }
}

/// A profile of this model with nothing measured.
pub fn profile(analysis: &Analysis, settings: ProfileSettings) -> Profile {
    let blocks: Vec<BlockFacts> = facts(&analysis.segmentation, |_| 1 << 20);
    let targets: Vec<BlockTarget> = targets(&blocks, settings.all_blocks, RunBytes { most: u64::MAX, enough: 0 });
    let bytes = (blocks.len() as u64) << 20;
    let model = profiled_model(analysis, &blocks, "0".repeat(64), bytes);
    begin(model, host(), "2026-01-31T12:00:00Z".into(), Settled { settings, notes: vec![] }, &targets)
}

/// A timing without spread.
pub fn timing(median_ms: f64) -> TimingStats {
    TimingStats { runs: 9, median_ms, p10_ms: median_ms, p90_ms: median_ms }
}

/// Times a case: the block alone, and the run where there is one.
pub fn time(profile: &mut Profile, block: &str, provider: Provider, case: (Phase, u64), ms: (f64, Option<f64>)) {
    let entry = profile.classes.iter_mut().find(|entry| entry.block == block).unwrap();
    let costs = entry.providers.iter_mut().find(|costs| costs.provider == provider).unwrap();
    let point = point_mut(costs, case.0, case.1);
    point.single = Some(timing(ms.0));
    point.run = ms.1.map(timing);
}

/// Times everything under a provider: a launch of 0.1 ms, layers of `layer_ms`, other blocks of half as much.
pub fn time_all(profile: &mut Profile, provider: Provider, layer_ms: f64) {
    const LAUNCH: f64 = 0.1;
    let (contexts, passes) = (profile.settings.contexts.clone(), profile.settings.prefill_tokens.clone());
    let cases: Vec<(Phase, u64)> =
        contexts.iter().map(|t| (Phase::Decode, *t)).chain(passes.iter().map(|t| (Phase::Prefill, *t))).collect();
    for entry in profile.classes.clone() {
        let costs = entry.providers.iter().find(|costs| costs.provider == provider).unwrap();
        let is_layer = entry.block.starts_with("layers.");
        for case in &cases {
            let grow = if case.0 == Phase::Decode { 1.0 + case.1 as f64 / 1000.0 } else { case.1 as f64 };
            let block = grow * if is_layer { layer_ms } else { layer_ms / 2.0 };
            let length = f64::from(costs.run_length);
            let run = (costs.run_length > 1).then_some(LAUNCH + length * block);
            time(profile, &entry.block, provider, *case, (LAUNCH + block, run));
        }
    }
}
