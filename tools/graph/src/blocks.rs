//! Chooses where blocks begin: at layers where there are token mixers, else at weighted units of the spine.

use crate::boundary::{Candidate, best_cut, candidates, least_live};
use crate::mixers::{Mixer, find_mixers};
use crate::spine::{Place, Spine};
use crate::{BlockKind, StatePair};
use std::ops::RangeInclusive;

/// Where blocks begin: block `i` holds the positions from `at[i - 1]` to before `at[i]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cuts {
    pub at: Vec<usize>,
    pub kinds: Vec<BlockKind>,
    pub notes: Vec<String>,
}

/// More blocks than this say nothing a planner can use in a model without layers.
const MOST_BODY_BLOCKS: usize = 128;

impl Cuts {
    /// One block.
    pub fn nothing() -> Self {
        let notes = vec!["nothing between inputs and outputs computes with weights: the model is one block".to_owned()];
        Cuts { at: vec![], kinds: vec![BlockKind::Body(0)], notes }
    }

    /// The block of a position.
    pub fn block(&self, position: usize) -> usize {
        self.at.partition_point(|at| *at <= position)
    }
}

/// Decides the blocks of a model that has a spine.
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
                "no node carries everything between layers {i} and {}: cut where fewest values live",
                i + 1
            ));
        }
    }
    let first = first_layer_start(spine, mixers[0].first);
    let head = head_start(spine, mixers, &at);
    let mut kinds: Vec<BlockKind> = (0..mixers.len() as u32).map(BlockKind::Layer).collect();
    if has_entry(spine) || (0..first).any(|p| stands_at(spine, p)) {
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
    spine.place.contains(&Place::Entry)
}

fn stands_at(spine: &Spine, position: usize) -> bool {
    spine.place.contains(&Place::At(position))
}

/// The last cut with the fewest live values before the first mixer; before everything counts as one.
fn first_layer_start(spine: &Spine, mixer: usize) -> usize {
    let found = candidates(spine, 0..=mixer);
    let best = found.iter().rev().min_by_key(|c| c.live);
    best.filter(|c| c.live <= spine.live[0]).map_or(0, |c| c.at)
}

/// The head follows as many weighted nodes after the last mixer as a layer has; without another layer to compare with,
/// it is what follows the last weighted node that everything passes.
fn head_start(spine: &Spine, mixers: &[Mixer], layer_starts: &[usize]) -> Option<usize> {
    let last = mixers.last()?.last;
    let end = spine.chain.last().and_then(|n| spine.position(*n))?;
    let weighted = Weighted::of(spine);
    let found = candidates(spine, last + 1..=end);
    let has_weights_after = |c: &&Candidate| weighted.between(c.at, usize::MAX) > 0;
    let best = match (mixers.len().checked_sub(2), layer_starts.last()) {
        (Some(previous), Some(start)) => {
            let usual = weighted.between(mixers[previous].last + 1, *start);
            let widest = layer_starts.iter().map(|at| spine.live[*at]).max().unwrap_or(u64::MAX);
            let narrow = found.iter().filter(|c| c.live <= widest);
            let usual_length = path_length(spine, mixers[previous].last + 1, *start);
            narrow.min_by_key(|c| {
                let length = path_length(spine, last + 1, c.at).abs_diff(usual_length);
                (weighted.between(last + 1, c.at).abs_diff(usual), c.live, length)
            })
        }
        _ => {
            let final_one = spine.chain.iter().rev().find(|n| spine.flow.is_weighted(**n))?;
            let end = spine.position(*final_one)?;
            found.iter().rev().filter(|c| c.at <= end).min_by_key(|c| c.live)
        }
    };
    best.filter(has_weights_after).map(|c| c.at)
}

/// Positions of nodes that compute with matrix weights.
struct Weighted(Vec<usize>);

impl Weighted {
    fn of(spine: &Spine) -> Self {
        let nodes = spine.graph().node_ids().filter(|n| spine.flow.is_weighted(*n));
        let mut positions: Vec<usize> = nodes.filter_map(|n| spine.position(n)).collect();
        positions.sort_unstable();
        Weighted(positions)
    }

