//! Removes metadata that does not affect the results of a model.

use crate::proto::{GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto};
use crate::walk;

/// The name of every canonical graph.
const NAME: &str = "block";

/// The model without docs, metadata, annotations, records of inner values, names of graphs, and names of attribute
/// tensors.
pub fn strip_metadata(model: &ModelProto) -> ModelProto {
    let mut model = ModelProto {
        doc_string: None,
        metadata_props: vec![],
        training_info: vec![],
        configuration: vec![],
        ..model.clone()
    };
    graph(model.graph.get_or_insert_default());
    model
}

fn graph(graph: &mut GraphProto) {
    graph.name = Some(NAME.to_owned());
    graph.doc_string = None;
    graph.metadata_props.clear();
    graph.value_info.clear();
    graph.quantization_annotation.clear();
    graph.input.iter_mut().chain(&mut graph.output).for_each(info);
    graph.initializer.iter_mut().for_each(tensor);
    graph.node.iter_mut().for_each(node);
    let sparse = graph.sparse_initializer.iter_mut();
    for part in sparse.flat_map(|sparse| sparse.values.iter_mut().chain(&mut sparse.indices)) {
        tensor(part);
    }
    for indices in graph.sparse_initializer.iter_mut().filter_map(|sparse| sparse.indices.as_mut()) {
        indices.name = None;
    }
}

fn info(info: &mut ValueInfoProto) {
    info.doc_string = None;
    info.metadata_props.clear();
}

fn tensor(tensor: &mut TensorProto) {
    tensor.doc_string = None;
    tensor.metadata_props.clear();
}

fn node(node: &mut NodeProto) {
    node.doc_string = None;
    node.metadata_props.clear();
    node.device_configurations.clear();
    for attribute in &mut node.attribute {
        attribute.doc_string = None;
        for value in attribute.t.iter_mut().chain(&mut attribute.tensors) {
            value.name = None;
            tensor(value);
        }
        let sparse = attribute.sparse_tensor.iter_mut().chain(&mut attribute.sparse_tensors);
        for part in sparse.flat_map(|sparse| sparse.values.iter_mut().chain(&mut sparse.indices)) {
            part.name = None;
            tensor(part);
        }
    }
    walk::bodies_mut(node).for_each(graph);
}
