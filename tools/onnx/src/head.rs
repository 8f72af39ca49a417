//! Restricts the LM head to requested positions: inserts a `Gather` on the sequence axis before the vocabulary
//! projection.
//!
//! Walks back from the logits through position-wise operators to the projection. If an operator on the way is not
//! provably position-wise, the model is left unchanged and the reason is returned.

mod chain;

use crate::flatten::Fresh;
use crate::model::Model;
use crate::names::default_domain;
use crate::proto::{AttributeProto, NodeProto, attribute_proto::AttributeType};
use crate::typed;
use chain::Chain;
use hpp_graph::{Graph, ValueId};
use hpp_schema::{DType, Dim};
use std::collections::HashSet;

/// Name of the dimension that counts the requested positions.
pub const POSITIONS_DIM: &str = "logit_positions";

/// The reason why the head computes all positions.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)]
pub enum HeadReason {
    #[error("the model already returns a single position")]
    OnePosition,
    #[error("the logits have rank {0:?}, not 3")]
    Rank(Option<usize>),
    #[error("the logits' second axis ({0}) is not known to be the sequence axis of the input")]
    Axis(String),
    #[error("{0} computes the logits and is not known to be position-wise")]
    Operator(String),
    #[error("{0} has operands that may differ between positions")]
    Operand(String),
    #[error("other nodes than the head read {0:?}")]
    Shared(String),
    #[error("the logits are not computed by a node")]
    NotComputed,
    #[error("the model already has a value named {0:?}")]
    NameTaken(String),
}

/// Adds an `int64` input `positions` of shape `[logit_positions]`, and computes logits for those positions only.
///
/// `graph` must be the model's graph with inferred shapes. Node ids change, so use the graph of the result afterwards.
pub fn gather_logit_positions(
    model: &Model,
    graph: &Graph,
    logits: ValueId,
    positions: &str,
) -> Result<Model, HeadReason> {
    check_axis(graph, logits)?;
    if graph.find(positions).is_some() {
        return Err(HeadReason::NameTaken(positions.to_owned()));
    }
    let chain = chain::find(graph, logits)?;
    Ok(rewrite(model, graph, &chain, positions))
}

/// Checks that the logits are `[batch, sequence, vocabulary]`, and that an input has the same sequence axis.
fn check_axis(graph: &Graph, logits: ValueId) -> Result<(), HeadReason> {
    let shape = graph.value(logits).shape.as_ref();
    let Some([_, sequence, _]) = shape.map(Vec::as_slice) else { return Err(HeadReason::Rank(shape.map(Vec::len))) };
    if sequence.as_fixed() == Some(1) {
        return Err(HeadReason::OnePosition);
    }
    let has_axis = |id: &ValueId| {
        let value = graph.value(*id);
        let Some(shape) = value.shape.as_ref() else { return false };
        let tokens = shape.len() == 2 && matches!(value.dtype, Some(DType::Int64 | DType::Int32));
        let embeddings = shape.len() == 3 && value.dtype.is_some_and(DType::is_float);
        (tokens || embeddings) && shape[1] == *sequence
    };
    match *sequence != Dim::Unknown && graph.inputs.iter().any(has_axis) {
        true => Ok(()),
        false => Err(HeadReason::Axis(sequence.to_string())),
    }
}

fn rewrite(model: &Model, graph: &Graph, chain: &Chain, positions: &str) -> Model {
    let mut model = model.clone();
    let proto = model.proto.graph.get_or_insert_default();
    let mut fresh = Fresh::for_graph(proto);
    let activation = &graph.value(chain.activation).name;
    let gathered = fresh.name(&format!("{positions}/hidden"));
    let at = chain.contraction.0 as usize;
    proto.node[at].input[chain.operand].clone_from(&gathered);
    proto.node.insert(at, gather(activation, positions, &gathered));
    proto.input.push(typed::tensor(positions, DType::Int64, &[Dim::symbol(POSITIONS_DIM)]));
    let narrowed: HashSet<&str> = chain.narrowed.iter().map(|v| graph.value(*v).name.as_str()).collect();
    for info in proto.value_info.iter_mut().chain(&mut proto.output) {
        if narrowed.contains(info.name()) {
            typed::set_dim(info, 1, &Dim::symbol(POSITIONS_DIM));
        }
    }
    if !model.proto.opset_import.iter().any(|o| default_domain(o.domain()).is_empty()) {
        let version = Some(OLDEST_OPSET);
        model.proto.opset_import.push(crate::proto::OperatorSetIdProto { domain: None, version });
    }
    model
}

/// Operator set for a model that imports none of the default domain: every current runtime reads it.
const OLDEST_OPSET: i64 = 13;

fn gather(activation: &str, positions: &str, gathered: &str) -> NodeProto {
    let axis = AttributeProto {
        name: Some("axis".into()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(1),
        ..AttributeProto::default()
    };
    NodeProto {
        name: Some(format!("{positions}/Gather")),
        op_type: Some("Gather".into()),
        input: vec![activation.to_owned(), positions.to_owned()],
        output: vec![gathered.to_owned()],
        attribute: vec![axis],
        ..NodeProto::default()
    }
}
