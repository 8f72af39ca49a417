//! Removes reads of the shapes of later layers' states: embeddings of positions read the length of the first layer's cache, and sliding layers
//! before the first full layer read the length of its cache. Partitions would need states of other partitions for that; the lengths of mask and tokens
//! tell the same.

use crate::config::ModelConfig;
use crate::roles::{input_role, kind, model_inputs, model_outputs};
use crate::states::is_carried;
use hpp_graph::{Graph, Segmentation, StateChange, StatePair, ValueId, cut};
use hpp_onnx::{Model, StateShape, derive_state_shapes};
use hpp_schema::{Dim, InputRole, ModelKind};
use std::collections::BTreeSet;

/// Rewrites the model so that no block reads the shape of a later block's state, as far as inputs tell this shape. Returns whether anything was
/// rewritten: if so, infer and segment again.
pub fn derive(model: &mut Model, graph: &Graph, segmentation: &Segmentation, config: &ModelConfig) -> bool {
    let foreign = read_early(graph, segmentation);
    if foreign.is_empty() || !is_decoder(graph, segmentation, config) {
        return false;
    }
    let input = |wanted: &[InputRole]| graph.inputs.iter().copied().find(|id| wanted.contains(&input_role(graph, *id)));
    let tokens = input(&[InputRole::TokenIds, InputRole::Embeddings]);
    let Some(tokens) = tokens.filter(|tokens| size(graph, *tokens, 1).is_some()) else { return false };
    let mask = input(&[InputRole::AttentionMask]);
    let state = |pair: &StatePair| {
        let axis = if let StateChange::Append { axis } = pair.change { Some(axis) } else { None };
        let length = axis.zip(mask).filter(|(axis, mask)| tells_length(graph, pair.past, *axis, tokens, *mask));
        StateShape { past: pair.past, tokens, length }
    };
    let pairs = segmentation.states.iter().map(|state| &state.pair).filter(|pair| foreign.contains(&pair.past));
    derive_state_shapes(model, graph, &pairs.map(state).collect::<Vec<_>>()) > 0
}

/// Whether the declared lengths of mask and tokens allow that their difference is the length of a state: they have names of their own, or the model
/// says so.
fn tells_length(graph: &Graph, past: ValueId, axis: usize, tokens: ValueId, mask: ValueId) -> bool {
    let sizes = (size(graph, past, axis), size(graph, tokens, 1), size(graph, mask, 1));
    let (Some(past), Some(tokens), Some(mask)) = sizes else { return false };
    let is_own_name = mask.as_symbol().is_some() && mask != tokens && mask != past;
    is_own_name || mask.clone() - tokens.clone() == *past && past.as_symbol().is_some()
}

/// The size of a value along an axis.
fn size(graph: &Graph, id: ValueId, axis: usize) -> Option<&Dim> {
    graph.value(id).shape.as_ref()?.get(axis)
}

/// The states that blocks before their own read.
fn read_early(graph: &Graph, segmentation: &Segmentation) -> BTreeSet<ValueId> {
    let blocks: Vec<_> = (0..segmentation.blocks.len()).map(|at| at..at + 1).collect();
    let parts = cut(graph, segmentation, &blocks).unwrap_or_default();
    parts.iter().flat_map(|part| part.foreign_states(segmentation)).collect()
}

/// Whether the runtime generates text with a model, and so decides the lengths of its inputs.
fn is_decoder(graph: &Graph, segmentation: &Segmentation, config: &ModelConfig) -> bool {
    let carried = || segmentation.states.iter().map(|state| &state.pair).filter(|pair| is_carried(pair));
    let inputs = model_inputs(graph, |id| carried().any(|pair| pair.past == id));
    let outputs = model_outputs(graph, config.vocab_size, |id| carried().any(|pair| pair.present == Some(id)));
    kind(&inputs, &outputs, carried().next().is_some(), config) == ModelKind::Decoder
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{LogitsMode, analyse};
    use hpp_graph::cut_finely;
    use hpp_onnx::proto::tensor_shape_proto::dimension::Value as Dimension;
    use hpp_onnx::proto::type_proto::Value as TypeValue;
    use std::path::{Path, PathBuf};

    fn fixture(name: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name)
    }

    /// The number of blocks, and the number of partitions they can be cut into.
    fn blocks_and_parts(model: &Path) -> (usize, usize) {
        let analysis = analyse(model, None, LogitsMode::All).unwrap();
        let parts = cut_finely(&analysis.graph, &analysis.segmentation).unwrap();
        (analysis.segmentation.blocks.len(), parts.len())
    }

    #[test]
    fn a_partition_need_not_hold_the_state_whose_length_it_reads() {
        // The embedding reads the length of the first layer's cache; the first layer, whose cache slides, that of the second.
        assert_eq!(blocks_and_parts(&fixture("optimum-legacy/gpt2-merged")), (6, 6));
        assert_eq!(blocks_and_parts(&fixture("torch/gemma3-sliding-dynamo")), (5, 5));
    }

    /// A fixed length, that of the tokens, and that of the past.
    #[test]
    fn a_mask_of_another_length_does_not_tell_the_length_of_a_state() {
        let dir = tempfile::tempdir().unwrap();
        for entry in fixture("optimum-legacy/gpt2-merged").read_dir().unwrap().flatten() {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
        let file = dir.path().join("decoder_model_merged.onnx");
        let mut proto = Model::open(&file).unwrap().proto().clone();
        let name = |name: &str| Dimension::DimParam(name.into());
        for (length, parts) in [
            (Dimension::DimValue(16), 5),
            (name("sequence_length"), 5),
            (name("past_sequence_length"), 5),
            (name("past_sequence_length + sequence_length"), 6),
        ] {
            let inputs = &mut proto.graph.as_mut().unwrap().input;
            let mask = inputs.iter_mut().find(|input| input.name() == "attention_mask").unwrap();
            let Some(TypeValue::TensorType(tensor)) = mask.r#type.as_mut().unwrap().value.as_mut() else { panic!() };
            tensor.shape.as_mut().unwrap().dim[1].value = Some(length.clone());
            hpp_onnx::write_model(&file, &proto).unwrap();
            assert_eq!(blocks_and_parts(dir.path()), (6, parts), "{length:?}");
        }
    }
}
