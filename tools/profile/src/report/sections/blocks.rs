//! Section: time of a pass by class of blocks and by block under each provider, and the bytes of each block.

use super::depth::{self, Height, Series};
use crate::report::axis::Axis;
use crate::report::figure::{Figure, Form, Key, Part, Section, Table};
use crate::report::number::{bytes, count, label, percent, time};
use crate::report::palette::{KINDS, MUTED, SLATE, TEXT, of_provider};
use crate::report::panel::{Mark, Panel, Shape};
use crate::report::view::{Group, NAME, PHASES, View, phase_name, provider_name};
use hpp_partition::Phase;
use hpp_schema::Provider;

/// Groups with their own colour.
const COLOURED: usize = 6;

/// Times and bytes of blocks.
pub fn section(view: &View<'_>) -> Section {
    let phases: Vec<(Phase, u64)> = PHASES.into_iter().filter_map(|p| Some((p, view.most_tokens(p)?))).collect();
    let parts = match phases.is_empty() {
        true => vec![Part::Absent("No block has a measured time: see what failed, below.".to_owned())],
        false => vec![Part::Figure(shares(view, &phases)), Part::Figure(by_depth(view, &phases))],
    };
    Section { id: "blocks", title: "Blocks by time and bytes", parts }
}

/// Name of a pass.
pub fn pass_name(phase: Phase, tokens: u64) -> String {
    match phase {
        Phase::Decode => format!("one token at {tokens} tokens of context"),
        Phase::Prefill => format!("a prompt of {}", count(tokens, "token", "tokens")),
    }
}

fn shares(view: &View<'_>, phases: &[(Phase, u64)]) -> Figure {
    let groups = coloured(view.groups());
    let legend = groups.iter().enumerate().map(|(at, group)| Key::new(colour(at), Form::Area, &group.name)).collect();
    let mut table = Table::new(
        "Times by class of blocks",
        ["blocks", "provider", "phase", "tokens", "all of them", "part of the pass", "weights"],
    );
    for (phase, tokens) in phases {
        for group in &groups {
            table.rows.extend(view.providers.iter().filter_map(|p| share_row(view, group, *p, *phase, *tokens)));
        }
    }
    Figure {
        id: "fig-shares",
        title: "Where the time of a pass goes".to_owned(),
        caption: "Milliseconds of all blocks one after another, starting partitions apart.".to_owned(),
        findings: share_findings(view, &groups, phases),
        legend,
        panels: phases.iter().map(|(phase, tokens)| share_panel(view, &groups, *phase, *tokens)).collect(),
        table: Some(table),
    }
}

/// The first groups, and one group of all others.
fn coloured(mut groups: Vec<Group>) -> Vec<Group> {
    if groups.len() > COLOURED + 1 {
        let rest = groups.split_off(COLOURED);
        let name = format!("{} other classes", rest.len());
        groups.push(Group { name, blocks: rest.into_iter().flat_map(|group| group.blocks).collect() });
    }
    groups
}

fn colour(at: usize) -> crate::report::palette::Ink {
    KINDS.get(at).copied().unwrap_or(SLATE)
}

fn group_ms(view: &View<'_>, group: &Group, provider: Provider, phase: Phase, tokens: u64) -> f64 {
    group.blocks.iter().filter_map(|block| view.ms(*block, provider, phase, tokens)).sum()
}

fn share_row(view: &View<'_>, group: &Group, provider: Provider, phase: Phase, tokens: u64) -> Option<Vec<String>> {
    let ms = group_ms(view, group, provider, phase, tokens);
    let whole = view.pass(provider, phase, tokens).ms;
    let weights = group.blocks.iter().map(|block| view.blocks()[*block].weight_bytes.0).fold(0, u64::saturating_add);
    let share = percent(ms / whole);
    let name = provider_name(provider).to_owned();
    (ms > 0.0)
        .then(|| vec![group.name.clone(), name, phase.to_string(), tokens.to_string(), time(ms), share, bytes(weights)])
}

