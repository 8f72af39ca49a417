//! Rules for reductions: reduced axes are removed, or kept with size 1.

use crate::infer::context::{Context, Rule, wrap_all};
use crate::infer::fact::{Elements, Facts, fact, one, ranked};
use crate::infer::poly::{constant, product, sum};
use hpp_schema::{DType, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "ReduceL1" | "ReduceL2" | "ReduceLogSum" | "ReduceLogSumExp" | "ReduceMax" | "ReduceMean" | "ReduceMin"
        | "ReduceProd" | "ReduceSum" | "ReduceSumSquare" => reduce,
        "ArgMax" | "ArgMin" => arg,
        _ => return None,
    })
}

fn reduce(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), reduced(cx)).with_elements(folded(cx))]
}

/// Axes are an attribute before operator set 13 (`ReduceSum`) or 18, and an input since.
fn reduced(cx: &Context) -> Option<Shape> {
    let shape = cx.shape(0)?;
    let keep = cx.int("keepdims", 1) != 0;
    let axes = match cx.list("axes", 1) {
        Some(axes) if axes.is_empty() => default_axes(cx, shape.len()),
        Some(axes) => wrap_all(&axes, shape.len())?,
        None if cx.has_list("axes", 1) => return keep.then(|| ranked(shape.len())),
        None => default_axes(cx, shape.len()),
    };
    Some(without(shape, &axes, keep))
}

fn default_axes(cx: &Context, rank: usize) -> Vec<usize> {
    if cx.int("noop_with_empty_axes", 0) != 0 { vec![] } else { (0..rank).collect() }
}

fn without(shape: &Shape, axes: &[usize], keep: bool) -> Shape {
    let dim = |i: usize| match (axes.contains(&i), keep) {
        (false, _) => Some(shape[i].clone()),
        (true, true) => Some(constant(1)),
        (true, false) => None,
    };
    (0..shape.len()).filter_map(dim).collect()
}

/// The element that remains of a reduced vector: `ReduceProd` of a shape is an element count.
fn folded(cx: &Context) -> Option<Elements> {
    let all = cx.elements(0).filter(|_| cx.shape(0).is_some_and(|shape| shape.len() == 1))?;
    match cx.node.op_type.as_str() {
        "ReduceProd" => Some(vec![product(&all)]),
        "ReduceSum" => Some(vec![sum(&all)]),
        _ if all.len() == 1 => Some(all),
        _ => None,
    }
    .filter(|_| cx.list("axes", 1).is_none_or(|axes| axes == [0] || axes == [-1]))
}

fn arg(cx: &Context) -> Facts {
    let shape = cx.shape(0).and_then(|shape| {
        let axis = cx.axis(0, shape.len())?;
        Some(without(shape, &[axis], cx.int("keepdims", 1) != 0))
    });
    one(Some(DType::Int64), shape)
}
