//! Inference on small graphs, one file per topic, and properties that hold for any graph.

mod contents;
mod contrib;
mod cost;
mod laws;
mod merging;
mod operators;
mod shapes;
mod types;

use super::{Report, infer};
use crate::{Attribute, Constant, Graph, Node, Origin, ValueId, Weight};
use hpp_schema::{DType, Dim, Shape};

/// A graph under construction.
pub(super) struct Net {
    pub graph: Graph,
}

/// Parses a shape such as `b, s, 64`. An empty text is a scalar.
pub(super) fn shape(text: &str) -> Shape {
    text.split(',').map(str::trim).filter(|t| !t.is_empty()).map(|t| t.parse().unwrap()).collect()
}

/// An attribute list.
pub(super) type Attributes<'a> = &'a [(&'a str, Attribute)];

pub(super) fn int(value: i64) -> Attribute {
    Attribute::Int(value)
}

pub(super) fn ints(values: &[i64]) -> Attribute {
    Attribute::Ints(values.to_vec())
}

pub(super) fn text(value: &str) -> Attribute {
    Attribute::String(value.as_bytes().to_vec())
}

pub(super) fn tensor(dtype: DType, dims: &[u64], ints: Option<&[i64]>) -> Attribute {
    Attribute::Tensor(Constant {
        dtype,
        dims: dims.to_vec(),
        ints: ints.map(<[i64]>::to_vec),
        content: 0,
        is_zero: false,
        bytes: 0,
    })
}

impl Net {
    pub fn new(opset: i64) -> Net {
        let opsets = [("".to_owned(), opset), ("com.microsoft".to_owned(), 1)].into();
        Net { graph: Graph { opsets, ..Graph::default() } }
    }

    pub fn input(&mut self, dtype: DType, dims: &str) -> ValueId {
        let name = format!("in{}", self.graph.values.len());
        let id = self.graph.add_value(name, Some(dtype), Some(shape(dims)), Origin::Input);
        self.graph.inputs.push(id);
        id
    }

    pub fn weight(&mut self, dtype: DType, dims: &[u64]) -> ValueId {
        self.stored(dtype, dims, None)
    }

    /// A vector of integers.
    pub fn list(&mut self, values: &[i64]) -> ValueId {
        self.stored(DType::Int64, &[values.len() as u64], Some(values.to_vec()))
    }

    /// A single integer.
    pub fn scalar(&mut self, value: i64) -> ValueId {
        self.stored(DType::Int64, &[], Some(vec![value]))
    }

    fn stored(&mut self, dtype: DType, dims: &[u64], ints: Option<Vec<i64>>) -> ValueId {
        let name = format!("w{}", self.graph.values.len());
        let bytes = dtype.bytes_for(dims.iter().product()).unwrap();
        let weight = Weight { bytes, ints, content: None };
        let shape = dims.iter().copied().map(Dim::fixed).collect();
        self.graph.add_value(name, Some(dtype), Some(shape), Origin::Weight(weight))
    }

    /// Adds a node with several outputs. `None` omits an input.
    pub fn many(
        &mut self,
        op: &str,
        inputs: &[Option<ValueId>],
        attributes: Attributes,
        outputs: usize,
    ) -> Vec<ValueId> {
        let (domain, op_type) = op.rsplit_once("::").unwrap_or(("", op));
        let origin = || Origin::Input;
        let outputs: Vec<ValueId> = (0..outputs)
            .map(|_| self.graph.add_value(format!("v{}", self.graph.values.len()), None, None, origin()))
            .collect();
        self.graph.add_node(Node {
            name: String::new(),
            domain: domain.to_owned(),
            op_type: op_type.to_owned(),
            inputs: inputs.to_vec(),
            captures: vec![],
            outputs: outputs.iter().copied().map(Some).collect(),
            attributes: attributes.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect(),
        });
        outputs
    }

    /// Adds a node with one output.
    pub fn node(&mut self, op: &str, inputs: &[ValueId], attributes: Attributes) -> ValueId {
        let inputs: Vec<_> = inputs.iter().copied().map(Some).collect();
        self.many(op, &inputs, attributes, 1)[0]
    }

    pub fn infer(&mut self) -> Report {
        infer(&mut self.graph)
    }

    /// Type and shape as text, such as `float32[b, s, 64]`, with question marks for unknown parts.
    pub fn fact(&self, id: ValueId) -> String {
        let value = self.graph.value(id);
        let dtype = value.dtype.map_or("?".to_owned(), |dtype| dtype.to_string());
        let shape = value.shape.as_ref().map_or("?".to_owned(), |shape| format!("{shape:?}"));
        format!("{dtype}{shape}")
    }
}

/// The inferred types and shapes of the outputs of a single node.
pub(super) fn outputs_of(op: &str, inputs: &[(DType, &str)], attributes: Attributes, outputs: usize) -> Vec<String> {
    let mut net = Net::new(21);
    let inputs: Vec<_> = inputs.iter().map(|(dtype, dims)| Some(net.input(*dtype, dims))).collect();
    let outputs = net.many(op, &inputs, attributes, outputs);
    net.infer();
    outputs.into_iter().map(|id| net.fact(id)).collect()
}

/// Same as [`outputs_of`], for one output.
pub(super) fn output_of(op: &str, inputs: &[(DType, &str)], attributes: Attributes) -> String {
    outputs_of(op, inputs, attributes, 1).remove(0)
}
