//! Renders blocks and boundaries as a Graphviz graph.

use crate::segmentation::Segmentation;
use crate::weights::weight_bytes;
use crate::{Graph, ValueId};
use hpp_schema::ByteSize;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::Range;

/// Whether equal neighbouring blocks are folded into one box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fold {
    /// Consecutive blocks of one class share a box.
    Equal,
    /// Every block has its own box.
    None,
}

/// The blocks of one box.
type Group = Range<usize>;

/// A Graphviz graph of a segmentation: one box per block, or per run of equal blocks if folded, coloured by class, and
/// one arrow per value that crosses a boundary.
pub fn to_dot(graph: &Graph, segmentation: &Segmentation, fold: Fold) -> String {
    let mut out =
        String::from("digraph model {\n  rankdir=TB;\n  node [shape=box, style=\"rounded,filled\", fontname=sans];\n");
    let groups = groups(segmentation, fold);
    for group in &groups {
        let (i, block) = (group.start, &segmentation.blocks[group.start]);
        let bytes = ByteSize(weight_bytes(graph, &block.weights)).human();
        let (nodes, class) = (count(block.nodes.len(), "node"), block.class.0);
        let label = match group.len() {
            1 => escape(&block.label),
            many => format!(
                "{} to {}\\n{many} blocks, each:",
                escape(&block.label),
                escape(&segmentation.blocks[group.end - 1].label)
            ),
        };
        let _ = writeln!(
            out,
            "  b{i} [label=\"{label}\\n{nodes}, {bytes}\\nclass {class}\", fillcolor=\"{}\"];",
            color(class)
        );
    }
    for (i, label, style) in state_boxes(graph, segmentation, &groups) {
        let _ = writeln!(out, "  s{i} [label=\"{label}\", shape=note, fillcolor=white];\n  s{i} -> b{i} [{style}];");
    }
    for edge in edges(graph, segmentation, &groups) {
        let _ = writeln!(out, "  {edge}");
    }
    if !segmentation.globals.is_empty() {
        let text = format!("globals\\n{}, recomputed where needed", count(segmentation.globals.len(), "node"));
        let _ = writeln!(out, "  globals [label=\"{text}\", style=dashed];");
    }
    out.push_str("}\n");
    out
}

fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

fn groups(segmentation: &Segmentation, fold: Fold) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (at, block) in segmentation.blocks.iter().enumerate() {
        match groups.last_mut() {
            Some(group) if fold == Fold::Equal && segmentation.blocks[group.start].class == block.class => {
                group.end += 1
            }
            _ => groups.push(at..at + 1),
        }
    }
    groups
}

fn state_boxes<'a>(
    graph: &'a Graph,
    segmentation: &'a Segmentation,
    groups: &'a [Group],
) -> impl Iterator<Item = (usize, String, &'static str)> + 'a {
    let blocks = groups.iter().map(|group| (group, &segmentation.blocks[group.start]));
    blocks.filter(|(_, block)| !block.states.is_empty()).map(|(group, block)| {
        let names = block.states.iter().map(|s| escape(&graph.value(segmentation.states[*s].pair.past).name));
        let more = (group.len() > 1).then(|| "...".to_owned());
        (group.start, names.chain(more).collect::<Vec<_>>().join("\\n"), "dir=both, style=dashed")
    })
}

/// One arrow from the producing block to each reading block. Within a box, only the first of several arrows of equal
/// shape.
fn edges(graph: &Graph, segmentation: &Segmentation, groups: &[Group]) -> Vec<String> {
    let group_of = |block: usize| groups.iter().find(|group| group.contains(&block)).map_or(block, |group| group.start);
    let mut crossing: Vec<ValueId> = segmentation.boundaries.iter().flat_map(|b| b.values.iter().copied()).collect();
    crossing.sort_unstable();
    crossing.dedup();
    let (mut edges, mut seen) = (vec![], BTreeSet::new());
    for value in crossing {
        let Some(from) = graph.producer(value).and_then(|p| segmentation.block_of(p)) else { continue };
        let mut readers: Vec<usize> = graph
            .value(value)
            .consumers
            .iter()
            .filter_map(|c| segmentation.block_of(*c))
            .filter(|b| *b > from)
            .map(group_of)
            .collect();
        readers.sort_unstable();
        readers.dedup();
        let shape = graph.value(value).shape.as_ref().map_or_else(|| "?".to_owned(), |s| format!("{s:?}"));
        let (from, inner) = (group_of(from), from);
        for to in readers {
            // Equal blocks of one box pass on values of the same shape: draw the first only.
            if from == to && (inner != from || !seen.insert((from, shape.clone()))) {
                continue;
            }
            let label = format!("{}\\n{}", escape(&graph.value(value).name), escape(&shape));
            edges.push(format!("b{from} -> b{to} [label=\"{label}\"];"));
        }
    }
    edges
}

fn color(class: u32) -> &'static str {
    const COLORS: [&str; 8] = ["#cfe2f3", "#d9ead3", "#fff2cc", "#f4cccc", "#d9d2e9", "#fce5cd", "#d0e0e3", "#ead1dc"];
    COLORS[class as usize % COLORS.len()]
}

fn escape(text: &str) -> String {
    text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ")
}
