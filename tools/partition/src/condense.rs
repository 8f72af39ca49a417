//! Merges weights that the same blocks read, so that the planner adds up fewer numbers.

use crate::BlockSpec;
use std::collections::BTreeMap;

/// Merges all weights that the same blocks read into one, with keys numbered from 0. The demand of any set of blocks stays the
/// same. A model has about ten weights per block, and the planner adds them up thousands of times.
pub fn condensed(mut blocks: Vec<BlockSpec>) -> Vec<BlockSpec> {
    let mut readers: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (reader, block) in blocks.iter().enumerate() {
        for (key, _) in &block.weights {
            let readers = readers.entry(*key).or_default();
            if readers.last() != Some(&reader) {
                readers.push(reader);
            }
        }
    }
    let mut numbers: BTreeMap<&[usize], u32> = BTreeMap::new();
    for block in &mut blocks {
        let mut condensed: BTreeMap<u32, u64> = BTreeMap::new();
        let mut weights = std::mem::take(&mut block.weights);
        weights.sort_unstable();
        weights.dedup_by_key(|(key, _)| *key);
        for (key, bytes) in weights {
            let next =
                u32::try_from(numbers.len()).expect("there are at most as many sets of readers as keys, which are u32");
            let number = *numbers.entry(&readers[&key]).or_insert(next);
            *condensed.entry(number).or_default() += bytes;
        }
        block.weights = condensed.into_iter().collect();
    }
    blocks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Demand;
    use crate::cost::tests::dense;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_set_of_blocks_has_the_same_demand(
            weights in proptest::collection::vec(proptest::collection::btree_map(0u32..12, 1u64..100, 0..8), 5),
            chosen in proptest::collection::vec(proptest::bool::ANY, 5),
        ) {
            let mut blocks = dense(3, 1000);
            for (block, weights) in blocks.iter_mut().zip(weights) {
                // Invariant: a key has one size in all blocks.
                block.weights = weights.into_keys().map(|key| (key, 10 + u64::from(key) * u64::from(key))).collect();
            }
            let fewer = condensed(blocks.clone());
            let demand_of_chosen = |blocks: &[BlockSpec]| {
                Demand::of(blocks.iter().zip(&chosen).filter(|(_, chosen)| **chosen).map(|(block, _)| block))
            };
            prop_assert_eq!(demand_of_chosen(&fewer), demand_of_chosen(&blocks));
            prop_assert!(fewer.iter().zip(&blocks).all(|(a, b)| a.weights.len() <= b.weights.len()));
        }
    }

    #[test]
    fn weights_with_the_same_readers_are_merged() {
        let mut blocks = dense(2, 1000);
        blocks[1].weights = vec![(1, 10), (2, 20), (9, 5)];
        blocks[2].weights = vec![(30, 30), (40, 40), (9, 5)];
        let fewer = condensed(blocks);
        // Key 0 belongs to the embedding.
        assert_eq!(fewer[1].weights, [(1, 30), (2, 5)]);
        assert_eq!(fewer[2].weights, [(2, 5), (3, 70)]);
    }
}
