//! Chooses among the providers of the host by measured times.

use hpp_model::{Analysis, ProviderTimes, Scenario, faulty_blocks};
use hpp_partition::{Cost, Problem};
use hpp_schema::{Profile, Provider};

/// How much the two phases count in a choice between providers.
#[derive(Clone, Copy, Debug)]
pub struct PhaseWeights {
    /// Of a decoded token.
    pub decode: f64,
    /// Of the prompt.
    pub prefill: f64,
}

/// Another provider must be at least this much faster than the CPU provider: less is within the noise of measurements.
const CLEARLY: f64 = 0.97;

/// Chooses the fastest provider of the host for each block, by the times of a profile, and puts them into the problem: costs, and cuts
/// where the provider changes. Each change costs the launch of a partition. Empty if the CPU provider is best for all.
///
/// A dynamic program over the blocks in order, as if all computed on the host: the cost of block `b` under provider `p` is
/// `min over q of cost(b - 1, q) + (q == p ? 0 : launch(p)) + time(b, p)`. Exact for a plan without GPUs.
pub fn choose_host_providers(
    problem: &mut Problem,
    analysis: &Analysis,
    profile: &Profile,
    scenario: Scenario,
    candidates: &[Provider],
    weights: PhaseWeights,
) -> Vec<Provider> {
    let others = candidates.iter().copied().filter(|p| *p != Provider::CPU && p.uses_host_memory());
    let measured: Vec<ProviderTimes> = std::iter::once(Provider::CPU)
        .chain(others)
        .filter_map(|provider| ProviderTimes::of(profile, provider, &problem.blocks, scenario, &problem.load))
        .map(|times| without_faults(times, analysis))
        .collect();
    if measured.len() < 2 || measured[0].provider != Provider::CPU {
        return Vec::new();
    }
    let total = |cost: &Cost| weights.decode * cost.decode_ms + weights.prefill * cost.prefill_ms.iter().sum::<f64>();
    let launch =
        |times: &ProviderTimes| times.launch_ms * (weights.decode + weights.prefill * problem.load.passes.len() as f64);
    let path = cheapest_path(&measured, total, launch);
    let chosen: Vec<Provider> = path.iter().map(|at| measured[*at].provider).collect();
    if chosen.iter().all(|provider| *provider == Provider::CPU) {
        return Vec::new();
    }
    problem.cuts = (1..chosen.len()).filter(|block| chosen[*block] != chosen[block - 1]).collect();
    for (block, at) in path.iter().enumerate() {
        let begins = block == 0 || path[block - 1] != *at;
        problem.cpu[block] = with_launch(&measured[*at], block, problem.cpu_launch_ms, begins);
    }
    chosen
}

/// The cost of a block, with what its provider's launch takes beyond the CPU provider's if a partition begins there.
fn with_launch(times: &ProviderTimes, block: usize, cpu_launch_ms: f64, begins: bool) -> Cost {
    let mut cost = times.blocks[block].clone();
    let more = if begins { times.launch_ms - cpu_launch_ms } else { 0.0 };
    let all = std::iter::once(&mut cost.decode_ms).chain(&mut cost.prefill_ms).chain(&mut cost.short_pass_ms);
    all.for_each(|ms| *ms = (*ms + more).max(0.0));
    cost
}

/// For each block, the position of its provider on the cheapest way through all blocks.
fn cheapest_path(
    measured: &[ProviderTimes],
    total: impl Fn(&Cost) -> f64,
    launch: impl Fn(&ProviderTimes) -> f64,
) -> Vec<usize> {
    let blocks = measured[0].blocks.len();
    let handicap = |times: &ProviderTimes| if times.provider == Provider::CPU { 1.0 } else { 1.0 / CLEARLY };
    let mut best: Vec<f64> = vec![0.0; measured.len()];
    // For each block and provider, the provider of the block before.
    let mut before: Vec<Vec<usize>> = Vec::with_capacity(blocks);
    for block in 0..blocks {
        let entered = |at: usize, from: usize| {
            let changes = block == 0 || at != from;
            best[from] + if changes { launch(&measured[at]) } else { 0.0 }
        };
        let from: Vec<usize> = (0..measured.len())
            .map(|at| (0..measured.len()).min_by(|a, b| entered(at, *a).total_cmp(&entered(at, *b))).unwrap_or(at))
            .collect();
        best = (0..measured.len())
            .map(|at| entered(at, from[at]) + handicap(&measured[at]) * total(&measured[at].blocks[block]))
            .collect();
        before.push(from);
    }
    let mut at = (0..measured.len()).min_by(|a, b| best[*a].total_cmp(&best[*b])).unwrap_or(0);
    let mut path = vec![at; blocks];
    for block in (0..blocks).rev() {
        path[block] = at;
        at = before[block][at];
    }
    path
}

/// Makes the times of blocks that a provider computes wrongly infinite, so that it is not chosen for them.
fn without_faults(mut times: ProviderTimes, analysis: &Analysis) -> ProviderTimes {
    for (block, _) in faulty_blocks(analysis, times.provider) {
        if let Some(cost) = times.blocks.get_mut(block) {
            cost.make_impossible();
        }
    }
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(provider: Provider, launch_ms: f64, ms: &[f64]) -> ProviderTimes {
        let cost = |ms: &f64| Cost { decode_ms: *ms, prefill_ms: vec![0.0], short_pass_ms: vec![] };
        ProviderTimes { provider, launch_ms, blocks: ms.iter().map(cost).collect() }
    }

    fn path(cpu: &[f64], other: &[f64], launch_ms: f64) -> Vec<usize> {
        let measured = [times(Provider::CPU, launch_ms, cpu), times(Provider::OPENVINO, launch_ms, other)];
        cheapest_path(&measured, |cost| cost.decode_ms, |times| times.launch_ms)
    }

    #[test]
    fn each_block_gets_the_faster_provider_unless_the_change_costs_more() {
        assert_eq!(path(&[1.0, 5.0, 5.0, 1.0], &[2.0, 1.0, 1.0, 2.0], 0.1), [0, 1, 1, 0]);
        assert_eq!(path(&[1.0, 5.0, 5.0, 1.0], &[2.0, 1.0, 1.0, 2.0], 3.0), [1, 1, 1, 1], "two changes cost more");
        assert_eq!(path(&[1.0, 1.1, 1.0], &[2.0, 1.0, 2.0], 0.3), [0, 0, 0]);
        assert_eq!(path(&[1.0, 1.0], &[0.99, 0.99], 0.0), [0, 0], "within the noise");
        assert_eq!(path(&[1.0, 1.0], &[0.5, f64::INFINITY], 0.1), [1, 0], "what failed is not chosen");
    }
}
