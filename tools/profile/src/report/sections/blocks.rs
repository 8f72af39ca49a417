//! Section: time of a pass by class of blocks and by block under each provider, and the bytes of each block.

use super::depth::{self, Series};
use crate::report::axis::{Axis, Scale};
use crate::report::figure::{Figure, Key, SectionItem, Table};
use crate::report::number::{bytes, label, or_dash, percent, time};
use crate::report::palette::{KINDS, MUTED, SLATE, TEXT, kind, provider_look};
use crate::report::panel::{Mark, Panel};
use crate::report::view::{BlockGroup, NAME, Pass, ReportView, phase_name};
use hpp_schema::Provider;

/// Groups with their own colour.
const COLOURED: usize = KINDS.len() - 1;

pub fn parts(view: &ReportView<'_>) -> Vec<SectionItem> {
    let passes = view.passes();
    if passes.is_empty() {
        return vec![SectionItem::Absent("No block has a measured time: see what failed, below.".to_owned())];
    }
    vec![SectionItem::Figure(shares(view, &passes)), SectionItem::Figure(by_depth(view, &passes))]
}

/// The time of a group of blocks in a pass.
struct Share<'a> {
    group: &'a BlockGroup,
    provider: Provider,
    pass: Pass,
    ms: f64,
    /// Part of the whole pass.
    part: f64,
    weight_bytes: u64,
}

fn shares(view: &ReportView<'_>, passes: &[Pass]) -> Figure {
    let groups = coloured(view.groups());
    let mut shares = Vec::new();
    for pass in passes {
        for group in &groups {
            let weights = group.blocks.iter().map(|block| view.blocks()[*block].weight_bytes.0);
            let weight_bytes = weights.fold(0, u64::saturating_add);
            for provider in view.providers.iter().copied() {
                let ms = group_ms(view, group, provider, *pass);
                let part = ms / view.pass_time(provider, *pass).ms;
                shares.push(Share { group, provider, pass: *pass, ms, part, weight_bytes });
            }
        }
    }
    shares.retain(|share| share.ms > 0.0);
    Figure {
        id: "fig-shares".into(),
        title: "Where the time of a pass goes".into(),
        caption: "Milliseconds of all blocks in sequence, without the launch costs of partitions.".into(),
        findings: share_findings(view, &groups, passes),
        legend: groups.iter().enumerate().map(|(at, group)| Key::Area(kind(at), group.name.clone())).collect(),
        panels: passes.iter().map(|pass| share_panel(view, &groups, *pass)).collect(),
        table: Table::of(
            "Times by class of blocks",
            &shares,
            &[
                ("blocks", |share| share.group.name.clone()),
                ("provider", |share| share.provider.name().to_owned()),
                ("phase", |share| share.pass.phase.to_string()),
                ("tokens", |share| share.pass.tokens.to_string()),
                ("all of them", |share| time(share.ms)),
                ("part of the pass", |share| percent(share.part)),
                ("weights", |share| bytes(share.weight_bytes)),
            ],
        ),
    }
}

/// The first groups, and one group of all others.
fn coloured(mut groups: Vec<BlockGroup>) -> Vec<BlockGroup> {
    if groups.len() > COLOURED + 1 {
        let rest = groups.split_off(COLOURED);
        let name = format!("{} other classes", rest.len());
        groups.push(BlockGroup { name, blocks: rest.into_iter().flat_map(|group| group.blocks).collect() });
    }
    groups
}

fn group_ms(view: &ReportView<'_>, group: &BlockGroup, provider: Provider, pass: Pass) -> f64 {
    group.blocks.iter().filter_map(|block| view.ms(*block, provider, pass)).sum()
}

