//! Estimates how many bytes host kernels add when they pack a model's weights, and how many packed bytes can be derived
//! instead of read from disk. Reads only samples of the weights.

use crate::host_kernels::reads_widened;
use hpp_graph::{Graph, Node, NodeId, ValueId};
use hpp_onnx::{Model, SampledNumbers, looks_widened, sample_numbers};
use hpp_partition::Packing;
use hpp_schema::DType;
use std::collections::BTreeSet;

/// Number of weights of each kind that are sampled.
const SAMPLED: usize = 8;
/// Columns that host kernels pack together.
const COLUMNS: u64 = 16;
/// Bits of the sum of a block of weights.
const SUM_BITS: u64 = 32;
/// Operators that read every element of an unpacked weight in each pass.
const DENSE_READERS: [&str; 5] = ["MatMul", "Gemm", "FusedMatMul", "Conv", "Transpose"];

/// Packing of this model's weights, averaged over the model.
///
/// - A product of 4- or 8-bit weights that computes in integers (`accuracy_level` 4; experts of 8 bits always) stores a float32 sum for
///   each block of weights, that is, for each scale: `N * ceil(K / block_size) * 4` bytes (`MlasQNBitGemmPackQuantBData` in ONNX
///   Runtime). Without zero points the sums of a `MatMulNBits` are derived from the scales and need no reads; the scales need as many
///   bytes as they have, or half if they look like widened 16-bit numbers.
/// - Host kernels compute 16-bit floating-point weights in 32 bits: the packed bytes are derived from half as many, or fewer with coded
///   exponents.
/// - Float32 matrices are derived from the bytes that samples say they take, in 16-bit words or with coded exponents. Tables of which a
///   pass reads a few rows do not count: they are not read completely in each pass anyway.
///
/// Only what takes at most `compress_permille` of 1000 bytes is compressed. If something is unknown, for example because weights are
/// holes in a sparse file, the estimate errs towards more bytes to read. 16-bit weights for which `is_widened` is false stay as they are.
pub fn packing(model: &Model, graph: &Graph, is_widened: impl Fn(ValueId) -> bool, compress_permille: u32) -> Packing {
    let all = bytes(graph, &weights(graph, |_| true));
    let halves = weights(graph, |id| is_half(graph, id) && is_widened(id));
    let growth = sums(graph, |_| true).saturating_add(bytes(graph, &halves));
    let derived = derived(model, graph, &halves, compress_permille);
    let bytes = derived.iter().map(|kind| kind.bytes).fold(0, u64::saturating_add);
    let unread = derived.iter().map(|kind| kind.bytes.saturating_sub(kind.stored)).fold(0, u64::saturating_add);
    Packing {
        growth_permille: permille(growth, all),
        decompressed_permille: permille(bytes, all.saturating_add(growth)).min(1000),
        read_permille: if bytes == 0 { 0 } else { 1000 - permille(unread, bytes) },
    }
}

/// The largest of these weights that has 16-bit numbers and that the CPU provider widens to 32 bits, in bytes once widened.
pub fn largest_widened(graph: &Graph, weights: impl IntoIterator<Item = ValueId>) -> u64 {
    let is_widened = |id: &ValueId| {
        let mut readers = graph.value(*id).consumers.iter().map(|node| &*graph.node(*node).op_type);
        is_half(graph, *id) && readers.any(reads_widened)
    };
    let widened = weights.into_iter().filter(is_widened).filter_map(|id| graph.weight(id));
    widened.map(|weight| weight.bytes.saturating_mul(2)).max().unwrap_or(0)
}

/// Bytes that sessions on the host hold of these nodes besides packed weights: `MatMulNBits` with 16-bit activations keeps a float32 copy of its
/// scales (`scales_fp32_` in ONNX Runtime's matmul_nbits.cc).
pub fn session_copies(graph: &Graph, nodes: &[NodeId]) -> u64 {
    let reads_half = |node: &&Node| {
        node.op_type == "MatMulNBits" && node.inputs.first().copied().flatten().is_some_and(|id| is_half(graph, id))
    };
    let nodes = nodes.iter().map(|id| graph.node(*id)).filter(reads_half);
    let scales: BTreeSet<ValueId> = nodes.filter_map(|node| *node.inputs.get(2)?).collect();
    let copies = scales.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes.saturating_mul(2));
    copies.fold(0, u64::saturating_add)
}

