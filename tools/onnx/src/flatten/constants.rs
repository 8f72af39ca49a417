//! Turns weights in `Constant` nodes into initializers.

use crate::names::default_domain;
use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::tensor;

/// Constants of at least this size are weights; smaller ones are structure.
const WEIGHT_BYTES: u64 = 16 << 10;

/// Turns large constants into initializers of the same names. Returns their number.
pub fn lift(graph: &mut GraphProto) -> usize {
    let large: Vec<NodeProto> = graph.node.extract_if(.., |node| value_of(node).is_some()).collect();
    for node in &large {
        let Some(value) = value_of(node) else { continue };
        graph.initializer.push(TensorProto { name: node.output.first().cloned(), ..value.clone() });
    }
    large.len()
}

fn value_of(node: &NodeProto) -> Option<&TensorProto> {
    let constant = node.op_type() == "Constant" && default_domain(node.domain()).is_empty() && node.output.len() == 1;
    let attribute = node.attribute.first().filter(|a| constant && a.name() == "value")?;
    let value = attribute.t.as_ref()?;
    let bytes = tensor::shape_of(value).ok()?.bytes?;
    (bytes >= WEIGHT_BYTES).then_some(value)
}
