//! Section: bandwidth of memory, disk and links, and contention between links and computing.

use crate::rates::planning_point;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{bytes, plain};
use crate::report::palette::{AMBER, BLUE, GREEN, Ink, PURPLE, VERMILION};
use crate::report::panel::{Mark, Panel, Shape};
use crate::report::view::{View, provider_name};
use hpp_schema::{BandwidthCurve, BandwidthPath, MeasuredContention, Provider};

/// Bandwidth curves and contention.
pub fn section(view: &View<'_>) -> Section {
    let curves: Vec<&BandwidthCurve> =
        view.profile.machine.curves.iter().filter(|curve| !curve.points.is_empty()).collect();
    let of = |wanted: fn(&BandwidthPath) -> bool| curves.iter().copied().filter(move |c| wanted(&c.path)).collect();
    let host: Vec<&BandwidthCurve> = of(|path| !matches!(path, BandwidthPath::Link { .. }));
    let link: Vec<&BandwidthCurve> = of(|path| matches!(path, BandwidthPath::Link { .. }));
    let parts = vec![
        match host.is_empty() {
            true => Part::Absent("Bandwidths of memory and disk were not measured.".to_owned()),
            false => Part::Figure(host_figure(&host)),
        },
        match link.is_empty() {
            true => Part::Absent("No device beside the host answered, so there is no link to measure.".to_owned()),
            false => Part::Figure(link_figure(view, &link)),
        },
        contention(view),
    ];
    Section { id: "links", title: "Memory, disk and links", parts }
}

fn name(path: BandwidthPath) -> String {
    match path {
        BandwidthPath::RamRead => "memory, read".to_owned(),
        BandwidthPath::DiskRead => "disk, read past the cache".to_owned(),
        BandwidthPath::Link { to_device, pinned, .. } => {
            let way = if to_device { "to the device" } else { "from the device" };
            format!("{way}, {}", if pinned { "pinned" } else { "pageable" })
        }
    }
}

fn look(path: BandwidthPath) -> (Ink, Shape) {
    match path {
        BandwidthPath::RamRead => (BLUE, Shape::Circle),
        BandwidthPath::DiskRead => (PURPLE, Shape::Square),
        BandwidthPath::Link { to_device: true, pinned: true, .. } => (VERMILION, Shape::Triangle),
        BandwidthPath::Link { to_device: true, pinned: false, .. } => (AMBER, Shape::Circle),
        BandwidthPath::Link { to_device: false, pinned: true, .. } => (GREEN, Shape::Diamond),
        BandwidthPath::Link { to_device: false, pinned: false, .. } => (BLUE, Shape::Square),
    }
}

fn best(curve: &BandwidthCurve) -> f64 {
    curve.points.iter().map(|point| point.gb_per_s).filter(|rate| rate.is_finite()).fold(0.0, f64::max)
}

fn panel(title: &str, curves: &[&BandwidthCurve]) -> Panel {
    let all = || curves.iter().flat_map(|curve| &curve.points);
    let x = Axis::bytes("bytes in one piece", all().map(|point| point.bytes as f64));
    let y = Axis::log("1e9 bytes per second", all().map(|point| point.gb_per_s));
    let mut marks = Vec::new();
    for curve in curves {
        let points: Vec<(f64, f64)> = curve.points.iter().map(|point| (point.bytes as f64, point.gb_per_s)).collect();
        let (ink, shape) = look(curve.path);
        marks.push(Mark::Line { points: points.clone(), ink, width: 2 });
        marks.push(Mark::Points { points, ink, shape });
    }
    let text = format!("{title}: bandwidth by size of the piece, {} curves, both axes logarithmic.", curves.len());
    Panel::new(title, text, x, y, marks)
}

fn table(curves: &[&BandwidthCurve]) -> Table {
    let mut table = Table::new("Bandwidths", ["path", "bytes: GB/s"]);
    let row = |curve: &&BandwidthCurve| {
        let point = |p: &hpp_schema::BandwidthPoint| format!("{}: {}", bytes(p.bytes), plain(p.gb_per_s));
        let owner = match curve.path {
            BandwidthPath::Link { provider, .. } => format!("{}, ", provider_name(provider)),
            _ => String::new(),
        };
        let points: Vec<String> = curve.points.iter().map(point).collect();
        vec![format!("{owner}{}", name(curve.path)), points.join(", ")]
    };
    table.rows.extend(curves.iter().map(row));
    table
}

