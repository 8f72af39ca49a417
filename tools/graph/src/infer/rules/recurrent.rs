//! Recurrent layers: a sequence of hidden states, and the last one.

use crate::infer::context::Context;
use crate::infer::fact::{Facts, Rule, fact};
use hpp_schema::{Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "LSTM" | "GRU" | "RNN" => recurrent,
        "GRUUnit" => unit,
        _ => return None,
    })
}

/// `layout` 1 puts the batch first.
pub(super) fn recurrent(cx: &Context) -> Facts {
    let hidden = match cx.size("hidden_size") {
        Dim::Unknown => cx.dim(2, -1),
        size => size,
    };
    let directions = cx.dim(1, 0);
    let batch_first = cx.int("layout", 0) != 0;
    let known = cx.shape(0).is_some();
    let (steps, batch) = if batch_first { (cx.dim(0, 1), cx.dim(0, 0)) } else { (cx.dim(0, 0), cx.dim(0, 1)) };
    let (all, last): (Shape, Shape) = if batch_first {
        (vec![batch.clone(), steps, directions.clone(), hidden.clone()], vec![batch, directions, hidden])
    } else {
        (vec![steps, directions.clone(), batch.clone(), hidden.clone()], vec![directions, batch, hidden])
    };
    let last = fact(cx.dtype(0), known.then_some(last));
    vec![fact(cx.dtype(0), known.then_some(all)), last.clone(), last]
}

fn unit(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), None)]
}
