//! Section: predictions of the planner for a range of VRAM budgets.

use crate::report::Sweep;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{bytes, count, label, plain, time};
use crate::report::palette::{BLUE, GREEN, Ink, VERMILION};
use crate::report::panel::{Mark, Panel, Shape};
use crate::report::view::View;
use hpp_partition::{Mechanisms, Phase, Solution, SweepPoint, Where, Workload};

/// A unit of memory suitable for the largest budget: (name, bytes).
#[derive(Clone, Copy)]
struct Unit(&'static str, f64);

impl Unit {
    fn of(points: &[SweepPoint]) -> Unit {
        let most = points.iter().map(|point| point.vram).max().unwrap_or(0);
        if most >= 1 << 30 { Unit("GiB", (1u64 << 30) as f64) } else { Unit("MiB", (1u64 << 20) as f64) }
    }

    fn of_bytes(self, bytes: u64) -> f64 {
        bytes as f64 / self.1
    }
}

/// Predicted speed over VRAM.
pub fn section(view: &View<'_>, sweep: &Sweep) -> Section {
    let part = match sweep {
        Sweep::Absent(why) => Part::Absent(label(why, 400)),
        Sweep::Done { points, .. } if points.iter().all(|point| point.solution.is_err()) => {
            let why = points.iter().find_map(|point| point.solution.as_ref().err());
            Part::Absent(
                why.map_or("No budget was tried.".to_owned(), |why| format!("Nothing fits any budget tried: {why}.")),
            )
        }
        Sweep::Done { points, load, gpu, mechanisms } => Part::Figure(figure(view, points, load, gpu, *mechanisms)),
    };
    Section { id: "sweep", title: "What more device memory would buy", parts: vec![part] }
}

fn solved(points: &[SweepPoint], unit: Unit) -> Vec<(f64, &Solution)> {
    points.iter().filter_map(|point| Some((unit.of_bytes(point.vram), point.solution.as_ref().ok()?))).collect()
}

fn per_second(solution: &Solution) -> f64 {
    if solution.decode_ms > 0.0 { 1e3 / solution.decode_ms } else { 0.0 }
}

/// Whether a choice, in decode, computes on the CPU, is streamed, or is resident.
fn kind(place: Where) -> usize {
    match place {
        Where::Resident(_) => 0,
        Where::Streamed(_) => 1,
        Where::Cpu => 2,
    }
}

const KIND: [(&str, Ink); 3] =
    [("held on the device", GREEN), ("streamed to it", VERMILION), ("computed by the CPU", BLUE)];

fn counts(solution: &Solution) -> [usize; 3] {
    let mut counts = [0; 3];
    for choice in &solution.choices {
        counts[kind(choice.of(Phase::Decode))] += 1;
    }
    counts
}

fn figure(view: &View<'_>, points: &[SweepPoint], load: &Workload, gpu: &str, mechanisms: Mechanisms) -> Figure {
    let unit = Unit::of(points);
    let solved = solved(points, unit);
    let name = format!("{} of device memory", unit.0);
    let x = || Axis::from_zero(name.clone(), points.iter().map(|point| unit.of_bytes(point.vram)));
    let curve = |title: &str, unit: &str, read: fn(&Solution) -> f64| {
        let values: Vec<(f64, f64)> = solved.iter().map(|(vram, solution)| (*vram, read(solution))).collect();
        let y = Axis::from_zero(unit, values.iter().map(|(_, value)| *value));
        let marks = vec![
            Mark::Line { points: values.clone(), ink: GREEN, width: 2 },
            Mark::Points { points: values, ink: GREEN, shape: Shape::Circle },
        ];
        Panel::new(title, format!("{title}: {unit} by {name}."), x(), y, marks)
    };
    let panels = vec![
        curve("Decode", "predicted tokens per second", per_second),
        curve("Time to first token", "predicted milliseconds", |solution| solution.prefill_ms),
        places(view, &solved, x()),
    ];
    let shown = KIND.iter().enumerate().filter(|(at, _)| solved.iter().any(|(_, solution)| counts(solution)[*at] > 0));
    let shown = shown.map(|(_, kind)| kind);
    Figure {
        id: "fig-sweep",
        title: format!("Predicted speed against memory of {}", label(gpu, 40)),
        caption: caption(load, mechanisms),
        findings: findings(points, &solved, unit),
        legend: shown.map(|(name, ink)| Key::new(*ink, Form::Area, format!("blocks {name}"))).collect(),
        panels,
        table: Some(table(points)),
    }
}

fn places(view: &View<'_>, solved: &[(f64, &Solution)], x: Axis) -> Panel {
    let gaps = solved.windows(2).map(|pair| pair[1].0 - pair[0].0).filter(|gap| *gap > 0.0);
    let half = 0.4 * gaps.fold(f64::INFINITY, f64::min).min(x.values().1 / 4.0);
    let mut marks = Vec::new();
    for (at, (_, ink)) in KIND.iter().enumerate() {
        let bar = |(vram, solution): &(f64, &Solution)| {
            let counts = counts(solution);
            let below: usize = counts[..at].iter().sum();
            [(vram - half, below as f64), (vram + half, (below + counts[at]) as f64)]
        };
        marks.push(Mark::Bars { bars: solved.iter().map(bar).collect(), ink: *ink });
    }
    let y = Axis::from_zero("blocks", [view.blocks().len() as f64]);
    Panel::new(
        "Where blocks compute in decode",
        "Number of blocks held, streamed and on the CPU by device memory.",
        x,
        y,
        marks,
    )
}

fn table(points: &[SweepPoint]) -> Table {
    let head = ["device memory", "tokens per second", "time to first token", "held", "streamed", "CPU", "proven best"];
    let mut table = Table::new("Plans under each budget", head);
    let row = |point: &SweepPoint| match &point.solution {
        Ok(solution) => {
            let mut row = vec![bytes(point.vram), plain(per_second(solution)), time(solution.prefill_ms)];
            row.extend(counts(solution).map(|count| count.to_string()));
            row.push(if solution.proven { "yes" } else { "no" }.to_owned());
            row
        }
        Err(why) => {
            let mut row = vec![bytes(point.vram), format!("nothing fits: {why}")];
            row.resize(7, "—".to_owned());
            row
        }
    };
    table.rows.extend(points.iter().map(row));
    table
}

fn caption(load: &Workload, mechanisms: Mechanisms) -> String {
    let how = match mechanisms {
        Mechanisms::ResidentCpu => "blocks held on the device or computed by the CPU",
        Mechanisms::ResidentCpuDisk => {
            "blocks held on the device or computed by the CPU, from disk where memory is too small"
        }
        Mechanisms::All => "blocks held on the device, streamed to it or computed by the CPU",
    };
    let prompt = count(load.prompt_tokens, "token", "tokens");
    format!("Predicted for a prompt of {prompt} and {} after it, {how}; the best plan of each budget.", load.new_tokens)
}

fn findings(points: &[SweepPoint], solved: &[(f64, &Solution)], Unit(unit, _): Unit) -> Vec<String> {
    let mut findings = Vec::new();
    if let (Some((least, first)), Some((most, last))) = (solved.first(), solved.last()) {
        let (slow, fast) = (per_second(first), per_second(last));
        let (rate, range) = (plain(fast), format!("from {} to {} {unit}", plain(*least), plain(*most)));
        if fast < 1.01 * slow {
            findings.push(format!("Device memory makes no difference in decode: {rate} tokens per second {range}."));
        } else {
            findings.push(format!("From {} to {rate} tokens per second {range}.", plain(slow)));
            let enough = solved.iter().find(|(_, solution)| per_second(solution) >= 0.99 * fast);
            findings
                .extend(enough.map(|(vram, _)| format!("More than {} {unit} buys nothing in decode.", plain(*vram))));
        }
    }
    let refused = points.iter().filter(|point| point.solution.is_err()).count();
    if refused > 0 {
        findings.push(format!("{} too small for any plan.", count(refused as u64, "budget is", "budgets are")));
    }
    findings
}
