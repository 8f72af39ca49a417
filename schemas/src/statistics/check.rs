//! What no corpus can have shown: numbers that contradict each other, as in a profile edited by hand.

use super::derived::sum;
use super::{BoundaryStatistics, ExpertStatistics, NeuronStatistics, Statistics};
use crate::{Finding, Severity};
use std::collections::BTreeSet;

impl Statistics {
    /// Everything that contradicts itself, with places that begin with `place` (`corpus.statistics`, say).
    pub fn check(&self, place: &str) -> Vec<Finding> {
        let mut found = Found { place: place.to_owned(), findings: Vec::new() };
        found.list("boundaries", &self.boundaries, |b| &b.block, boundary);
        found.list("influence", &self.influence, |i| &i.block, |i, found| found.within("mean", i.mean, 0.0, 2.0));
        let entropy = |a: &super::AttentionEntropy, found: &mut Found| found.within("mean", a.mean, 0.0, f64::MAX);
        found.list("attention", &self.attention, |a| &a.block, entropy);
        found.list("experts", &self.experts, |e| &e.block, experts);
        found.list("neurons", &self.neurons, |n| &n.block, neurons);
        found.findings
    }
}

/// Findings about one place.
struct Found {
    place: String,
    findings: Vec<Finding>,
}

impl Found {
    fn list<T>(&mut self, name: &str, items: &[T], block: fn(&T) -> &String, check: impl Fn(&T, &mut Found)) {
        let outer = self.place.clone();
        let mut seen = BTreeSet::new();
        for (at, item) in items.iter().enumerate() {
            self.place = format!("{outer}.{name}[{at}]");
            self.require(!block(item).is_empty(), "block", || "it has no name".into());
            self.require(seen.insert(block(item)), "block", || format!("{:?} occurs twice", block(item)));
            check(item, self);
        }
        self.place = outer;
    }

    fn require(&mut self, holds: bool, field: &str, message: impl FnOnce() -> String) {
        if !holds {
            let place = format!("{}.{field}", self.place);
            self.findings.push(Finding { severity: Severity::Error, place, message: message() });
        }
    }

    fn within(&mut self, field: &str, value: f64, least: f64, most: f64) {
        self.require((least..=most).contains(&value), field, || match most {
            f64::MAX => format!("{value} is no number from {least} up"),
            _ => format!("{value} is not between {least} and {most}"),
        });
    }
}

fn boundary(b: &BoundaryStatistics, found: &mut Found) {
    found.within("max_abs", b.max_abs, 0.0, f64::MAX);
    found.within("squares", b.squares, 0.0, f64::MAX);
    // Means are rounded sums.
    let room = 1.0 + 1e-6;
    found.within("mean_abs", b.mean_abs, 0.0, b.max_abs.max(0.0) * room);
    found.within("mean", b.mean.abs(), 0.0, b.mean_abs.max(0.0) * room);
}

fn experts(e: &ExpertStatistics, found: &mut Found) {
    let (experts, visits) = (e.counts.len(), sum(&e.counts));
    let most = u64::try_from(experts).unwrap_or(u64::MAX);
    found.require((1..=most).contains(&u64::from(e.top_k)), "top_k", || format!("{} of {experts} experts", e.top_k));
    let expected = e.tokens.checked_mul(u64::from(e.top_k));
    found.require(Some(visits) == expected, "counts", || {
        format!("they add up to {visits} visits, which {} tokens with {} each do not make", e.tokens, e.top_k)
    });
    let again = sum(&e.reuse_distances);
    found.require(again.checked_add(e.first_visits) == Some(visits), "reuse_distances", || {
        format!("{again} and {} first visits are not the {visits} visits that were counted", e.first_visits)
    });
    for (field, list) in [("reuse_distances", &e.reuse_distances), ("oracle_hits", &e.oracle_hits)] {
        found.require(list.len() <= experts, field, || format!("{} entries for {experts} experts", list.len()));
    }
    found.require(e.oracle_hits.is_sorted(), "oracle_hits", || "a larger cache never hits less".into());
    let hits = e.oracle_hits.last().copied().unwrap_or(0);
    found.require(hits <= again, "oracle_hits", || format!("{hits} hits, where {again} visits were not the first"));
}

fn neurons(n: &NeuronStatistics, found: &mut Found) {
    for (at, active) in n.active.iter().enumerate().filter(|(_, active)| **active > n.tokens) {
        found.require(false, &format!("active[{at}]"), || format!("{active} of {} tokens", n.tokens));
    }
}
