//! The passes that take a prompt in, and what each block does in each of them.

use crate::costs::{Counter, Moment};
use crate::{Analysis, Load};
use hpp_partition::Work;

/// Passes whose work is counted node by node; with more of them the rest lies between.
const MOST_COUNTED: usize = 16;

/// Tokens of each pass that takes the prompt in.
pub fn passes(analysis: &Analysis, load: Load) -> Vec<u64> {
    let chunk = analysis.prefill_chunk(load).unwrap_or(load.prompt).max(1);
    let whole = usize::try_from(load.prompt / chunk).unwrap_or(usize::MAX);
    let mut passes = vec![chunk; whole];
    passes.extend(Some(load.prompt % chunk).filter(|rest| *rest > 0));
    passes
}

/// Work of each block in each pass: `[pass][block]`.
pub fn work(analysis: &Analysis, batch: u64, passes: &[u64]) -> Vec<Vec<Work>> {
    let counter = Counter::new(&analysis.graph, &analysis.segmentation, &analysis.states, &analysis.inputs, batch);
    let count = |at: usize| -> Vec<Work> {
        let moment = Moment::new(&counter, passes[at], passes[..at].iter().sum());
        (0..analysis.segmentation.blocks.len()).map(|index| counter.work(index, &moment)).collect()
    };
    let last = passes.len().saturating_sub(1);
    let counted: Vec<(usize, Vec<Work>)> = stops(last).into_iter().map(|at| (at, count(at))).collect();
    (0..passes.len()).map(|at| between(&counted, at)).collect()
}

/// Positions to count at: all of a few, else evenly spaced ones and the last two, of which the last may be shorter.
fn stops(last: usize) -> Vec<usize> {
    if last < MOST_COUNTED {
        return (0..=last).collect();
    }
    let mut stops: Vec<usize> = (0..MOST_COUNTED).map(|i| i * (last - 1) / (MOST_COUNTED - 1)).collect();
    stops.push(last);
    stops
}

/// Work grows linearly with what is in the states, and passes but the last are of one length.
fn between(counted: &[(usize, Vec<Work>)], at: usize) -> Vec<Work> {
    let next = counted.iter().position(|(stop, _)| *stop >= at).unwrap_or(0);
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
    fn few_passes_are_all_counted_and_many_end_at_the_last() {
        assert_eq!(stops(0), [0]);
        assert_eq!(stops(15), (0..16).collect::<Vec<_>>());
        let many = stops(511);
        assert_eq!((many[0], many[15], many[16], many.len()), (0, 510, 511, 17));
    }

    #[test]
    fn what_lies_between_is_on_the_line() {
        let work = |flops| vec![Work { flops, bytes: 7 }];
        let counted = [(0, work(100)), (4, work(500)), (5, work(10))];
        let flops: Vec<u64> = (0..6).map(|at| between(&counted, at)[0].flops).collect();
        assert_eq!(flops, [100, 200, 300, 400, 500, 10]);
    }
}
