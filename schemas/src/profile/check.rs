//! Rules for profiles that the schema cannot express: all parts refer to the same blocks, classes and providers.

use crate::{Finding, Machine, Statistics};
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// All violations of these rules. The value may violate the schema; such parts are skipped.
pub(super) fn beyond_the_schema(profile: &Value) -> Vec<Finding> {
    let mut check = Check { found: Vec::new(), blocks: BTreeMap::new() };
    check.model(&profile["model"]);
    check.text("date", &profile["date"], is_date, "is not a date such as 2026-01-31T12:00:00Z");
    check.settings(&profile["settings"]);
    check.timing("pass.timing", &profile["pass"]["timing"]);
    check.classes(profile);
    for (at, curve) in items(&profile["machine"]["curves"]).enumerate() {
        check.ascending(&format!("machine.curves[{at}].points"), &curve["points"], "bytes");
    }
    for list in ["hotness", "sensitivity"] {
        for (at, entry) in items(&profile[list]).enumerate() {
            check.class_of_block(format!("{list}[{at}].block"), &entry["block"]);
        }
    }
    let nested = nested::<Machine>(&profile["machine"]["rates"]).map(|machine| machine.check());
    check.found.extend(nested.into_iter().flatten().map(|it| below("machine.rates", it)));
    let statistics = nested_statistics(&profile["corpus"]["statistics"]);
    check.found.extend(statistics);
    check.found
}

struct Check<'a> {
    found: Vec<Finding>,
    /// The class of each block.
    blocks: BTreeMap<&'a str, Option<u64>>,
}

impl<'a> Check<'a> {
    fn report(&mut self, place: impl Into<String>, message: impl Into<String>) {
        self.found.push(Finding::error(place, message));
    }

    fn text(&mut self, place: &str, value: &Value, is: fn(&str) -> bool, message: &str) {
        if let Some(text) = value.as_str().filter(|text| !is(text)) {
            self.report(place, format!("{text:?} {message}"));
        }
    }

    fn model(&mut self, model: &'a Value) {
        self.text("model.hash", &model["hash"], is_hash, "is not a BLAKE3 hash of 64 hexadecimal digits");
        if model["blocks"].as_array().is_some_and(Vec::is_empty) {
            self.report("model.blocks", "must list at least one block");
        }
        for (at, block) in items(&model["blocks"]).enumerate() {
            let Some(label) = block["label"].as_str() else { continue };
            if self.blocks.insert(label, block["class"].as_u64()).is_some() {
                self.report(format!("model.blocks[{at}].label"), format!("{label:?} occurs twice"));
            }
        }
    }

    fn settings(&mut self, settings: &Value) {
        for list in ["providers", "contexts", "prefill_tokens"] {
            let place = format!("settings.{list}");
            let entries: Vec<String> = items(&settings[list]).map(Value::to_string).collect();
            if entries.iter().collect::<BTreeSet<_>>().len() < entries.len() {
                self.report(&place, "an entry occurs twice");
            }
            if entries.iter().any(|entry| entry == "0") {
                self.report(&place, "0 tokens cannot be measured");
            }
        }
        if settings["providers"].as_array().is_some_and(Vec::is_empty) {
            self.report("settings.providers", "must list at least one provider");
        }
    }

    /// Checks that every class has one entry (with `all_blocks`, every block), and that each entry has all providers.
    fn classes(&mut self, profile: &Value) {
        let each_block = profile["settings"]["all_blocks"] == true;
        let mut seen = BTreeSet::new();
        for (at, entry) in items(&profile["classes"]).enumerate() {
            let place = format!("classes[{at}]");
            self.check_entry_class(&place, entry);
            let key = if each_block { entry["block"].to_string() } else { entry["class"].to_string() };
            let what = if each_block { "block" } else { "class" };
            if !seen.insert(key.clone()) {
                self.report(format!("{place}.{what}"), format!("{what} {key} occurs twice"));
            }
            self.providers(&place, &entry["providers"], &profile["settings"]["providers"]);
        }
        let mut wanted: BTreeMap<String, &str> = BTreeMap::new();
        for (label, class) in &self.blocks {
            let class = class.map(|class| class.to_string());
            if let Some(key) = if each_block { Some(Value::from(*label).to_string()) } else { class } {
                wanted.entry(key).or_insert(label);
            }
        }
        let missing: Vec<&str> =
            wanted.iter().filter(|(key, _)| !seen.contains(*key)).map(|(_, block)| *block).collect();
        if profile["classes"].is_array() && !missing.is_empty() {
            self.report("classes", format!("no entry for: {}", missing.join(", ")));
        }
    }

