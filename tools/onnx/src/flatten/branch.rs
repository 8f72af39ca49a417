//! Merged decoders: an `If` on a boolean graph input holds the model twice. Keeps the branch for generation.
//!
//! The branch for generation is the one that reads states: graph inputs that the other branch does not read. Names do
//! not matter.

use super::functions::identity;
use super::rename::{Fresh, Renamer};
use crate::names::{self, default_domain};
use crate::note::{BranchChoice, DroppedInput};
use crate::proto::{GraphProto, NodeProto, ValueInfoProto, tensor_proto::DataType, type_proto::Value};
use crate::read::body::dtype_of;
use crate::read::graph::shape_of;
use std::collections::{HashMap, HashSet};

/// Inlines the branch for generation if the graph is a merged decoder.
pub fn choose(graph: &mut GraphProto) -> Option<BranchChoice> {
    let (condition, value, state_inputs) = decide(graph)?;
    let mut inliner = BranchInliner { fresh: names_outside(graph, &condition), condition: &condition, value };
    for node in std::mem::take(&mut graph.node) {
        inliner.node(node, graph);
    }
    let outputs: HashSet<String> = graph.output.iter().map(|o| o.name().to_owned()).collect();
    graph.value_info.retain(|info| !outputs.contains(info.name()));
    let dropped_inputs = drop_unread(graph, &condition);
    Some(BranchChoice { condition, value, state_inputs, dropped_inputs })
}

/// Avoids all names outside the branches.
fn names_outside(graph: &GraphProto, condition: &str) -> Fresh {
    let mut taken: HashSet<String> = names::given(graph).map(str::to_owned).collect();
    taken.extend(graph.output.iter().map(|o| o.name().to_owned()));
    for node in &graph.node {
        match is_if_on(node, condition) {
            true => taken.extend(node.output.iter().cloned()),
            false => names::all_of_node(node, &mut taken),
        }
    }
    Fresh::avoiding(taken)
}

/// The condition, its value for the branch that reads more states, and the inputs of those states.
fn decide(graph: &GraphProto) -> Option<(String, bool, Vec<String>)> {
    let inputs: Vec<&str> = graph.input.iter().map(|i| i.name()).collect();
    let weights: HashSet<&str> = names::weights(graph).collect();
    let booleans = graph.input.iter().filter(|i| is_boolean(i) && !weights.contains(i.name()));
    let read_by_ifs: HashSet<&str> = graph.node.iter().filter_map(condition_of).collect();
    let condition = booleans.map(|i| i.name()).find(|name| read_by_ifs.contains(name))?;
    let outside: HashSet<&str> = graph
        .node
        .iter()
        .filter(|node| !is_if_on(node, condition))
        .flat_map(names::reads)
        .chain(graph.output.iter().map(|o| o.name()))
        .collect();
    let read_by = |value: bool| -> HashSet<&str> {
        let branches =
            graph.node.iter().filter(|node| is_if_on(node, condition)).filter_map(|node| branch(node, value));
        branches.flat_map(names::body_captures).collect()
    };
    let (then, other) = (read_by(true), read_by(false));
    let only = |mine: &HashSet<&str>, theirs: &HashSet<&str>| -> Vec<String> {
        let mine = inputs.iter().filter(|i| mine.contains(*i) && !theirs.contains(*i) && !outside.contains(*i));
        mine.map(|i| (*i).to_owned()).collect()
    };
    let (then, other) = (only(&then, &other), only(&other, &then));
    match then.len().cmp(&other.len()) {
        std::cmp::Ordering::Greater => Some((condition.to_owned(), true, then)),
        std::cmp::Ordering::Less => Some((condition.to_owned(), false, other)),
        std::cmp::Ordering::Equal => None,
    }
}

fn is_boolean(input: &crate::proto::ValueInfoProto) -> bool {
    match input.r#type.as_ref().and_then(|t| t.value.as_ref()) {
        Some(Value::TensorType(tensor)) => tensor.elem_type() == DataType::Bool as i32,
        _ => false,
    }
}