/// Bytes of scales that stay in memory beside their packed copy if mapped weights are locked, as those of a draft are. Operators that
/// compute in integers pack their scales with their weights (`MlasQNBitGemmPackQuantBData`), and ONNX Runtime unmaps only the weights that
/// it has packed.
pub fn scales_beside_packed(graph: &Graph) -> u64 {
    let ids: Vec<ValueId> = scales(graph, |_| true).into_iter().collect();
    bytes(graph, &ids)
}

/// `part / of` in thousandths, rounded down.
fn permille(part: u64, of: u64) -> u64 {
    let share = (u128::from(part) * 1000).checked_div(u128::from(of)).unwrap_or(0);
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// Packed bytes that are derived, and the stored bytes that they are derived from.
#[derive(Clone, Copy, Default)]
struct Derived {
    bytes: u64,
    stored: u64,
}

/// Derived bytes of each kind: sums, scales, 16-bit weights (`halves`), widened matrices.
fn derived(model: &Model, graph: &Graph, halves: &[ValueId], limit: u32) -> [Derived; 4] {
    let (with_sums, as_packed) = (scales(graph, sums_are_derivable), scales(graph, |node| !sums_are_derivable(node)));
    let is_derivable = |id: ValueId| !as_packed.contains(&id);
    let is_wide = |id: ValueId| graph.value(id).dtype == Some(DType::Float32) && is_derivable(id);
    let wide_scales = weights(graph, |id| is_wide(id) && with_sums.contains(&id));
    let matrices = weights(graph, |id| is_wide(id) && !with_sums.contains(&id) && is_matrix(graph, id));
    let halves: Vec<ValueId> = halves.iter().copied().filter(|id| is_derivable(*id)).collect();
    let read = bytes(graph, &wide_scales);
    let stored = if look_widened(model, graph, &wide_scales) { read / 2 } else { read };
    // A region of sums and scales takes at least this share on disk. It is not compressed if that exceeds the limit.
    let with_sums = match limit >= permille_of(stored, read.saturating_mul(2)) {
        true => [Derived { bytes: sums(graph, sums_are_derivable), stored: 0 }, Derived { bytes: read, stored }],
        false => [Derived::default(); 2],
    };
    let wide_halves = bytes(graph, &halves).saturating_mul(2);
    let [first, second] = with_sums;
    let narrow = coded(model, graph, &matrices, (bytes(graph, &matrices), limit));
    [first, second, coded(model, graph, &halves, (wide_halves, limit)), narrow]
}

/// Estimates from samples what these weights (`bytes` as float32) take if they are stored in 16-bit words or with coded exponents.
/// Nothing is derived if one of the sampled weights would not be stored so.
fn coded(model: &Model, graph: &Graph, ids: &[ValueId], (bytes, limit): (u64, u32)) -> Derived {
    let stored = |id: ValueId| {
        let numbers = sample_numbers(model, &graph.value(id).name);
        // Of a hole in a sparse file only the type is known.
        let unknown = is_half(graph, id).then_some(500);
        let permille = numbers.map_or(unknown, |SampledNumbers { precision, exceptions }| {
            Some(precision.coded_permille(exceptions).min(precision.in_words_permille()))
        });
        permille.filter(|permille| *permille < 1000 && *permille <= limit)
    };
    let stored: Option<Vec<u32>> = sampled(ids).map(stored).collect();
    let Some(stored) = stored.filter(|stored| !stored.is_empty()) else { return Derived::default() };
    let mean = stored.iter().map(|permille| u64::from(*permille)).sum::<u64>().div_ceil(stored.len() as u64);
    Derived { bytes, stored: bytes / 1000 * mean + bytes % 1000 * mean / 1000 }
}

fn permille_of(part: u64, of: u64) -> u32 {
    u32::try_from(permille(part, of)).unwrap_or(u32::MAX)
}

/// Whether evenly spaced samples of these weights all look like widened 16-bit numbers.
fn look_widened(model: &Model, graph: &Graph, ids: &[ValueId]) -> bool {
    !ids.is_empty() && sampled(ids).all(|id| looks_widened(model, &graph.value(id).name))
}

/// A few of these weights, evenly spaced.
fn sampled(ids: &[ValueId]) -> impl Iterator<Item = ValueId> {
    let count = ids.len().min(SAMPLED);
    (0..count).map(move |number| ids[number * (ids.len() - 1) / (count - 1).max(1)])
}

fn weights(graph: &Graph, selects: impl Fn(ValueId) -> bool) -> Vec<ValueId> {
    graph.value_ids().filter(|id| graph.weight(*id).is_some() && selects(*id)).collect()
}

fn bytes(graph: &Graph, ids: &[ValueId]) -> u64 {
    ids.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).fold(0, u64::saturating_add)
}

