//! Section: bandwidth of memory, disk and links, and contention of links and disk with computing.

use crate::rates::planning_point;
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{bytes, plain};
use crate::report::palette::{AMBER, BLUE, GREEN, Look, MarkerShape, PURPLE, VERMILION};
use crate::report::panel::{Panel, curve};
use crate::report::view::ReportView;
use crate::settings::unique;
use hpp_schema::{BandwidthCurve, BandwidthPath, MeasuredContention, MeasuredMachine, Provider};

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    let curves = view.profile.machine.curves.iter().filter(|curve| !curve.points.is_empty());
    let (links, host): (Vec<_>, Vec<_>) = curves.partition(|curve| device(curve).is_some());
    vec![
        match host.is_empty() {
            true => SectionItem::Absent("Bandwidths of memory and disk were not measured.".to_owned()),
            false => SectionItem::Figure(host_figure(&host)),
        },
        match links.is_empty() {
            true => {
                SectionItem::Absent("No device beside the host answered, so there is no link to measure.".to_owned())
            }
            false => SectionItem::Figure(link_figure(view, &links)),
        },
        contention(&view.profile.machine),
    ]
}

fn device(curve: &BandwidthCurve) -> Option<Provider> {
    match curve.path {
        BandwidthPath::Link { provider, .. } => Some(provider),
        BandwidthPath::RamRead | BandwidthPath::DiskRead | BandwidthPath::Decompress => None,
    }
}

fn name_and_look(path: BandwidthPath) -> (&'static str, Look) {
    match path {
        BandwidthPath::RamRead => ("memory, read", Look(BLUE, MarkerShape::Circle)),
        BandwidthPath::DiskRead => ("disk, read past the cache", Look(PURPLE, MarkerShape::Square)),
        BandwidthPath::Decompress => ("decompressing weights", Look(AMBER, MarkerShape::Diamond)),
        BandwidthPath::Link { to_device, pinned, .. } => match (to_device, pinned) {
            (true, true) => ("to the device, pinned", Look(VERMILION, MarkerShape::Triangle)),
            (true, false) => ("to the device, pageable", Look(AMBER, MarkerShape::Circle)),
            (false, true) => ("from the device, pinned", Look(GREEN, MarkerShape::Diamond)),
            (false, false) => ("from the device, pageable", Look(BLUE, MarkerShape::Square)),
        },
    }
}

fn panel(title: &str, curves: &[&BandwidthCurve]) -> Panel {
    let points = || curves.iter().flat_map(|curve| &curve.points);
    let x = Axis::bytes("bytes in one piece", points().map(|point| point.bytes as f64));
    let y = Axis::log("1e9 bytes per second", points().map(|point| point.gb_per_s));
    let marks = curves.iter().flat_map(|of| {
        curve(of.points.iter().map(|point| (point.bytes as f64, point.gb_per_s)).collect(), name_and_look(of.path).1)
    });
    let text = format!("{title}: bandwidth by size of the piece, {} curves, both axes logarithmic.", curves.len());
    Panel::new(title, text, x, y, marks.collect())
}

fn table(curves: &[&BandwidthCurve]) -> Table {
    Table::of(
        "Bandwidths",
        curves,
        &[
            ("path", |curve| {
                let owner = device(curve).map_or(String::new(), |provider| format!("{}, ", provider.name()));
                owner + name_and_look(curve.path).0
            }),
            ("bytes: GB/s", |curve| {
                let points = curve.points.iter().map(|p| format!("{}: {}", bytes(p.bytes), plain(p.gb_per_s)));
                points.collect::<Vec<_>>().join(", ")
            }),
        ],
    )
}

fn legend(curves: &[&BandwidthCurve]) -> Vec<Key> {
    let mut looks: Vec<(&str, Look)> = Vec::new();
    for curve in curves {
        let look = name_and_look(curve.path);
        if !looks.contains(&look) {
            looks.push(look);
        }
    }
    looks.into_iter().map(|(name, look)| Key::Point(look, name.to_owned())).collect()
}

