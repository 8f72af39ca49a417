//! The summary: key numbers and conclusions.

use super::failures;
use super::roofline::{BEYOND, WHY_BEYOND};
use crate::report::number::{bytes, count, percent, plain, time};
use crate::report::view::{View, provider_name};
use hpp_partition::Phase;
use hpp_schema::Provider;

/// A key number.
pub struct Tile {
    /// The number.
    pub value: String,
    /// Its unit.
    pub unit: &'static str,
    /// What it measures.
    pub what: String,
}

fn tile(value: String, unit: &'static str, what: impl Into<String>) -> Tile {
    Tile { value, unit, what: what.into() }
}

/// The key numbers.
pub fn tiles(view: &View<'_>) -> Vec<Tile> {
    let model = &view.profile.model;
    let mut tiles = vec![tile(bytes(model.weight_bytes.0), "", format!("weights in {} blocks", model.blocks.len()))];
    for provider in &view.providers {
        let name = provider_name(*provider);
        if let Some((tokens, ms)) = whole_pass(view, *provider, Phase::Decode) {
            tiles.push(tile(plain(1e3 / ms), "tokens/s", format!("{name}, decode at {tokens} tokens")));
        }
        if let Some((tokens, ms)) = whole_pass(view, *provider, Phase::Prefill) {
            let rate = plain(1e3 * tokens as f64 / ms);
            tiles.push(tile(rate, "tokens/s", format!("{name}, prefill of {tokens} tokens")));
        }
    }
    if let Some(bounds) = view.bounds(Provider::Cpu) {
        tiles.push(tile(plain(bounds.gb_per_s), "GB/s", "host memory, read"));
    }
    tiles
}

/// Tokens and milliseconds of a pass with a time for every block.
fn whole_pass(view: &View<'_>, provider: Provider, phase: Phase) -> Option<(u64, f64)> {
    let tokens = view.most_tokens(phase)?;
    let pass = view.pass(provider, phase, tokens);
    (pass.missing == 0 && pass.ms > 0.0 && !view.blocks().is_empty()).then_some((tokens, pass.ms))
}

/// Conclusions from the measurements.
pub fn sentences(view: &View<'_>) -> Vec<String> {
    let mut sentences: Vec<String> = view.providers.iter().filter_map(|p| decode_sentence(view, *p)).collect();
    sentences.extend(comparison(view));
    let failed = failures::all(view.profile).len() as u64;
    sentences.push(match failed {
        0 => "Everything that was asked for could be measured.".to_owned(),
        _ => format!("{} could not be made; the last section says why.", count(failed, "measurement", "measurements")),
    });
    sentences
}

fn decode_sentence(view: &View<'_>, provider: Provider) -> Option<String> {
    let (tokens, ms) = whole_pass(view, provider, Phase::Decode)?;
    let name = provider_name(provider);
    let mut text = format!("{name}: one token at {tokens} tokens of context takes {} in one partition", time(ms));
    let works = (0..view.blocks().len()).map(|block| view.work(block, Phase::Decode, tokens));
    let read = works.map(|work| work.map(|work| work.bytes)).collect::<Option<Vec<u64>>>();
    if let (Some(read), Some(bounds)) = (read, view.bounds(provider)) {
        let read = read.into_iter().fold(0, u64::saturating_add);
        let least = read as f64 / bounds.gb_per_s / 1e6;
        text += &format!("; reading the {} it needs", bytes(read));
        text += &format!(" at the {} GB/s measured takes {}", plain(bounds.gb_per_s), time(least));
        if least > BEYOND * ms {
            return Some(format!("{text}, longer than the pass itself: {WHY_BEYOND}."));
        }
        text += &format!(", so it runs at {} of what its memory allows", percent(least / ms));
    }
    Some(text + ".")
}

/// The fastest provider of each phase, if there are several.
fn comparison(view: &View<'_>) -> Option<String> {
    let fastest = |phase: Phase| {
        let mut passes: Vec<(f64, Provider)> =
            view.providers.iter().filter_map(|p| Some((whole_pass(view, *p, phase)?.1, *p))).collect();
        passes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let (first, last) = (passes.first()?, passes.last()?);
        (passes.len() > 1).then(|| (provider_name(first.1), last.0 / first.0, provider_name(last.1)))
    };
    let (decode, prefill) = (fastest(Phase::Decode)?, fastest(Phase::Prefill)?);
    if (decode.0, decode.2) == (prefill.0, prefill.2) {
        return Some(format!(
            "With all of the model on one processor, {} is {} times as fast as {} in decode and {} times in prefill.",
            decode.0,
            plain(decode.1),
            decode.2,
            plain(prefill.1)
        ));
    }
    Some(format!(
        "With all of the model on one processor, {} decodes {} times as fast as {}, and {} takes prompts in {} times as fast as {}.",
        decode.0,
        plain(decode.1),
        decode.2,
        prefill.0,
        plain(prefill.1),
        prefill.2
    ))
}
