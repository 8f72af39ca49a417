//! Section: failed measurements with their reasons.

use crate::report::figure::{Part, Section, Table};
use crate::report::number::{count, label};
use crate::report::view::{NAME, View, provider_name};
use hpp_schema::{PhaseCosts, Profile};

/// Most characters of a reason.
const REASON: usize = 400;

/// The failures as a table.
pub fn section(view: &View<'_>) -> Section {
    let failures = all(view.profile);
    let mut parts = vec![match failures.len() {
        0 => Part::Note("Nothing: every measurement that was asked for is here.".to_owned()),
        many => {
            let title = format!("{}, with the reason", count(many as u64, "measurement", "measurements"));
            let rows = failures.into_iter().map(|(what, why)| vec![what, label(&why, REASON)]).collect();
            Part::Table(Table { rows, ..Table::new(title, ["what", "why"]) })
        }
    }];
    parts.push(Part::List(view.profile.notes.iter().map(|note| label(note, REASON)).collect()));
    Section { id: "failures", title: "What could not be measured", parts }
}

/// Each failure as (what, why).
pub fn all(profile: &Profile) -> Vec<(String, String)> {
    let mut failures: Vec<(String, String)> =
        profile.machine.failures.iter().map(|why| ("the machine".to_owned(), why.clone())).collect();
    for class in &profile.classes {
        for costs in &class.providers {
            let what = format!("{} on {}", label(&class.block, NAME), provider_name(costs.provider));
            failures.extend(costs.failure.iter().map(|why| (what.clone(), why.clone())));
            failures.extend(of_phase(&what, "decode", &costs.decode));
            failures.extend(of_phase(&what, "prefill", &costs.prefill));
        }
    }
    for entry in &profile.sensitivity {
        let what = format!("{} at {} bits", label(&entry.block, NAME), entry.bits);
        failures.extend(entry.failure.iter().map(|why| (what.clone(), why.clone())));
    }
    if let Some(corpus) = &profile.corpus {
        failures.extend(corpus.skipped.iter().map(|why| ("a line of the corpus".to_owned(), why.clone())));
        let rest = corpus.skipped_in_all.saturating_sub(corpus.skipped.len() as u64);
        if rest > 0 {
            let what = count(rest, "more line of the corpus", "more lines of the corpus");
            failures.push((what, "reasons are kept for the first few only".to_owned()));
        }
    }
    failures
}

fn of_phase(what: &str, phase: &str, costs: &PhaseCosts) -> Vec<(String, String)> {
    let failed = costs.points.iter().filter_map(|point| Some((point.tokens, point.failure.clone()?)));
    failed.map(|(tokens, why)| (format!("{what}, {phase} at {tokens} tokens"), why)).collect()
}