fn host_figure(curves: &[&BandwidthCurve]) -> Figure {
    let finding = |curve: &&BandwidthCurve| {
        let what = match curve.path {
            BandwidthPath::RamRead => "Memory is read",
            BandwidthPath::DiskRead => "The disk is read",
            BandwidthPath::Decompress => "One thread decompresses weights",
            BandwidthPath::Link { .. } => return None,
        };
        let point = planning_point(curve).filter(|point| point.gb_per_s.is_finite())?;
        Some(format!("{what} at {} GB/s in pieces of {}.", plain(point.gb_per_s), bytes(point.bytes)))
    };
    let bound = "Weights that every token reads cannot be read faster than that.".to_owned();
    Figure {
        id: "fig-host".into(),
        title: "Memory and disk".into(),
        caption: "Reading with the threads used for computing, by size of the piece; both logarithmic.".into(),
        findings: curves.iter().filter_map(finding).chain([bound]).collect(),
        legend: legend(curves),
        panels: vec![panel("Host", curves)],
        table: table(curves),
    }
}

fn link_figure(view: &ReportView<'_>, curves: &[&BandwidthCurve]) -> Figure {
    let linked = curves.iter().filter_map(|curve| device(curve));
    let (mut panels, mut findings) = (Vec::new(), Vec::new());
    for provider in unique(view.providers.iter().copied().chain(linked)) {
        let own: Vec<&BandwidthCurve> =
            curves.iter().copied().filter(|curve| device(curve) == Some(provider)).collect();
        if !own.is_empty() {
            panels.push(panel(provider.name(), &own));
            findings.extend(verdict(provider, &own));
        }
    }
    findings.push("Pieces on the rising part of a curve pay mostly for starting the copy.".to_owned());
    Figure {
        id: "fig-links".into(),
        title: "Links to the devices".into(),
        caption: "Copies between host and device memory, by size of the piece; both logarithmic.".into(),
        findings,
        legend: legend(curves),
        panels,
        table: table(curves),
    }
}

fn verdict(provider: Provider, curves: &[&BandwidthCurve]) -> Option<String> {
    let best = |pinned: bool| {
        let path = BandwidthPath::Link { provider, to_device: true, pinned };
        let curves = curves.iter().filter(|curve| curve.path == path);
        let rates = curves.flat_map(|curve| &curve.points).map(|point| point.gb_per_s);
        rates.filter(|rate| rate.is_finite()).reduce(f64::max)
    };
    let name = provider.name();
    Some(match (best(true), best(false)) {
        (Some(pinned), Some(pageable)) => {
            format!("To {name}, pinned memory gives {} GB/s and pageable {}.", plain(pinned), plain(pageable))
        }
        (pinned, pageable) => format!("To {name}, {} GB/s.", plain(pinned.or(pageable)?)),
    })
}

/// A slowdown factor in words.
fn as_long(factor: f64) -> String {
    if factor < 1.005 { "as long as alone".to_owned() } else { format!("{} times as long", plain(factor)) }
}

fn contention(machine: &MeasuredMachine) -> SectionItem {
    let of_disk = machine.disk_contention.map(|contention| {
        format!(
            "While weights are read from disk, reading host memory takes {}; while the host reads its memory, the disk takes {}.",
            as_long(contention.compute),
            as_long(contention.read)
        )
    });
    let of_link = |contention: &MeasuredContention| {
        format!(
            "While bytes move to {}, reading host memory takes {}; while the host reads its memory, the copy takes {}.",
            contention.provider.name(),
            as_long(contention.compute),
            as_long(contention.link)
        )
    };
    let notes: Vec<String> = of_disk.into_iter().chain(machine.contention.iter().map(of_link)).collect();
    match notes.is_empty() {
        true => SectionItem::Absent("Contention of computing with copies and reads was not measured.".to_owned()),
        false => SectionItem::Note(notes.join(" ")),
    }
}
