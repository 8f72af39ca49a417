//! Section: failed measurements with their reasons.

use crate::derive::{PHASES, phase_costs};
use crate::report::figure::{SectionItem, Table};
use crate::report::number::{count, label};
use crate::report::view::{NAME, ReportView};
use hpp_schema::Profile;

/// Most characters of a reason.
const REASON: usize = 400;

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    let failures = all(view.profile);
    let what = match failures.len() {
        0 => SectionItem::Note("Nothing: every requested measurement is here.".to_owned()),
        many => SectionItem::Table(Table::of(
            format!("{}, with the reason", count(many, "measurement", "measurements")),
            &failures,
            &[("what", |(what, _)| what.clone()), ("why", |(_, why)| label(why, REASON))],
        )),
    };
    vec![what, SectionItem::List(view.profile.notes.iter().map(|note| label(note, REASON)).collect())]
}

/// Each failure as (what, why).
pub fn all(profile: &Profile) -> Vec<(String, String)> {
    let mut failures = Vec::new();
    let mut add =
        |what: &str, why: &Option<String>| failures.extend(why.iter().map(|why| (what.to_owned(), why.clone())));
    profile.machine.failures.iter().for_each(|why| add("the machine", &Some(why.clone())));
    for class in &profile.classes {
        for costs in &class.providers {
            let what = format!("{} on {}", label(&class.block, NAME), costs.provider.name());
            add(&what, &costs.failure);
            for phase in PHASES {
                for point in &phase_costs(costs, phase).points {
                    add(&format!("{what}, {phase} at {} tokens", point.tokens), &point.failure);
                }
            }
        }
    }
    for entry in &profile.sensitivity {
        add(&format!("{} at {} bits", label(&entry.block, NAME), entry.bits), &entry.failure);
    }
    if let Some(corpus) = &profile.corpus {
        corpus.skipped.iter().for_each(|why| add("a line of the corpus", &Some(why.clone())));
        let rest = corpus.skipped_in_all.saturating_sub(corpus.skipped.len() as u64);
        if rest > 0 {
            let what = count(rest, "more line of the corpus", "more lines of the corpus");
            add(&what, &Some("reasons are kept for the first few only".to_owned()));
        }
    }
    failures
}
