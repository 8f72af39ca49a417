//! The report: renders a profile as one self-contained HTML page without network access, scripts or fonts.

mod axis;
mod figure;
mod number;
mod palette;
mod panel;
mod sections;
#[cfg(test)]
mod tests;
mod view;

use hpp_partition::{Phase, SweepPoint, Work, Workload};
use hpp_schema::Profile;
use maud::{DOCTYPE, PreEscaped, html};
use view::ReportView;

/// The input of a report.
#[derive(Clone, Copy, Debug)]
pub struct ReportInput<'a> {
    /// The profile.
    pub profile: &'a Profile,
    /// Work of each block, by label; a block without an entry is missing in the roofline.
    pub work: &'a [BlockWork],
    /// Predictions of the planner for a range of VRAM budgets.
    pub sweep: &'a Sweep,
}

/// Work of one block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockWork {
    /// Its label.
    pub block: String,
    /// Work of decoding one token, by the number of context tokens.
    pub decode: Vec<(u64, Work)>,
    /// Work of a prefill into an empty context, by the number of tokens.
    pub prefill: Vec<(u64, Work)>,
}

/// Plans for a range of VRAM budgets.
#[derive(Clone, Debug)]
pub enum Sweep {
    /// The best plan for each budget.
    Done {
        /// Plans, in the order of budgets.
        points: Vec<SweepPoint>,
        /// The workload of the plans.
        load: Workload,
        /// Name of the device.
        gpu: String,
    },
    /// The reason why there are no plans, a sentence.
    Absent(String),
}

impl BlockWork {
    fn of(&self, phase: Phase) -> &[(u64, Work)] {
        match phase {
            Phase::Decode => &self.decode,
            Phase::Prefill => &self.prefill,
        }
    }
}

const STYLE: &str = include_str!("style.css");
/// Content security policy: the browser allows inline styles and blocks scripts and external resources.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// Renders the page. Pure: the same input gives the same text. Escapes all text from the profile.
pub fn render(input: &ReportInput<'_>) -> String {
    let view = ReportView::new(input);
    let sections = sections::all(&view, input);
    let title = format!("{} · HPP profile", number::label(&input.profile.model.name, 80));
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta http-equiv="Content-Security-Policy" content=(POLICY);
                meta name="viewport" content="width=device-width, initial-scale=1";
                meta name="color-scheme" content="light dark";
                title { (title) }
                style { (PreEscaped(palette::style())) (PreEscaped(STYLE)) }
            }
            body {
                (sections::opening(&view))
                nav aria-label="Sections" {
                    ul { @for section in &sections { li { a href=(format!("#{}", section.id)) { (section.title) } } } }
                }
                main { @for section in &sections { (section.html()) } }
                footer { "Made by hpp-profile " (input.profile.host.hpp) " from a profile begun " (input.profile.date) "." }
            }
        }
    };
    page.into_string()
}
