//! What weights take on the host beyond their bytes in the model, once its kernels have packed them, and what of that
//! need not be read from disk. Numbers are looked at in samples only.

use hpp_graph::{Graph, Node, ValueId};
use hpp_onnx::{Model, looks_widened};
use hpp_partition::Packing;
use hpp_schema::DType;
use std::collections::BTreeSet;

/// Most weights of a kind whose numbers are looked at.
const LOOKED_AT: usize = 8;
/// The host's kernels pack blocks of weights for so many columns together.
const COLUMNS: u64 = 16;
/// Operators that read the numbers of a weight as they are, all of them in each pass.
const PLAIN: [&str; 5] = ["MatMul", "Gemm", "FusedMatMul", "Conv", "Transpose"];

/// How this model's weights are packed.
///
/// - A product of 4- or 8-bit weights that computes in integers (`accuracy_level` 4) keeps a float32 sum of each
///   block of weights beside them: `N * ceil(K / block_size) * 4` bytes (`MlasQNBitGemmPackQuantBData` in ONNX
///   Runtime). Where there are no zero points, sums follow from scales: sums are made from nothing that is read, and
///   scales from as many bytes, or from half as many where they look like 16-bit numbers.
/// - Weights in 16-bit floating point are widened to 32 bits, because the host's kernels compute in no less: made
///   from half.
/// - Float32 matrices that look like widened 16-bit ones are made from half. A table of which rows are read is none
///   of them: what is not read in each pass spares nothing.
///
/// All of a model is taken to be as this is on average. Where something is not known, as where weights are holes in a
/// file, more is said to be read.
pub(super) fn packing(model: &Model, graph: &Graph) -> Packing {
    let all = bytes(graph, &weights(graph, |_| true));
    let more = sums(graph, |_| true).saturating_add(bytes(graph, &weights(graph, |id| is_half(graph, id))));
    let made = made(model, graph);
    let bytes = made.iter().map(|made| made.bytes).fold(0, u64::saturating_add);
    let unread = made.iter().map(|made| made.bytes.saturating_sub(made.stored)).fold(0, u64::saturating_add);
    Packing {
        more: per_1000(more, all),
        made: per_1000(bytes, all.saturating_add(more)).min(1000),
        stored: if bytes == 0 { 0 } else { 1000 - per_1000(unread, bytes) },
    }
}

/// Rounded down.
fn per_1000(part: u64, of: u64) -> u64 {
    let share = (u128::from(part) * 1000).checked_div(u128::from(of)).unwrap_or(0);
    u64::try_from(share).unwrap_or(u64::MAX)
}

/// Packed bytes that are made, and what is read for them.
#[derive(Clone, Copy)]
struct Made {
    bytes: u64,
    stored: u64,
}

/// What is made of this model: of each kind.
fn made(model: &Model, graph: &Graph) -> [Made; 4] {
    let (with_sums, as_packed) = (scales(graph, sums_follow), scales(graph, |node| !sums_follow(node)));
    let makes = |id: ValueId| !as_packed.contains(&id);
    let wide = |id: ValueId| graph.value(id).dtype == Some(DType::Float32) && makes(id);
    let wide_scales = weights(graph, |id| wide(id) && with_sums.contains(&id));
    let matrices = weights(graph, |id| wide(id) && !with_sums.contains(&id) && is_matrix(graph, id));
    let half = bytes(graph, &weights(graph, |id| is_half(graph, id) && makes(id)));
    let read = bytes(graph, &wide_scales);
    let narrow = if look_widened(model, graph, &matrices) { bytes(graph, &matrices) } else { 0 };
    [
        Made { bytes: sums(graph, sums_follow), stored: 0 },
        Made { bytes: read, stored: if look_widened(model, graph, &wide_scales) { read / 2 } else { read } },
        Made { bytes: half.saturating_mul(2), stored: half },
        Made { bytes: narrow, stored: narrow / 2 },
    ]
}

/// Whether all that are looked at of these weights, from the first to the last, look like 16-bit numbers.
fn look_widened(model: &Model, graph: &Graph, ids: &[ValueId]) -> bool {
    let some = ids.len().min(LOOKED_AT);
    let at = |number: usize| ids[number * (ids.len() - 1) / (some - 1).max(1)];
    some > 0 && (0..some).all(|number| looks_widened(model, &graph.value(at(number)).name))
}

fn weights(graph: &Graph, is_so: impl Fn(ValueId) -> bool) -> Vec<ValueId> {
    graph.value_ids().filter(|id| graph.weight(*id).is_some() && is_so(*id)).collect()
}

fn bytes(graph: &Graph, ids: &[ValueId]) -> u64 {
    ids.iter().filter_map(|id| graph.weight(*id)).map(|weight| weight.bytes).fold(0, u64::saturating_add)
}

fn is_half(graph: &Graph, id: ValueId) -> bool {
    matches!(graph.value(id).dtype, Some(DType::Float16 | DType::Bfloat16))
}

/// Whether a weight has rows and columns and a plain operator reads it.
fn is_matrix(graph: &Graph, id: ValueId) -> bool {
    let value = graph.value(id);
    let is_plain = |node: &Node| PLAIN.contains(&node.op_type.as_str());
    let has_columns = value.shape.as_ref().is_some_and(|shape| shape.len() > 1);
    has_columns && value.consumers.iter().any(|id| is_plain(graph.node(*id)))
}

