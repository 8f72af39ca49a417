//! Section: measured times and fitted curves.

use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{label, percent, plain};
use crate::report::palette::of_provider;
use crate::report::panel::{Mark, Panel, Shape};
use crate::report::view::{NAME, PHASES, View, phase_costs, phase_name, provider_name, sound};
use hpp_partition::Phase;
use hpp_schema::{ClassCosts, Fit, PhaseCosts, Provider, ProviderCosts};

/// Most classes that are drawn; the table has all.
const DRAWN: usize = 4;
/// Classes with less than this part of the slowest class's time are only in the table.
const WORTH_DRAWING: f64 = 0.01;
/// Points of a curve.
const SAMPLES: usize = 40;
/// A fit with a larger relative error is called poor.
const POOR: f64 = 0.10;

/// Times over tokens, with fits.
pub fn section(view: &View<'_>) -> Section {
    let parts = PHASES.map(|phase| match drawn(view, phase) {
        classes if classes.is_empty() => Part::Absent(format!("No {phase} time was measured.")),
        classes => Part::Figure(figure(view, phase, &classes)),
    });
    Section { id: "fits", title: "Times by tokens, and the curves through them", parts: parts.into() }
}

fn has_points(costs: &PhaseCosts) -> bool {
    costs.points.iter().any(|point| point.ms.and_then(sound).is_some())
}

/// The classes with the largest part of a pass, largest first.
fn drawn<'a>(view: &View<'a>, phase: Phase) -> Vec<&'a ClassCosts> {
    let tokens = view.most_tokens(phase).unwrap_or(0);
    let blocks_of = |class: &ClassCosts| view.blocks().iter().filter(|block| block.class == class.class).count();
    let weight = |class: &ClassCosts| {
        let ms = |costs: &ProviderCosts| {
            let point = phase_costs(costs, phase).points.iter().find(|point| point.tokens == tokens);
            point.and_then(|point| point.ms).and_then(sound).unwrap_or(0.0)
        };
        blocks_of(class) as f64 * class.providers.iter().map(ms).fold(0.0, f64::max)
    };
    let measured = |class: &&ClassCosts| class.providers.iter().any(|costs| has_points(phase_costs(costs, phase)));
    let mut classes: Vec<(f64, &ClassCosts)> =
        view.profile.classes.iter().filter(measured).map(|class| (weight(class), class)).collect();
    classes.sort_by(|a, b| b.0.total_cmp(&a.0));
    let least = WORTH_DRAWING * classes.first().map_or(0.0, |(weight, _)| *weight);
    classes.retain(|(weight, _)| *weight >= least);
    let mut seen = Vec::new();
    classes.retain(|(_, class)| {
        !seen.contains(&class.class) && {
            seen.push(class.class);
            true
        }
    });
    classes.into_iter().map(|(_, class)| class).take(DRAWN).collect()
}

fn figure(view: &View<'_>, phase: Phase, classes: &[&ClassCosts]) -> Figure {
    let (id, name) = match phase {
        Phase::Decode => ("fig-fit-decode", "context"),
        Phase::Prefill => ("fig-fit-prefill", "prompt"),
    };
    let key = |p: &Provider| Key::new(of_provider(*p), Form::Point(shape(view, *p)), provider_name(*p));
    let terms = match phase {
        Phase::Decode => "What grows with the context is reading the KV cache; the rest is reading weights.",
        Phase::Prefill => {
            "What grows with the square of the prompt is attention; what grows with it is everything else."
        }
    };
    Figure {
        id,
        title: format!("{} time by length of the {name}", phase_name(phase)),
        caption: format!("Milliseconds of one block, medians; lines are fits. {terms}"),
        findings: vec![quality(phase, classes)],
        legend: view.providers.iter().map(key).collect(),
        panels: classes.iter().map(|class| panel(view, phase, class)).collect(),
        table: Some(table(view, phase)),
    }
}

fn shape(view: &View<'_>, provider: Provider) -> Shape {
    match view.providers.iter().position(|other| *other == provider) {
        Some(0) => Shape::Circle,
        Some(1) => Shape::Triangle,
        _ => Shape::Square,
    }
}

