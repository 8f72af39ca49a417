//! Caches of fixed size: states that an operator writes the tokens of a pass into, at their positions.

use super::are_positions;
use crate::roles;
use hpp_graph::{Attribute, Graph, Node, NodeId, StateChange, StatePair, ValueId, ops};
use hpp_schema::InputRole;
use std::collections::BTreeSet;

/// The tokens that fit in a state: the size of the axis that positions index. `None` for a state that grows, that is replaced as a
/// whole, or whose positions are wrapped or clipped, as in the cache of a sliding window.
pub fn slots(graph: &Graph, pair: &StatePair) -> Option<u64> {
    if pair.present.is_none() || pair.change != StateChange::Replace {
        return None;
    }
    let writers = writers(graph, pair.past);
    writers.into_iter().filter_map(|(id, cache)| slots_of(graph, graph.node(id), cache)).min()
}

/// The operators that write into a state, each with the value that holds it there: its axes may be in another order.
fn writers(graph: &Graph, past: ValueId) -> Vec<(NodeId, ValueId)> {
    let mut found = Vec::new();
    let mut open = vec![past];
    while let Some(cache) = open.pop() {
        for id in graph.value(cache).consumers.iter().copied() {
            let node = graph.node(id);
            if input(node, 0) != Some(cache) || !ops::is_standard(node) {
                continue;
            }
            match node.op_type.as_str() {
                "Identity" | "Cast" | "Transpose" => open.extend(node.writes()),
                "Scatter" | "ScatterElements" | "ScatterND" | "TensorScatter" => found.push((id, cache)),
                _ => {}
            }
        }
    }
    found
}

/// Slots along the axis that this operator writes at the positions of tokens.
fn slots_of(graph: &Graph, node: &Node, cache: ValueId) -> Option<u64> {
    let shape = graph.value(cache).shape.as_ref()?;
    let named_axis = |default: i64| {
        let axis = node.int("axis").unwrap_or(default);
        usize::try_from(if axis < 0 { axis + shape.len() as i64 } else { axis }).ok()
    };
    let axis = match node.op_type.as_str() {
        "TensorScatter" => named_axis(-2).filter(|_| !is_circular(node) || has_lengths(graph))?,
        _ if !are_plain_positions(graph, input(node, 1)?) => return None,
        "ScatterND" => partly_written_axis(graph, node, cache)?,
        _ => named_axis(0)?,
    };
    shape.get(axis)?.as_fixed()
}

/// Whether the model has an input with the filled part of its caches. That is the length of the text, which a circular cache need not hold.
fn has_lengths(graph: &Graph) -> bool {
    graph.inputs.iter().any(|id| roles::input_role(graph, *id) == InputRole::TotalLengths)
}

fn is_circular(node: &Node) -> bool {
    matches!(node.attributes.get("mode"), Some(Attribute::String(mode)) if mode == b"circular")
}

/// The only axis of fixed size in which `ScatterND` writes another number of elements than the cache has.
fn partly_written_axis(graph: &Graph, node: &Node, cache: ValueId) -> Option<usize> {
    let shape = graph.value(cache).shape.as_ref()?;
    let written = graph.value(input(node, 2)?).shape.as_ref().filter(|written| written.len() == shape.len())?;
    let mut partly =
        (0..shape.len()).filter(|axis| shape[*axis].as_fixed().is_some() && shape[*axis] != written[*axis]);
    partly.next().filter(|_| partly.next().is_none())
}

/// Whether indices are the positions of tokens, perhaps with an offset, and not wrapped or clipped.
fn are_plain_positions(graph: &Graph, indices: ValueId) -> bool {
    let mut seen = BTreeSet::new();
    let mut open = vec![indices];
    while let Some(id) = open.pop() {
        let Some(node) = graph.producer(id).filter(|_| seen.insert(id)).map(|node| graph.node(node)) else { continue };
        match node.op_type.as_str() {
            // The other inputs are shapes and axes.
            "Identity" | "Cast" | "Reshape" | "Expand" | "Unsqueeze" | "Squeeze" | "Flatten" | "Transpose" | "Tile"
            | "Slice" | "Gather" | "CumSum" => open.extend(input(node, 0)),
            "Add" | "Sub" | "Concat" | "Range" => open.extend(node.reads()),
            "Constant" | "ConstantOfShape" | "Shape" | "Size" => {}
            _ => return false,
        }
    }
    are_positions(graph, indices)
}

