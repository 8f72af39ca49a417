//! Classifies operators for structural analysis: table lookups, data movement, attention, state updates. Does not know
//! shapes or kernels.

use crate::{Attribute, Node};
use std::ops::Range;

/// How a fused operator updates a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedState {
    /// Present is past with new tokens appended along the axis; the two may share a buffer of fixed capacity. Pages
    /// have no axis.
    SharedBuffer(Option<usize>),
    /// Present is past with new tokens appended along the axis, in a separate buffer.
    Append(usize),
    /// Present has the shape of past.
    Replace,
}

/// Whether the operator belongs to the ONNX domain.
pub fn is_standard(node: &Node) -> bool {
    matches!(node.domain.as_str(), "" | "ai.onnx")
}

fn is_known(node: &Node) -> bool {
    is_standard(node) || matches!(node.domain.as_str(), "com.microsoft" | "ai.onnx.ml")
}

/// The axes whose sizes a `Shape` node reads of an input of this rank: its attributes `start` and `end`, counted from the end where negative.
pub fn shape_axes(node: &Node, rank: usize) -> Range<usize> {
    let rank = i64::try_from(rank).unwrap_or(i64::MAX);
    let bound = |name: &str, default: i64| {
        let given = node.int(name).unwrap_or(default);
        let at = if given < 0 { given.saturating_add(rank) } else { given };
        usize::try_from(at.clamp(0, rank)).unwrap_or(0)
    };
    let (start, end) = (bound("start", 0), bound("end", rank));
    start..end.max(start)
}

/// Whether the node reads only the shape of its input, so that the edge carries no data.
pub fn reads_shape_only(node: &Node) -> bool {
    is_standard(node) && matches!(node.op_type.as_str(), "Shape" | "Size")
}

/// Whether the node is known to be deterministic, so that several partitions may each compute it.
pub(crate) fn is_recomputable(node: &Node) -> bool {
    let random = matches!(
        node.op_type.as_str(),
        "RandomNormal"
            | "RandomNormalLike"
            | "RandomUniform"
            | "RandomUniformLike"
            | "Multinomial"
            | "Bernoulli"
            | "Dropout"
            | "Sampling"
            | "BiasDropout"
            | "BitmaskDropout"
    );
    is_known(node) && !random
}

/// Whether the node reads a table by index or position without arithmetic on the whole table.
pub(crate) fn is_lookup(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "Gather"
            | "GatherBlockQuantized"
            | "GatherElements"
            | "GatherND"
            | "EmbedLayerNormalization"
            | "QEmbedLayerNormalization"
            | "RotaryEmbedding"
            | "GemmaRotaryEmbedding"
            | "Resize"
            | "Upsample"
            | "OneHot"
            | "RelativePositionBias"
            | "GatedRelativePositionBias"
    )
}

/// Whether the node moves, copies, converts or reinterprets elements without combining them.
pub fn is_movement(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "Identity"
            | "Cast"
            | "CastLike"
            | "Concat"
            | "Slice"
            | "Split"
            | "Transpose"
            | "Reshape"
            | "Flatten"
            | "Unsqueeze"
            | "Squeeze"
            | "Expand"
            | "Tile"
            | "Pad"
            | "Gather"
            | "GatherElements"
            | "GatherND"
            | "Scatter"
            | "ScatterElements"
            | "ScatterND"
            | "TensorScatter"
            | "Where"
            | "Trilu"
            | "Compress"
            | "DepthToSpace"
            | "SpaceToDepth"
            | "ReverseSequence"
            | "QuantizeLinear"
            | "DequantizeLinear"
            | "DynamicQuantizeLinear"
            | "SequenceConstruct"
            | "SequenceAt"
            | "ConcatFromSequence"
            | "SplitToSequence"
    )
}

