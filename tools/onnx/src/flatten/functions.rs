//! Inlines functions that the model defines, nested calls included, as plain nodes with fresh names.
//!
//! A function that uses another operator set version than the model is not inlined, because its nodes would change
//! meaning. A function with the name of an operator is not inlined either: exporters define it for runtimes that lack the operator, and a runtime
//! that has it computes its own. These functions and their calls stay.

use super::rename::{Fresh, Renamer};
use crate::names::{self, default_domain};
use crate::note::Note;
use crate::proto::{
    AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, ValueInfoProto,
};
use crate::walk;
use prost::Message;
use std::collections::{HashMap, HashSet};

/// Maximum nesting depth of calls.
const MAX_CALLS: usize = 64;

/// Maximum number of nodes that inlining may create: a few nested functions could ask for billions.
const MAX_NODES: usize = 1 << 18;

/// Maximum bytes of names and attributes that inlining may create. Raw tensor data is shared, not copied.
const MAX_BYTES: usize = 1 << 30;

/// Maximum length of a call's name that is used as a prefix.
const MAX_PREFIX: usize = 512;

/// The reason why functions cannot be inlined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FunctionError {
    #[error("the model defines the function {function} twice")]
    DefinedTwice { function: String },
    #[error("function {function} calls itself, directly or through others")]
    Recursive { function: String },
    #[error("function calls are nested more than {MAX_CALLS} deep at {function}")]
    TooDeep { function: String },
    #[error("inlining functions would make more than {MAX_NODES} nodes or {MAX_BYTES} bytes, at {function}")]
    TooMuch { function: String },
    #[error("function {function} reads {name:?}, which it does not define")]
    Undefined { function: String, name: String },
    #[error("function {function} takes {takes} {what} but is called with {given}")]
    Arity { function: String, what: &'static str, takes: usize, given: usize },
}

/// Domain, name and overload of a function.
type FunctionKey = (String, String, String);

/// Whether the runtime has an operator, by domain and name.
pub type HasOperator<'a> = &'a dyn Fn(&str, &str) -> bool;

/// Inlines every function that can be inlined. Functions that cannot be, those with the name of an operator, and the functions that they call, stay
/// in the model.
pub fn inline(model: &mut ModelProto, has_operator: HasOperator<'_>) -> Result<Vec<Note>, FunctionError> {
    if model.functions.is_empty() {
        return Ok(vec![]);
    }
    let functions = std::mem::take(&mut model.functions);
    let opsets = model.opset_import.clone();
    let mut inliner = Inliner::new(&opsets, &functions, has_operator)?;
    if let Some(graph) = &mut model.graph {
        inliner.fresh = Fresh::for_graph(graph);
        inliner.graph(graph, &mut vec![])?;
        graph.value_info.append(&mut inliner.value_info);
    }
    let mut notes = inliner.notes();
    merge_opsets(&mut model.opset_import, inliner.imports);
    model.functions = reachable(model, &functions);
    // Nobody needs to know of those that the runtime does not call.
    let is_operator = |f: &FunctionProto| has_operator(default_domain(f.domain()), f.name());
    let others: Vec<FunctionProto> = model.functions.iter().filter(|f| !is_operator(f)).cloned().collect();
    notes.extend(reachable(model, &others).iter().map(|f| Note::KeptFunction { function: title(f) }));
    Ok(notes)
}

struct Inliner<'a> {
    /// Each function, and whether it may be inlined.
    table: HashMap<FunctionKey, (&'a FunctionProto, bool)>,
    fresh: Fresh,
    value_info: Vec<ValueInfoProto>,
    imports: Vec<OperatorSetIdProto>,
    calls: usize,
    created_nodes: usize,
    created_bytes: usize,
}

impl<'a> Inliner<'a> {
    fn new(
        opsets: &'a [OperatorSetIdProto],
        functions: &'a [FunctionProto],
        has_operator: HasOperator<'_>,
    ) -> Result<Self, FunctionError> {
        let mut opsets: HashMap<&str, i64> = opsets.iter().map(|o| (default_domain(o.domain()), o.version())).collect();
        let mut table = HashMap::new();
        for function in functions {
            let is_operator = has_operator(default_domain(function.domain()), function.name());
            let entry = (function, !is_operator && agrees(function, &mut opsets));
            if table.insert(key(function), entry).is_some() {
                return Err(FunctionError::DefinedTwice { function: title(function) });
            }
        }
        let fresh = Fresh::for_graph(&GraphProto::default());
        Ok(Inliner { table, fresh, value_info: vec![], imports: vec![], calls: 0, created_nodes: 0, created_bytes: 0 })
    }

    fn graph(&mut self, graph: &mut GraphProto, stack: &mut Vec<FunctionKey>) -> Result<(), FunctionError> {
        let mut nodes = Vec::with_capacity(graph.node.len());
        for node in std::mem::take(&mut graph.node) {
            self.node(node, &mut nodes, stack)?;
        }
        graph.node = nodes;
        Ok(())
    }

