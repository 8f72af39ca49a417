//! Multidirectional broadcasting of symbolic shapes. A dimension that cannot be proved is unknown.

use crate::infer::context::Context;
use crate::infer::poly::{as_constant, below, constant};
use hpp_schema::{Dim, Shape};

/// The broadcast shape of two shapes.
pub(super) fn broadcast(a: &[Dim], b: &[Dim]) -> Shape {
    let rank = a.len().max(b.len());
    let one = constant(1);
    let aligned =
        |shape: &[Dim], i: usize| (i + shape.len()).checked_sub(rank).map_or(one.clone(), |i| shape[i].clone());
    (0..rank).map(|i| broadcast_dim(aligned(a, i), aligned(b, i))).collect()
}

/// The broadcast size of two dimensions. A dimension of 1 takes the other size; one that cannot be 1 is the result; if
/// both may be 1, the result is unknown.
pub(super) fn broadcast_dim(a: Dim, b: Dim) -> Dim {
    match (as_constant(&a), as_constant(&b)) {
        (Some(1), _) => b,
        (_, Some(1)) => a,
        (Some(x), Some(y)) => {
            if x == y {
                a
            } else {
                Dim::Unknown
            }
        }
        (Some(_), None) => a,
        (None, Some(_)) => b,
        _ if a == b => a,
        _ if below(&constant(1), &a) => a,
        _ if below(&constant(1), &b) => b,
        _ => Dim::Unknown,
    }
}

/// The broadcast shape of all inputs that are present; `None` if one has no known rank.
pub(super) fn all_inputs(cx: &Context) -> Option<Shape> {
    inputs(cx, 0..cx.node.inputs.len())
}

/// The broadcast shape of these inputs.
pub(super) fn inputs(cx: &Context, which: impl IntoIterator<Item = usize>) -> Option<Shape> {
    which
        .into_iter()
        .filter(|at| cx.input(*at).is_some())
        .try_fold(vec![], |shape, at| Some(broadcast(&shape, cx.shape(at)?)))
}
