//! What blocks take where their weights are streamed to a GPU: what is written of each of them then, without writing it.

use crate::Analysis;
use hpp_graph::{BlockKind, Graph, Part, ValueId, cut};
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{Extractor, Lifted, VirtualFiles, WeightBytes, embed_structure, lift};
use hpp_partition::{Block, Streamed};
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// Every block as a part of its own; nothing where a model cannot be cut so.
fn alone(analysis: &Analysis) -> Vec<Part> {
    let blocks: Vec<_> = (0..analysis.segmentation.blocks.len()).map(|at| at..at + 1).collect();
    cut(&analysis.graph, &analysis.segmentation, &blocks).unwrap_or_default()
}

/// Names of weights that more than one block of layers reads: a session that serves several of them holds these once. A table
/// that only the embedding and the head read is not among them: each of the two is a session of its own, and streams it.
pub fn shared_weights(analysis: &Analysis) -> HashSet<String> {
    shared(analysis, &alone(analysis))
}

fn shared(analysis: &Analysis, parts: &[Part]) -> HashSet<String> {
    let graph = &analysis.graph;
    let is_layer = |part: &&Part| {
        let kind = analysis.segmentation.blocks[part.blocks.start].kind;
        matches!(kind, BlockKind::Layer(_) | BlockKind::Body(_))
    };
    let mut readers = BTreeMap::new();
    for part in parts.iter().filter(is_layer) {
        weights(graph, part).into_iter().for_each(|id| *readers.entry(id).or_insert(0) += 1);
    }
    readers.into_iter().filter(|(_, readers)| *readers > 1).map(|(id, _)| graph.value(id).name.clone()).collect()
}

/// Weights that a part reads.
fn weights(graph: &Graph, part: &Part) -> BTreeSet<ValueId> {
    let reads = part.nodes.iter().flat_map(|node| graph.node(*node).reads());
    reads.filter(|id| graph.weight(*id).is_some()).collect()
}

/// Adds to each block the weights of what all blocks need and each partition computes for itself, such as rotary tables: they
/// are written with each partition.
pub(crate) fn add_common_weights(analysis: &Analysis, blocks: &mut [Block]) {
    for (block, part) in blocks.iter_mut().zip(&alone(analysis)) {
        for id in weights(&analysis.graph, part) {
            if !block.weights.iter().any(|(known, _)| *known == id.0) {
                block.weights.push((id.0, analysis.graph.weight(id).map_or(0, |weight| weight.bytes)));
            }
        }
    }
}

/// Says of each block what it takes where it is streamed. A block that cannot be written by itself, because it is never without
/// the next one, is taken to be copied whole.
pub(crate) fn fill(analysis: &Analysis, blocks: &mut [Block]) {
    let parts = alone(analysis);
    let shared = shared(analysis, &parts);
    let extractor = Extractor::new(&analysis.model, &analysis.graph);
    let mut files: Vec<ModelProto> = Vec::new();
    for (block, part) in blocks.iter_mut().zip(&parts) {
        let Some(lifted) = lifted(analysis, &extractor, part, &shared) else { continue };
        let pieces = lifted.weights.iter().map(|weight| length(&weight.bytes)).collect();
        let constants = lifted.constants;
        let file = files.iter().position(|known| *known == lifted.proto).unwrap_or_else(|| {
            files.push(lifted.proto);
            files.len() - 1
        });
        let number = u32::try_from(file).expect("there are no more files than blocks");
        block.streamed = Streamed::new(pieces, Some((number, constants)).filter(|_| constants > 0));
    }
}

fn lifted(analysis: &Analysis, extractor: &Extractor, part: &Part, shared: &HashSet<String>) -> Option<Lifted> {
    let mut proto = extractor.part("", part).ok()?;
    embed_structure(&mut proto, analysis.model.dir(), &VirtualFiles::new()).ok()?;
    lift(&proto, |name| shared.contains(name)).ok()
}

fn length(bytes: &WeightBytes) -> u64 {
    match bytes {
        WeightBytes::External { length, .. } => *length,
        WeightBytes::Embedded(bytes) => bytes.len() as u64,
    }
}
