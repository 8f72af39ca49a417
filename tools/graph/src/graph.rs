//! An ONNX graph as an arena: nodes and values refer to each other by index, and values are the edges.

use hpp_schema::{DType, Shape};
use std::collections::BTreeMap;

/// Index of a [`Node`] in [`Graph::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// Index of a [`Value`] in [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A model's graph. Invariant: nodes are in a topological order; the reader sorts them or refuses the model.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Operator set imported for each domain; the default domain is `""`.
    pub opsets: BTreeMap<String, i64>,
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Every tensor: inputs, weights and the outputs of nodes.
    pub values: Vec<Value>,
    /// Graph inputs in the model's order, without weights.
    pub inputs: Vec<ValueId>,
    /// Graph outputs, in the model's order.
    pub outputs: Vec<ValueId>,
}

/// An operator and its edges.
#[derive(Clone, Debug)]
pub struct Node {
    /// The ONNX node name, for messages only. May be empty.
    pub name: String,
    /// Operator domain, `""` for the default.
    pub domain: String,
    /// Operator.
    pub op_type: String,
    /// Inputs by position; `None` for an omitted optional input.
    pub inputs: Vec<Option<ValueId>>,
    /// Outer values that the bodies of this node (`If`, `Loop`, `Scan`) read. They count as inputs.
    pub captures: Vec<ValueId>,
    /// Outputs by position; `None` for an omitted optional output.
    pub outputs: Vec<Option<ValueId>>,
    /// Attributes by name.
    pub attributes: BTreeMap<String, Attribute>,
}

/// A tensor edge.
#[derive(Clone, Debug)]
pub struct Value {
    /// The ONNX name, unique in the graph.
    pub name: String,
    /// Element type, if known.
    pub dtype: Option<DType>,
    /// Shape, if its rank is known; single dimensions may still be unknown.
    pub shape: Option<Shape>,
    /// What defines it.
    pub origin: Origin,
    /// Nodes that read it, through an input or a capture, in execution order, each once.
    pub consumers: Vec<NodeId>,
}

/// What defines a value.
#[derive(Clone, Debug)]
pub enum Origin {
    /// A graph input.
    Input,
    /// A weight (an ONNX initializer).
    Weight(Weight),
    /// An output of a node.
    Node {
        /// The producer.
        node: NodeId,
        /// Index of the output.
        slot: usize,
    },
}

/// Size of an ONNX initializer, and its contents where they are small. All other bytes stay in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Bytes of the stored data.
    pub bytes: u64,
    /// The elements of an integer weight of at most 64 elements: shape inference reads them, and operators take them in
    /// place of attributes.
    pub ints: Option<Vec<i64>>,
    /// A hash of small contents (embedded, up to 1 KiB), so that blocks with different constants get different classes;
    /// `None` for large weights, whose contents do not affect the structure.
    pub content: Option<u64>,
}

/// A node attribute.
#[derive(Clone, Debug, PartialEq)]
pub enum Attribute {
    /// One integer.
    Int(i64),
    /// One float.
    Float(f32),
    /// One string.
    String(Vec<u8>),
    /// Integers.
    Ints(Vec<i64>),
    /// Floats.
    Floats(Vec<f32>),
    /// Strings.
    Strings(Vec<Vec<u8>>),
    /// A tensor, such as the value of a `Constant` node.
    Tensor(Constant),
    /// A body (`then_branch`, `body`). [`Node::captures`] lists the outer values that it reads.
    Body(Body),
    /// Any other attribute, as a hash of its bytes.
    Opaque(u64),
}

/// A tensor inside an attribute.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub dims: Vec<u64>,
    /// The elements of an integer tensor of at most 64 elements.
    pub ints: Option<Vec<i64>>,
    /// Hash of the contents.
    pub content: u64,
    /// Whether all bytes are zero; false where they are in another file.
    pub is_zero: bool,
    /// Bytes of the stored data.
    pub bytes: u64,
}

