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

/// The fewest partitions of this placement, or `at_least` of them (at most one per block). Additional cuts halve the run with
/// the most weight bytes at the block boundary nearest its middle.
pub fn runs(blocks: &[BlockSpec], devices: &[DeviceId], at_least: usize) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (i, device) in devices.iter().enumerate() {
        match runs.last_mut() {
            Some(run) if run.device == *device => run.blocks.end = i + 1,
            _ => runs.push(Run { blocks: i..i + 1, device: *device }),
        }
    }
    let bytes = |range: &Range<usize>| -> u64 {
        blocks[range.clone()].iter().flat_map(|block| &block.weights).map(|(_, bytes)| bytes.max(&1)).sum()
    };
    while runs.len() < at_least.min(blocks.len()) {
        let largest = (0..runs.len())
            .filter(|i| runs[*i].blocks.len() > 1)
            .max_by_key(|i| (bytes(&runs[*i].blocks), runs.len() - i));
        let Some(largest) = largest else { break };
        let range = runs[largest].blocks.clone();
        let middle = (range.start + 1..range.end)
            .min_by_key(|cut| bytes(&(range.start..*cut)).abs_diff(bytes(&(*cut..range.end))))
            .unwrap_or(range.start + 1);
        let device = runs[largest].device;
        runs[largest].blocks.end = middle;
        runs.insert(largest + 1, Run { blocks: middle..range.end, device });
    }
    runs
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
}
