//! Cost of mixtures of experts, which apply `k` experts to each token.

use super::sizes::{Sizes, times};
use crate::experts::{EXPECTED_EXPERTS, Selection, selection_of, share};
use crate::{Attribute, ValueId};
use hpp_schema::SelectedBy;

/// Input index of each projection's weights, with the attribute for its bits. `MoE` has biases between them, `QMoE` has
/// scales and biases.
fn projections(s: &Sizes) -> [(usize, &'static str); 3] {
    let step = if s.node.op_type == "QMoE" { 3 } else { 2 };
    [(2, "fc1_expert_weight_bits"), (2 + step, "fc2_expert_weight_bits"), (2 + 2 * step, "fc3_expert_weight_bits")]
}

/// `2 * tokens * k * (elements of one expert's weights)`, with the expected number of experts instead of `k` where a mixture is divided.
pub(super) fn flops(s: &Sizes) -> Option<u64> {
    let given = projections(s).into_iter().filter(|(at, _)| s.has(*at));
    let weights = given.map(|(at, bits)| one_expert(s, at, bits)).try_fold(0u64, |sum, n| sum.checked_add(n?))?;
    Some((times(&[2, s.tokens()?, weights])? as f64 * per_token(s)) as u64)
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

/// Probability that a pass selects the expert of an `If`, if every expert is equally likely. `None` for other nodes, or if the number of tokens is
/// unknown.
pub(super) fn visited_share(s: &Sizes) -> Option<f64> {
    let selection = selection_of(s.graph, s.node)?;
    Some(share(selection.active(s.graph)?, selection.count(s.graph)?, selecting_tokens(s, selection)?))
}

/// Number of tokens that select experts.
fn selecting_tokens(s: &Sizes, selection: Selection) -> Option<u64> {
    s.elements(selection.value)?.checked_div(s.dim_of(selection.value, -1)?)
}

/// Expected operations of an expert under a condition: `2 * tokens * (elements of the expert's matrices)`, times a probability. An expert selected
/// by scores computes all tokens if one token selects it. An expert selected by number computes only the tokens that select it. A packed byte
/// counts as the elements that it holds.
pub(super) fn conditional_flops(s: &Sizes) -> Option<u64> {
    let selection = selection_of(s.graph, s.node)?;
    let tokens = selecting_tokens(s, selection)?;
    let computed = match selection.by {
        SelectedBy::Numbers => selection.active(s.graph)? as f64 / selection.count(s.graph)? as f64,
        _ => visited_share(s)?,
    };
    let matrices = s.node.captures.iter().enumerate().filter(|(_, id)| {
        let rank = s.graph.value(**id).shape.as_ref().map_or(0, Vec::len);
        s.graph.weight(**id).is_some() && rank >= 2
    });
    let elements = |(at, id): (usize, &ValueId)| s.elements(*id)?.checked_mul(packed(s, at));
    let sum = matrices.map(elements).try_fold(0u64, |sum, n| sum.checked_add(n?))?;
    Some((times(&[2, tokens, sum])? as f64 * computed) as u64)
}

/// Number of matrix elements that each stored number of a captured weight holds.
fn packed(s: &Sizes, capture: usize) -> u64 {
    let held = s.node.attributes.values().find_map(|attribute| match attribute {
        Attribute::Body(body) => body.packed.get(&capture),
        _ => None,
    });
    held.copied().unwrap_or(1)
}

/// Maximum number of experts that the tokens can select; the expected number where a mixture is divided.
pub(super) fn selected(s: &Sizes) -> Option<f64> {
    Some(s.tokens()? as f64 * per_token(s))
}

/// Experts that an operator computes for a token.
fn per_token(s: &Sizes) -> f64 {
    match s.node.attributes.get(EXPECTED_EXPERTS) {
        Some(Attribute::Float(expected)) => f64::from(*expected),
        _ => s.attribute("k").unwrap_or(1) as f64,
    }
}

/// Bytes that the CPU kernel allocates for one run beside its operands. Each of its `threads` holds floats for the gathered tokens, the results of
/// both projections and the output, with room for all tokens, because all may select the same expert. If the kernel has no product for the stored
/// weights, it also holds the expert's weights as floats. Source: `moe_quantization_cpu.cc` of ONNX Runtime 1.31.
pub(super) fn scratch(s: &Sizes, threads: u64) -> Option<u64> {
    let [(first, bits), (second, _), _] = projections(s);
    let (tokens, hidden) = (s.tokens()?, s.dim(0, -1)?);
    let features = s.dim(first, 1)?;
    let inner = one_expert(s, second, "fc2_expert_weight_bits")?.checked_div(hidden)?;
    // `3 * hidden`: the gathered tokens, the expert's result and the thread's output. `features` and `inner`: input and output of the activation.
    let widths = times(&[3, hidden])?.checked_add(features)?.checked_add(inner)?;
    let has_product = s.node.op_type != "QMoE" || (s.attribute("block_size").is_some() && is_byte_or_half(s, bits));
    let widened = match has_product {
        true => 0,
        false => one_expert(s, first, bits)?.checked_add(times(&[hidden, inner])?)?,
    };
    let busy = threads.min(s.dim(first, 0)?);
    times(&[FLOAT, busy, times(&[tokens, widths])?.checked_add(widened)?])
}

const FLOAT: u64 = size_of::<f32>() as u64;

fn is_byte_or_half(s: &Sizes, bits: &str) -> bool {
    matches!(s.attribute(bits).or(s.attribute("expert_weight_bits")).unwrap_or(4), 4 | 8)
}
