//! Finds contradictory numbers in statistics, as in a profile edited by hand.

use super::derived::sum;
use super::{BoundaryStatistics, ExpertStatistics, NeuronStatistics, Statistics};
use crate::Finding;
use std::collections::BTreeSet;

impl Statistics {
    /// All contradictions, with places below `place`, such as `corpus.statistics`.
    pub fn check(&self, place: &str) -> Vec<Finding> {
        let mut found = PlacedFindings { place: place.to_owned(), findings: Vec::new() };
        found.list("boundaries", &self.boundaries, |b| &b.block, boundary);
        found.list("influence", &self.influence, |i| &i.block, |i, found| found.within("mean", i.mean, 0.0, 2.0));
        let entropy =
            |a: &super::AttentionEntropy, found: &mut PlacedFindings| found.within("mean", a.mean, 0.0, f64::MAX);
        found.list("attention", &self.attention, |a| &a.block, entropy);
        found.list("experts", &self.experts, |e| &e.block, experts);
        found.list("neurons", &self.neurons, |n| &n.block, neurons);
        found.findings
    }
}

/// Findings below a current place.
struct PlacedFindings {
    place: String,
    findings: Vec<Finding>,
}

impl PlacedFindings {
    fn list<T>(&mut self, name: &str, items: &[T], block: fn(&T) -> &String, check: impl Fn(&T, &mut PlacedFindings)) {
        let outer = self.place.clone();
        let mut seen = BTreeSet::new();
        for (at, item) in items.iter().enumerate() {
            self.place = format!("{outer}.{name}[{at}]");
            self.require(!block(item).is_empty(), "block", || "the name is empty".into());
            self.require(seen.insert(block(item)), "block", || format!("{:?} occurs twice", block(item)));
            check(item, self);
        }
        self.place = outer;
    }

    fn require(&mut self, holds: bool, field: &str, message: impl FnOnce() -> String) {
        if !holds {
            let place = format!("{}.{field}", self.place);
            self.findings.push(Finding::error(place, message()));
        }
    }

    fn within(&mut self, field: &str, value: f64, min: f64, max: f64) {
        self.require((min..=max).contains(&value), field, || match max {
            f64::MAX => format!("{value} is not a number of at least {min}"),
            _ => format!("{value} is not between {min} and {max}"),
        });
    }
}

fn boundary(b: &BoundaryStatistics, found: &mut PlacedFindings) {
    found.within("max_abs", b.max_abs, 0.0, f64::MAX);
    found.within("squares", b.squares, 0.0, f64::MAX);
    // Means may be off by rounding.
    let tolerance = 1.0 + 1e-6;
    found.within("mean_abs", b.mean_abs, 0.0, b.max_abs.max(0.0) * tolerance);
    found.within("mean", b.mean.abs(), 0.0, b.mean_abs.max(0.0) * tolerance);
}

fn experts(e: &ExpertStatistics, found: &mut PlacedFindings) {
    let (experts, visits) = (e.counts.len(), sum(&e.counts));
    let max_top_k = u64::try_from(experts).unwrap_or(u64::MAX);
    found.require((1..=max_top_k).contains(&u64::from(e.top_k)), "top_k", || {
        format!("{} of {experts} experts", e.top_k)
    });
    let expected = e.tokens.checked_mul(u64::from(e.top_k));
    found.require(Some(visits) == expected, "counts", || {
        format!("their sum is {visits} visits, which is not {} tokens with {} visits each", e.tokens, e.top_k)
    });
    let again = sum(&e.reuse_distances);
    found.require(again.checked_add(e.first_visits) == Some(visits), "reuse_distances", || {
        format!("{again} and {} first visits do not add up to {visits} visits", e.first_visits)
    });
    for (field, list) in [("reuse_distances", &e.reuse_distances), ("oracle_hits", &e.oracle_hits)] {
        found.require(list.len() <= experts, field, || format!("{} entries for {experts} experts", list.len()));
    }
    found.require(e.oracle_hits.is_sorted(), "oracle_hits", || "a larger cache cannot have fewer hits".into());
    let hits = e.oracle_hits.last().copied().unwrap_or(0);
    found.require(hits <= again, "oracle_hits", || {
        format!("{hits} hits exceed the {again} visits that are not first visits")
    });
}

fn neurons(n: &NeuronStatistics, found: &mut PlacedFindings) {
    for (at, active) in n.active.iter().enumerate().filter(|(_, active)| **active > n.tokens) {
        found.require(false, &format!("active[{at}]"), || format!("{active} of {} tokens", n.tokens));
    }
}
