//! Puts blocks that are the same graph with other weights into one class. Names do not matter; contents of large
//! weights do not matter.

use crate::Graph;
use crate::isomorphism::{BlockView, Mapping};
use crate::segment::Segmentation;
use std::collections::BTreeMap;

/// Blocks with equal class are the same graph with other weights. Numbered from 0 in the order of first appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClassId(pub u32);

/// Gives every block its class: candidates by hash, certainty by an explicit mapping.
pub(crate) fn classify(graph: &Graph, segmentation: &mut Segmentation) {
    let views: Vec<BlockView> = (0..segmentation.blocks.len()).map(|i| BlockView::of(graph, segmentation, i)).collect();
    let mut by_hash: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    let mut next = 0;
    for (i, view) in views.iter().enumerate() {
        let representatives = by_hash.entry(view.hash()).or_default();
        let same = representatives.iter().find(|r| Mapping::between(graph, &views[**r], view).is_some());
        segmentation.blocks[i].class = match same {
            Some(representative) => segmentation.blocks[*representative].class,
            None => {
                representatives.push(i);
                next += 1;
                ClassId(next - 1)
            }
        };
    }
}

/// The mapping from one block to another of its class: which node and which value plays the same part.
pub fn map_block(graph: &Graph, segmentation: &Segmentation, from: usize, to: usize) -> Option<Mapping> {
    Mapping::between(graph, &BlockView::of(graph, segmentation, from), &BlockView::of(graph, segmentation, to))
}
