//! An ONNX graph as an arena: nodes and values are indices, edges are values.

use hpp_schema::{DType, Shape};
use std::collections::BTreeMap;

/// Index of a [`Node`] in [`Graph::nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// Index of a [`Value`] in [`Graph::values`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ValueId(pub u32);

/// A model's graph. Nodes are in a topological order (the reader refuses others and sorts where it may).
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Operator set imported for each domain; the default domain is `""`.
    pub opsets: BTreeMap<String, i64>,
    /// Nodes in execution order.
    pub nodes: Vec<Node>,
    /// Every tensor: inputs, weights and what nodes produce.
    pub values: Vec<Value>,
    /// Graph inputs that are not weights, in the model's order.
    pub inputs: Vec<ValueId>,
    /// Graph outputs, in the model's order.
    pub outputs: Vec<ValueId>,
}

/// An operator and its edges.
#[derive(Clone, Debug)]
pub struct Node {
    /// The ONNX node name; may be empty; never used to decide anything.
    pub name: String,
    /// Operator domain, `""` for the default.
    pub domain: String,
    /// Operator.
    pub op_type: String,
    /// Positional inputs; `None` where an optional one is left out.
    pub inputs: Vec<Option<ValueId>>,
    /// Outer values that bodies of this node (`If`, `Loop`, `Scan`) read. They count as inputs.
    pub captures: Vec<ValueId>,
    /// Positional outputs; `None` where an optional one is left out.
    pub outputs: Vec<Option<ValueId>>,
    /// Attributes by name.
    pub attributes: BTreeMap<String, Attribute>,
}

/// A tensor edge.
#[derive(Clone, Debug)]
pub struct Value {
    /// The ONNX name, unique in the graph.
    pub name: String,
    /// What is known of its element type.
    pub dtype: Option<DType>,
    /// What is known of its shape; `None` when not even the rank is.
    pub shape: Option<Shape>,
    /// Where it comes from.
    pub origin: Origin,
    /// Nodes that read it (through an input or a capture), in order, each once.
    pub consumers: Vec<NodeId>,
}

/// Where a value comes from.
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
        /// Which of its outputs.
        slot: usize,
    },
}

/// What the graph knows of an ONNX initializer. Its bytes stay in the file.
#[derive(Clone, Debug, PartialEq)]
pub struct Weight {
    /// Bytes of the stored data.
    pub bytes: u64,
    /// The values of small integer weights (64 elements at most), for shape inference and attributes-as-inputs.
    pub ints: Option<Vec<i64>>,
    /// A key equal for equal small contents (embedded, up to 1 KiB), so that blocks with different constants differ
    /// in class; `None` for large weights, whose contents do not matter to structure.
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
    /// A tensor (a `Constant` node's value, say).
    Tensor(Constant),
    /// A body (`then_branch`, `body`); outer values it reads are in [`Node::captures`].
    Body(Body),
    /// Anything else, by a hash of its bytes.
    Opaque(u64),
}

/// A tensor inside an attribute.
#[derive(Clone, Debug, PartialEq)]
pub struct Constant {
    /// Element type.
    pub dtype: DType,
    /// Dimensions.
    pub dims: Vec<u64>,
    /// The values of small integer tensors (64 elements at most).
    pub ints: Option<Vec<i64>>,
    /// Hash of the contents.
    pub content: u64,
    /// Bytes of the stored data.
    pub bytes: u64,
}

/// A control-flow body, seen from outside.
#[derive(Clone, Debug, PartialEq)]
pub struct Body {
    /// Hash of its structure with outer names replaced by capture positions.
    pub structure: u64,
    /// Element types of its outputs.
    pub output_dtypes: Vec<Option<DType>>,
    /// Bytes of weights stored inside it.
    pub weight_bytes: u64,
    /// Number of nodes inside, nested bodies included.
    pub nodes: usize,
}

impl Graph {
    /// The node behind an id.
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The value behind an id.
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

    /// The weight behind a value, if it is one.
    pub fn weight(&self, id: ValueId) -> Option<&Weight> {
        match &self.value(id).origin {
            Origin::Weight(weight) => Some(weight),
            _ => None,
        }
    }

    /// The value with this name. Linear: for tests and people's input, not for inner loops.
    pub fn find(&self, name: &str) -> Option<ValueId> {
        self.value_ids().find(|id| self.value(*id).name == name)
    }

    /// Adds a value nobody reads yet.
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

    /// Appends a node, records it as consumer of what it reads and as origin of its outputs.
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
}

impl Node {
    /// Every value read: inputs, then captures.
    pub fn reads(&self) -> impl Iterator<Item = ValueId> + '_ {
        self.inputs.iter().flatten().chain(&self.captures).copied()
    }

    /// Every value produced.
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