    fn node(
        &mut self,
        mut node: NodeProto,
        into: &mut Vec<NodeProto>,
        stack: &mut Vec<FunctionKey>,
    ) -> Result<(), FunctionError> {
        for body in walk::bodies_mut(&mut node) {
            self.graph(body, stack)?;
        }
        let call = (node.domain().to_owned(), node.op_type().to_owned(), node.overload().to_owned());
        let Some((function, true)) = self.table.get(&call).copied() else {
            into.push(node);
            return Ok(());
        };
        if stack.contains(&call) {
            return Err(FunctionError::Recursive { function: title(function) });
        }
        if stack.len() == MAX_CALLS {
            return Err(FunctionError::TooDeep { function: title(function) });
        }
        stack.push(call);
        for inner in self.instantiate(&node, function)? {
            self.node(inner, into, stack)?;
        }
        stack.pop();
        Ok(())
    }

    /// The nodes of one call, with the caller's names for inputs and outputs and fresh names for inner values.
    fn instantiate(&mut self, call: &NodeProto, function: &FunctionProto) -> Result<Vec<NodeProto>, FunctionError> {
        self.calls += 1;
        self.created_nodes += function.node.len();
        self.created_bytes += function.node.iter().map(own_bytes).sum::<usize>();
        if self.created_nodes > MAX_NODES || self.created_bytes > MAX_BYTES {
            return Err(FunctionError::TooMuch { function: title(function) });
        }
        check_arity(function, "inputs", function.input.len(), call.input.len())?;
        check_arity(function, "outputs", function.output.len(), call.output.len())?;
        self.imports.extend(function.opset_import.iter().cloned());
        let prefix = match call.name() {
            "" => format!("{}/", function.name()),
            name if name.len() > MAX_PREFIX => format!("call_{}/", self.calls),
            name => format!("{name}/"),
        };
        let (names, mut nodes) = self.arguments(call, function);
        let mut renamer = Renamer::new(&mut self.fresh, &prefix, names);
        renamer.define(names::produced(&function.node));
        for inner in &function.node {
            nodes.push(bind_attributes(inner, call, function, &mut |node| renamer.node(node)));
        }
        for info in &function.value_info {
            let mut info = info.clone();
            renamer.info(&mut info);
            self.value_info.push(info);
        }
        match renamer.first_outer_name() {
            Some(name) => Err(FunctionError::Undefined { function: title(function), name }),
            None => Ok(nodes),
        }
    }

    /// The caller's names for the function's inputs and outputs. An output that is an input becomes an `Identity`.
    fn arguments(&mut self, call: &NodeProto, function: &FunctionProto) -> (HashMap<String, String>, Vec<NodeProto>) {
        let given = |names: &[String], i: usize| names.get(i).cloned().unwrap_or_default();
        let mut names = HashMap::new();
        for (i, input) in function.input.iter().enumerate() {
            names.insert(input.clone(), given(&call.input, i));
        }
        let mut passed_through = vec![];
        for (i, output) in function.output.iter().enumerate() {
            let actual = given(&call.output, i);
            match names.get(output) {
                Some(source) if !actual.is_empty() => passed_through.push(identity(source, &actual)),
                None if !actual.is_empty() => drop(names.insert(output.clone(), actual)),
                // An omitted output gets a fresh name like an inner value.
                _ => {}
            }
        }
        (names, passed_through)
    }

    fn notes(&self) -> Vec<Note> {
        let inlined = self.table.values().filter(|(_, inlinable)| *inlinable).count();
        if self.calls == 0 { vec![] } else { vec![Note::InlinedFunctions { functions: inlined, calls: self.calls }] }
    }
}

/// Bytes that a copy of a node uses: everything but raw tensor data, which is shared.
fn own_bytes(node: &NodeProto) -> usize {
    let mut shared = 0;
    let _ = walk::tensors_of_node(node, &mut |tensor| {
        shared += tensor.raw_data().len();
        Ok::<(), std::convert::Infallible>(())
    });
    node.encoded_len().saturating_sub(shared) + MAX_PREFIX
}

/// An `Identity` node, which gives a value a second name.
pub fn identity(from: &str, to: &str) -> NodeProto {
    NodeProto {
        name: Some(format!("{to}/Identity")),
        op_type: Some("Identity".into()),
        input: vec![from.to_owned()],
        output: vec![to.to_owned()],
        ..NodeProto::default()
    }
}

fn check_arity(f: &FunctionProto, what: &'static str, takes: usize, given: usize) -> Result<(), FunctionError> {
    match given > takes {
        true => Err(FunctionError::Arity { function: title(f), what, takes, given }),
        false => Ok(()),
    }
}

