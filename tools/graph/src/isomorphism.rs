//! Graph isomorphism of two blocks: colour refinement proposes a mapping, a full check accepts or rejects it.

use crate::segmentation::Segmentation;
use crate::{Attribute, Graph, NodeId, Origin, ValueId};
use std::collections::{BTreeMap, BTreeSet};
use std::hash::{DefaultHasher, Hash, Hasher};

/// A block with the weight-only nodes that it reads. Refinement gives corresponding nodes of equal blocks equal
/// colours.
#[derive(Clone, Debug)]
pub(crate) struct BlockView {
    nodes: Vec<NodeId>,
    inside: BTreeMap<NodeId, usize>,
    colors: Vec<u64>,
    pasts: BTreeSet<ValueId>,
    /// Values that other blocks read or that the model returns.
    returned: BTreeSet<ValueId>,
}

/// An isomorphism from one block to another.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Isomorphism {
    /// Corresponding nodes, weight-only nodes included.
    pub nodes: BTreeMap<NodeId, NodeId>,
    /// Corresponding values, weights and outer values included.
    pub values: BTreeMap<ValueId, ValueId>,
}

fn hash_of(parts: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    parts.hash(&mut hasher);
    hasher.finish()
}

impl BlockView {
    pub fn of(graph: &Graph, segmentation: &Segmentation, block: usize) -> Self {
        let mut members: BTreeSet<NodeId> = segmentation.blocks[block].nodes.iter().copied().collect();
        let mut todo: Vec<NodeId> = members.iter().copied().collect();
        while let Some(id) = todo.pop() {
            let makers = graph.producers_of(id).into_iter().filter(|p| segmentation.weights.is_weight_only(*p));
            todo.extend(makers.filter(|p| members.insert(*p)).collect::<Vec<_>>());
        }
        let nodes: Vec<NodeId> = members.into_iter().collect();
        let inside: BTreeMap<NodeId, usize> = nodes.iter().enumerate().map(|(i, n)| (*n, i)).collect();
        let pasts = segmentation.states.iter().map(|s| s.pair.past).collect();
        let is_returned = |v: &ValueId| {
            let leaves = |c: &NodeId| !inside.contains_key(c) && !segmentation.weights.is_weight_only(*c);
            graph.outputs.contains(v) || graph.value(*v).consumers.iter().any(leaves)
        };
        let own = nodes.iter().filter(|n| !segmentation.weights.is_weight_only(**n));
        let returned = own.flat_map(|n| graph.node(*n).writes()).filter(is_returned).collect();
        let mut view = BlockView { colors: vec![0; nodes.len()], nodes, inside, pasts, returned };
        view.refine(graph);
        view
    }

    /// A hash that is equal for isomorphic blocks.
    pub fn hash(&self) -> u64 {
        let mut colors = self.colors.clone();
        colors.sort_unstable();
        hash_of(colors)
    }

    /// Colours nodes by kind and inputs, then by outputs, then by inputs again.
    fn refine(&mut self, graph: &Graph) {
        self.colors = self.nodes.iter().map(|n| hash_of(NodeKey(graph.node(*n)))).collect();
        self.color_from_inputs(graph);
        self.color_from_outputs(graph);
        self.color_from_inputs(graph);
    }

    fn color_from_inputs(&mut self, graph: &Graph) {
        for i in 0..self.nodes.len() {
            let node = graph.node(self.nodes[i]);
            let inputs: Vec<u64> = node.inputs.iter().map(|v| v.map_or(1, |v| self.value_color(graph, v))).collect();
            let captures: Vec<u64> = node.captures.iter().map(|v| self.value_color(graph, *v)).collect();
            self.colors[i] = hash_of((self.colors[i], inputs, captures));
        }
    }

    fn color_from_outputs(&mut self, graph: &Graph) {
        for i in (0..self.nodes.len()).rev() {
            let node = graph.node(self.nodes[i]);
            let uses: Vec<_> = node.outputs.iter().map(|v| v.map(|v| self.uses(graph, v))).collect();
            self.colors[i] = hash_of((self.colors[i], uses));
        }
    }

