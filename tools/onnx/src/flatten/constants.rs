//! Weights that an exporter left inside `Constant` nodes become initializers, like every other weight.

use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::read::default_domain;
use crate::tensor;

/// Constants from this size on are weights; smaller ones are part of the graph's structure.
const WEIGHT_BYTES: u64 = 16 << 10;

/// Lifts large constants; says how many. The values keep their names.
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
