//! Rules for operators that rearrange dimensions: reshape, transpose, expand and similar ones.

use super::broadcast::broadcast;
use crate::infer::context::{Context, Rule, wrap, wrap_all};
use crate::infer::fact::{Facts, fact, one, ranked};
use crate::infer::poly::{as_constant, constant, divide, multiply, product, quotient};
use hpp_schema::{Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Reshape" => reshape,
        "Flatten" => flatten,
        "Squeeze" => squeeze,
        "Unsqueeze" => unsqueeze,
        "Transpose" => transpose,
        "Expand" => expand,
        "Tile" => tile,
        "DepthToSpace" => depth_to_space,
        "SpaceToDepth" => space_to_depth,
        _ => return None,
    })
}

fn reshape(cx: &Context) -> Facts {
    let target = match cx.ints("shape") {
        Some(target) => Some(target.iter().copied().map(constant).collect()),
        None => cx.elements(1),
    };
    let shape = target.map(|target| reshaped(cx.shape(0), &target, cx.int("allowzero", 0) == 0));
    vec![fact(cx.dtype(0), shape).with_elements(cx.elements(0))]
}

/// The output shape of `Reshape`. One size that is -1 or unknown follows from the number of elements.
fn reshaped(input: Option<&Shape>, target: &[Dim], zero_copies: bool) -> Shape {
    let mut left = input.cloned();
    let mut shape = ranked(target.len());
    let mut open = vec![];
    for (i, size) in target.iter().enumerate() {
        match as_constant(size) {
            Some(0) if zero_copies => {
                shape[i] = input.and_then(|dims| dims.get(i).cloned()).unwrap_or(Dim::Unknown);
                if let Some(dim) = left.as_mut().and_then(|dims| dims.get_mut(i)) {
                    *dim = constant(1);
                }
            }
            Some(-1) => open.push(i),
            None if *size == Dim::Unknown => open.push(i),
            _ => shape[i] = size.clone(),
        }
    }
    if let ([open], Some(left)) = (open.as_slice(), left) {
        let copied = |i: &usize| zero_copies && as_constant(&target[*i]) == Some(0);
        let given: Shape = (0..target.len()).filter(|i| i != open && !copied(i)).map(|i| shape[i].clone()).collect();
        shape[*open] = quotient(left, &given);
    }
    shape
}

fn flatten(cx: &Context) -> Facts {
    let flat = |shape: &Shape| {
        let axis = cx.int("axis", 1);
        let rank = shape.len();
        let axis = if axis == rank as i64 { rank } else { wrap(axis, rank)? };
        Some(vec![product(&shape[..axis]), product(&shape[axis..])])
    };
    one(cx.dtype(0), cx.shape(0).and_then(flat).or_else(|| Some(ranked(2))))
}

fn squeeze(cx: &Context) -> Facts {
    let shape = cx.shape(0).and_then(|shape| {
        let axes = match cx.list("axes", 1) {
            Some(axes) => wrap_all(&axes, shape.len())?,
            None if cx.has_list("axes", 1) => return None,
            None => ones(shape)?,
        };
        Some((0..shape.len()).filter(|i| !axes.contains(i)).map(|i| shape[i].clone()).collect())
    });
    vec![fact(cx.dtype(0), shape).with_elements(cx.elements(0))]
}

/// Axes of size 1; `None` if a size is unknown or symbolic.
fn ones(shape: &Shape) -> Option<Vec<usize>> {
    let sizes: Vec<i64> = shape.iter().map(as_constant).collect::<Option<_>>()?;
    Some((0..sizes.len()).filter(|i| sizes[*i] == 1).collect())
}

fn unsqueeze(cx: &Context) -> Facts {
    let shape = cx.shape(0).and_then(|shape| {
        let axes = cx.list("axes", 1)?;
        let rank = shape.len().checked_add(axes.len())?;
        let axes = wrap_all(&axes, rank)?;
        let mut rest = shape.iter().cloned();
        let dim = |i| if axes.contains(&i) { Some(constant(1)) } else { rest.next() };
        let shape: Option<Shape> = (0..rank).map(dim).collect();
        shape.filter(|_| rest.next().is_none())
    });
    vec![fact(cx.dtype(0), shape).with_elements(cx.elements(0))]
}

fn transpose(cx: &Context) -> Facts {
    let permuted = |shape: &Shape| match cx.ints("perm") {
        Some(perm) if perm.len() == shape.len() => {
            Some(wrap_all(perm, shape.len())?.into_iter().map(|i| shape[i].clone()).collect())
        }
        Some(_) => None,
        None => Some(shape.iter().rev().cloned().collect()),
    };
    let flat = cx.shape(0).is_some_and(|shape| shape.len() < 2);
    vec![fact(cx.dtype(0), cx.shape(0).and_then(permuted)).with_elements(cx.elements(0).filter(|_| flat))]
}

fn expand(cx: &Context) -> Facts {
    let target = cx.elements(1);
    let shape = match (cx.shape(0), &target) {
        (Some(shape), Some(target)) => Some(broadcast(shape, target)),
        _ => None,
    };
    let count = shape.as_ref().and_then(|shape| product(shape).as_fixed()).and_then(|n| usize::try_from(n).ok());
    let repeated = cx.scalar(0).zip(count.filter(|n| *n <= crate::infer::merge::MAX_ELEMENTS));
    vec![fact(cx.dtype(0), shape).with_elements(repeated.map(|(value, count)| vec![value; count]))]
}

fn tile(cx: &Context) -> Facts {
    let shape = cx.shape(0).map(|shape| match cx.elements(1) {
        Some(times) if times.len() == shape.len() => shape.iter().zip(&times).map(|(d, t)| multiply(d, t)).collect(),
        _ => ranked(shape.len()),
    });
    one(cx.dtype(0), shape)
}

fn depth_to_space(cx: &Context) -> Facts {
    let (block, area) = block(cx);
    let spread = |shape: &Shape| match shape.as_slice() {
        [n, c, h, w] => Some(vec![n.clone(), divide(c, &area), multiply(h, &block), multiply(w, &block)]),
        _ => None,
    };
    one(cx.dtype(0), cx.shape(0).and_then(spread))
}

fn space_to_depth(cx: &Context) -> Facts {
    let (block, area) = block(cx);
    let gathered = |shape: &Shape| match shape.as_slice() {
        [n, c, h, w] => Some(vec![n.clone(), multiply(c, &area), divide(h, &block), divide(w, &block)]),
        _ => None,
    };
    one(cx.dtype(0), cx.shape(0).and_then(gathered))
}

fn block(cx: &Context) -> (Dim, Dim) {
    let block = cx.size("blocksize");
    let area = multiply(&block, &block);
    (block, area)
}
