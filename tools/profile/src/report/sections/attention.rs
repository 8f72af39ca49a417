//! Section part: entropy of each layer's attention.

use super::boundaries::along;
use super::depth::{self, Height, Series};
use crate::report::figure::{Figure, Part, Table};
use crate::report::number::{label, plain};
use crate::report::palette::GREEN;
use crate::report::panel::Shape;
use crate::report::view::{NAME, View};
use hpp_schema::Statistics;

/// Entropy over depth, or the reason why there is none.
pub fn part(view: &View<'_>, statistics: &Statistics) -> Part {
    let labels = view.labels();
    let values = along(&labels, &statistics.attention, |layer| (layer.block.as_str(), layer.mean));
    if values.is_empty() {
        return Part::Absent(
            "Attention entropy was not asked for, or the model's attention hides its weights.".to_owned(),
        );
    }
    let mut table =
        Table::new("Entropy of every layer", ["block", "mean entropy, nats", "tokens looked at evenly", "rows"]);
    let row = |l: &hpp_schema::AttentionEntropy| {
        vec![label(&l.block, NAME), plain(l.mean), plain(l.mean.exp()), l.rows.to_string()]
    };
    table.rows.extend(statistics.attention.iter().map(row));
    let least = statistics.attention.iter().filter(|l| l.mean.is_finite()).min_by(|a, b| a.mean.total_cmp(&b.mean));
    let finding = least.map(|layer| {
        let (name, tokens) = (label(&layer.block, NAME), plain(layer.mean.exp()));
        format!("{name} is the sharpest, as if it looked at {tokens} tokens evenly: it needs little of its KV cache.")
    });
    let series = [Series { ink: GREEN, shape: Shape::Diamond, values }];
    Part::Figure(Figure {
        id: "fig-attention",
        title: "Attention entropy".to_owned(),
        caption: "Entropy of the attention weights in nats, mean over heads and tokens; e to its power is the number of tokens \
                  looked at."
            .to_owned(),
        findings: finding.into_iter().collect(),
        legend: Vec::new(),
        panels: vec![depth::points("Entropy over depth", "nats", &labels, &series, Height::Linear)],
        table: Some(table),
    })
}
