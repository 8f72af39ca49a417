//! Section: the hotness of each block, and what decides a placement if all are equally hot.

use super::depth;
use crate::hotness::{Evenness, verdict};
use crate::report::figure::{Figure, Part, Section, Table};
use crate::report::number::{bytes, label, percent, plain, time};
use crate::report::palette::{AMBER, PURPLE};
use crate::report::view::{NAME, View, provider_name};
use hpp_schema::{BlockHotness, HotnessTerms, Provider};

/// Most characters of a line of the verdict.
const LINE: usize = 300;

/// Hotness per block.
pub fn section(view: &View<'_>) -> Section {
    let hotness = &view.profile.hotness;
    let mut providers: Vec<Provider> = Vec::new();
    for entry in hotness {
        if !providers.contains(&entry.provider) {
            providers.push(entry.provider);
        }
    }
    let mut parts: Vec<Part> = providers.iter().map(|provider| Part::Figure(figure(view, *provider))).collect();
    if parts.is_empty() {
        let why = "No device was measured beside the CPU, so no block can gain from one: hotness compares the two.";
        parts.push(Part::Absent(why.to_owned()));
        let lines = verdict(view.profile).map_or(Vec::new(), |verdict| verdict.lines);
        parts.push(Part::List(lines.iter().map(|line| sentence(line)).collect()));
    }
    Section { id: "hotness", title: "Hotness: what a byte of device memory buys", parts }
}

fn figure(view: &View<'_>, provider: Provider) -> Figure {
    let labels = view.labels();
    let entries: Vec<(usize, &BlockHotness)> = view
        .profile
        .hotness
        .iter()
        .filter(|entry| entry.provider == provider)
        .filter_map(|entry| Some((labels.iter().position(|name| *name == entry.block)?, entry)))
        .collect();
    let values = |terms: fn(&BlockHotness) -> HotnessTerms| -> Vec<(usize, f64)> {
        entries.iter().map(|(at, entry)| (*at, terms(entry).ms_per_gib)).collect()
    };
    let (decode, prefill) = (values(|entry| entry.decode), values(|entry| entry.prefill));
    let name = provider_name(provider);
    Figure {
        id: match provider {
            Provider::Cuda => "fig-hotness-cuda",
            Provider::Webgpu => "fig-hotness-webgpu",
            Provider::Cpu => "fig-hotness-cpu",
        },
        title: format!("Hotness on {name}"),
        caption: "(CPU time − device time) / (bytes of weights and state on the device), in milliseconds per GiB. A block below \
                  zero is faster on the CPU."
            .to_owned(),
        findings: findings(view, provider, &entries),
        legend: Vec::new(),
        panels: vec![
            depth::bars("Decode", "ms saved per token and GiB", &labels, AMBER, &decode),
            depth::bars("Prefill", "ms saved per prompt and GiB", &labels, PURPLE, &prefill),
        ],
        table: Some(table(name, &entries)),
    }
}

fn table(name: &str, entries: &[(usize, &BlockHotness)]) -> Table {
    let head = ["block", "phase", "CPU", name, "weights", "state", "ms per GiB"];
    let mut table = Table::new("Terms of the hotness", head);
    for (_, entry) in entries {
        for (phase, terms) in [("decode", entry.decode), ("prefill", entry.prefill)] {
            table.rows.push(vec![
                label(&entry.block, NAME),
                phase.to_owned(),
                time(terms.cpu_ms),
                time(terms.gpu_ms),
                bytes(terms.weight_bytes),
                bytes(terms.kv_bytes),
                plain(terms.ms_per_gib),
            ]);
        }
    }
    table
}

fn findings(view: &View<'_>, provider: Provider, entries: &[(usize, &BlockHotness)]) -> Vec<String> {
    let Some(verdict) = verdict(view.profile).filter(|verdict| verdict.provider == Some(provider)) else {
        return Vec::new();
    };
    let mut findings = match verdict.evenness {
        Evenness::Flat => vec![format!("Decode hotness is flat: the layers differ by {}.", percent(verdict.spread))],
        Evenness::Uneven => hottest(entries).into_iter().collect(),
        Evenness::Unknown => vec![],
    };
    if let Some((_, entry)) = entries.get(entries.len() / 2).filter(|_| verdict.evenness == Evenness::Flat) {
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

fn hottest(entries: &[(usize, &BlockHotness)]) -> Option<String> {
    let finite = entries.iter().filter(|(_, entry)| entry.decode.ms_per_gib.is_finite());
    let (_, entry) = finite.max_by(|a, b| a.1.decode.ms_per_gib.total_cmp(&b.1.decode.ms_per_gib))?;
    if entry.decode.ms_per_gib <= 0.0 {
        return Some("No block gains from this device in decode: the CPU is faster with each of them.".to_owned());
    }
    let (block, gain) = (label(&entry.block, NAME), plain(entry.decode.ms_per_gib));
    Some(format!("Hottest in decode is {block} ({gain} ms per GiB): it should get device memory first."))
}
