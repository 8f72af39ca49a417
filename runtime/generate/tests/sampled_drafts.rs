//! Sampling with drafts: whether they are right or wrong, each sequence of tokens is as frequent as its probability says.

use hpp_engine::{LogitRows, Logits};
use hpp_generate::sampling::{RandomSampling, SamplingMethod, SamplingParams};
use hpp_generate::speculate::{DraftLength, Drafter, Speculation, SpeculationStats};
use hpp_generate::{GenerateError, Generation, GenerationRequest, Input};

const TOKENS: usize = 3;
/// Tokens of an answer.
const NEW: u32 = 4;
const SEEDS: u64 = 4000;
/// The probabilities of the next token after each token.
const PROBABILITIES: [[f64; TOKENS]; TOKENS] = [[0.6, 0.3, 0.1], [0.2, 0.3, 0.5], [0.25, 0.6, 0.15]];
/// 80 degrees of freedom exceed this once in a million times.
const MOST_CHI_SQUARE: f64 = 155.0;

/// Drafts the same tokens at any position.
struct Fixed(&'static [u32]);

impl Drafter for Fixed {
    fn extend(&mut self, _: &[u32]) {}

    fn confidence(&self) -> Option<usize> {
        Some(5)
    }

    fn is_free(&self) -> bool {
        true
    }

    fn draft(&mut self, most: usize, draft: &mut Vec<u32>) -> Result<(), GenerateError> {
        draft.clear();
        draft.extend(self.0.iter().take(most));
        Ok(())
    }
}

/// An answer to a prompt of token 0.
fn answer(seed: u64, draft: &'static [u32]) -> (Vec<u32>, SpeculationStats) {
    let choice = RandomSampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed };
    let request = GenerationRequest {
        prompt: vec![0],
        max_new_tokens: u64::from(NEW),
        eos_token_ids: vec![],
        stop: vec![],
        sampling: SamplingParams { choice: SamplingMethod::Random(choice), repetition_penalty: 1.0 },
        grammar: None,
        visible_tokens: vec![],
        prompt_logits: false,
    };
    let speculation = Speculation::with_length(Box::new(Fixed(draft)), DraftLength::fixed(draft.len()));
    let mut generation = Generation::new(request, None, usize::MAX).speculate(speculation);
    while let Some(Input { tokens, rows: LogitRows::LastN(rows) }) = generation.next_input(9).unwrap() {
        let fed = &tokens[tokens.len() - rows as usize..];
        let data = fed.iter().flat_map(|token| PROBABILITIES[*token as usize].map(|chance| chance.ln() as f32));
        let logits = Logits { rows: fed.len(), vocab: TOKENS, data: data.collect() };
        generation.advance::<GenerateError>(&logits, 9, &mut |_| Ok(())).unwrap();
    }
    let generated = generation.into_result();
    (generated.tokens, generated.speculation.unwrap())
}

/// How often an answer is expected; answers are numbered, each token a digit.
fn expected(number: usize) -> f64 {
    let digits = (0..NEW).rev().map(|place| number / TOKENS.pow(place) % TOKENS);
    let (_, chance) = digits.fold((0, 1.0), |(last, chance), next| (next, chance * PROBABILITIES[last][next]));
    chance * SEEDS as f64
}

#[test]
fn drafts_keep_the_distribution() {
    let drafts: [&[u32]; 4] = [&[0, 0], &[1, 2], &[2], &[2, 2]];
    for draft in drafts {
        let (mut counts, mut drafted, mut accepted) = (vec![0u32; TOKENS.pow(NEW)], 0, 0);
        for seed in 0..SEEDS {
            let (tokens, stats) = answer(seed, draft);
            counts[tokens.iter().fold(0, |number, token| number * TOKENS + *token as usize)] += 1;
            (drafted, accepted) = (drafted + stats.drafted, accepted + stats.accepted);
        }
        assert!(accepted > drafted / 20 && accepted < drafted * 3 / 4, "{draft:?}: {accepted} of {drafted}");
        let deviations = counts.iter().enumerate().map(|(number, count)| {
            let expected = expected(number);
            (f64::from(*count) - expected).powi(2) / expected
        });
        let chi_square: f64 = deviations.sum();
        assert!(chi_square < MOST_CHI_SQUARE, "{draft:?}: {chi_square}");
    }
}
