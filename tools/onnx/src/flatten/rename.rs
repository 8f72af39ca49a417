//! Fresh names, and renaming of nodes and bodies, to inline one graph into another without collisions.

use crate::names;
use crate::proto::{GraphProto, NodeProto, ValueInfoProto};
use crate::walk;
use std::collections::{HashMap, HashSet};

/// Generates unused names.
pub struct Fresh {
    used: HashSet<String>,
    next: HashMap<String, u32>,
}

impl Fresh {
    /// Avoids every name of a graph, bodies included.
    pub fn for_graph(graph: &GraphProto) -> Self {
        Self::avoiding(names::all(graph))
    }

    /// Avoids these names.
    pub fn avoiding(used: HashSet<String>) -> Self {
        Fresh { used, next: HashMap::new() }
    }

    /// Reserves and returns `wanted`, or the first unused of `wanted_1`, `wanted_2`, ...
    pub fn name(&mut self, wanted: &str) -> String {
        if self.used.insert(wanted.to_owned()) {
            return wanted.to_owned();
        }
        let next = self.next.entry(wanted.to_owned()).or_default();
        loop {
            *next += 1;
            let name = format!("{wanted}_{next}");
            if self.used.insert(name.clone()) {
                return name;
            }
        }
    }
}

/// Renames the definitions of a graph and all reads of them. Names from outside stay; the first of them is remembered.
pub struct Renamer<'a> {
    fresh: &'a mut Fresh,
    prefix: &'a str,
    scopes: Vec<HashMap<String, String>>,
    first_outer: Option<String>,
}

impl<'a> Renamer<'a> {
    /// Starts with a scope in which the names of `decided` are assigned. New names get `prefix`.
    pub fn new(fresh: &'a mut Fresh, prefix: &'a str, decided: HashMap<String, String>) -> Self {
        Renamer { fresh, prefix, scopes: vec![decided], first_outer: None }
    }

    /// Assigns fresh names to definitions of the innermost scope that have none.
    pub fn define<'n>(&mut self, defined: impl Iterator<Item = &'n str>) {
        let scope = self.scopes.last_mut().expect("there is always a scope");
        for name in defined.filter(|name| !name.is_empty()) {
            if !scope.contains_key(name) {
                scope.insert(name.to_owned(), self.fresh.name(&format!("{}{name}", self.prefix)));
            }
        }
    }

    /// Renames a node and everything inside its bodies.
    pub fn node(&mut self, node: &mut NodeProto) {
        node.input.iter_mut().chain(&mut node.output).for_each(|name| self.rename(name));
        if let Some(name) = node.name.as_mut().filter(|name| !name.is_empty()) {
            name.insert_str(0, self.prefix);
        }
        for configuration in &mut node.device_configurations {
            configuration.sharding_spec.iter_mut().filter_map(|s| s.tensor_name.as_mut()).for_each(|n| self.rename(n));
        }
        walk::bodies_mut(node).for_each(|body| self.body(body));
    }

    /// Renames only the names that a node reads, also inside its bodies.
    pub fn reads(&mut self, node: &mut NodeProto) {
        node.input.iter_mut().for_each(|name| self.rename(name));
        walk::bodies_mut(node).for_each(|body| self.body(body));
    }

    fn body(&mut self, body: &mut GraphProto) {
        self.scopes.push(HashMap::new());
        self.define(names::given(body).chain(names::produced(&body.node)));
        self.contents(body);
        self.scopes.pop();
    }

    /// Renames everything in a graph whose definitions have names.
    pub fn contents(&mut self, graph: &mut GraphProto) {
        let infos = graph.input.iter_mut().chain(&mut graph.output).chain(&mut graph.value_info);
        infos.for_each(|info| self.info(info));
        let sparse = graph.sparse_initializer.iter_mut().filter_map(|s| s.values.as_mut());
        for tensor in graph.initializer.iter_mut().chain(sparse) {
            tensor.name.as_mut().into_iter().for_each(|name| self.rename(name));
        }
        for annotation in &mut graph.quantization_annotation {
            let parameters = annotation.quant_parameter_tensor_names.iter_mut().filter_map(|p| p.value.as_mut());
            annotation.tensor_name.as_mut().into_iter().chain(parameters).for_each(|name| self.rename(name));
        }
        graph.node.iter_mut().for_each(|node| self.node(node));
    }

    /// Renames a record of type and shape.
    pub fn info(&mut self, info: &mut ValueInfoProto) {
        info.name.as_mut().into_iter().for_each(|name| self.rename(name));
    }

    fn rename(&mut self, name: &mut String) {
        if name.is_empty() {
            return;
        }
        match self.scopes.iter().rev().find_map(|scope| scope.get(name.as_str())) {
            Some(new) => name.clone_from(new),
            None if self.first_outer.is_none() => self.first_outer = Some(name.clone()),
            None => {}
        }
    }

    /// The first name from outside, if there is one.
    pub fn first_outer_name(self) -> Option<String> {
        self.first_outer
    }
}
