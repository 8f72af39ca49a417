//! What `--active-neurons` changes on a host without GPUs: decoding reads only the weights of active neurons, prompts take longer, and 16-bit
//! weights of products with activations are not widened. Partitions that a GPU computes in one of the phases keep the plain products, so with a GPU
//! in the budget all stays as it is.

use super::CostSource;
use super::packing::largest_widened;
use crate::Analysis;
use hpp_graph::ValueId;
use hpp_onnx::ActiveNeurons;
use hpp_partition::{BlockSpec, Budget, Cost, SHORT_PASS_TOKENS, Workload};
use hpp_schema::Provider;

/// Most tokens of a pass in which the operators multiply the rows of active neurons with each token in turn.
const FEW_TOKENS: u64 = 8;
/// How much longer an active row takes in such a pass than its share of the plain product, because rows are apart in memory: measured 1.5 to 1.8 with
/// 10 % active and 1.44 with 50 % (docs/BENCHMARKS.md). Such a pass is never predicted to take longer than with plain products.
const ROW_COST: f64 = 1.6;
/// The same in a longer pass, because ONNX Runtime multiplies matrices faster than the operators do: measured 1.5 to 2.2 on a processor with
/// AVX-512, and about 1.1 on one without.
const ROW_COST_OF_MANY_TOKENS: f64 = 1.6;

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

/// Corrects the times of passes: those of few tokens take less time because inactive neurons are not read, those of many tokens, in which nearly
/// every neuron is active for some token, take longer. If the source does not say how many neurons are active, all count as active.
pub(super) fn correct_times(
    analysis: &Analysis,
    active: &ActiveNeurons,
    source: CostSource<'_>,
    workload: &Workload,
    blocks: &[BlockSpec],
    costs: &mut [Cost],
) {
    // Without states each token computes the whole sequence.
    let of_pass = |tokens: u64| if analysis.states.is_empty() { workload.prompt_tokens } else { tokens };
    for ((spec, block), cost) in blocks.iter().zip(&analysis.segmentation.blocks).zip(costs) {
        let of_one = source.active_neurons(&spec.label).unwrap_or(1.0);
        let replaced = replaced_bytes(analysis, active, &block.weights);
        let share = |tokens: u64| share_of_time(of_pass(tokens), of_one, replaced, spec.decode.bytes);
        cost.decode_ms *= share(1);
        cost.short_pass_ms.iter_mut().zip(SHORT_PASS_TOKENS).for_each(|(ms, tokens)| *ms *= share(tokens));
        cost.prefill_ms.iter_mut().zip(&workload.passes).for_each(|(ms, tokens)| *ms *= share(*tokens));
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

/// The time of a pass over the time with plain products, if each neuron is active for a share `of_one` of the tokens. Of the `all` bytes that plain
/// products and states read, `replaced` belong to neurons.
fn share_of_time(tokens: u64, of_one: f64, replaced: u64, all: u64) -> f64 {
    let active = of_any(of_one, tokens);
    let of_rows = match tokens <= FEW_TOKENS {
        true => (ROW_COST * active).min(1.0),
        false => ROW_COST_OF_MANY_TOKENS * active,
    };
    let replaced = replaced as f64 / all.max(replaced).max(1) as f64;
    1.0 - replaced * (1.0 - of_rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_pass_takes_less_time_the_fewer_neurons_are_active_and_a_long_one_more_than_plain_products() {
        assert!((share_of_time(1, 0.1, 500, 1000) - 0.58).abs() < 1e-12);
        assert!((share_of_time(1, 0.0, 500, 1000) - 0.5).abs() < 1e-12);
        assert_eq!(
            [share_of_time(1, 0.7, 500, 1000), share_of_time(1, 0.1, 0, 1000), share_of_time(1, 0.1, 0, 0)],
            [1.0; 3]
        );
        // Bytes that a caller counted too low.
        assert_eq!(share_of_time(1, 0.0, 500, 10), 0.0);
        assert!((share_of_time(256, 1.0, 500, 1000) - 1.3).abs() < 1e-12);
        assert!((share_of_time(256, 0.0, 500, 1000) - 0.5).abs() < 1e-12);
    }

    #[test]
    fn more_tokens_make_more_neurons_active() {
        assert!((of_any(0.1, 1) - 0.1).abs() < 1e-12 && (of_any(0.1, 2) - 0.19).abs() < 1e-12);
        assert!(of_any(0.1, 64) > 0.99 && of_any(0.0, 64) == 0.0 && of_any(1.0, 3) == 1.0);
    }
}
