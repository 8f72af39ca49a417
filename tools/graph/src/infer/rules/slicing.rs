//! Rules for operators that cut or join tensors along an axis: slice, split, concat, pad.

use crate::infer::context::{Context, Rule, wrap_all};
use crate::infer::fact::{Elements, Facts, fact, one, ranked};
use crate::infer::poly::{as_constant, at_most, constant, divide, divide_up, sum};
use hpp_schema::{Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Slice" => slice,
        "Concat" => concat,
        "Split" => split,
        "Pad" => pad,
        _ => return None,
    })
}

/// Bounds of a slice along one axis.
struct Cut {
    axis: usize,
    start: Dim,
    end: Dim,
    step: Dim,
}

fn slice(cx: &Context) -> Facts {
    let rank = cx.shape(0).map(Vec::len);
    let cuts = rank.and_then(|rank| cuts(cx, rank));
    let shape = cx.shape(0).map(|shape| match &cuts {
        Some(cuts) => cuts.iter().fold(shape.clone(), |mut shape, cut| {
            shape[cut.axis] = length(&shape[cut.axis], cut);
            shape
        }),
        None => ranked(shape.len()),
    });
    let picked = || match cuts.as_deref() {
        Some([cut]) if rank == Some(1) => pick(&cx.elements(0)?, cut),
        _ => None,
    };
    vec![fact(cx.dtype(0), shape).with_elements(picked())]
}

/// Bounds by axis, from attributes (operator set 1) or inputs (since 10).
fn cuts(cx: &Context, rank: usize) -> Option<Vec<Cut>> {
    let bounds = |name, at| match cx.ints(name) {
        Some(values) => Some(values.iter().copied().map(constant).collect::<Elements>()),
        None => cx.elements(at),
    };
    let (starts, ends) = (bounds("starts", 1)?, bounds("ends", 2)?);
    let axes = match cx.list("axes", 3) {
        Some(axes) => wrap_all(&axes, rank)?,
        None if cx.has_list("axes", 3) => return None,
        None => (0..starts.len().min(rank)).collect(),
    };
    let steps = match cx.input(4) {
        Some(_) => cx.elements(4)?,
        None => vec![constant(1); axes.len()],
    };
    let all = axes.iter().zip(starts).zip(ends).zip(steps);
    let cuts: Vec<Cut> = all.map(|(((axis, start), end), step)| Cut { axis: *axis, start, end, step }).collect();
    (cuts.len() == axes.len()).then_some(cuts)
}

/// Number of elements that a slice keeps of `dim`.
fn length(dim: &Dim, cut: &Cut) -> Dim {
    let Some(step) = as_constant(&cut.step) else { return Dim::Unknown };
    if step < 0 {
        return backward(dim, cut, step);
    }
    let count = inside(dim, &cut.end) - inside(dim, &cut.start);
    match as_constant(&count) {
        Some(count) => divide_up(&constant(count.max(0)), step),
        None => divide_up(&count, step),
    }
}

/// A bound as a position: a negative one counts from the end, one past the end is clamped.
///
/// Assumes that a symbolic bound lies inside the dimension, and that a dimension has at least one element.
fn inside(dim: &Dim, bound: &Dim) -> Dim {
    let end = as_constant(dim);
    match as_constant(bound) {
        Some(i64::MAX) => dim.clone(),
        Some(at) if at > i64::from(i32::MAX) - 1 => dim.clone(),
        Some(at) if at >= 0 => match end {
            Some(end) => constant(at.min(end)),
            None if at <= 1 || at_most(bound, dim) => bound.clone(),
            None => Dim::Unknown,
        },
        Some(at) => match end {
            Some(end) => constant(end.saturating_add(at).max(0)),
            None if at == -1 || at_most(&constant(at.saturating_neg()), dim) => dim.clone() + bound.clone(),
            None => Dim::Unknown,
        },
        None if at_most(dim, bound) => dim.clone(),
        None if negative(bound) => dim.clone() + bound.clone(),
        None => bound.clone(),
    }
}

/// Whether a symbolic bound counts from the end, because every term is negative.
fn negative(bound: &Dim) -> bool {
    at_most(bound, &constant(0))
}

/// The length of a slice with a negative step: known for complete reversals and constant bounds only.
fn backward(dim: &Dim, cut: &Cut, step: i64) -> Dim {
    let (Some(start), Some(end)) = (as_constant(&cut.start), as_constant(&cut.end)) else { return Dim::Unknown };
    let Some(size) = as_constant(dim) else {
        let whole = step == -1 && start == -1 && end <= -i64::from(i32::MAX);
        return if whole { dim.clone() } else { Dim::Unknown };
    };
    let position = |at: i64| if at < 0 { at.saturating_add(size) } else { at };
    let (first, last) = (position(start).clamp(-1, size - 1), position(end).clamp(-1, size - 1));
    divide_up(&constant((first - last).max(0)), step.saturating_neg())
}

