//! Rules for recurrent layers: all hidden states, and the last one.

use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Facts, fact};
use hpp_schema::{Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "LSTM" | "GRU" | "RNN" => recurrent,
        _ => return None,
    })
}

/// With `layout` 1 the batch is the first axis.
fn recurrent(cx: &Context) -> Facts {
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
