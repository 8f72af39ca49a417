//! Control flow, sequences, optionals, strings: types from the bodies, no shapes.

use crate::infer::context::Context;
use crate::infer::fact::{Fact, Facts, Rule, fact, ranked, typed};
use crate::{Attribute, Body};
use hpp_schema::DType;

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "If" => branch,
        "Loop" => repeat,
        "Scan" => scan,
        "SequenceAt" | "SequenceConstruct" | "SequenceEmpty" | "SequenceErase" | "SequenceInsert" | "SequenceMap"
        | "SplitToSequence" | "ConcatFromSequence" | "Optional" => untold,
        "OptionalGetElement" => super::elementwise::keep,
        "SequenceLength" => length,
        "OptionalHasElement" => has,
        "StringNormalizer" => text,
        "StringSplit" => words,
        "TfIdfVectorizer" => frequencies,
        _ => return None,
    })
}

fn body<'a>(cx: &Context<'a>, name: &str) -> Option<&'a Body> {
    match cx.node.attributes.get(name) {
        Some(Attribute::Body(body)) => Some(body),
        _ => None,
    }
}

/// What a body says of its output, if it says anything.
fn result(body: Option<&Body>, at: usize) -> Option<DType> {
    body?.output_dtypes.get(at).copied().flatten()
}

fn branch(cx: &Context) -> Facts {
    let (yes, no) = (body(cx, "then_branch"), body(cx, "else_branch"));
    (0..cx.node.outputs.len()).map(|at| fact(result(yes, at).or(result(no, at)), None)).collect()
}

/// The body yields a condition, then what the node yields; carried values keep the type they came in with.
fn repeat(cx: &Context) -> Facts {
    let body = body(cx, "body");
    let carried = cx.node.inputs.len().saturating_sub(2);
    let output = |at: usize| {
        let came_in = if at < carried { cx.dtype(at + 2) } else { None };
        fact(result(body, at + 1).or(came_in), None)
    };
    (0..cx.node.outputs.len()).map(output).collect()
}

/// State variables keep type and shape; what is scanned out has the body's type. Before operator set 9 the sequence
/// lengths came first.
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

fn untold(cx: &Context) -> Facts {
    vec![Fact::default(); cx.node.outputs.len()]
}

fn length(_: &Context) -> Facts {
    typed(DType::Int64, Some(vec![]))
}

fn has(_: &Context) -> Facts {
    typed(DType::Bool, Some(vec![]))
}

fn text(cx: &Context) -> Facts {
    typed(DType::String, cx.shape(0).map(|shape| ranked(shape.len())))
}

fn words(cx: &Context) -> Facts {
    let shape = cx.shape(0).map(|shape| [shape.as_slice(), &ranked(1)].concat());
    vec![fact(Some(DType::String), shape), fact(Some(DType::Int64), cx.shape_of(0))]
}

fn frequencies(cx: &Context) -> Facts {
    typed(DType::Float32, cx.shape(0).map(|shape| ranked(shape.len())))
}