/// The elements that a slice with constant bounds keeps.
fn pick(elements: &[Dim], cut: &Cut) -> Option<Elements> {
    let dim = constant(elements.len() as i64);
    let step = as_constant(&cut.step).filter(|step| *step > 0)?;
    let first = usize::try_from(as_constant(&inside(&dim, &cut.start))?).ok()?;
    let last = usize::try_from(as_constant(&inside(&dim, &cut.end))?).ok()?;
    let step = usize::try_from(step).ok()?;
    Some(elements.get(first..last).unwrap_or_default().iter().step_by(step).cloned().collect())
}

fn concat(cx: &Context) -> Facts {
    let count = cx.node.inputs.len();
    let dtype = (0..count).find_map(|at| cx.dtype(at));
    let rank = (0..count).find_map(|at| cx.shape(at).map(Vec::len));
    let shape = rank.and_then(|rank| joined(cx, cx.axis(0, rank)?, rank));
    let flat = || (0..count).map(|at| cx.elements(at)).collect::<Option<Vec<_>>>().map(|parts| parts.concat());
    vec![fact(dtype, shape).with_elements(if rank == Some(1) { flat() } else { None })]
}

/// Along the axis, sizes add up. Other dimensions are those of the first input that knows them, constants preferred.
fn joined(cx: &Context, axis: usize, rank: usize) -> Option<Shape> {
    let all: Vec<Option<&Shape>> = (0..cx.node.inputs.len()).map(|at| cx.shape(at)).collect();
    if all.iter().flatten().any(|shape| shape.len() != rank) {
        return None;
    }
    let along = |i: usize| all.iter().map(move |s| s.map_or(Dim::Unknown, |s| s[i].clone()));
    let best = |i: usize| {
        let known: Vec<Dim> = along(i).filter(|d| *d != Dim::Unknown).collect();
        known.iter().find(|d| as_constant(d).is_some()).or(known.first()).cloned().unwrap_or(Dim::Unknown)
    };
    Some((0..rank).map(|i| if i == axis { sum(&along(i).collect::<Vec<_>>()) } else { best(i) }).collect())
}

fn split(cx: &Context) -> Facts {
    let parts = cx.node.outputs.len();
    let Some(shape) = cx.shape(0) else { return vec![fact(cx.dtype(0), None); parts] };
    let Some(axis) = cx.axis(0, shape.len()) else { return vec![fact(cx.dtype(0), None); parts] };
    let sizes = sizes(cx, &shape[axis], parts);
    let mut rest = cx.elements(0).filter(|_| shape.len() == 1);
    let part = |size: &Dim| {
        let mut shape = shape.clone();
        shape[axis] = size.clone();
        let taken = rest.as_mut().zip(size.as_fixed()).filter(|(r, n)| *n <= r.len() as u64);
        let taken = taken.map(|(rest, n)| rest.drain(..n as usize).collect::<Elements>());
        if taken.is_none() {
            rest = None;
        }
        fact(cx.dtype(0), Some(shape)).with_elements(taken)
    };
    sizes.iter().map(part).collect()
}

/// The size of each part of a split: as given, or equal parts with a shorter last one.
fn sizes(cx: &Context, dim: &Dim, parts: usize) -> Elements {
    let given = match cx.ints("split") {
        Some(sizes) => Some(sizes.iter().copied().map(constant).collect::<Elements>()),
        None => cx.elements(1),
    };
    if cx.has_list("split", 1) {
        return given.filter(|sizes| sizes.len() == parts).unwrap_or_else(|| ranked(parts));
    }
    let count = parts as i64;
    let equal = match as_constant(dim) {
        Some(_) => divide_up(dim, count),
        None => divide(dim, &constant(count)),
    };
    let mut sizes = vec![equal.clone(); parts];
    if let Some(last) = sizes.last_mut() {
        *last = dim.clone() - sum(&vec![equal; parts - 1]);
    }
    sizes
}

fn pad(cx: &Context) -> Facts {
    let padded = |shape: &Shape| {
        let axes = match cx.input(3) {
            Some(_) => wrap_all(&cx.constants(3)?, shape.len())?,
            None => (0..shape.len()).collect(),
        };
        let pads = match cx.ints("pads").or(cx.ints("paddings")) {
            Some(pads) => pads.iter().copied().map(constant).collect(),
            None => cx.elements(1)?,
        };
        let half = axes.len();
        if pads.len() != 2 * half {
            return None;
        }
        let mut padded = shape.clone();
        for (i, axis) in axes.into_iter().enumerate() {
            padded[axis] = sum([&padded[axis], &pads[i], &pads[i + half]]);
        }
        Some(padded)
    };
    one(cx.dtype(0), cx.shape(0).map(|shape| padded(shape).unwrap_or_else(|| ranked(shape.len()))))
}