/// A summary of a control-flow body.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// Hash of its structure with outer names replaced by capture positions.
    pub structure: u64,
    /// Element types of its outputs.
    pub output_dtypes: Vec<Option<DType>>,
    /// Declared shapes of its outputs.
    pub output_shapes: Vec<Option<Shape>>,
    /// Bytes of weights stored inside it.
    pub weight_bytes: u64,
    /// Number of nodes inside, nested bodies included.
    pub nodes: usize,
    /// The quantized matrices inside, by their position among the captures, with the number of matrix elements that each stored number holds. That
    /// number is 0 for scales and zero points.
    pub packed: BTreeMap<usize, u64>,
}

impl Graph {
    /// The node with this id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The value with this id.
    pub fn value(&self, id: ValueId) -> &Value {
        &self.values[id.0 as usize]
    }

    /// Every node id in execution order.
    pub fn node_ids(&self) -> impl DoubleEndedIterator<Item = NodeId> + use<> {
        (0..self.nodes.len() as u32).map(NodeId)
    }

    /// Every value id.
    pub fn value_ids(&self) -> impl DoubleEndedIterator<Item = ValueId> + use<> {
        (0..self.values.len() as u32).map(ValueId)
    }

    /// The node that produces a value, if a node does.
    pub fn producer(&self, id: ValueId) -> Option<NodeId> {
        match self.value(id).origin {
            Origin::Node { node, .. } => Some(node),
            _ => None,
        }
    }

    /// The weight, if the value is one.
    pub fn weight(&self, id: ValueId) -> Option<&Weight> {
        match &self.value(id).origin {
            Origin::Weight(weight) => Some(weight),
            _ => None,
        }
    }

    /// The elements of a small integer constant: a weight, or what a `Constant` node gives.
    pub fn ints(&self, id: ValueId) -> Option<&[i64]> {
        if let Some(weight) = self.weight(id) {
            return weight.ints.as_deref();
        }
        let node = self.node(self.producer(id)?);
        match (node.op_type.as_str(), node.attributes.get("value"), node.attributes.get("value_ints")) {
            ("Constant", Some(Attribute::Tensor(constant)), _) => constant.ints.as_deref(),
            ("Constant", _, Some(Attribute::Ints(ints))) => Some(ints),
            _ => None,
        }
    }

    /// The value with this name. Linear search: for tests and user input, not for inner loops.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.value_ids().find(|id| self.value(*id).name == name)
    }

    /// Adds a value without readers.
    pub fn add_value(
        &mut self,
        name: impl Into<String>,
        dtype: Option<DType>,
        shape: Option<Shape>,
        origin: Origin,
    ) -> ValueId {
        self.values.push(Value { name: name.into(), dtype, shape, origin, consumers: vec![] });
        ValueId(self.values.len() as u32 - 1)
    }

    /// Appends a node, and records it as a consumer of its inputs and as the origin of its outputs.
    pub fn add_node(&mut self, node: Node) -> NodeId {
        let id = NodeId(self.nodes.len() as u32);
        for value in node.reads() {
            let consumers = &mut self.values[value.0 as usize].consumers;
            if consumers.last() != Some(&id) {
                consumers.push(id);
            }
        }
        for (slot, value) in node.outputs.iter().enumerate() {
            if let Some(value) = value {
                self.values[value.0 as usize].origin = Origin::Node { node: id, slot };
            }
        }
        self.nodes.push(node);
        id
    }

    /// Nodes that produce the inputs of this one, each once, in order.
    pub fn producers_of(&self, id: NodeId) -> Vec<NodeId> {
        let mut producers: Vec<_> = self.node(id).reads().filter_map(|v| self.producer(v)).collect();
        producers.sort_unstable();
        producers.dedup();
        producers
    }

    /// Nodes that read the outputs of this one, each once, in order.
    pub fn consumers_of(&self, id: NodeId) -> Vec<NodeId> {
        let mut consumers: Vec<_> = self.node(id).writes().flat_map(|v| self.value(v).consumers.clone()).collect();
        consumers.sort_unstable();
        consumers.dedup();
        consumers
    }
}

impl Node {
    /// Every value that the node reads: inputs, then captures.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().flatten().chain(&self.captures).copied()
    }

    /// Every value that the node produces.
    pub fn writes(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.outputs.iter().flatten().copied()
    }

    /// An integer attribute.
    pub fn int(&self, name: &str) -> Option<i64> {
        match self.attributes.get(name) {
            Some(Attribute::Int(value)) => Some(*value),
            _ => None,
        }
    }
}