    fn between(&self, from: usize, to: usize) -> usize {
        self.0.partition_point(|p| *p < to).saturating_sub(self.0.partition_point(|p| *p < from))
    }
}

/// A stretch that holds weights: one node that everything passes, or a region between two such nodes.
#[derive(Clone, Debug)]
struct Unit {
    first: usize,
    last: usize,
    weighted: usize,
    /// A single node that everything passes.
    lone: bool,
}

fn body_cuts(spine: &Spine) -> Cuts {
    let weighted = Weighted::of(spine);
    let units = units(spine, &weighted);
    if units.is_empty() {
        return Cuts::nothing();
    }
    let mut at = vec![];
    let mut notes = vec![];
    for (i, unit) in units.iter().enumerate() {
        if i > 0 {
            let gap = units[i - 1].last + 1..=unit.first;
            let leaving_regions = unit.lone && !units[i - 1].lone && i > 1 && !at.is_empty();
            let usual = || path_length(spine, units[i - 2].last + 1, at[at.len() - 1]);
            at.push(if leaving_regions { cut_after(spine, gap, usual()) } else { best_cut(spine, gap) });
        }
        if unit.weighted > 8 && unit.weighted * 2 > weighted.0.len() {
            notes.push("values skip over most of the model: cut where fewest bytes live".to_owned());
            at.extend(cuts_inside(spine, unit, &weighted));
        }
    }
    let lone_first = units.len() > 1 && units[0].lone && !units[1].lone;
    let lone_last = units.len() > 1 && units[units.len() - 1].lone && !units[units.len() - 2].lone;
    at.dedup();
    let at = thin_out(spine, at);
    let kinds = body_kinds(at.len() + 1, lone_first, lone_last);
    Cuts { at, kinds, notes }
}

/// Nodes on the path from entry to output between two positions.
fn path_length(spine: &Spine, from: usize, to: usize) -> usize {
    (from..to).filter(|p| spine.on_path.get(*p) == Some(&true)).count()
}

/// The narrowest cut after about this many nodes: what follows the last block is as long as after the others.
fn cut_after(spine: &Spine, gap: RangeInclusive<usize>, length: usize) -> usize {
    let found = candidates(spine, gap.clone());
    let off = |c: &Candidate| path_length(spine, *gap.start(), c.at).abs_diff(length);
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

fn units(spine: &Spine, weighted: &Weighted) -> Vec<Unit> {
    let mut gates: Vec<usize> = spine.chain.iter().filter_map(|n| spine.position(*n)).collect();
    gates.sort_unstable();
    let mut units: Vec<Unit> = vec![];
    let mut last_region = None;
    for position in weighted.0.iter().copied() {
        let lone = gates.binary_search(&position).is_ok();
        let region = gates.partition_point(|g| *g <= position);
        match units.last_mut() {
            Some(unit) if !lone && last_region == Some(region) => {
                unit.last = position;
                unit.weighted += 1;
            }
            // Several nodes share one position where side nodes stand before their consumer.
            Some(unit) if unit.last == position => unit.weighted += 1,
            _ => units.push(Unit { first: position, last: position, weighted: 1, lone }),
        }
        last_region = (!lone).then_some(region);
    }
    units
}

/// Cuts a wide region into pieces of a few weighted nodes, each where the fewest bytes live near the even place.
fn cuts_inside(spine: &Spine, unit: &Unit, weighted: &Weighted) -> Vec<usize> {
    let inside: Vec<usize> = weighted.0.iter().copied().filter(|p| (unit.first..=unit.last).contains(p)).collect();
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

/// Keeps at most a bounded number of cuts, so that blocks have comparable weight.
fn thin_out(spine: &Spine, at: Vec<usize>) -> Vec<usize> {
    if at.len() < MOST_BODY_BLOCKS {
        return at;
    }
    let mut bytes = vec![0u64; at.len() + 1];
    for id in spine.graph().node_ids() {
        if let Some(position) = spine.position(id) {
            let block = at.partition_point(|c| *c <= position);
            bytes[block] += crate::weights::weight_bytes(spine.graph(), spine.flow.weights.drawn_by(id)).max(1);
        }
    }
    let target = bytes.iter().sum::<u64>().div_ceil(MOST_BODY_BLOCKS as u64);
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
