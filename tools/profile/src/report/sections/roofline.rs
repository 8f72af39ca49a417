//! Section: how close each block is to the limits of the processor: arithmetic intensity against the achieved rate (the roofline
//! model of Williams, Waterman and Patterson, CACM 52(4), 2009).

use crate::derive::PHASES;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{or_dash, percent, plain, time};
use crate::report::palette::{AMBER, AXIS, Look, MarkerShape, PURPLE};
use crate::report::panel::{Mark, Panel};
use crate::report::view::{Bounds, Pass, ReportView};
use hpp_partition::Phase;
use hpp_schema::Provider;

/// A rate above the limit by more than this factor is not noise.
pub const BEYOND: f64 = 1.05;
/// Explanation of rates above the limit of memory bandwidth.
pub const WHY_BEYOND_MEMORY: &str = "caches hold what is read, or the machine was busy while the bound was measured";
/// Explanation of rates above the limit of a host's arithmetic, which hpp-exec measures with one product.
const WHY_BEYOND_PRODUCT: &str = "the bound is the rate of one product of float32 matrices of 2048 by 2048 on this CPU; products of other shapes \
                                  or element types may be faster, clock rates vary, or the machine was busy while it was measured";
/// Explanation of rates above the limit of a device's arithmetic, which is what the model's own blocks reach.
const WHY_BEYOND_BLOCKS: &str = "the bound is the highest rate of the blocks that take long beside a launch, and the time of a shorter block is uncertain";

const DECODE: Look = Look(AMBER, MarkerShape::Circle);
const PREFILL: Look = Look(PURPLE, MarkerShape::Triangle);

/// One class of blocks in one pass.
struct Point {
    provider: Provider,
    blocks: String,
    how_many: usize,
    pass: Pass,
    /// Operations per byte.
    intensity: f64,
    /// 1e9 operations per second.
    gflops: f64,
    ms: f64,
    /// Achieved part of the limit, if there is one.
    reached: Option<f64>,
}

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    if (0..view.blocks().len()).all(|block| view.facts(block).is_none()) {
        let why = "Operations and bytes of the blocks are not known here: give the model to see them.";
        return vec![SectionItem::Absent(why.to_owned())];
    }
    let points: Vec<Point> = view.providers.iter().flat_map(|provider| points(view, *provider)).collect();
    vec![match points.is_empty() {
        true => SectionItem::Absent("No block that computes has a measured time.".to_owned()),
        false => SectionItem::Figure(figure(view, &points)),
    }]
}

impl Bounds {
    /// The limit at this intensity, 1e9 operations per second.
    fn at(&self, intensity: f64) -> f64 {
        self.gflops.unwrap_or(f64::INFINITY).min(intensity * self.gb_per_s)
    }
}

fn points(view: &ReportView<'_>, provider: Provider) -> Vec<Point> {
    let mut points = Vec::new();
    for group in view.groups() {
        let Some(first) = group.blocks.first().copied() else { continue };
        for phase in PHASES {
            let work = view.facts(first).map(|facts| facts.of(phase)).unwrap_or_default();
            for (tokens, work) in work.iter().filter(|(_, work)| work.flops > 0 && work.bytes > 0) {
                let pass = Pass { phase, tokens: *tokens };
                let Some(ms) = view.ms(first, provider, pass).filter(|ms| *ms > 0.0) else { continue };
                let (intensity, gflops) = (work.flops as f64 / work.bytes as f64, work.flops as f64 / ms / 1e6);
                let reached = view.bounds(provider).map(|bounds| gflops / bounds.at(intensity));
                let (blocks, how_many) = (group.name.clone(), group.blocks.len());
                points.push(Point { provider, blocks, how_many, pass, intensity, gflops, ms, reached });
            }
        }
    }
    points
}

