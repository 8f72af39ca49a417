//! Section: statistics of the activations between blocks, and the influence of each block.

use super::attention;
use super::depth::{self, Height, Series};
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{label, plain};
use crate::report::palette::{AMBER, BLUE, PURPLE, VERMILION};
use crate::report::panel::Shape;
use crate::report::view::{NAME, View};
use hpp_schema::{BoundaryStatistics, Statistics};

/// The largest float16 number.
const LARGEST_HALF: f64 = 65504.0;
/// If the largest element is this many times the mean, the mean is below one step of 8 bits.
const OUTLIER: f64 = 256.0;

/// Activations at the boundaries, influence of the blocks, attention.
pub fn section(view: &View<'_>) -> Section {
    let parts = match view.profile.corpus.as_ref().map(|corpus| &corpus.statistics) {
        None => vec![Part::Absent("No corpus was run, so nothing is known of activations.".to_owned())],
        Some(statistics) => {
            vec![activations(view, statistics), influence(view, statistics), attention::part(view, statistics)]
        }
    };
    Section { id: "boundaries", title: "What passes between the blocks", parts }
}

/// Positions of the entries' blocks, each with a value.
pub fn along<T>(labels: &[&str], entries: &[T], read: impl Fn(&T) -> (&str, f64)) -> Vec<(usize, f64)> {
    let place = |entry: &T| {
        let (block, value) = read(entry);
        Some((labels.iter().position(|name| *name == block)?, value))
    };
    entries.iter().filter_map(place).collect()
}

fn deviation(boundary: &BoundaryStatistics) -> f64 {
    (boundary.squares / boundary.elements.max(1) as f64).sqrt()
}

fn activations(view: &View<'_>, statistics: &Statistics) -> Part {
    let boundaries = &statistics.boundaries;
    if boundaries.is_empty() {
        return Part::Absent("The corpus run observed no boundary.".to_owned());
    }
    let labels = view.labels();
    let of = |read: fn(&BoundaryStatistics) -> f64| along(&labels, boundaries, |b| (b.block.as_str(), read(b)));
    let series = [
        Series { ink: BLUE, shape: Shape::Circle, values: of(|boundary| boundary.mean_abs) },
        Series { ink: AMBER, shape: Shape::Square, values: of(deviation) },
        Series { ink: VERMILION, shape: Shape::Triangle, values: of(|boundary| boundary.max_abs) },
    ];
    let mut table = Table::new(
        "Statistics of every boundary",
        ["leaves", "mean |x|", "mean", "variance", "max |x|", "elements", "not finite"],
    );
    table.rows.extend(boundaries.iter().map(row));
    Part::Figure(Figure {
        id: "fig-boundaries",
        title: "Activations leaving each block".to_owned(),
        caption: "Over all elements of all tokens of the corpus; logarithmic.".to_owned(),
        findings: findings(boundaries),
        legend: vec![
            Key::new(BLUE, Form::Point(Shape::Circle), "mean |x|"),
            Key::new(AMBER, Form::Point(Shape::Square), "standard deviation"),
            Key::new(VERMILION, Form::Point(Shape::Triangle), "max |x|"),
        ],
        panels: vec![depth::points("Activations over depth", "value", &labels, &series, Height::Log)],
        table: Some(table),
    })
}

fn row(boundary: &BoundaryStatistics) -> Vec<String> {
    vec![
        label(&boundary.block, NAME),
        plain(boundary.mean_abs),
        plain(boundary.mean),
        plain(deviation(boundary).powi(2)),
        plain(boundary.max_abs),
        boundary.elements.to_string(),
        boundary.not_finite.to_string(),
    ]
}

fn findings(boundaries: &[BoundaryStatistics]) -> Vec<String> {
    let mut findings = Vec::new();
    let outlier = |boundary: &BoundaryStatistics| boundary.max_abs / boundary.mean_abs;
    let finite = boundaries.iter().filter(|boundary| outlier(boundary).is_finite());
    if let Some(widest) = finite.max_by(|a, b| outlier(a).total_cmp(&outlier(b))) {
        let (block, times) = (label(&widest.block, NAME), plain(outlier(widest)));
        findings.push(format!("Widest is what leaves {block}: its largest element is {times} times the mean |x|."));
        if outlier(widest) > OUTLIER {
            findings.push("So far from the mean, rounding activations to few bits loses the small ones.".to_owned());
        }
    }
    if let Some(large) = boundaries.iter().find(|boundary| boundary.max_abs > LARGEST_HALF) {
        findings.push(format!("What leaves {} does not fit in half precision.", label(&large.block, NAME)));
    }
    let broken: u64 = boundaries.iter().map(|boundary| boundary.not_finite).fold(0, u64::saturating_add);
    if broken > 0 {
        findings.push(format!("{broken} elements were not finite and are left out."));
    }
    findings
}

fn influence(view: &View<'_>, statistics: &Statistics) -> Part {
    let influence = &statistics.influence;
    let labels = view.labels();
    let values = along(&labels, influence, |block| (block.block.as_str(), block.mean));
    if values.is_empty() {
        return Part::Absent("The influence of blocks was not observed.".to_owned());
    }
    let mut table = Table::new("Influence of every block", ["block", "mean of 1 − cosine", "tokens"]);
    table.rows.extend(influence.iter().map(|b| vec![label(&b.block, NAME), plain(b.mean), b.tokens.to_string()]));
    let least = influence.iter().filter(|b| b.mean.is_finite()).min_by(|a, b| a.mean.total_cmp(&b.mean));
    let finding = least.map(|block| {
        let (name, mean) = (label(&block.block, NAME), plain(block.mean));
        format!("{name} changes least ({mean}): the first to round to fewer bits, or to try without.")
    });
    Part::Figure(Figure {
        id: "fig-influence",
        title: "Influence of each block".to_owned(),
        caption: "1 − cosine of what enters and what leaves a block, mean over tokens; 0 changes nothing (the block influence of \
                  ShortGPT)."
            .to_owned(),
        findings: finding.into_iter().collect(),
        legend: Vec::new(),
        panels: vec![depth::bars("Influence over depth", "1 − cosine", &labels, PURPLE, &values)],
        table: Some(table),
    })
}
