//! What operators mean for structure: which look up, which move, which attend, which carry state. No shapes, no kernels.

use crate::{Attribute, Node};

/// How a fused operator treats a state it reads and writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FusedState {
    /// Present is past with new tokens after it along `axis`; the two may share a fixed-capacity buffer.
    SharedBuffer(Option<usize>),
    /// Present is past with new tokens after it along the axis, in another buffer.
    Append(usize),
    /// Present has the shape of past.
    Replace,
}

/// Whether this is an operator of the ONNX domain itself.
pub fn is_standard(node: &Node) -> bool {
    matches!(node.domain.as_str(), "" | "ai.onnx")
}

fn is_known(node: &Node) -> bool {
    is_standard(node) || matches!(node.domain.as_str(), "com.microsoft" | "ai.onnx.ml")
}

/// Reads only the shape of its input: not a data edge.
pub(crate) fn reads_shape_only(node: &Node) -> bool {
    is_standard(node) && matches!(node.op_type.as_str(), "Shape" | "Size")
}

/// Gives the same outputs for the same inputs wherever and however often it runs, as far as we know.
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

/// Picks rows of a table by index: the table stays where the lookup is, and no arithmetic is done with it.
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
            | "TfIdfVectorizer"
            | "RelativePositionBias"
            | "GatedRelativePositionBias"
    )
}

/// Moves or reinterprets elements without combining them.
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

/// Works element by element (with broadcasting), so that a matrix it reads is a mask, a bias or a scale.
pub(crate) fn is_elementwise(node: &Node) -> bool {
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

/// A whole attention (or another token mixer) in one operator.
pub fn is_attention(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "Attention"
            | "QAttention"
            | "QOrderedAttention"
            | "QOrderedLongformerAttention"
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

/// A product that contracts two tensors.
pub(crate) fn is_contraction(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "MatMul" | "Gemm" | "Einsum" | "FusedMatMul" | "MatMulInteger" | "DynamicQuantizeMatMul" | "TransposeMatMul"
    )
}

/// A product that contracts two tensors, or one of them with weights that lie in a layout of their own.
pub fn is_product(node: &Node) -> bool {
    let with_weights = matches!(
        node.op_type.as_str(),
        "FusedGemm" | "MatMulNBits" | "MatMulBnb4" | "MatMulFpQ4" | "QLinearMatMul" | "QGemm" | "Conv" | "MoE" | "QMoE"
    );
    is_contraction(node) || with_weights
}

/// Turns scores into weights along an axis.
pub(crate) fn is_softmax(node: &Node) -> bool {
    matches!(node.op_type.as_str(), "Softmax" | "BiasSoftmax" | "QLinearSoftmax")
}

/// For an operator known to carry state: which output holds what is read at `input`, and how.
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

/// Whether the node has bodies, so that it runs other nodes we only see from outside.
pub(crate) fn has_body(node: &Node) -> bool {
    node.attributes.values().any(|a| matches!(a, Attribute::Body(_)))
}
