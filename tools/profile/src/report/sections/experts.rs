//! Section: how often tokens are routed to each expert, and the hit rates of expert caches with three policies.

use crate::report::axis::Axis;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{count, label, percent, plain};
use crate::report::palette::{AMBER, BLUE, GREEN, HEAT, Look, MarkerShape};
use crate::report::panel::{Mark, Panel};
use crate::report::view::{NAME, ReportView};
use hpp_schema::ExpertStatistics;

/// Most cells in a row and in a column of the heat map.
const MOST_COLUMNS: usize = 256;
const MOST_ROWS: usize = 128;
/// Upper limits of the heat levels after "never", as multiples of an even share; the last level has none.
const LEVELS: [f64; 7] = [0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0];

/// Most cache sizes that are drawn.
const SIZES: usize = 32;
/// Hit rate of a useful cache.
const USEFUL: f64 = 0.9;

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    match view.profile.corpus.as_ref().map(|corpus| corpus.statistics.experts.as_slice()) {
        None => vec![SectionItem::Absent("No corpus was run: there are no statistics of experts.".to_owned())],
        Some([]) => vec![SectionItem::Absent("This model routes no tokens to experts.".to_owned())],
        Some(layers) => vec![SectionItem::Figure(heat_map(layers)), SectionItem::Figure(hit_rates(layers))],
    }
}

/// Experts of the layer that has most of them.
fn widest(layers: &[ExpertStatistics]) -> usize {
    layers.iter().map(|layer| layer.counts.len()).max().unwrap_or(0).max(1)
}

fn never_visited(layer: &ExpertStatistics) -> usize {
    layer.counts.iter().filter(|count| **count == 0).count()
}

/// Visits as multiples of an even share.
fn relative(layer: &ExpertStatistics) -> Vec<f64> {
    let visits: f64 = layer.counts.iter().map(|count| *count as f64).sum();
    let even = visits / layer.counts.len().max(1) as f64;
    layer.counts.iter().map(|count| if even > 0.0 { *count as f64 / even } else { 0.0 }).collect()
}

fn level(relative: f64) -> usize {
    if relative <= 0.0 { 0 } else { 1 + LEVELS.iter().filter(|end| relative > **end).count() }
}

fn heat_map(layers: &[ExpertStatistics]) -> Figure {
    let names = ["never", "to ⅛ ×", "to ¼ ×", "to ½ ×", "to 0.8 ×", "even", "to 2 ×", "to 4 ×", "more"];
    Figure {
        id: "fig-experts".into(),
        title: "Visits of each expert".into(),
        caption: "Visits of each expert as multiples of an even share of its layer's visits. Expert numbers of different layers \
                  have nothing to do with each other."
            .into(),
        findings: heat_findings(layers),
        legend: HEAT.iter().zip(names).map(|(ink, name)| Key::Area(*ink, name.to_owned())).collect(),
        panels: vec![heat_panel(layers)],
        table: Table::of(
            "Busiest experts of every layer",
            layers,
            &[
                ("layer", |layer| label(&layer.block, NAME)),
                ("experts", |layer| layer.counts.len().to_string()),
                ("of them per token", |layer| layer.top_k.to_string()),
                ("tokens", |layer| layer.tokens.to_string()),
                ("never visited", |layer| never_visited(layer).to_string()),
                ("busiest (expert: part of the visits)", busiest),
            ],
        ),
    }
}

fn heat_panel(layers: &[ExpertStatistics]) -> Panel {
    let widest = widest(layers);
    let (together, every) = (widest.div_ceil(MOST_COLUMNS), layers.len().div_ceil(MOST_ROWS));
    let rows: Vec<&ExpertStatistics> = layers.iter().step_by(every).collect();
    let mut bars = vec![Vec::new(); HEAT.len()];
    let mut labels = Vec::new();
    for (at, layer) in rows.iter().enumerate() {
        let y = (rows.len() - 1 - at) as f64;
        for (from, to, level) in runs(layer, together) {
            bars[level].push([(from, y - 0.5), (to, y + 0.5)]);
        }
        if at.is_multiple_of(rows.len().div_ceil(8)) {
            labels.push((y, label(&layer.block, 12)));
        }
    }
    let text = format!("Heat map of {} layers and up to {widest} experts; darker is busier.", layers.len());
    let (x, y) = (Axis::linear("expert", 0.0, widest as f64), Axis::rows(rows.len(), labels));
    let marks = bars.into_iter().zip(HEAT).map(|(bars, ink)| Mark::Bars { bars, ink }).collect();
    let height = (60.0 + 14.0 * rows.len() as f64).clamp(160.0, 460.0);
    Panel { height, ..Panel::new("Layers by experts", text, x, y, marks) }
}

