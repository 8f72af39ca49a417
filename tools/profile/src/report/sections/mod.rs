//! The sections of the page, in display order. Each makes its content from the profile.

mod attention;
mod blocks;
mod boundaries;
mod depth;
mod experts;
mod failures;
mod fits;
mod head;
mod hit_rates;
mod hotness;
mod links;
mod neurons;
mod roofline;
mod sensitivity;
mod summary;
mod sweep;

use super::ReportInput;
use super::figure::{Part, Section};
use super::view::View;
use maud::Markup;

/// The part above all sections: model, machine, settings and summary.
pub fn opening(view: &View<'_>) -> Markup {
    head::html(view)
}

/// All sections with content, and a last one that lists the others with the reasons.
pub fn all(view: &View<'_>, input: &ReportInput<'_>) -> Vec<Section> {
    let (mut sections, empty): (Vec<Section>, Vec<Section>) =
        each(view, input).into_iter().partition(Section::shows_something);
    if !empty.is_empty() {
        let reasons = empty.iter().map(|section| format!("{}: {}", section.title, section.reasons().join(" ")));
        sections.push(Section {
            id: "not-measured",
            title: "Not in this profile",
            parts: vec![Part::List(reasons.collect())],
        });
    }
    sections
}

fn each(view: &View<'_>, input: &ReportInput<'_>) -> Vec<Section> {
    vec![
        blocks::section(view),
        roofline::section(view),
        fits::section(view),
        hotness::section(view),
        boundaries::section(view),
        experts::section(view),
        neurons::section(view),
        sensitivity::section(view),
        links::section(view),
        sweep::section(view, input.sweep),
        failures::section(view),
    ]
}