    fn uses(&self, graph: &Graph, value: ValueId) -> (bool, Vec<u64>) {
        let consumers = graph.value(value).consumers.iter().filter_map(|c| Some((*c, *self.inside.get(c)?)));
        let mut uses: Vec<u64> = consumers
            .map(|(id, i)| {
                let ports: Vec<usize> = ports_of(graph, id, value);
                hash_of((self.colors[i], ports))
            })
            .collect();
        uses.sort_unstable();
        (self.returned.contains(&value), uses)
    }

    fn value_color(&self, graph: &Graph, value: ValueId) -> u64 {
        match &graph.value(value).origin {
            Origin::Node { node, slot } => match self.inside.get(node) {
                Some(i) => hash_of((2, self.colors[*i], slot)),
                None => 3,
            },
            Origin::Weight(_) => hash_of(WeightKey::of(graph, value)),
            Origin::Input if self.pasts.contains(&value) => hash_of((4, graph.value(value).dtype, sizes(graph, value))),
            Origin::Input => 3,
        }
    }
}

/// Positions at which a node reads a value.
fn ports_of(graph: &Graph, id: NodeId, value: ValueId) -> Vec<usize> {
    graph.node(id).reads().enumerate().filter(|(_, v)| *v == value).map(|(i, _)| i).collect()
}

/// Fixed dimensions; `None` for every symbol.
fn sizes(graph: &Graph, value: ValueId) -> Option<Vec<Option<u64>>> {
    graph.value(value).shape.as_ref().map(|shape| shape.iter().map(|d| d.as_fixed()).collect())
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct WeightKey {
    dtype: Option<hpp_schema::DType>,
    sizes: Option<Vec<Option<u64>>>,
    bytes: u64,
    small: Option<u64>,
}

impl WeightKey {
    /// Contents count only where they are structure: small integer tensors and scalars. Small float vectors are learned
    /// parameters.
    fn of(graph: &Graph, value: ValueId) -> Option<Self> {
        let weight = graph.weight(value)?;
        let sizes = sizes(graph, value);
        let real = graph.value(value).dtype.is_none_or(|t| t.is_float());
        let scalar = sizes.as_ref().is_some_and(|s| s.iter().all(|d| *d == Some(1)));
        let small = weight.content.filter(|_| !real || scalar);
        Some(WeightKey { dtype: graph.value(value).dtype, sizes, bytes: weight.bytes, small })
    }
}

/// Hashes a node without its edges and its name.
struct NodeKey<'a>(&'a crate::Node);

impl Hash for NodeKey<'_> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let node = self.0;
        let domain = if node.domain == "ai.onnx" { "" } else { &node.domain };
        (domain, &node.op_type, node.captures.len()).hash(state);
        node.outputs.iter().map(Option::is_some).collect::<Vec<_>>().hash(state);
        for (name, attribute) in &node.attributes {
            name.hash(state);
            hash_attribute(attribute, state);
        }
    }
}

fn hash_attribute(attribute: &Attribute, state: &mut impl Hasher) {
    std::mem::discriminant(attribute).hash(state);
    match attribute {
        Attribute::Int(v) => v.hash(state),
        Attribute::Float(v) => v.to_bits().hash(state),
        Attribute::String(v) => v.hash(state),
        Attribute::Ints(v) => v.hash(state),
        Attribute::Floats(v) => v.iter().for_each(|f| f.to_bits().hash(state)),
        Attribute::Strings(v) => v.hash(state),
        Attribute::Tensor(t) => (t.dtype, &t.dims, t.content, t.bytes).hash(state),
        Attribute::Body(b) => (b.structure, b.nodes, b.weight_bytes).hash(state),
        Attribute::Opaque(v) => v.hash(state),
    }
}

