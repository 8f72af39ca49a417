//! Divides a model into blocks by structure: embedding, layers in order, head; or stem, body blocks and head where
//! there are no token mixers.
//!
//! Names decide only where the graph does not: whether neighbouring mixers are one layer ([`crate::mixers`]). Does not know files, devices or budgets.

use crate::assign;
use crate::blocks::{self, Cuts};
use crate::class;
use crate::flow::Flow;
use crate::segmentation::Segmentation;
use crate::spine::Spine;
use crate::{Graph, WeightUse, find_states};

/// Divides a model into blocks. Never fails: a model without recognisable structure becomes one block, with a message
/// in [`Segmentation::undecided`].
pub fn segment(graph: &Graph) -> Segmentation {
    let weights = WeightUse::of(graph);
    let states = find_states(graph, &weights);
    let spine = Spine::new(Flow::new(graph, &weights, &states), &states);
    let cuts = spine.as_ref().map_or_else(Cuts::single_block, |spine| blocks::choose_cuts(spine, &states));
    let assignment = assign::assign(graph, &weights, spine.as_ref(), &cuts);
    let mut segmentation = assign::build(graph, weights.clone(), states, cuts, assignment);
    class::classify(graph, &mut segmentation);
    segmentation
}
