//! Whether a graph counts the tokens of a text by the lengths of caches that drop tokens: then its positions are wrong beyond what these keep.

use crate::context_limit::are_positions;
use crate::rotary_caches::RotaryInputs;
use hpp_graph::{Graph, Node, Origin, ValueId, ops};
use std::collections::BTreeSet;

/// Whether the graph has positions of tokens, and none of them depends on one of these lengths (symbols of dimensions).
pub(super) fn counts_without(graph: &Graph, lengths: &BTreeSet<&str>) -> bool {
    let positions: Vec<ValueId> = graph.nodes.iter().filter_map(|node| positions_of(graph, node)).collect();
    !positions.is_empty() && !depends(graph, positions, lengths)
}

/// The input of a node that holds positions of tokens, or angles made of them: of a cosine or sine, of rotary embeddings, of a lookup in a table.
fn positions_of(graph: &Graph, node: &Node) -> Option<ValueId> {
    let input = |at: usize| node.inputs.get(at).copied().flatten();
    if let Some(rotary) = RotaryInputs::of(node) {
        return input(rotary.positions);
    }
    match node.op_type.as_str() {
        "Cos" | "Sin" if ops::is_standard(node) => input(0),
        "Gather" if ops::is_standard(node) => {
            let is_table = input(0).is_some_and(|table| graph.weight(table).is_some());
            input(1).filter(|indices| is_table && are_positions(graph, *indices))
        }
        _ => None,
    }
}

/// Whether values depend on one of these lengths. Where a shape is read, its symbols decide; a shape that is not known may have any.
fn depends(graph: &Graph, mut open: Vec<ValueId>, lengths: &BTreeSet<&str>) -> bool {
    let mut seen = BTreeSet::new();
    while let Some(value) = open.pop() {
        let Origin::Node { node, .. } = graph.value(value).origin else { continue };
        let node = graph.node(node);
        if !seen.insert(value) {
            continue;
        }
        if !ops::reads_shape_only(node) {
            open.extend(node.reads());
        } else if read_sizes(graph, node).is_none_or(|symbols| symbols.iter().any(|name| lengths.contains(name))) {
            return true;
        }
    }
    false
}

/// The symbols of the sizes that a node reads; `None` if they are not known.
fn read_sizes<'g>(graph: &'g Graph, node: &Node) -> Option<Vec<&'g str>> {
    let shape = graph.value(node.inputs.first().copied().flatten()?).shape.as_ref()?;
    let sizes = &shape[ops::shape_axes(node, shape.len())];
    let is_known = sizes.iter().all(|size| *size != hpp_schema::Dim::Unknown);
    is_known.then(|| sizes.iter().flat_map(|size| size.symbols()).collect())
}
