//! Turns an integer input that counts tokens from the end, of which 0 is all, into a constant 0.

use crate::model::Model;
use crate::names;
use crate::note::DroppedInput;
use crate::proto::{GraphProto, TensorProto};
use crate::read::body::dtype_of;
use crate::read::graph::shape_of;
use crate::weights::Storage;
use hpp_schema::{DType, Dim};

/// Most values between the input and the slices.
const MOST_VALUES: usize = 64;

/// Turns a scalar input, or an input with one integer that is only negated and then the start of slices (`x[-n:]` is all of `x` for 0), into a
/// constant 0, and returns the input as it was. `None`, without a change, if there is no such input, or if it is an index.
pub fn zero_input(model: &mut Model, name: &str) -> Option<DroppedInput> {
    let graph = model.proto.graph.as_mut()?;
    if graph.initializer.iter().any(|tensor| tensor.name() == name) {
        return None;
    }
    let at = graph.input.iter().position(|input| input.name() == name)?;
    let (dtype, shape) = (dtype_of(&graph.input[at]), shape_of(&graph.input[at])?);
    let dtype = dtype.filter(|dtype| matches!(dtype, DType::Int64 | DType::Int32))?;
    let is_one = shape.len() <= 1 && shape.iter().all(|size| size.as_fixed().is_none_or(|size| size == 1));
    let counts_from_the_end =
        if shape.is_empty() { !is_index(graph, name) } else { is_start_from_the_end(graph, name) };
    if !is_one || !counts_from_the_end {
        return None;
    }
    graph.input.remove(at);
    graph.initializer.push(TensorProto {
        name: Some(name.to_owned()),
        dims: vec![1; shape.len()],
        data_type: Some(dtype.to_onnx()),
        raw_data: Some(vec![0; if dtype == DType::Int64 { 8 } else { 4 }].into()),
        ..TensorProto::default()
    });
    model.weights.storage.push(Storage::Embedded);
    let shape = shape.iter().map(|size| Dim::fixed(size.as_fixed().unwrap_or(1))).collect();
    Some(DroppedInput { name: name.to_owned(), dtype: Some(dtype), shape: Some(shape) })
}

/// Whether a node looks something up with a value, perhaps with another type or more axes.
fn is_index(graph: &GraphProto, name: &str) -> bool {
    let mut open = vec![name.to_owned()];
    while let Some(value) = open.pop() {
        for node in graph.node.iter().filter(|node| node.input.contains(&value)) {
            match node.op_type() {
                "Gather" | "GatherND" | "GatherElements" if node.input.get(1) == Some(&value) => return true,
                "Cast" | "Identity" | "Reshape" | "Unsqueeze" | "Squeeze" => open.extend(node.output.clone()),
                _ => {}
            }
        }
        if open.len() > MOST_VALUES {
            return true;
        }
    }
    false
}

/// Whether every reader of a value leads, once negated, to the starts of slices.
fn is_start_from_the_end(graph: &GraphProto, name: &str) -> bool {
    let mut open = vec![(name.to_owned(), false)];
    let mut slices = 0;
    while let Some((value, is_negated)) = open.pop() {
        if graph.output.iter().any(|output| output.name() == value) {
            return false;
        }
        for node in graph.node.iter().filter(|node| names::reads(node).contains(&value.as_str())) {
            let at = node.input.iter().position(|input| *input == value);
            let next = match (node.op_type(), at) {
                ("Neg", Some(0)) => !is_negated,
                ("Cast" | "Identity" | "Reshape" | "Unsqueeze" | "Squeeze", Some(0)) => is_negated,
                ("Slice", Some(1)) if is_negated => {
                    slices += 1;
                    continue;
                }
                _ => return false,
            };
            open.extend(node.output.iter().map(|output| (output.clone(), next)));
        }
        if open.len() > MOST_VALUES {
            return false;
        }
    }
    slices > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proto::tensor_shape_proto::{Dimension, dimension};
    use crate::proto::type_proto::{Tensor, Value};
    use crate::proto::{ModelProto, NodeProto, TensorShapeProto, TypeProto, ValueInfoProto};
    use crate::weights::Weights;
    use bytes::Bytes;

    /// A model whose input `n`, with these sizes, these nodes read.
    fn model(sizes: &[i64], nodes: &[(&str, &[&str], &str)]) -> Model {
        let dim =
            sizes.iter().map(|size| Dimension { value: Some(dimension::Value::DimValue(*size)), denotation: None });
        let shape = Some(TensorShapeProto { dim: dim.collect() });
        let tensor = Value::TensorType(Tensor { elem_type: Some(DType::Int64.to_onnx()), shape });
        let r#type = Some(TypeProto { value: Some(tensor), denotation: None });
        let node = |(op, inputs, output): &(&str, &[&str], &str)| NodeProto {
            op_type: Some((*op).to_owned()),
            input: inputs.iter().map(|name| (*name).to_owned()).collect(),
            output: vec![(*output).to_owned()],
            ..NodeProto::default()
        };
        let graph = GraphProto {
            node: nodes.iter().map(node).collect(),
            input: vec![ValueInfoProto { name: Some("n".into()), r#type, ..ValueInfoProto::default() }],
            output: vec![ValueInfoProto { name: Some("y".into()), ..ValueInfoProto::default() }],
            ..GraphProto::default()
        };
        let proto = ModelProto { graph: Some(graph), ..ModelProto::default() };
        let weights = Weights { files: vec![], storage: vec![] };
        Model { path: "model.onnx".into(), file: Bytes::new(), proto, weights, notes: vec![] }
    }

    #[test]
    fn a_count_from_the_end_becomes_0() {
        let slice =
            [("Neg", &["n"][..], "m"), ("Unsqueeze", &["m", "axis"], "start"), ("Slice", &["x", "start", "end"], "y")];
        for sizes in [&[][..], &[1]] {
            let mut model = model(sizes, &slice);
            assert!(zero_input(&mut model, "n").is_some());
            assert!(model.graph_proto().input.is_empty());
            assert_eq!((model.graph_proto().initializer.len(), model.weights.storage.len()), (1, 1));
        }
        assert!(zero_input(&mut model(&[2], &slice), "n").is_none());
        assert!(zero_input(&mut model(&[], &slice), "other").is_none());
    }

    #[test]
    fn a_scalar_is_a_count_unless_it_is_an_index() {
        let counts = [("Sub", &["length", "n"][..], "start"), ("Slice", &["x", "start", "end"], "y")];
        assert!(zero_input(&mut model(&[], &counts), "n").is_some());
        let index = [("Cast", &["n"][..], "m"), ("Gather", &["x", "m"], "y")];
        assert!(zero_input(&mut model(&[], &index), "n").is_none());
    }

    /// 0 is an index, or the start or the end of something, and not all of it.
    #[test]
    fn other_uses_stay_inputs() {
        for nodes in [
            &[("Gather", &["x", "n"][..], "y")][..],
            &[("Slice", &["x", "n", "end"], "y")],
            &[("Neg", &["n"], "m"), ("Slice", &["x", "first", "m"], "y")],
            &[("Sub", &["length", "n"], "start"), ("Slice", &["x", "start", "end"], "y")],
            &[("Neg", &["n"], "y")],
            &[],
        ] {
            assert!(zero_input(&mut model(&[1], nodes), "n").is_none(), "{nodes:?}");
        }
    }
}
