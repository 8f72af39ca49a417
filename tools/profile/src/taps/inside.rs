//! Finds values inside layers that show which experts and neurons a token activates: routers and ReLUs.

use super::find::GraphView;
use hpp_graph::ops::is_standard;
use hpp_graph::{Attribute, NodeId, ValueId};
use hpp_schema::probe::TapKind;

/// A value to tap and what it is.
pub(super) type TapValue = (ValueId, TapKind);

/// The router of a layer; `None` if the layer has no experts, a reason if its router cannot be observed.
pub(super) fn router(view: GraphView, nodes: &[NodeId]) -> Result<Option<TapValue>, String> {
    let fused: Vec<NodeId> = nodes.iter().copied().filter(|id| is_mixture(view, *id)).collect();
    match fused[..] {
        [] => Ok(top_k(view, nodes)),
        [one] => scores(view, one).map(Some),
        _ => Err(format!("it has {} mixtures of experts", fused.len())),
    }
}

fn is_mixture(view: GraphView, id: NodeId) -> bool {
    let node = view.node(id);
    node.domain == "com.microsoft" && matches!(node.op_type.as_str(), "MoE" | "QMoE")
}

/// The router scores of a fused operator, which selects the best `k` of each row.
fn scores(view: GraphView, id: NodeId) -> Result<TapValue, String> {
    let node = view.node(id);
    let scores = node.inputs.get(1).copied().flatten().filter(|scores| view.is_counted(*scores));
    let scores =
        scores.ok_or_else(|| format!("the element type of the router's scores in {} is not known", node.name))?;
    let top_k = u32::try_from(node.int("k").unwrap_or(1)).unwrap_or(0);
    Ok((scores, TapKind::RouterScores { top_k }))
}

/// The last TopK over a fixed number of scores from a projection. Routers that select groups first select experts last.
fn top_k(view: GraphView, nodes: &[NodeId]) -> Option<TapValue> {
    let chooses = |id: &NodeId| {
        let node = view.node(*id);
        let by = (*node.inputs.first()?)?;
        let largest = node.int("largest").unwrap_or(1) == 1;
        let indices = node.outputs.get(1).copied().flatten()?;
        let experts = u32::try_from(view.width(by)?).ok()?;
        let top_k = constant(view, (*node.inputs.get(1)?)?)?;
        let used = !view.graph.value(indices).consumers.is_empty();
        let chooses = is_standard(node) && node.op_type == "TopK" && largest && used;
        (chooses && top_k >= 1 && top_k < i64::from(experts) && scored(view, by))
            .then_some((indices, TapKind::RoutedExperts { experts }))
    };
    nodes.iter().rev().find_map(chooses)
}

/// Whether scores come from a projection, possibly through a softmax or sigmoid and a bias.
fn scored(view: GraphView, value: ValueId) -> bool {
    let mut value = value;
    for _ in 0..12 {
        let Some(id) = view.graph.producer(value) else { return false };
        if view.is_projection(id) {
            return true;
        }
        let node = view.node(id);
        let follows = view.data_inputs(node).next();
        match follows {
            Some(next) if !view.is_mixing(id) => value = next,
            _ => return false,
        }
    }
    false
}

/// The single number of a constant.
fn constant(view: GraphView, value: ValueId) -> Option<i64> {
    let single = |ints: &Option<Vec<i64>>| match ints.as_deref() {
        Some([single]) => Some(*single),
        _ => None,
    };
    if let Some(weight) = view.graph.weight(value) {
        return single(&weight.ints);
    }
    let node = view.node(view.graph.producer(value)?);
    match node.attributes.get("value") {
        Some(Attribute::Tensor(tensor)) if node.op_type == "Constant" => single(&tensor.ints),
        _ => match (node.op_type.as_str(), &node.inputs[..]) {
            ("Reshape" | "Unsqueeze" | "Squeeze" | "Cast" | "Identity", [Some(input), ..]) => constant(view, *input),
            _ => None,
        },
    }
}

/// The ReLU of a layer's feed-forward network: between two projections with only elementwise operators (a square, a gate) in
/// between. `None` if there is none, a reason if there are several.
pub(super) fn neurons(view: GraphView, nodes: &[NodeId]) -> Result<Option<TapValue>, String> {
    let relu = |id: &NodeId| {
        let node = view.node(*id);
        let output = node.outputs.first().copied().flatten()?;
        let input = node.inputs.first().copied().flatten()?;
        let fits = is_standard(node)
            && node.op_type == "Relu"
            && view.is_counted(output)
            && view.rank(output).is_some_and(|rank| rank >= 2)
            && view.width(output).is_some_and(|width| width > 1)
            && view.comes_from(input, |product| view.is_projection(product))
            && view.leads_to_projection(output);
        fits.then_some(output)
    };
    let found: Vec<ValueId> = nodes.iter().filter_map(relu).collect();
    match found[..] {
        [] => Ok(None),
        [one] => Ok(Some((one, TapKind::Neurons))),
        _ => Err(format!("it has {} ReLUs between projections", found.len())),
    }
}
