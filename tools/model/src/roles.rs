//! What each input and output of a model is for. The only place where names mean something: they are the interface
//! exporters agree on, and structure cannot tell a mask from positions.

use hpp_graph::{Graph, ValueId};
use hpp_schema::{DType, Dim, InputRole, ModelInput, ModelKind, ModelOutput, OutputRole, Shape};

/// What the runtime puts into this input.
pub fn input_role(graph: &Graph, id: ValueId) -> InputRole {
    let value = graph.value(id);
    let integer = matches!(value.dtype, Some(DType::Int64 | DType::Int32));
    match value.name.as_str() {
        "use_cache_branch" if value.dtype == Some(DType::Bool) => InputRole::UseCacheBranch,
        "inputs_embeds" => InputRole::Embeddings,
        "input_ids" | "decoder_input_ids" if integer => InputRole::TokenIds,
        "attention_mask" | "decoder_attention_mask" if rank(value.shape.as_ref()) == Some(2) => {
            InputRole::AttentionMask
        }
        "position_ids" if integer => InputRole::PositionIds,
        "token_type_ids" if integer => InputRole::TokenTypeIds,
        _ => InputRole::Free,
    }
}

/// Inputs of the model, states left out.
pub fn model_inputs(graph: &Graph, is_state: impl Fn(ValueId) -> bool) -> Vec<ModelInput> {
    let inputs = graph.inputs.iter().filter(|id| !is_state(**id));
    inputs
        .map(|id| {
            let value = graph.value(*id);
            ModelInput {
                name: value.name.clone(),
                dtype: value.dtype.unwrap_or(DType::Float32),
                shape: value.shape.clone().unwrap_or_default(),
                role: input_role(graph, *id),
            }
        })
        .collect()
}

/// Outputs of the model, states left out. One of them is the logits if it looks like scores over a vocabulary.
pub fn model_outputs(graph: &Graph, vocab: Option<u64>, is_state: impl Fn(ValueId) -> bool) -> Vec<ModelOutput> {
    let outputs: Vec<ValueId> = graph.outputs.iter().copied().filter(|id| !is_state(*id)).collect();
    let logits = logits(graph, vocab, &outputs);
    let describe = |id: ValueId| {
        let value = graph.value(id);
        ModelOutput {
            name: value.name.clone(),
            dtype: value.dtype.unwrap_or(DType::Float32),
            shape: value.shape.clone().unwrap_or_default(),
            role: if Some(id) == logits { OutputRole::Logits } else { OutputRole::Free },
        }
    };
    outputs.into_iter().map(describe).collect()
}

/// The output called `logits`, or the only one whose last dimension is the vocabulary.
pub fn logits(graph: &Graph, vocab: Option<u64>, outputs: &[ValueId]) -> Option<ValueId> {
    let scores = |id: &ValueId| {
        let value = graph.value(*id);
        value.dtype.is_some_and(DType::is_float) && rank(value.shape.as_ref()).is_none_or(|rank| rank == 3)
    };
    let named = outputs.iter().copied().find(|id| graph.value(*id).name == "logits");
    named.filter(scores).or_else(|| {
        let mut over_vocab = outputs.iter().copied().filter(scores).filter(|id| {
            let last = graph.value(*id).shape.as_ref().and_then(|shape| shape.last()).and_then(Dim::as_fixed);
            last.is_some() && last == vocab
        });
        over_vocab.next().filter(|_| over_vocab.next().is_none())
    })
}

/// What drives this model.
pub fn kind(inputs: &[ModelInput], outputs: &[ModelOutput], has_states: bool) -> ModelKind {
    let takes_text = inputs.iter().any(|i| matches!(i.role, InputRole::TokenIds | InputRole::Embeddings));
    let scores = outputs.iter().any(|o| o.role == OutputRole::Logits);
    let segments = inputs.iter().any(|i| i.role == InputRole::TokenTypeIds);
    let asks_for_more = inputs.iter().any(|i| i.role == InputRole::Free);
    match (takes_text && scores && !asks_for_more, has_states, segments) {
        (true, true, _) => ModelKind::Decoder,
        (true, false, false) => ModelKind::DecoderWithoutCache,
        _ => ModelKind::SingleRun,
    }
}

fn rank(shape: Option<&Shape>) -> Option<usize> {
    shape.map(Vec::len)
}