    /// Checks that the model has the entry's block, and that the block has the entry's class.
    fn check_entry_class(&mut self, place: &str, entry: &Value) {
        let class = self.class_of_block(format!("{place}.block"), &entry["block"]);
        if let (Some(class), Some(stated)) = (class, entry["class"].as_u64())
            && class != stated
        {
            self.report(format!("{place}.class"), format!("{} is of class {class}, not {stated}", entry["block"]));
        }
    }

    /// The class of a block. Reports the block if the model does not have it.
    fn class_of_block(&mut self, place: String, label: &Value) -> Option<u64> {
        let known = self.blocks.get(label.as_str()?).copied();
        if known.is_none() {
            self.report(place, format!("the model has no block {label}"));
        }
        known.flatten()
    }

    fn providers(&mut self, place: &str, providers: &Value, wanted: &Value) {
        let mut seen = Vec::new();
        for (at, costs) in items(providers).enumerate() {
            let place = format!("{place}.providers[{at}]");
            let provider = &costs["provider"];
            if seen.contains(&provider) {
                self.report(format!("{place}.provider"), format!("{provider} occurs twice"));
            } else if wanted.as_array().is_some_and(|wanted| !wanted.contains(provider)) {
                self.report(format!("{place}.provider"), format!("{provider} is not among settings.providers"));
            }
            seen.push(provider);
            self.costs(&place, costs);
        }
        for missing in items(wanted).filter(|provider| providers.is_array() && !seen.contains(provider)) {
            self.report(format!("{place}.providers"), format!("{missing} is missing"));
        }
    }

    fn costs(&mut self, place: &str, costs: &Value) {
        if costs["run_length"].as_u64().is_some_and(|length| length > self.blocks.len().max(1) as u64) {
            self.report(format!("{place}.run_length"), format!("the model has only {} blocks", self.blocks.len()));
        }
        for phase in ["decode", "prefill"] {
            let points = format!("{place}.{phase}.points");
            self.ascending(&points, &costs[phase]["points"], "tokens");
            for (at, point) in items(&costs[phase]["points"]).enumerate() {
                for timing in ["single", "run"] {
                    self.timing(&format!("{points}[{at}].{timing}"), &point[timing]);
                }
            }
        }
    }

    fn timing(&mut self, place: &str, timing: &Value) {
        let ms = |name: &str| timing[name].as_f64();
        if let (Some(p10), Some(median), Some(p90)) = (ms("p10_ms"), ms("median_ms"), ms("p90_ms"))
            && !(p10 <= median && median <= p90)
        {
            self.report(place, format!("the median {median} ms is not between the deciles {p10} and {p90}"));
        }
    }

    fn ascending(&mut self, place: &str, points: &Value, by: &str) {
        let keys: Vec<u64> = items(points).filter_map(|point| point[by].as_u64()).collect();
        if let Some(pair) = keys.windows(2).find(|pair| pair[0] >= pair[1]) {
            self.report(
                place,
                format!("points must be in increasing order of {by}, but {} precedes {}", pair[0], pair[1]),
            );
        }
    }
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

/// Parses a part of the profile that has its own checks. `None` if the part violates the schema; the schema check then
/// reports it.
fn nested<T: DeserializeOwned>(value: &Value) -> Option<T> {
    if value.is_null() { None } else { serde_json::from_value(value.clone()).ok() }
}

fn nested_statistics(value: &Value) -> Vec<Finding> {
    nested::<Statistics>(value).map(|statistics| statistics.check("corpus.statistics")).unwrap_or_default()
}

fn below(place: &str, inner: Finding) -> Finding {
    Finding { place: format!("{place}.{}", inner.place), ..inner }
}

fn is_hash(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Whether the text starts like `2026-01-31T...`. Does not check the calendar.
fn is_date(text: &str) -> bool {
    let pattern = "dddd-dd-ddT";
    let matches = |(byte, expected): (u8, u8)| if expected == b'd' { byte.is_ascii_digit() } else { byte == expected };
    text.len() > pattern.len() && text.bytes().zip(pattern.bytes()).all(matches)
}
