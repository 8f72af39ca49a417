//! Chooses where blocks begin: one block per layer if the model has token mixers, else one per weighted region of the
//! spine.

use crate::cut_points::{CutCandidate, best_cut, candidates, least_live};
use crate::mixers::{Mixer, find_mixers};
use crate::segmentation::BlockKind;
use crate::spine::{Spine, SpinePosition};
use crate::{NodeId, StatePair};
use hpp_schema::Shape;
use std::collections::BTreeSet;
use std::ops::{Range, RangeInclusive};

/// The cuts between blocks: block `i` holds the positions `at[i - 1]..at[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cuts {
    pub at: Vec<usize>,
    pub kinds: Vec<BlockKind>,
    pub notes: Vec<String>,
}

/// Maximum number of blocks of a model without layers; a planner gains nothing from more.
const MAX_BODY_BLOCKS: usize = 128;

impl Cuts {
    /// No cuts: the whole model is one block.
    pub fn single_block() -> Self {
        let notes = vec!["no node between inputs and outputs computes with weights: the model is one block".to_owned()];
        Cuts { at: vec![], kinds: vec![BlockKind::Body(0)], notes }
    }

    /// The block at a position.
    pub fn block(&self, position: usize) -> usize {
        self.at.partition_point(|at| *at <= position)
    }
}

/// Chooses the blocks of a model with a spine.
pub(crate) fn choose_cuts(spine: &Spine, states: &[StatePair]) -> Cuts {
    let mixers = find_mixers(spine, states);
    if mixers.is_empty() { body_cuts(spine) } else { layer_cuts(spine, &mixers) }
}

fn layer_cuts(spine: &Spine, mixers: &[Mixer]) -> Cuts {
    let mut at: Vec<usize> =
        mixers.windows(2).map(|pair| best_cut(spine, pair[0].last + 1..=pair[1].first.max(pair[0].last + 1))).collect();
    let mut notes = vec![];
    for (i, pair) in mixers.windows(2).enumerate() {
        if candidates(spine, pair[0].last + 1..=pair[1].first).is_empty() {
            notes.push(format!(
                "no single node separates layers {i} and {}: cut where the fewest values are live",
                i + 1
            ));
        }
    }
    let first = first_layer_start(spine, mixers[0].first);
    let head = head_start(spine, mixers, &at);
    let mut kinds: Vec<BlockKind> = (0..mixers.len() as u32).map(BlockKind::Layer).collect();
    if has_entry(spine) || (0..first).any(|p| has_node_at(spine, p)) {
        at.insert(0, first);
        kinds.insert(0, BlockKind::Embedding);
    }
    if let Some(head) = head {
        at.push(head);
        kinds.push(BlockKind::Head);
    }
    Cuts { at, kinds, notes }
}

fn has_entry(spine: &Spine) -> bool {
    spine.positions.contains(&SpinePosition::Entry)
}

fn has_node_at(spine: &Spine, position: usize) -> bool {
    spine.positions.contains(&SpinePosition::At(position))
}

/// The start of the first layer: the last cut with the fewest live values before the first mixer. 0 if every cut has more live values than the
/// start of the spine.
fn first_layer_start(spine: &Spine, mixer: usize) -> usize {
    let found = candidates(spine, 0..=mixer);
    let best = found.iter().rev().min_by_key(|c| c.live);
    best.filter(|c| c.live <= spine.live[0]).map_or(0, |c| c.at)
}

/// The start of the head. It leaves as many weighted nodes after the mixer of the last layer as a similar earlier layer has. With a single layer,
/// the head begins at the last weighted dominator.
fn head_start(spine: &Spine, mixers: &[Mixer], layer_starts: &[usize]) -> Option<usize> {
    let last = mixers.last()?.last;
    let end = spine.dominators.last().and_then(|n| spine.position(*n))?;
    let weighted = WeightedPositions::of(spine);
    let found = candidates(spine, last + 1..=end);
    let has_weights_after = |c: &&CutCandidate| weighted.between(c.at, usize::MAX) > 0;
    let best = if layer_starts.is_empty() {
        let final_one = spine.dominators.iter().rev().find(|n| spine.flow.is_weighted(**n))?;
        let end = spine.position(*final_one)?;
        found.iter().rev().filter(|c| c.at <= end).min_by_key(|c| c.live)
    } else {
        let widest = layer_starts.iter().map(|at| spine.live[*at]).max().unwrap_or(u64::MAX);
        let narrow: Vec<&CutCandidate> = found.iter().filter(|c| c.live <= widest).collect();
        let tail = similar_tail(spine, &weighted, &tails(mixers, layer_starts), last + 1, &narrow)?;
        let usual = weighted.between(tail.start, tail.end);
        let usual_length = path_length(spine, tail.start, tail.end);
        narrow.into_iter().min_by_key(|c| {
            let length = path_length(spine, last + 1, c.at).abs_diff(usual_length);
            (weighted.between(last + 1, c.at).abs_diff(usual), c.live, length)
        })
    };
    best.filter(has_weights_after).map(|c| c.at)
}