fn share_panel(view: &View<'_>, groups: &[Group], phase: Phase, tokens: u64) -> Panel {
    let rows = view.providers.len();
    let mut bars = vec![Vec::new(); groups.len()];
    let mut words = Vec::new();
    let mut longest = Vec::new();
    for (row, provider) in view.providers.iter().enumerate() {
        let (y, mut x) = ((rows - 1 - row) as f64, 0.0);
        for (group, bars) in groups.iter().zip(&mut bars) {
            let ms = group_ms(view, group, *provider, phase, tokens);
            bars.push([(x, y - 0.34), (x + ms, y + 0.22)]);
            x += ms;
        }
        longest.push(x);
        let missing = view.pass(*provider, phase, tokens).missing;
        let what = if missing == 0 { time(x) } else { format!("{}, {missing} blocks without a time", time(x)) };
        words.push(Mark::Words {
            at: (0.0, y + 0.38),
            words: format!("\u{a0}{what}"),
            ink: if missing == 0 { TEXT } else { MUTED },
        });
    }
    let names: Vec<String> = view.providers.iter().map(|provider| provider_name(*provider).to_owned()).collect();
    let mut marks: Vec<Mark> =
        bars.into_iter().enumerate().map(|(at, bars)| Mark::Bars { bars, ink: colour(at) }).collect();
    marks.extend(words);
    let title = format!("{}: {}", phase_name(phase), pass_name(phase, tokens));
    let text =
        format!("Milliseconds of {}, split by class of blocks, one bar for each provider.", pass_name(phase, tokens));
    let mut panel = Panel::new(title, text, Axis::from_zero("milliseconds", longest), Axis::rows(&names), marks);
    panel.height = 70 + 62 * rows.max(1) as i32;
    panel
}

fn share_findings(view: &View<'_>, groups: &[Group], phases: &[(Phase, u64)]) -> Vec<String> {
    let Some((phase, tokens)) = phases.first().copied() else { return Vec::new() };
    let finding = |provider: &Provider| {
        let ms = |group: &Group| group_ms(view, group, *provider, phase, tokens);
        let whole: f64 = groups.iter().map(ms).sum();
        let largest = groups.iter().max_by(|a, b| ms(a).total_cmp(&ms(b))).filter(|_| whole > 0.0)?;
        let (name, part) = (provider_name(*provider), percent(ms(largest) / whole));
        Some(format!("{name}: {part} of a {phase} pass is {}.", largest.name))
    };
    view.providers.iter().filter_map(finding).collect()
}

fn by_depth(view: &View<'_>, phases: &[(Phase, u64)]) -> Figure {
    let labels = view.labels();
    let shapes = [Shape::Circle, Shape::Triangle, Shape::Square];
    let series = |phase, tokens| {
        let of = |(at, provider): (usize, &Provider)| Series {
            ink: of_provider(*provider),
            shape: shapes[at % shapes.len()],
            values: (0..labels.len()).filter_map(|b| Some((b, view.ms(b, *provider, phase, tokens)?))).collect(),
        };
        view.providers.iter().enumerate().map(of).collect::<Vec<_>>()
    };
    let mut panels: Vec<Panel> = Vec::new();
    for (phase, tokens) in phases {
        let title = format!("{}: {}", phase_name(*phase), pass_name(*phase, *tokens));
        panels.push(depth::points(&title, "milliseconds per block", &labels, &series(*phase, *tokens), Height::Log));
    }
    let weight =
        |(at, block): (usize, &hpp_schema::ProfiledBlock)| (at, block.weight_bytes.0 as f64 / f64::from(1 << 20));
    let weights: Vec<(usize, f64)> = view.blocks().iter().enumerate().map(weight).collect();
    panels.push(depth::bars("Weights", "MiB per block", &labels, SLATE, &weights));
    let key = |(at, p): (usize, &Provider)| {
        Key::new(of_provider(*p), Form::Point(shapes[at % shapes.len()]), provider_name(*p))
    };
    Figure {
        id: "fig-depth",
        title: "Block by block".to_owned(),
        caption: depth_caption(view),
        findings: Vec::new(),
        legend: view.providers.iter().enumerate().map(key).collect(),
        panels,
        table: Some(depth_table(view, phases)),
    }
}

fn depth_caption(view: &View<'_>) -> String {
    let how = match view.profile.settings.all_blocks {
        true => "Every block was measured by itself.",
        false => "One block of each class was measured and stands for the others: equal points are one measurement.",
    };
    format!(
        "Milliseconds of each block (logarithmic) and MiB of its weights. {how} Blocks that take long for their bytes gain most from a faster processor."
    )
}

fn depth_table(view: &View<'_>, phases: &[(Phase, u64)]) -> Table {
    let mut head = ["block", "class", "weights"].map(str::to_owned).to_vec();
    for (phase, tokens) in phases {
        head.extend(view.providers.iter().map(|p| format!("{} {phase} {tokens}", provider_name(*p))));
    }
    let mut table = Table::new("Times and bytes of every block", head);
    for (at, block) in view.blocks().iter().enumerate() {
        let mut row = vec![label(&block.label, NAME), block.class.to_string(), bytes(block.weight_bytes.0)];
        for (phase, tokens) in phases {
            let cell = |p: &Provider| view.ms(at, *p, *phase, *tokens).map_or("—".to_owned(), time);
            row.extend(view.providers.iter().map(cell));
        }
        table.rows.push(row);
    }
    table
}
