//! Groups blocks that are the same graph with different weights into classes. Names and the contents of large weights
//! are ignored.

use crate::Graph;
use crate::isomorphism::{BlockView, Isomorphism};
use crate::segmentation::{ClassId, Segmentation};
use std::collections::BTreeMap;

/// Assigns a class to every block. A structural hash finds candidates, an explicit isomorphism confirms them.
pub(crate) fn classify(graph: &Graph, segmentation: &mut Segmentation) {
    let views: Vec<BlockView> = (0..segmentation.blocks.len()).map(|i| BlockView::of(graph, segmentation, i)).collect();
    let mut by_hash: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    let mut next = 0;
    for (i, view) in views.iter().enumerate() {
        let representatives = by_hash.entry(view.hash()).or_default();
        let same = representatives.iter().find(|r| Isomorphism::between(graph, &views[**r], view).is_some());
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

/// The isomorphism between two blocks of one class; `None` if there is none.
pub fn map_block(graph: &Graph, segmentation: &Segmentation, from: usize, to: usize) -> Option<Isomorphism> {
    Isomorphism::between(graph, &BlockView::of(graph, segmentation, from), &BlockView::of(graph, segmentation, to))
}
