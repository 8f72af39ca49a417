//! Walks from the logits back to the vocabulary projection, through position-wise operators.

use super::HeadReason;
use hpp_graph::{Attribute, Graph, Node, NodeId, Origin, ValueId};

/// The path from the projection to the logits.
pub struct Chain {
    /// The vocabulary projection.
    pub contraction: NodeId,
    /// Index of its activation input.
    pub operand: usize,
    /// The activation `[batch, sequence, hidden]`.
    pub activation: ValueId,
    /// Values that will have fewer positions: from the projection's output to the logits.
    pub narrowed: Vec<ValueId>,
}

/// Maximum number of nodes of a constant expression that is examined.
const MAX_CONSTANT_NODES: usize = 64;

/// Walks back from the logits.
pub fn find(graph: &Graph, logits: ValueId) -> Result<Chain, HeadReason> {
    let mut narrowed = vec![];
    let mut value = logits;
    loop {
        check_private(graph, value, logits, narrowed.last().copied())?;
        narrowed.push(value);
        let id = graph.producer(value).ok_or(HeadReason::NotComputed)?;
        let node = graph.node(id);
        if let Some(operand) = contraction(graph, node)? {
            let activation = input(node, operand).ok_or(HeadReason::NotComputed)?;
            return Ok(Chain { contraction: id, operand, activation, narrowed });
        }
        value = position_wise(graph, node)?;
    }
}

/// Checks that only the next node on the path reads a value. Any other reader would get fewer positions.
fn check_private(graph: &Graph, v: ValueId, logits: ValueId, next: Option<ValueId>) -> Result<(), HeadReason> {
    let value = graph.value(v);
    let readers = usize::from(next.is_some());
    let returned = v != logits && graph.outputs.contains(&v);
    let several = graph.producer(v).is_some_and(|p| graph.node(p).writes().count() > 1);
    match value.consumers.len() == readers && !returned && !several {
        true => Ok(()),
        false => Err(HeadReason::Shared(value.name.clone())),
    }
}

fn input(node: &Node, i: usize) -> Option<ValueId> {
    node.inputs.get(i).copied().flatten()
}

fn label(node: &Node) -> String {
    format!("{} {:?}", node.op_type, node.name)
}

/// Index of the activation input, if the node is a product with a weight of rank 2 that contracts only the last axis.
fn contraction(graph: &Graph, node: &Node) -> Result<Option<usize>, HeadReason> {
    let plain = match (node.domain.as_str(), node.op_type.as_str()) {
        ("", "MatMul") => input(node, 1).and_then(|w| rank(graph, w)) == Some(2),
        ("com.microsoft", "FusedMatMul") => {
            let untouched = ["transA", "transBatchA", "transBatchB"].iter().all(|a| node.int(a).unwrap_or(0) == 0);
            untouched && input(node, 1).and_then(|w| rank(graph, w)) == Some(2)
        }
        // These operators take a quantized weight [N, K] by definition.
        ("com.microsoft", "MatMulNBits" | "MatMulBnb4" | "MatMulFpQ4") => true,
        _ => return Ok(None),
    };
    let constant = node.inputs.iter().skip(1).flatten().all(|v| is_constant(graph, *v));
    match plain && constant && node.captures.is_empty() {
        true => Ok(Some(0)),
        false => Err(HeadReason::Operand(label(node))),
    }
}

/// The operand that carries positions through a position-wise operator.
fn position_wise(graph: &Graph, node: &Node) -> Result<ValueId, HeadReason> {
    let unknown = || HeadReason::Operator(label(node));
    if !node.domain.is_empty() || !node.captures.is_empty() {
        return Err(unknown());
    }
    let first = input(node, 0).ok_or_else(unknown)?;
    match node.op_type.as_str() {
        "Cast" | "Identity" | "Tanh" | "Neg" | "Relu" | "Sigmoid" | "Abs" | "Exp" | "Log" | "Sqrt" => Ok(first),
        "Clip" => match node.inputs[1..].iter().flatten().all(|v| is_constant(graph, *v)) {
            true => Ok(first),
            false => Err(HeadReason::Operand(label(node))),
        },
        "Add" | "Sub" | "Mul" | "Div" | "Min" | "Max" | "Pow" => varying_operand(graph, node),
        "Softmax" | "LogSoftmax" if matches!(node.int("axis"), Some(-1 | 2)) => Ok(first),
        "Slice" if slices_last_axis(graph, node) => Ok(first),
        _ => Err(unknown()),
    }
}

