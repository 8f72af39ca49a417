//! Computes experts only for tokens that selected them: each expert that an exporter wrote out moves into a branch of an `If`.
//!
//! The sum with an expert's result becomes `If(one of the expert's scores is not 0) { sum } else { the sum before }`. Where the model has a mask of
//! tokens instead of scores, the condition tests the mask. The bits of the result do not change: for an expert that no token selects, the sum would
//! add zeros, or 0 times the expert's result, which is 0 unless the expert computes infinities.

use crate::flatten::Fresh;
use crate::model::Model;
use crate::proto::attribute_proto::AttributeType;
use crate::proto::{AttributeProto, GraphProto, NodeProto};
use crate::set_attribute::int_attribute;
use crate::typed;
use hpp_graph::{Graph, NodeId, ValueId, WrittenExpert, written_out};
use hpp_schema::DType;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// The model with each written-out expert under a condition, and the number of these experts. `None` if there are none.
///
/// `graph` must be the model's graph with inferred shapes. Node ids change, so use the graph of the result afterwards.
pub fn compute_selected_experts(model: &Model, graph: &Graph) -> Option<(Model, usize)> {
    let experts: Vec<WrittenExpert> = written_out(graph).into_iter().flat_map(|mixture| mixture.experts).collect();
    if experts.is_empty() {
        return None;
    }
    let mut model = model.clone();
    let proto = model.proto.graph.get_or_insert_default();
    let mut fresh = Fresh::for_graph(proto);
    let moved: BTreeSet<NodeId> = experts.iter().flat_map(|expert| expert.nodes.iter().copied()).collect();
    let conditional = experts.iter().map(|expert| {
        let sum = expert.nodes[expert.nodes.len() - 1];
        (sum, under_condition(graph, proto, expert, &mut fresh))
    });
    let mut conditional: BTreeMap<NodeId, [NodeProto; 3]> = conditional.collect();
    let nodes = std::mem::take(&mut proto.node);
    for (id, node) in (0..).map(NodeId).zip(nodes) {
        match conditional.remove(&id) {
            Some(replacement) => proto.node.extend(replacement),
            None if moved.contains(&id) => {}
            None => proto.node.push(node),
        }
    }
    let known: HashSet<&str> = proto.node.iter().flat_map(|node| node.output.iter().map(String::as_str)).collect();
    proto.value_info.retain(|info| known.contains(info.name()));
    Some((model, experts.len()))
}

/// The nodes that replace an expert: two that compute its condition, and the `If`.
fn under_condition(graph: &Graph, proto: &GraphProto, expert: &WrittenExpert, fresh: &mut Fresh) -> [NodeProto; 3] {
    let name = |id: ValueId| graph.value(id).name.clone();
    let after = name(expert.after);
    let [total, condition, sum, before] =
        ["scores", "is_selected", "sum", "before"].map(|part| fresh.name(&format!("{after}/{part}")));
    let mut computed: Vec<NodeProto> = expert.nodes.iter().map(|id| proto.node[id.0 as usize].clone()).collect();
    if let Some(last) = computed.last_mut() {
        last.output = vec![sum.clone()];
    }
    let value = graph.value(expert.after);
    let body = |node: Vec<NodeProto>, output: &str| GraphProto {
        name: Some(output.to_owned()),
        node,
        output: vec![typed::tensor(
            output,
            value.dtype.unwrap_or(DType::Float32),
            value.shape.as_deref().unwrap_or_default(),
        )],
        ..GraphProto::default()
    };
    let identity = node("Identity", name(expert.before), &before, vec![]);
    let branches =
        vec![branch("then_branch", body(computed, &sum)), branch("else_branch", body(vec![identity], &before))];
    // `ReduceL1`, a sum, keeps NaN, which a maximum may lose. Neither scores nor masks are negative.
    let is_float = graph.value(expert.column).dtype.is_some_and(DType::is_float);
    let reduction = if is_float { "ReduceL1" } else { "ReduceMax" };
    [
        node(reduction, name(expert.column), &total, vec![int_attribute("keepdims", 0)]),
        node("Cast", total.clone(), &condition, vec![int_attribute("to", i64::from(DType::Bool.to_onnx()))]),
        node("If", condition.clone(), &after, branches),
    ]
}

fn node(op_type: &str, input: String, output: &str, attribute: Vec<AttributeProto>) -> NodeProto {
    NodeProto {
        name: Some(format!("{output}/{op_type}")),
        op_type: Some(op_type.to_owned()),
        input: vec![input],
        output: vec![output.to_owned()],
        attribute,
        ..NodeProto::default()
    }
}

fn branch(name: &str, body: GraphProto) -> AttributeProto {
    let r#type = Some(AttributeType::Graph as i32);
    AttributeProto { name: Some(name.to_owned()), r#type, g: Some(body), ..AttributeProto::default() }
}