fn legend(curves: &[&BandwidthCurve]) -> Vec<Key> {
    let mut keys: Vec<Key> = Vec::new();
    for curve in curves {
        let (text, (ink, shape)) = (name(curve.path), look(curve.path));
        if keys.iter().all(|key| key.text != text) {
            keys.push(Key::new(ink, Form::Point(shape), text));
        }
    }
    keys
}

fn host_figure(curves: &[&BandwidthCurve]) -> Figure {
    let finding = |curve: &&BandwidthCurve| {
        let what = if curve.path == BandwidthPath::RamRead { "Memory" } else { "The disk" };
        let point = planning_point(curve).filter(|point| point.gb_per_s.is_finite())?;
        Some(format!("{what} is read at {} GB/s in pieces of {}.", plain(point.gb_per_s), bytes(point.bytes)))
    };
    let mut findings: Vec<String> = curves.iter().filter_map(finding).collect();
    findings.push("Weights that every token reads cannot be read faster than that.".to_owned());
    Figure {
        id: "fig-host",
        title: "Memory and disk".to_owned(),
        caption: "Reading with the threads used for computing, by size of the piece; both logarithmic.".to_owned(),
        findings,
        legend: legend(curves),
        panels: vec![panel("Host", curves)],
        table: Some(table(curves)),
    }
}

fn link_figure(view: &View<'_>, curves: &[&BandwidthCurve]) -> Figure {
    let of = |provider: Provider| -> Vec<&BandwidthCurve> {
        let on = |path: BandwidthPath| matches!(path, BandwidthPath::Link { provider: p, .. } if p == provider);
        curves.iter().copied().filter(|curve| on(curve.path)).collect()
    };
    let with_link = |provider: &Provider| Some((*provider, of(*provider))).filter(|(_, curves)| !curves.is_empty());
    let mut providers = view.providers.clone();
    for curve in curves {
        if let BandwidthPath::Link { provider, .. } = curve.path
            && !providers.contains(&provider)
        {
            providers.push(provider);
        }
    }
    let providers: Vec<(Provider, Vec<&BandwidthCurve>)> = providers.iter().filter_map(with_link).collect();
    let mut findings: Vec<String> = providers.iter().filter_map(|(p, curves)| verdict(*p, curves)).collect();
    findings.push("Pieces on the rising part of a curve pay mostly for starting the copy.".to_owned());
    Figure {
        id: "fig-links",
        title: "Links to the devices".to_owned(),
        caption: "Copies between host and device memory, by size of the piece; both logarithmic.".to_owned(),
        findings,
        legend: legend(curves),
        panels: providers.iter().map(|(provider, curves)| panel(provider_name(*provider), curves)).collect(),
        table: Some(table(curves)),
    }
}

fn verdict(provider: Provider, curves: &[&BandwidthCurve]) -> Option<String> {
    let to = |wanted: bool| {
        let best_of = |curve: &&&BandwidthCurve| matches!(curve.path, BandwidthPath::Link { to_device: true, pinned, .. } if pinned == wanted);
        curves.iter().filter(best_of).map(|curve| best(curve)).reduce(f64::max)
    };
    let name = provider_name(provider);
    match (to(true), to(false)) {
        (Some(pinned), Some(pageable)) => {
            Some(format!("To {name}, pinned memory gives {} GB/s and pageable {}.", plain(pinned), plain(pageable)))
        }
        (pinned, pageable) => Some(format!("To {name}, {} GB/s.", plain(pinned.or(pageable)?))),
    }
}

/// A slowdown factor in words.
fn as_long(factor: f64) -> String {
    if factor < 1.005 { "as long as alone".to_owned() } else { format!("{} times as long", plain(factor)) }
}

fn contention(view: &View<'_>) -> Part {
    let measured = &view.profile.machine.contention;
    if measured.is_empty() {
        return Part::Absent("Contention between computing on the host and copies was not measured.".to_owned());
    }
    let say = |contention: &MeasuredContention| {
        format!(
            "While bytes move to {}, reading host memory takes {}; while the host reads its memory, the copy takes {}.",
            provider_name(contention.provider),
            as_long(contention.compute),
            as_long(contention.link)
        )
    };
    Part::Note(measured.iter().map(say).collect::<Vec<_>>().join(" "))
}