fn same_kind(a: &crate::Node, b: &crate::Node) -> bool {
    let shape = |n: &crate::Node| (n.inputs.len(), n.captures.len(), n.outputs.len());
    let domain = |n: &crate::Node| if n.domain == "ai.onnx" { String::new() } else { n.domain.clone() };
    domain(a) == domain(b) && a.op_type == b.op_type && a.attributes == b.attributes && shape(a) == shape(b)
}

impl Isomorphism {
    /// The isomorphism between two blocks, if refinement finds one.
    pub(crate) fn between(graph: &Graph, a: &BlockView, b: &BlockView) -> Option<Isomorphism> {
        let mut by_color: BTreeMap<u64, (Vec<NodeId>, Vec<NodeId>)> = BTreeMap::new();
        for (node, color) in a.nodes.iter().zip(&a.colors) {
            by_color.entry(*color).or_default().0.push(*node);
        }
        for (node, color) in b.nodes.iter().zip(&b.colors) {
            by_color.entry(*color).or_default().1.push(*node);
        }
        // Nodes of equal colour are usually interchangeable; pairing them in execution order is consistent.
        let mut mapping = Isomorphism::default();
        for (left, right) in by_color.into_values() {
            if left.len() != right.len() {
                return None;
            }
            mapping.nodes.extend(left.into_iter().zip(right));
        }
        mapping.complete(graph, a, b).then_some(mapping)
    }

    /// Extends the mapping to values. Checks every edge, port, attribute and weight.
    fn complete(&mut self, graph: &Graph, a: &BlockView, b: &BlockView) -> bool {
        let mut back = BTreeMap::new();
        let pairs: Vec<(NodeId, NodeId)> = self.nodes.iter().map(|(x, y)| (*x, *y)).collect();
        for (x, y) in pairs {
            let (x, y) = (graph.node(x), graph.node(y));
            if !same_kind(x, y) {
                return false;
            }
            let captures = x.captures.iter().copied().map(Some).zip(y.captures.iter().copied().map(Some));
            let ends = x.inputs.iter().copied().zip(y.inputs.iter().copied()).chain(captures);
            let ends = ends.chain(x.outputs.iter().copied().zip(y.outputs.iter().copied()));
            for (v, w) in ends {
                let agrees = match (v, w) {
                    (None, None) => true,
                    (Some(v), Some(w)) => {
                        let forward = *self.values.entry(v).or_insert(w) == w;
                        let backward = *back.entry(w).or_insert(v) == v;
                        let (left, right) = (BlockValue { view: a, value: v }, BlockValue { view: b, value: w });
                        forward && backward && left.corresponds_to(graph, &right, &self.nodes)
                    }
                    _ => false,
                };
                if !agrees {
                    return false;
                }
            }
        }
        true
    }
}

/// A value as part of a block.
struct BlockValue<'a> {
    view: &'a BlockView,
    value: ValueId,
}

impl BlockValue<'_> {
    /// The node of the block that produces the value; `None` if it comes from outside.
    fn producer(&self, graph: &Graph) -> Option<NodeId> {
        graph.producer(self.value).filter(|p| self.view.inside.contains_key(p))
    }

    fn corresponds_to(&self, graph: &Graph, other: &BlockValue, nodes: &BTreeMap<NodeId, NodeId>) -> bool {
        let dtypes = (graph.value(self.value).dtype, graph.value(other.value).dtype);
        if matches!(dtypes, (Some(a), Some(b)) if a != b)
            || self.view.returned.contains(&self.value) != other.view.returned.contains(&other.value)
        {
            return false;
        }
        match (self.producer(graph), other.producer(graph)) {
            (Some(a), Some(b)) => nodes.get(&a) == Some(&b),
            (None, None) => {
                self.view.pasts.contains(&self.value) == other.view.pasts.contains(&other.value)
                    && WeightKey::of(graph, self.value) == WeightKey::of(graph, other.value)
            }
            _ => false,
        }
    }
}
