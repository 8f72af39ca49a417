//! Replaces `Reshape` nodes on weights: a weight of the other shape with the same bytes takes the place of the node.
//!
//! Exporters store one weight for embedding and head, in the shape that the head needs, and reshape it for the embedding. ONNX Runtime computes the
//! reshaped weight when it creates a session, and keeps all of it in memory beside the original, although the embedding would read only a few rows
//! from the file.

use crate::model::Model;
use crate::proto::{GraphProto, NodeProto, TensorProto};
use crate::weights::Storage;
use crate::{tensor, walk};
use std::collections::{BTreeMap, BTreeSet};

/// Replaces each node that only reshapes an external weight by a weight of the new shape. Returns the number of nodes replaced.
pub fn store_reshaped(model: &mut Model) -> usize {
    let Some(graph) = model.proto.graph.as_mut() else { return 0 };
    let outputs: BTreeSet<&str> = graph.output.iter().map(|output| output.name()).collect();
    let is_external = |at: &usize| matches!(model.weights.storage.get(*at), Some(Storage::External(_)));
    let weights: BTreeMap<&str, usize> =
        (0..graph.initializer.len()).filter(is_external).map(|at| (graph.initializer[at].name(), at)).collect();
    let reshaped = |(at, node): (usize, &NodeProto)| {
        let weight = *weights.get(node.input.first()?.as_str())?;
        let is_inside = !outputs.contains(node.output.first()?.as_str());
        let dims = is_inside.then(|| shape_wanted(graph, node, &graph.initializer[weight]))??;
        Some((at, weight, dims))
    };
    let found: Vec<(usize, usize, Vec<i64>)> = graph.node.iter().enumerate().filter_map(reshaped).collect();
    for (node, weight, dims) in &found {
        let name = graph.node[*node].output.first().cloned();
        graph.initializer.push(TensorProto { name, dims: dims.clone(), ..graph.initializer[*weight].clone() });
        model.weights.storage.push(model.weights.storage[*weight]);
    }
    let nodes: BTreeSet<usize> = found.iter().map(|(node, ..)| *node).collect();
    let inputs: BTreeSet<String> = nodes.iter().flat_map(|node| graph.node[*node].input.clone()).collect();
    let mut at = 0..;
    graph.node.retain(|_| at.next().is_none_or(|at| !nodes.contains(&at)));
    remove_unused(graph, &mut model.weights.storage, inputs);
    found.len()
}

/// The dimensions to which a node reshapes a weight. `None` if it does something else, or if the dimensions are not constant.
fn shape_wanted(graph: &GraphProto, node: &NodeProto, weight: &TensorProto) -> Option<Vec<i64>> {
    let is_reshape = matches!(node.domain(), "" | "ai.onnx") && node.op_type() == "Reshape";
    let keeps_zeros = node.attribute.iter().any(|attribute| attribute.name() == "allowzero" && attribute.i() != 0);
    let wanted = integers(graph, node.input.get(1).filter(|_| is_reshape && !keeps_zeros)?)?;
    let elements = tensor::shape_of(weight).ok()?.elements;
    let same = |(at, size): (usize, &i64)| if *size == 0 { weight.dims.get(at).copied() } else { Some(*size) };
    let mut dims: Vec<i64> = wanted.iter().enumerate().map(same).collect::<Option<_>>()?;
    let product = |dims: &[i64]| {
        let known = dims.iter().filter(|size| **size != -1).map(|size| u64::try_from(*size).ok());
        known.into_iter().try_fold(1u64, |product, size| product.checked_mul(size?))
    };
    let known = product(&dims).filter(|known| *known > 0)?;
    if let Some(free) = dims.iter().position(|size| *size == -1) {
        dims[free] = i64::try_from(elements / known).ok()?;
    }
    (product(&dims) == Some(elements) && !dims.contains(&-1)).then_some(dims)
}

/// The elements of a constant list of integers, from an initializer or a node.
fn integers(graph: &GraphProto, name: &str) -> Option<Vec<i64>> {
    let stored = graph.initializer.iter().find(|tensor| tensor.name() == name);
    let computed = || {
        let node = graph.node.iter().find(|node| node.output.first().is_some_and(|output| output == name))?;
        let value = |wanted| node.attribute.iter().find(|attribute| attribute.name() == wanted);
        (node.op_type() == "Constant").then(|| value("value")?.t.as_ref())?
    };
    let tensor = stored.or_else(computed).filter(|tensor| matches!(tensor::is_external(tensor), Ok(false)))?;
    let shape = tensor::shape_of(tensor).ok().filter(tensor::holds_small_ints)?;
    tensor::ints_of(shape.dtype, &tensor::embedded_bytes(tensor, &shape).ok()??)
}

