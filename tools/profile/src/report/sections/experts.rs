//! Section: how often tokens are routed to each expert, and the hit rates of expert caches.

use super::hit_rates;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{count, label, percent, plain};
use crate::report::palette::HEAT;
use crate::report::panel::{Mark, Panel};
use crate::report::view::{NAME, View};
use hpp_schema::ExpertStatistics;

/// Most cells in a row and in a column of the heat map.
const MOST_COLUMNS: usize = 256;
const MOST_ROWS: usize = 128;
/// Upper limits of the heat levels after "never", as multiples of an even share; the last level has none.
const LEVELS: [f64; 7] = [0.125, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0];

/// Heat map and hit rates.
pub fn section(view: &View<'_>) -> Section {
    let experts = view.profile.corpus.as_ref().map(|corpus| corpus.statistics.experts.as_slice());
    let parts = match experts {
        None => vec![Part::Absent("No corpus was run, so nothing is known of experts.".to_owned())],
        Some([]) => vec![Part::Absent("This model routes no tokens to experts.".to_owned())],
        Some(experts) => vec![Part::Figure(map(experts)), Part::Figure(hit_rates::figure(experts))],
    };
    Section { id: "experts", title: "Experts", parts }
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

fn map(experts: &[ExpertStatistics]) -> Figure {
    let names = ["never", "to ⅛ ×", "to ¼ ×", "to ½ ×", "to 0.8 ×", "even", "to 2 ×", "to 4 ×", "more"];
    let legend = HEAT.iter().zip(names).map(|(ink, name)| Key::new(*ink, Form::Area, name)).collect();
    let mut table = Table::new(
        "Busiest experts of every layer",
        ["layer", "experts", "of them per token", "tokens", "never visited", "busiest (expert: part of the visits)"],
    );
    table.rows.extend(experts.iter().map(row));
    Figure {
        id: "fig-experts",
        title: "Visits of each expert".to_owned(),
        caption: "Visits of each expert as multiples of an even share of its layer's visits. Expert numbers of different layers \
                  have nothing to do with each other."
            .to_owned(),
        findings: findings(experts),
        legend,
        panels: vec![panel(experts)],
        table: Some(table),
    }
}

fn panel(experts: &[ExpertStatistics]) -> Panel {
    let widest = experts.iter().map(|layer| layer.counts.len()).max().unwrap_or(1).max(1);
    let (together, every) = (widest.div_ceil(MOST_COLUMNS), experts.len().div_ceil(MOST_ROWS));
    let rows: Vec<&ExpertStatistics> = experts.iter().step_by(every).collect();
    let mut bars = vec![Vec::new(); HEAT.len()];
    for (at, layer) in rows.iter().enumerate() {
        let y = (rows.len() - 1 - at) as f64;
        for (from, to, level) in runs(layer, together) {
            bars[level].push([(from, y - 0.5), (to, y + 0.5)]);
        }
    }
    let step = rows.len().div_ceil(8);
    let ticks = rows.iter().enumerate().step_by(step);
    let ticks = ticks.map(|(at, layer)| ((rows.len() - 1 - at) as f64, label(&layer.block, 12))).collect();
    let mut panel = Panel::new(
        "Layers by experts",
        format!("Heat map of {} layers and up to {widest} experts; darker is busier.", experts.len()),
        Axis::linear("expert", 0.0, widest as f64),
        Axis::linear("", -0.5, rows.len() as f64 - 0.5).with_ticks(ticks),
        bars.into_iter().zip(HEAT).map(|(bars, ink)| Mark::Bars { bars, ink }).collect(),
    );
    panel.height = (60 + 14 * rows.len() as i32).clamp(160, 460);
    panel
}

/// Runs of cells with one heat level in a layer: (first expert, end, level). A cell shows the mean of `together`
/// experts.
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

fn row(layer: &ExpertStatistics) -> Vec<String> {
    let visits: u64 = layer.counts.iter().fold(0, |sum, count| sum.saturating_add(*count));
    let mut order: Vec<usize> = (0..layer.counts.len()).collect();
    order.sort_by_key(|expert| std::cmp::Reverse(layer.counts[*expert]));
    let part = |expert: &usize| percent(layer.counts[*expert] as f64 / visits.max(1) as f64);
    let busiest: Vec<String> = order.iter().take(4).map(|expert| format!("{expert}: {}", part(expert))).collect();
    vec![
        label(&layer.block, NAME),
        layer.counts.len().to_string(),
        layer.top_k.to_string(),
        layer.tokens.to_string(),
        layer.counts.iter().filter(|count| **count == 0).count().to_string(),
        busiest.join(", "),
    ]
}

fn findings(experts: &[ExpertStatistics]) -> Vec<String> {
    let mut findings = Vec::new();
    let all =
        experts.iter().flat_map(|layer| relative(layer).into_iter().enumerate().map(move |(at, v)| (layer, at, v)));
    if let Some((layer, expert, times)) = all.max_by(|a, b| a.2.total_cmp(&b.2)) {
        let (block, times) = (label(&layer.block, NAME), plain(times));
        findings.push(format!(
            "Busiest is expert {expert} of {block}, with {times} times an even share. The more even a row, the less it matters \
             which of its experts are kept near."
        ));
    }
    let never: usize = experts.iter().map(|layer| layer.counts.iter().filter(|count| **count == 0).count()).sum();
    if never > 0 {
        findings.push(format!("{} never visited.", count(never as u64, "expert was", "experts were")));
    }
    let widest = experts.iter().map(|layer| layer.counts.len()).max().unwrap_or(0);
    if widest > MOST_COLUMNS {
        findings.push(format!("Each cell is the mean of {} experts.", widest.div_ceil(MOST_COLUMNS)));
    }
    if experts.len() > MOST_ROWS {
        findings.push(format!("One layer in {} is drawn.", experts.len().div_ceil(MOST_ROWS)));
    }
    findings
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
}
