//! Section: predictions of the planner for a range of VRAM budgets.

use crate::report::Sweep;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{bytes, count, label, plain, time};
use crate::report::palette::{BLUE, GREEN, Ink, Look, MarkerShape};
use crate::report::panel::{Mark, Panel, curve};
use crate::report::view::ReportView;
use hpp_partition::{Phase, Placement, Solution, SweepPoint};

pub fn parts(view: &ReportView<'_>, sweep: &Sweep) -> Vec<SectionItem> {
    let (points, load, gpu) = match sweep {
        Sweep::Absent(why) => return vec![SectionItem::Absent(label(why, 400))],
        Sweep::Done { points, load, gpu } => (points, load, gpu),
    };
    let plans = Plans::of(points);
    if plans.solved.is_empty() {
        let why = points.iter().find_map(|point| point.solution.as_ref().err());
        let why = why.map_or("No budget was tried.".to_owned(), |why| format!("Nothing fits any budget tried: {why}."));
        return vec![SectionItem::Absent(why)];
    }
    let prompt = count(load.prompt_tokens, "token", "tokens");
    vec![SectionItem::Figure(Figure {
        id: "fig-sweep".into(),
        title: format!("Predicted speed against memory of {}", label(gpu, 40)),
        caption: format!(
            "Predicted for a prompt of {prompt} and {} after it, blocks held on the device or computed by the CPU; the best plan \
             of each budget without streaming, with passes of {} at most. hpp-split --sweep-vram plans with streaming and shorter passes too.",
            load.new_tokens,
            count(load.passes.iter().copied().max().unwrap_or(1), "token", "tokens"),
        ),
        findings: plans.findings(points.len() - plans.solved.len()),
        legend: vec![
            Key::Area(HELD, "blocks held on the device".to_owned()),
            Key::Area(ON_CPU, "blocks computed by the CPU".to_owned()),
        ],
        panels: vec![
            plans.speed("Decode", "predicted tokens per second", per_second),
            plans.speed("Time to first token", "predicted milliseconds", |plan| plan.prefill_ms),
            plans.places(view.blocks().len()),
        ],
        table: table(points),
    })]
}

/// The budgets with a plan, in a unit of memory that suits the largest.
struct Plans<'a> {
    unit: &'static str,
    /// The largest budget, with a plan or without.
    most: f64,
    solved: Vec<(f64, &'a Solution)>,
}

fn per_second(plan: &Solution) -> f64 {
    if plan.decode_ms > 0.0 { 1e3 / plan.decode_ms } else { 0.0 }
}

const HELD: Ink = GREEN;
const ON_CPU: Ink = BLUE;

/// Number of blocks that the device computes in decode. It holds all of them, because the sweep plans without
/// streaming.
fn held(plan: &Solution) -> usize {
    plan.placements.iter().filter(|placement| placement.in_phase(Phase::Decode) != Placement::Cpu).count()
}

impl<'a> Plans<'a> {
    fn of(points: &'a [SweepPoint]) -> Plans<'a> {
        let most = points.iter().map(|point| point.vram).max().unwrap_or(0);
        let (unit, shift) = if most >= 1 << 30 { ("GiB", 30) } else { ("MiB", 20) };
        let in_unit = |bytes: u64| bytes as f64 / (1u64 << shift) as f64;
        let solved = points.iter().filter_map(|point| Some((in_unit(point.vram), point.solution.as_ref().ok()?)));
        Plans { unit, most: in_unit(most), solved: solved.collect() }
    }

    fn budgets(&self) -> Axis {
        Axis::from_zero(format!("{} of device memory", self.unit), [self.most])
    }

    fn speed(&self, title: &str, unit: &str, read: fn(&Solution) -> f64) -> Panel {
        let values: Vec<(f64, f64)> = self.solved.iter().map(|(vram, plan)| (*vram, read(plan))).collect();
        let (x, y) = (self.budgets(), Axis::from_zero(unit, values.iter().map(|(_, value)| *value)));
        let text = format!("{title}: {unit} by {}.", x.name);
        Panel::new(title, text, x, y, curve(values, Look(GREEN, MarkerShape::Circle)).into())
    }

    fn places(&self, blocks: usize) -> Panel {
        let x = self.budgets();
        let gaps = self.solved.windows(2).map(|pair| pair[1].0 - pair[0].0).filter(|gap| *gap > 0.0);
        let half = 0.4 * gaps.fold(f64::INFINITY, f64::min).min(x.values().1 / 4.0);
        let bars = |ink, range: fn(&Solution) -> (usize, usize)| {
            let bar = |(vram, plan): &(f64, &Solution)| {
                let (from, to) = range(plan);
                [(vram - half, from as f64), (vram + half, to as f64)]
            };
            Mark::Bars { bars: self.solved.iter().map(bar).collect(), ink }
        };
        let marks = vec![bars(HELD, |plan| (0, held(plan))), bars(ON_CPU, |plan| (held(plan), plan.placements.len()))];
        let text = "Number of blocks held and on the CPU by device memory.";
        let y = Axis::from_zero("blocks", [blocks as f64]);
        Panel::new("Where blocks compute in decode", text, x, y, marks)
    }

    /// `refused` is the number of budgets without a plan.
    fn findings(&self, refused: usize) -> Vec<String> {
        let mut findings = Vec::new();
        let unit = self.unit;
        if let (Some((least, first)), Some((most, last))) = (self.solved.first(), self.solved.last()) {
            let (slow, fast) = (per_second(first), per_second(last));
            let (rate, range) = (plain(fast), format!("from {} to {} {unit}", plain(*least), plain(*most)));
            if fast < 1.01 * slow {
                findings
                    .push(format!("Device memory makes no difference in decode: {rate} tokens per second {range}."));
            } else {
                findings.push(format!("From {} to {rate} tokens per second {range}.", plain(slow)));
                let enough = self.solved.iter().find(|(_, plan)| per_second(plan) >= 0.99 * fast);
                let nothing =
                    |(vram, _): &(f64, _)| format!("More than {} {unit} buys nothing in decode.", plain(*vram));
                findings.extend(enough.map(nothing));
            }
        }
        if refused > 0 {
            findings.push(format!("{} too small for any plan.", count(refused, "budget is", "budgets are")));
        }
        findings
    }
}

fn table(points: &[SweepPoint]) -> Table {
    let head = ["device memory", "tokens per second", "time to first token", "held", "CPU", "proven best"];
    let row = |point: &SweepPoint| match &point.solution {
        Ok(plan) => {
            let (speed, first) = (plain(per_second(plan)), time(plan.prefill_ms));
            let (held, cpu) = (held(plan), plan.placements.len() - held(plan));
            let proven = if plan.proven { "yes" } else { "no" }.to_owned();
            vec![bytes(point.vram), speed, first, held.to_string(), cpu.to_string(), proven]
        }
        Err(why) => {
            let mut row = vec![bytes(point.vram), format!("nothing fits: {why}")];
            row.resize(head.len(), "—".to_owned());
            row
        }
    };
    Table {
        title: "Plans under each budget".into(),
        head: head.map(str::to_owned).into(),
        rows: points.iter().map(row).collect(),
    }
}
