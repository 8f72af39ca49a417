//! Figure: hit rates of expert caches with three policies: least recently used, the busiest experts fixed, and the optimum.

use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Table};
use crate::report::number::percent;
use crate::report::palette::{AMBER, BLUE, GREEN, Ink};
use crate::report::panel::{Mark, Panel, Shape};
use hpp_schema::ExpertStatistics;

/// Most cache sizes that are drawn.
const SIZES: usize = 32;
/// Hit rate of a useful cache.
const USEFUL: f64 = 0.9;

/// A cache policy: name, colour, shape, and its hits with a cache of 1, 2, ... experts.
struct Policy {
    name: &'static str,
    ink: Ink,
    shape: Shape,
    hits: fn(&ExpertStatistics) -> Vec<u64>,
}

const POLICIES: [Policy; 3] = [
    Policy { name: "best possible", ink: GREEN, shape: Shape::Diamond, hits: |layer| layer.oracle_hits.clone() },
    Policy { name: "least recently used", ink: BLUE, shape: Shape::Circle, hits: lru },
    Policy { name: "the busiest, fixed", ink: AMBER, shape: Shape::Square, hits: fixed },
];

/// Prefix sums.
fn sums(values: impl IntoIterator<Item = u64>) -> Vec<u64> {
    let add = |sum: &mut u64, value: u64| {
        *sum = sum.saturating_add(value);
        Some(*sum)
    };
    values.into_iter().scan(0, add).collect()
}

/// A cache of `n` experts hits visits with a reuse distance below `n`.
fn lru(layer: &ExpertStatistics) -> Vec<u64> {
    sums(layer.reuse_distances.iter().copied())
}

fn fixed(layer: &ExpertStatistics) -> Vec<u64> {
    let mut counts = layer.counts.clone();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    sums(counts)
}

/// Hit rate over all layers with 1, 2, ... up to `widest` cached experts per layer. A cache larger than the statistics cover hits
/// as often as the largest covered one.
fn rates(layers: &[ExpertStatistics], policy: &Policy, widest: usize) -> Vec<f64> {
    let visits: f64 = layers.iter().flat_map(|layer| &layer.counts).map(|count| *count as f64).sum();
    let mut hits = vec![0.0; widest];
    for layer in layers {
        let of_layer = (policy.hits)(layer);
        let last = of_layer.last().copied().unwrap_or(0);
        for (size, sum) in hits.iter_mut().enumerate() {
            *sum += of_layer.get(size).copied().unwrap_or(last) as f64;
        }
    }
    hits.into_iter().map(|hits| hits / visits.max(1.0)).collect()
}

/// Hit rates of all policies.
pub fn figure(layers: &[ExpertStatistics]) -> Figure {
    let widest = layers.iter().map(|layer| layer.counts.len()).max().unwrap_or(0).max(1);
    let curves = POLICIES.each_ref().map(|policy| rates(layers, policy, widest));
    let step = widest.div_ceil(SIZES);
    let sizes: Vec<usize> = (1..=widest).filter(|size| *size == 1 || size.is_multiple_of(step)).collect();
    let head = ["experts per layer in the cache"].into_iter().chain(POLICIES.iter().map(|policy| policy.name));
    let mut table = Table::new("Hit rates", head);
    let row = |size: &usize| {
        let rates = curves.iter().map(|rates| percent(rates[size - 1]));
        std::iter::once(size.to_string()).chain(rates).collect()
    };
    table.rows.extend(sizes.iter().map(row));
    Figure {
        id: "fig-hit-rates",
        title: "What a cache of experts would hit".to_owned(),
        caption: "Visits that find their expert in a cache of so many experts per layer. The fixed cache is chosen from these same \
                  visits and starts full; the others start empty before each prompt."
            .to_owned(),
        findings: findings(&curves, widest),
        legend: POLICIES.iter().map(|policy| Key::new(policy.ink, Form::Point(policy.shape), policy.name)).collect(),
        panels: vec![panel(&curves, &sizes, widest)],
        table: Some(table),
    }
}

fn panel(curves: &[Vec<f64>; 3], sizes: &[usize], widest: usize) -> Panel {
    let mut marks = Vec::new();
    for (policy, rates) in POLICIES.iter().zip(curves) {
        let points: Vec<(f64, f64)> = sizes.iter().map(|size| (*size as f64, 100.0 * rates[size - 1])).collect();
        marks.push(Mark::Line { points: points.clone(), ink: policy.ink, width: 2 });
        let some = points.len().div_ceil(8);
        let points = points.into_iter().step_by(some).collect();
        marks.push(Mark::Points { points, ink: policy.ink, shape: policy.shape });
    }
    Panel::new(
        "All layers together",
        "Hit rate in percent of visits by experts per layer in the cache, for three policies.",
        Axis::from_zero("experts of each layer in the cache", [widest as f64]),
        Axis::linear("percent of visits hit", 0.0, 104.0),
        marks,
    )
}

fn findings(curves: &[Vec<f64>; 3], widest: usize) -> Vec<String> {
    let of = |say: &dyn Fn(&Vec<f64>) -> String| {
        let each = POLICIES.iter().zip(curves).map(|(policy, rates)| format!("{} {}", policy.name, say(rates)));
        each.collect::<Vec<_>>().join("; ")
    };
    let half = of(&|rates| percent(rates[widest.div_ceil(2) - 1]));
    let needed = of(&|rates| match rates.iter().position(|rate| *rate >= USEFUL) {
        Some(at) => (at + 1).to_string(),
        None => "no size is enough".to_owned(),
    });
    vec![
        format!("With half of the experts: {half}."),
        format!("Experts needed for {} of the visits: {needed}.", percent(USEFUL)),
        "The gap to the best possible is what a better policy could still win.".to_owned(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_policy_counts_its_hits() {
        let layer = ExpertStatistics {
            block: "layers.0".into(),
            top_k: 1,
            tokens: 10,
            counts: vec![1, 6, 3],
            reuse_distances: vec![4, 2, 1],
            first_visits: 3,
            oracle_hits: vec![5, 7, 7],
        };
        let curves = POLICIES.each_ref().map(|policy| rates(std::slice::from_ref(&layer), policy, 4));
        assert_eq!(curves, [vec![0.5, 0.7, 0.7, 0.7], vec![0.4, 0.6, 0.7, 0.7], vec![0.6, 0.9, 1.0, 1.0]]);
        assert!(findings(&curves, 4)[1].contains("best possible no size is enough; least recently used no size"));
    }
}
