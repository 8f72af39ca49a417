//! Every operator with a rule, so that a lost rule fails a test.

use crate::infer::rules::find;

/// `domain::op`, without the default domain.
#[rustfmt::skip]
pub(super) const OPERATORS: &[&str] = &[
    "Abs", "Acos", "Acosh", "Add", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "Attention",
    "AveragePool", "BatchNormalization", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr",
    "BitwiseXor", "BlackmanWindow", "Cast", "CastLike", "CausalConvWithState", "Ceil", "Celu", "Clip", "Col2Im",
    "Compress", "Concat", "ConcatFromSequence", "Constant", "ConstantOfShape", "Conv", "ConvInteger", "ConvTranspose",
    "Cos", "Cosh", "CumProd", "CumSum", "DFT", "DeformConv", "DepthToSpace", "DequantizeLinear", "Div", "Dropout",
    "DynamicQuantizeLinear", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten", "Floor",
    "FusedConv", "GRU", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool", "GlobalMaxPool",
    "Greater", "GreaterOrEqual", "GridSample", "GroupNormalization", "HammingWindow", "HannWindow", "HardSigmoid",
    "HardSwish", "Identity", "If", "InstanceNormalization", "IsInf", "IsNaN", "LSTM", "LayerNormalization", "LeakyRelu",
    "Less", "LessOrEqual", "LinearAttention", "Log", "LogSoftmax", "Loop", "LpNormalization", "MatMul", "MatMulInteger",
    "Max", "MaxPool", "Mean", "Min", "Mish", "Mod", "Mul", "Multinomial", "Neg", "NonMaxSuppression", "NonZero", "Not",
    "OneHot", "Or", "PRelu", "Pad", "Pow", "QLinearConv", "QLinearMatMul", "QuantizeLinear", "RMSNormalization", "RNN",
    "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Range", "Reciprocal", "ReduceL1",
    "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum",
    "ReduceSumSquare", "Relu", "Reshape", "Resize", "ReverseSequence", "RoiAlign", "RotaryEmbedding", "Round", "STFT",
    "Scan", "Scatter", "ScatterElements", "ScatterND", "Selu", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
    "SequenceErase", "SequenceInsert", "SequenceLength", "Shape", "Shrink", "Sigmoid", "Sign",
    "SimplifiedLayerNormalization", "Sin", "Sinh", "Size", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    "Slice", "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Split", "SplitToSequence", "Sqrt", "Squeeze", "Sub",
    "Sum", "SwiGLU", "Swish", "Tan", "Tanh", "TensorScatter", "ThresholdedRelu", "Tile", "TopK", "Transpose", "Trilu",
    "Unique", "Unsqueeze", "Upsample", "Where", "Xor", "com.microsoft::Attention", "com.microsoft::BiasAdd",
    "com.microsoft::BiasGelu", "com.microsoft::BiasSoftmax", "com.microsoft::BiasSplitGelu",
    "com.microsoft::BranchwiseRMSNorm", "com.microsoft::CausalConvWithState",
    "com.microsoft::DecoderMaskedMultiHeadAttention", "com.microsoft::DecoderMaskedSelfAttention",
    "com.microsoft::DequantizeLinear", "com.microsoft::DynamicQuantizeMatMul", "com.microsoft::DynamicSparseAttention",
    "com.microsoft::EmbedLayerNormalization", "com.microsoft::EngramGate", "com.microsoft::FastGelu",
    "com.microsoft::FusedConv", "com.microsoft::FusedGemm", "com.microsoft::FusedMatMul",
    "com.microsoft::FusedMatMulActivation", "com.microsoft::GatedAdd", "com.microsoft::GatedDeltaNet",
    "com.microsoft::GatedRMSNorm", "com.microsoft::GatedRelativePositionBias", "com.microsoft::GatherBlockQuantized",
    "com.microsoft::Gelu", "com.microsoft::GemmFastGelu", "com.microsoft::GemmaRotaryEmbedding",
    "com.microsoft::GridSample", "com.microsoft::GroupNorm", "com.microsoft::GroupQueryAttention",
    "com.microsoft::HyperConnectionPostMix", "com.microsoft::HyperConnectionPreMix", "com.microsoft::Inverse",
    "com.microsoft::LinearAttention", "com.microsoft::LinearAttentionGate", "com.microsoft::MRotaryEmbedding",
    "com.microsoft::MatMulBlockQuantizedFp4Weight", "com.microsoft::MatMulBlockQuantizedFp8Weight",
    "com.microsoft::MatMulBnb4", "com.microsoft::MatMulFpQ4", "com.microsoft::MatMulIntegerToFloat",
    "com.microsoft::MatMulNBits", "com.microsoft::MatMulNBitsMlp", "com.microsoft::MatMulNBitsQkv",
    "com.microsoft::MoE", "com.microsoft::MultiHeadAttention", "com.microsoft::NhwcConv",
    "com.microsoft::PackedAttention", "com.microsoft::PackedMultiHeadAttention",
    "com.microsoft::PackedSparseAttentionIndexer", "com.microsoft::PagedAttention", "com.microsoft::QAttention",
    "com.microsoft::QGemm", "com.microsoft::QLinearAdd", "com.microsoft::QLinearAveragePool",
    "com.microsoft::QLinearConcat", "com.microsoft::QLinearConv", "com.microsoft::QLinearGlobalAveragePool",
    "com.microsoft::QLinearLeakyRelu", "com.microsoft::QLinearMul", "com.microsoft::QLinearReduceMean",
    "com.microsoft::QLinearSigmoid", "com.microsoft::QLinearSoftmax", "com.microsoft::QLinearWhere",
    "com.microsoft::QMoE", "com.microsoft::QuantizeLinear", "com.microsoft::QuickGelu",
    "com.microsoft::RelativePositionBias", "com.microsoft::RemovePadding", "com.microsoft::RestorePadding",
    "com.microsoft::RotaryEmbedding", "com.microsoft::ScaledSiLU", "com.microsoft::SimplifiedLayerNormalization",
    "com.microsoft::SkipGroupNorm", "com.microsoft::SkipLayerNormalization",
    "com.microsoft::SkipSimplifiedLayerNormalization", "com.microsoft::SparseAttention",
    "com.microsoft::SparseAttentionIndexer", "com.microsoft::SparsePagedAttention", "com.microsoft::TransposeMatMul",
    "com.microsoft::Trilu", "com.microsoft::VarlenCausalConvWithState",
];

#[test]
fn all_have_rules() {
    for operator in OPERATORS {
        let (domain, op) = operator.rsplit_once("::").unwrap_or(("", operator));
        assert!(find(domain, op).is_some(), "{operator}");
    }
    assert!(find("", "MatMulNBits").is_none());
    assert!(find("other.domain", "MatMul").is_none());
}