/// Removes the initializers with these names that nothing reads.
fn remove_unused(graph: &mut GraphProto, storage: &mut Vec<Storage>, names: BTreeSet<String>) {
    let mut read: BTreeSet<&str> = graph.output.iter().map(|output| output.name()).collect();
    let mut graphs = vec![&*graph];
    while let Some(graph) = graphs.pop() {
        for node in &graph.node {
            read.extend(node.input.iter().map(String::as_str));
            graphs.extend(walk::bodies(node));
        }
        read.extend(graph.output.iter().map(|output| output.name()));
    }
    let unused: BTreeSet<String> = names.into_iter().filter(|name| !read.contains(name.as_str())).collect();
    let is_unused = |name: Option<&String>| name.is_some_and(|name| unused.contains(name));
    let is_kept: Vec<bool> = graph.initializer.iter().map(|tensor| !is_unused(tensor.name.as_ref())).collect();
    let mut kept = is_kept.iter();
    graph.initializer.retain(|_| kept.next().copied().unwrap_or(true));
    let mut kept = is_kept.iter();
    storage.retain(|_| kept.next().copied().unwrap_or(true));
    graph.node.retain(|node| !(node.op_type() == "Constant" && is_unused(node.output.first())));
    // Early models list weights among their inputs.
    graph.input.retain(|input| !is_unused(input.name.as_ref()));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Weights;
    use crate::proto::{AttributeProto, ModelProto, ValueInfoProto};
    use crate::weights::FileRange;
    use bytes::Bytes;
    use hpp_schema::DType;

    const AT: Storage = Storage::External(FileRange { file: 0, offset: 64, length: 24 });

    fn external(name: &str) -> TensorProto {
        let dims = vec![2, 3, 4];
        let mut tensor = TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::Uint8.to_onnx()),
            dims,
            ..TensorProto::default()
        };
        crate::store::refer(&mut tensor, "weights", 64, 24);
        tensor
    }

    fn shape(name: &str, dims: &[i64]) -> TensorProto {
        let raw: Vec<u8> = dims.iter().flat_map(|size| size.to_le_bytes()).collect();
        TensorProto {
            name: Some(name.into()),
            data_type: Some(DType::Int64.to_onnx()),
            dims: vec![dims.len() as i64],
            raw_data: Some(Bytes::from(raw)),
            ..TensorProto::default()
        }
    }

    fn node(op: &str, input: &[&str], output: &str) -> NodeProto {
        NodeProto {
            op_type: Some(op.into()),
            input: input.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![output.into()],
            ..NodeProto::default()
        }
    }

    fn model(initializer: Vec<TensorProto>, nodes: Vec<NodeProto>, output: &str) -> Model {
        let storage = initializer.iter().map(|tensor| match tensor.external_data.is_empty() {
            true => Storage::Embedded,
            false => AT,
        });
        let weights = Weights { files: vec![], storage: storage.collect() };
        let output = vec![ValueInfoProto { name: Some(output.into()), ..ValueInfoProto::default() }];
        let graph = GraphProto { initializer, node: nodes, output, ..GraphProto::default() };
        let proto = ModelProto { graph: Some(graph), ..ModelProto::default() };
        Model { path: "model.onnx".into(), file: Bytes::new(), proto, weights, notes: vec![] }
    }

    /// The weights with their dimensions, and the operators.
    fn left(model: &Model) -> (Vec<(&str, &[i64])>, Vec<&str>) {
        let graph = model.graph_proto();
        assert_eq!(graph.initializer.len(), model.weights.storage.len());
        let weights = graph.initializer.iter().map(|tensor| (tensor.name(), &*tensor.dims)).collect();
        (weights, graph.node.iter().map(NodeProto::op_type).collect())
    }

    #[test]
    fn a_reshaped_weight_is_stored_once_in_both_shapes() {
        let reads = [node("Reshape", &["w", "to"], "table"), node("Gather", &["table", "ids"], "row")];
        let mut tied = model(
            vec![external("w"), shape("to", &[2, -1])],
            [&reads[..], &[node("MatMulNBits", &["row", "w"], "logits")]].concat(),
            "logits",
        );
        assert_eq!(store_reshaped(&mut tied), 1);
        let both: &[(&str, &[i64])] = &[("w", &[2, 3, 4]), ("table", &[2, 12])];
        assert_eq!(left(&tied), (both.to_vec(), vec!["Gather", "MatMulNBits"]));
        assert_eq!(tied.weights.storage, [AT, AT]);
        // Nothing else reads it; the shape is a node's.
        let tensor = AttributeProto { name: Some("value".into()), t: Some(shape("", &[0, 12])), ..Default::default() };
        let constant = NodeProto { attribute: vec![tensor], ..node("Constant", &[], "to") };
        let mut alone = model(vec![external("w")], [&[constant], &reads[..]].concat(), "row");
        assert_eq!(store_reshaped(&mut alone), 1);
        assert_eq!(left(&alone), (vec![("table", &[2, 12][..])], vec!["Gather"]));
        let mut early = model(vec![external("w"), shape("to", &[2, 12])], reads.to_vec(), "row");
        let input = |name: &str| ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() };
        early.proto.graph.as_mut().unwrap().input = ["ids", "w", "to"].map(input).to_vec();
        assert_eq!(store_reshaped(&mut early), 1);
        assert_eq!(early.graph_proto().input, [input("ids")]);
        assert_eq!(store_reshaped(&mut alone), 0);
    }

    #[test]
    fn other_nodes_stay() {
        let keeps = |initializers: Vec<TensorProto>, reader: NodeProto, output: &str| {
            let mut model = model(initializers, vec![reader, node("Gather", &["table", "ids"], "row")], output);
            assert_eq!(store_reshaped(&mut model), 0);
            assert_eq!(model.graph_proto().node.len(), 2);
        };
        let reshape = node("Reshape", &["w", "to"], "table");
        let weights = |to: &[i64]| vec![external("w"), shape("to", to)];
        // Sizes that do not give as many elements, that are unknown, and an output of the model.
        keeps(weights(&[2, 13]), reshape.clone(), "row");
        keeps(weights(&[5, -1]), reshape.clone(), "row");
        keeps(weights(&[-1, -1]), reshape.clone(), "row");
        keeps(vec![external("w")], reshape.clone(), "row");
        keeps(weights(&[2, 12]), reshape, "table");
        keeps(weights(&[2, 12]), node("Expand", &["w", "to"], "table"), "row");
        keeps(vec![shape("w", &[6]), shape("to", &[1, 1])], node("Reshape", &["w", "to"], "table"), "row");
    }
}