/// The tails of all layers but the last: the positions after the mixer.
fn tails(mixers: &[Mixer], layer_starts: &[usize]) -> Vec<Range<usize>> {
    mixers.iter().zip(layer_starts).map(|(mixer, next)| mixer.last + 1..*next).collect()
}

/// Finds the earlier layer whose tail resembles the tail of the last layer, which begins at position `from`. Returns that layer's tail. It is not
/// always the layer before the last: dense layers and mixtures of experts may alternate.
///
/// A tail qualifies if its matrices have the same shapes as the first matrices after `from`, and a cut follows these matrices. The tail of the
/// layer before the last also qualifies if a cut follows as many weighted nodes, with further weights after the cut (layers may be quantized
/// differently). Of several, the tail with the most weighted nodes is returned, then the latest. If none qualifies, it is the tail of the layer
/// before the last.
fn similar_tail(
    spine: &Spine,
    weighted: &WeightedPositions,
    tails: &[Range<usize>],
    from: usize,
    cuts: &[&CutCandidate],
) -> Option<Range<usize>> {
    let after = weighted.nodes(from, usize::MAX);
    let sizes: BTreeSet<usize> = cuts.iter().map(|c| weighted.between(from, c.at)).collect();
    let nodes = |tail: &Range<usize>| weighted.nodes(tail.start, tail.end);
    let has_same_shapes = |tail: &&Range<usize>| {
        let nodes = nodes(tail);
        let first = after.get(..nodes.len()).filter(|_| !nodes.is_empty() && sizes.contains(&nodes.len()));
        first.is_some_and(|first| matrix_shapes(spine, nodes).is_some_and(|s| Some(s) == matrix_shapes(spine, first)))
    };
    let previous = tails.last()?;
    let size = nodes(previous).len();
    let has_same_size = size < after.len() && sizes.contains(&size);
    let similar = tails.iter().filter(has_same_shapes).chain(has_same_size.then_some(previous));
    Some(similar.max_by_key(|tail| nodes(tail).len()).unwrap_or(previous).clone())
}

/// The shapes of the matrices that each of these nodes computes with; `None` if one is unknown.
fn matrix_shapes(spine: &Spine, nodes: &[NodeId]) -> Option<Vec<Vec<Shape>>> {
    let graph = spine.graph();
    let matrices = |id: &NodeId| graph.node(*id).reads().filter(|v| spine.flow.weights.is_matrix(graph, *v));
    nodes.iter().map(|id| matrices(id).map(|v| graph.value(v).shape.clone()).collect()).collect()
}

/// The nodes that compute with matrix weights, in the order of their positions.
struct WeightedPositions {
    positions: Vec<usize>,
    nodes: Vec<NodeId>,
}

impl WeightedPositions {
    /// All of a spine.
    fn of(spine: &Spine) -> Self {
        let nodes = spine.graph().node_ids().filter(|n| spine.flow.is_weighted(*n));
        let mut found: Vec<(usize, NodeId)> = nodes.filter_map(|n| Some((spine.position(n)?, n))).collect();
        found.sort_unstable();
        let (positions, nodes) = found.into_iter().unzip();
        WeightedPositions { positions, nodes }
    }

    /// The nodes at positions from `from` to before `to`.
    fn nodes(&self, from: usize, to: usize) -> &[NodeId] {
        let index = |position: usize| self.positions.partition_point(|p| *p < position);
        self.nodes.get(index(from)..index(to)).unwrap_or_default()
    }

    /// How many nodes are at positions from `from` to before `to`.
    fn between(&self, from: usize, to: usize) -> usize {
        self.nodes(from, to).len()
    }
}

/// A range of positions with weighted nodes: one dominator, or the region between two dominators.
#[derive(Clone, Debug)]
struct WeightedRegion {
    first: usize,
    last: usize,
    weighted: usize,
    /// The region is a single dominator.
    single: bool,
}

