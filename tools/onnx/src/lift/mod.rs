//! A partition as a file whose weights are inputs, under names that say nothing of the model: partitions that are the same
//! graph with other weights become the same bytes, so that one file, and one session, serves all of them.
//!
//! Pure: reads no file, and knows neither devices nor plans.

mod constants;
mod names;
mod words;

pub(crate) use constants::is_structure;

use crate::proto::{GraphProto, ModelProto, TensorProto, ValueInfoProto};
use crate::tensor::{self, TensorError, TensorShape};
use crate::typed;
use crate::weights::{WeightError, parse_place};
use bytes::Bytes;
use constants::Constants;
use hpp_schema::{DType, Dim};
use names::{Kind, Namer};
use std::borrow::Cow;
use std::collections::HashMap;

/// A partition whose weights are inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Lifted {
    /// The file: inputs `i0`.., then weights `w0`.., outputs `o0`.., constants `c0`.., all in the order nodes meet them.
    pub proto: ModelProto,
    /// What its inputs, weights apart, are called in the partition. What no node reads comes last.
    pub inputs: Vec<String>,
    /// What its outputs are called in the partition. What no node makes comes last.
    pub outputs: Vec<String>,
    /// Its weights, in the file's order.
    pub weights: Vec<LiftedWeight>,
    /// Bytes of its constants.
    pub constants: u64,
    /// Bytes of weights that are neither shared nor part of the structure, and stay constants all the same: a kernel or a body
    /// wants them so.
    pub kept: u64,
}

/// A weight that became an input.
#[derive(Clone, Debug, PartialEq)]
pub struct LiftedWeight {
    /// Its name in the partition.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    pub shape: Vec<u64>,
    /// Where its bytes are.
    pub bytes: WeightBytes,
}

/// Where the bytes of a weight are.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightBytes {
    /// In a file.
    External {
        /// As the partition writes it.
        location: String,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
    /// They were in the partition's own file.
    Embedded(Bytes),
}

/// Makes inputs of a partition's weights. What stays a constant: tensors that are structure (small integers, single
/// numbers), weights that are `shared` with other partitions, and those that kernels or bodies can only take so; see
/// `constants.rs`.
///
/// Copies no weight that lies in a file as it is. What says nothing about what is computed is dropped: names, docs, metadata, recorded types and shapes of values inside and
/// shapes of outputs, annotations, initializers nobody reads.
pub fn lift(model: &ModelProto, shared: impl Fn(&str) -> bool) -> Result<Lifted, WeightError> {
    let mut proto = words::without(model);
    let graph = proto.graph.get_or_insert_default();
    let constants = Constants::of(graph);
    let mut tensors = HashMap::new();
    let mut kept = 0;
    for tensor in std::mem::take(&mut graph.initializer) {
        let shape = tensor::shape_of(&tensor)?;
        let wanted = !shared(tensor.name()) && !is_structure(&shape);
        let bytes = shape.bytes.filter(|_| wanted);
        let lifts = bytes.is_some() && !constants.forces(tensor.name());
        kept += bytes.filter(|_| !lifts).unwrap_or(0);
        tensors.insert(tensor.name().to_owned(), (tensor, shape, lifts));
    }
    let is_weight = |name: &str| tensors.get(name).map(|(_, _, lifts)| *lifts);
    let mut namer = Namer::new(graph, is_weight);
    namer.graph(graph);
    let inputs = namer.met(Kind::Input);
    let weights = namer.met(Kind::Weight);
    let mut weight_inputs = Vec::new();
    let mut lifted = Vec::new();
    for name in &weights {
        let (tensor, shape, _) = &tensors[name];
        weight_inputs.push(weight_input(&namer.name(name), shape));
        lifted.push(weight(tensor, shape)?);
    }
    let constants = namer.met(Kind::Constant);
    graph.initializer = constants.iter().filter_map(|name| constant(&namer, name, &tensors)).collect();
    let constants = constants.iter().filter_map(|name| tensors.get(name)?.1.bytes).sum();
    graph.sparse_initializer.sort_by_key(|sparse| namer.position(crate::names::sparse_name(sparse)));
    arrange(&mut graph.input, &inputs, &namer);
    let outputs = outputs(graph, &namer);
    arrange(&mut graph.output, &outputs, &namer);
    namer.dims(graph);
    graph.input.append(&mut weight_inputs);
    Ok(Lifted { proto, inputs, outputs, weights: lifted, constants, kept })
}

/// Outputs that nodes make in the order they do, then inputs and constants that are returned as they are.
fn outputs(graph: &GraphProto, namer: &Namer) -> Vec<String> {
    let made = namer.met(Kind::Output);
    let handed_on = graph.output.iter().map(|info| info.name().to_owned()).filter(|name| !made.contains(name));
    let handed_on: Vec<String> = handed_on.collect();
    made.into_iter().chain(handed_on).collect()
}

/// Puts records into this order, under their new names.
fn arrange(infos: &mut Vec<ValueInfoProto>, order: &[String], namer: &Namer) {
    let mut known: HashMap<String, ValueInfoProto> =
        infos.drain(..).map(|info| (info.name().to_owned(), info)).collect();
    infos.extend(order.iter().filter_map(|name| {
        let info = known.remove(name)?;
        Some(ValueInfoProto { name: Some(namer.name(name)), ..info })
    }));
}

fn constant(
    namer: &Namer,
    name: &str,
    tensors: &HashMap<String, (TensorProto, TensorShape, bool)>,
) -> Option<TensorProto> {
    let (tensor, ..) = tensors.get(name)?;
    Some(TensorProto { name: Some(namer.name(name)), ..tensor.clone() })
}

fn weight_input(name: &str, shape: &TensorShape) -> ValueInfoProto {
    let dims: Vec<Dim> = shape.dims.iter().map(|size| Dim::fixed(*size)).collect();
    typed::tensor(name, shape.dtype, &dims)
}

fn weight(tensor: &TensorProto, shape: &TensorShape) -> Result<LiftedWeight, WeightError> {
    let bytes = if tensor::is_external(tensor)? {
        let place = parse_place(tensor)?;
        let length = shape.bytes.unwrap_or_default();
        WeightBytes::External { location: place.location.to_owned(), offset: place.offset, length }
    } else {
        WeightBytes::Embedded(embedded(tensor, shape)?)
    };
    Ok(LiftedWeight { name: tensor.name().to_owned(), dtype: shape.dtype, shape: shape.dims.clone(), bytes })
}

fn embedded(tensor: &TensorProto, shape: &TensorShape) -> Result<Bytes, TensorError> {
    let bytes = match tensor::embedded_bytes(tensor, shape)? {
        Some(Cow::Borrowed(_)) => tensor.raw_data.clone(),
        Some(Cow::Owned(bytes)) => Some(bytes.into()),
        None => None,
    };
    Ok(bytes.unwrap_or_default())
}
