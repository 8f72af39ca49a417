//! Cost of one node for given values of the symbols: floating-point operations, and bytes of weights that it reads.
//!
//! A multiply and an add are two operations. Formulas:
//! - product `[M, K] x [K, N]`: `2 * M * K * N` (the GEMM count of BLAS literature)
//! - convolution: two per output element and kernel tap (Dumoulin and Visin, "A guide to convolution arithmetic")
//! - attention: `2 * S * T * (width of keys + width of values)` per head for both products, causal or not (Vaswani et al.,
//!   "Attention is all you need", section 3.2.1)
//! - mixture of experts: the `k` selected experts per token (Shazeer et al., "Outrageously large neural networks"); an expert under a condition
//!   computes all tokens with the probability that one of them selects it
//! - linear attention: two or three products with the state per token (Yang et al., "Gated delta networks")
//! - data movement: none
//! - any other operator with a rule: one per element
//!
//! Does not know devices.

mod attention;
mod experts;
mod sizes;

use super::rules;
use crate::experts::selection_of;
use crate::{Attribute, Graph, Node, NodeId, Origin, ValueId};
use hpp_schema::Symbols;
use sizes::Sizes;
use std::collections::BTreeSet;

/// Floating-point operations of one node; `None` if a size is missing or the operator has no rule.
///
/// For attention with a cache buffer of fixed capacity, the cache's own dimension counts as the total length. To count
/// one step exactly, set the symbol of that dimension to the current length.
pub fn flops(graph: &Graph, node: NodeId, symbols: &Symbols) -> Option<u64> {
    let sizes = Sizes { graph, node: graph.node(node), symbols };
    match operators(&sizes) {
        Work::Operations(count) => count,
        Work::Move => Some(0),
        Work::PerElement => sizes.widest(),
        Work::Unknown => None,
    }
}

