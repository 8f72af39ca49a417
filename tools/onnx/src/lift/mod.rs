//! Turns the weights of a partition into graph inputs and gives all values canonical names. Partitions that are the
//! same graph with different weights become equal bytes, so that one file, and one session, serves all of them.
//!
//! Reads no files. Does not know devices or plans.

mod constants;
mod names;
mod strip;

pub(crate) use constants::is_structure;

use crate::proto::{GraphProto, ModelProto, TensorProto, ValueInfoProto};
use crate::tensor::{self, TensorError, TensorShape};
use crate::typed;
use crate::weights::{WeightError, parse_external};
use bytes::Bytes;
use constants::Constants;
use hpp_schema::{DType, Dim};
use names::{Namer, ValueKind};
use std::borrow::Cow;
use std::collections::HashMap;

/// A partition with its weights as inputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Lifted {
    /// The model: inputs `i0`.., then weights `w0`.., outputs `o0`.., constants `c0`.., each numbered in the order of
    /// first use by nodes.
    pub proto: ModelProto,
    /// The partition's names of the inputs, without weights. Unread inputs come last.
    pub inputs: Vec<String>,
    /// The partition's names of the outputs. Outputs that no node produces come last.
    pub outputs: Vec<String>,
    /// The weights, in the order of the model's inputs.
    pub weights: Vec<LiftedWeight>,
    /// Bytes of the constants.
    pub constants: u64,
    /// Bytes of weights that are neither shared nor structure, but stay constants because a kernel or a body requires
    /// it.
    pub kept: u64,
}

/// A weight that became an input.
#[derive(Clone, Debug, PartialEq)]
pub struct LiftedWeight {
    /// The partition's name of the weight.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub shape: Vec<u64>,
    /// The location of its bytes.
    pub bytes: WeightBytes,
}

/// The location of a weight's bytes.
#[derive(Clone, Debug, PartialEq)]
pub enum WeightBytes {
    /// In a file.
    External {
        /// The location as the partition writes it.
        location: String,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        length: u64,
    },
    /// In the partition's own file.
    Embedded(Bytes),
}

/// Turns the weights of a partition into inputs. These stay constants: tensors that are structure (small integers,
/// scalars), weights that are `shared` with other partitions, and weights that a kernel or a body requires as constants
/// (see `constants.rs`).
///
/// Copies no weight that a file stores raw. Drops everything that does not affect results: names, docs, metadata, types
/// and shapes of inner values, shapes of outputs, annotations, unread initializers.
pub fn lift(model: &ModelProto, shared: impl Fn(&str) -> bool) -> Result<Lifted, WeightError> {
    let mut proto = strip::strip_metadata(model);
    let graph = proto.graph.get_or_insert_default();
    let constants = Constants::of(graph);
    let mut tensors = HashMap::new();
    let mut kept = 0;
    for tensor in std::mem::take(&mut graph.initializer) {
        let shape = tensor::shape_of(&tensor)?;
        let is_candidate = !shared(tensor.name()) && !is_structure(&shape);
        let bytes = shape.bytes.filter(|_| is_candidate);
        let lifts = bytes.is_some() && !constants.contains(tensor.name());
        kept += bytes.filter(|_| !lifts).unwrap_or(0);
        tensors.insert(tensor.name().to_owned(), Initializer { tensor, shape, lifts });
    }
    let is_weight = |name: &str| tensors.get(name).map(|initializer| initializer.lifts);
    let mut namer = Namer::new(graph, is_weight);
    namer.graph(graph);
    let inputs = namer.named(ValueKind::Input);
    let weights = namer.named(ValueKind::Weight);
    let mut weight_inputs = Vec::new();
    let mut lifted = Vec::new();
    for name in &weights {
        let Initializer { tensor, shape, .. } = &tensors[name];
        weight_inputs.push(weight_input(&namer.name(name), shape));
        lifted.push(weight(tensor, shape)?);
    }
    let constants = namer.named(ValueKind::Constant);
    graph.initializer = constants.iter().filter_map(|name| constant(&namer, name, &tensors)).collect();
    let constants = constants.iter().filter_map(|name| tensors.get(name)?.shape.bytes).sum();
    graph.sparse_initializer.sort_by_key(|sparse| namer.position(crate::names::sparse_name(sparse)));
    arrange(&mut graph.input, &inputs, &namer);
    let outputs = outputs(graph, &namer);
    arrange(&mut graph.output, &outputs, &namer);
    namer.dims(graph);
    graph.input.append(&mut weight_inputs);
    Ok(Lifted { proto, inputs, outputs, weights: lifted, constants, kept })
}

/// An initializer of the partition.
struct Initializer {
    tensor: TensorProto,
    shape: TensorShape,
    /// Whether it becomes an input.
    lifts: bool,
}

/// Outputs in the order in which nodes produce them, then inputs and constants that the graph returns unchanged.
fn outputs(graph: &GraphProto, namer: &Namer) -> Vec<String> {
    let made = namer.named(ValueKind::Output);
    let unchanged = graph.output.iter().map(|info| info.name().to_owned()).filter(|name| !made.contains(name));
    let unchanged: Vec<String> = unchanged.collect();
    made.into_iter().chain(unchanged).collect()
}

/// Sorts records in the order of `order` and renames them.
fn arrange(infos: &mut Vec<ValueInfoProto>, order: &[String], namer: &Namer) {
    let mut known: HashMap<String, ValueInfoProto> =
        infos.drain(..).map(|info| (info.name().to_owned(), info)).collect();
    infos.extend(order.iter().filter_map(|name| {
        let info = known.remove(name)?;
        Some(ValueInfoProto { name: Some(namer.name(name)), ..info })
    }));
}

fn constant(namer: &Namer, name: &str, tensors: &HashMap<String, Initializer>) -> Option<TensorProto> {
    Some(TensorProto { name: Some(namer.name(name)), ..tensors.get(name)?.tensor.clone() })
}

fn weight_input(name: &str, shape: &TensorShape) -> ValueInfoProto {
    let dims: Vec<Dim> = shape.dims.iter().map(|size| Dim::fixed(*size)).collect();
    typed::tensor(name, shape.dtype, &dims)
}

fn weight(tensor: &TensorProto, shape: &TensorShape) -> Result<LiftedWeight, WeightError> {
    let bytes = if tensor::is_external(tensor)? {
        let external = parse_external(tensor)?;
        let length = shape.bytes.unwrap_or_default();
        WeightBytes::External { location: external.location.to_owned(), offset: external.offset, length }
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
