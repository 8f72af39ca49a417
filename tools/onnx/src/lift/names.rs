//! Canonical names: a letter for what a value is and a number, counted in the order nodes meet them.

use crate::names;
use crate::proto::tensor_shape_proto::{Dimension, dimension};
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{GraphProto, NodeProto, ValueInfoProto};
use crate::walk;
use std::collections::HashMap;

/// What a value is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The graph takes it in.
    Input,
    /// A weight that becomes an input.
    Weight,
    /// A weight that stays.
    Constant,
    /// The graph returns it, and a node makes it.
    Output,
    /// A node makes it.
    Inner,
}

impl Kind {
    fn letter(self) -> char {
        match self {
            Kind::Input => 'i',
            Kind::Weight => 'w',
            Kind::Constant => 'c',
            Kind::Output => 'o',
            Kind::Inner => 'v',
        }
    }
}

/// Gives names, and remembers what had them before.
pub struct Namer {
    /// What values of the outer graph are; those not here are inner ones.
    kinds: HashMap<String, Kind>,
    /// New names by old ones, innermost scope last.
    scopes: Vec<HashMap<String, String>>,
    /// Old names of the outer graph, in the order they were met.
    met: HashMap<Kind, Vec<String>>,
    inner: usize,
    nodes: usize,
    dims: HashMap<String, String>,
}

impl Namer {
    /// For a graph; `is_weight` says of an initializer whether it becomes an input, and nothing of other values.
    pub fn new(graph: &GraphProto, is_weight: impl Fn(&str) -> Option<bool>) -> Self {
        let mut kinds = HashMap::new();
        for output in names::produced(&graph.node) {
            kinds.insert(output.to_owned(), Kind::Inner);
        }
        for output in &graph.output {
            kinds.entry(output.name().to_owned()).and_modify(|kind| *kind = Kind::Output);
        }
        kinds.extend(graph.input.iter().map(|input| (input.name().to_owned(), Kind::Input)));
        kinds.extend(graph.sparse_initializer.iter().map(|s| (names::sparse_name(s).to_owned(), Kind::Constant)));
        let read = graph.node.iter().flat_map(names::reads).chain(graph.output.iter().map(|o| o.name()));
        kinds.extend(read.filter_map(|name| {
            let kind = if is_weight(name)? { Kind::Weight } else { Kind::Constant };
            Some((name.to_owned(), kind))
        }));
        Namer { kinds, scopes: vec![HashMap::new()], met: HashMap::new(), inner: 0, nodes: 0, dims: HashMap::new() }
    }

    /// Renames nodes and sparse initializers. Inputs that no node reads get the last numbers. Records, and initializers that
    /// are not sparse, are the caller's to rename.
    pub fn graph(&mut self, graph: &mut GraphProto) {
        for node in &mut graph.node {
            self.node(node);
        }
        for info in graph.input.iter().chain(&graph.output) {
            self.meet(info.name());
        }
        graph.sparse_initializer.retain(|sparse| self.scopes[0].contains_key(names::sparse_name(sparse)));
        for values in graph.sparse_initializer.iter_mut().filter_map(|sparse| sparse.values.as_mut()) {
            values.name = Some(self.name(values.name()));
        }
    }

    /// What the node reads, in bodies too, its own name, and what it makes.
    fn node(&mut self, node: &mut NodeProto) {
        node.name = Some(format!("n{}", self.nodes));
        self.nodes += 1;
        for name in node.input.iter_mut().filter(|name| !name.is_empty()) {
            *name = self.meet(name);
        }
        walk::bodies_mut(node).for_each(|body| self.body(body));
        for name in node.output.iter_mut().filter(|name| !name.is_empty()) {
            *name = self.meet(name);
        }
    }

    fn body(&mut self, body: &mut GraphProto) {
        let mut scope = HashMap::new();
        for name in names::given(body).chain(names::produced(&body.node)).filter(|name| !name.is_empty()) {
            scope.entry(name.to_owned()).or_insert_with(|| {
                self.inner += 1;
                format!("v{}", self.inner - 1)
            });
        }
        self.scopes.push(scope);
        for node in &mut body.node {
            self.node(node);
        }
        for info in body.input.iter_mut().chain(&mut body.output) {
            info.name = Some(self.meet(info.name()));
            self.info(info);
        }
        let sparse = body.sparse_initializer.iter_mut().filter_map(|sparse| sparse.values.as_mut());
        for tensor in body.initializer.iter_mut().chain(sparse) {
            tensor.name = Some(self.meet(tensor.name()));
        }
        self.scopes.pop();
    }

    /// The new name of a value, the next one of its kind where it has none yet.
    fn meet(&mut self, name: &str) -> String {
        if let Some(known) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return known.clone();
        }
        let kind = self.kinds.get(name).copied().unwrap_or(Kind::Inner);
        let number = match kind {
            Kind::Inner => {
                self.inner += 1;
                self.inner - 1
            }
            _ => {
                let met = self.met.entry(kind).or_default();
                met.push(name.to_owned());
                met.len() - 1
            }
        };
        let new = format!("{}{number}", kind.letter());
        self.scopes[0].insert(name.to_owned(), new.clone());
        new
    }

    /// Old names of this kind in the order of their numbers; inner ones are not remembered.
    pub fn met(&self, kind: Kind) -> Vec<String> {
        self.met.get(&kind).cloned().unwrap_or_default()
    }

    /// The new name of a value of the outer graph that was met.
    pub fn name(&self, old: &str) -> String {
        self.scopes[0].get(old).cloned().unwrap_or_default()
    }

    /// Where a constant stands among the constants, by its new name.
    pub fn position(&self, new: &str) -> usize {
        let met = self.met.get(&Kind::Constant).into_iter().flatten();
        met.into_iter().position(|old| self.scopes[0].get(old).is_some_and(|name| name == new)).unwrap_or(usize::MAX)
    }

    /// Renames symbolic sizes of inputs, in their order; drops the sizes of outputs, which follow. The number of their axes
    /// stays, because a checker wants a shape.
    pub fn dims(&mut self, graph: &mut GraphProto) {
        graph.input.iter_mut().for_each(|info| self.info(info));
        for info in &mut graph.output {
            if let Some(TypeValue::TensorType(tensor)) = info.r#type.as_mut().and_then(|t| t.value.as_mut()) {
                tensor.shape.iter_mut().flat_map(|shape| &mut shape.dim).for_each(|dim| *dim = Dimension::default());
            }
        }
    }

    fn info(&mut self, info: &mut ValueInfoProto) {
        let value = info.r#type.as_mut().and_then(|t| t.value.as_mut());
        let Some(TypeValue::TensorType(tensor)) = value else { return };
        for dim in tensor.shape.iter_mut().flat_map(|shape| &mut shape.dim) {
            if let Some(dimension::Value::DimParam(name)) = &mut dim.value {
                let next = format!("d{}", self.dims.len());
                name.clone_from(self.dims.entry(name.clone()).or_insert(next));
            }
        }
    }
}
