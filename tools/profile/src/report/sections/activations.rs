//! Section: statistics of the activations between blocks, the influence of each block, the entropy of each layer's attention.

use super::depth::{self, Series};
use crate::report::axis::Scale;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{label, plain};
use crate::report::palette::{AMBER, BLUE, GREEN, Look, MarkerShape, PURPLE, VERMILION};
use crate::report::view::{NAME, ReportView};
use hpp_schema::{AttentionEntropy, BlockInfluence, BoundaryStatistics};

/// The largest float16 number.
const LARGEST_HALF: f64 = 65504.0;
/// If the largest element is this many times the mean, the mean is below one step of 8 bits.
const OUTLIER: f64 = 256.0;

/// Activations at the boundaries, influence of the blocks, attention.
pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    match view.profile.corpus.as_ref().map(|corpus| &corpus.statistics) {
        None => vec![SectionItem::Absent("No corpus was run: there are no statistics of activations.".to_owned())],
        Some(statistics) => vec![
            activations(view, &statistics.boundaries),
            influence(view, &statistics.influence),
            attention(view, &statistics.attention),
        ],
    }
}

/// One number of a boundary.
type Measure = fn(&BoundaryStatistics) -> f64;

fn deviation(boundary: &BoundaryStatistics) -> f64 {
    (boundary.squares / boundary.elements.max(1) as f64).sqrt()
}

fn activations(view: &ReportView<'_>, boundaries: &[BoundaryStatistics]) -> SectionItem {
    if boundaries.is_empty() {
        return SectionItem::Absent("The corpus run observed no boundary.".to_owned());
    }
    let kinds: [(&str, Look, Measure); 3] = [
        ("mean |x|", Look(BLUE, MarkerShape::Circle), |boundary| boundary.mean_abs),
        ("standard deviation", Look(AMBER, MarkerShape::Square), deviation),
        ("max |x|", Look(VERMILION, MarkerShape::Triangle), |boundary| boundary.max_abs),
    ];
    let series = kinds.map(|(_, look, read)| {
        let values = view.along(boundaries, |boundary| (&boundary.block, Some(read(boundary))));
        Series { look, values }
    });
    SectionItem::Figure(Figure {
        id: "fig-boundaries".into(),
        title: "Activations leaving each block".into(),
        caption: "Over all elements of all tokens of the corpus; logarithmic.".into(),
        findings: findings(boundaries),
        legend: kinds.map(|(name, look, _)| Key::Point(look, name.to_owned())).into(),
        panels: vec![depth::points(view, "Activations over depth", "value", Scale::Log, &series)],
        table: Table::of(
            "Statistics of every boundary",
            boundaries,
            &[
                ("leaves", |boundary| label(&boundary.block, NAME)),
                ("mean |x|", |boundary| plain(boundary.mean_abs)),
                ("mean", |boundary| plain(boundary.mean)),
                ("variance", |boundary| plain(deviation(boundary).powi(2))),
                ("max |x|", |boundary| plain(boundary.max_abs)),
                ("elements", |boundary| boundary.elements.to_string()),
                ("not finite", |boundary| boundary.not_finite.to_string()),
            ],
        ),
    })
}

fn findings(boundaries: &[BoundaryStatistics]) -> Vec<String> {
    let mut findings = Vec::new();
    let outlier = |boundary: &BoundaryStatistics| boundary.max_abs / boundary.mean_abs;
    let finite = boundaries.iter().filter(|boundary| outlier(boundary).is_finite());
    if let Some(widest) = finite.max_by(|a, b| outlier(a).total_cmp(&outlier(b))) {
        let (block, times) = (label(&widest.block, NAME), plain(outlier(widest)));
        findings
            .push(format!("The output of {block} is the widest: its largest element is {times} times the mean |x|."));
        if outlier(widest) > OUTLIER {
            findings.push("With such outliers, rounding activations to few bits loses the small ones.".to_owned());
        }
    }
    if let Some(large) = boundaries.iter().find(|boundary| boundary.max_abs > LARGEST_HALF) {
        findings.push(format!("The output of {} does not fit in half precision.", label(&large.block, NAME)));
    }
    let broken: u64 = boundaries.iter().map(|boundary| boundary.not_finite).fold(0, u64::saturating_add);
    if broken > 0 {
        findings.push(format!("{broken} elements were not finite and are left out."));
    }
    findings
}

fn influence(view: &ReportView<'_>, blocks: &[BlockInfluence]) -> SectionItem {
    let values = view.along(blocks, |block| (&block.block, Some(block.mean)));
    if values.is_empty() {
        return SectionItem::Absent("The influence of blocks was not observed.".to_owned());
    }
    let least = blocks.iter().filter(|block| block.mean.is_finite()).min_by(|a, b| a.mean.total_cmp(&b.mean));
    let finding = least.map(|block| {
        let (name, mean) = (label(&block.block, NAME), plain(block.mean));
        format!("{name} changes least ({mean}): the first candidate to round to fewer bits, or to remove.")
    });
    SectionItem::Figure(Figure {
        id: "fig-influence".into(),
        title: "Influence of each block".into(),
        caption: "1 − cosine between the input and the output of a block, mean over tokens; 0 changes nothing (the block influence of \
                  ShortGPT)."
            .into(),
        findings: finding.into_iter().collect(),
        legend: Vec::new(),
        panels: vec![depth::bars(view, "Influence over depth", "1 − cosine", PURPLE, &values)],
        table: Table::of(
            "Influence of every block",
            blocks,
            &[
                ("block", |block| label(&block.block, NAME)),
                ("mean of 1 − cosine", |block| plain(block.mean)),
                ("tokens", |block| block.tokens.to_string()),
            ],
        ),
    })
}

fn attention(view: &ReportView<'_>, layers: &[AttentionEntropy]) -> SectionItem {
    let values = view.along(layers, |layer| (&layer.block, Some(layer.mean)));
    if values.is_empty() {
        let why = "Attention entropy was not requested, or the model's attention has no scores in the graph.";
        return SectionItem::Absent(why.to_owned());
    }
    let least = layers.iter().filter(|layer| layer.mean.is_finite()).min_by(|a, b| a.mean.total_cmp(&b.mean));
    let finding = least.map(|layer| {
        let (name, tokens) = (label(&layer.block, NAME), plain(layer.mean.exp()));
        format!("{name} is the sharpest, as if it looked at {tokens} tokens evenly: it needs little of its KV cache.")
    });
    let series = [Series { look: Look(GREEN, MarkerShape::Diamond), values }];
    SectionItem::Figure(Figure {
        id: "fig-attention".into(),
        title: "Attention entropy".into(),
        caption: "Entropy of the attention weights in nats, mean over heads and tokens; e to its power is the number of tokens \
                  looked at."
            .into(),
        findings: finding.into_iter().collect(),
        legend: Vec::new(),
        panels: vec![depth::points(view, "Entropy over depth", "nats", Scale::Linear, &series)],
        table: Table::of(
            "Entropy of every layer",
            layers,
            &[
                ("block", |layer| label(&layer.block, NAME)),
                ("mean entropy, nats", |layer| plain(layer.mean)),
                ("tokens looked at evenly", |layer| plain(layer.mean.exp())),
                ("rows", |layer| layer.rows.to_string()),
            ],
        ),
    })
}