/// Runs of neighbouring cells of a layer with the same heat level: (first expert, end, level). A cell shows the mean of `together` experts.
fn runs(layer: &ExpertStatistics, together: usize) -> Vec<(f64, f64, usize)> {
    let mut runs: Vec<(f64, f64, usize)> = Vec::new();
    for (at, cell) in relative(layer).chunks(together).enumerate() {
        let level = level(cell.iter().sum::<f64>() / cell.len() as f64);
        let from = (at * together) as f64;
        let to = from + cell.len() as f64;
        match runs.last_mut() {
            Some(last) if last.2 == level => last.1 = to,
            _ => runs.push((from, to, level)),
        }
    }
    runs
}

/// The four busiest experts of a layer with their parts of the visits.
fn busiest(layer: &ExpertStatistics) -> String {
    let visits: u64 = layer.counts.iter().fold(0, |sum, count| sum.saturating_add(*count));
    let mut order: Vec<usize> = (0..layer.counts.len()).collect();
    order.sort_by_key(|expert| std::cmp::Reverse(layer.counts[*expert]));
    let part = |expert: &usize| percent(layer.counts[*expert] as f64 / visits.max(1) as f64);
    order.iter().take(4).map(|expert| format!("{expert}: {}", part(expert))).collect::<Vec<_>>().join(", ")
}

fn heat_findings(layers: &[ExpertStatistics]) -> Vec<String> {
    let mut findings = Vec::new();
    let all =
        layers.iter().flat_map(|layer| relative(layer).into_iter().enumerate().map(move |(at, v)| (layer, at, v)));
    if let Some((layer, expert, times)) = all.max_by(|a, b| a.2.total_cmp(&b.2)) {
        let (block, times) = (label(&layer.block, NAME), plain(times));
        findings.push(format!(
            "Busiest is expert {expert} of {block}, with {times} times an even share. The more even a row, the less it matters \
             which of its experts are kept near."
        ));
    }
    let never: usize = layers.iter().map(never_visited).sum();
    if never > 0 {
        findings.push(format!("{} never visited.", count(never, "expert was", "experts were")));
    }
    let widest = widest(layers);
    if widest > MOST_COLUMNS {
        findings.push(format!("Each cell is the mean of {} experts.", widest.div_ceil(MOST_COLUMNS)));
    }
    if layers.len() > MOST_ROWS {
        findings.push(format!("One layer in {} is drawn.", layers.len().div_ceil(MOST_ROWS)));
    }
    findings
}

/// A cache policy, and its hits with a cache of 1, 2, ... experts.
struct Policy {
    name: &'static str,
    look: Look,
    hits: fn(&ExpertStatistics) -> Vec<u64>,
}

const POLICIES: [Policy; 3] = [
    Policy { name: "best possible", look: Look(GREEN, MarkerShape::Diamond), hits: |layer| layer.oracle_hits.clone() },
    // A cache of n experts hits visits with a reuse distance below n.
    Policy {
        name: "least recently used",
        look: Look(BLUE, MarkerShape::Circle),
        hits: |layer| sums(&layer.reuse_distances),
    },
    Policy { name: "the busiest, fixed", look: Look(AMBER, MarkerShape::Square), hits: fixed },
];

/// Prefix sums.
fn sums(values: &[u64]) -> Vec<u64> {
    let add = |sum: &mut u64, value: &u64| {
        *sum = sum.saturating_add(*value);
        Some(*sum)
    };
    values.iter().scan(0, add).collect()
}

fn fixed(layer: &ExpertStatistics) -> Vec<u64> {
    let mut counts = layer.counts.clone();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    sums(&counts)
}

/// Hit rate over all layers with 1, 2, ... up to `widest` cached experts per layer. For a cache larger than the statistics cover, it is the rate of
/// the largest one that they cover.
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

