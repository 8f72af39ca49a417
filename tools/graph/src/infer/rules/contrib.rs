//! The rest of `com.microsoft`: fused activations and products, quantized products, mixtures of experts.

use super::broadcast::all_inputs;
use super::contract::{fused_matmul, gemm};
use super::elementwise::keep;
use super::norm::{embed, keep_all, skip};
use super::quantize::gather_block;
use super::{generate, indexing, norm, slicing};
use crate::infer::context::{Context, wrap};
use crate::infer::fact::{Fact, Facts, Rule, fact, one, typed};
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
        | "Inverse"
        | "MoE"
        | "MRotaryEmbedding"
        | "QMoE"
        | "QuickGelu"
        | "RotaryEmbedding"
        | "ScaledSiLU"
        | "Trilu"
        | "ComplexMul"
        | "ComplexMulConj"
        | "HyperConnectionPostMix" => keep,
        "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => skip,
        "SkipGroupNorm" | "EngramGate" | "GemmaRotaryEmbedding" => keep_all_typed,
        "EmbedLayerNormalization" => embed,
        "SimplifiedLayerNormalization" => return norm::rule(op),
        "MatMulNBits" | "MatMulBnb4" | "MatMulFpQ4" => weight_product,
        "MatMulBlockQuantizedFp4Weight" | "MatMulBlockQuantizedFp8Weight" => block_product,
        "MatMulNBitsMlp" => mlp,
        "MatMulNBitsQkv" => qkv,
        "FusedMatMul" | "FusedMatMulActivation" | "TransposeMatMul" => fused_matmul,
        "FusedGemm" | "GemmFastGelu" => gemm_like,
        "GemmFloat8" => gemm_float8,
        "SparseToDenseMatMul" => second_typed,
        "NGramRepeatBlock" => keep_second,
        "DynamicTimeWarping" => warping,
        "FusedConv" => return super::conv::rule("Conv"),
        "GatherBlockQuantized" => gather_block,
        "GatherND" => indexing::gather_nd,
        "Unique" => indexing::unique,
        "Range" => generate::range,
        "Pad" => return slicing::rule("Pad"),
        "ExpandDims" => expand_dims,
        "BiasSplitGelu" => split_gelu,
        "BiasDropout" | "BitmaskDropout" | "BitmaskBiasDropout" => dropout,
        "HyperConnectionPreMix" => premix,
        "ReduceSumInteger" => untold,
        "DynamicSparseAttention" => all_first_typed,
        "SparseAttentionIndexer" | "PackedSparseAttentionIndexer" => indexer,
        "RemovePadding" => remove_padding,
        "IsAllFinite" => finite,
        "Tokenizer" => tokenizer,
        "BeamSearch" | "GreedySearch" | "Sampling" | "WhisperBeamSearch" => tokens,
        "CDist"
        | "ConvTransposeWithDynamicPads"
        | "CropAndResize"
        | "Irfft"
        | "Rfft"
        | "NhwcConv"
        | "NhwcFusedConv"
        | "NhwcMaxPool"
        | "TorchEmbedding"
        | "UnfoldTensor"
        | "RelativePositionBias"
        | "GatedRelativePositionBias"
        | "RestorePadding"
        | "MaxpoolWithMask"
        | "GridSample"
        | "SampleOp"
        | "QOrderedAttention"
        | "QOrderedGelu"
        | "QOrderedLayerNormalization"
        | "QOrderedLongformerAttention"
        | "QOrderedMatMul" => first_typed,
        _ => return None,
    })
}

/// Operators ONNX Runtime registers in the default domain too.
pub(super) fn adopted(op: &str) -> Option<Rule> {
    match op {
        "FusedConv" | "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization" => rule(op),
        _ => None,
    }
}

fn keep_all_typed(cx: &Context) -> Facts {
    if cx.node.op_type == "GemmaRotaryEmbedding" { vec![cx.same(1), cx.same(2)] } else { keep_all(cx) }
}

