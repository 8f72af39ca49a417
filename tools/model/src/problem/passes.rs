//! The prefill passes of a prompt, and the work of each block in each of them.

use crate::costs::{CostCounter, PassPoint};
use crate::{Analysis, Scenario};
use hpp_partition::Work;

/// Number of passes whose work is counted node by node; the work of others is interpolated.
const MAX_COUNTED: usize = 16;

/// Tokens of each prefill pass.
pub fn passes(analysis: &Analysis, scenario: Scenario) -> Vec<u64> {
    let chunk = analysis.prefill_chunk(scenario).unwrap_or(scenario.prompt).max(1);
    hpp_schema::prompt_passes(scenario.prompt, chunk)
}

/// Work of each block in each pass: `[pass][block]`.
pub fn work(analysis: &Analysis, batch: u64, passes: &[u64]) -> Vec<Vec<Work>> {
    let counter = CostCounter::new(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, batch);
    let count = |at: usize| -> Vec<Work> {
        let moment = PassPoint::new(&counter, passes[at], passes[..at].iter().sum());
        (0..analysis.segmentation.blocks.len()).map(|index| counter.work(index, &moment)).collect()
    };
    let last = passes.len().saturating_sub(1);
    let counted: Vec<(usize, Vec<Work>)> = sample_positions(last).into_iter().map(|at| (at, count(at))).collect();
    (0..passes.len()).map(|at| interpolated(&counted, at)).collect()
}

/// Passes to count: all if they are few, else evenly spaced ones up to the second to last, and the last, which may be
/// shorter.
fn sample_positions(last: usize) -> Vec<usize> {
    if last < MAX_COUNTED {
        return (0..=last).collect();
    }
    let mut positions: Vec<usize> = (0..MAX_COUNTED).map(|i| i * (last - 1) / (MAX_COUNTED - 1)).collect();
    positions.push(last);
    positions
}

/// The work of pass `at`, interpolated linearly: work is linear in the tokens that the states hold, and all passes
/// except the last have equal length.
fn interpolated(counted: &[(usize, Vec<Work>)], at: usize) -> Vec<Work> {
    let next = counted.iter().position(|(position, _)| *position >= at).unwrap_or(0);
    let (right, upper) = &counted[next];
    if *right == at {
        return upper.clone();
    }
    let (left, lower) = &counted[next - 1];
    let part = (at - left) as f64 / (right - left) as f64;
    let mix = |a: u64, b: u64| (a as f64 + (b as f64 - a as f64) * part) as u64;
    let both = lower.iter().zip(upper);
    both.map(|(a, b)| Work { flops: mix(a.flops, b.flops), bytes: mix(a.bytes, b.bytes) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_passes_are_all_counted_and_many_are_sampled() {
        assert_eq!(sample_positions(0), [0]);
        assert_eq!(sample_positions(15), (0..16).collect::<Vec<_>>());
        let many = sample_positions(511);
        assert_eq!((many[0], many[15], many[16], many.len()), (0, 510, 511, 17));
    }

    #[test]
    fn work_is_interpolated_linearly() {
        let work = |flops| vec![Work { flops, bytes: 7 }];
        let counted = [(0, work(100)), (4, work(500)), (5, work(10))];
        let flops: Vec<u64> = (0..6).map(|at| interpolated(&counted, at)[0].flops).collect();
        assert_eq!(flops, [100, 200, 300, 400, 500, 10]);
    }
}
