//! Summarises control-flow bodies: a hash of the structure that does not depend on names, and totals.

use crate::names;
use crate::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};
use crate::read::graph::shape_of;
use crate::tensor;
use crate::walk;
use blake3::Hasher;
use hpp_graph::Body;
use hpp_schema::DType;
use prost::Message;
use std::collections::{BTreeMap, HashMap};

/// Summarises a body. Captured names are numbered in the order of `captures`.
pub fn describe(body: &GraphProto, captures: &[&str]) -> Body {
    let mut structure = Structure { hash: Hasher::new(), numbers: HashMap::new() };
    captures.iter().for_each(|name| structure.number(name));
    structure.graph(body);
    Body {
        structure: truncate(&structure.hash),
        output_dtypes: body.output.iter().map(dtype_of).collect(),
        output_shapes: body.output.iter().map(shape_of).collect(),
        weight_bytes: weight_bytes(body),
        nodes: count_nodes(body),
        packed: packed(body, captures),
    }
}

/// The first 64 bits of a hash.
pub fn truncate(hash: &Hasher) -> u64 {
    let bytes = hash.finalize();
    u64::from_le_bytes(*bytes.as_bytes().first_chunk().expect("a hash has 32 bytes"))
}

/// A 64-bit hash of several byte strings.
pub fn key_of(parts: &[&[u8]]) -> u64 {
    let mut hash = Hasher::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    truncate(&hash)
}

/// Element type of a tensor value, if known.
pub fn dtype_of(value: &crate::proto::ValueInfoProto) -> Option<DType> {
    use crate::proto::type_proto::Value;
    match value.r#type.as_ref()?.value.as_ref()? {
        Value::TensorType(tensor) => DType::from_onnx(tensor.elem_type()),
        _ => None,
    }
}

fn weight_bytes(body: &GraphProto) -> u64 {
    let mut sum = 0u64;
    let _ = walk::tensors_of_graph(body, &mut |t| {
        let bytes = tensor::shape_of(t).ok().and_then(|shape| shape.bytes).unwrap_or_default();
        sum = sum.saturating_add(bytes);
        Ok::<(), std::convert::Infallible>(())
    });
    sum
}

fn count_nodes(body: &GraphProto) -> usize {
    body.node.len() + body.node.iter().flat_map(walk::bodies).map(count_nodes).sum::<usize>()
}

/// The captures that `MatMulNBits` reads as numbers, scales or zero points, each with the number of matrix elements that a stored number holds: 0
/// for scales and zero points.
fn packed(body: &GraphProto, captures: &[&str]) -> BTreeMap<usize, u64> {
    let mut packed = BTreeMap::new();
    for node in body.node.iter().filter(|node| node.op_type() == "MatMulNBits") {
        let bits = node.attribute.iter().find(|a| a.name() == "bits").map_or(4, AttributeProto::i);
        let in_a_byte = u64::try_from(8i64.checked_div(bits).unwrap_or(1)).unwrap_or(1).max(1);
        for (name, held) in node.input.iter().skip(1).zip([in_a_byte, 0, 0]) {
            if let Some(capture) = captures.iter().position(|capture| capture == name) {
                packed.insert(capture, held);
            }
        }
    }
    packed
}

struct Structure<'a> {
    hash: Hasher,
    /// Numbers of names in the order of definition.
    numbers: HashMap<&'a str, u64>,
}

impl<'a> Structure<'a> {
    fn number(&mut self, name: &'a str) {
        let next = self.numbers.len() as u64;
        self.numbers.insert(name, next);
    }

    fn graph(&mut self, graph: &'a GraphProto) {
        names::given(graph).chain(names::produced(&graph.node)).for_each(|name| self.number(name));
        self.count(graph.input.len());
        for tensor in &graph.initializer {
            self.read(tensor.name());
            self.tensor(tensor);
        }
        self.count(graph.node.len());
        graph.node.iter().for_each(|node| self.node(node));
        graph.output.iter().for_each(|output| self.read(output.name()));
    }

    fn node(&mut self, node: &'a NodeProto) {
        self.bytes(node.domain().as_bytes());
        self.bytes(node.op_type().as_bytes());
        self.count(node.input.len());
        node.input.iter().chain(&node.output).for_each(|name| self.read(name));
        let mut attributes: Vec<&AttributeProto> = node.attribute.iter().collect();
        attributes.sort_by_key(|a| a.name());
        self.count(attributes.len());
        attributes.into_iter().for_each(|attribute| self.attribute(attribute));
    }

    fn attribute(&mut self, attribute: &'a AttributeProto) {
        self.bytes(attribute.name().as_bytes());
        if let Some(tensor) = &attribute.t {
            return self.tensor(tensor);
        }
        if let Some(graph) = &attribute.g {
            return self.graph(graph);
        }
        self.bytes(&attribute.encode_to_vec());
    }

    /// Hashes type and dimensions, and contents if they are small.
    fn tensor(&mut self, tensor: &TensorProto) {
        self.count(tensor.data_type() as usize);
        self.count(tensor.dims.len());
        tensor.dims.iter().for_each(|d| self.count(*d as usize));
        let key = tensor::shape_of(tensor).ok().and_then(|shape| content_key(tensor, &shape));
        self.bytes(&key.unwrap_or_default().to_le_bytes());
    }

    fn read(&mut self, name: &str) {
        let number = self.numbers.get(name).copied().unwrap_or(u64::MAX);
        self.hash.update(&number.to_le_bytes());
    }

    fn count(&mut self, n: usize) {
        self.hash.update(&(n as u64).to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.count(bytes.len());
        self.hash.update(bytes);
    }
}

/// Maximum bytes of an embedded tensor whose contents distinguish blocks.
const MAX_CONTENT: u64 = 1024;

/// A hash of the contents of a small embedded tensor, if they are structure: integers, booleans, strings, and scalars.
/// `None` for learned vectors (norms, biases), which differ in every layer.
pub fn content_key(tensor: &TensorProto, shape: &tensor::TensorShape) -> Option<u64> {
    let learned = shape.dtype.is_float() && shape.elements > 1;
    if learned || shape.bytes.is_some_and(|bytes| bytes > MAX_CONTENT) || tensor::is_external(tensor).ok()? {
        return None;
    }
    let dtype = (shape.dtype as i32).to_le_bytes();
    match tensor::embedded_bytes(tensor, shape).ok()? {
        Some(bytes) => Some(key_of(&[&dtype, &bytes])),
        None => Some(key_of(&tensor.string_data.iter().map(Vec::as_slice).collect::<Vec<_>>())),
    }
}