/// Scales of products in integers.
fn scales(graph: &Graph, is_so: impl Fn(&Node) -> bool) -> BTreeSet<ValueId> {
    let nodes = graph.nodes.iter().filter(|node| is_in_integers(node) && is_so(node));
    nodes.filter_map(|node| *node.inputs.get(2)?).collect()
}

/// Bytes of the sums of products in integers.
fn sums(graph: &Graph, is_so: impl Fn(&Node) -> bool) -> u64 {
    graph.nodes.iter().filter(|node| is_so(node)).map(block_sums).fold(0, u64::saturating_add)
}

fn size(node: &Node, name: &str) -> Option<u64> {
    node.int(name).and_then(|size| u64::try_from(size).ok())
}

fn is_in_integers(node: &Node) -> bool {
    node.op_type == "MatMulNBits" && size(node, "accuracy_level") == Some(4)
}

/// Whether the sums of a product in integers follow from its scales, as packed.
fn sums_follow(node: &Node) -> bool {
    let is_symmetric = node.inputs.get(3).is_none_or(Option::is_none);
    let columns = size(node, "N").is_some_and(|n| n % COLUMNS == 0);
    is_in_integers(node) && is_symmetric && columns && matches!(size(node, "bits"), None | Some(4 | 8))
}

fn block_sums(node: &Node) -> u64 {
    let sizes = (size(node, "N"), size(node, "K"), size(node, "block_size").filter(|size| *size > 0));
    match sizes {
        (Some(n), Some(k), Some(block)) if is_in_integers(node) => {
            n.saturating_mul(k.div_ceil(block)).saturating_mul(4)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Analysis, Logits, analyse};
    use hpp_onnx::Storage;
    use std::fs;
    use std::path::{Path, PathBuf};

    fn fixture(name: &str) -> PathBuf {
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models")).join(name)
    }

    fn read(path: &Path) -> Analysis {
        analyse(path, None, Logits::AskedFor).unwrap()
    }

    fn of(path: &Path) -> Packing {
        let Analysis { model, graph, .. } = read(path);
        packing(&model, &graph)
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
    fn wide_weights_are_as_they_are() {
        assert_eq!(of(&fixture("genai/llama3-fp32-cpu")), Packing::default());
    }

    #[test]
    fn sums_are_made_from_scales() {
        // Of a block of 32 weights 16 bytes and a scale of 4, and 4 for the sum; the embedding is not packed.
        let Packing { more, made, stored } = of(&fixture("genai/llama3-int4-cpu"));
        assert!((100..=200).contains(&more), "{more}");
        // A sum and a scale of the same size.
        let sums = 1000 * more / (1000 + more);
        assert!(made.abs_diff(2 * sums) <= 2, "{made} of {more}");
        assert_eq!(stored, 500);
    }

    #[test]
    fn scales_that_look_like_16_bits_are_read_as_such() {
        let dir = changed("genai/llama3-int4-cpu", bfloat16);
        let wide = of(&fixture("genai/llama3-int4-cpu"));
        assert_eq!(of(dir.path()), Packing { stored: 250, ..wide });
        // Zeros may be holes.
        let dir = changed("genai/llama3-int4-cpu", |_| 0);
        assert_eq!(of(dir.path()), wide);
    }

    #[test]
    fn sums_of_weights_with_zero_points_are_read() {
        let Analysis { model, mut graph, .. } = read(&fixture("genai/llama3-int4-cpu"));
        let symmetric = packing(&model, &graph);
        let products: Vec<usize> = (0..graph.nodes.len()).filter(|at| is_in_integers(&graph.nodes[*at])).collect();
        for at in &products {
            // An input that is left out is no zero point.
            graph.nodes[*at].inputs.resize(4, None);
        }
        assert_eq!(packing(&model, &graph), symmetric);
        for at in &products {
            graph.nodes[*at].inputs[3] = graph.nodes[*at].inputs[1];
        }
        assert_eq!(packing(&model, &graph), Packing { made: 0, stored: 0, ..symmetric });
        for at in &products {
            graph.nodes[*at].inputs.truncate(3);
            graph.nodes[*at].attributes.insert("N".into(), hpp_graph::Attribute::Int(24));
        }
        assert_eq!(packing(&model, &graph).made, 0);
    }

    #[test]
    fn what_is_widened_is_read_as_it_was() {
        let Packing { more, made, stored } = of(&fixture("optimum/llama-with-past-fp16"));
        assert!((800..=1000).contains(&more), "{more}");
        assert!((950..=1000).contains(&made), "{made}");
        assert_eq!(stored, 500);
    }

    #[test]
    fn float32_weights_that_look_like_16_bits_are_read_as_such() {
        let dir = changed("genai/llama3-fp32-cpu", bfloat16);
        let Packing { more, made, stored } = of(dir.path());
        // All but the embedding, of which rows are read.
        assert!((700..1000).contains(&made), "{made}");
        assert_eq!((more, stored), (0, 500));
        let dir = changed("genai/llama3-fp32-cpu", |_| 0);
        assert_eq!(of(dir.path()), Packing::default());
    }

    #[test]
    fn weights_that_are_gone_look_like_nothing() {
        let dir = changed("genai/llama3-fp32-cpu", bfloat16);
        let Analysis { model, graph, .. } = read(dir.path());
        fs::remove_file(&model.weights().files[0].path).unwrap();
        assert_eq!(packing(&model, &graph), Packing::default());
    }
}
