//! Rules for other operators of `com.microsoft`: fused activations and products, products with packed weights, experts.

use super::contract::{fused_matmul, gemm, product_shape};
use super::elementwise::keep;
use super::norm;
use super::norm::{embed, keep_all, skip};
use super::quantize::gather_block;
use crate::infer::context::{Context, Rule};
use crate::infer::fact::{Facts, fact, one};
use crate::infer::poly::{constant, divide};
use hpp_schema::{DType, Dim, Shape};

pub(super) fn rule(op: &str) -> Option<Rule> {
    Some(match op {
        "BiasAdd"
        | "BiasGelu"
        | "BiasSoftmax"
        | "BranchwiseRMSNorm"
        | "FastGelu"
        | "GatedAdd"
        | "GatedRMSNorm"
        | "Gelu"
        | "GroupNorm"
        | "HyperConnectionPostMix"
        | "Inverse"
        | "MoE"
        | "MRotaryEmbedding"
        | "QMoE"
        | "QuickGelu"
        | "RotaryEmbedding"
        | "ScaledSiLU"
        | "Trilu" => keep,
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => skip,
        "SkipGroupNorm" | "EngramGate" => keep_all,
        "GemmaRotaryEmbedding" => rotate_both,
        "EmbedLayerNormalization" => embed,
        "SimplifiedLayerNormalization" => return norm::rule(op),
        "MatMulNBits" | "MatMulBnb4" | "MatMulFpQ4" => weight_product,
        "MatMulBlockQuantizedFp4Weight" | "MatMulBlockQuantizedFp8Weight" => block_product,
        "MatMulNBitsMlp" => mlp,
        "MatMulNBitsQkv" => qkv,
        "FusedMatMul" | "FusedMatMulActivation" | "TransposeMatMul" => fused_matmul,
        "FusedGemm" => gemm,
        "GemmFastGelu" => product,
        "FusedConv" => return super::conv::rule("Conv"),
        "GatherBlockQuantized" => gather_block,
        "BiasSplitGelu" => split_gelu,
        "HyperConnectionPreMix" => premix,
        "DynamicSparseAttention" => all_first_typed,
        "SparseAttentionIndexer" | "PackedSparseAttentionIndexer" => indexer,
        "RemovePadding" => remove_padding,
        "NhwcConv" | "RelativePositionBias" | "GatedRelativePositionBias" | "RestorePadding" | "GridSample" => {
            first_typed
        }
        _ => return None,
    })
}

/// Operators that ONNX Runtime also registers in the default domain.
pub(super) fn adopted(op: &str) -> Option<Rule> {
    match op {
        "FusedConv" | "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => rule(op),
        _ => None,
    }
}

/// Inputs 1 and 2 are the query and the key.
fn rotate_both(cx: &Context) -> Facts {
    vec![cx.same(1), cx.same(2)]
}

fn product(cx: &Context) -> Facts {
    one(cx.dtype(0), product_shape(cx, 0, 1))
}

/// The shape of input 0 with another last dimension.
fn with_last(cx: &Context, last: Dim) -> Option<Shape> {
    let mut shape = cx.shape_of(0)?;
    *shape.last_mut()? = last;
    Some(shape)
}

/// Weights are packed, so attribute `N` gives the width of the product.
fn weight_product(cx: &Context) -> Facts {
    one(cx.dtype(0), with_last(cx, cx.size("N")))
}

fn block_product(cx: &Context) -> Facts {
    one(cx.dtype(0), with_last(cx, cx.dim(1, 0)))
}

fn mlp(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), with_last(cx, cx.size("N"))), cx.same(0)]
}

fn qkv(cx: &Context) -> Facts {
    let wide = |name| fact(cx.dtype(0), with_last(cx, cx.size(name)));
    vec![wide("Nq"), wide("Nkv"), wide("Nkv"), cx.same(0)]
}

fn first_typed(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), None)]
}

fn all_first_typed(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), None); cx.node.outputs.len()]
}

/// Selected positions per query first, then caches. The packed variant also has the start of each query's positions.
fn indexer(cx: &Context) -> Facts {
    let packed = cx.node.op_type != "SparseAttentionIndexer";
    let positions = if packed { [0, 1, 5].as_slice() } else { &[0] };
    let dtype = |at| if positions.contains(&at) { Some(DType::Int32) } else { cx.dtype(0) };
    (0..cx.node.outputs.len()).map(|at| fact(dtype(at), None)).collect()
}

/// Tokens without padding, then their original positions.
fn remove_padding(cx: &Context) -> Facts {
    let counts = (1..cx.node.outputs.len()).map(|_| fact(Some(DType::Int32), None));
    std::iter::once(fact(cx.dtype(0), None)).chain(counts).collect()
}

fn split_gelu(cx: &Context) -> Facts {
    one(cx.dtype(0), with_last(cx, divide(&cx.dim(0, -1), &constant(2))))
}

/// Reduces streams `[.., C, H]`, or `[.., C * H]` if `num_branches` is given, to `[.., H]`.
fn premix(cx: &Context) -> Facts {
    let shape = cx.shape_of(0).and_then(|mut shape| match cx.int("num_branches", 0) {
        0 if shape.len() > 1 => {
            shape.remove(shape.len() - 2);
            Some(shape)
        }
        0 => None,
        branches => with_last(cx, divide(shape.last()?, &constant(branches))),
    });
    one(cx.dtype(0), shape)
}