fn gemm_like(cx: &Context) -> Facts {
    if cx.node.op_type == "FusedGemm" {
        return gemm(cx);
    }
    one(cx.dtype(0), super::contract::product_shape(cx, 0, 1))
}

/// Input 0's shape with another last dimension.
fn with_last(cx: &Context, last: Dim) -> Option<Shape> {
    let mut shape = cx.shape_of(0)?;
    *shape.last_mut()? = last;
    Some(shape)
}

/// Weights are packed: `N` says how wide the product is.
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

fn gemm_float8(cx: &Context) -> Facts {
    let dtype = cx.dtype_attribute("dtype").or(Some(DType::Float32));
    one(dtype, super::contract::gemm_shape(cx, 0, 1))
}

fn second_typed(cx: &Context) -> Facts {
    one(cx.dtype(1), None)
}

fn keep_second(cx: &Context) -> Facts {
    vec![cx.same(1)]
}

/// The path through a cost matrix: two rows of indices.
fn warping(_: &Context) -> Facts {
    typed(DType::Int32, Some(vec![constant(2), Dim::Unknown]))
}

fn first_typed(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), None)]
}

fn all_first_typed(cx: &Context) -> Facts {
    vec![fact(cx.dtype(0), None); cx.node.outputs.len()]
}

/// Positions chosen for each query come first (and, packed, where each query's begin), then caches.
fn indexer(cx: &Context) -> Facts {
    let packed = cx.node.op_type != "SparseAttentionIndexer";
    let positions = if packed { [0, 1, 5].as_slice() } else { &[0] };
    let dtype = |at| if positions.contains(&at) { Some(DType::Int32) } else { cx.dtype(0) };
    (0..cx.node.outputs.len()).map(|at| fact(dtype(at), None)).collect()
}

/// Tokens without padding, then where they came from.
fn remove_padding(cx: &Context) -> Facts {
    let counts = (1..cx.node.outputs.len()).map(|_| fact(Some(DType::Int32), None));
    std::iter::once(fact(cx.dtype(0), None)).chain(counts).collect()
}

fn untold(cx: &Context) -> Facts {
    one(cx.dtype_attribute("data_type"), None)
}

fn expand_dims(cx: &Context) -> Facts {
    let shape = cx.shape_of(0).and_then(|mut shape| {
        let at = wrap(*cx.constants(1)?.first()?, shape.len() + 1)?;
        shape.insert(at, constant(1));
        Some(shape)
    });
    one(cx.dtype(0), shape)
}

fn split_gelu(cx: &Context) -> Facts {
    one(cx.dtype(0), with_last(cx, divide(&cx.dim(0, -1), &constant(2))))
}

fn dropout(cx: &Context) -> Facts {
    let bits = cx.node.op_type != "BiasDropout";
    let mask = if bits { fact(Some(DType::Uint32), None) } else { fact(Some(DType::Bool), cx.shape_of(0)) };
    vec![fact(cx.dtype(0), all_inputs_or_first(cx)), mask]
}

fn all_inputs_or_first(cx: &Context) -> Option<Shape> {
    if cx.node.op_type == "BitmaskDropout" { cx.shape_of(0) } else { all_inputs(cx).or_else(|| cx.shape_of(0)) }
}

/// Streams `[.., C, H]`, or `[.., C * H]` when the number of branches is given, come down to `[.., H]`.
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

fn finite(_: &Context) -> Facts {
    typed(DType::Bool, None)
}

fn tokenizer(_: &Context) -> Facts {
    typed(DType::String, None)
}

/// Whole generation loops yield token ids, then scores of a type they do not tell.
fn tokens(cx: &Context) -> Facts {
    let mut facts = vec![Fact::default(); cx.node.outputs.len()];
    if let Some(first) = facts.first_mut() {
        first.dtype = Some(DType::Int32);
    }
    facts
}
