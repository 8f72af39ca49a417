//! Finds a layer's attention weights: the softmax of an attention written as single operators, or an optional output of a fused
//! operator.
//!
//! ONNX Runtime 1.31.1 on the CPU gives the weights of GroupQueryAttention (`qk_output = 2`, fourth output), of the standard
//! Attention from operator set 23 on (`qk_matmul_output_mode = 3`, fourth output), and the masked scores of
//! MultiHeadAttention (fourth output), whose softmax is added here. Other fused operators do not return them.

use super::find::GraphView;
use hpp_graph::ops::{is_attention, is_standard};
use hpp_graph::{Graph, Node, NodeId, ValueId};
use hpp_onnx::proto::attribute_proto::AttributeType;
use hpp_onnx::proto::{AttributeProto, GraphProto, NodeProto, ValueInfoProto};
use hpp_onnx::proto::{TypeProto, type_proto};
use hpp_schema::DType;

/// Where a layer's attention weights are.
pub(super) enum Seen {
    Value(ValueId),
    /// In an optional output of a fused operator.
    Asked(Asked),
}

/// A fused operator, and how to make it return its attention weights.
pub(super) struct Asked {
    /// The operator's first output, which identifies its node.
    pub output: String,
    pub dtype: DType,
    /// Number of heads, if the operator declares it.
    pub heads: Option<u64>,
    how: How,
}

enum How {
    /// With this attribute and value the fourth output has the weights.
    Attribute(&'static str, i64),
    /// The fourth output has the scores.
    Scores,
}

/// Finds a layer's attention weights; `None` if the layer has no attention, a reason if its weights cannot be observed.
pub(super) fn attention(view: GraphView, nodes: &[NodeId]) -> Result<Option<Seen>, String> {
    let mut found = Vec::new();
    for id in nodes {
        if let Some(seen) = fused(view, *id)? {
            found.push(seen);
        } else if let Some(weights) = softmax(view, *id) {
            found.push(Seen::Value(weights));
        }
    }
    match found.len() {
        0 | 1 => Ok(found.pop()),
        many => Err(format!("it has {many} attentions")),
    }
}

fn fused(view: GraphView, id: NodeId) -> Result<Option<Seen>, String> {
    let node = view.node(id);
    let how = match (node.op_type.as_str(), node.domain.as_str()) {
        ("GroupQueryAttention", "com.microsoft") if node.int("sliding_window_cache") == Some(1) => {
            return Err("GroupQueryAttention does not output its attention weights with a sliding-window cache".into());
        }
        ("GroupQueryAttention", "com.microsoft") => How::Attribute("qk_output", 2),
        ("MultiHeadAttention", "com.microsoft") => How::Scores,
        ("Attention", _) if is_standard(node) => How::Attribute("qk_matmul_output_mode", 3),
        (op, "com.microsoft") if keeps_weights(node) => {
            return Err(format!("{op} does not output its attention weights"));
        }
        _ => return Ok(None),
    };
    let (Some(query), Some(output)) = (node.inputs.first().copied().flatten(), node.outputs.first().copied().flatten())
    else {
        return Ok(None);
    };
    if node.outputs.get(3).copied().flatten().is_some() {
        return Err(format!("the fourth output of {} is already in use", node.op_type));
    }
    let heads = node.int("num_heads").or(node.int("q_num_heads")).and_then(|heads| u64::try_from(heads).ok());
    let dtype = view.graph.value(query).dtype.filter(|_| view.is_counted(query));
    let dtype = dtype.ok_or_else(|| format!("the element type of {} is not known", node.op_type))?;
    Ok(Some(Seen::Asked(Asked { output: view.graph.value(output).name.clone(), dtype, heads, how })))
}

/// Whether an attention operator does not return its weights. Linear attention has none.
fn keeps_weights(node: &Node) -> bool {
    is_attention(node) && node.op_type != "LinearAttention"
}

/// The output of a softmax over scores from a product of two activations.
fn softmax(view: GraphView, id: NodeId) -> Option<ValueId> {
    let node = view.node(id);
    let (scores, weights) = ((*node.inputs.first()?)?, (*node.outputs.first()?)?);
    let rank = view.rank(weights)?;
    let axis = node.int("axis").unwrap_or(-1);
    let last = axis == -1 || usize::try_from(axis).is_ok_and(|axis| axis + 1 == rank);
    // Attention weights have one entry per past token, so their last axis varies.
    let grows = view.width(weights).is_none();
    let fits = is_standard(node) && node.op_type == "Softmax" && last && grows && rank >= 3 && view.is_counted(weights);
    (fits && view.comes_from(scores, |product| view.is_mixing(product))).then_some(weights)
}

impl Asked {
    /// Makes the node in `graph` return its weights as the graph output `name`. False if the node does not exist.
    pub fn expose(&self, graph: &mut GraphProto, name: &str) -> bool {
        let Some(at) = graph.node.iter().position(|node| node.output.first() == Some(&self.output)) else {
            return false;
        };
        let node = &mut graph.node[at];
        node.output.resize(3, String::new());
        match self.how {
            How::Attribute(attribute, value) => {
                node.output.push(name.to_owned());
                node.attribute.retain(|other| other.name() != attribute);
                node.attribute.push(int(attribute, value));
            }
            How::Scores => {
                let scores = format!("{name}/scores");
                node.output.push(scores.clone());
                // Type inference does not give the type of the scores.
                graph.value_info.push(self.info(&scores));
                graph.node.insert(at + 1, softmax_of(&scores, name));
            }
        }
        graph.output.push(self.info(name));
        true
    }

    fn info(&self, name: &str) -> ValueInfoProto {
        let tensor = type_proto::Tensor { elem_type: Some(self.dtype.to_onnx()), shape: None };
        let value = Some(type_proto::Value::TensorType(tensor));
        ValueInfoProto {
            name: Some(name.to_owned()),
            r#type: Some(TypeProto { value, denotation: None }),
            ..ValueInfoProto::default()
        }
    }
}

fn softmax_of(scores: &str, weights: &str) -> NodeProto {
    NodeProto {
        op_type: Some("Softmax".into()),
        name: Some(format!("{weights}/Softmax")),
        input: vec![scores.to_owned()],
        output: vec![weights.to_owned()],
        attribute: vec![int("axis", -1)],
        ..NodeProto::default()
    }
}

/// An attribute of a node.
pub(crate) fn int(name: &str, value: i64) -> AttributeProto {
    AttributeProto {
        name: Some(name.to_owned()),
        r#type: Some(AttributeType::Int as i32),
        i: Some(value),
        ..AttributeProto::default()
    }
}

/// A name that no value of the graph has.
pub(super) fn free_name(graph: &Graph, block: &str) -> String {
    let mut name = format!("hpp.attention/{block}");
    while graph.find(&name).is_some() {
        name.push('_');
    }
    name
}
