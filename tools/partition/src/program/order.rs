//! The order of places within and between regions: the first and last place of each region, and how often one place follows another.

use super::Program;
use super::line::Line;
use crate::schedule::may_merge;
use crate::{Phase, Where};

/// The order of one phase.
pub(super) struct Order {
    pub places: Vec<Where>,
    /// By region and place: number of blocks.
    pub counts: Vec<Vec<Line>>,
    /// By region and place: number of runs of neighbours.
    pub runs: Vec<Vec<Line>>,
    /// (Region, place, next place, how often the one is followed by the other within the region).
    pub inside: Vec<(usize, usize, usize, Line)>,
    /// The same before the first block of a region, including equal places.
    pub between: Vec<(usize, usize, usize, Line)>,
}

/// Adds the order of a phase to the program.
pub(super) fn order(program: &mut Program, phase: Phase) -> Order {
    let places = program.places(phase);
    let mut order = Order { counts: vec![], runs: vec![], inside: vec![], between: vec![], places };
    let mut before: Option<Vec<Line>> = None;
    for region in 0..program.regions.len() {
        let counts: Vec<Line> = order.places.iter().map(|place| count(program, region, phase, *place)).collect();
        let (first, last) = match program.regions[region].blocks.len() {
            1 => {
                order.runs.push(counts.clone());
                (counts.clone(), counts.clone())
            }
            blocks => walk(program, region, blocks, &counts, &mut order),
        };
        if let Some(last) = before {
            join(program, region, &last, &first, &mut order);
        }
        order.counts.push(counts);
        before = Some(last);
    }
    order
}

fn count(program: &Program, region: usize, phase: Phase, place: Where) -> Line {
    let classes = 0..program.regions[region].classes.len();
    classes.fold(Line::default(), |sum, class| sum.plus(&program.count(region, class, |c| c.of(phase) == place), 1.0))
}

/// A walk through the places of a region: it has a first and a last place, and enters each place as often as it leaves it.
fn walk(
    program: &mut Program,
    region: usize,
    blocks: usize,
    counts: &[Line],
    order: &mut Order,
) -> (Vec<Line>, Vec<Line>) {
    let lines = &mut program.lines;
    let number = counts.len();
    let mut one_of = || {
        let ends: Vec<Line> = (0..number).map(|_| lines.whole(1)).collect();
        let all = ends.iter().fold(Line::default(), |sum, end| sum.plus(end, 1.0));
        lines.equal(&all, 1.0);
        ends
    };
    let (first, last) = (one_of(), one_of());
    let mut entered = first.clone();
    let mut left = last.clone();
    for (a, left) in left.iter_mut().enumerate() {
        for (b, entered) in entered.iter_mut().enumerate().filter(|(b, _)| *b != a) {
            let times = program.lines.whole(blocks - 1);
            entered.add(&times, 1.0);
            left.add(&times, 1.0);
            order.inside.push((region, a, b, times));
        }
    }
    for place in 0..number {
        program.lines.equal(&entered[place].clone().plus(&left[place], -1.0), 0.0);
        program.lines.at_least(&counts[place], &entered[place]);
        program.lines.at_least(&Line::default().plus(&entered[place], blocks as f64), &counts[place]);
    }
    order.runs.push(entered);
    (first, last)
}

/// Joins the last place of the region before to the first place of this one.
fn join(program: &mut Program, region: usize, last: &[Line], first: &[Line], order: &mut Order) {
    let number = first.len();
    let pairs: Vec<Vec<Line>> = (0..number).map(|_| (0..number).map(|_| program.lines.real(0.0)).collect()).collect();
    for place in 0..number {
        let leaving = pairs[place].iter().fold(Line::default(), |sum, pair| sum.plus(pair, 1.0));
        let coming = pairs.iter().fold(Line::default(), |sum, row| sum.plus(&row[place], 1.0));
        program.lines.equal(&leaving.plus(&last[place], -1.0), 0.0);
        program.lines.equal(&coming.plus(&first[place], -1.0), 0.0);
    }
    for (a, row) in pairs.into_iter().enumerate() {
        order.between.extend(row.into_iter().enumerate().map(|(b, pair)| (region, a, b, pair)));
    }
}

impl Order {
    /// Number of partitions at a place: runs if neighbours merge, else blocks.
    pub fn partitions(&self, program: &Program, place: usize) -> Line {
        match may_merge(program.problem, self.places[place]) {
            true => self.runs_but(place, |region| program.problem.cuts.contains(&program.regions[region].blocks.start)),
            false => self.counts.iter().fold(Line::default(), |sum, counts| sum.plus(&counts[place], 1.0)),
        }
    }

    /// Number of runs of neighbours at a place, across regions.
    pub fn bursts(&self, place: usize) -> Line {
        self.runs_but(place, |_| false)
    }

    /// Number of runs of neighbours at a place, with a new run at the start of selected regions.
    fn runs_but(&self, place: usize, begins: impl Fn(usize) -> bool) -> Line {
        let runs = self.runs.iter().fold(Line::default(), |sum, runs| sum.plus(&runs[place], 1.0));
        let kept = self.between.iter().filter(|(region, a, b, _)| *a == place && *b == place && !begins(*region));
        kept.fold(runs, |sum, (_, _, _, pair)| sum.plus(pair, -1.0))
    }
}
