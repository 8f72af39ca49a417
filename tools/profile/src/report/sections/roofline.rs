//! Section: how close each block is to the limits of the processor: arithmetic intensity against the achieved rate (the roofline
//! model of Williams, Waterman and Patterson, CACM 52(4), 2009).

use super::blocks::pass_name;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{percent, plain, time};
use crate::report::palette::{AMBER, AXIS, PURPLE};
use crate::report::panel::{Mark, Panel, Shape};
use crate::report::view::{Bounds, PHASES, View, provider_name};
use hpp_partition::Phase;
use hpp_schema::Provider;

/// A rate above the limit by more than this factor is not noise.
pub const BEYOND: f64 = 1.05;
/// Explanation of rates above a limit.
pub const WHY_BEYOND: &str = "caches hold what is read, or the machine was busy while the bound was measured";

/// One class of blocks at one token count.
struct Point {
    blocks: String,
    how_many: usize,
    phase: Phase,
    tokens: u64,
    /// Operations per byte.
    intensity: f64,
    /// 1e9 operations per second.
    gflops: f64,
    ms: f64,
    /// Achieved part of the limit, if there is one.
    reached: Option<f64>,
}

/// Roofline per provider.
pub fn section(view: &View<'_>) -> Section {
    let of = |provider: &Provider| Some((*provider, points(view, *provider))).filter(|(_, points)| !points.is_empty());
    let providers: Vec<(Provider, Vec<Point>)> = view.providers.iter().filter_map(of).collect();
    let parts = if (0..view.blocks().len()).all(|block| view.facts(block).is_none()) {
        vec![Part::Absent(
            "Operations and bytes of the blocks are not known here: give the model to see them.".to_owned(),
        )]
    } else if providers.is_empty() {
        vec![Part::Absent("No block that computes has a measured time.".to_owned())]
    } else {
        vec![Part::Figure(figure(view, &providers))]
    };
    Section { id: "roofline", title: "What the processors allow", parts }
}

impl Bounds {
    /// The limit at this intensity, 1e9 operations per second.
    fn at(&self, intensity: f64) -> f64 {
        self.gflops.unwrap_or(f64::INFINITY).min(intensity * self.gb_per_s)
    }
}

fn points(view: &View<'_>, provider: Provider) -> Vec<Point> {
    let mut points = Vec::new();
    for group in view.groups() {
        let Some(first) = group.blocks.first().copied() else { continue };
        for phase in PHASES {
            let work = view.facts(first).map(|facts| facts.of(phase)).unwrap_or_default();
            for (tokens, work) in work.iter().filter(|(_, work)| work.flops > 0 && work.bytes > 0) {
                let measured = view.ms(first, provider, phase, *tokens).filter(|ms| *ms > 0.0);
                let Some(ms) = measured else { continue };
                let (intensity, gflops) = (work.flops as f64 / work.bytes as f64, work.flops as f64 / ms / 1e6);
                let reached = view.bounds(provider).map(|bounds| gflops / bounds.at(intensity));
                let (blocks, how_many) = (group.name.clone(), group.blocks.len());
                points.push(Point { blocks, how_many, phase, tokens: *tokens, intensity, gflops, ms, reached });
            }
        }
    }
    points
}

fn figure(view: &View<'_>, providers: &[(Provider, Vec<Point>)]) -> Figure {
    let head = ["blocks", "provider", "phase", "tokens", "operations per byte", "GFLOP/s", "one block", "of the bound"];
    let mut table = Table::new("Work and rates", head);
    for (provider, points) in providers {
        table.rows.extend(points.iter().map(|point| row(*provider, point)));
    }
    Figure {
        id: "fig-roofline",
        title: "Roofline".to_owned(),
        caption: "Rate achieved over operations per byte of weights and state read; both logarithmic. Under the slope, memory \
                  decides; under the flat part, arithmetic does."
            .to_owned(),
        findings: findings(view, providers),
        legend: vec![
            Key::new(AMBER, Form::Point(Shape::Circle), "decode"),
            Key::new(PURPLE, Form::Point(Shape::Triangle), "prefill"),
            Key::new(AXIS, Form::Line, "the most this processor can do"),
        ],
        panels: providers.iter().map(|(provider, points)| panel(view, *provider, points)).collect(),
        table: Some(table),
    }
}

