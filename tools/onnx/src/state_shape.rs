//! Computes shapes of states from shapes of other inputs: a partition that needs only the shape of a state then does not need the state.

use crate::flatten::Fresh;
use crate::model::Model;
use crate::names::default_domain;
use crate::proto::{AttributeProto, GraphProto, NodeProto, TensorProto};
use crate::set_attribute::int_attribute;
use crate::weights::Storage;
use hpp_graph::{Graph, Node, ValueId, ops};
use hpp_schema::{DType, Dim};

/// The oldest operator set with `Sub` of integers.
const OLDEST_OPSET: i64 = 7;

/// A state, and the inputs whose shapes tell its shape.
#[derive(Clone, Copy, Debug)]
pub struct StateShape {
    /// The state before a pass.
    pub past: ValueId,
    /// An input `[batch, new tokens, ..]`.
    pub tokens: ValueId,
    /// The axis along which the state holds all past tokens, and an input `[batch, past and new tokens]`.
    pub length: Option<(usize, ValueId)>,
}

/// Replaces the `Shape` nodes of these states. The batch is that of `tokens`, and the number of past tokens the length of the mask less the length of
/// `tokens`. Returns how many nodes were replaced: none inside bodies, and none that reads a size that is neither fixed nor one of these.
///
/// `graph` must be the model's graph with inferred shapes. If nodes were replaced, use the graph of the result afterwards.
pub fn derive_state_shapes(model: &mut Model, graph: &Graph, states: &[StateShape]) -> usize {
    let imports = &model.proto.opset_import;
    let opset = imports.iter().find(|opset| default_domain(opset.domain()).is_empty());
    if opset.is_none_or(|opset| opset.version() < OLDEST_OPSET) {
        return 0;
    }
    let Some(proto) = model.proto.graph.as_mut() else { return 0 };
    let mut rewriter = Rewriter { fresh: Fresh::for_graph(proto), constants: vec![] };
    let mut replaced = 0;
    // Nodes of the graph have the order of those of the file.
    for (at, node) in std::mem::take(&mut proto.node).into_iter().enumerate() {
        match graph.nodes.get(at).and_then(|known| rewriter.replacement(graph, states, known)) {
            Some(nodes) => {
                replaced += 1;
                proto.node.extend(nodes);
            }
            None => proto.node.push(node),
        }
    }
    rewriter.store_constants(proto, &mut model.weights.storage);
    replaced
}

/// A size in the shape of a state.
enum Size {
    Fixed(i64),
    Batch,
    /// The past tokens, with the mask whose length is theirs and that of the new tokens.
    Past(ValueId),
}

struct Rewriter {
    fresh: Fresh,
    constants: Vec<(String, i64)>,
}

impl Rewriter {
    /// The nodes in place of one that reads the shape of a state.
    fn replacement(&mut self, graph: &Graph, states: &[StateShape], node: &Node) -> Option<Vec<NodeProto>> {
        let is_shape = ops::is_standard(node) && node.op_type == "Shape";
        let input = node.inputs.first().copied().flatten().filter(|_| is_shape)?;
        let output = &graph.value(node.outputs.first().copied().flatten()?).name;
        let state = states.iter().find(|state| state.past == input)?;
        let sizes = sizes(graph, state, node)?;
        let tokens = &graph.value(state.tokens).name;
        let mut nodes = vec![];
        let sizes = sizes.into_iter().map(|size| match size {
            Size::Fixed(size) => self.constant(size),
            Size::Batch => self.size_of(tokens, 0, output, &mut nodes),
            Size::Past(mask) => {
                let inputs = [&graph.value(mask).name, tokens].map(|name| self.size_of(name, 1, output, &mut nodes));
                self.push("Sub", inputs.to_vec(), output, vec![], &mut nodes)
            }
        });
        let sizes: Vec<String> = sizes.collect();
        let joined = self.push("Concat", sizes, output, vec![int_attribute("axis", 0)], &mut nodes);
        nodes.last_mut().filter(|last| last.output[0] == joined)?.output = vec![output.clone()];
        Some(nodes)
    }

    /// `[size]` of an input along an axis.
    fn size_of(&mut self, input: &str, axis: i64, prefix: &str, nodes: &mut Vec<NodeProto>) -> String {
        let shape = self.push("Shape", vec![input.to_owned()], prefix, vec![], nodes);
        let axis = self.constant(axis);
        self.push("Gather", vec![shape, axis], prefix, vec![], nodes)
    }

    /// `[value]`, int64.
    fn constant(&mut self, value: i64) -> String {
        if let Some((name, _)) = self.constants.iter().find(|(_, known)| *known == value) {
            return name.clone();
        }
        let name = self.fresh.name(&format!("hpp.size/{value}"));
        self.constants.push((name.clone(), value));
        name
    }

    fn push(
        &mut self,
        op_type: &str,
        input: Vec<String>,
        prefix: &str,
        attribute: Vec<AttributeProto>,
        nodes: &mut Vec<NodeProto>,
    ) -> String {
        let output = self.fresh.name(&format!("{prefix}/{op_type}"));
        nodes.push(NodeProto {
            name: Some(output.clone()),
            op_type: Some(op_type.to_owned()),
            input,
            output: vec![output.clone()],
            attribute,
            ..NodeProto::default()
        });
        output
    }

    fn store_constants(self, graph: &mut GraphProto, storage: &mut Vec<Storage>) {
        for (name, value) in self.constants {
            graph.initializer.push(TensorProto {
                name: Some(name),
                dims: vec![1],
                data_type: Some(DType::Int64.to_onnx()),
                raw_data: Some(value.to_le_bytes().to_vec().into()),
                ..TensorProto::default()
            });
            storage.push(Storage::Embedded);
        }
    }
}

/// The sizes that a `Shape` node reads; `None` if they are not all known or sizes of the two inputs.
fn sizes(graph: &Graph, state: &StateShape, node: &Node) -> Option<Vec<Size>> {
    let shape = graph.value(state.past).shape.as_ref()?;
    let batch = graph.value(state.tokens).shape.as_ref()?.first()?;
    let axes = ops::shape_axes(node, shape.len());
    let mask = |axis: usize| state.length.filter(|(of_tokens, _)| *of_tokens == axis).map(|(_, mask)| mask);
    let size = |axis: usize| match &shape[axis] {
        _ if let Some(mask) = mask(axis) => Some(Size::Past(mask)),
        size if size == batch && *size != Dim::Unknown && size.as_fixed().is_none() => Some(Size::Batch),
        size => size.as_fixed().and_then(|size| i64::try_from(size).ok()).map(Size::Fixed),
    };
    let sizes = axes.map(size).collect::<Option<Vec<Size>>>()?;
    (!sizes.is_empty()).then_some(sizes)
}
