//! Infers element types and symbolic shapes that the exporter left out, and computes the cost of nodes from them.
//!
//! One pass in execution order. The rule of each operator derives facts about the outputs (type, shape, and the
//! symbolic elements of small integer tensors, so that `Reshape` and `Expand` produce `batch_size` instead of an
//! unknown size) from facts about the inputs. Invariant: a rule states only what is certain, under two assumptions that
//! hold for every exporter: sizes are not negative, and a symbolic slice bound lies inside the sliced dimension. A
//! declaration in the file takes precedence over an inferred fact; the [`Report`] lists contradictions. Does not know
//! file formats.

mod contents;
mod context;
mod cost;
mod fact;
mod merge;
mod poly;
mod rules;

pub use cost::{bytes_read, expert_scratch, flops, score_bytes};

use crate::{Graph, NodeId, ValueId};
use context::Context;
use fact::{Elements, Facts};
use hpp_schema::{DType, Dim, Shape};
use merge::{ExporterSymbols, drop_impossible, merge, overwrite};
use std::collections::BTreeMap;

/// Operators, values and declarations that inference could not resolve.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Operators without a rule, as `domain::op`, and the number of their nodes.
    pub unknown_ops: BTreeMap<String, usize>,
    /// Values without an element type: outputs of unknown operators, and sequences.
    pub untyped: Vec<ValueId>,
    /// Declarations that contradict the rules. The declaration was kept, except for a `Constant`, whose tensor is
    /// authoritative.
    pub disagreements: Vec<Disagreement>,
}

/// A declaration that contradicts the operator's rule.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum Disagreement {
    /// Different element types.
    DType { value: ValueId, declared: DType, inferred: DType },
    /// Shapes that differ for every value of the symbols.
    Shape { value: ValueId, declared: Shape, inferred: Shape },
}

/// Adds missing element types and shapes to the values of a graph.
pub fn infer(graph: &mut Graph) -> Report {
    let mut report = Report::default();
    let mut exporter_symbols = ExporterSymbols::of(graph);
    let mut elements = contents::of_weights(graph);
    for id in graph.node_ids() {
        let facts = facts_of(graph, id, &elements, &mut report);
        let outputs = graph.node(id).outputs.clone();
        for (output, fact) in outputs.into_iter().zip(facts) {
            let Some(output) = output else { continue };
            let fact = drop_impossible(fact);
            match graph.node(id).op_type.as_str() {
                "Constant" => overwrite(graph, output, &fact, &mut report.disagreements),
                _ => merge(graph, output, &fact, &mut exporter_symbols, &mut report.disagreements),
            }
            elements[output.0 as usize] = fact.elements;
        }
    }
    exporter_symbols.substitute(graph);
    report.untyped = graph.value_ids().filter(|id| graph.value(*id).dtype.is_none()).collect();
    report
}

/// The elements of small integer tensors, by value, if they follow from shapes. Each element is symbolic or
/// unknown, in row-major order; `None` for other tensors. Call [`infer()`] on `graph` first.
pub fn contents(graph: &Graph) -> Vec<Option<Vec<Dim>>> {
    let mut elements = contents::of_weights(graph);
    for id in graph.node_ids() {
        let facts = facts_of(graph, id, &elements, &mut Report::default());
        for (output, fact) in graph.node(id).outputs.iter().zip(facts) {
            if let Some(output) = output {
                elements[output.0 as usize] = drop_impossible(fact).elements;
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
