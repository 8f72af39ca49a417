//! Cost of mixtures of experts, which apply `k` experts to each token.

use super::sizes::{Sizes, times};

/// Input index of each projection's weights, with the attribute for its bits. `MoE` has biases between them, `QMoE` has
/// scales and biases.
fn projections(s: &Sizes) -> [(usize, &'static str); 3] {
    let step = if s.node.op_type == "QMoE" { 3 } else { 2 };
    [(2, "fc1_expert_weight_bits"), (2 + step, "fc2_expert_weight_bits"), (2 + 2 * step, "fc3_expert_weight_bits")]
}

/// `2 * tokens * k * (elements of one expert's weights)`.
pub(super) fn flops(s: &Sizes) -> Option<u64> {
    let given = projections(s).into_iter().filter(|(at, _)| s.has(*at));
    let weights = given.map(|(at, bits)| one_expert(s, at, bits)).try_fold(0u64, |sum, n| sum.checked_add(n?))?;
    times(&[2, s.tokens()?, s.attribute("k").unwrap_or(1), weights])
}

/// Elements of one expert's weights. Each byte of `QMoE` weights holds `8 / bits` elements.
fn one_expert(s: &Sizes, at: usize, bits: &str) -> Option<u64> {
    let stored = s.count(at)?.checked_div(s.dim(at, 0)?)?;
    if s.node.op_type != "QMoE" {
        return Some(stored);
    }
    let bits = s.attribute(bits).or(s.attribute("expert_weight_bits")).unwrap_or(4);
    stored.checked_mul(8)?.checked_div(bits)
}

/// Maximum number of experts that the tokens can select.
pub(super) fn selected(s: &Sizes) -> Option<u64> {
    s.tokens()?.checked_mul(s.attribute("k").unwrap_or(1))
}
