//! Section: how much rounding the weights of one block changes the logits.

use super::depth::{self, Series};
use crate::report::axis::Scale;
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{label, or_dash, percent, plain};
use crate::report::palette::{BLUE, Look, MarkerShape, PURPLE, VERMILION};
use crate::report::view::{NAME, ReportView};
use hpp_schema::Sensitivity;

/// Looks of the widths, most bits first; further ones look like the last.
const LOOKS: [Look; 3] =
    [Look(BLUE, MarkerShape::Circle), Look(VERMILION, MarkerShape::Triangle), Look(PURPLE, MarkerShape::Square)];

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    let entries = view.profile.sensitivity.as_slice();
    let measured = entries.iter().any(|entry| entry.kl.is_some() || entry.top1_changed.is_some());
    vec![match entries.first() {
        None => SectionItem::Absent("Not measured; hpp-profile --sensitivity measures it.".to_owned()),
        Some(first) if !measured => {
            let why = first.failure.as_deref().unwrap_or("no numbers and no reason were recorded");
            SectionItem::Absent(format!("No block could be rounded: {}.", label(why, 300)))
        }
        Some(_) => SectionItem::Figure(figure(view, entries)),
    }]
}

fn figure(view: &ReportView<'_>, entries: &[Sensitivity]) -> Figure {
    let mut widths: Vec<u32> = entries.iter().map(|entry| entry.bits).collect();
    widths.sort_unstable_by(|a, b| b.cmp(a));
    widths.dedup();
    let looks: Vec<(Look, u32)> =
        widths.iter().enumerate().map(|(at, bits)| (LOOKS[at.min(LOOKS.len() - 1)], *bits)).collect();
    let series = |read: fn(&Sensitivity) -> Option<f64>| -> Vec<Series> {
        let of_width = |(look, bits): &(Look, u32)| {
            let entries = entries.iter().filter(|entry| entry.bits == *bits);
            Series { look: *look, values: view.along(entries, |entry| (&entry.block, read(entry))) }
        };
        looks.iter().map(of_width).collect()
    };
    let (kl, changed) = (series(|entry| entry.kl), series(|entry| entry.top1_changed.map(|part| 100.0 * part)));
    Figure {
        id: "fig-sensitivity".into(),
        title: "Rounding one block at a time".into(),
        caption: "Kullback–Leibler divergence of the scores from those of the model as it is, and positions whose best token \
                  changes, when the weights of one block are rounded in groups of 32."
            .into(),
        findings: findings(entries, &widths),
        legend: looks.iter().map(|(look, bits)| Key::Point(*look, format!("{bits} bits"))).collect(),
        panels: vec![
            depth::points(view, "Divergence", "KL in nats", Scale::Log, &kl),
            depth::points(view, "Best token changed", "percent of positions", Scale::Linear, &changed),
        ],
        table: Table::of(
            "Sensitivity of every block",
            entries,
            &[
                ("block", |entry| label(&entry.block, NAME)),
                ("bits", |entry| entry.bits.to_string()),
                ("KL, nats", |entry| or_dash(entry.kl, plain)),
                ("best token changed", |entry| or_dash(entry.top1_changed, percent)),
                ("positions", |entry| entry.positions.to_string()),
                ("why not", |entry| label(entry.failure.as_deref().unwrap_or(""), 120)),
            ],
        ),
    }
}

fn findings(entries: &[Sensitivity], widths: &[u32]) -> Vec<String> {
    let finding = |bits: &u32| {
        let kls = entries.iter().filter(|entry| entry.bits == *bits);
        let kls = kls.filter_map(|entry| Some((entry, entry.kl.filter(|kl| kl.is_finite())?)));
        let (most, kl) = kls.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let (block, kl) = (label(&most.block, NAME), plain(kl));
        Some(format!("At {bits} bits, {block} moves the scores most ({kl} nats): the first to keep as it is."))
    };
    widths.iter().filter_map(finding).collect()
}