/// Renames one node of a function and replaces references to attributes by the call's attributes or the defaults. These
/// attributes already use the caller's names, so they are added after renaming.
fn bind_attributes(
    inner: &NodeProto,
    call: &NodeProto,
    function: &FunctionProto,
    rename: &mut dyn FnMut(&mut NodeProto),
) -> NodeProto {
    let mut node = inner.clone();
    let references: Vec<AttributeProto> = node.attribute.extract_if(.., |a| !a.ref_attr_name().is_empty()).collect();
    for body in walk::bodies_mut(&mut node) {
        bind_in_body(body, call, function);
    }
    rename(&mut node);
    // Inputs that the call omits. ONNX Runtime 1.31 crashes on a LayerNormalization whose last input is one.
    while node.input.last().is_some_and(String::is_empty) {
        node.input.pop();
    }
    node.attribute.extend(references.iter().filter_map(|reference| value_of(reference, call, function)));
    node
}

fn bind_in_body(body: &mut GraphProto, call: &NodeProto, function: &FunctionProto) {
    for node in &mut body.node {
        let attributes = std::mem::take(&mut node.attribute);
        node.attribute = attributes
            .into_iter()
            .filter_map(|a| if a.ref_attr_name().is_empty() { Some(a) } else { value_of(&a, call, function) })
            .collect();
        walk::bodies_mut(node).for_each(|inner| bind_in_body(inner, call, function));
    }
}

fn value_of(reference: &AttributeProto, call: &NodeProto, function: &FunctionProto) -> Option<AttributeProto> {
    let wanted = reference.ref_attr_name();
    let found = call.attribute.iter().chain(&function.attribute_proto).find(|a| a.name() == wanted)?;
    Some(AttributeProto { name: reference.name.clone(), ..found.clone() })
}

/// Whether the function and the model agree on the version of every operator set that the function uses. If so, adds
/// operator sets that only the function uses to `model`.
fn agrees<'a>(function: &'a FunctionProto, model: &mut HashMap<&'a str, i64>) -> bool {
    let mut used = HashSet::new();
    domains_of(&function.node, &mut used);
    let imports = function.opset_import.iter().map(|o| (default_domain(o.domain()), o.version()));
    let imports: Vec<_> = imports.filter(|(domain, _)| used.contains(domain)).collect();
    let agree = imports.iter().all(|(domain, version)| model.get(domain).is_none_or(|ours| ours == version));
    if agree {
        model.extend(imports);
    }
    agree
}

fn domains_of<'a>(nodes: &'a [NodeProto], into: &mut HashSet<&'a str>) {
    for node in nodes {
        into.insert(default_domain(node.domain()));
        walk::bodies(node).for_each(|body| domains_of(&body.node, into));
    }
}

fn merge_opsets(into: &mut Vec<OperatorSetIdProto>, more: Vec<OperatorSetIdProto>) {
    for import in more {
        if !into.iter().any(|known| default_domain(known.domain()) == default_domain(import.domain())) {
            into.push(import);
        }
    }
}

/// The functions that nodes of the model still call, directly or indirectly, in their old order.
fn reachable(model: &ModelProto, functions: &[FunctionProto]) -> Vec<FunctionProto> {
    let top = model.graph.as_ref().map_or(&[][..], |graph| &graph.node);
    needed(top, functions).cloned().collect()
}

/// The functions that nodes call, directly or indirectly, in the given order.
pub fn needed<'a>(nodes: &[NodeProto], functions: &'a [FunctionProto]) -> impl Iterator<Item = &'a FunctionProto> {
    let table: HashMap<FunctionKey, &FunctionProto> = functions.iter().map(|f| (key(f), f)).collect();
    let mut todo = HashSet::new();
    calls_of(nodes, &mut todo);
    let mut todo: Vec<FunctionKey> = todo.into_iter().collect();
    let mut called = HashSet::new();
    while let Some(call) = todo.pop() {
        if let Some(function) = table.get(&call).filter(|_| called.insert(call.clone())) {
            let mut inner = HashSet::new();
            calls_of(&function.node, &mut inner);
            todo.extend(inner.into_iter().filter(|call| !called.contains(call)));
        }
    }
    functions.iter().filter(move |f| called.contains(&key(f)))
}

fn calls_of(nodes: &[NodeProto], into: &mut HashSet<FunctionKey>) {
    for node in nodes {
        into.insert((node.domain().to_owned(), node.op_type().to_owned(), node.overload().to_owned()));
        walk::bodies(node).for_each(|body| calls_of(&body.node, into));
    }
}

fn key(function: &FunctionProto) -> FunctionKey {
    (function.domain().to_owned(), function.name().to_owned(), function.overload().to_owned())
}

fn title(function: &FunctionProto) -> String {
    match function.overload() {
        "" => format!("{}.{}", function.domain(), function.name()),
        overload => format!("{}.{} ({overload})", function.domain(), function.name()),
    }
}
