//! Builders of small models for tests.

use hpp_onnx::proto::attribute_proto::AttributeType;
use hpp_onnx::proto::tensor_shape_proto::{Dimension, dimension};
use hpp_onnx::proto::type_proto::{Tensor, Value};
use hpp_onnx::proto::*;
use hpp_onnx::{Model, ReadError};
use hpp_schema::DType;
use prost::Message;
use std::error::Error;
use std::path::{Path, PathBuf};

pub fn node(op: &str, inputs: &[&str], outputs: &[&str]) -> NodeProto {
    NodeProto {
        op_type: Some(op.into()),
        name: Some(format!("{op} for {}", outputs.join(" "))),
        input: inputs.iter().map(|s| s.to_string()).collect(),
        output: outputs.iter().map(|s| s.to_string()).collect(),
        ..NodeProto::default()
    }
}

pub fn with(mut node: NodeProto, attribute: AttributeProto) -> NodeProto {
    node.attribute.push(attribute);
    node
}

pub fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto { i: Some(value), ..attribute(name, AttributeType::Int) }
}

pub fn body(name: &str, graph: GraphProto) -> AttributeProto {
    AttributeProto { g: Some(graph), ..attribute(name, AttributeType::Graph) }
}

pub fn reference(name: &str, to: &str) -> AttributeProto {
    AttributeProto { ref_attr_name: Some(to.into()), ..attribute(name, AttributeType::Int) }
}

pub fn attribute(name: &str, kind: AttributeType) -> AttributeProto {
    AttributeProto { name: Some(name.into()), r#type: Some(kind as i32), ..AttributeProto::default() }
}

/// A value; dimensions are numbers or names.
pub fn value(name: &str, dtype: DType, dims: &[&str]) -> ValueInfoProto {
    let dim = |text: &&str| {
        let value = match text.parse() {
            Ok(size) => dimension::Value::DimValue(size),
            Err(_) => dimension::Value::DimParam(text.to_string()),
        };
        Dimension { value: Some(value), denotation: None }
    };
    let shape = Some(TensorShapeProto { dim: dims.iter().map(dim).collect() });
    let tensor = Tensor { elem_type: Some(dtype.to_onnx()), shape };
    let r#type = Some(TypeProto { value: Some(Value::TensorType(tensor)), denotation: None });
    ValueInfoProto { name: Some(name.into()), r#type, ..ValueInfoProto::default() }
}

pub fn untyped(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.into()), ..ValueInfoProto::default() }
}

/// A tensor without data.
pub fn header(name: &str, dtype: DType, dims: &[i64]) -> TensorProto {
    TensorProto {
        name: Some(name.into()),
        data_type: Some(dtype.to_onnx()),
        dims: dims.to_vec(),
        ..TensorProto::default()
    }
}

/// A tensor whose bytes count up.
pub fn tensor(name: &str, dtype: DType, dims: &[i64]) -> TensorProto {
    let elements = dims.iter().product::<i64>() as u64;
    let bytes = dtype.bytes_for(elements).expect("a type with a size");
    TensorProto { raw_data: Some((0..bytes).map(|i| i as u8).collect()), ..header(name, dtype, dims) }
}

pub fn external(name: &str, dtype: DType, dims: &[i64], entries: &[(&str, &str)]) -> TensorProto {
    let entry = |(key, value): &(&str, &str)| StringStringEntryProto {
        key: Some(key.to_string()),
        value: Some(value.to_string()),
    };
    TensorProto {
        data_location: Some(tensor_proto::DataLocation::External as i32),
        external_data: entries.iter().map(entry).collect(),
        ..header(name, dtype, dims)
    }
}

pub fn opset(domain: &str, version: i64) -> OperatorSetIdProto {
    OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) }
}

pub fn model(graph: GraphProto) -> ModelProto {
    ModelProto { ir_version: Some(10), opset_import: vec![opset("", 21)], graph: Some(graph), ..ModelProto::default() }
}

/// `y = Identity(x)` and these initializers, each read by a node.
pub fn holding(weights: Vec<TensorProto>) -> ModelProto {
    let mut nodes = vec![node("Identity", &["x"], &["y"])];
    for (i, weight) in weights.iter().enumerate() {
        nodes.push(node("Identity", &[weight.name()], &[&format!("read {i}")]));
    }
    model(GraphProto {
        node: nodes,
        input: vec![value("x", DType::Float32, &["1"])],
        output: vec![value("y", DType::Float32, &["1"])],
        initializer: weights,
        ..GraphProto::default()
    })
}

pub fn save(dir: &Path, model: &ModelProto) -> PathBuf {
    let path = dir.join("model.onnx");
    std::fs::write(&path, model.encode_to_vec()).unwrap();
    path
}

/// Writes the model to a temporary directory and reads it back.
pub fn open(model: &ModelProto) -> Result<Model, ReadError> {
    let dir = tempfile::tempdir().unwrap();
    Model::open(&save(dir.path(), model))
}

/// An error with all its causes.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(&format!(": {error}"));
        cause = error.source();
    }
    text
}

/// The error of a refused model.
pub fn refusal(model: &ModelProto) -> String {
    match open(model).and_then(|model| model.graph()) {
        Ok(_) => panic!("the model was read"),
        Err(error) => chain(&error),
    }
}

/// Appends a second `graph` field to a model file that merges one more initializer into it: `bytes` of raw zeros, as a
/// hole in the file.
pub fn append_huge_initializer(path: &Path, header: &TensorProto, bytes: u64) {
    use prost::encoding::{encode_varint, encoded_len_varint};
    use std::io::{Seek, SeekFrom, Write};
    let header = header.encode_to_vec();
    let tensor = header.len() as u64 + 1 + encoded_len_varint(bytes) as u64 + bytes;
    let graph = 1 + encoded_len_varint(tensor) as u64 + tensor;
    let mut head = vec![0x3a];
    encode_varint(graph, &mut head);
    head.push(0x2a);
    encode_varint(tensor, &mut head);
    head.extend(&header);
    head.push(0x4a);
    encode_varint(bytes, &mut head);
    let mut file = std::fs::File::options().write(true).open(path).unwrap();
    let end = file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(&head).unwrap();
    file.set_len(end + head.len() as u64 + bytes).unwrap();
}
