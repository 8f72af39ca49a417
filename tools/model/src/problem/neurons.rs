//! What `--active-neurons` changes on a host without GPUs: decoding reads only the weights of active neurons, and 16-bit weights of
//! products with activations are not widened. Partitions that a GPU computes in one of the phases keep the plain products, so with a GPU
//! in the budget all stays as it is.

use super::CostSource;
use super::packing::largest_widened;
use crate::Analysis;
use hpp_graph::ValueId;
use hpp_onnx::ActiveNeurons;
use hpp_partition::{BlockSpec, Budget, Cost, SHORT_PASS_TOKENS};
use hpp_schema::Provider;

/// How much longer an active row takes than its share of the plain product, because rows are apart in memory: measured 2.3 with 10 % active
/// in float32, 2.4 in float16, 1.5 with 50 % in float32 (docs/BENCHMARKS.md). The prediction never exceeds
/// that of the plain product; passes of more than 8 tokens, such as prompts, were measured at up to 1.8 times as long.
const ROW_COST: f64 = 2.0;

/// The products of active neurons, if every partition of a plan within this budget computes them so.
pub(super) fn of_all_partitions<'a>(
    analysis: &'a Analysis,
    source: CostSource<'_>,
    budget: &Budget,
) -> Option<&'a ActiveNeurons> {
    let is_other = |provider: &Provider| provider.uses_host_memory() && *provider != Provider::CPU;
    let has_other = matches!(source, CostSource::Profile(profile) if profile.settings.providers.iter().any(is_other));
    analysis.active_neurons.as_ref().filter(|_| budget.vram.is_empty() && !has_other)
}

/// Corrects the largest weight of each block that the CPU provider widens when it creates a session.
pub(super) fn set_widened_bytes(analysis: &Analysis, active: &ActiveNeurons, blocks: &mut [BlockSpec]) {
    let graph = &analysis.graph;
    for (spec, block) in blocks.iter_mut().zip(&analysis.segmentation.blocks) {
        let others = block.weights.iter().copied().filter(|id| !active.reads(&graph.value(*id).name));
        spec.widened_bytes = largest_widened(graph, others);
    }
}

/// Shortens decoding by what need not be read for inactive neurons, if the source says how many are active: in proportion to the bytes that
/// a token reads. Prompts are predicted as before: in the pass of a prompt nearly every neuron is active for some token. So are the tokens of
/// models without states, each of which computes the whole sequence.
pub(super) fn shorten_decoding(
    analysis: &Analysis,
    active: &ActiveNeurons,
    source: CostSource<'_>,
    blocks: &[BlockSpec],
    costs: &mut [Cost],
) {
    if analysis.states.is_empty() {
        return;
    }
    for ((spec, block), cost) in blocks.iter().zip(&analysis.segmentation.blocks).zip(costs) {
        let Some(of_one) = source.active_neurons(&spec.label) else { continue };
        let replaced = replaced_bytes(analysis, active, &block.weights);
        let share = |tokens: u64| share_of_time(of_any(of_one, tokens), replaced, spec.decode.bytes);
        cost.decode_ms *= share(1);
        cost.short_pass_ms.iter_mut().zip(SHORT_PASS_TOKENS).for_each(|(ms, tokens)| *ms *= share(tokens));
    }
}

/// The share of neurons that are active for at least one of these tokens, if each is active for a share `of_one` of the tokens,
/// independently of the others.
fn of_any(of_one: f64, tokens: u64) -> f64 {
    1.0 - (1.0 - of_one).powf(tokens as f64)
}

/// Bytes of these weights that the products of active neurons read.
fn replaced_bytes(analysis: &Analysis, active: &ActiveNeurons, weights: &[ValueId]) -> u64 {
    let graph = &analysis.graph;
    let replaced = weights.iter().filter(|id| active.reads(&graph.value(**id).name));
    replaced.filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).fold(0, u64::saturating_add)
}

/// The time of a pass in which a share `active` of the neurons is active, over the time with plain products. Of the `all` bytes that plain
/// products and states read, `replaced` belong to neurons.
fn share_of_time(active: f64, replaced: u64, all: u64) -> f64 {
    let replaced = replaced as f64 / all.max(replaced).max(1) as f64;
    1.0 - replaced * (1.0 - (ROW_COST * active).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_takes_less_time_the_fewer_neurons_are_active() {
        assert!((share_of_time(0.1, 500, 1000) - 0.6).abs() < 1e-12);
        assert!((share_of_time(0.0, 500, 1000) - 0.5).abs() < 1e-12);
        assert_eq!([share_of_time(0.6, 500, 1000), share_of_time(0.1, 0, 1000), share_of_time(0.1, 0, 0)], [1.0; 3]);
        // Bytes that a caller counted too low.
        assert_eq!(share_of_time(0.0, 500, 10), 0.0);
    }

    #[test]
    fn more_tokens_make_more_neurons_active() {
        assert!((of_any(0.1, 1) - 0.1).abs() < 1e-12 && (of_any(0.1, 2) - 0.19).abs() < 1e-12);
        assert!(of_any(0.1, 64) > 0.99 && of_any(0.0, 64) == 0.0 && of_any(1.0, 3) == 1.0);
    }
}
