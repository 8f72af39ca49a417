//! Builds the arena [`Graph`] from a checked, flattened and sorted model: names become ids.

use crate::names::{self, default_domain, label};
use crate::proto::attribute_proto::AttributeType;
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{AttributeProto, GraphProto, NodeProto, TensorProto, TensorShapeProto, ValueInfoProto};
use crate::read::body::{self, content_key, key_of};
use crate::read::small::SmallReader;
use crate::tensor::{self, TensorShape};
use crate::weights::{EXPERTS_FILE, QUANTIZED_FILE, ROWS_FILE, Storage, WeightError, Weights, stored_bytes};
use hpp_graph::{Attribute, Constant, Graph, Node, NodeId, Origin, ValueId, Weight};
use hpp_schema::{Dim, Shape};
use prost::Message;
use std::collections::{BTreeMap, HashMap, HashSet};

/// The reason why a graph cannot be built.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GraphError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error("attribute {attribute:?} of {node} has type {found}, which this build does not know")]
    UnknownAttribute { node: String, attribute: String, found: i32 },
    #[error(
        "attribute {attribute:?} of {node} refers to {refers_to:?}, an attribute of a function, outside any function"
    )]
    StrayReference { node: String, attribute: String, refers_to: String },
    #[error("the graph has more values than 32-bit ids can name")]
    TooManyValues,
}

/// Builds the arena. Node ids are positions in `graph`.
pub fn build(graph: &GraphProto, opsets: BTreeMap<String, i64>, weights: &Weights) -> Result<Graph, GraphError> {
    let mut builder = Builder::new(graph, opsets, weights);
    builder.inputs(graph);
    builder.weights(graph)?;
    builder.sparse_weights(graph)?;
    for node in &graph.node {
        builder.node(node)?;
    }
    builder.outputs(graph);
    match u32::try_from(builder.graph.values.len().max(builder.graph.nodes.len())) {
        Ok(_) => Ok(builder.graph),
        Err(_) => Err(GraphError::TooManyValues),
    }
}

struct Builder<'a> {
    graph: Graph,
    ids: HashMap<&'a str, ValueId>,
    facts: HashMap<&'a str, &'a ValueInfoProto>,
    weights: &'a Weights,
    small: SmallReader<'a>,
}

impl<'a> Builder<'a> {
    fn new(graph: &'a GraphProto, opsets: BTreeMap<String, i64>, weights: &'a Weights) -> Self {
        let known = graph.value_info.iter().chain(&graph.output).chain(&graph.input);
        Builder {
            graph: Graph { opsets, ..Graph::default() },
            ids: HashMap::new(),
            facts: known.map(|info| (info.name(), info)).collect(),
            weights,
            small: SmallReader::new(weights),
        }
    }

    /// Adds graph inputs, without weights that are also listed as inputs.
    fn inputs(&mut self, graph: &'a GraphProto) {
        let weights: HashSet<&str> = names::weights(graph).collect();
        for input in graph.input.iter().filter(|i| !weights.contains(i.name())) {
            let id = self.value(input.name(), Origin::Input);
            self.graph.inputs.push(id);
        }
    }

    fn weights(&mut self, graph: &'a GraphProto) -> Result<(), GraphError> {
        for (tensor, storage) in graph.initializer.iter().zip(&self.weights.storage) {
            let shape = tensor::shape_of(tensor).map_err(WeightError::from)?;
            let weight = Weight {
                bytes: stored_bytes(tensor, &shape),
                ints: self.small_ints(tensor, &shape, storage)?,
                content: content_key(tensor, &shape),
            };
            self.weight(tensor.name(), &shape, weight);
        }
        Ok(())
    }

