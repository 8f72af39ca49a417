//! Groups blocks into partitions: runs of neighbours on one device, with additional cuts on request.

use crate::{BlockSpec, DeviceId};
use std::ops::Range;

/// A run of blocks that becomes one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Run {
    /// Blocks, by position.
    pub blocks: Range<usize>,
    /// Where they compute.
    pub device: DeviceId,
}

/// The fewest partitions of this placement, or `at_least` of them (at most one per block), of similar weight bytes: the sum of the
/// squares of their bytes is the smallest possible.
pub fn runs(blocks: &[BlockSpec], devices: &[DeviceId], at_least: usize) -> Vec<Run> {
    let fewest: Vec<Range<usize>> =
        (0..devices.len()).collect::<Vec<_>>().chunk_by(|a, b| devices[*a] == devices[*b]).map(as_range).collect();
    let ranges = match at_least.min(blocks.len()) {
        count if count > fewest.len() => divide_evenly(blocks, &fewest, count),
        _ => fewest,
    };
    ranges.into_iter().map(|blocks| Run { device: devices[blocks.start], blocks }).collect()
}

fn as_range(neighbours: &[usize]) -> Range<usize> {
    neighbours[0]..neighbours[0] + neighbours.len()
}

/// Divides `runs`, which cover all blocks, into `count` ranges with the smallest sum of squared bytes, by dynamic programming over the
/// number of ranges and the block where the last one ends. `count` is at least the number of runs and at most that of blocks.
fn divide_evenly(blocks: &[BlockSpec], runs: &[Range<usize>], count: usize) -> Vec<Range<usize>> {
    let bytes_of = |block: &BlockSpec| block.weights.iter().map(|(_, bytes)| *bytes as f64).sum::<f64>().max(1.0);
    let bytes_before: Vec<f64> = std::iter::once(0.0)
        .chain(blocks.iter().scan(0.0, |sum, block| {
            *sum += bytes_of(block);
            Some(*sum)
        }))
        .collect();
    let run_start: Vec<usize> = runs.iter().flat_map(|run| run.clone().map(|_| run.start)).collect();
    // By the block where the last range ends: the smallest sum of squares with as many ranges as there were rounds.
    let mut least = vec![f64::INFINITY; blocks.len() + 1];
    least[0] = 0.0;
    // By number of ranges less one and by end: where the last range starts.
    let mut starts = Vec::with_capacity(count);
    for _ in 0..count {
        let of_end = |end: usize| {
            let sum = |start: usize| least[start] + (bytes_before[end] - bytes_before[start]).powi(2);
            let choices = (run_start[end - 1]..end).map(|start| (sum(start), start));
            choices.min_by(|a, b| a.0.total_cmp(&b.0)).unwrap_or((f64::INFINITY, 0))
        };
        let best: Vec<(f64, usize)> =
            std::iter::once((f64::INFINITY, 0)).chain((1..=blocks.len()).map(of_end)).collect();
        least = best.iter().map(|(sum, _)| *sum).collect();
        starts.push(best);
    }
    let mut end = blocks.len();
    let mut ranges: Vec<Range<usize>> = Vec::with_capacity(count);
    for best in starts.iter().rev() {
        ranges.push(best[end].1..end);
        end = best[end].1;
    }
    ranges.reverse();
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::dense;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_cover_every_block_once(layers in 1u32..10, on in proptest::collection::vec(0usize..3, 12), at_least in 0usize..16) {
            let blocks = dense(layers, 1000);
            let devices: Vec<DeviceId> =
                (0..blocks.len()).map(|i| if on[i] == 0 { DeviceId::Cpu } else { DeviceId::Gpu(on[i] - 1) }).collect();
            let runs = runs(&blocks, &devices, at_least);
            let mut next = 0;
            for run in &runs {
                prop_assert_eq!(run.blocks.start, next);
                prop_assert!(!run.blocks.is_empty());
                prop_assert!(run.blocks.clone().all(|i| devices[i] == run.device));
                next = run.blocks.end;
            }
            prop_assert_eq!(next, blocks.len());
            prop_assert!(runs.len() >= at_least.min(blocks.len()));
        }
    }

    #[test]
    fn blocks_at_one_place_are_one_partition() {
        let blocks = dense(4, 1000);
        assert_eq!(runs(&blocks, &[DeviceId::Cpu; 6], 0).len(), 1);
        let cut = runs(&blocks, &[DeviceId::Cpu; 6], 2);
        assert_eq!(cut[0].blocks, 0..3);
        assert_eq!(runs(&blocks, &[DeviceId::Cpu; 6], 99).len(), 6);
    }

    /// Sixteen equal layers beside a small and a large block become thirds, not a half and two quarters; a block as large as all others is alone, at
    /// either end; and a run that another device computes is never joined.
    #[test]
    fn more_partitions_have_similar_sizes() {
        let sizes = |bytes: &[u64], devices: &[DeviceId], count| -> Vec<u64> {
            let mut blocks = dense(bytes.len() as u32 - 2, 1);
            blocks.iter_mut().zip(bytes).for_each(|(block, bytes)| block.weights = vec![(0, *bytes)]);
            let range_bytes = |run: Run| bytes[run.blocks].iter().sum();
            runs(&blocks, devices, count).into_iter().map(range_bytes).collect()
        };
        let layers: Vec<u64> = [15].into_iter().chain([184; 16]).chain([200]).collect();
        assert_eq!(sizes(&layers, &[DeviceId::Cpu; 18], 3), [1119, 1104, 936]);
        let mut large = vec![1000, 10, 10, 10, 10, 10, 10];
        assert_eq!(sizes(&large, &[DeviceId::Cpu; 7], 4), [1000, 20, 20, 20]);
        large.reverse();
        assert_eq!(sizes(&large, &[DeviceId::Cpu; 7], 4), [20, 20, 20, 1000]);
        let on_two =
            [DeviceId::Cpu, DeviceId::Cpu, DeviceId::Gpu(0), DeviceId::Gpu(0), DeviceId::Gpu(0), DeviceId::Gpu(0)];
        assert_eq!(sizes(&[10; 6], &on_two, 3), [20, 20, 20]);
    }
}
