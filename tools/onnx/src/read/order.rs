//! Checks that every name is defined exactly once and that the graph has no cycle, and sorts nodes topologically.

use crate::names::{self, label};
use crate::proto::{GraphProto, NodeProto};
use crate::walk;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

/// The reason why a graph has no execution order.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OrderError {
    #[error("the name {name:?} is defined twice: by {first} and by {second}")]
    DefinedTwice { name: String, first: String, second: String },
    #[error("{reader} reads {name:?}, which nothing defines")]
    Undefined { name: String, reader: String },
    #[error("the graph has a cycle: {}", nodes.join(" -> "))]
    Cycle { nodes: Vec<String> },
    #[error("an initializer has no name")]
    UnnamedInitializer,
}

/// Checks a graph and sorts its nodes and those of its bodies. Returns whether any node moved.
pub fn sort(graph: &mut GraphProto) -> Result<bool, OrderError> {
    // Captures count as reads of their node, so this check covers bodies at every depth.
    check_reads(graph, &definitions(graph)?)?;
    sort_nodes(graph)
}

fn sort_nodes(graph: &mut GraphProto) -> Result<bool, OrderError> {
    let order = order_of(&graph.node, &definitions(graph)?)?;
    let mut moved = order.iter().enumerate().any(|(i, node)| i != *node);
    if moved {
        reorder(&mut graph.node, &order);
    }
    for body in graph.node.iter_mut().flat_map(walk::bodies_mut) {
        moved |= sort_nodes(body)?;
    }
    Ok(moved)
}

/// Each defined name with the node that produces it; `None` for inputs and initializers.
fn definitions(graph: &GraphProto) -> Result<HashMap<&str, Option<usize>>, OrderError> {
    let mut defined: HashMap<&str, Option<usize>> = HashMap::new();
    let twice = |name: &str, first: &Option<usize>, second: String| OrderError::DefinedTwice {
        name: name.to_owned(),
        first: first.map_or("an input or an initializer".into(), |node| label(&graph.node[node])),
        second,
    };
    for name in graph.input.iter().map(|v| v.name()) {
        if let Some(first) = defined.insert(name, None) {
            return Err(twice(name, &first, "another input".into()));
        }
    }
    // An initializer may have the name of an input, whose default it then is, but not that of another initializer.
    let mut initializers = HashSet::new();
    for name in names::weights(graph) {
        if name.is_empty() {
            return Err(OrderError::UnnamedInitializer);
        }
        if !initializers.insert(name) {
            return Err(twice(name, &None, "another initializer".into()));
        }
        defined.insert(name, None);
    }
    for (index, node) in graph.node.iter().enumerate() {
        for name in node.output.iter().filter(|name| !name.is_empty()) {
            if let Some(first) = defined.insert(name, Some(index)) {
                return Err(twice(name, &first, label(node)));
            }
        }
    }
    Ok(defined)
}

fn check_reads(graph: &GraphProto, defined: &HashMap<&str, Option<usize>>) -> Result<(), OrderError> {
    let known = |name: &str| defined.contains_key(name);
    for node in &graph.node {
        if let Some(name) = names::reads(node).into_iter().find(|name| !known(name)) {
            return Err(OrderError::Undefined { name: name.into(), reader: label(node) });
        }
    }
    match graph.output.iter().map(|v| v.name()).find(|name| !known(name)) {
        Some(name) => Err(OrderError::Undefined { name: name.into(), reader: "the list of graph outputs".into() }),
        None => Ok(()),
    }
}

/// The topological order nearest to the given one; the given order if it is topological.
fn order_of(nodes: &[NodeProto], producers: &HashMap<&str, Option<usize>>) -> Result<Vec<usize>, OrderError> {
    let mut readers: Vec<Vec<usize>> = vec![vec![]; nodes.len()];
    let mut waiting = vec![0usize; nodes.len()];
    for (index, node) in nodes.iter().enumerate() {
        for producer in names::reads(node).into_iter().filter_map(|name| producers.get(name).copied().flatten()) {
            readers[producer].push(index);
            waiting[index] += 1;
        }
    }
    let mut ready: BinaryHeap<Reverse<usize>> = (0..nodes.len()).filter(|i| waiting[*i] == 0).map(Reverse).collect();
    let mut order = Vec::with_capacity(nodes.len());
    while let Some(Reverse(node)) = ready.pop() {
        order.push(node);
        for reader in &readers[node] {
            waiting[*reader] -= 1;
            if waiting[*reader] == 0 {
                ready.push(Reverse(*reader));
            }
        }
    }
    match order.len() == nodes.len() {
        true => Ok(order),
        false => Err(OrderError::Cycle { nodes: cycle(nodes, producers, &waiting) }),
    }
}

/// The labels of one cycle (at most 8 nodes, the first repeated) among nodes that never became ready.
fn cycle(nodes: &[NodeProto], producers: &HashMap<&str, Option<usize>>, waiting: &[usize]) -> Vec<String> {
    let stuck_producer = |index: usize| {
        let reads = names::reads(&nodes[index]);
        reads.into_iter().filter_map(|name| producers.get(name).copied().flatten()).find(|p| waiting[*p] > 0)
    };
    let mut at = waiting.iter().position(|w| *w > 0).unwrap_or_default();
    let mut path = vec![];
    let mut seen = HashMap::new();
    while !seen.contains_key(&at) {
        seen.insert(at, path.len());
        path.push(at);
        match stuck_producer(at) {
            Some(next) => at = next,
            None => break,
        }
    }
    let mut round = path.split_off(seen.get(&at).copied().unwrap_or_default().min(path.len()));
    round.reverse();
    let mut labels: Vec<String> = round.iter().take(8).map(|i| label(&nodes[*i])).collect();
    labels.extend(labels.first().cloned());
    labels
}

fn reorder(nodes: &mut Vec<NodeProto>, order: &[usize]) {
    let mut taken: Vec<Option<NodeProto>> = std::mem::take(nodes).into_iter().map(Some).collect();
    nodes.extend(order.iter().filter_map(|i| taken[*i].take()));
}