fn is_half(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.value(id).dtype, Some(DType::Float16 | DType::Bfloat16))
}

/// Whether a weight has rows and columns and an operator reads all its elements.
fn is_matrix(graph: &Graph, id: ValueId) -> bool {
    let value = graph.value(id);
    let is_dense_reader = |node: &Node| DENSE_READERS.contains(&node.op_type.as_str());
    let has_columns = value.shape.as_ref().is_some_and(|shape| shape.len() > 1);
    has_columns && value.consumers.iter().any(|id| is_dense_reader(graph.node(*id)))
}

/// Scales of integer products.
fn scales(graph: &Graph, selects: impl Fn(&Node) -> bool) -> BTreeSet<ValueId> {
    graph.nodes.iter().filter(|node| selects(node)).flat_map(scales_of).collect()
}

/// Bytes of the block sums of integer products: a float32 for each scale.
fn sums(graph: &Graph, selects: impl Fn(&Node) -> bool) -> u64 {
    let scales = graph.nodes.iter().filter(|node| selects(node)).flat_map(scales_of);
    let sums = scales.filter_map(|id| {
        let (weight, dtype) = (graph.weight(id)?, graph.value(id).dtype?);
        weight.bytes.saturating_mul(SUM_BITS).checked_div(dtype.bits()?)
    });
    sums.fold(0, u64::saturating_add)
}

fn size(node: &Node, name: &str) -> Option<u64> {
    node.int(name).and_then(|size| u64::try_from(size).ok())
}

/// The scales that an operator packs with its weights, because it computes in integers; none of other operators.
fn scales_of(node: &Node) -> impl Iterator<Item = ValueId> + '_ {
    let is_level_4 = size(node, "accuracy_level") == Some(4);
    let inputs: &[usize] = match node.op_type.as_str() {
        "MatMulNBits" if is_level_4 => &[2],
        // MLAS multiplies no 8-bit weights with floats.
        "QMoE" if is_in_blocks(node) && (is_level_4 || size(node, "expert_weight_bits") == Some(8)) => &[3, 6],
        _ => &[],
    };
    inputs.iter().filter_map(|at| *node.inputs.get(*at)?)
}

/// Whether the weights of experts have a scale for each block instead of one for each row.
fn is_in_blocks(experts: &Node) -> bool {
    size(experts, "block_size").is_some_and(|size| size > 0)
}