fn body_cuts(spine: &Spine) -> Cuts {
    let weighted = WeightedPositions::of(spine);
    let regions = regions(spine, &weighted);
    if regions.is_empty() {
        return Cuts::single_block();
    }
    let mut at = vec![];
    let mut notes = vec![];
    for (i, region) in regions.iter().enumerate() {
        if i > 0 {
            let gap = regions[i - 1].last + 1..=region.first;
            let leaving_regions = region.single && !regions[i - 1].single && i > 1 && !at.is_empty();
            let usual = || path_length(spine, regions[i - 2].last + 1, at[at.len() - 1]);
            at.push(if leaving_regions { cut_after(spine, gap, usual()) } else { best_cut(spine, gap) });
        }
        if region.weighted > 8 && region.weighted * 2 > weighted.positions.len() {
            notes.push("skip connections span most of the model: cut where the fewest values are live".to_owned());
            at.extend(cuts_inside(spine, region, &weighted));
        }
    }
    let single_first = regions.len() > 1 && regions[0].single && !regions[1].single;
    let single_last = regions.len() > 1 && regions[regions.len() - 1].single && !regions[regions.len() - 2].single;
    at.dedup();
    at.retain(|at| spine.live_untyped[*at] == 0);
    let at = thin_out(spine, at);
    let kinds = body_kinds(at.len() + 1, single_first, single_last);
    Cuts { at, kinds, notes }
}

/// Number of nodes between two positions that are on a path from entry to output.
fn path_length(spine: &Spine, from: usize, to: usize) -> usize {
    (from..to).filter(|p| spine.on_path.get(*p) == Some(&true)).count()
}

/// The cut that ends the tail of the last block: among the cuts with the fewest live values, the one after about `length` nodes, so that this tail
/// is as long as the tails of the other blocks.
fn cut_after(spine: &Spine, gap: RangeInclusive<usize>, length: usize) -> usize {
    let found = candidates(spine, gap.clone());
    let off = |c: &CutCandidate| path_length(spine, *gap.start(), c.at).abs_diff(length);
    found.iter().min_by_key(|c| (c.live, off(c))).map_or_else(|| best_cut(spine, gap.clone()), |c| c.at)
}

fn body_kinds(count: usize, stem: bool, head: bool) -> Vec<BlockKind> {
    let first_body = usize::from(stem && count > 1);
    (0..count)
        .map(|i| match i {
            _ if i < first_body => BlockKind::Stem,
            _ if head && count > 1 && i == count - 1 => BlockKind::Head,
            _ => BlockKind::Body((i - first_body) as u32),
        })
        .collect()
}

fn regions(spine: &Spine, weighted: &WeightedPositions) -> Vec<WeightedRegion> {
    let mut dominators: Vec<usize> = spine.dominators.iter().filter_map(|n| spine.position(*n)).collect();
    dominators.sort_unstable();
    let mut regions: Vec<WeightedRegion> = vec![];
    let mut last_gap = None;
    for position in weighted.positions.iter().copied() {
        let single = dominators.binary_search(&position).is_ok();
        let gap = dominators.partition_point(|d| *d <= position);
        match regions.last_mut() {
            Some(region) if !single && last_gap == Some(gap) => {
                region.last = position;
                region.weighted += 1;
            }
            // Nodes that feed the spine from the side share the position of their consumer.
            Some(region) if region.last == position => region.weighted += 1,
            _ => regions.push(WeightedRegion { first: position, last: position, weighted: 1, single }),
        }
        last_gap = (!single).then_some(gap);
    }
    regions
}

/// Cuts a wide region into pieces of about four weighted nodes: near each even division, at the position with the
/// fewest live values.
fn cuts_inside(spine: &Spine, region: &WeightedRegion, weighted: &WeightedPositions) -> Vec<usize> {
    let inside: Vec<usize> =
        weighted.positions.iter().copied().filter(|p| (region.first..=region.last).contains(p)).collect();
    let pieces = (inside.len() / 4).clamp(2, 16);
    let mut cuts: Vec<usize> = vec![];
    for piece in 1..pieces {
        let even = piece * inside.len() / pieces;
        let slack = (inside.len() / pieces / 2).max(1);
        let from = inside[even.saturating_sub(slack)] + 1;
        let to = inside[(even + slack - 1).min(inside.len() - 1)];
        let from = from.max(cuts.last().map_or(0, |c| c + 1));
        if from <= to {
            cuts.push(least_live(spine, from..=to));
        }
    }
    cuts
}

/// Drops cuts so that fewer than [`MAX_BODY_BLOCKS`] remain and blocks hold comparable bytes of weights.
fn thin_out(spine: &Spine, at: Vec<usize>) -> Vec<usize> {
    if at.len() < MAX_BODY_BLOCKS {
        return at;
    }
    let mut bytes = vec![0u64; at.len() + 1];
    for id in spine.graph().node_ids() {
        if let Some(position) = spine.position(id) {
            let block = at.partition_point(|c| *c <= position);
            bytes[block] += crate::weights::weight_bytes(spine.graph(), spine.flow.weights.used_by(id)).max(1);
        }
    }
    let target = bytes.iter().sum::<u64>().div_ceil(MAX_BODY_BLOCKS as u64);
    let mut held = 0;
    let mut kept = vec![];
    for (cut, bytes) in at.into_iter().zip(bytes) {
        held += bytes;
        if held >= target {
            kept.push(cut);
            held = 0;
        }
    }
    kept
}
