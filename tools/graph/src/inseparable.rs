//! Blocks that must be in one partition because one of them reads a state of another.

use crate::segmentation::{BlockState, Segmentation};
use crate::{CutError, Graph, PartitionGraph, cut};
use std::collections::BTreeSet;
use std::ops::Range;

/// The index of a part to join with its successor, because some part reads a state (before or after this pass's tokens were added) that another
/// part owns. The join brings the two parts closer; call again until the result is `None`: every part reads only its own states.
pub fn join_for_state(segmentation: &Segmentation, parts: &[PartitionGraph]) -> Option<usize> {
    (0..parts.len()).find_map(|reader| join_for_reader(segmentation, parts, reader))
}

fn join_for_reader(segmentation: &Segmentation, parts: &[PartitionGraph], reader: usize) -> Option<usize> {
    let part = &parts[reader];
    let foreign = part.foreign_states(segmentation);
    let is_read = |state: &BlockState| {
        let is_updated = |present| part.inputs.contains(&present) && !part.blocks.contains(&state.block);
        foreign.first() == Some(&state.pair.past) || state.pair.present.is_some_and(is_updated)
    };
    let block = segmentation.states.iter().find(|state| is_read(state))?.block;
    let owner = parts.iter().position(|part| part.blocks.contains(&block))?;
    Some(if owner > reader { reader } else { reader - 1 })
}

/// Cuts a model into as many parts as possible such that no part reads a state of another part. Usually this gives one part per block.
pub fn cut_finely(graph: &Graph, segmentation: &Segmentation) -> Result<Vec<PartitionGraph>, CutError> {
    let mut groups: Vec<Range<usize>> = (0..segmentation.blocks.len()).map(|at| at..at + 1).collect();
    loop {
        let parts = cut(graph, segmentation, &groups)?;
        let joins: BTreeSet<usize> =
            (0..parts.len()).filter_map(|reader| join_for_reader(segmentation, &parts, reader)).collect();
        if joins.is_empty() {
            return Ok(parts);
        }
        for index in joins.into_iter().rev() {
            let joined = groups.remove(index);
            groups[index].start = joined.start;
        }
    }
}