/// The single operand of an elementwise operator that differs between positions.
fn varying_operand(graph: &Graph, node: &Node) -> Result<ValueId, HeadReason> {
    let operands: Vec<ValueId> = node.inputs.iter().flatten().copied().collect();
    let varying: Vec<ValueId> = operands.into_iter().filter(|v| !is_position_independent(graph, *v)).collect();
    match varying.as_slice() {
        [one] => Ok(*one),
        _ => Err(HeadReason::Operand(label(node))),
    }
}

/// Whether a value is constant and broadcasts over the sequence axis of a tensor of rank 3.
fn is_position_independent(graph: &Graph, v: ValueId) -> bool {
    let Some(dims) = dims(graph, v) else { return false };
    let broadcasts = dims.len() < 2 || (dims.len() <= 3 && dims[dims.len() - 2] == Some(1));
    broadcasts && is_constant(graph, v)
}

fn slices_last_axis(graph: &Graph, node: &Node) -> bool {
    let axes = match node.attributes.get("axes") {
        Some(Attribute::Ints(axes)) => Some(axes.clone()),
        _ => input(node, 3).and_then(|v| graph.ints(v)).map(<[i64]>::to_vec),
    };
    let constant = node.inputs.iter().skip(1).flatten().all(|v| is_constant(graph, *v));
    constant && axes.is_some_and(|axes| !axes.is_empty() && axes.iter().all(|axis| matches!(axis, -1 | 2)))
}

/// Whether a value depends on weights and constants only.
fn is_constant(graph: &Graph, v: ValueId) -> bool {
    let mut todo = vec![v];
    let mut seen = vec![];
    while let Some(value) = todo.pop() {
        match &graph.value(value).origin {
            Origin::Weight(_) => {}
            Origin::Input => return false,
            Origin::Node { node, .. } if seen.contains(node) => {}
            Origin::Node { node, .. } => {
                seen.push(*node);
                if seen.len() > MAX_CONSTANT_NODES || is_random(graph.node(*node)) {
                    return false;
                }
                todo.extend(graph.node(*node).reads());
            }
        }
    }
    true
}

fn is_random(node: &Node) -> bool {
    node.op_type.starts_with("Random") || node.op_type == "Bernoulli" || node.op_type == "Multinomial"
}

/// Known dimensions, from facts or from a constant.
fn dims(graph: &Graph, v: ValueId) -> Option<Vec<Option<u64>>> {
    let value = graph.value(v);
    if let Some(shape) = &value.shape {
        return Some(shape.iter().map(|d| d.as_fixed()).collect());
    }
    match graph.node(graph.producer(v)?).attributes.get("value") {
        Some(Attribute::Tensor(constant)) => Some(constant.dims.iter().map(|d| Some(*d)).collect()),
        _ => None,
    }
}

/// Rank of a value. Looks through operators that keep the rank if the shape is unknown.
fn rank(graph: &Graph, v: ValueId) -> Option<usize> {
    let mut value = v;
    for _ in 0..MAX_CONSTANT_NODES {
        if let Some(dims) = dims(graph, value) {
            return Some(dims.len());
        }
        let node = graph.node(graph.producer(value)?);
        match node.op_type.as_str() {
            "Transpose" | "Cast" | "Identity" | "DequantizeLinear" => value = input(node, 0)?,
            _ => return None,
        }
    }
    None
}