fn input(node: &Node, at: usize) -> Option<ValueId> {
    node.inputs.get(at).copied().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_graph::Origin;
    use hpp_schema::DType;

    /// A cache `[1, 4, 64, 16]`, into which one operator writes `[1, 4, seq, 16]` at indices that another makes of the positions.
    struct Toy {
        graph: Graph,
        indices: ValueId,
    }

    impl Toy {
        fn new(op: &str) -> Toy {
            let mut toy = Toy { graph: Graph::default(), indices: ValueId(0) };
            let positions = toy.value("position_ids", DType::Int64, &["1", "seq"]);
            toy.graph.inputs.push(positions);
            toy.indices = toy.value("indices", DType::Int64, &["1", "4", "seq", "16"]);
            toy.node(op, &[positions], toy.indices, None);
            toy
        }

        fn value(&mut self, name: &str, dtype: DType, shape: &[&str]) -> ValueId {
            let shape = shape.iter().map(|dim| dim.parse().unwrap()).collect();
            self.graph.add_value(name, Some(dtype), Some(shape), Origin::Input)
        }

        fn node(&mut self, op: &str, inputs: &[ValueId], output: ValueId, attribute: Option<(&str, Attribute)>) {
            self.graph.add_node(Node {
                name: op.into(),
                domain: String::new(),
                op_type: op.into(),
                inputs: inputs.iter().copied().map(Some).collect(),
                captures: vec![],
                outputs: vec![Some(output)],
                attributes: attribute.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
            });
        }

        /// The slots of the cache if this operator writes into it.
        fn written_by(mut self, op: &str, attribute: Option<(&str, Attribute)>) -> Option<u64> {
            let shape = ["1", "4", "64", "16"];
            let past = self.value("past", DType::Float32, &shape);
            let tokens = self.value("tokens", DType::Float32, &["1", "4", "seq", "16"]);
            let present = self.value("present", DType::Float32, &shape);
            let inputs =
                if op == "TensorScatter" { [past, tokens, self.indices] } else { [past, self.indices, tokens] };
            self.node(op, &inputs, present, attribute);
            let reader = self.graph.producer(present).unwrap();
            slots(&self.graph, &StatePair { past, present: Some(present), reader, change: StateChange::Replace })
        }
    }

    #[test]
    fn the_axis_of_positions_bounds_a_cache() {
        let axis = |at| Some(("axis", Attribute::Int(at)));
        assert_eq!(Toy::new("Expand").written_by("ScatterElements", axis(2)), Some(64));
        assert_eq!(Toy::new("Expand").written_by("ScatterElements", axis(-1)), Some(16));
        assert_eq!(Toy::new("Expand").written_by("ScatterElements", None), Some(1));
        assert_eq!(Toy::new("Unsqueeze").written_by("ScatterND", None), Some(64));
        assert_eq!(Toy::new("Identity").written_by("TensorScatter", None), Some(64));
        assert_eq!(Toy::new("Identity").written_by("TensorScatter", axis(1)), Some(4));
    }

    #[test]
    fn caches_of_sliding_windows_and_other_states_are_not_bounds() {
        let axis = || Some(("axis", Attribute::Int(2)));
        for op in ["Mod", "Clip", "Min", "Where"] {
            assert_eq!(Toy::new(op).written_by("ScatterElements", axis()), None, "{op}");
        }
        let circular = ("mode", Attribute::String(b"circular".to_vec()));
        assert_eq!(Toy::new("Identity").written_by("TensorScatter", Some(circular)), None);
        assert_eq!(Toy::new("Identity").written_by("Concat", axis()), None);
    }
}
