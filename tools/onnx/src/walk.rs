//! Visits every tensor and every body of a model, at any depth: initializers, attributes, functions, sparse tensors.

use crate::proto::{AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto};

/// The bodies of a node: the graphs of `If`, `Loop`, `Scan` and similar operators.
pub fn bodies(node: &NodeProto) -> impl Iterator<Item = &GraphProto> {
    node.attribute.iter().flat_map(|a| a.g.iter().chain(&a.graphs))
}

/// The bodies of a node, mutable.
pub fn bodies_mut(node: &mut NodeProto) -> impl Iterator<Item = &mut GraphProto> {
    node.attribute.iter_mut().flat_map(|a| a.g.iter_mut().chain(&mut a.graphs))
}

/// Calls `visit` on every tensor of the model's graph and functions, bodies and attributes included.
pub fn tensors<'a, E>(
    model: &'a ModelProto,
    visit: &mut impl FnMut(&'a TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    model.graph.iter().try_for_each(|graph| tensors_of_graph(graph, visit))?;
    model.functions.iter().flat_map(|f| &f.node).try_for_each(|node| tensors_of_node(node, visit))
}

/// Calls `visit` on every tensor of a graph.
pub fn tensors_of_graph<'a, E>(
    graph: &'a GraphProto,
    visit: &mut impl FnMut(&'a TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    graph.initializer.iter().try_for_each(&mut *visit)?;
    graph.sparse_initializer.iter().flat_map(parts).try_for_each(&mut *visit)?;
    graph.node.iter().try_for_each(|node| tensors_of_node(node, visit))
}

/// Calls `visit` on every tensor inside a node's attributes.
pub fn tensors_of_node<'a, E>(
    node: &'a NodeProto,
    visit: &mut impl FnMut(&'a TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    node.attribute.iter().try_for_each(|attribute| tensors_of_attribute(attribute, visit))
}

fn tensors_of_attribute<'a, E>(
    attribute: &'a AttributeProto,
    visit: &mut impl FnMut(&'a TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    attribute.t.iter().chain(&attribute.tensors).try_for_each(&mut *visit)?;
    attribute.sparse_tensor.iter().chain(&attribute.sparse_tensors).flat_map(parts).try_for_each(&mut *visit)?;
    attribute.g.iter().chain(&attribute.graphs).try_for_each(|graph| tensors_of_graph(graph, visit))
}

fn parts(sparse: &SparseTensorProto) -> impl Iterator<Item = &TensorProto> {
    sparse.values.iter().chain(&sparse.indices)
}

/// Calls `visit` on every tensor that [`tensors`] visits, mutable.
pub fn tensors_mut<E>(
    model: &mut ModelProto,
    visit: &mut impl FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    model.graph.iter_mut().try_for_each(|graph| tensors_of_graph_mut(graph, visit))?;
    model.functions.iter_mut().try_for_each(|function| tensors_of_nodes_mut(&mut function.node, visit))
}

fn tensors_of_graph_mut<E>(
    graph: &mut GraphProto,
    visit: &mut impl FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    graph.initializer.iter_mut().try_for_each(&mut *visit)?;
    graph.sparse_initializer.iter_mut().flat_map(parts_mut).try_for_each(&mut *visit)?;
    tensors_of_nodes_mut(&mut graph.node, visit)
}

fn tensors_of_nodes_mut<E>(
    nodes: &mut [NodeProto],
    visit: &mut impl FnMut(&mut TensorProto) -> Result<(), E>,
) -> Result<(), E> {
    for attribute in nodes.iter_mut().flat_map(|node| &mut node.attribute) {
        attribute.t.iter_mut().chain(&mut attribute.tensors).try_for_each(&mut *visit)?;
        let sparse = attribute.sparse_tensor.iter_mut().chain(&mut attribute.sparse_tensors);
        sparse.flat_map(parts_mut).try_for_each(&mut *visit)?;
        attribute.g.iter_mut().chain(&mut attribute.graphs).try_for_each(|graph| tensors_of_graph_mut(graph, visit))?;
    }
    Ok(())
}

fn parts_mut(sparse: &mut SparseTensorProto) -> impl Iterator<Item = &mut TensorProto> {
    sparse.values.iter_mut().chain(&mut sparse.indices)
}
