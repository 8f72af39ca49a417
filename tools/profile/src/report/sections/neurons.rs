//! Section: activation frequencies of the neurons of ReLU networks.

use super::depth;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{label, percent};
use crate::report::palette::{SLATE, kind};
use crate::report::panel::{Mark, Panel};
use crate::report::view::{NAME, ReportView};
use hpp_schema::NeuronStatistics;

/// Most layers that are drawn.
const DRAWN: usize = 5;
const SAMPLES: usize = 101;
/// A neuron that is active for a smaller part of the tokens is cold.
const COLD: f64 = 0.05;

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    vec![match view.profile.corpus.as_ref().map(|corpus| corpus.statistics.neurons.as_slice()) {
        None => SectionItem::Absent("No corpus was run: there are no statistics of neurons.".to_owned()),
        Some([]) => {
            SectionItem::Absent("This model's networks have no ReLU: no neuron is ever exactly off.".to_owned())
        }
        Some(layers) => SectionItem::Figure(figure(view, layers)),
    }]
}

/// Part of the tokens for which each neuron is active, in descending order.
fn frequencies(layer: &NeuronStatistics) -> Vec<f64> {
    let mut active = layer.active.clone();
    active.sort_unstable_by(|a, b| b.cmp(a));
    active.into_iter().map(|count| (count as f64 / layer.tokens.max(1) as f64).min(1.0)).collect()
}

fn mean(frequencies: &[f64]) -> f64 {
    frequencies.iter().sum::<f64>() / frequencies.len().max(1) as f64
}

fn cold(frequencies: &[f64]) -> f64 {
    frequencies.iter().filter(|f| **f < COLD).count() as f64 / frequencies.len().max(1) as f64
}

/// Part of all activations from the most active fifth of the neurons.
fn busiest_fifth(frequencies: &[f64]) -> f64 {
    let all: f64 = frequencies.iter().sum();
    let fifth: f64 = frequencies.iter().take(frequencies.len().div_ceil(5)).sum();
    if all > 0.0 { fifth / all } else { 0.0 }
}

fn figure(view: &ReportView<'_>, layers: &[NeuronStatistics]) -> Figure {
    let drawn: Vec<&NeuronStatistics> = layers.iter().step_by(layers.len().div_ceil(DRAWN)).collect();
    let activity = view.along(layers, |layer| (&layer.block, Some(100.0 * mean(&frequencies(layer)))));
    let key = |(at, layer): (usize, &&NeuronStatistics)| Key::Line(kind(at), label(&layer.block, NAME));
    Figure {
        id: "fig-neurons".into(),
        title: "How often neurons fire".into(),
        caption: "Part of the tokens for which each neuron is above zero, neurons sorted. The steeper the curve, the fewer weights \
                  near the processor serve most tokens."
            .into(),
        findings: findings(layers),
        legend: drawn.iter().enumerate().map(key).collect(),
        panels: vec![
            curves(&drawn),
            depth::bars(view, "Activity over depth", "percent of neurons firing for a token", SLATE, &activity),
        ],
        table: Table::of(
            "Activity of every layer",
            layers,
            &[
                ("layer", |layer| label(&layer.block, NAME)),
                ("neurons", |layer| layer.active.len().to_string()),
                ("fire for a token, mean", |layer| percent(mean(&frequencies(layer)))),
                ("cold (under 5 % of tokens)", |layer| percent(cold(&frequencies(layer)))),
                ("part of the busiest fifth", |layer| percent(busiest_fifth(&frequencies(layer)))),
            ],
        ),
    }
}

fn curves(drawn: &[&NeuronStatistics]) -> Panel {
    let curve = |(at, layer): (usize, &&NeuronStatistics)| {
        let sorted = frequencies(layer);
        let point = |i: usize| {
            let part = i as f64 / (SAMPLES - 1) as f64;
            let neuron = (part * sorted.len().saturating_sub(1) as f64).round() as usize;
            Some((100.0 * part, 100.0 * sorted.get(neuron)?))
        };
        Mark::Line { points: (0..SAMPLES).filter_map(point).collect(), ink: kind(at), width: 2 }
    };
    Panel::new(
        "Neurons, busiest first",
        format!("Part of the tokens each neuron fires for, sorted, for {} layers.", drawn.len()),
        Axis::linear("percent of the layer's neurons", 0.0, 100.0),
        Axis::linear("percent of tokens", 0.0, 104.0),
        drawn.iter().enumerate().map(curve).collect(),
    )
}

fn findings(neurons: &[NeuronStatistics]) -> Vec<String> {
    let all: Vec<Vec<f64>> = neurons.iter().map(frequencies).collect();
    let over =
        |read: fn(&[f64]) -> f64| percent(all.iter().map(|sorted| read(sorted)).sum::<f64>() / all.len().max(1) as f64);
    vec![
        format!("For a token, {} of a layer's neurons fire.", over(mean)),
        format!("The busiest fifth makes {} of all activations.", over(busiest_fifth)),
        format!("{} of the neurons fire for less than {} of the tokens.", over(cold), percent(COLD)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_tokens_and_of_activations() {
        let layer = NeuronStatistics { block: "layers.0".into(), tokens: 100, active: vec![1, 80, 10, 5, 4] };
        let sorted = frequencies(&layer);
        assert_eq!(sorted, [0.8, 0.1, 0.05, 0.04, 0.01]);
        assert!((mean(&sorted) - 0.2).abs() < 1e-12 && (busiest_fifth(&sorted) - 0.8).abs() < 1e-12);
        assert_eq!(cold(&sorted), 0.4);
    }
}
