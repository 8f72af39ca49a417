//! Rules for operators that read or write elements by index: gather, scatter, top-k, one-hot.

use crate::infer::context::{Context, Rule, wrap};
use crate::infer::fact::{Elements, Facts, fact, one, ranked, typed};
use crate::infer::poly::{as_constant, constant};
use hpp_schema::{DType, Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Gather" => gather,
        "GatherElements" => gather_elements,
        "GatherND" => gather_nd,
        "Scatter" | "ScatterElements" | "ScatterND" | "TensorScatter" => super::elementwise::keep,
        "TopK" => top_k,
        "OneHot" => one_hot,
        "NonZero" => non_zero,
        "Compress" => compress,
        "Unique" => unique,
        "NonMaxSuppression" => non_max_suppression,
        _ => return None,
    })
}

fn gather(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), gathered(cx, "axis")).with_elements(picked(cx))]
}

/// The data's shape with one axis replaced by the shape of the indices.
pub(super) fn gathered(cx: &Context, axis: &str) -> Option<Shape> {
    let (data, indices) = (cx.shape(0)?, cx.shape(1)?);
    let axis = wrap(cx.int(axis, 0), data.len())?;
    Some([&data[..axis], indices, &data[axis + 1..]].concat())
}

/// Elements of a vector at constant positions.
fn picked(cx: &Context) -> Option<Elements> {
    if cx.shape(0)?.len() != 1 || cx.shape(1)?.len() > 1 {
        return None;
    }
    let data = cx.elements(0)?;
    let element = |index: &Dim| Some(data[wrap(as_constant(index)?, data.len())?].clone());
    Some(cx.elements(1)?.iter().map(|index| element(index).unwrap_or(Dim::Unknown)).collect())
}

fn gather_elements(cx: &Context) -> Facts {
    one(cx.dtype(0), cx.shape_of(1))
}

fn gather_nd(cx: &Context) -> Facts {
    let shape = || {
        let (data, indices) = (cx.shape(0)?, cx.shape(1)?);
        let batch = usize::try_from(cx.int("batch_dims", 0)).ok()?;
        let (depth, outer) = indices.split_last()?;
        let depth = usize::try_from(depth.as_fixed()?).ok()?;
        let inner = data.get(batch.checked_add(depth)?..)?;
        Some([outer, inner].concat())
    };
    one(cx.dtype(0), shape())
}

fn top_k(cx: &Context) -> Facts {
    let k = match cx.input(1) {
        Some(_) => cx.scalar(1).unwrap_or(Dim::Unknown),
        None => cx.size("k"),
    };
    let shape = cx.shape_of(0).and_then(|mut shape| {
        let axis = cx.axis(-1, shape.len())?;
        shape[axis] = k;
        Some(shape)
    });
    vec![fact(cx.dtype(0), shape.clone()), fact(Some(DType::Int64), shape)]
}

fn one_hot(cx: &Context) -> Facts {
    let shape = cx.shape_of(0).and_then(|mut shape| {
        let axis = cx.axis(-1, shape.len() + 1)?;
        shape.insert(axis, cx.scalar(1).unwrap_or(Dim::Unknown));
        Some(shape)
    });
    one(cx.dtype(2), shape)
}

fn non_zero(cx: &Context) -> Facts {
    let rank = cx.shape(0).map_or(Dim::Unknown, |shape| constant(shape.len() as i64));
    typed(DType::Int64, Some(vec![rank, Dim::Unknown]))
}

fn compress(cx: &Context) -> Facts {
    if !cx.node.attributes.contains_key("axis") {
        return one(cx.dtype(0), Some(ranked(1)));
    }
    let shape = cx.shape_of(0).and_then(|mut shape| {
        let axis = cx.axis(0, shape.len())?;
        shape[axis] = Dim::Unknown;
        Some(shape)
    });
    one(cx.dtype(0), shape)
}

fn unique(cx: &Context) -> Facts {
    let mut facts = compress(cx);
    facts.extend((1..cx.node.outputs.len()).map(|_| fact(Some(DType::Int64), Some(ranked(1)))));
    facts
}

fn non_max_suppression(_: &Context) -> Facts {
    typed(DType::Int64, Some(vec![Dim::Unknown, constant(3)]))
}
