//! The sections of the page, in display order. Each makes its content from the profile.

mod activations;
mod blocks;
mod depth;
mod experts;
mod failures;
mod fits;
mod head;
mod hotness;
mod links;
mod neurons;
mod roofline;
mod sensitivity;
mod sweep;

use super::ReportInput;
use super::figure::{Section, SectionItem};
use super::view::ReportView;

/// The part above all sections: model, machine, settings and summary.
pub use head::html as opening;

/// All sections with content, and a last one that lists the others with the reasons.
pub fn all(view: &ReportView<'_>, input: &ReportInput<'_>) -> Vec<Section> {
    let (mut sections, mut missing) = (Vec::new(), Vec::new());
    for (id, title, parts) in [
        ("blocks", "Blocks by time and bytes", blocks::parts(view)),
        ("roofline", "Roofline: the limits of the processors", roofline::parts(view)),
        ("fits", "Times by tokens, and the curves through them", fits::parts(view)),
        ("hotness", "Hotness: time saved per byte of device memory", hotness::parts(view)),
        ("boundaries", "Activations between the blocks", activations::parts(view)),
        ("experts", "Experts", experts::parts(view)),
        ("neurons", "Neurons", neurons::parts(view)),
        ("sensitivity", "Sensitivity to rounding", sensitivity::parts(view)),
        ("links", "Memory, disk and links", links::parts(view)),
        ("sweep", "The gain from more device memory", sweep::parts(view, input.sweep)),
        ("failures", "Failed measurements", failures::parts(view)),
    ] {
        let section = Section { id, title, parts };
        match section.why_empty() {
            Some(why) => missing.push(format!("{title}: {why}")),
            None => sections.push(section),
        }
    }
    if !missing.is_empty() {
        let parts = vec![SectionItem::List(missing)];
        sections.push(Section { id: "not-measured", title: "Not in this profile", parts });
    }
    sections
}
