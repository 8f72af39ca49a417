//! Protobuf records of types and shapes, from the exporter's declarations or from inferred facts.

use crate::proto::tensor_shape_proto::{Dimension, dimension};
use crate::proto::type_proto::{Tensor, Value as TypeValue};
use crate::proto::{TensorShapeProto, TypeProto, ValueInfoProto};
use hpp_graph::Value;
use hpp_schema::{DType, Dim};

/// The record of a value. The exporter's declaration takes precedence if it has a type and a shape; facts replace it
/// otherwise.
pub fn describe(value: &Value, written: Option<&ValueInfoProto>) -> ValueInfoProto {
    let is_complete = |info: &&ValueInfoProto| match info.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        Some(TypeValue::TensorType(tensor)) => tensor.elem_type() != 0 && tensor.shape.is_some(),
        Some(_) => true,
        None => false,
    };
    if let Some(written) = written.filter(is_complete) {
        return written.clone();
    }
    let shape = value.shape.as_ref().map(|dims| shape_proto(dims));
    ValueInfoProto {
        name: Some(value.name.clone()),
        r#type: value.dtype.map(|dtype| tensor_type(dtype, shape)),
        doc_string: written.and_then(|w| w.doc_string.clone()),
        metadata_props: written.map(|w| w.metadata_props.clone()).unwrap_or_default(),
    }
}

/// The record of a tensor of this type and shape.
pub fn tensor(name: &str, dtype: DType, shape: &[Dim]) -> ValueInfoProto {
    let r#type = Some(tensor_type(dtype, Some(shape_proto(shape))));
    ValueInfoProto { name: Some(name.to_owned()), r#type, ..ValueInfoProto::default() }
}

fn tensor_type(dtype: DType, shape: Option<TensorShapeProto>) -> TypeProto {
    let tensor = Tensor { elem_type: Some(dtype.to_onnx()), shape };
    TypeProto { value: Some(TypeValue::TensorType(tensor)), denotation: None }
}

fn shape_proto(dims: &[Dim]) -> TensorShapeProto {
    TensorShapeProto { dim: dims.iter().map(|d| Dimension { value: dim_value(d), denotation: None }).collect() }
}

fn dim_value(dim: &Dim) -> Option<dimension::Value> {
    match (dim, dim.as_fixed()) {
        (Dim::Unknown, _) => None,
        (_, Some(size)) => Some(dimension::Value::DimValue(size as i64)),
        (known, None) => Some(dimension::Value::DimParam(known.to_param())),
    }
}

/// Replaces one dimension of a tensor's record. Does nothing if the rank is unknown.
pub fn set_dim(info: &mut ValueInfoProto, axis: usize, dim: &Dim) {
    let value = info.r#type.as_mut().and_then(|t| t.value.as_mut());
    let Some(TypeValue::TensorType(Tensor { shape: Some(shape), .. })) = value else { return };
    if let Some(slot) = shape.dim.get_mut(axis) {
        *slot = Dimension { value: dim_value(dim), denotation: slot.denotation.take() };
    }
}
