//! The order nodes may run in and how long values live. Knows nothing of what operators do.

use crate::{Graph, NodeId, Origin, ValueId};
use petgraph::graph::DiGraph;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;

/// Why a graph has no execution order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot order the graph: node {name:?} ({op_type}) is part of a cycle")]
pub struct CycleError {
    /// One node of the cycle.
    pub node: NodeId,
    /// Its ONNX name.
    pub name: String,
    /// Its operator.
    pub op_type: String,
}

impl Graph {
    /// Whether every node comes after the producers of what it reads.
    pub fn is_ordered(&self) -> bool {
        self.node_ids().all(|id| self.node(id).reads().all(|v| self.producer(v).is_none_or(|p| p < id)))
    }

    /// An order in which every node comes after the producers of what it reads: the stored order where that is one,
    /// else the nearest to it.
    pub fn topological_order(&self) -> Result<Vec<NodeId>, CycleError> {
        let mut waiting: Vec<usize> = self.node_ids().map(|id| self.producers_of(id).len()).collect();
        let ready = self.node_ids().filter(|id| waiting[id.0 as usize] == 0).map(Reverse);
        let mut ready: BinaryHeap<_> = ready.collect();
        let mut order = Vec::with_capacity(self.nodes.len());
        while let Some(Reverse(id)) = ready.pop() {
            order.push(id);
            for next in self.consumers_of(id) {
                let left = &mut waiting[next.0 as usize];
                *left -= 1;
                if *left == 0 {
                    ready.push(Reverse(next));
                }
            }
        }
        match waiting.iter().position(|left| *left > 0) {
            None => Ok(order),
            Some(stuck) => {
                let node = &self.nodes[stuck];
                let (name, op_type) = (node.name.clone(), node.op_type.clone());
                Err(CycleError { node: NodeId(stuck as u32), name, op_type })
            }
        }
    }

    /// Nodes that produce what this one reads, each once, in order.
    pub fn producers_of(&self, id: NodeId) -> Vec<NodeId> {
        let mut producers: Vec<_> = self.node(id).reads().filter_map(|v| self.producer(v)).collect();
        producers.sort_unstable();
        producers.dedup();
        producers
    }

    /// Nodes that read what this one produces, each once, in order.
    pub fn consumers_of(&self, id: NodeId) -> Vec<NodeId> {
        let mut consumers: Vec<_> = self.node(id).writes().flat_map(|v| self.value(v).consumers.clone()).collect();
        consumers.sort_unstable();
        consumers.dedup();
        consumers
    }

    /// The graph as petgraph sees it: node weights are our ids (indices agree), one edge per value and consumer.
    pub fn to_petgraph(&self) -> DiGraph<NodeId, ValueId> {
        let mut out = DiGraph::with_capacity(self.nodes.len(), self.values.len());
        let index: Vec<_> = self.node_ids().map(|id| out.add_node(id)).collect();
        for value in self.value_ids() {
            if let Origin::Node { node, .. } = self.value(value).origin {
                for consumer in &self.value(value).consumers {
                    out.add_edge(index[node.0 as usize], index[consumer.0 as usize], value);
                }
            }
        }
        out
    }
}

/// For how long each value is needed when nodes run in their stored order. Position `p` is just before node `p`.
#[derive(Clone, Debug)]
pub struct Liveness {
    spans: Vec<Option<Range<usize>>>,
    positions: usize,
}

impl Liveness {
    /// Computes the positions at which each node-made value has been produced and will still be read (or returned).
    pub fn of(graph: &Graph) -> Self {
        let end = graph.nodes.len();
        let mut last: Vec<usize> =
            graph.values.iter().map(|v| v.consumers.iter().map(|c| c.0 as usize).max().unwrap_or(0)).collect();
        for output in &graph.outputs {
            last[output.0 as usize] = end;
        }
        let spans = graph
            .value_ids()
            .map(|v| {
                let start = graph.producer(v)?.0 as usize + 1;
                Some(start..(last[v.0 as usize] + 1).max(start))
            })
            .collect();
        Liveness { spans, positions: end + 1 }
    }

    /// The positions at which a value is live; `None` for inputs and weights, which never die.
    pub fn span(&self, value: ValueId) -> Option<Range<usize>> {
        self.spans[value.0 as usize].clone()
    }

    /// Values live at a position, in order.
    pub fn at(&self, position: usize) -> Vec<ValueId> {
        let live = self.spans.iter().enumerate();
        live.filter(|(_, s)| s.as_ref().is_some_and(|s| s.contains(&position)))
            .map(|(i, _)| ValueId(i as u32))
            .collect()
    }

    /// How many values are live at each position.
    pub fn counts(&self) -> Vec<usize> {
        sweep(self.positions, self.spans.iter().flatten().map(|span| (span.clone(), 1)))
            .into_iter()
            .map(|n| n as usize)
            .collect()
    }
}

/// Sums the weights of the spans that cover each position.
pub(crate) fn sweep(positions: usize, spans: impl Iterator<Item = (Range<usize>, u64)>) -> Vec<u64> {
    let mut change = vec![0i128; positions + 1];
    for (span, weight) in spans {
        change[span.start.min(positions)] += i128::from(weight);
        change[span.end.min(positions)] -= i128::from(weight);
    }
    let mut sum = 0;
    change[..positions]
        .iter()
        .map(|c| {
            sum += c;
            u64::try_from(sum).unwrap_or(u64::MAX)
        })
        .collect()
}
