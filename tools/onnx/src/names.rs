//! The names that a graph, a node or a body defines and reads, by the scoping rules of ONNX.
//!
//! A body sees all names of the enclosing graphs. It captures the names that it reads and does not define.

use crate::proto::{GraphProto, NodeProto};
use crate::walk;
use std::collections::HashSet;

/// The canonical name of a domain: `ai.onnx` is an alias of the default domain.
pub fn default_domain(domain: &str) -> &str {
    if domain == "ai.onnx" { "" } else { domain }
}

/// How error messages identify a node.
pub fn label(node: &NodeProto) -> String {
    match (node.name(), node.output.first()) {
        ("", Some(output)) => format!("the {} node that produces {output:?}", node.op_type()),
        ("", None) => format!("a {} node without a name", node.op_type()),
        (name, _) => format!("{} node {name:?}", node.op_type()),
    }
}

/// The name of a sparse initializer, which is that of its values tensor.
pub fn sparse_name(sparse: &crate::proto::SparseTensorProto) -> &str {
    sparse.values.as_ref().map_or("", |values| values.name())
}

/// Names defined before any node runs: inputs and initializers.
pub fn given(graph: &GraphProto) -> impl Iterator<Item = &str> {
    let inputs = graph.input.iter().map(|v| v.name());
    inputs.chain(weights(graph))
}

/// Names of the initializers, sparse ones last.
pub fn weights(graph: &GraphProto) -> impl Iterator<Item = &str> {
    graph.initializer.iter().map(|t| t.name()).chain(graph.sparse_initializer.iter().map(sparse_name))
}

/// Names that nodes produce, without omitted optional outputs.
pub fn produced(nodes: &[NodeProto]) -> impl Iterator<Item = &str> {
    nodes.iter().flat_map(|n| &n.output).map(String::as_str).filter(|name| !name.is_empty())
}

/// Every name that a node reads: inputs, with repetitions, then captures.
pub fn reads(node: &NodeProto) -> Vec<&str> {
    let mut names: Vec<&str> = node.input.iter().map(String::as_str).filter(|name| !name.is_empty()).collect();
    names.extend(captures(node));
    names
}

/// Outer names that the bodies of a node read, in order of first appearance, each once.
pub fn captures(node: &NodeProto) -> Vec<&str> {
    let mut found = Captures::default();
    for body in walk::bodies(node) {
        found.body(body, &mut vec![]);
    }
    found.names
}

/// Outer names that one body reads, in order of first appearance, each once.
pub fn body_captures(body: &GraphProto) -> Vec<&str> {
    let mut found = Captures::default();
    found.body(body, &mut vec![]);
    found.names
}

#[derive(Default)]
struct Captures<'a> {
    names: Vec<&'a str>,
    seen: HashSet<&'a str>,
}

impl<'a> Captures<'a> {
    fn body(&mut self, body: &'a GraphProto, scopes: &mut Vec<HashSet<&'a str>>) {
        scopes.push(given(body).chain(produced(&body.node)).collect());
        for node in &body.node {
            for name in node.input.iter().filter(|name| !name.is_empty()) {
                self.read(name, scopes);
            }
            for inner in walk::bodies(node) {
                self.body(inner, scopes);
            }
        }
        for output in &body.output {
            self.read(output.name(), scopes);
        }
        scopes.pop();
    }

    fn read(&mut self, name: &'a str, scopes: &[HashSet<&'a str>]) {
        if !name.is_empty() && !scopes.iter().any(|scope| scope.contains(name)) && self.seen.insert(name) {
            self.names.push(name);
        }
    }
}

/// Every name in a graph, bodies included.
pub fn all(graph: &GraphProto) -> HashSet<String> {
    let mut names = HashSet::new();
    collect(graph, &mut names);
    names
}

fn collect(graph: &GraphProto, into: &mut HashSet<String>) {
    into.extend(given(graph).chain(graph.output.iter().map(|v| v.name())).map(str::to_owned));
    graph.node.iter().for_each(|node| all_of_node(node, into));
}

/// Every name that a node reads or produces, and every name inside its bodies.
pub fn all_of_node(node: &NodeProto, into: &mut HashSet<String>) {
    into.extend(node.input.iter().chain(&node.output).cloned());
    walk::bodies(node).for_each(|body| collect(body, into));
}