fn hit_rates(layers: &[ExpertStatistics]) -> Figure {
    let widest = widest(layers);
    let curves = POLICIES.each_ref().map(|policy| rates(layers, policy, widest));
    let step = widest.div_ceil(SIZES);
    let sizes: Vec<usize> = (1..=widest).filter(|size| *size == 1 || size.is_multiple_of(step)).collect();
    let mut marks = Vec::new();
    for (policy, rates) in POLICIES.iter().zip(&curves) {
        let points: Vec<(f64, f64)> = sizes.iter().map(|size| (*size as f64, 100.0 * rates[size - 1])).collect();
        marks.push(Mark::Line { points: points.clone(), ink: policy.look.0, width: 2 });
        let every = points.len().div_ceil(8);
        marks.push(Mark::Points { points: points.into_iter().step_by(every).collect(), look: policy.look });
    }
    let panel = Panel::new(
        "All layers together",
        "Hit rate in percent of visits by experts per layer in the cache, for three policies.",
        Axis::from_zero("experts of each layer in the cache", [widest as f64]),
        Axis::linear("percent of visits hit", 0.0, 104.0),
        marks,
    );
    let row = |size: &usize| {
        let rates = curves.iter().map(|rates| percent(rates[size - 1]));
        [size.to_string()].into_iter().chain(rates).collect()
    };
    let head = ["experts per layer in the cache"].into_iter().chain(POLICIES.iter().map(|policy| policy.name));
    Figure {
        id: "fig-hit-rates".into(),
        title: "Hit rates of expert caches".into(),
        caption: "Visits that find their expert in a cache, by the number of experts per layer that it holds. The fixed cache is \
                  chosen from these same visits and starts full; the others start empty before each prompt."
            .into(),
        findings: hit_findings(&curves, widest),
        legend: POLICIES.iter().map(|policy| Key::Point(policy.look, policy.name.to_owned())).collect(),
        panels: vec![panel],
        table: Table {
            title: "Hit rates".into(),
            head: head.map(str::to_owned).collect(),
            rows: sizes.iter().map(row).collect(),
        },
    }
}

fn hit_findings(curves: &[Vec<f64>; 3], widest: usize) -> Vec<String> {
    let per_policy = |say: &dyn Fn(&Vec<f64>) -> String| {
        let each = POLICIES.iter().zip(curves).map(|(policy, rates)| format!("{} {}", policy.name, say(rates)));
        each.collect::<Vec<_>>().join("; ")
    };
    let half = per_policy(&|rates| percent(rates[widest.div_ceil(2) - 1]));
    let needed = per_policy(&|rates| match rates.iter().position(|rate| *rate >= USEFUL) {
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

    fn layer(counts: Vec<u64>) -> ExpertStatistics {
        ExpertStatistics {
            block: "layers.0".into(),
            top_k: 2,
            tokens: 10,
            counts,
            reuse_distances: vec![],
            first_visits: 0,
            oracle_hits: vec![],
        }
    }

    #[test]
    fn an_even_router_is_one_run_in_the_middle_of_the_scale() {
        assert_eq!(runs(&layer(vec![5; 8]), 1), [(0.0, 8.0, 5)]);
        assert_eq!(runs(&layer(vec![0, 0, 8, 0]), 1), [(0.0, 2.0, 0), (2.0, 3.0, 7), (3.0, 4.0, 0)]);
        assert_eq!(runs(&layer(vec![0, 8, 4, 4]), 2), [(0.0, 4.0, 5)]);
        assert_eq!(runs(&layer(vec![0; 4]), 1), [(0.0, 4.0, 0)]);
    }

    #[test]
    fn each_policy_counts_its_hits() {
        let layer = ExpertStatistics {
            top_k: 1,
            reuse_distances: vec![4, 2, 1],
            first_visits: 3,
            oracle_hits: vec![5, 7, 7],
            ..layer(vec![1, 6, 3])
        };
        let curves = POLICIES.each_ref().map(|policy| rates(std::slice::from_ref(&layer), policy, 4));
        assert_eq!(curves, [vec![0.5, 0.7, 0.7, 0.7], vec![0.4, 0.6, 0.7, 0.7], vec![0.6, 0.9, 1.0, 1.0]]);
        assert!(hit_findings(&curves, 4)[1].contains("best possible no size is enough; least recently used no size"));
    }
}
