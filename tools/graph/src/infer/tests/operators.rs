//! Every operator that has a rule, by name: a rule lost is a test failed.

use crate::infer::rules::find;

/// `domain::op`, the default domain left out.
#[rustfmt::skip]
pub(super) const OPERATORS: &[&str] = &[
    "Abs", "Acos", "Acosh", "Add", "Affine", "AffineGrid", "And", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan",
    "Atanh", "Attention", "AveragePool", "BatchNormalization", "Bernoulli", "BitCast", "BitShift", "BitwiseAnd",
    "BitwiseNot", "BitwiseOr", "BitwiseXor", "BlackmanWindow", "Cast", "CastLike", "CausalConvWithState", "Ceil",
    "Celu", "CenterCropPad", "Clip", "Col2Im", "Compress", "Concat", "ConcatFromSequence", "Constant",
    "ConstantOfShape", "Conv", "ConvInteger", "ConvTranspose", "Cos", "Cosh", "Crop", "CumProd", "CumSum", "DFT",
    "DeformConv", "DepthToSpace", "DequantizeLinear", "Det", "DisentangledAttention_TRT", "Div", "Dropout",
    "DynamicQuantizeLinear", "DynamicSlice", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "EyeLike", "Flatten",
    "Floor", "FusedConv", "GRU", "GRUUnit", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm",
    "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "Greater", "GreaterOrEqual", "GridSample",
    "GroupNormalization", "HammingWindow", "HannWindow", "HardSigmoid", "HardSwish", "Hardmax", "Identity", "If",
    "ImageDecoder", "ImageScaler", "InstanceNormalization", "IsInf", "IsNaN", "LRN", "LSTM", "LayerNormalization",
    "LeakyRelu", "Less", "LessOrEqual", "LinearAttention", "Log", "LogSoftmax", "Loop", "LpNormalization", "LpPool",
    "MatMul", "MatMulInteger", "Max", "MaxPool", "MaxRoiPool", "MaxUnpool", "Mean", "MeanVarianceNormalization",
    "MelWeightMatrix", "MemcpyFromHost", "MemcpyToHost", "Min", "Mish", "Mod", "Mul", "Multinomial", "Neg",
    "NegativeLogLikelihoodLoss", "NonMaxSuppression", "NonZero", "Not", "OneHot", "Optional", "OptionalGetElement",
    "OptionalHasElement", "Or", "PRelu", "Pad", "ParametricSoftplus", "Pow", "QLinearConv", "QLinearMatMul",
    "QuantizeLinear", "RMSNormalization", "RNN", "RandomNormal", "RandomNormalLike", "RandomUniform",
    "RandomUniformLike", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp",
    "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "RegexFullMatch", "Relu",
    "Reshape", "Resize", "ReverseSequence", "RoiAlign", "RotaryEmbedding", "Round", "STFT", "Scale", "ScaledTanh",
    "Scan", "Scatter", "ScatterElements", "ScatterND", "Selu", "SequenceAt", "SequenceConstruct", "SequenceEmpty",
    "SequenceErase", "SequenceInsert", "SequenceLength", "SequenceMap", "Shape", "Shrink", "Sigmoid", "Sign",
    "SimplifiedLayerNormalization", "Sin", "Sinh", "Size", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "Slice", "Softmax", "SoftmaxCrossEntropyLoss", "Softplus", "Softsign",
    "SpaceToDepth", "Split", "SplitToSequence", "Sqrt", "Squeeze", "StringConcat", "StringNormalizer", "StringSplit",
    "Sub", "Sum", "SwiGLU", "Swish", "Tan", "Tanh", "TensorScatter", "TfIdfVectorizer", "ThresholdedRelu", "Tile",
    "TopK", "Transpose", "Trilu", "Unique", "Unsqueeze", "Upsample", "Where", "Xor", "com.microsoft::Attention",
    "com.microsoft::BeamSearch", "com.microsoft::BiasAdd", "com.microsoft::BiasDropout", "com.microsoft::BiasGelu",
    "com.microsoft::BiasSoftmax", "com.microsoft::BiasSplitGelu", "com.microsoft::BitmaskBiasDropout",
    "com.microsoft::BitmaskDropout", "com.microsoft::BranchwiseRMSNorm", "com.microsoft::CDist",
    "com.microsoft::CausalConvWithState", "com.microsoft::ComplexMul", "com.microsoft::ComplexMulConj",
    "com.microsoft::ConvTransposeWithDynamicPads", "com.microsoft::CropAndResize", "com.microsoft::DecoderAttention",
    "com.microsoft::DecoderMaskedMultiHeadAttention", "com.microsoft::DecoderMaskedSelfAttention",
    "com.microsoft::DequantizeLinear", "com.microsoft::DynamicQuantizeMatMul", "com.microsoft::DynamicTimeWarping",
    "com.microsoft::EmbedLayerNormalization", "com.microsoft::EngramGate", "com.microsoft::ExpandDims",
    "com.microsoft::FastGelu", "com.microsoft::FusedConv", "com.microsoft::FusedGemm", "com.microsoft::FusedMatMul",
    "com.microsoft::FusedMatMulActivation", "com.microsoft::GatedAdd", "com.microsoft::GatedDeltaNet",
    "com.microsoft::GatedRMSNorm", "com.microsoft::GatedRelativePositionBias", "com.microsoft::GatherBlockQuantized",
    "com.microsoft::GatherND", "com.microsoft::Gelu", "com.microsoft::GemmFastGelu", "com.microsoft::GemmFloat8",
    "com.microsoft::GemmaRotaryEmbedding", "com.microsoft::GreedySearch", "com.microsoft::GridSample",
    "com.microsoft::GroupNorm", "com.microsoft::GroupQueryAttention", "com.microsoft::HyperConnectionPostMix",
    "com.microsoft::HyperConnectionPreMix", "com.microsoft::Inverse", "com.microsoft::Irfft",
    "com.microsoft::IsAllFinite", "com.microsoft::LinearAttention", "com.microsoft::LinearAttentionGate",
    "com.microsoft::LongformerAttention", "com.microsoft::MRotaryEmbedding",
    "com.microsoft::MatMulBlockQuantizedFp4Weight", "com.microsoft::MatMulBlockQuantizedFp8Weight",
    "com.microsoft::MatMulBnb4", "com.microsoft::MatMulFpQ4", "com.microsoft::MatMulInteger16",
    "com.microsoft::MatMulIntegerToFloat", "com.microsoft::MatMulNBits", "com.microsoft::MatMulNBitsMlp",
    "com.microsoft::MatMulNBitsQkv", "com.microsoft::MaxpoolWithMask", "com.microsoft::MoE",
    "com.microsoft::MulInteger", "com.microsoft::MultiHeadAttention", "com.microsoft::NGramRepeatBlock",
    "com.microsoft::NhwcConv", "com.microsoft::NhwcFusedConv", "com.microsoft::NhwcMaxPool",
    "com.microsoft::PackedAttention", "com.microsoft::PackedMultiHeadAttention", "com.microsoft::Pad",
    "com.microsoft::PagedAttention", "com.microsoft::QAttention", "com.microsoft::QGemm",
    "com.microsoft::QLinearAdd", "com.microsoft::QLinearAveragePool", "com.microsoft::QLinearConcat",
    "com.microsoft::QLinearConv", "com.microsoft::QLinearGlobalAveragePool", "com.microsoft::QLinearLeakyRelu",
    "com.microsoft::QLinearMul", "com.microsoft::QLinearReduceMean", "com.microsoft::QLinearSigmoid",
    "com.microsoft::QLinearSoftmax", "com.microsoft::QLinearWhere", "com.microsoft::QMoE",
    "com.microsoft::QuantizeLinear", "com.microsoft::QuickGelu", "com.microsoft::Range",
    "com.microsoft::ReduceSumInteger", "com.microsoft::RelativePositionBias", "com.microsoft::RestorePadding",
    "com.microsoft::Rfft", "com.microsoft::RotaryEmbedding", "com.microsoft::SampleOp", "com.microsoft::Sampling",
    "com.microsoft::ScaledSiLU", "com.microsoft::SimplifiedLayerNormalization", "com.microsoft::SkipGroupNorm",
    "com.microsoft::SkipLayerNormalization", "com.microsoft::SkipSimplifiedLayerNormalization",
    "com.microsoft::SparseAttention", "com.microsoft::SparsePagedAttention", "com.microsoft::SparseToDenseMatMul",
    "com.microsoft::Tokenizer", "com.microsoft::TorchEmbedding", "com.microsoft::TransposeMatMul",
    "com.microsoft::Trilu", "com.microsoft::UnfoldTensor", "com.microsoft::Unique",
    "com.microsoft::VarlenCausalConvWithState", "com.microsoft::WhisperBeamSearch",
    "com.microsoft::DynamicSparseAttention", "com.microsoft::SparseAttentionIndexer", "com.microsoft::PackedSparseAttentionIndexer",
    "com.microsoft::RemovePadding", "com.microsoft::QOrderedMatMul",
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