/// Whether the block sums of an integer product can be derived from its scales in the packed layout.
fn sums_are_derivable(node: &Node) -> bool {
    let is_symmetric = node.inputs.get(3).is_none_or(Option::is_none);
    let columns = size(node, "N").is_some_and(|n| n % COLUMNS == 0);
    node.op_type == "MatMulNBits" && is_symmetric && columns && matches!(size(node, "bits"), None | Some(4 | 8))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Analysis, LogitsMode, analyse};
    use hpp_onnx::Storage;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn fixture(name: &str) -> PathBuf {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models")).join(name)
    }

    fn read(path: &Path) -> Analysis {
        analyse(path, None, LogitsMode::Requested).unwrap()
    }

    fn packing_of(path: &Path) -> Packing {
        packing_within(path, 1000)
    }

    fn packing_within(path: &Path, limit: u32) -> Packing {
        let Analysis { model, graph, .. } = read(path);
        packing(&model, &graph, |_| true, limit)
    }

    /// A copy of a fixture whose float32 weights, scales among them, are changed number by number.
    fn changed(name: &str, change: impl Fn(u32) -> u32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for file in fs::read_dir(fixture(name)).unwrap().map(Result::unwrap).filter(|f| f.path().is_file()) {
            fs::copy(file.path(), dir.path().join(file.file_name())).unwrap();
        }
        let model = read(dir.path()).model;
        let weights = model.weights();
        let mut files: Vec<Vec<u8>> = weights.files.iter().map(|file| fs::read(&file.path).unwrap()).collect();
        for (tensor, storage) in model.graph_proto().initializer.iter().zip(&weights.storage) {
            if let (Storage::External(span), true) = (storage, tensor.data_type() == DType::Float32.to_onnx()) {
                let range = span.offset as usize..(span.offset + span.length) as usize;
                for number in files[span.file][range].chunks_exact_mut(4) {
                    let changed = change(u32::from_le_bytes(number.try_into().unwrap()));
                    number.copy_from_slice(&changed.to_le_bytes());
                }
            }
        }
        weights.files.iter().zip(files).for_each(|(file, bytes)| fs::write(&file.path, bytes).unwrap());
        dir
    }

    fn bfloat16(number: u32) -> u32 {
        number & 0xffff_0000
    }

    #[test]
    fn float32_weights_are_not_packed_and_compressed_only_if_that_is_worth_it() {
        let model = fixture("genai/llama3-fp32-cpu");
        let Packing { growth_permille, decompressed_permille, read_permille } = packing_of(&model);
        assert!(growth_permille == 0 && (700..1000).contains(&decompressed_permille));
        // 27 of 32 bits and exceptions.
        assert!((844..870).contains(&read_permille), "{read_permille}");
        assert_eq!(packing_within(&model, 800), Packing::default());
    }

    #[test]
    fn sums_are_derived_from_scales() {
        // A block of 32 weights has 16 bytes and a scale of 4 bytes; its sum adds 4 bytes. The embedding is not packed.
        let packing = packing_of(&fixture("genai/llama3-int4-cpu"));
        let growth = packing.growth_permille;
        assert!((100..=200).contains(&growth), "{packing:?}");
        // A sum and a scale have the same size.
        let sums = 1000 * growth / (1000 + growth);
        assert!(packing.decompressed_permille.abs_diff(2 * sums) <= 2, "{packing:?}");
        assert_eq!(packing.read_permille, 500);
    }

    #[test]
    fn scales_of_integer_products_stay_beside_their_packed_copy() {
        let Analysis { graph, .. } = read(&fixture("genai/llama3-int4-cpu"));
        // A sum and a scale have the same size.
        assert!(sums(&graph, |_| true) > 0);
        assert_eq!(scales_beside_packed(&graph), sums(&graph, |_| true));
        let Analysis { graph, .. } = read(&fixture("genai/llama3-fp32-cpu"));
        assert_eq!(scales_beside_packed(&graph), 0);
    }

    #[test]
    fn experts_add_a_sum_for_each_scale_if_they_compute_in_integers() {
        let Analysis { graph, .. } = read(&fixture("genai/gpt-oss-int4-cpu"));
        let is_mixture = |node: &Node| node.op_type == "QMoE";
        assert_eq!(sums(&graph, is_mixture), 0);
        let scales_in_all = |graph: &Graph| {
            let nodes = graph.nodes.iter().filter(|node| is_mixture(node));
            let scales: Vec<ValueId> =
                nodes.flat_map(|node| [node.inputs[3].unwrap(), node.inputs[6].unwrap()]).collect();
            bytes(graph, &scales)
        };
        for (attribute, value) in [("accuracy_level", 4), ("expert_weight_bits", 8)] {
            let mut changed = graph.clone();
            for node in changed.nodes.iter_mut().filter(|node| is_mixture(node)) {
                node.attributes.insert(attribute.into(), hpp_graph::Attribute::Int(value));
            }
            // The scales are float32, as the sums are.
            assert_eq!(sums(&changed, is_mixture), scales_in_all(&changed), "{attribute}");
            assert!(scales_beside_packed(&changed) == scales_beside_packed(&graph) + scales_in_all(&changed));
            // One scale for each row: other kernels.
            for node in changed.nodes.iter_mut().filter(|node| is_mixture(node)) {
                node.attributes.remove("block_size");
            }
            assert_eq!(sums(&changed, is_mixture), 0, "{attribute}");
        }
    }

    #[test]
    fn scales_that_look_like_16_bits_are_read_as_16_bits() {
        let dir = changed("genai/llama3-int4-cpu", bfloat16);
        let wide = packing_of(&fixture("genai/llama3-int4-cpu"));
        assert_eq!(packing_of(dir.path()), Packing { read_permille: 250, ..wide });
        // Zeros may be holes of a sparse file.
        let dir = changed("genai/llama3-int4-cpu", |_| 0);
        assert_eq!(packing_of(dir.path()), wide);
    }

    #[test]
    fn sums_of_weights_with_zero_points_are_read() {
        let Analysis { model, mut graph, .. } = read(&fixture("genai/llama3-int4-cpu"));
        let symmetric = packing(&model, &graph, |_| true, 1000);
        let products: Vec<usize> =
            (0..graph.nodes.len()).filter(|at| scales_of(&graph.nodes[*at]).next().is_some()).collect();
        for at in &products {
            // An omitted input is not a zero point.
            graph.nodes[*at].inputs.resize(4, None);
        }
        assert_eq!(packing(&model, &graph, |_| true, 1000), symmetric);
        for at in &products {
            graph.nodes[*at].inputs[3] = graph.nodes[*at].inputs[1];
        }
        assert_eq!(
            packing(&model, &graph, |_| true, 1000),
            Packing { decompressed_permille: 0, read_permille: 0, ..symmetric }
        );
        for at in &products {
            graph.nodes[*at].inputs.truncate(3);
            graph.nodes[*at].attributes.insert("N".into(), hpp_graph::Attribute::Int(24));
        }
        assert_eq!(packing(&model, &graph, |_| true, 1000).decompressed_permille, 0);
    }

    #[test]
    fn weights_that_kernels_widen_are_read_unwidened() {
        let packing = packing_of(&fixture("optimum/llama-with-past-fp16"));
        assert!((800..=1000).contains(&packing.growth_permille), "{packing:?}");
        assert!((950..=1000).contains(&packing.decompressed_permille), "{packing:?}");
        // 14 of 32 bits and exceptions.
        assert!((437..460).contains(&packing.read_permille), "{packing:?}");
        let none = packing_within(&fixture("optimum/llama-with-past-fp16"), 400);
        assert_eq!((none.decompressed_permille, none.growth_permille), (0, packing.growth_permille));
    }

    #[test]
    fn float32_weights_that_look_like_16_bits_are_read_as_16_bits() {
        let dir = changed("genai/llama3-fp32-cpu", bfloat16);
        let packing = packing_of(dir.path());
        // All but the embedding, of which a pass reads only rows.
        assert!((700..1000).contains(&packing.decompressed_permille), "{packing:?}");
        assert_eq!(packing.growth_permille, 0);
        // 11 of 32 bits and exceptions.
        assert!((343..365).contains(&packing.read_permille), "{packing:?}");
        let dir = changed("genai/llama3-fp32-cpu", |_| 0);
        assert_eq!(packing_of(dir.path()), Packing::default());
    }

    #[test]
    fn missing_weight_files_allow_no_compression() {
        let dir = changed("genai/llama3-fp32-cpu", bfloat16);
        let Analysis { model, graph, .. } = read(dir.path());
        fs::remove_file(&model.weights().files[0].path).unwrap();
        assert_eq!(packing(&model, &graph, |_| true, 1000), Packing::default());
    }
}
