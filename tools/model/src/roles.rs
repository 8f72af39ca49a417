//! Roles of a model's inputs and outputs. This is the only module of this crate that interprets names: exporters agree on them, and
//! the graph's structure cannot distinguish a mask from positions. Token ids and logits with other names are found by the table of token embeddings:
//! ids are its only index, and logits have as many numbers for each token as it has rows.

use crate::config::ModelConfig;
use hpp_graph::{Graph, ValueId};
use hpp_schema::{DType, Dim, InputRole, ModelInput, ModelKind, ModelOutput, OutputRole, Shape};

/// The role of an input: what the runtime writes into it.
pub fn input_role(graph: &Graph, id: ValueId) -> InputRole {
    match named_role(graph, id) {
        InputRole::Free if token_ids(graph) == Some(id) => InputRole::TokenIds,
        role => role,
    }
}

/// The role that an input's name says.
fn named_role(graph: &Graph, id: ValueId) -> InputRole {
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
        "cache_position" if integer && rank(value.shape.as_ref()) == Some(1) => InputRole::PositionIds,
        "write_indices" if integer && rank(value.shape.as_ref()) == Some(1) => InputRole::PastLengths,
        "nonpad_kv_seqlen" if integer && rank(value.shape.as_ref()) == Some(1) => InputRole::TotalLengths,
        "token_type_ids" if integer => InputRole::TokenTypeIds,
        _ => InputRole::Free,
    }
}

/// The only input of no known name that is an index into a table, if no input has the name of token ids or embeddings.
fn token_ids(graph: &Graph) -> Option<ValueId> {
    let is_named = |id: &ValueId| matches!(named_role(graph, *id), InputRole::TokenIds | InputRole::Embeddings);
    if graph.inputs.iter().any(is_named) {
        return None;
    }
    let is_index = |id: &ValueId| named_role(graph, *id) == InputRole::Free && table_of(graph, *id).is_some();
    let mut found = graph.inputs.iter().copied().filter(is_index);
    let only = found.next().filter(|_| found.next().is_none())?;
    // An encoder may have such an input too, and no output over the vocabulary.
    let rows = graph.value(table_of(graph, only)?).shape.as_ref()?.first()?.as_fixed()?;
    let is_over_vocabulary = |id: &ValueId| {
        let shape = graph.value(*id).shape.as_ref();
        rank(shape) == Some(3) && shape.and_then(|shape| shape.last()?.as_fixed()) == Some(rows)
    };
    graph.outputs.iter().any(is_over_vocabulary).then_some(only)
}

/// The table whose rows integers `[batch, tokens]` select.
fn table_of(graph: &Graph, ids: ValueId) -> Option<ValueId> {
    let value = graph.value(ids);
    let is_matrix = |id: &ValueId| rank(graph.value(*id).shape.as_ref()) == Some(2);
    let table = |node: &hpp_graph::Node| match node.op_type.as_str() {
        "Gather" | "GatherBlockQuantized" if node.inputs.get(1) == Some(&Some(ids)) => node.inputs[0],
        _ => None,
    };
    let is_integer = matches!(value.dtype, Some(DType::Int64 | DType::Int32)) && is_matrix(&ids);
    let mut tables = value.consumers.iter().filter_map(|reader| table(graph.node(*reader))).filter(is_matrix);
    tables.find(|table| graph.weight(*table).is_some()).filter(|_| is_integer)
}

/// The output that would be the logits if a model without states were a decoder: it has a number for each row of the embedding.
pub fn unnamed_logits(graph: &Graph) -> Option<ValueId> {
    let rows = embedding_rows(graph)?;
    logits(graph, Some(rows), &graph.outputs)
}

/// The number of rows of the table of token embeddings.
fn embedding_rows(graph: &Graph) -> Option<u64> {
    let ids = graph.inputs.iter().find(|id| input_role(graph, **id) == InputRole::TokenIds)?;
    graph.value(table_of(graph, *ids)?).shape.as_ref()?.first()?.as_fixed()
}

