//! The sections of the page, in the order a reader meets them. Each looks at the profile and says what it sees.

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
use super::figure::Section;
use super::view::View;
use maud::Markup;

/// What stands above all sections: what was measured, how, and what it comes to.
pub fn opening(view: &View<'_>) -> Markup {
    head::html(view)
}

/// All sections with figures.
pub fn all(view: &View<'_>, input: &ReportInput<'_>) -> Vec<Section> {
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
