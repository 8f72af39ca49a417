//! Section: the hotness of each block, and what decides a placement if all are equally hot.

use super::depth;
use crate::hotness::{Evenness, verdict};
use crate::report::figure::{Figure, SectionItem, Table};
use crate::report::number::{bytes, label, percent, plain, time};
use crate::report::palette::{AMBER, PURPLE};
use crate::report::view::{NAME, ReportView};
use crate::settings::unique;
use hpp_schema::{BlockHotness, HotnessTerms, Provider};

/// Most characters of a line of the verdict.
const LINE: usize = 300;

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    let hotness = &view.profile.hotness;
    let providers = unique(hotness.iter().map(|entry| entry.provider));
    if providers.is_empty() {
        let why = "No device was measured beside the CPU, so no block can gain from one: hotness compares the two.";
        let lines = verdict(view.profile).map_or(Vec::new(), |verdict| verdict.lines);
        return vec![
            SectionItem::Absent(why.to_owned()),
            SectionItem::List(lines.iter().map(|line| sentence(line)).collect()),
        ];
    }
    providers.into_iter().map(|provider| SectionItem::Figure(figure(view, provider))).collect()
}

fn figure(view: &ReportView<'_>, provider: Provider) -> Figure {
    let known = |entry: &&BlockHotness| view.blocks().iter().any(|block| block.label == entry.block);
    let entries = view.profile.hotness.iter().filter(|entry| entry.provider == provider).filter(known);
    let entries: Vec<&BlockHotness> = entries.collect();
    let panel = |title, unit, ink, terms: fn(&BlockHotness) -> HotnessTerms| {
        let values = view.along(entries.iter().copied(), |entry| (&entry.block, Some(terms(entry).ms_per_gib)));
        depth::bars(view, title, unit, ink, &values)
    };
    let name = provider.name();
    Figure {
        id: format!("fig-hotness-{}", provider.id()).into(),
        title: format!("Hotness on {name}"),
        caption: "(CPU time − device time) / (bytes of weights and state on the device), in milliseconds per GiB. A block below \
                  zero is faster on the CPU."
            .into(),
        findings: findings(view, provider, &entries),
        legend: Vec::new(),
        panels: vec![
            panel("Decode", "ms saved per token and GiB", AMBER, |entry| entry.decode),
            panel("Prefill", "ms saved per prompt and GiB", PURPLE, |entry| entry.prefill),
        ],
        table: table(name, &entries),
    }
}

fn table(name: &str, entries: &[&BlockHotness]) -> Table {
    let phases = |entry: &&BlockHotness| {
        [("decode", entry.decode), ("prefill", entry.prefill)]
            .map(|(phase, terms)| (label(&entry.block, NAME), phase, terms))
    };
    let rows: Vec<(String, &str, HotnessTerms)> = entries.iter().flat_map(phases).collect();
    Table::of(
        "Terms of the hotness",
        &rows,
        &[
            ("block", |(block, ..)| block.clone()),
            ("phase", |(_, phase, _)| (*phase).to_owned()),
            ("CPU", |(.., terms)| time(terms.cpu_ms)),
            (name, |(.., terms)| time(terms.gpu_ms)),
            ("weights", |(.., terms)| bytes(terms.weight_bytes)),
            ("state", |(.., terms)| bytes(terms.kv_bytes)),
            ("ms per GiB", |(.., terms)| plain(terms.ms_per_gib)),
        ],
    )
}

fn findings(view: &ReportView<'_>, provider: Provider, entries: &[&BlockHotness]) -> Vec<String> {
    let Some(verdict) = verdict(view.profile).filter(|verdict| verdict.provider == Some(provider)) else {
        return Vec::new();
    };
    let mut findings = match verdict.evenness {
        Evenness::Flat => vec![format!("Decode hotness is flat: the layers differ by {}.", percent(verdict.spread))],
        Evenness::Uneven => hottest(entries).into_iter().collect(),
        Evenness::Unknown => vec![],
    };
    if let Some(entry) = entries.get(entries.len() / 2).filter(|_| verdict.evenness == Evenness::Flat) {
        let (terms, block) = (entry.decode, label(&entry.block, NAME));
        let (room, saved) = (terms.weight_bytes.saturating_add(terms.kv_bytes), terms.cpu_ms - terms.gpu_ms);
        findings.push(format!("{block} takes {} there and saves {} per token.", bytes(room), time(saved)));
    }
    findings.extend(verdict.lines.iter().map(|line| sentence(line)));
    findings
}

/// A line as a sentence.
fn sentence(line: &str) -> String {
    let mut letters = line.chars();
    let first: String = letters.next().into_iter().flat_map(char::to_uppercase).collect();
    label(&format!("{first}{}.", letters.as_str().trim_end_matches('.')), LINE)
}

fn hottest(entries: &[&BlockHotness]) -> Option<String> {
    let finite = entries.iter().filter(|entry| entry.decode.ms_per_gib.is_finite());
    let entry = finite.max_by(|a, b| a.decode.ms_per_gib.total_cmp(&b.decode.ms_per_gib))?;
    if entry.decode.ms_per_gib <= 0.0 {
        return Some("No block gains from this device in decode: the CPU is faster with each of them.".to_owned());
    }
    let (block, gain) = (label(&entry.block, NAME), plain(entry.decode.ms_per_gib));
    Some(format!("Hottest in decode is {block} ({gain} ms per GiB): it should get device memory first."))
}