fn row(provider: Provider, point: &Point) -> Vec<String> {
    vec![
        point.blocks.clone(),
        provider_name(provider).to_owned(),
        point.phase.to_string(),
        point.tokens.to_string(),
        plain(point.intensity),
        plain(point.gflops),
        time(point.ms),
        point.reached.map_or("—".to_owned(), percent),
    ]
}

fn panel(view: &View<'_>, provider: Provider, points: &[Point]) -> Panel {
    let bounds = view.bounds(provider);
    let ridge = bounds.and_then(|bounds| Some(bounds.gflops? / bounds.gb_per_s));
    let x = Axis::log("operations per byte read", points.iter().map(|point| point.intensity).chain(ridge));
    let (low, high) = x.values();
    let roof: Vec<(f64, f64)> = bounds.map_or(Vec::new(), |bounds| {
        let corners = [Some(low), ridge.filter(|ridge| (low..high).contains(ridge)), Some(high)];
        corners.into_iter().flatten().map(|at| (at, bounds.at(at))).collect()
    });
    let tops = roof.iter().map(|(_, rate)| *rate);
    let y = Axis::log("1e9 operations per second", points.iter().map(|point| point.gflops).chain(tops));
    let of = |phase: Phase| points.iter().filter(|p| p.phase == phase).map(|p| (p.intensity, p.gflops)).collect();
    let marks = vec![
        Mark::Line { points: roof, ink: AXIS, width: 2 },
        Mark::Points { points: of(Phase::Decode), ink: AMBER, shape: Shape::Circle },
        Mark::Points { points: of(Phase::Prefill), ink: PURPLE, shape: Shape::Triangle },
    ];
    let name = provider_name(provider);
    let title = match bounds {
        None => format!("{name}: bounds not measured"),
        Some(Bounds { gb_per_s, gflops: Some(gflops) }) => {
            format!("{name}: {} GB/s, {} GFLOP/s", plain(gb_per_s), plain(gflops))
        }
        Some(Bounds { gb_per_s, gflops: None }) => format!("{name}: {} GB/s; arithmetic not measured", plain(gb_per_s)),
    };
    let text = format!("{} measured points under the roof of {name}.", points.len());
    Panel::new(title, text, x, y, marks)
}

/// Achieved parts of the limit of the slowest blocks, for each provider and phase.
fn findings(view: &View<'_>, providers: &[(Provider, Vec<Point>)]) -> Vec<String> {
    let mut findings = Vec::new();
    for (provider, points) in providers {
        for phase in PHASES {
            let heaviest = points.iter().filter(|point| point.phase == phase).max_by(|a, b| {
                let weight = |point: &Point| (point.tokens, point.how_many as f64 * point.ms);
                weight(a).partial_cmp(&weight(b)).unwrap_or(std::cmp::Ordering::Equal)
            });
            if let Some((point, reached)) = heaviest.and_then(|point| Some((point, point.reached?))) {
                findings.push(verdict(view, *provider, point, reached));
            }
        }
    }
    findings
}

fn verdict(view: &View<'_>, provider: Provider, point: &Point, reached: f64) -> String {
    let by_memory = view
        .bounds(provider)
        .is_some_and(|bounds| bounds.gflops.is_none_or(|gflops| point.intensity * bounds.gb_per_s < gflops));
    let bound = if by_memory { "memory bandwidth" } else { "arithmetic" };
    let (name, pass) = (provider_name(provider), pass_name(point.phase, point.tokens));
    let (blocks, part) = (&point.blocks, percent(reached));
    let beyond = if reached > BEYOND { format!("; more than the bound: {WHY_BEYOND}.") } else { ".".to_owned() };
    format!("{name}, {pass}: {part} of the {bound} in {blocks}, where most of the time goes{beyond}")
}
