//! Corpus statistics that fit the sample model.

use super::{Sample, noise};
use hpp_schema::*;

/// Tokens of the corpus.
const TOKENS: u64 = 4096;

/// Everything counted over the corpus.
pub fn statistics(sample: &Sample) -> CorpusStatistics {
    let skipped = match sample.failures {
        true => vec!["line 7: neither prompt, text nor messages".to_owned()],
        false => Vec::new(),
    };
    CorpusStatistics {
        hash: "77aa01".into(),
        prompts_hash: None,
        prompts_done: 64,
        prompts_in_all: Some(64),
        skipped_in_all: 3 * skipped.len() as u64,
        skipped,
        statistics: Statistics {
            prompts: 64,
            prompt_tokens: TOKENS,
            generated_tokens: 64 * 32,
            boundaries: sample.labels().iter().enumerate().map(boundary).collect(),
            influence: sample
                .layers()
                .into_iter()
                .enumerate()
                .map(|(at, block)| influence(sample, at, block))
                .collect(),
            attention: match sample.attention {
                true => sample.layers().into_iter().enumerate().map(attention).collect(),
                false => Vec::new(),
            },
            experts: match sample.experts {
                0 => Vec::new(),
                experts => sample.layers().into_iter().enumerate().map(|(at, b)| routed(experts, at, b)).collect(),
            },
            neurons: match sample.relu {
                true => sample.layers().into_iter().enumerate().map(neurons).collect(),
                false => Vec::new(),
            },
        },
    }
}

fn boundary((at, block): (usize, &String)) -> BoundaryStatistics {
    let mean_abs = 0.02 * 1.22f64.powi(at as i32).min(4000.0) * (0.9 + 0.2 * noise(at, 1));
    let elements = TOKENS * 1024;
    BoundaryStatistics {
        block: block.clone(),
        elements,
        not_finite: 0,
        mean_abs,
        mean: 0.01 * mean_abs,
        squares: (1.6 * mean_abs).powi(2) * elements as f64,
        max_abs: mean_abs * if at < 3 { 12.0 } else { 400.0 + 300.0 * noise(at, 2) },
    }
}

fn influence(sample: &Sample, at: usize, block: String) -> BlockInfluence {
    let ends = (at as f64 - f64::from(sample.layers) / 2.0).abs() / f64::from(sample.layers);
    BlockInfluence { block, tokens: TOKENS, mean: 0.02 + 0.6 * ends.powi(3) * 4.0 + 0.02 * noise(at, 3) }
}

fn attention((at, block): (usize, String)) -> AttentionEntropy {
    AttentionEntropy { block, rows: TOKENS * 16, mean: 1.2 + 2.0 * noise(at, 4) }
}

/// Visits that fall with an expert's rank. Which expert has which rank depends on the layer.
fn routed(experts: usize, layer: usize, block: String) -> ExpertStatistics {
    let top_k = 4;
    let rank = |expert: usize| (expert * 37 + layer * 11) % experts;
    let weight =
        |expert: usize| if noise(layer, expert) < 0.02 { 0.0 } else { 1.0 / (2.0 + rank(expert) as f64).powf(0.8) };
    let total: f64 = (0..experts).map(weight).sum();
    let visits = (TOKENS * top_k) as f64;
    let counts: Vec<u64> = (0..experts).map(|expert| (visits * weight(expert) / total) as u64).collect();
    let all: u64 = counts.iter().sum();
    let curve = |power: f64| move |n: usize| ((n as f64 / experts as f64).powf(power) * all as f64 * 0.97) as u64;
    let (lru, best) = (curve(0.75), curve(0.45));
    ExpertStatistics {
        block,
        top_k: top_k as u32,
        tokens: TOKENS,
        reuse_distances: (0..experts).map(|d| lru(d + 1) - lru(d)).collect(),
        first_visits: all - lru(experts),
        oracle_hits: (1..=experts).map(best).collect(),
        counts,
    }
}

fn neurons((at, block): (usize, String)) -> NeuronStatistics {
    let part = |neuron: usize| noise(at + 100, neuron).powf(3.0 + at as f64 / 4.0);
    NeuronStatistics { block, tokens: TOKENS, active: (0..2048).map(|n| (part(n) * TOKENS as f64) as u64).collect() }
}

/// Rounding one layer at a time to 8 and 4 bits.
pub fn sensitivity(sample: &Sample) -> Vec<Sensitivity> {
    let layers: Vec<String> = sample.layers();
    let rounded = |bits: u32, at: usize, block: &String| {
        let kl = if bits == 8 { 2e-5 } else { 9e-3 } * (0.4 + 1.6 * noise(at, bits as usize));
        let failure = (sample.failures && at == 1).then(|| "the weights are quantized already".to_owned());
        Sensitivity {
            block: block.clone(),
            bits,
            positions: 512,
            kl: failure.is_none().then_some(kl),
            top1_changed: failure.is_none().then_some(kl.sqrt() / 2.0),
            failure,
        }
    };
    [8, 4]
        .into_iter()
        .flat_map(|bits| layers.iter().enumerate().map(move |(at, block)| rounded(bits, at, block)))
        .collect()
}
