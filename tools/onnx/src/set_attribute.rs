//! Sets an attribute of nodes.

use crate::Model;
use crate::proto::{AttributeProto, attribute_proto::AttributeType};
use std::collections::HashSet;

/// Sets an integer attribute of the nodes whose first outputs have these names. Does not change nodes inside bodies.
pub fn set_int_attribute(model: &mut Model, first_outputs: &HashSet<String>, name: &str, value: i64) {
    let nodes = model.proto.graph.iter_mut().flat_map(|graph| &mut graph.node);
    for node in nodes.filter(|node| node.output.first().is_some_and(|output| first_outputs.contains(output))) {
        node.attribute.retain(|attribute| attribute.name() != name);
        node.attribute.push(int_attribute(name, value));
    }
}

/// An integer attribute.
pub(crate) fn int_attribute(name: &str, value: i64) -> AttributeProto {
    let r#type = Some(AttributeType::Int as i32);
    AttributeProto { name: Some(name.to_owned()), r#type, i: Some(value), ..AttributeProto::default() }
}
