//! The order of places within and between regions: the first and last place of each region, and how often one place follows another.

use super::IntegerProgram;
use super::linear::LinearExpr;
use crate::schedule::may_merge;
use crate::{Phase, Placement};

/// The order of places in one phase.
pub(super) struct PlacementOrder {
    pub places: Vec<Placement>,
    /// By region and place: number of blocks.
    pub counts: Vec<Vec<LinearExpr>>,
    /// By region and place: number of runs of neighbours.
    pub runs: Vec<Vec<LinearExpr>>,
    /// Transitions between different places within a region.
    pub inside: Vec<Transition>,
    /// Transitions into the first block of a region, including those between equal places.
    pub between: Vec<Transition>,
}

/// How often a place follows another; places by position in [`PlacementOrder::places`].
pub(super) struct Transition {
    /// The region of the block that follows.
    pub region: usize,
    pub from: usize,
    pub to: usize,
    pub times: LinearExpr,
}

/// The first and the last place of a region: for each place, 1 if it is that place.
struct Ends {
    first: Vec<LinearExpr>,
    last: Vec<LinearExpr>,
}

/// Adds the order of places in a phase to the program.
pub(super) fn add_place_order(program: &mut IntegerProgram, phase: Phase) -> PlacementOrder {
    let places = program.places(phase);
    let mut order = PlacementOrder { counts: vec![], runs: vec![], inside: vec![], between: vec![], places };
    let mut previous: Option<Vec<LinearExpr>> = None;
    for region in 0..program.regions.len() {
        let counts: Vec<LinearExpr> = order.places.iter().map(|place| count(program, region, phase, *place)).collect();
        let Ends { first, last } = match program.regions[region].blocks.len() {
            1 => {
                order.runs.push(counts.clone());
                Ends { first: counts.clone(), last: counts.clone() }
            }
            blocks => add_walk(program, region, blocks, &counts, &mut order),
        };
        if let Some(previous) = previous {
            join_regions(program, region, &previous, &first, &mut order);
        }
        order.counts.push(counts);
        previous = Some(last);
    }
    order
}

/// Number of blocks of a region at a place.
fn count(program: &IntegerProgram, region: usize, phase: Phase, place: Placement) -> LinearExpr {
    let mut total = LinearExpr::default();
    for class in 0..program.regions[region].classes.len() {
        total.add(&program.count(region, class, |placement| placement.in_phase(phase) == place), 1.0);
    }
    total
}

/// Adds a walk through the places of a region: it has one first and one last place, and enters each place as often as it leaves it.
fn add_walk(
    program: &mut IntegerProgram,
    region: usize,
    blocks: usize,
    counts: &[LinearExpr],
    order: &mut PlacementOrder,
) -> Ends {
    let (first, last) = (one_of(program, counts.len()), one_of(program, counts.len()));
    let mut entered = first.clone();
    let mut left = last.clone();
    for (from, left) in left.iter_mut().enumerate() {
        for (to, entered) in entered.iter_mut().enumerate().filter(|(to, _)| *to != from) {
            let times = program.model.integer(blocks - 1);
            entered.add(&times, 1.0);
            left.add(&times, 1.0);
            order.inside.push(Transition { region, from, to, times });
        }
    }
    for place in 0..counts.len() {
        program.model.equal(&entered[place].clone().plus(&left[place], -1.0), 0.0);
        program.model.at_least(&counts[place], &entered[place]);
        program.model.at_least(&LinearExpr::default().plus(&entered[place], blocks as f64), &counts[place]);
    }
    order.runs.push(entered);
    Ends { first, last }
}

/// Variables for `places` places of which exactly one is 1 and the others are 0.
fn one_of(program: &mut IntegerProgram, places: usize) -> Vec<LinearExpr> {
    let indicators: Vec<LinearExpr> = (0..places).map(|_| program.model.integer(1)).collect();
    program.model.equal(&sum(&indicators), 1.0);
    indicators
}

fn sum<'a>(expressions: impl IntoIterator<Item = &'a LinearExpr>) -> LinearExpr {
    expressions.into_iter().fold(LinearExpr::default(), |sum, expression| sum.plus(expression, 1.0))
}

/// Joins the last place of the region before to the first place of this region.
fn join_regions(
    program: &mut IntegerProgram,
    region: usize,
    last: &[LinearExpr],
    first: &[LinearExpr],
    order: &mut PlacementOrder,
) {
    let number = first.len();
    let pairs: Vec<Vec<LinearExpr>> =
        (0..number).map(|_| (0..number).map(|_| program.model.nonnegative(0.0)).collect()).collect();
    for place in 0..number {
        let leaving = sum(&pairs[place]);
        let entering = sum(pairs.iter().map(|row| &row[place]));
        program.model.equal(&leaving.plus(&last[place], -1.0), 0.0);
        program.model.equal(&entering.plus(&first[place], -1.0), 0.0);
    }
    for (from, row) in pairs.into_iter().enumerate() {
        let transitions = row.into_iter().enumerate();
        order.between.extend(transitions.map(|(to, times)| Transition { region, from, to, times }));
    }
}

impl PlacementOrder {
    /// Number of partitions at a place: runs if neighbours merge, else blocks.
    pub fn partitions(&self, program: &IntegerProgram, place: usize) -> LinearExpr {
        match may_merge(program.problem, self.places[place]) {
            true => {
                self.runs_cut_at(place, |region| program.problem.cuts.contains(&program.regions[region].blocks.start))
            }
            false => sum(self.counts.iter().map(|counts| &counts[place])),
        }
    }

    /// Number of runs of neighbours at a place, across regions.
    pub fn runs_at(&self, place: usize) -> LinearExpr {
        self.runs_cut_at(place, |_| false)
    }

    /// Number of runs of neighbours at a place, with a new run at the start of the regions that `is_cut` selects.
    fn runs_cut_at(&self, place: usize, is_cut: impl Fn(usize) -> bool) -> LinearExpr {
        let runs = sum(self.runs.iter().map(|runs| &runs[place]));
        let joins = self.between.iter().filter(|pair| pair.from == place && pair.to == place && !is_cut(pair.region));
        joins.fold(runs, |sum, pair| sum.plus(&pair.times, -1.0))
    }
}
