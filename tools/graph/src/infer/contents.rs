//! Elementwise symbolic arithmetic on small integer tensors, for shape computations.

use super::fact::Elements;
use super::merge::MAX_ELEMENTS;
use super::poly::{as_constant, at_most, below, constant, differ, divide, divide_down, multiply, never_negative};
use crate::{Graph, Origin};
use hpp_schema::Dim;

/// The elements of every small integer weight, by value.
pub(super) fn of_weights(graph: &Graph) -> Vec<Option<Elements>> {
    let small = |values: &Vec<i64>| values.iter().copied().map(constant).collect();
    let contents = |origin: &Origin| match origin {
        Origin::Weight(weight) => weight.ints.as_ref().filter(|v| v.len() <= MAX_ELEMENTS).map(small),
        _ => None,
    };
    graph.values.iter().map(|value| contents(&value.origin)).collect()
}

/// A binary operator on elements.
pub(super) type Binary = fn(&Dim, &Dim) -> Dim;

/// The integer operator for a binary ONNX operator.
pub(super) fn binary(op: &str) -> Option<Binary> {
    Some(match op {
        "Add" => |a, b| a.clone() + b.clone(),
        "Sub" => |a, b| a.clone() - b.clone(),
        "Mul" => multiply,
        "Div" => whole_quotient,
        "Mod" => remainder,
        "Min" => |a, b| pick(a, b, at_most(a, b), at_most(b, a)),
        "Max" => |a, b| pick(a, b, at_most(b, a), at_most(a, b)),
        "Equal" => |a, b| truth(a == b && *a != Dim::Unknown, differ(a, b)),
        "Less" => |a, b| truth(below(a, b), at_most(b, a)),
        "LessOrEqual" => |a, b| truth(at_most(a, b), below(b, a)),
        "Greater" => |a, b| truth(below(b, a), at_most(a, b)),
        "GreaterOrEqual" => |a, b| truth(at_most(b, a), below(a, b)),
        "And" => |a, b| truth(is(a, 1) && is(b, 1), is(a, 0) || is(b, 0)),
        "Or" => |a, b| truth(is(a, 1) || is(b, 1), is(a, 0) && is(b, 0)),
        _ => return None,
    })
}

/// The integer operator for a unary ONNX operator.
pub(super) fn unary(op: &str) -> Option<fn(&Dim) -> Dim> {
    Some(match op {
        "Neg" => |a| constant(0) - a.clone(),
        "Not" => |a| truth(is(a, 0), is(a, 1)),
        "Abs" => |a| {
            if never_negative(a) {
                a.clone()
            } else {
                as_constant(a).and_then(i64::checked_abs).map_or(Dim::Unknown, constant)
            }
        },
        "Floor" | "Ceil" | "Round" | "Identity" => Dim::clone,
        _ => return None,
    })
}

fn is(dim: &Dim, value: i64) -> bool {
    as_constant(dim) == Some(value)
}

fn truth(yes: bool, no: bool) -> Dim {
    match (yes, no) {
        (true, _) => constant(1),
        (_, true) => constant(0),
        _ => Dim::Unknown,
    }
}

fn pick(a: &Dim, b: &Dim, first: bool, second: bool) -> Dim {
    match (first, second) {
        (true, _) => a.clone(),
        (_, true) => b.clone(),
        _ => Dim::Unknown,
    }
}

/// Integer division as in ONNX, toward zero; unknown where the result is not certain.
fn whole_quotient(a: &Dim, b: &Dim) -> Dim {
    if let (Some(a), Some(b)) = (as_constant(a), as_constant(b)) {
        return a.checked_div(b).map_or(Dim::Unknown, constant);
    }
    match (divide(a, b), as_constant(b)) {
        (Dim::Unknown, Some(by)) if never_negative(a) => divide_down(a, by),
        (exact, _) => exact,
    }
}

/// The remainder with the divisor's sign, as in `Mod` for integers.
fn remainder(a: &Dim, b: &Dim) -> Dim {
    match (as_constant(a), as_constant(b)) {
        (Some(a), Some(b)) if b > 0 => a.checked_rem_euclid(b).map_or(Dim::Unknown, constant),
        _ if divide(a, b) != Dim::Unknown => constant(0),
        _ => Dim::Unknown,
    }
}

/// Applies an operator elementwise; a single element is broadcast. `None` if the lengths do not match.
pub(super) fn zip(a: &[Dim], b: &[Dim], op: impl Fn(&Dim, &Dim) -> Dim) -> Option<Elements> {
    let length = if a.len() == 1 { b.len() } else { a.len() };
    if !matches!(b.len(), l if l == length || l == 1) {
        return None;
    }
    Some((0..length).map(|i| op(&a[i % a.len()], &b[i % b.len()])).collect())
}

/// `Where` on elements. An unknown condition gives a known result if both choices are equal.
pub(super) fn select(condition: &[Dim], yes: &[Dim], no: &[Dim]) -> Option<Elements> {
    let length = [condition.len(), yes.len(), no.len()].into_iter().max()?;
    let fits = |list: &[Dim]| list.len() == length || list.len() == 1;
    if length == 0 || !fits(condition) || !fits(yes) || !fits(no) {
        return None;
    }
    let choose = |i: usize| {
        let (yes, no) = (&yes[i % yes.len()], &no[i % no.len()]);
        match as_constant(&condition[i % condition.len()]) {
            Some(0) => no.clone(),
            Some(_) => yes.clone(),
            None if yes == no => yes.clone(),
            None => Dim::Unknown,
        }
    };
    Some((0..length).map(choose).collect())
}
