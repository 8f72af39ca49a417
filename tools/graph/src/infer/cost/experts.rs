//! Mixtures of experts: `k` of them work for each token.

use super::sizes::{Sizes, times};

/// Where the weights of the three projections are: `MoE` has biases between them, `QMoE` scales and biases.
fn projections(s: &Sizes) -> [(usize, &'static str); 3] {
    let step = if s.node.op_type == "QMoE" { 3 } else { 2 };
    [(2, "fc1_expert_weight_bits"), (2 + step, "fc2_expert_weight_bits"), (2 + 2 * step, "fc3_expert_weight_bits")]
}

/// Two per token, chosen expert and weight of one expert.
pub(super) fn flops(s: &Sizes) -> Option<u64> {
    let given = projections(s).into_iter().filter(|(at, _)| s.has(*at));
    let weights = given.map(|(at, bits)| one_expert(s, at, bits)).try_fold(0u64, |sum, n| sum.checked_add(n?))?;
    times(&[2, s.tokens()?, s.attribute("k").unwrap_or(1), weights])
}

/// Elements of one expert's weights; bytes of `QMoE` hold `8 / bits` of them.
fn one_expert(s: &Sizes, at: usize, bits: &str) -> Option<u64> {
    let stored = s.count(at)?.checked_div(s.dim(at, 0)?)?;
    if s.node.op_type != "QMoE" {
        return Some(stored);
    }
    let bits = s.attribute(bits).or(s.attribute("expert_weight_bits")).unwrap_or(4);
    stored.checked_mul(8)?.checked_div(bits)
}

/// Most experts these tokens can touch.
pub(super) fn chosen(s: &Sizes) -> Option<u64> {
    s.tokens()?.checked_mul(s.attribute("k").unwrap_or(1))
}
