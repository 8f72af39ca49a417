//! Median time to sample one token from 152,064 logits, for several settings: `cargo bench -p hpp-generate --bench sampling`.

use hpp_generate::sampling::{RandomSampling, Sampler, SamplingMethod, SamplingParams};
use std::time::Instant;

const VOCABULARY: u32 = 152_064;
const ROWS: u32 = 16;
const TOKENS: usize = 200;

/// Logits in a bell curve of this width with a few likely tokens above it, as language models give.
fn row(width: f32, number: u32) -> Vec<f32> {
    let mut state = u64::from(number) + 1;
    let mut uniform = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u32 << 24) as f32 - 0.5
    };
    let mut logits: Vec<f32> = (0..VOCABULARY).map(|_| (0..4).map(|_| uniform()).sum::<f32>() * 1.73 * width).collect();
    for likely in 0..40 {
        logits[((likely * 3571 + number * 17) % VOCABULARY) as usize] = width * 5.0 + 6.0 - likely as f32 * 0.3;
    }
    logits
}

fn main() {
    let random = RandomSampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1 };
    let settings = [
        ("greedy", SamplingMethod::Greedy),
        ("temperature 1", SamplingMethod::Random(random)),
        (
            "temperature 0.7, top-p 0.9",
            SamplingMethod::Random(RandomSampling { temperature: 0.7, top_p: 0.9, ..random }),
        ),
        ("top-p 0.99", SamplingMethod::Random(RandomSampling { top_p: 0.99, ..random })),
        ("min-p 0.05", SamplingMethod::Random(RandomSampling { min_p: 0.05, ..random })),
        ("top-k 40", SamplingMethod::Random(RandomSampling { top_k: 40, ..random })),
        ("top-k 20, top-p 0.8", SamplingMethod::Random(RandomSampling { top_k: 20, top_p: 0.8, ..random })),
    ];
    for (shape, width) in [("peaked", 4.0), ("flat", 1.0)] {
        let rows: Vec<Vec<f32>> = (0..ROWS).map(|number| row(width, number)).collect();
        for (name, choice) in settings {
            let mut sampler = Sampler::new(SamplingParams { choice, repetition_penalty: 1.0 }, &[]);
            let mut times: Vec<f64> = (0..TOKENS)
                .map(|token| {
                    let started = Instant::now();
                    std::hint::black_box(sampler.next(&rows[token % rows.len()]).expect("no logit is NaN"));
                    started.elapsed().as_secs_f64() * 1e6
                })
                .collect();
            times.sort_by(f64::total_cmp);
            println!("{shape:7} {name:28} {:9.1} us", times[TOKENS / 2]);
        }
    }
}
