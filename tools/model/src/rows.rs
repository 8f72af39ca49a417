//! Divides the layers of an analysed model by rows. The undivided model stays beside it: plans are compared with it.

use crate::analyse::QuantizedWeights;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::sliding_cache::SlidingCaches;
use crate::states::{Capacity, plan_state};
use hpp_graph::{BlockKind, Graph, Node, Segmentation, Shard, ValueId, divide_rows, infer};
use hpp_onnx::{Model, QUANTIZED_FILE, VirtualFile, VirtualFiles, split_rows};
use hpp_schema::State;
use std::collections::BTreeSet;

/// What a model whose layers are divided by rows has beside its graph.
#[derive(Clone, Debug)]
pub struct DividedRows {
    /// How many shards there are.
    pub shards: usize,
    /// The contents of [`hpp_onnx::ROWS_FILE`], which the model refers to and which does not exist on disk.
    pub contents: VirtualFile,
    /// The states of the undivided model. Their partitions and devices are empty.
    pub whole_states: Vec<State>,
}

/// A divided model.
pub(crate) struct Divided {
    pub model: Model,
    pub graph: Graph,
    pub segmentation: Segmentation,
    pub contents: VirtualFile,
}

/// Divides every layer of a model with this graph.
pub(crate) fn divide(
    model: &Model,
    graph: &Graph,
    segmentation: &Segmentation,
    shards: usize,
    quantized: Option<&QuantizedWeights>,
) -> Result<Divided, ModelError> {
    let is_layer = |index: &usize| matches!(segmentation.blocks[*index].kind, BlockKind::Layer(_));
    let layers: Vec<usize> = (0..segmentation.blocks.len()).filter(is_layer).collect();
    if layers.is_empty() {
        return Err(ModelError::setting("the model has no layers that could be divided by rows", LAYER_MODE));
    }
    let division = divide_rows(graph, segmentation, &layers, shards)?;
    let virtual_files: VirtualFiles =
        quantized.map(|quantized| (QUANTIZED_FILE.to_owned(), quantized.contents.clone())).into_iter().collect();
    let split = split_rows(model, graph, &division, &virtual_files)?;
    let mut divided = split.model.graph().map_err(|e| ModelError::Read(Box::new(e)))?;
    infer::infer(&mut divided);
    let segmentation = division.segmentation(graph, segmentation, &divided, &split.nodes);
    Ok(Divided { model: split.model, graph: divided, segmentation, contents: split.contents })
}

/// What to do about a model that cannot be divided by rows.
pub(crate) const LAYER_MODE: &str =
    "use --split-mode layer, the default: each device gets whole layers, which every model allows";

/// The states of an undivided model.
pub(crate) fn whole_states(
    graph: &Graph,
    segmentation: &Segmentation,
    config: &ModelConfig,
    context: u64,
) -> Vec<State> {
    let mut layer = 0;
    let sliding = SlidingCaches::of(graph, segmentation.states.iter().map(|state| &state.pair));
    let state = |found: &hpp_graph::BlockState| {
        layer = found.layer.unwrap_or(layer);
        plan_state(graph, &found.pair, layer, config, Capacity { context }, &sliding).map(|planned| planned.state)
    };
    segmentation.states.iter().filter_map(state).collect()
}

/// Values that a shard's block reads of other shards and of undivided blocks, and that no earlier block of the shard reads.
pub(crate) fn entering(graph: &Graph, segmentation: &Segmentation, index: usize) -> BTreeSet<ValueId> {
    let shard_of = |block: usize| segmentation.blocks[block].shard.map(|shard| shard.index);
    let own = shard_of(index);
    let comes_from_elsewhere = |id: &ValueId| {
        let producer = graph.producer(*id).and_then(|node| segmentation.block_of(node));
        producer.is_some_and(|block| block != index && shard_of(block) != own)
    };
    let is_here_already = |id: &ValueId| {
        let readers = graph.value(*id).consumers.iter().filter_map(|node| segmentation.block_of(*node));
        readers.into_iter().any(|block| block < index && shard_of(block) == own)
    };
    let nodes = segmentation.blocks[index].nodes.iter().map(|id| graph.node(*id));
    nodes.flat_map(Node::reads).filter(|id| comes_from_elsewhere(id) && !is_here_already(id)).collect()
}

/// The blocks of shards, one list for each part of a layer, in the order of shards.
pub(crate) fn parts(segmentation: &Segmentation) -> Vec<Vec<(usize, Shard)>> {
    let mut parts: Vec<Vec<(usize, Shard)>> = Vec::new();
    let shards = segmentation.blocks.iter().enumerate().filter_map(|(block, of)| Some((block, of.shard?)));
    for (block, shard) in shards {
        match parts.last_mut() {
            Some(part) if shard.index > 0 => part.push((block, shard)),
            _ => parts.push(vec![(block, shard)]),
        }
    }
    parts
}
