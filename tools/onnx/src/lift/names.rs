//! Canonical names: a letter for the kind of value and a number, in the order of first use by nodes.

use crate::names;
use crate::proto::tensor_shape_proto::{Dimension, dimension};
use crate::proto::type_proto::Value as TypeValue;
use crate::proto::{GraphProto, NodeProto, ValueInfoProto};
use crate::walk;
use std::collections::HashMap;

/// The kind of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ValueKind {
    /// A graph input.
    Input,
    /// A weight that becomes an input.
    Weight,
    /// A weight that stays a constant.
    Constant,
    /// A graph output that a node produces.
    Output,
    /// Any other value that a node produces.
    Inner,
}

impl ValueKind {
    fn letter(self) -> char {
        match self {
            ValueKind::Input => 'i',
            ValueKind::Weight => 'w',
            ValueKind::Constant => 'c',
            ValueKind::Output => 'o',
            ValueKind::Inner => 'v',
        }
    }
}

/// Assigns canonical names, and records the old ones.
pub struct Namer {
    /// Kinds of the values of the outer graph; missing ones are inner values.
    kinds: HashMap<String, ValueKind>,
    /// New names by old names, innermost scope last.
    scopes: Vec<HashMap<String, String>>,
    /// Old names of the outer graph by kind, in the order of their numbers.
    named: HashMap<ValueKind, Vec<String>>,
    inner: usize,
    nodes: usize,
    dims: HashMap<String, String>,
}

impl Namer {
    /// `is_weight` returns for an initializer whether it becomes an input, and `None` for other values.
    pub fn new(graph: &GraphProto, is_weight: impl Fn(&str) -> Option<bool>) -> Self {
        let mut kinds = HashMap::new();
        for output in names::produced(&graph.node) {
            kinds.insert(output.to_owned(), ValueKind::Inner);
        }
        for output in &graph.output {
            kinds.entry(output.name().to_owned()).and_modify(|kind| *kind = ValueKind::Output);
        }
        kinds.extend(graph.input.iter().map(|input| (input.name().to_owned(), ValueKind::Input)));
        kinds.extend(graph.sparse_initializer.iter().map(|s| (names::sparse_name(s).to_owned(), ValueKind::Constant)));
        let read = graph.node.iter().flat_map(names::reads).chain(graph.output.iter().map(|o| o.name()));
        kinds.extend(read.filter_map(|name| {
            let kind = if is_weight(name)? { ValueKind::Weight } else { ValueKind::Constant };
            Some((name.to_owned(), kind))
        }));
        Namer { kinds, scopes: vec![HashMap::new()], named: HashMap::new(), inner: 0, nodes: 0, dims: HashMap::new() }
    }

    /// Renames nodes and sparse initializers. Unread inputs get the last numbers. The caller renames records and dense
    /// initializers.
    pub fn graph(&mut self, graph: &mut GraphProto) {
        for node in &mut graph.node {
            self.node(node);
        }
        for info in graph.input.iter().chain(&graph.output) {
            self.rename(info.name());
        }
        graph.sparse_initializer.retain(|sparse| self.scopes[0].contains_key(names::sparse_name(sparse)));
        for values in graph.sparse_initializer.iter_mut().filter_map(|sparse| sparse.values.as_mut()) {
            values.name = Some(self.name(values.name()));
        }
    }

    /// Renames a node: its own name, its inputs, its bodies, its outputs.
    fn node(&mut self, node: &mut NodeProto) {
        node.name = Some(format!("n{}", self.nodes));
        self.nodes += 1;
        for name in node.input.iter_mut().filter(|name| !name.is_empty()) {
            *name = self.rename(name);
        }
        walk::bodies_mut(node).for_each(|body| self.body(body));
        for name in node.output.iter_mut().filter(|name| !name.is_empty()) {
            *name = self.rename(name);
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
            info.name = Some(self.rename(info.name()));
            self.info(info);
        }
        let sparse = body.sparse_initializer.iter_mut().filter_map(|sparse| sparse.values.as_mut());
        for tensor in body.initializer.iter_mut().chain(sparse) {
            tensor.name = Some(self.rename(tensor.name()));
        }
        self.scopes.pop();
    }

    /// The new name of a value. Assigns the next name of its kind at first use.
    fn rename(&mut self, name: &str) -> String {
        if let Some(known) = self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            return known.clone();
        }
        let kind = self.kinds.get(name).copied().unwrap_or(ValueKind::Inner);
        let number = match kind {
            ValueKind::Inner => {
                self.inner += 1;
                self.inner - 1
            }
            _ => {
                let named = self.named.entry(kind).or_default();
                named.push(name.to_owned());
                named.len() - 1
            }
        };
        let new = format!("{}{number}", kind.letter());
        self.scopes[0].insert(name.to_owned(), new.clone());
        new
    }

    /// Old names of this kind in the order of their numbers; empty for inner values.
    pub fn named(&self, kind: ValueKind) -> Vec<String> {
        self.named.get(&kind).cloned().unwrap_or_default()
    }

    /// The new name of a renamed value of the outer graph.
    pub fn name(&self, old: &str) -> String {
        self.scopes[0].get(old).cloned().unwrap_or_default()
    }

    /// The number of a constant, by its new name.
    pub fn position(&self, new: &str) -> usize {
        let named = self.named.get(&ValueKind::Constant).into_iter().flatten();
        named.into_iter().position(|old| self.scopes[0].get(old).is_some_and(|name| name == new)).unwrap_or(usize::MAX)
    }

    /// Renames symbolic dimensions of inputs, in order, and drops the dimensions of outputs, which follow from them.
    /// The rank of outputs stays, because the ONNX checker requires a shape.
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