fn panel(view: &View<'_>, phase: Phase, class: &ClassCosts) -> Panel {
    let measured = |costs: &ProviderCosts| -> Vec<(f64, f64)> {
        let points = phase_costs(costs, phase).points.iter();
        points.filter_map(|point| Some((point.tokens as f64, point.ms.and_then(sound)?))).collect()
    };
    let all: Vec<(f64, f64)> = class.providers.iter().flat_map(measured).collect();
    let name = if phase == Phase::Decode { "tokens of context" } else { "tokens of the prompt" };
    let x = Axis::from_zero(name, all.iter().map(|(tokens, _)| *tokens));
    let curve = |fit: Fit| x.samples(SAMPLES).into_iter().map(move |tokens| (tokens, at(fit, tokens)));
    let curves = class.providers.iter().filter_map(|costs| phase_costs(costs, phase).fit).flat_map(curve);
    let y = Axis::from_zero("milliseconds per block", all.iter().copied().chain(curves).map(|(_, ms)| ms));
    let mut marks = Vec::new();
    for costs in &class.providers {
        let ink = of_provider(costs.provider);
        if let Some(fit) = phase_costs(costs, phase).fit {
            marks.push(Mark::Line { points: curve(fit).collect(), ink, width: 2 });
        }
        marks.push(Mark::Points { points: measured(costs), ink, shape: shape(view, costs.provider) });
    }
    let title = label(&class.block, NAME);
    Panel::new(
        title.clone(),
        format!("Milliseconds of {title} by {name}, measured points and fitted curves."),
        x,
        y,
        marks,
    )
}

/// Milliseconds of a curve at a fractional number of tokens.
fn at(fit: Fit, tokens: f64) -> f64 {
    fit.constant_ms + tokens * (fit.linear_ms + tokens * fit.quadratic_ms)
}

fn fits<'a>(
    phase: Phase,
    classes: &[&'a ClassCosts],
) -> impl Iterator<Item = (&'a ClassCosts, &'a ProviderCosts, Fit)> {
    let costs = classes.iter().flat_map(|class| class.providers.iter().map(move |costs| (*class, costs)));
    costs.filter_map(move |(class, costs)| Some((class, costs, phase_costs(costs, phase).fit?)))
}

/// The error of the worst drawn fit, as a sentence.
fn quality(phase: Phase, classes: &[&ClassCosts]) -> String {
    let worst = fits(phase, classes).max_by(|a, b| a.2.worst_relative_error.total_cmp(&b.2.worst_relative_error));
    let Some((class, costs, fit)) = worst else { return "Too few points for a curve.".to_owned() };
    let (block, name) = (label(&class.block, NAME), provider_name(costs.provider));
    let trust = match fit.worst_relative_error > POOR {
        true => "read times between the points with care",
        false => "times between the points can be trusted that far",
    };
    let part = percent(fit.worst_relative_error);
    format!("The curve furthest from a measured point misses by {part} ({block}, {name}): {trust}.")
}

fn table(view: &View<'_>, phase: Phase) -> Table {
    let head = [
        "block",
        "provider",
        "constant, ms",
        "µs per token",
        "ns per token²",
        "furthest point",
        "R²",
        "measured (tokens: ms)",
    ];
    let mut table = Table::new("Fits of every class", head);
    for class in &view.profile.classes {
        for costs in &class.providers {
            let phase_costs = phase_costs(costs, phase);
            let point = |point: &hpp_schema::CostPoint| match point.ms {
                Some(ms) => format!("{}: {}", point.tokens, plain(ms)),
                None => format!("{}: failed", point.tokens),
            };
            let measured: Vec<String> = phase_costs.points.iter().map(point).collect();
            let mut row = vec![label(&class.block, NAME), provider_name(costs.provider).to_owned()];
            row.extend(match phase_costs.fit {
                Some(fit) => fit_cells(fit),
                None => vec!["—".to_owned(); 5],
            });
            row.push(measured.join(", "));
            table.rows.push(row);
        }
    }
    table
}

fn fit_cells(fit: Fit) -> Vec<String> {
    vec![
        plain(fit.constant_ms),
        plain(1e3 * fit.linear_ms),
        plain(1e6 * fit.quadratic_ms),
        percent(fit.worst_relative_error),
        format!("{:.4}", fit.r2),
    ]
}
