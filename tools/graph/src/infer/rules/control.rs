//! Rules for control flow and sequences: element types come from the bodies, and shapes where both branches declare the same.

use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Fact, Facts, fact, typed};
use crate::{Attribute, Body};
use hpp_schema::{DType, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "If" => branch,
        "Loop" => repeat,
        "Scan" => scan,
        "SequenceAt" | "SequenceConstruct" | "SequenceEmpty" | "SequenceErase" | "SequenceInsert"
        | "SplitToSequence" | "ConcatFromSequence" => unknown,
        "SequenceLength" => length,
        _ => return None,
    })
}

fn body<'a>(cx: &Context<'a>, name: &str) -> Option<&'a Body> {
    match cx.node.attributes.get(name) {
        Some(Attribute::Body(body)) => Some(body),
        _ => None,
    }
}

/// The element type that a body declares for its output.
fn result(body: Option<&Body>, at: usize) -> Option<DType> {
    body?.output_dtypes.get(at).copied().flatten()
}

/// The shape that a body declares for its output.
fn shape(body: Option<&Body>, at: usize) -> Option<&Shape> {
    body?.output_shapes.get(at)?.as_ref()
}

/// A shape that both branches declare is that of the output.
fn branch(cx: &Context) -> Facts {
    let (yes, no) = (body(cx, "then_branch"), body(cx, "else_branch"));
    let shape = |at| shape(yes, at).filter(|declared| shape(no, at) == Some(*declared)).cloned();
    (0..cx.node.outputs.len()).map(|at| fact(result(yes, at).or(result(no, at)), shape(at))).collect()
}

/// The outputs of the body are a condition, then the outputs of the node. Loop-carried values keep their type.
fn repeat(cx: &Context) -> Facts {
    let body = body(cx, "body");
    let carried = cx.node.inputs.len().saturating_sub(2);
    let output = |at: usize| {
        let initial = if at < carried { cx.dtype(at + 2) } else { None };
        fact(result(body, at + 1).or(initial), None)
    };
    (0..cx.node.outputs.len()).map(output).collect()
}

/// State variables keep type and shape; scan outputs have the body's type. Before operator set 9, input 0 held the
/// sequence lengths.
fn scan(cx: &Context) -> Facts {
    let body = body(cx, "body");
    let first = if cx.opset() < 9 { 1 } else { 0 };
    let scanned = usize::try_from(cx.int("num_scan_inputs", 0)).unwrap_or(0);
    let states = cx.node.inputs.len().saturating_sub(scanned).saturating_sub(first);
    let output = |at: usize| -> Fact {
        let state = if at < states { cx.same(at + first) } else { Fact::default() };
        fact(result(body, at).or(state.dtype), state.shape)
    };
    (0..cx.node.outputs.len()).map(output).collect()
}

fn unknown(cx: &Context) -> Facts {
    vec![Fact::default(); cx.node.outputs.len()]
}

fn length(_: &Context) -> Facts {
    typed(DType::Int64, Some(vec![]))
}
