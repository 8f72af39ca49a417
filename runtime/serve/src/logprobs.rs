//! Log probabilities of tokens, for requests that ask for them.

use hpp_generate::sampling::{exp_sum, max_logit};

/// A token with the logarithm of its probability before sampling settings are applied.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored {
    /// The token.
    pub id: u32,
    /// `ln p`, at most 0.
    pub logprob: f64,
}

/// A chosen token and the most likely ones.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The chosen token.
    pub chosen: Scored,
    /// The most likely tokens, the most likely first.
    pub top: Vec<Scored>,
}

/// The log probabilities of the token `id` and of the `top` most likely tokens, from logits `[vocab]`.
pub fn token_logprobs(logits: &[f32], id: u32, top: usize) -> TokenLogprobs {
    let max = max_logit(logits);
    let log_sum = exp_sum(logits, max, 1.0).ln();
    let scored = |id: usize| Scored {
        id: id as u32,
        logprob: logits.get(id).map_or(f64::NEG_INFINITY, |logit| f64::from(logit - max) - log_sum),
    };
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by_logit = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let top = top.min(order.len());
    if top > 0 && top < order.len() {
        order.select_nth_unstable_by(top - 1, by_logit);
    }
    order.truncate(top);
    order.sort_unstable_by(by_logit);
    TokenLogprobs { chosen: scored(id as usize), top: order.into_iter().map(scored).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_add_up_and_the_most_likely_come_first() {
        let logits = [1.0, 3.0, -2.0, 3.0, 0.5];
        let found = token_logprobs(&logits, 0, 3);
        assert_eq!(found.top.iter().map(|scored| scored.id).collect::<Vec<_>>(), [1, 3, 0]);
        assert_eq!(found.chosen, found.top[2]);
        let all = token_logprobs(&logits, 2, 9);
        let sum: f64 = all.top.iter().map(|scored| scored.logprob.exp()).sum();
        assert!((sum - 1.0).abs() < 1e-5 && all.top.len() == 5, "{sum}");
        assert!(token_logprobs(&logits, 2, 0).top.is_empty());
    }
}
