//! Section: measured times and fitted curves.

use crate::derive::{PHASES, phase_costs};
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{label, or_dash, percent, plain};
use crate::report::palette::provider_look;
use crate::report::panel::{Mark, Panel};
use crate::report::view::{NAME, ReportView, phase_name, sound};
use hpp_partition::Phase;
use hpp_schema::{ClassCosts, Fit, PhaseCosts, Provider};

/// Most classes that are drawn; the table has all.
const DRAWN: usize = 4;
/// Classes with less than this part of the slowest class's time are only in the table.
const WORTH_DRAWING: f64 = 0.01;
const SAMPLES: usize = 40;
/// A fit with a larger relative error is called poor.
const POOR: f64 = 0.10;

/// Times over tokens, with fits.
pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    let part = |phase| match drawn(view, phase) {
        classes if classes.is_empty() => SectionItem::Absent(format!("No {phase} time was measured.")),
        classes => SectionItem::Figure(figure(view, phase, &classes)),
    };
    PHASES.map(part).into()
}

/// Measured times as (tokens, milliseconds).
fn measured(costs: &PhaseCosts) -> Vec<(f64, f64)> {
    costs.points.iter().filter_map(|point| Some((point.tokens as f64, point.ms.and_then(sound)?))).collect()
}

/// The classes with the largest part of a pass, largest first.
fn drawn<'a>(view: &ReportView<'a>, phase: Phase) -> Vec<&'a ClassCosts> {
    let longest = view.longest_pass(phase).map_or(0.0, |pass| pass.tokens as f64);
    let weight = |class: &ClassCosts| {
        let points = class.providers.iter().flat_map(|costs| measured(phase_costs(costs, phase)));
        let slowest = points.filter(|(tokens, _)| *tokens == longest).map(|(_, ms)| ms).fold(0.0, f64::max);
        view.blocks().iter().filter(|block| block.class == class.class).count() as f64 * slowest
    };
    let is_measured = |class: &ClassCosts| class.providers.iter().any(|c| !measured(phase_costs(c, phase)).is_empty());
    let classes = view.profile.classes.iter().filter(|class| is_measured(class));
    let mut classes: Vec<(f64, &ClassCosts)> = classes.map(|class| (weight(class), class)).collect();
    classes.sort_by(|a, b| b.0.total_cmp(&a.0));
    let least = WORTH_DRAWING * classes.first().map_or(0.0, |(weight, _)| *weight);
    let mut drawn: Vec<&ClassCosts> = Vec::new();
    for (_, class) in classes.into_iter().filter(|(weight, _)| *weight >= least) {
        if drawn.len() < DRAWN && drawn.iter().all(|other| other.class != class.class) {
            drawn.push(class);
        }
    }
    drawn
}

fn figure(view: &ReportView<'_>, phase: Phase, classes: &[&ClassCosts]) -> Figure {
    let (id, name, terms) = match phase {
        Phase::Decode => (
            "fig-fit-decode",
            "context",
            "What grows with the context is reading the KV cache; the rest is reading weights.",
        ),
        Phase::Prefill => (
            "fig-fit-prefill",
            "prompt",
            "What grows with the square of the prompt is attention; what grows with it is everything else.",
        ),
    };
    Figure {
        id: id.into(),
        title: format!("{} time by length of the {name}", phase_name(phase)),
        caption: format!("Milliseconds of one block, medians; lines are fits. {terms}"),
        findings: vec![quality(phase, classes)],
        legend: view.providers.iter().map(|p| Key::Point(provider_look(*p), p.name().to_owned())).collect(),
        panels: classes.iter().map(|class| panel(phase, class)).collect(),
        table: table(view, phase),
    }
}

fn panel(phase: Phase, class: &ClassCosts) -> Panel {
    let costs = || class.providers.iter().map(move |costs| (provider_look(costs.provider), phase_costs(costs, phase)));
    let all: Vec<(f64, f64)> = costs().flat_map(|(_, costs)| measured(costs)).collect();
    let name = if phase == Phase::Decode { "tokens of context" } else { "tokens of the prompt" };
    let x = Axis::from_zero(name, all.iter().map(|(tokens, _)| *tokens));
    let (first, last) = x.values();
    let curve = |fit: Fit| -> Vec<(f64, f64)> {
        let tokens = (0..SAMPLES).map(|i| first + (last - first) * i as f64 / (SAMPLES - 1) as f64);
        tokens.map(|t| (t, fit.constant_ms + t * (fit.linear_ms + t * fit.quadratic_ms))).collect()
    };
    let curves = costs().filter_map(|(_, costs)| costs.fit).flat_map(curve);
    let y = Axis::from_zero("milliseconds per block", all.iter().copied().chain(curves).map(|(_, ms)| ms));
    let mut marks = Vec::new();
    for (look, costs) in costs() {
        marks.extend(costs.fit.map(|fit| Mark::Line { points: curve(fit), ink: look.0, width: 2 }));
        marks.push(Mark::Points { points: measured(costs), look });
    }
    let title = label(&class.block, NAME);
    let text = format!("Milliseconds of {title} by {name}, measured points and fitted curves.");
    Panel::new(title, text, x, y, marks)
}

/// The error of the worst drawn fit, as a sentence.
fn quality(phase: Phase, classes: &[&ClassCosts]) -> String {
    let costs = classes.iter().flat_map(|class| class.providers.iter().map(move |costs| (&class.block, costs)));
    let fits = costs.filter_map(|(block, costs)| {
        let error = phase_costs(costs, phase).fit?.worst_relative_error;
        Some((error, block, costs.provider))
    });
    let Some((error, block, provider)) = fits.max_by(|a, b| a.0.total_cmp(&b.0)) else {
        return "Too few points for a curve.".to_owned();
    };
    let trust = match error > POOR {
        true => "read times between the points with care",
        false => "times between the points can be trusted that far",
    };
    let (part, block, name) = (percent(error), label(block, NAME), provider.name());
    format!("The curve furthest from a measured point misses by {part} ({block}, {name}): {trust}.")
}

/// The times of a class under one provider.
struct Row<'a> {
    block: &'a str,
    provider: Provider,
    costs: &'a PhaseCosts,
}

fn table(view: &ReportView<'_>, phase: Phase) -> Table {
    let mut rows = Vec::new();
    for class in &view.profile.classes {
        for costs in &class.providers {
            rows.push(Row { block: &class.block, provider: costs.provider, costs: phase_costs(costs, phase) });
        }
    }
    Table::of(
        "Fits of every class",
        &rows,
        &[
            ("block", |row| label(row.block, NAME)),
            ("provider", |row| row.provider.name().to_owned()),
            ("constant, ms", |row| or_dash(row.costs.fit, |fit| plain(fit.constant_ms))),
            ("µs per token", |row| or_dash(row.costs.fit, |fit| plain(1e3 * fit.linear_ms))),
            ("ns per token²", |row| or_dash(row.costs.fit, |fit| plain(1e6 * fit.quadratic_ms))),
            ("furthest point", |row| or_dash(row.costs.fit, |fit| percent(fit.worst_relative_error))),
            ("R²", |row| or_dash(row.costs.fit, |fit| format!("{:.4}", fit.r2))),
            ("measured (tokens: ms)", |row| {
                let ms = |ms: Option<f64>| ms.map_or("failed".to_owned(), plain);
                let points = row.costs.points.iter().map(|point| format!("{}: {}", point.tokens, ms(point.ms)));
                points.collect::<Vec<_>>().join(", ")
            }),
        ],
    )
}
