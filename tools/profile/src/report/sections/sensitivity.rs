//! Section: how much rounding the weights of one block changes the logits.

use super::depth::{self, Height, Series};
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{label, percent, plain};
use crate::report::palette::{BLUE, Ink, PURPLE, VERMILION};
use crate::report::panel::Shape;
use crate::report::view::{NAME, View};
use hpp_schema::Sensitivity;

/// Sensitivity per block.
pub fn section(view: &View<'_>) -> Section {
    let measured = view.profile.sensitivity.iter().any(|entry| entry.kl.is_some() || entry.top1_changed.is_some());
    let part = match (view.profile.sensitivity.as_slice(), measured) {
        ([], _) => Part::Absent("Not asked for; hpp-profile --sensitivity measures it.".to_owned()),
        ([first, ..], false) => {
            let why = first.failure.as_deref().unwrap_or("no numbers and no reason were recorded");
            Part::Absent(format!("No block could be rounded: {}.", label(why, 300)))
        }
        (entries, true) => Part::Figure(figure(view, entries)),
    };
    Section { id: "sensitivity", title: "Sensitivity to rounding", parts: vec![part] }
}

fn look(at: usize) -> (Ink, Shape) {
    [(BLUE, Shape::Circle), (VERMILION, Shape::Triangle), (PURPLE, Shape::Square)][at.min(2)]
}

fn figure(view: &View<'_>, entries: &[Sensitivity]) -> Figure {
    let mut widths: Vec<u32> = entries.iter().map(|entry| entry.bits).collect();
    widths.sort_unstable_by(|a, b| b.cmp(a));
    widths.dedup();
    let labels = view.labels();
    let series = |read: fn(&Sensitivity) -> Option<f64>| -> Vec<Series> {
        let of = |(at, bits): (usize, &u32)| {
            let entries = entries.iter().filter(|entry| entry.bits == *bits);
            let place = |e: &Sensitivity| Some((labels.iter().position(|name| *name == e.block)?, read(e)?));
            let (ink, shape) = look(at);
            Series { ink, shape, values: entries.filter_map(place).collect() }
        };
        widths.iter().enumerate().map(of).collect()
    };
    let kl = depth::points("Divergence", "KL in nats", &labels, &series(|entry| entry.kl), Height::Log);
    let changed = series(|entry| entry.top1_changed.map(|part| 100.0 * part));
    let changed = depth::points("Best token changed", "percent of positions", &labels, &changed, Height::Linear);
    let key = |(at, bits): (usize, &u32)| Key::new(look(at).0, Form::Point(look(at).1), format!("{bits} bits"));
    Figure {
        id: "fig-sensitivity",
        title: "Rounding one block at a time".to_owned(),
        caption: "Kullback–Leibler divergence of the scores from those of the model as it is, and positions whose best token \
                  changes, when the weights of one block are rounded in groups of 32."
            .to_owned(),
        findings: findings(entries, &widths),
        legend: widths.iter().enumerate().map(key).collect(),
        panels: vec![kl, changed],
        table: Some(table(entries)),
    }
}

fn table(entries: &[Sensitivity]) -> Table {
    let head = ["block", "bits", "KL, nats", "best token changed", "positions", "why not"];
    let mut table = Table::new("Sensitivity of every block", head);
    table.rows.extend(entries.iter().map(|entry| {
        vec![
            label(&entry.block, NAME),
            entry.bits.to_string(),
            entry.kl.map_or("—".to_owned(), plain),
            entry.top1_changed.map_or("—".to_owned(), percent),
            entry.positions.to_string(),
            label(entry.failure.as_deref().unwrap_or(""), 120),
        ]
    }));
    table
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
