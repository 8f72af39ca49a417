//! Turns an integer input of the graph into a constant 0.

use crate::model::Model;
use crate::note::DroppedInput;
use crate::proto::TensorProto;
use crate::read::body::dtype_of;
use crate::read::graph::shape_of;
use crate::weights::Storage;
use hpp_schema::{DType, Dim};

/// Turns an input with one integer into a constant 0, and returns the input as it was. `None`, without a change, if there is no such input.
pub fn zero_input(model: &mut Model, name: &str) -> Option<DroppedInput> {
    let graph = model.proto.graph.as_mut()?;
    if graph.initializer.iter().any(|tensor| tensor.name() == name) {
        return None;
    }
    let at = graph.input.iter().position(|input| input.name() == name)?;
    let (dtype, shape) = (dtype_of(&graph.input[at]), shape_of(&graph.input[at])?);
    let dtype = dtype.filter(|dtype| matches!(dtype, DType::Int64 | DType::Int32))?;
    let is_one = shape.len() <= 1 && shape.iter().all(|size| size.as_fixed().is_none_or(|size| size == 1));
    if !is_one {
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