    fn small_ints(
        &mut self,
        t: &TensorProto,
        shape: &TensorShape,
        at: &Storage,
    ) -> Result<Option<Vec<i64>>, GraphError> {
        if !tensor::holds_small_ints(shape) {
            return Ok(None);
        }
        let raw = match at {
            // In a virtual file, whose contents are computed when they are packed (zero points). No shape depends on
            // them.
            Storage::External(span)
                if [EXPERTS_FILE, QUANTIZED_FILE, ROWS_FILE]
                    .contains(&self.weights.files[span.file].location.as_str()) =>
            {
                return Ok(None);
            }
            Storage::Embedded => tensor::embedded_bytes(t, shape).map_err(WeightError::from)?,
            Storage::External(span) => Some(self.small.read(t.name(), *span)?.into()),
        };
        Ok(raw.and_then(|raw| tensor::ints_of(shape.dtype, &raw)))
    }

    fn sparse_weights(&mut self, graph: &'a GraphProto) -> Result<(), GraphError> {
        for sparse in &graph.sparse_initializer {
            let (Some(values), Some(indices)) = (&sparse.values, &sparse.indices) else { continue };
            let values_shape = tensor::shape_of(values).map_err(WeightError::from)?;
            let indices_shape = tensor::shape_of(indices).map_err(WeightError::from)?;
            let bytes = stored_bytes(values, &values_shape).saturating_add(stored_bytes(indices, &indices_shape));
            let fail = |problem| WeightError::from(tensor::TensorError { name: values.name().into(), problem });
            let (dims, elements) = tensor::dims_of(&sparse.dims).map_err(fail)?;
            let dense = TensorShape { dims, elements, ..values_shape };
            self.weight(names::sparse_name(sparse), &dense, Weight { bytes, ints: None, content: None });
        }
        Ok(())
    }

    fn weight(&mut self, name: &'a str, shape: &TensorShape, weight: Weight) {
        let id = self.value(name, Origin::Weight(weight));
        let value = &mut self.graph.values[id.0 as usize];
        value.dtype = Some(shape.dtype);
        value.shape = Some(shape.dims.iter().map(|d| Dim::fixed(*d)).collect());
    }

    fn node(&mut self, node: &'a NodeProto) -> Result<(), GraphError> {
        let captures: Vec<&str> =
            names::captures(node).into_iter().filter(|name| self.ids.contains_key(name)).collect();
        let attributes = node.attribute.iter().map(|a| Ok((a.name().to_owned(), attribute(node, a, &captures)?)));
        let attributes = attributes.collect::<Result<BTreeMap<_, _>, GraphError>>()?;
        let inputs = node.input.iter().map(|name| self.ids.get(name.as_str()).copied()).collect();
        let captures = captures.iter().filter_map(|name| self.ids.get(name).copied()).collect();
        let id = NodeId(self.graph.nodes.len() as u32);
        let outputs = node
            .output
            .iter()
            .enumerate()
            .map(|(slot, name)| (!name.is_empty()).then(|| self.value(name, Origin::Node { node: id, slot })));
        let outputs = outputs.collect();
        self.graph.add_node(Node {
            name: node.name().to_owned(),
            domain: default_domain(node.domain()).to_owned(),
            op_type: node.op_type().to_owned(),
            inputs,
            captures,
            outputs,
            attributes,
        });
        Ok(())
    }

    fn outputs(&mut self, graph: &GraphProto) {
        self.graph.outputs = graph.output.iter().filter_map(|o| self.ids.get(o.name()).copied()).collect();
    }

    fn value(&mut self, name: &'a str, origin: Origin) -> ValueId {
        let (dtype, shape) = self.facts.get(name).map_or((None, None), |info| (body::dtype_of(info), shape_of(info)));
        let id = self.graph.add_value(name, dtype, shape, origin);
        self.ids.insert(name, id);
        id
    }
}

/// The shape that a value is declared with.
pub fn shape_of(info: &ValueInfoProto) -> Option<Shape> {
    match info.r#type.as_ref()?.value.as_ref()? {
        TypeValue::TensorType(tensor) => tensor.shape.as_ref().map(dims),
        _ => None,
    }
}