/// Whether the node is elementwise (with broadcasting), a normalization, a reduction, a scan or a selection. It
/// contracts no two tensors, so a matrix that it reads is a mask, a bias or a scale, not a projection.
pub(crate) fn is_elementwise_or_reduction(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "Add"
            | "Sub"
            | "Mul"
            | "Div"
            | "Pow"
            | "Mod"
            | "Min"
            | "Max"
            | "Sum"
            | "Mean"
            | "And"
            | "Or"
            | "Xor"
            | "Not"
            | "Equal"
            | "Greater"
            | "GreaterOrEqual"
            | "Less"
            | "LessOrEqual"
            | "BitwiseAnd"
            | "BitwiseOr"
            | "BitwiseXor"
            | "BitwiseNot"
            | "BitShift"
            | "Neg"
            | "Abs"
            | "Sign"
            | "Floor"
            | "Ceil"
            | "Round"
            | "Exp"
            | "Log"
            | "Sqrt"
            | "Reciprocal"
            | "Sin"
            | "Cos"
            | "Tan"
            | "Tanh"
            | "Erf"
            | "Sigmoid"
            | "HardSigmoid"
            | "HardSwish"
            | "Relu"
            | "LeakyRelu"
            | "PRelu"
            | "Elu"
            | "Selu"
            | "Celu"
            | "Gelu"
            | "FastGelu"
            | "QuickGelu"
            | "BiasGelu"
            | "Mish"
            | "Swish"
            | "Silu"
            | "Softplus"
            | "Softsign"
            | "ThresholdedRelu"
            | "Clip"
            | "IsNaN"
            | "IsInf"
            | "LayerNormalization"
            | "SimplifiedLayerNormalization"
            | "SkipLayerNormalization"
            | "SkipSimplifiedLayerNormalization"
            | "RMSNormalization"
            | "GroupNormalization"
            | "InstanceNormalization"
            | "BatchNormalization"
            | "GroupNorm"
            | "SkipGroupNorm"
            | "CumSum"
            | "Range"
            | "ConstantOfShape"
            | "NonZero"
            | "TopK"
            | "ArgMax"
            | "ArgMin"
            | "Softmax"
            | "LogSoftmax"
            | "Dropout"
    ) || node.op_type.starts_with("Reduce")
}

/// Whether the node is a complete attention, or another token mixer, in one operator.
pub fn is_attention(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "Attention"
            | "QAttention"
            | "MultiHeadAttention"
            | "GroupQueryAttention"
            | "PagedAttention"
            | "SparseAttention"
            | "LongformerAttention"
            | "PackedAttention"
            | "PackedMultiHeadAttention"
            | "DecoderAttention"
            | "DecoderMaskedSelfAttention"
            | "DecoderMaskedMultiHeadAttention"
            | "LinearAttention"
    )
}

/// Whether the node is a matrix product of two tensors in plain layout.
pub(crate) fn is_contraction(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "MatMul" | "Gemm" | "Einsum" | "FusedMatMul" | "MatMulInteger" | "DynamicQuantizeMatMul" | "TransposeMatMul"
    )
}

/// Whether the node is a matrix product, including convolutions, experts and products with packed or quantized weights.
pub fn is_product(node: &Node) -> bool {
    let with_weights = matches!(
        node.op_type.as_str(),
        "FusedGemm" | "MatMulNBits" | "MatMulBnb4" | "MatMulFpQ4" | "QLinearMatMul" | "QGemm" | "Conv" | "MoE" | "QMoE"
    );
    is_contraction(node) || with_weights
}

/// Whether the node is a softmax.
pub(crate) fn is_softmax(node: &Node) -> bool {
    matches!(node.op_type.as_str(), "Softmax" | "BiasSoftmax" | "QLinearSoftmax")
}

/// For an operator that updates a state read at `input`: the output that holds the new state, and how it relates to the
/// old one.
pub(crate) fn fused_state(node: &Node, input: usize) -> Option<(usize, FusedState)> {
    use FusedState::*;
    let token_axis = Append(2);
    Some(match (node.op_type.as_str(), input) {
        ("GroupQueryAttention", 3 | 4) => (input - 2, SharedBuffer(Some(2))),
        ("PagedAttention", 3 | 4) => (input - 2, SharedBuffer(None)),
        ("SparseAttention", 3 | 4) => (input - 2, token_axis),
        ("MultiHeadAttention", 6 | 7) => (input - 5, token_axis),
        ("DecoderMaskedMultiHeadAttention", 5 | 6) => (input - 4, token_axis),
        ("Attention", 4 | 5) if is_standard(node) => (input - 3, token_axis),
        ("Attention" | "DecoderMaskedSelfAttention", 4) => (1, Append(3)),
        ("LinearAttention" | "CausalConvWithState", 3) => (1, Replace),
        ("LSTM", 5 | 6) => (input - 4, Replace),
        ("GRU" | "RNN", 5) => (1, Replace),
        _ => return None,
    })
}

/// Whether the node has bodies (`If`, `Loop`, `Scan`), whose nodes are not in the graph.
pub(crate) fn has_body(node: &Node) -> bool {
    node.attributes.values().any(|a| matches!(a, Attribute::Body(_)))
}

/// Whether the node runs its body once per step (`Loop`, `Scan`).
pub(crate) fn repeats_body(node: &Node) -> bool {
    is_standard(node) && matches!(node.op_type.as_str(), "Loop" | "Scan")
}