fn figure(view: &ReportView<'_>, points: &[Point]) -> Figure {
    let by_provider = || points.chunk_by(|a, b| a.provider == b.provider);
    Figure {
        id: "fig-roofline".into(),
        title: "Roofline".into(),
        caption: "Rate achieved over operations per byte of weights and state read; both logarithmic. Under the slope, memory \
                  decides; under the flat part, arithmetic does."
            .into(),
        findings: by_provider().flat_map(|points| findings(view, points)).collect(),
        legend: vec![
            Key::Point(DECODE, "decode".into()),
            Key::Point(PREFILL, "prefill".into()),
            Key::Line(AXIS, "the most this processor can do".into()),
        ],
        panels: by_provider().map(|points| panel(view, points)).collect(),
        table: Table::of(
            "Work and rates",
            points,
            &[
                ("blocks", |point| point.blocks.clone()),
                ("provider", |point| point.provider.name().to_owned()),
                ("phase", |point| point.pass.phase.to_string()),
                ("tokens", |point| point.pass.tokens.to_string()),
                ("operations per byte", |point| plain(point.intensity)),
                ("GFLOP/s", |point| plain(point.gflops)),
                ("one block", |point| time(point.ms)),
                ("of the bound", |point| or_dash(point.reached, percent)),
            ],
        ),
    }
}

/// The points of one provider under its roof.
fn panel(view: &ReportView<'_>, points: &[Point]) -> Panel {
    let (name, bounds) = (points[0].provider.name(), view.bounds(points[0].provider));
    let ridge = bounds.and_then(|bounds| Some(bounds.gflops? / bounds.gb_per_s));
    let x = Axis::log("operations per byte read", points.iter().map(|point| point.intensity).chain(ridge));
    let (low, high) = x.values();
    let corners = [Some(low), ridge.filter(|ridge| (low..high).contains(ridge)), Some(high)].into_iter().flatten();
    let roof: Vec<(f64, f64)> = corners.filter_map(|at| Some((at, bounds?.at(at)))).collect();
    let rates = points.iter().map(|point| point.gflops).chain(roof.iter().map(|(_, rate)| *rate));
    let y = Axis::log("1e9 operations per second", rates);
    let points_of = |phase: Phase| {
        points.iter().filter(|point| point.pass.phase == phase).map(|point| (point.intensity, point.gflops)).collect()
    };
    let marks = vec![
        Mark::Line { points: roof, ink: AXIS, width: 2 },
        Mark::Points { points: points_of(Phase::Decode), look: DECODE },
        Mark::Points { points: points_of(Phase::Prefill), look: PREFILL },
    ];
    let title = match bounds {
        None => format!("{name}: bounds not measured"),
        Some(Bounds { gb_per_s, gflops }) => {
            let arithmetic =
                gflops.map_or("; arithmetic not measured".into(), |rate| format!(", {} GFLOP/s", plain(rate)));
            format!("{name}: {} GB/s{arithmetic}", plain(gb_per_s))
        }
    };
    Panel::new(title, format!("{} measured points under the roof of {name}.", points.len()), x, y, marks)
}

/// Achieved parts of the limit of the slowest blocks, for each phase of one provider.
fn findings(view: &ReportView<'_>, points: &[Point]) -> Vec<String> {
    let heaviest = |phase: Phase| {
        points.iter().filter(|point| point.pass.phase == phase).max_by(|a, b| {
            let ms = |point: &Point| point.how_many as f64 * point.ms;
            a.pass.tokens.cmp(&b.pass.tokens).then(ms(a).total_cmp(&ms(b)))
        })
    };
    PHASES.into_iter().filter_map(heaviest).filter_map(|point| verdict(view, point)).collect()
}

fn verdict(view: &ReportView<'_>, Point { provider, blocks, pass, intensity, reached, .. }: &Point) -> Option<String> {
    let (reached, bounds) = ((*reached)?, view.bounds(*provider)?);
    let by_memory = bounds.gflops.is_none_or(|gflops| intensity * bounds.gb_per_s < gflops);
    let bound = if by_memory { "memory bandwidth" } else { "arithmetic" };
    let why = match by_memory {
        true => WHY_BEYOND_MEMORY,
        false if provider.uses_host_memory() => WHY_BEYOND_PRODUCT,
        false => WHY_BEYOND_BLOCKS,
    };
    let beyond = if reached > BEYOND { format!("; more than the bound: {why}.") } else { ".".to_owned() };
    let (name, part) = (provider.name(), percent(reached));
    Some(format!("{name}, {pass}: {part} of the {bound} in {blocks}, where most of the time goes{beyond}"))
}
