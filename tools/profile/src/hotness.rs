//! Hotness of a block: milliseconds that a device saves per byte of device memory. Also decides whether layers differ in hotness.

use crate::derive::{costs_of, median, phase_costs};
use crate::estimate::{RooflineEstimator, blocks_at};
use hpp_model::unreliable_blocks;
use hpp_partition::Phase;
use hpp_schema::{BlockHotness, ByteSize, HotnessTerms, Profile, Provider};

/// Layers are equally hot if their spread is at most this part of the median.
const FLAT: f64 = 0.15;

/// The hotness, `(cpu_ms - gpu_ms) / (weight_bytes + kv_bytes)`, and its terms for each block on each measured device: decoding at the longest
/// context, and prefill of the most tokens. Skips blocks without times in both phases on both devices.
pub fn hotness(profile: &Profile, roofline: &RooflineEstimator) -> Vec<BlockHotness> {
    let longest = |tokens: &[u64]| tokens.iter().max().copied();
    let (context, pass) = (longest(&profile.settings.contexts), longest(&profile.settings.prefill_tokens));
    let Some((context, pass)) = context.zip(pass) else { return vec![] };
    let devices = profile.settings.providers.iter().filter(|provider| !provider.uses_host_memory());
    let blocks = blocks_at(roofline.analysis(), context);
    let mut found = Vec::new();
    for provider in devices {
        for (block, facts) in profile.model.blocks.iter().zip(&blocks) {
            let ms = |of: Provider, phase: Phase, tokens: u64| {
                Some(phase_costs(costs_of(profile, block, of)?, phase).fit?.ms(tokens))
            };
            let terms = |phase, tokens| {
                let (cpu_ms, gpu_ms) = (ms(Provider::CPU, phase, tokens)?, ms(*provider, phase, tokens)?);
                let (weight_bytes, kv_bytes) = (facts.weights.iter().map(|(_, bytes)| bytes).sum(), facts.kv_bytes);
                Some(terms(cpu_ms, gpu_ms, weight_bytes, kv_bytes))
            };
            let Some((decode, prefill)) = terms(Phase::Decode, context).zip(terms(Phase::Prefill, pass)) else {
                continue;
            };
            found.push(BlockHotness { block: block.label.clone(), provider: *provider, decode, prefill });
        }
    }
    found
}

fn terms(cpu_ms: f64, gpu_ms: f64, weight_bytes: u64, kv_bytes: u64) -> HotnessTerms {
    let gib = weight_bytes.saturating_add(kv_bytes).max(1) as f64 / (1u64 << 30) as f64;
    HotnessTerms { cpu_ms, gpu_ms, weight_bytes, kv_bytes, ms_per_gib: (cpu_ms - gpu_ms) / gib }
}

/// Whether all layers are equally hot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evenness {
    Flat,
    Uneven,
    /// Layers differ, but the measurements are unreliable or other programs used the machine.
    Unknown,
}

/// Whether layers differ in hotness, and what decides a placement.
#[derive(Clone, Debug, PartialEq)]
pub struct HotnessVerdict {
    /// The device's provider. `None` if no device was measured; then layers are compared by host time per byte.
    pub provider: Option<Provider>,
    pub evenness: Evenness,
    /// Difference of the hottest and the coldest layer, as a part of the median.
    pub spread: f64,
    pub lines: Vec<String>,
}

/// The verdict on a model's layers when decoding; `None` until at least two layers are measured.
pub fn verdict(profile: &Profile) -> Option<HotnessVerdict> {
    let provider = profile.hotness.first().map(|entry| entry.provider);
    let layers: Vec<f64> = match provider {
        Some(of) => {
            let entries = profile.hotness.iter().filter(|entry| entry.provider == of && is_layer(&entry.block));
            entries.map(|entry| entry.decode.ms_per_gib).collect()
        }
        None => time_per_gib(profile),
    };
    let middle = median(layers.clone()).filter(|_| layers.len() > 1)?;
    let (least, most) = layers.iter().fold((f64::MAX, f64::MIN), |(a, b), x| (a.min(*x), b.max(*x)));
    let spread = (most - least) / middle.abs().max(f64::MIN_POSITIVE);
    let evenness = match spread <= FLAT {
        true => Evenness::Flat,
        false if is_disturbed(profile) => Evenness::Unknown,
        false => Evenness::Uneven,
    };
    let lines = match evenness {
        Evenness::Flat => decides(profile),
        Evenness::Uneven => vec![format!("layers differ: {least:.1} to {most:.1} ms per GiB")],
        Evenness::Unknown => {
            vec![format!("layers seem to differ, {least:.1} to {most:.1} ms per GiB, but {}", why_unknown(profile))]
        }
    };
    Some(HotnessVerdict { provider, evenness, spread, lines })
}

/// Whether differences between layers may come from other programs on the machine.
fn is_disturbed(profile: &Profile) -> bool {
    let doubtful = |provider: &Provider| unreliable_blocks(profile, *provider).into_iter().any(is_layer);
    profile.busy_machine().is_some() || profile.settings.providers.iter().any(doubtful)
}

/// Why [`Evenness::Unknown`], and what to do.
fn why_unknown(profile: &Profile) -> &'static str {
    match profile.settings.quick && profile.busy_machine().is_none() {
        true => "the few runs of --quick vary as much: profile without it, on an idle machine",
        false => "the measurements were disturbed: profile again on an idle machine",
    }
}

/// Host milliseconds per GiB of weights, for each layer.
fn time_per_gib(profile: &Profile) -> Vec<f64> {
    let Some(context) = profile.settings.contexts.iter().max() else { return vec![] };
    let layers = profile.model.blocks.iter().filter(|block| is_layer(&block.label));
    let ms_per_gib = |block: &hpp_schema::ProfiledBlock| {
        let fit = costs_of(profile, block, Provider::CPU)?.decode.fit?;
        Some(terms(fit.ms(*context), 0.0, block.weight_bytes.0, 0).ms_per_gib)
    };
    layers.filter_map(ms_per_gib).collect()
}

/// Whether a label is a layer's; `hpp_graph::segment` makes the labels.
fn is_layer(label: &str) -> bool {
    label.starts_with("layers.") || label.starts_with("blocks.")
}

/// Says what decides a placement if all layers are equally hot.
fn decides(profile: &Profile) -> Vec<String> {
    let weights = profile.model.weight_bytes;
    let mut lines = vec![format!("every layer gains the same: it matters how many are on a device, not which ones")];
    lines.push(format!(
        "bytes: {} of weights; a token reads them except table rows and experts that it does not select",
        weights.human()
    ));
    if let Some(machine) = &profile.machine.rates {
        let ms = |bytes: ByteSize, gb_per_s: f64| bytes.0 as f64 / gb_per_s / 1e6;
        let host = machine.cpu.memory_gb_per_s;
        lines.push(format!(
            "bandwidth: {:.1} ms to read all of them from host memory at {host:.1} GB/s",
            ms(weights, host)
        ));
        for gpu in &machine.gpus {
            let link = gpu.link.to_device_gb_per_s;
            lines.push(format!(
                "{}: {:.1} ms to copy all of them over its link at {link:.1} GB/s",
                gpu.name,
                ms(weights, link)
            ));
            lines.push(format!(
                "crossings: each costs {:.0} us and a launch of {:.0} us",
                gpu.link.latency_us, gpu.launch_us
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests;
