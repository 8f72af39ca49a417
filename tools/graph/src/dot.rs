//! Draws blocks and boundaries in Graphviz's language.

use crate::segment::Segmentation;
use crate::weights::weight_bytes;
use crate::{Graph, ValueId};
use hpp_schema::ByteSize;
use std::fmt::Write;

/// A picture of a divided model: one box per block, coloured by class, one arrow per value that crosses.
pub fn to_dot(graph: &Graph, segmentation: &Segmentation) -> String {
    let mut out =
        String::from("digraph model {\n  rankdir=TB;\n  node [shape=box, style=\"rounded,filled\", fontname=sans];\n");
    for (i, block) in segmentation.blocks.iter().enumerate() {
        let bytes = ByteSize(weight_bytes(graph, &block.weights));
        let text = format!("{}\\n{} nodes, {bytes}\\nclass {}", escape(&block.label), block.nodes.len(), block.class.0);
        let _ = writeln!(out, "  b{i} [label=\"{text}\", fillcolor=\"{}\"];", color(block.class.0));
    }
    for (i, label, style) in state_boxes(graph, segmentation) {
        let _ = writeln!(out, "  s{i} [label=\"{label}\", shape=note, fillcolor=white];\n  s{i} -> b{i} [{style}];");
    }
    for edge in edges(graph, segmentation) {
        let _ = writeln!(out, "  {edge}");
    }
    if !segmentation.globals.is_empty() {
        let text = format!("globals\\n{} nodes, recomputed where needed", segmentation.globals.len());
        let _ = writeln!(out, "  globals [label=\"{text}\", style=dashed];");
    }
    out.push_str("}\n");
    out
}

fn state_boxes<'a>(
    graph: &'a Graph,
    segmentation: &'a Segmentation,
) -> impl Iterator<Item = (usize, String, &'static str)> + 'a {
    let with_states = segmentation.blocks.iter().enumerate().filter(|(_, b)| !b.states.is_empty());
    with_states.map(|(i, block)| {
        let names = block.states.iter().map(|s| escape(&graph.value(segmentation.states[*s].pair.past).name));
        (i, names.collect::<Vec<_>>().join("\\n"), "dir=both, style=dashed")
    })
}

/// One arrow from the block that makes a value to each block that reads it.
fn edges(graph: &Graph, segmentation: &Segmentation) -> Vec<String> {
    let mut crossing: Vec<ValueId> = segmentation.boundaries.iter().flat_map(|b| b.values.iter().copied()).collect();
    crossing.sort_unstable();
    crossing.dedup();
    let mut edges = vec![];
    for value in crossing {
        let Some(from) = graph.producer(value).and_then(|p| segmentation.block_of(p)) else { continue };
        let mut readers: Vec<usize> = graph
            .value(value)
            .consumers
            .iter()
            .filter_map(|c| segmentation.block_of(*c))
            .filter(|b| *b > from)
            .collect();
        readers.sort_unstable();
        readers.dedup();
        let shape = graph.value(value).shape.as_ref().map_or_else(|| "?".to_owned(), |s| format!("{s:?}"));
        let label = format!("{}\\n{}", escape(&graph.value(value).name), escape(&shape));
        edges.extend(readers.into_iter().map(|to| format!("b{from} -> b{to} [label=\"{label}\"];")));
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