fn share_panel(view: &ReportView<'_>, groups: &[BlockGroup], pass: Pass) -> Panel {
    let rows = view.providers.len();
    let mut bars = vec![Vec::new(); groups.len()];
    let (mut names, mut words, mut longest) = (Vec::new(), Vec::new(), Vec::new());
    for (row, provider) in view.providers.iter().enumerate() {
        let (y, mut x) = ((rows - 1 - row) as f64, 0.0);
        for (group, bars) in groups.iter().zip(&mut bars) {
            let ms = group_ms(view, group, *provider, pass);
            bars.push([(x, y - 0.34), (x + ms, y + 0.22)]);
            x += ms;
        }
        let (text, ink) = match view.pass_time(*provider, pass).missing {
            0 => (time(x), TEXT),
            missing => (format!("{}, {missing} blocks without a time", time(x)), MUTED),
        };
        words.push(Mark::Words { at: (0.0, y + 0.38), words: format!("\u{a0}{text}"), ink });
        names.push((y, provider.name().to_owned()));
        longest.push(x);
    }
    let bars = bars.into_iter().enumerate().map(|(at, bars)| Mark::Bars { bars, ink: kind(at) });
    let title = format!("{}: {pass}", phase_name(pass.phase));
    let text = format!("Milliseconds of {pass}, split by class of blocks, one bar for each provider.");
    let (x, y) = (Axis::from_zero("milliseconds", longest), Axis::rows(rows, names));
    Panel { height: 70.0 + 62.0 * rows.max(1) as f64, ..Panel::new(title, text, x, y, bars.chain(words).collect()) }
}

fn share_findings(view: &ReportView<'_>, groups: &[BlockGroup], passes: &[Pass]) -> Vec<String> {
    let Some(pass) = passes.first().copied() else { return Vec::new() };
    let finding = |provider: &Provider| {
        let ms = |group: &BlockGroup| group_ms(view, group, *provider, pass);
        let whole: f64 = groups.iter().map(ms).sum();
        let largest = groups.iter().max_by(|a, b| ms(a).total_cmp(&ms(b))).filter(|_| whole > 0.0)?;
        let part = percent(ms(largest) / whole);
        Some(format!("{}: {part} of a {} pass is {}.", provider.name(), pass.phase, largest.name))
    };
    view.providers.iter().filter_map(finding).collect()
}

fn by_depth(view: &ReportView<'_>, passes: &[Pass]) -> Figure {
    let blocks = 0..view.blocks().len();
    let panel = |pass: &Pass| {
        let series = |provider: &Provider| Series {
            look: provider_look(*provider),
            values: blocks.clone().filter_map(|at| Some((at as f64, view.ms(at, *provider, *pass)?))).collect(),
        };
        let series: Vec<Series> = view.providers.iter().map(series).collect();
        let title = format!("{}: {pass}", phase_name(pass.phase));
        depth::points(view, &title, "milliseconds per block", Scale::Log, &series)
    };
    let mib = |at: usize| (at as f64, view.blocks()[at].weight_bytes.0 as f64 / f64::from(1 << 20));
    let weights: Vec<(f64, f64)> = blocks.clone().map(mib).collect();
    let weights = depth::bars(view, "Weights", "MiB per block", SLATE, &weights);
    let how = match view.profile.settings.all_blocks {
        true => "Every block was measured by itself.",
        false => "One block of each class was measured and stands for the others: equal points are one measurement.",
    };
    Figure {
        id: "fig-depth".into(),
        title: "Block by block".into(),
        caption: format!(
            "Milliseconds of each block (logarithmic) and MiB of its weights. {how} Blocks that take long for their bytes gain \
             most from a faster processor."
        ),
        findings: Vec::new(),
        legend: view.providers.iter().map(|p| Key::Point(provider_look(*p), p.name().to_owned())).collect(),
        panels: passes.iter().map(panel).chain([weights]).collect(),
        table: depth_table(view, passes),
    }
}

fn depth_table(view: &ReportView<'_>, passes: &[Pass]) -> Table {
    let columns: Vec<(Pass, Provider)> =
        passes.iter().flat_map(|pass| view.providers.iter().map(|provider| (*pass, *provider))).collect();
    let names = columns.iter().map(|(pass, p)| format!("{} {} {}", p.name(), pass.phase, pass.tokens));
    let row = |(at, block): (usize, &hpp_schema::ProfiledBlock)| {
        let about = [label(&block.label, NAME), block.class.to_string(), bytes(block.weight_bytes.0)];
        let times = columns.iter().map(|(pass, provider)| or_dash(view.ms(at, *provider, *pass), time));
        about.into_iter().chain(times).collect()
    };
    Table {
        title: "Times and bytes of every block".into(),
        head: ["block", "class", "weights"].map(str::to_owned).into_iter().chain(names).collect(),
        rows: view.blocks().iter().enumerate().map(row).collect(),
    }
}