fn dims(shape: &TensorShapeProto) -> Shape {
    use crate::proto::tensor_shape_proto::dimension::Value;
    let dim = |value: &Option<Value>| match value {
        Some(Value::DimValue(size)) => u64::try_from(*size).map_or(Dim::Unknown, Dim::fixed),
        Some(Value::DimParam(name)) if !name.is_empty() => Dim::from_param(name),
        _ => Dim::Unknown,
    };
    shape.dim.iter().map(|d| dim(&d.value)).collect()
}

fn attribute(node: &NodeProto, a: &AttributeProto, captures: &[&str]) -> Result<Attribute, GraphError> {
    if !a.ref_attr_name().is_empty() {
        let (attribute, refers_to) = (a.name().to_owned(), a.ref_attr_name().to_owned());
        return Err(GraphError::StrayReference { node: label(node), attribute, refers_to });
    }
    Ok(match type_of(node, a)? {
        AttributeType::Int => Attribute::Int(a.i()),
        AttributeType::Float => Attribute::Float(a.f()),
        AttributeType::String => Attribute::String(a.s().to_vec()),
        AttributeType::Ints => Attribute::Ints(a.ints.clone()),
        AttributeType::Floats => Attribute::Floats(a.floats.clone()),
        AttributeType::Strings => Attribute::Strings(a.strings.clone()),
        AttributeType::Tensor => match &a.t {
            Some(tensor) => constant(tensor)?,
            None => opaque(a),
        },
        AttributeType::Graph => match &a.g {
            Some(body) => Attribute::Body(body::describe(body, captures)),
            None => opaque(a),
        },
        _ => opaque(a),
    })
}

/// The attribute's type. Older files omit it; then the field that is set determines it.
fn type_of(node: &NodeProto, a: &AttributeProto) -> Result<AttributeType, GraphError> {
    let number = a.r#type.unwrap_or_default();
    let known = AttributeType::try_from(number).map_err(|_| GraphError::UnknownAttribute {
        node: label(node),
        attribute: a.name().to_owned(),
        found: number,
    })?;
    Ok(match known {
        AttributeType::Undefined if a.i.is_some() => AttributeType::Int,
        AttributeType::Undefined if a.f.is_some() => AttributeType::Float,
        AttributeType::Undefined if a.s.is_some() => AttributeType::String,
        AttributeType::Undefined if a.t.is_some() => AttributeType::Tensor,
        AttributeType::Undefined if a.g.is_some() => AttributeType::Graph,
        AttributeType::Undefined if !a.ints.is_empty() => AttributeType::Ints,
        AttributeType::Undefined if !a.floats.is_empty() => AttributeType::Floats,
        AttributeType::Undefined if !a.strings.is_empty() => AttributeType::Strings,
        known => known,
    })
}

fn constant(t: &TensorProto) -> Result<Attribute, GraphError> {
    let shape = tensor::shape_of(t).map_err(WeightError::from)?;
    let bytes = stored_bytes(t, &shape);
    if tensor::is_external(t).map_err(WeightError::from)? {
        let content = key_of(&[&t.encode_to_vec()]);
        return Ok(Attribute::Tensor(Constant {
            dtype: shape.dtype,
            dims: shape.dims,
            ints: None,
            content,
            is_zero: false,
            bytes,
        }));
    }
    let raw = tensor::embedded_bytes(t, &shape).map_err(WeightError::from)?;
    let content = match &raw {
        Some(raw) => key_of(&[raw]),
        None => key_of(&t.string_data.iter().map(Vec::as_slice).collect::<Vec<_>>()),
    };
    let is_zero = raw.as_ref().is_some_and(|raw| raw.iter().all(|byte| *byte == 0));
    let ints = raw.filter(|_| tensor::holds_small_ints(&shape)).and_then(|raw| tensor::ints_of(shape.dtype, &raw));
    Ok(Attribute::Tensor(Constant { dtype: shape.dtype, dims: shape.dims, ints, content, is_zero, bytes }))
}

fn opaque(a: &AttributeProto) -> Attribute {
    Attribute::Opaque(key_of(&[&a.encode_to_vec()]))
}