/// Inputs with the number of tokens of a pass, from its end, whose logits are computed: 0 is all of them. They become the constant 0 where a graph
/// slices with them; a tensor of this name may also hold indices.
pub const LOGIT_COUNTS: [&str; 2] = ["num_logits_to_keep", "logits_to_keep"];

/// The model's inputs without states.
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

/// The model's outputs without states. [`logits`] decides which of them are the logits.
pub fn model_outputs(graph: &Graph, vocab: Option<u64>, is_state: impl Fn(ValueId) -> bool) -> Vec<ModelOutput> {
    let outputs: Vec<ValueId> = graph.outputs.iter().copied().filter(|id| !is_state(*id)).collect();
    // An encoder may have such an output too.
    let has_states = graph.outputs.iter().any(|id| is_state(*id));
    let rows = if has_states { embedding_rows(graph) } else { None };
    let logits = logits(graph, vocab, &outputs).or_else(|| logits(graph, rows, &outputs));
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

/// The floating-point output named `logits`, else the only one whose last dimension is the vocabulary size.
pub fn logits(graph: &Graph, vocab: Option<u64>, outputs: &[ValueId]) -> Option<ValueId> {
    let may_be_logits = |id: &ValueId| {
        let value = graph.value(*id);
        value.dtype.is_some_and(DType::is_float) && rank(value.shape.as_ref()).is_none_or(|rank| rank == 3)
    };
    let named = outputs.iter().copied().find(|id| graph.value(*id).name == "logits");
    named.filter(may_be_logits).or_else(|| {
        let mut over_vocab = outputs.iter().copied().filter(may_be_logits).filter(|id| {
            let last = graph.value(*id).shape.as_ref().and_then(|shape| shape.last()).and_then(Dim::as_fixed);
            last.is_some() && last == vocab
        });
        over_vocab.next().filter(|_| over_vocab.next().is_none())
    })
}

/// How the model is run: as a decoder, as a decoder without cache, or once. Inputs and outputs do not distinguish an encoder, which
/// predicts masked tokens or classifies tokens, from a decoder without cache: the configuration does.
pub fn kind(inputs: &[ModelInput], outputs: &[ModelOutput], has_states: bool, config: &ModelConfig) -> ModelKind {
    let takes_tokens = inputs.iter().any(has_tokens) && fixed_length(inputs, has_states).is_none();
    let logits = outputs.iter().find(|o| o.role == OutputRole::Logits);
    let has_segments = inputs.iter().any(|i| i.role == InputRole::TokenTypeIds);
    let has_free_inputs = inputs.iter().any(|i| i.role == InputRole::Free);
    match (takes_tokens && !has_free_inputs, logits, has_states, has_segments) {
        (true, Some(_), true, _) => ModelKind::Decoder,
        (true, Some(logits), false, false) if !is_encoder(logits, config) => ModelKind::DecoderWithoutCache,
        _ => ModelKind::SingleRun,
    }
}

fn has_tokens(input: &ModelInput) -> bool {
    matches!(input.role, InputRole::TokenIds | InputRole::Embeddings)
}

/// The length of the passes of a model that takes no others, and so cannot take a sequence that grows. One token at a time is enough for
/// a model with states.
fn fixed_length(inputs: &[ModelInput], has_states: bool) -> Option<u64> {
    let mut lengths = inputs.iter().filter(|input| has_tokens(input)).map(|input| input.shape.get(1)?.as_fixed());
    lengths.find_map(|length| length.filter(|length| *length != 1 || !has_states))
}

/// Whether a model without states is an encoder: its configuration says so, or its logits are over fewer classes than there are
/// tokens. More logits than tokens are the padding of a vocabulary.
fn is_encoder(logits: &ModelOutput, config: &ModelConfig) -> bool {
    let classes = logits.shape.last().and_then(Dim::as_fixed);
    let are_fewer = classes.zip(config.vocab_size).is_some_and(|(classes, vocab)| classes < vocab);
    config.generates.map_or(are_fewer, |generates| !generates)
}

/// Why a model does not generate text, which a user may expect of one that carries states, has inputs that look like caches, is configured to
/// generate, or has what looks like logits and no configuration that says otherwise. `None` if it generates text. `unnamed`: the output that would
/// be the logits if the model were a decoder.
pub fn why_no_text(
    unnamed: Option<&str>,
    inputs: &[ModelInput],
    outputs: &[ModelOutput],
    has_states: bool,
    config: &ModelConfig,
) -> Option<String> {
    let named_logits = outputs.iter().find(|output| output.name == "logits");
    let may_be_decoder = inputs.iter().any(has_tokens) && (named_logits.is_some() || unnamed.is_some());
    let is_expected = has_states || config.generates.unwrap_or(may_be_decoder) || inputs.iter().any(is_like_a_cache);
    if !is_expected || kind(inputs, outputs, has_states, config) != ModelKind::SingleRun {
        return None;
    }
    let unknown: Vec<&str> =
        inputs.iter().filter(|input| input.role == InputRole::Free).map(|input| input.name.as_str()).collect();
    let has_logits = outputs.iter().any(|output| output.role == OutputRole::Logits);
    Some(match (unknown.as_slice(), has_logits, fixed_length(inputs, has_states)) {
        _ if let Some(types) = cache_of_two_types(inputs, outputs) => types,
        _ if inputs.iter().any(is_like_a_cache) => {
            let caches: Vec<&str> =
                inputs.iter().filter(|input| is_like_a_cache(input)).map(|input| input.name.as_str()).collect();
            format!(
                "no output was recognised as {} with the tokens of a pass appended or written into it",
                caches.join(", ")
            )
        }
        ([], true, Some(length)) => format!("every pass takes {length} tokens"),
        ([], true, None) => "no input is named input_ids or inputs_embeds, or is the only index into a table".to_owned(),
        ([], false, _) if named_logits.is_some_and(|logits| logits.shape.len() != 3) => {
            let shape = named_logits.map(|logits| shown(&logits.shape)).unwrap_or_default();
            format!("the output logits has the axes {shape} instead of [batch, positions, vocabulary]")
        }
        ([], false, _) if let Some(name) = unnamed => format!(
            "the output {name} has a number for each row of the embedding, but without caches an encoder's output looks the same: name it logits, or \
             put the config.json of a decoder beside the model"
        ),
        ([], false, _) => {
            "no output is named logits, or has a number for each row of the embedding, and has the axes [batch, positions, vocabulary]".to_owned()
        }
        (names, ..) => format!(
            "only a caller can fill {} (known inputs are input_ids, inputs_embeds, attention_mask, position_ids, cache_position, write_indices, nonpad_kv_seqlen, \
             token_type_ids and num_logits_to_keep)",
            names.join(", ")
        ),
    })
}

fn shown(shape: &Shape) -> String {
    let dims: Vec<String> = shape.iter().map(Dim::to_string).collect();
    format!("[{}]", dims.join(", "))
}

/// Whether a user expects that the runtime keeps the contents of an input that it cannot fill.
fn is_like_a_cache(input: &ModelInput) -> bool {
    let name = input.name.to_lowercase();
    let is_named = ["past", "cache"].iter().any(|word| name.contains(word));
    input.role == InputRole::Free && is_named && input.shape.len() > 1
}

/// A sentence on an input and an output that look like the same cache in two types.
fn cache_of_two_types(inputs: &[ModelInput], outputs: &[ModelOutput]) -> Option<String> {
    let last = |name: &str| name.rsplit('.').next().map(str::to_owned);
    inputs.iter().filter(|input| is_like_a_cache(input)).find_map(|input| {
        let same = |output: &&ModelOutput| {
            digits(&output.name) == digits(&input.name)
                && last(&output.name) == last(&input.name)
                && output.shape.len() == input.shape.len()
                && output.dtype != input.dtype
        };
        let output = outputs.iter().find(same)?;
        let (past, present) = (&input.name, &output.name);
        Some(format!("the cache {past} is read as {} and written as {} ({present})", input.dtype, output.dtype))
    })
}

/// The decimal numbers in a name.
fn digits(name: &str) -> Vec<&str> {
    name.split(|letter: char| !letter.is_ascii_digit()).filter(|part| !part.is_empty()).collect()
}

fn rank(shape: Option<&Shape>) -> Option<usize> {
    shape.map(Vec::len)
}
