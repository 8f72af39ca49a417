//! The report: one self-contained HTML page that shows what a profile holds. No network, no scripts, no fonts of its own.

mod axis;
mod figure;
mod number;
mod palette;
mod panel;
mod sections;
#[cfg(test)]
mod tests;
mod view;

use figure::Section;
use hpp_partition::{Mechanisms, Phase, SweepPoint, Work, Workload};
use hpp_schema::Profile;
use maud::{DOCTYPE, Markup, PreEscaped, html};
use std::error::Error;
use view::View;

/// What a report is made from.
#[derive(Clone, Copy, Debug)]
pub struct ReportInput<'a> {
    /// What was measured.
    pub profile: &'a Profile,
    /// What each block computes and reads, by label; blocks that are missing have no place on the roofline.
    pub work: &'a [BlockWork],
    /// What the planner predicts for other amounts of device memory.
    pub sweep: &'a Sweep,
}

/// What a block of the model computes and reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockWork {
    /// Its label.
    pub block: String,
    /// One more token, with which the context has so many.
    pub decode: Vec<(u64, Work)>,
    /// A pass of so many tokens into an empty context.
    pub prefill: Vec<(u64, Work)>,
}

/// Planning again under other budgets, or why there is none.
#[derive(Clone, Debug)]
pub enum Sweep {
    /// The best plan of each budget.
    Done {
        /// Budgets and plans, by budget.
        points: Vec<SweepPoint>,
        /// What the plans were made for.
        load: Workload,
        /// The device, for people.
        gpu: String,
        /// What plans could do with weights.
        mechanisms: Mechanisms,
    },
    /// Why nothing was planned, a sentence for people.
    Absent(String),
}

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A figure cannot be drawn.
    #[error("cannot draw {title:?} of {figure}")]
    Draw {
        /// Its anchor.
        figure: &'static str,
        /// The drawing.
        title: String,
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
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
/// The page may use its own styles and nothing else: a browser refuses scripts and everything from elsewhere.
const POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'";

/// The page. Pure: the same input gives the same text. What the profile says is shown as text, whatever it contains.
pub fn render(input: &ReportInput<'_>) -> Result<String, ReportError> {
    let view = View::new(input);
    let sections = sections::all(&view, input);
    let bodies = sections.iter().map(Section::html).collect::<Result<Vec<_>, _>>()?;
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
                style { (PreEscaped(STYLE)) (PreEscaped(dark_style())) }
            }
            body {
                (sections::opening(&view))
                (contents(&sections))
                main { @for body in bodies { (body) } }
                footer { "Made by hpp-profile " (input.profile.host.hpp) " from a profile begun " (input.profile.date) "." }
            }
        }
    };
    Ok(page.into_string())
}

fn contents(sections: &[Section]) -> Markup {
    html! {
        nav aria-label="Sections" {
            ul { @for section in sections { li { a href=(format!("#{}", section.id)) { (section.title) } } } }
        }
    }
}

fn dark_style() -> String {
    format!("@media (prefers-color-scheme: dark) {{\n{}}}\n", palette::dark_rules())
}
