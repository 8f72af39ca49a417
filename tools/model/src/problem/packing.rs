//! What weights take on the host beyond their bytes in the model, once its kernels have packed them.

use hpp_graph::{Graph, Node, Origin};
use hpp_schema::DType;

/// Bytes more for each 1000 of all weights.
///
/// - A product of 4- or 8-bit weights that computes in integers (`accuracy_level` 4) keeps a float32 sum of each block of weights
///   beside them: `N * ceil(K / block_size) * 4` bytes (`MlasQNBitGemmPackQuantBData` in ONNX Runtime).
/// - Weights in 16-bit floating point are widened to 32 bits, because the host's kernels compute in no less.
pub(super) fn packing(graph: &Graph) -> u64 {
    let sums: u64 = graph.nodes.iter().map(block_sums).sum();
    let weights = || graph.values.iter().filter_map(|value| Some((value.dtype, weight(&value.origin)?)));
    let is_half = |dtype: Option<DType>| matches!(dtype, Some(DType::Float16 | DType::Bfloat16));
    let widened: u64 = weights().filter(|(dtype, _)| is_half(*dtype)).map(|(_, bytes)| bytes).sum();
    let all: u64 = weights().map(|(_, bytes)| bytes).sum();
    (sums + widened).saturating_mul(1000).checked_div(all).unwrap_or(0)
}

fn weight(origin: &Origin) -> Option<u64> {
    match origin {
        Origin::Weight(weight) => Some(weight.bytes),
        _ => None,
    }
}

fn block_sums(node: &Node) -> u64 {
    let size = |name: &str| node.int(name).and_then(|size| u64::try_from(size).ok());
    let is_in_integers = node.op_type == "MatMulNBits" && size("accuracy_level") == Some(4);
    let sizes = (size("N"), size("K"), size("block_size").filter(|size| *size > 0));
    match sizes {
        (Some(n), Some(k), Some(block)) if is_in_integers => n.saturating_mul(k.div_ceil(block)).saturating_mul(4),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Logits, analyse};
    use std::path::Path;

    fn of(name: &str) -> u64 {
        let models = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models"));
        packing(&analyse(&models.join(name), None, Logits::AskedFor).unwrap().graph)
    }

    #[test]
    fn narrow_weights_take_more_and_wide_ones_do_not() {
        assert_eq!(of("genai/llama3-fp32-cpu"), 0);
        // Of a block of 32 weights 16 bytes and a scale of 4, and 4 for the sum; the embedding is not packed.
        let int4 = of("genai/llama3-int4-cpu");
        assert!((100..=200).contains(&int4), "{int4}");
        let half = of("optimum/llama-with-past-fp16");
        assert!((800..=1000).contains(&half), "{half}");
    }
}
