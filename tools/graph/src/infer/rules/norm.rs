//! Rules for normalizations and softmax: the input's shape, and statistics as further outputs.

use super::elementwise::keep;
use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Facts, fact, one};
use crate::infer::poly::constant;
use hpp_schema::{DType, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "Softmax" | "LogSoftmax" | "LpNormalization" | "InstanceNormalization" | "GroupNormalization" => keep,
        "LayerNormalization" => layer,
        "SimplifiedLayerNormalization" | "RMSNormalization" => simplified,
        "BatchNormalization" => batch,
        _ => return None,
    })
}

/// Mean and inverse deviation have the type in `stash_type` and size 1 from `axis` on.
fn layer(cx: &Context) -> Facts {
    let stats = fact(cx.dtype_attribute("stash_type").or(Some(DType::Float32)), reduced(cx));
    vec![cx.same(0), stats.clone(), stats]
}

/// The output has the type of the scale, not of the input.
fn simplified(cx: &Context) -> Facts {
    let stats = fact(cx.dtype_attribute("stash_type").or(Some(DType::Float32)), reduced(cx));
    vec![fact(cx.dtype(1).or(cx.dtype(0)), cx.shape_of(0)), stats]
}

fn reduced(cx: &Context) -> Option<Shape> {
    let mut shape = cx.shape_of(0)?;
    let axis = cx.axis(-1, shape.len())?;
    shape[axis..].fill(constant(1));
    Some(shape)
}

/// Running statistics have the shapes and types of inputs 3 and 4.
fn batch(cx: &Context) -> Facts {
    let mut facts = vec![cx.same(0), cx.same(3), cx.same(4)];
    facts.extend((3..cx.node.outputs.len()).map(|at| cx.same(at)));
    facts
}

/// Fused skip normalizations: statistics are float, the fourth output is the sum.
pub(super) fn skip(cx: &Context) -> Facts {
    let stats = fact(Some(DType::Float32), reduced(cx));
    vec![cx.same(0), stats.clone(), stats, cx.same(0)]
}

/// Every output has the type and shape of input 0.
pub(super) fn keep_all(cx: &Context) -> Facts {
    vec![cx.same(0); cx.node.outputs.len()]
}

/// `com.microsoft::EmbedLayerNormalization`: ids and tables to embeddings.
pub(super) fn embed(cx: &Context) -> Facts {
    let shape = cx.shape(0).map(|ids| [ids.as_slice(), &[cx.dim(2, 1)]].concat());
    let mask = one(Some(DType::Int32), Some(vec![cx.dim(0, 0)])).remove(0);
    let embedded = fact(cx.dtype(2), shape);
    vec![embedded.clone(), mask, embedded]
}