/// Bytes of weights that one node reads; `None` if the number of rows or experts is unknown.
///
/// A gather reads the selected rows, rotary positions read one row of each table per token, a mixture of experts reads
/// at most `k` experts per token, and any other operator reads the whole weight.
pub fn bytes_read(graph: &Graph, node: NodeId, symbols: &Symbols) -> Option<u64> {
    let sizes = Sizes { graph, node: graph.node(node), symbols };
    let weights: BTreeSet<ValueId> = sizes.node.inputs.iter().flatten().chain(&sizes.node.captures).copied().collect();
    let weights = weights.into_iter().filter_map(|id| Some((id, weight_bytes(graph, id)?)));
    let read = weights.map(|(id, bytes)| match WeightAccess::of(graph, sizes.node, id) {
        WeightAccess::All => Some(bytes),
        WeightAccess::Conditional => Some((bytes as f64 * experts::visited_share(&sizes)?) as u64),
        WeightAccess::Rows { indices, axis } => {
            share(bytes, sizes.count(indices)?, sizes.dim(0, sizes.axis(axis, 0)?)?)
        }
        WeightAccess::Positions => share(bytes, sizes.tokens()?, sizes.dim_of(id, 0)?),
        WeightAccess::Experts => {
            let experts = sizes.dim_of(id, 0)?.max(1) as f64;
            Some((bytes as f64 * (experts::selected(&sizes)? / experts).min(1.0)) as u64)
        }
    });
    read.chain([Some(embedded_bytes(sizes.node))]).try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

/// Bytes that a mixture of experts allocates on the CPU beside its operands, on `threads` threads; 0 for other operators, and `None` if a
/// size is missing.
pub fn expert_scratch(graph: &Graph, node: NodeId, symbols: &Symbols, threads: u64) -> Option<u64> {
    let sizes = Sizes { graph, node: graph.node(node), symbols };
    match sizes.node.op_type.as_str() {
        "MoE" | "QMoE" => experts::scratch(&sizes, threads),
        _ => Some(0),
    }
}

/// Bytes of the attention scores that a CPU kernel holds at once; 0 for operators without attention, `None` if a size is missing. Kernels of
/// devices compute scores in tiles instead.
pub fn score_bytes(graph: &Graph, node: NodeId, symbols: &Symbols) -> Option<u64> {
    let sizes = Sizes { graph, node: graph.node(node), symbols };
    match sizes.node.op_type.as_str() {
        "Attention" | "GroupQueryAttention" | "MultiHeadAttention" | "DecoderMaskedMultiHeadAttention" => {
            attention::scores(&sizes)
        }
        _ => Some(0),
    }
}

enum Work {
    Operations(Option<u64>),
    PerElement,
    Move,
    Unknown,
}

fn operators(s: &Sizes) -> Work {
    Work::Operations(match s.node.op_type.as_str() {
        "MatMul"
        | "MatMulInteger"
        | "DynamicQuantizeMatMul"
        | "MatMulIntegerToFloat"
        | "QLinearMatMul"
        | "FusedMatMulActivation"
        | "FusedMatMul"
        | "TransposeMatMul"
        | "Gemm"
        | "FusedGemm"
        | "GemmFastGelu"
        | "QGemm" => s.product(),
        "MatMulNBits" | "MatMulBnb4" | "MatMulFpQ4" => s.packed_product(s.attribute("N")),
        "MatMulBlockQuantizedFp4Weight" | "MatMulBlockQuantizedFp8Weight" => s.packed_product(s.dim(1, 0)),
        "MatMulNBitsMlp" => s.packed_product(s.attribute("N").and_then(|n| n.checked_mul(2))),
        "MatMulNBitsQkv" => s.packed_product(s.qkv_width()),
        "Conv" | "ConvInteger" | "FusedConv" | "CausalConvWithState" | "VarlenCausalConvWithState" => s.convolution(1),
        "QLinearConv" => s.convolution(3),
        "ConvTranspose" => s.transposed_convolution(),
        "Einsum" => s.einsum(),
        "LSTM" | "GRU" | "RNN" => s.recurrent(),
        "MoE" | "QMoE" => experts::flops(s),
        "Attention"
        | "GroupQueryAttention"
        | "SparseAttention"
        | "MultiHeadAttention"
        | "PagedAttention"
        | "SparsePagedAttention"
        | "DecoderMaskedMultiHeadAttention"
        | "PackedMultiHeadAttention"
        | "PackedAttention"
        | "QAttention"
        | "DecoderMaskedSelfAttention" => attention::flops(s),
        "LinearAttention" | "GatedDeltaNet" => attention::linear(s),
        op if MOVES.contains(&op) => return Work::Move,
        "If" if experts::visited_share(s).is_some() => experts::conditional_flops(s),
        "If" | "Loop" | "Scan" => return Work::Unknown,
        op if rules::find(&s.node.domain, op).is_some() => return Work::PerElement,
        _ => return Work::Unknown,
    })
}

/// Operators that only move data.
#[rustfmt::skip]
const MOVES: &[&str] = &[
    "Concat", "Constant", "ConstantOfShape", "DepthToSpace", "Expand", "EyeLike", "Flatten", "Gather",
    "GatherElements", "GatherND", "Identity", "Pad", "Reshape", "Scatter", "ScatterElements", "ScatterND", "Shape",
    "Size", "Slice", "SpaceToDepth", "Split", "Squeeze", "TensorScatter", "Tile", "Transpose", "Trilu", "Unsqueeze",
];

/// The part of a weight that a node reads.
enum WeightAccess {
    All,
    Rows {
        indices: usize,
        axis: &'static str,
    },
    /// One row per token: tables of cosines and sines.
    Positions,
    Experts,
    /// The whole weight, if a token selects the expert.
    Conditional,
}

impl WeightAccess {
    fn of(graph: &Graph, node: &Node, weight: ValueId) -> WeightAccess {
        let slot = node.inputs.iter().position(|input| *input == Some(weight));
        let standard = node.domain != "com.microsoft";
        match (node.op_type.as_str(), slot) {
            ("Gather", Some(0)) => WeightAccess::Rows { indices: 1, axis: "axis" },
            ("GatherBlockQuantized", Some(0 | 2 | 3)) => WeightAccess::Rows { indices: 1, axis: "gather_axis" },
            ("GroupQueryAttention", Some(7 | 8)) | ("PagedAttention", Some(8 | 9)) => WeightAccess::Positions,
            ("SparseAttention", Some(9 | 10)) | ("SparsePagedAttention", Some(11 | 12)) => WeightAccess::Positions,
            ("RotaryEmbedding" | "MRotaryEmbedding", Some(2 | 3)) if !standard => WeightAccess::Positions,
            ("RotaryEmbedding", Some(1 | 2)) if node.inputs.len() > 3 => WeightAccess::Positions,
            ("MoE" | "QMoE", Some(2..)) => WeightAccess::Experts,
            ("If", None) if selection_of(graph, node).is_some() => WeightAccess::Conditional,
            _ => WeightAccess::All,
        }
    }
}

fn weight_bytes(graph: &Graph, id: ValueId) -> Option<u64> {
    match &graph.value(id).origin {
        Origin::Weight(weight) => Some(weight.bytes),
        _ => None,
    }
}

/// `bytes * some / all`, at most `bytes`.
fn share(bytes: u64, some: u64, all: u64) -> Option<u64> {
    if all == 0 {
        return Some(0);
    }
    u64::try_from(u128::from(bytes) * u128::from(some.min(all)) / u128::from(all)).ok()
}

/// Bytes of constants and body weights stored in the node itself.
fn embedded_bytes(node: &Node) -> u64 {
    let bytes = |attribute: &Attribute| match attribute {
        Attribute::Tensor(tensor) => tensor.bytes,
        Attribute::Body(body) => body.weight_bytes,
        _ => 0,
    };
    node.attributes.values().map(bytes).fold(0, u64::saturating_add)
}
