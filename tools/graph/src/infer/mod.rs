//! Element types and symbolic shapes for graphs whose exporter left them out, and what the nodes then cost.
//!
//! One pass in execution order: each operator's rule sees the facts of its inputs (and the contents of small integer
//! tensors, symbolically, so that `Reshape` and `Expand` get `batch_size` and not a question mark) and says what its
//! outputs are. A rule answers only what is certain; two things it takes for granted, because every exporter does:
//! sizes are not negative, and a symbolic bound of a slice lies inside what it cuts. What a file says of a value wins
//! over what was inferred; where they cannot both be right the [`Report`] says so. This module knows no file format.

mod contents;
mod context;
mod cost;
mod fact;
mod merge;
mod poly;
mod rules;

pub use cost::{bytes_read, flops};

use crate::{Graph, NodeId, ValueId};
use context::Context;
use fact::{Elements, Facts};
use hpp_schema::{DType, Dim, Shape};
use merge::{Opaque, correct, merge, sane};
use std::collections::BTreeMap;

/// What inference could not do.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Operators without a rule, as `domain::op`, and how often each occurs.
    pub unknown_ops: BTreeMap<String, usize>,
    /// Values still without an element type: outputs of unknown operators, and sequences.
    pub untyped: Vec<ValueId>,
    /// Places where the file contradicts the rules. The file's word was kept, except over a constant's own tensor.
    pub disagreements: Vec<Disagreement>,
}

/// A declared fact that cannot be what the operator yields.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Disagreement {
    /// Different element types.
    DType { value: ValueId, declared: DType, inferred: DType },
    /// Shapes no sizes make equal.
    Shape { value: ValueId, declared: Shape, inferred: Shape },
}

/// Fills element types and shapes of values where they are missing.
pub fn infer(graph: &mut Graph) -> Report {
    let mut report = Report::default();
    let mut opaque = Opaque::of(graph);
    let mut elements = contents::of_weights(graph);
    for id in graph.node_ids() {
        let facts = facts_of(graph, id, &elements, &mut report);
        let outputs = graph.node(id).outputs.clone();
        for (output, fact) in outputs.into_iter().zip(facts) {
            let Some(output) = output else { continue };
            let fact = sane(fact);
            match graph.node(id).op_type.as_str() {
                "Constant" => correct(graph, output, &fact, &mut report.disagreements),
                _ => merge(graph, output, &fact, &mut opaque, &mut report.disagreements),
            }
            elements[output.0 as usize] = fact.elements;
        }
    }
    opaque.replace_in(graph);
    report.untyped = graph.value_ids().filter(|id| graph.value(*id).dtype.is_none()).collect();
    report
}

/// The contents of small integer tensors as far as they follow from shapes, each element symbolic or unknown, by value.
/// `graph` has been through [`infer()`]. Elements are in row-major order; what is larger than shape computations need is `None`.
pub fn contents(graph: &Graph) -> Vec<Option<Vec<Dim>>> {
    let mut elements = contents::of_weights(graph);
    for id in graph.node_ids() {
        let facts = facts_of(graph, id, &elements, &mut Report::default());
        for (output, fact) in graph.node(id).outputs.iter().zip(facts) {
            if let Some(output) = output {
                elements[output.0 as usize] = sane(fact).elements;
            }
        }
    }
    elements
}

fn facts_of(graph: &Graph, id: NodeId, elements: &[Option<Elements>], report: &mut Report) -> Facts {
    let node = graph.node(id);
    match rules::find(&node.domain, &node.op_type) {
        Some(rule) => rule(&Context { graph, node, elements }),
        None => {
            *report.unknown_ops.entry(format!("{}::{}", node.domain, node.op_type)).or_default() += 1;
            vec![]
        }
    }
}

#[cfg(test)]
mod tests;