fn is_if_on(node: &NodeProto, condition: &str) -> bool {
    condition_of(node) == Some(condition)
}

/// The condition of an `If` with both branches.
fn condition_of(node: &NodeProto) -> Option<&str> {
    let is_if = node.op_type() == "If" && default_domain(node.domain()).is_empty();
    let whole = is_if && branch(node, true).is_some() && branch(node, false).is_some();
    node.input.first().filter(|_| whole && node.input.len() == 1).map(String::as_str)
}

fn branch(node: &NodeProto, value: bool) -> Option<&GraphProto> {
    let wanted = if value { "then_branch" } else { "else_branch" };
    node.attribute.iter().find(|a| a.name() == wanted)?.g.as_ref()
}

/// Rebuilds the nodes of a graph, with the chosen branch in place of each `If` on the condition.
struct BranchInliner<'a> {
    fresh: Fresh,
    condition: &'a str,
    value: bool,
}

impl BranchInliner<'_> {
    fn node(&mut self, node: NodeProto, graph: &mut GraphProto) {
        let chosen = if is_if_on(&node, self.condition) { branch(&node, self.value) } else { None };
        let Some(mut body) = chosen.cloned() else {
            graph.node.push(node);
            return;
        };
        let (decided, aliases) = outputs(&node, &body);
        let mut renamer = Renamer::new(&mut self.fresh, "", decided);
        renamer.define(names::given(&body).chain(names::produced(&body.node)));
        renamer.contents(&mut body);
        graph.initializer.append(&mut body.initializer);
        graph.sparse_initializer.append(&mut body.sparse_initializer);
        graph.quantization_annotation.append(&mut body.quantization_annotation);
        graph.value_info.append(&mut body.value_info);
        // A branch may contain another `If` on the same condition.
        for inner in body.node {
            self.node(inner, graph);
        }
        graph.node.extend(aliases.into_iter().map(|(output, to)| identity(body.output[output].name(), &to)));
    }
}

/// The outer names of the branch's outputs. First, new names for values that nodes of the branch produce. Second, for
/// values that keep their name (outer values, weights, repeated outputs), the index of the output and its outer name.
fn outputs(node: &NodeProto, body: &GraphProto) -> (HashMap<String, String>, Vec<(usize, String)>) {
    let produced: HashSet<&str> = names::produced(&body.node).collect();
    let mut decided = HashMap::new();
    let mut aliases = vec![];
    for (i, (inner, outer)) in body.output.iter().zip(&node.output).enumerate() {
        if outer.is_empty() {
            continue;
        }
        if produced.contains(inner.name()) && !decided.contains_key(inner.name()) {
            decided.insert(inner.name().to_owned(), outer.clone());
        } else {
            aliases.push((i, outer.clone()));
        }
    }
    (decided, aliases)
}

/// Removes unread inputs and returns them, the condition first.
fn drop_unread(graph: &mut GraphProto, condition: &str) -> Vec<DroppedInput> {
    let read: HashSet<String> = {
        let nodes = graph.node.iter().flat_map(names::reads);
        nodes.chain(graph.output.iter().map(|o| o.name())).map(str::to_owned).collect()
    };
    let weights: HashSet<String> = names::weights(graph).map(str::to_owned).collect();
    let unread = |name: &str| !read.contains(name) && !weights.contains(name);
    let (dropped, kept) = std::mem::take(&mut graph.input).into_iter().partition(|input| unread(input.name()));
    graph.input = kept;
    let about = |info: ValueInfoProto| DroppedInput {
        name: info.name().to_owned(),
        dtype: dtype_of(&info),
        shape: shape_of(&info),
    };
    let mut dropped: Vec<DroppedInput> = dropped.into_iter().map(about).collect();
    dropped.sort_by_key(|input| input.name != condition);
    dropped
}
