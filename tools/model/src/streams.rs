//! Bytes that each block occupies if its weights are streamed to a GPU, computed from the partition file that would be
//! written.

use crate::Analysis;
use hpp_graph::{BlockKind, Graph, PartitionGraph, ValueId, cut, cut_finely};
use hpp_onnx::proto::ModelProto;
use hpp_onnx::{Extractor, Lifted, VirtualFiles, WeightBytes, embed_structure, lift};
use hpp_partition::{BlockSpec, Streamed};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::OnceLock;

/// Every block as a part of its own; empty if the model cannot be cut between all blocks.
fn single_block_parts(analysis: &Analysis) -> Vec<PartitionGraph> {
    let blocks: Vec<_> = (0..analysis.segmentation.blocks.len()).map(|at| at..at + 1).collect();
    cut(&analysis.graph, &analysis.segmentation, &blocks).unwrap_or_default()
}

/// Names of weights that more than one layer reads. A session that serves several layers holds them once, as constants.
/// A table that only the embedding and the head read is not shared in this sense: each of the two is a session of its
/// own and streams it.
pub fn shared_weights(analysis: &Analysis) -> HashSet<String> {
    shared(analysis, &single_block_parts(analysis))
}

fn shared(analysis: &Analysis, parts: &[PartitionGraph]) -> HashSet<String> {
    let graph = &analysis.graph;
    let is_layer = |part: &&PartitionGraph| {
        let kind = analysis.segmentation.blocks[part.blocks.start].kind;
        matches!(kind, BlockKind::Layer(_) | BlockKind::Body(_))
    };
    let mut readers = BTreeMap::new();
    for part in parts.iter().filter(is_layer) {
        weights(graph, part).into_iter().for_each(|id| *readers.entry(id).or_insert(0) += 1);
    }
    readers.into_iter().filter(|(_, readers)| *readers > 1).map(|(id, _)| graph.value(id).name.clone()).collect()
}

/// Weights that the nodes of a part read.
fn weights(graph: &Graph, part: &PartitionGraph) -> BTreeSet<ValueId> {
    let reads = part.nodes.iter().flat_map(|node| graph.node(*node).reads());
    reads.filter(|id| graph.weight(*id).is_some()).collect()
}

/// What the partition file of each block alone would hold. It depends on the model only, and is computed when it is first asked for.
#[derive(Clone, Debug, Default)]
pub(crate) struct BlockFiles {
    /// Ids and bytes of the weights of each block.
    weights: OnceLock<Vec<Vec<(u32, u64)>>>,
    /// The weights of each block that are copied to a GPU, if the block can be a partition of its own.
    streamed: OnceLock<Vec<Option<Streamed>>>,
}

/// Adds to each block the weights of nodes that each partition recomputes, such as rotary tables: every partition file
/// contains them.
pub(crate) fn add_common_weights(analysis: &Analysis, blocks: &mut [BlockSpec]) {
    let weights_of = |part: &PartitionGraph| {
        let ids = weights(&analysis.graph, part).into_iter();
        ids.map(|id| (id.0, analysis.graph.weight(id).map_or(0, |weight| weight.bytes))).collect()
    };
    let of_blocks =
        analysis.block_files.weights.get_or_init(|| single_block_parts(analysis).iter().map(weights_of).collect());
    for (block, weights) in blocks.iter_mut().zip(of_blocks) {
        let known: BTreeSet<u32> = block.weights.iter().map(|(id, _)| *id).collect();
        block.weights.extend(weights.iter().filter(|(id, _)| !known.contains(id)));
    }
}

/// Sets `streamed` of each block. A block of a model that cannot be cut keeps its default: all its weights are copied. A slot for a block that
/// is inseparable from others holds all of them.
pub(crate) fn set_streamed_bytes(analysis: &Analysis, blocks: &mut [BlockSpec]) {
    let streamed = analysis.block_files.streamed.get_or_init(|| streamed(analysis));
    for (block, streamed) in blocks.iter_mut().zip(streamed) {
        streamed.iter().for_each(|streamed| block.streamed.clone_from(streamed));
    }
}

fn streamed(analysis: &Analysis) -> Vec<Option<Streamed>> {
    let parts = single_block_parts(analysis);
    let shared = shared(analysis, &parts);
    let mut streamed = streamed_parts(analysis, &shared, &parts);
    let smallest = cut_finely(&analysis.graph, &analysis.segmentation).unwrap_or_default();
    let joined: Vec<PartitionGraph> = smallest.into_iter().filter(|part| part.blocks.len() > 1).collect();
    for (part, whole) in joined.iter().zip(streamed_parts(analysis, &shared, &joined)) {
        let Some(whole) = whole else { continue };
        streamed[part.blocks.clone()].iter_mut().flatten().for_each(|block| block.set_slot(&whole));
    }
    streamed
}

/// The weights that are copied to a GPU if each of these parts is a streamed partition.
fn streamed_parts(analysis: &Analysis, shared: &HashSet<String>, parts: &[PartitionGraph]) -> Vec<Option<Streamed>> {
    let extractor = Extractor::new(&analysis.model, &analysis.graph);
    let mut files: Vec<ModelProto> = Vec::new();
    let mut of_part = |part| {
        let lifted = lifted(analysis, &extractor, part, shared)?;
        let pieces = lifted.weights.iter().map(|weight| length(&weight.bytes)).collect();
        let constants = lifted.constants;
        let file = files.iter().position(|known| *known == lifted.proto).unwrap_or_else(|| {
            files.push(lifted.proto);
            files.len() - 1
        });
        let number = u32::try_from(file).expect("there are no more files than blocks");
        Some(Streamed::new(pieces, Some((number, constants)).filter(|_| constants > 0)))
    };
    parts.iter().map(&mut of_part).collect()
}

fn lifted(
    analysis: &Analysis,
    extractor: &Extractor,
    part: &PartitionGraph,
    shared: &HashSet<String>,
) -> Option<Lifted> {
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
