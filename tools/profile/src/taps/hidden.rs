//! Finds the tensors that carry the hidden state out of each block.

use super::find::GraphView;
use hpp_graph::{BlockKind, Node, NodeId, Segmentation, ValueId};
use hpp_model::LOGIT_POSITIONS;
use hpp_schema::Dim;

/// The tensors whose sum is the hidden state after block `index`, or the reason why they are unknown.
pub(super) fn after(view: GraphView, segmentation: &Segmentation, index: usize) -> Result<Vec<ValueId>, String> {
    let carriers = carriers(view, segmentation, index)?;
    let last = segmentation.blocks.get(index + 1).is_some_and(|next| next.kind == BlockKind::Head);
    let [normed] = carriers[..] else { return Ok(carriers) };
    let before = index.checked_sub(1).and_then(|before| carriers_or_none(view, segmentation, before));
    // If every layer ends with a norm, the output of the norm is the hidden state.
    let every_layer_ends_so = before.is_some_and(|before| before.iter().any(|v| norm(view, *v).is_some()));
    if !last || every_layer_ends_so {
        return Ok(carriers);
    }
    Ok(norm(view, normed).and_then(|node| before_norm(view, view.node(node))).unwrap_or(carriers))
}

fn carriers_or_none(view: GraphView, segmentation: &Segmentation, index: usize) -> Option<Vec<ValueId>> {
    carriers(view, segmentation, index).ok()
}

/// The tensor that crosses the boundary, or the two that the next block adds.
fn carriers(view: GraphView, segmentation: &Segmentation, index: usize) -> Result<Vec<ValueId>, String> {
    let crossing = segmentation.boundaries.get(index).map_or(&[][..], |boundary| &boundary.values);
    let every_token = crossing.iter().map(|value| before_choosing(view, *value));
    let could: Vec<ValueId> = every_token.filter(|value| is_hidden(view, *value)).collect();
    match could[..] {
        [] => Err("no tensor of known width crosses there".into()),
        [_] => Ok(could),
        _ => {
            let pairs = added(view, &could);
            match pairs[..] {
                [(a, b)] => Ok(vec![a, b]),
                _ => Err(format!("{} tensors cross there, and which carry the hidden state is unknown", could.len())),
            }
        }
    }
}

/// If the head starts with a `Gather` of the requested logit positions, the tensor of all tokens before this `Gather`;
/// else the value itself.
fn before_choosing(view: GraphView, value: ValueId) -> ValueId {
    let chosen_from = || {
        let node = view.node(view.graph.producer(value)?);
        let by = (*node.inputs.get(1)?)?;
        let chooses = node.op_type == "Gather" && view.graph.value(by).name == LOGIT_POSITIONS;
        node.inputs.first().copied().flatten().filter(|_| chooses)
    };
    chosen_from().unwrap_or(value)
}

/// Whether a value is `[..., width]` floats with one row per token of the pass.
fn is_hidden(view: GraphView, value: ValueId) -> bool {
    let varies = |dim: &Dim| dim.as_fixed().is_none();
    let shape = view.graph.value(value).shape.as_ref();
    let rows_vary = shape.is_some_and(|shape| shape.len() >= 2 && shape[..shape.len() - 1].iter().any(varies));
    rows_vary && view.is_counted(value) && view.width(value).is_some_and(|width| width > 1)
}

/// The pairs of these values that some node adds directly.
fn added(view: GraphView, values: &[ValueId]) -> Vec<(ValueId, ValueId)> {
    let mut pairs = Vec::new();
    for (at, a) in values.iter().enumerate() {
        for b in &values[at + 1..] {
            let both = |id: &&NodeId| addends(view.node(**id)).is_some_and(|two| two == [*a, *b] || two == [*b, *a]);
            if view.graph.value(*a).consumers.iter().any(|id| both(&id)) {
                pairs.push((*a, *b));
            }
        }
    }
    pairs
}

/// The two tensors that a node adds first.
fn addends(node: &Node) -> Option<[ValueId; 2]> {
    let adds = matches!(node.op_type.as_str(), "Add" | "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization");
    adds.then_some([(*node.inputs.first()?)?, (*node.inputs.get(1)?)?])
}

/// The normalisation that produces a value.
fn norm(view: GraphView, value: ValueId) -> Option<NodeId> {
    let id = view.graph.producer(value)?;
    let node = view.node(id);
    let normalises = matches!(
        node.op_type.as_str(),
        "LayerNormalization"
            | "SimplifiedLayerNormalization"
            | "RMSNormalization"
            | "SkipLayerNormalization"
            | "SkipSimplifiedLayerNormalization"
    );
    (normalises && node.outputs.first() == Some(&Some(value))).then_some(id)
}

/// The input of a norm.
fn before_norm(view: GraphView, node: &Node) -> Option<Vec<ValueId>> {
    let values = if node.op_type.starts_with("Skip") {
        // With a bias, the sum is known only if the node returns it.
        let bias = if node.op_type == "SkipLayerNormalization" { 4 } else { 3 };
        match node.inputs.get(bias).copied().flatten() {
            None => addends(node)?.to_vec(),
            Some(_) => vec![(*node.outputs.get(3)?)?],
        }
    } else {
        vec![(*node.inputs.first()?)?]
    };
    values.iter().all(|value| is_hidden(view, *value) && !view.is_weight(*value)).then_some(values)
}
