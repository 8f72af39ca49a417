//! The table that the command prints at the end.

use crate::derive::{PHASES, phase_costs};
use crate::hotness::{Evenness, HotnessVerdict, verdict};
use crate::rates::planning_point;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use hpp_model::fit_error;
use hpp_partition::Phase;
use hpp_schema::{BandwidthPath, ClassCosts, CorpusStatistics, CostPoint, Profile, ProviderCosts};
use std::fmt::Write as _;

/// Text columns before the numeric columns.
const TEXTS: usize = 3;

/// Times of each class, the machine's rates, the corpus and the verdict on hotness.
pub fn summary(profile: &Profile) -> String {
    let mut text = format!("{}\n\n", costs(profile));
    machine(profile, &mut text);
    if let Some(corpus) = &profile.corpus {
        let _ = writeln!(text, "{}", of_corpus(corpus));
    }
    if let Some(verdict) = verdict(profile) {
        let _ = writeln!(text, "hotness of the layers{}", of_layers(&verdict));
    }
    text.trim_end().to_owned()
}

/// The verdict on hotness, as the end of a sentence and lines below it.
fn of_layers(verdict: &HotnessVerdict) -> String {
    let kind = match verdict.evenness {
        Evenness::Unknown => return format!(" cannot be told: {}", verdict.lines.join("; ")),
        Evenness::Flat => "flat",
        Evenness::Uneven => "not flat",
    };
    // If the hottest layer is many times as hot as the coldest, a percentage of the median says less than the times
    // below.
    let apart = match verdict.spread <= 1.0 {
        true => format!(" ({:.0} % between the coldest and the hottest)", verdict.spread * 100.0),
        false => String::new(),
    };
    let lines: String = verdict.lines.iter().map(|line| format!("\n  {line}")).collect();
    format!(": {kind}{apart}{lines}")
}

fn costs(profile: &Profile) -> Table {
    let settings = &profile.settings;
    let mut header: Vec<String> = ["block", "count", "provider"].map(str::to_owned).into();
    header.extend(settings.contexts.iter().map(|tokens| format!("decode at {tokens}")));
    header.extend(settings.prefill_tokens.iter().map(|tokens| format!("prefill {tokens}")));
    header.extend(["launch", "fit error"].map(str::to_owned));
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let columns = header.len();
    table.set_header(header);
    for class in &profile.classes {
        class.providers.iter().for_each(|costs| {
            table.add_row(row(profile, class, costs));
        });
    }
    for column in TEXTS - 2..columns {
        if let Some(column) = table.column_mut(column).filter(|_| column != TEXTS - 1) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

fn row(profile: &Profile, class: &ClassCosts, costs: &ProviderCosts) -> Vec<String> {
    let alike = profile.model.blocks.iter().filter(|block| block.class == class.class).count();
    let alike = if profile.settings.all_blocks { 1 } else { alike };
    let mut row = vec![class.block.clone(), alike.to_string(), costs.provider.id().to_owned()];
    if let Some(failure) = &costs.failure {
        row.push(format!("failed: {}", failure.chars().take(60).collect::<String>()));
        return row;
    }
    for (phase, wanted) in
        [(Phase::Decode, &profile.settings.contexts), (Phase::Prefill, &profile.settings.prefill_tokens)]
    {
        for tokens in wanted {
            let point = phase_costs(costs, phase).points.iter().find(|point| point.tokens == *tokens);
            row.push(match point {
                None => "-".to_owned(),
                // The block's own time is hidden by the launch cost of a partition.
                Some(CostPoint { ms: Some(0.0), .. }) => "< launch".to_owned(),
                Some(point) => point.ms.map_or("failed".to_owned(), ms),
            });
        }
    }
    row.push(costs.launch_ms.map_or("-".to_owned(), ms));
    let worst = PHASES.iter().filter_map(|phase| fit_error(phase_costs(costs, *phase))).reduce(f64::max);
    row.push(worst.map_or("-".to_owned(), |worst| format!("{:.1} %", worst * 100.0)));
    row
}

/// Milliseconds with three significant digits.
fn ms(ms: f64) -> String {
    match ms {
        _ if ms >= 99.5 => format!("{ms:.0} ms"),
        _ if ms >= 9.95 => format!("{ms:.1} ms"),
        _ if ms >= 0.9995 => format!("{ms:.2} ms"),
        _ => format!("{ms:.3} ms"),
    }
}

fn machine(profile: &Profile, text: &mut String) {
    let machine = &profile.machine;
    for curve in &machine.curves {
        let Some(point) = planning_point(curve) else { continue };
        let path = match curve.path {
            BandwidthPath::RamRead => format!("memory read with {} threads", profile.host.threads),
            BandwidthPath::DiskRead => "disk read past the page cache".to_owned(),
            BandwidthPath::Decompress => "weights decompressed by one thread".to_owned(),
            BandwidthPath::Link { provider, to_device, pinned } => {
                let way = if to_device { "host to" } else { "host from" };
                let kind = if pinned { "pinned" } else { "pageable" };
                format!("{way} {} device, {kind}", provider.id())
            }
        };
        let size = hpp_schema::ByteSize(point.bytes).human();
        let _ = writeln!(text, "{path}: {:.2} GB/s in pieces of {size}", point.gb_per_s);
    }
    if let Some(tflops) = machine.tflops {
        let _ = writeln!(text, "arithmetic of the host: {tflops:.3} TFLOP/s");
    }
    if let Some(timing) = profile.pass.as_ref().and_then(|pass| pass.timing) {
        let _ = writeln!(text, "overhead of a token outside its partitions: {}", ms(timing.median_ms));
    }
    if let Some(contention) = machine.disk_contention {
        let _ = writeln!(
            text,
            "at the same time, computing takes {:.2} and reading from disk {:.2} times as long",
            contention.compute, contention.read
        );
    }
    for contention in &machine.contention {
        let _ = writeln!(
            text,
            "at the same time, computing takes {:.2} and copies to the {} device {:.2} times as long",
            contention.compute,
            contention.provider.id(),
            contention.link
        );
    }
}

fn of_corpus(corpus: &CorpusStatistics) -> String {
    let s = &corpus.statistics;
    let mut text = format!(
        "corpus: {} prompts with {} tokens, {} tokens generated",
        s.prompts, s.prompt_tokens, s.generated_tokens
    );
    if corpus.skipped_in_all > 0 {
        let _ = write!(text, "; lines left out: {}", corpus.skipped_in_all);
    }
    text
}

#[cfg(test)]
mod tests;
