//! From a path to everything known about the model: graph, blocks, states, roles, configuration.

use crate::config::ModelConfig;
use crate::costs::Load;
use crate::error::ModelError;
use crate::roles;
use crate::states::{Capacity, PlannedState, bytes_at_capacity, is_carried, plan_state};
use hpp_graph::{Graph, Segmentation, ValueId, infer, segment};
use hpp_onnx::Model;
use hpp_schema::{DType, Dim, InputRole, ModelInput, ModelKind, ModelOutput, OutputRole, Shape, State, StateUpdate};
use std::path::Path;

/// Name of the graph input that says which positions' logits are wanted.
pub const LOGIT_POSITIONS: &str = "hpp.logit_positions";
/// Context planned for when neither the user nor the model says.
const DEFAULT_CONTEXT: u64 = 8192;
/// Tokens a prefill pass takes at most when a GPU's workspace has to be planned for.
pub const DEFAULT_CHUNK: u64 = 2048;

/// A model, understood.
pub struct Analysis {
    /// The flattened protobuf, ready to be cut.
    pub model: Model,
    /// The same before its head was rewritten, with its graph; `None` where it was not.
    pub before: Option<(Model, Graph)>,
    /// Its directory's or file's name.
    pub name: String,
    /// The graph with facts inferred.
    pub graph: Graph,
    /// Its blocks.
    pub segmentation: Segmentation,
    /// What the files beside it say.
    pub config: ModelConfig,
    /// States the runtime carries.
    pub states: Vec<PlannedState>,
    /// Inputs but states.
    pub inputs: Vec<ModelInput>,
    /// Outputs but states.
    pub outputs: Vec<ModelOutput>,
    /// What drives it.
    pub kind: ModelKind,
    /// Number of token ids.
    pub vocab_size: Option<u64>,
    /// Tokens planned for.
    pub context: u64,
    /// Things a person should know.
    pub notes: Vec<String>,
}

/// How far the analysis changes the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// Compute only the positions asked for.
    AskedFor,
    /// Leave the head as it is.
    All,
}

/// Reads and understands a model.
pub fn analyse(path: &Path, context: Option<u64>, logits: Logits) -> Result<Analysis, ModelError> {
    let mut model = Model::open(path).map_err(|e| ModelError::Read(Box::new(e)))?;
    let config = ModelConfig::read(model.dir())?;
    let mut notes: Vec<String> = model.notes().iter().map(ToString::to_string).collect();
    let (mut graph, mut segmentation) = understand(&model)?;
    let mut before = None;
    if logits == Logits::AskedFor {
        match gather_positions(&model, &graph, &segmentation, &config) {
            Some(Ok(rewritten)) => {
                let source = (std::mem::replace(&mut model, rewritten), graph);
                before = Some(source);
                (graph, segmentation) = understand(&model)?;
            }
            Some(Err(why)) => notes.push(format!("logits are computed for every position: {why}")),
            None => {}
        }
    }
    notes.extend(segmentation.undecided.iter().cloned());
    let planned = planned_context(context, config.context_length)?;
    let mut analysis = describe(model, graph, segmentation, config, planned.unwrap_or(DEFAULT_CONTEXT), notes);
    refuse_states_without_axes(&analysis)?;
    refuse_states_beyond_64_bits(&analysis)?;
    analysis.before = before;
    Ok(if planned.is_none() { analysis.with_assumed_context() } else { analysis })
}

fn understand(model: &Model) -> Result<(Graph, Segmentation), ModelError> {
    let mut graph = model.graph().map_err(|e| ModelError::Read(Box::new(e)))?;
    infer::infer(&mut graph);
    let segmentation = segment(&graph);
    Ok((graph, segmentation))
}

/// Rewrites the head of a decoder; `None` where there are no logits to speak of.
fn gather_positions(
    model: &Model,
    graph: &Graph,
    segmentation: &Segmentation,
    config: &ModelConfig,
) -> Option<Result<Model, String>> {
    let is_state = |id: ValueId| segmentation.states.iter().any(|s| s.pair.present == Some(id) && is_carried(&s.pair));
    let is_past = |id: ValueId| segmentation.states.iter().any(|s| s.pair.past == id && is_carried(&s.pair));
    let inputs = roles::model_inputs(graph, is_past);
    let outputs = roles::model_outputs(graph, config.vocab_size, is_state);
    let logits = outputs.iter().position(|output| output.role == OutputRole::Logits)?;
    let has_states = segmentation.states.iter().any(|s| is_carried(&s.pair));
    if roles::kind(&inputs, &outputs, has_states) == ModelKind::SingleRun {
        return None;
    }
    let logits = graph.outputs.iter().copied().filter(|id| !is_state(*id)).nth(logits)?;
    Some(hpp_onnx::gather_logit_positions(model, graph, logits, LOGIT_POSITIONS).map_err(|e| e.to_string()))
}

/// A state whose tokens lie along an axis that its shape lacks cannot be allocated.
fn refuse_states_without_axes(analysis: &Analysis) -> Result<(), ModelError> {
    for planned in &analysis.states {
        let (StateUpdate::InPlace { axis, .. } | StateUpdate::Append { axis, .. }) = planned.state.update else {
            continue;
        };
        let (name, axes) = (&planned.state.past, planned.state.shape.len());
        if axis >= axes {
            let shape = match analysis.graph.value(planned.past).shape {
                None => "the model does not say its shape".to_owned(),
                Some(_) => format!("its shape has {axes} axes"),
            };
            return Err(ModelError::setting(
                format!("cannot plan the KV cache: tokens of the input {name} lie along axis {axis}, and {shape}"),
                "declare the shape of this input, such as [batch_size, heads, past_sequence_length, head_size], and \
                 export again",
            ));
        }
    }
    Ok(())
}

/// A state of more bytes than 64 bits count fits no machine, and its size would not fit the plan.
fn refuse_states_beyond_64_bits(analysis: &Analysis) -> Result<(), ModelError> {
    let size = |state: &State| bytes_at_capacity(state.dtype, &state.shape, state.update);
    let Some(planned) = analysis.states.iter().find(|planned| size(&planned.state).is_none()) else { return Ok(()) };
    let State { past, shape, .. } = &planned.state;
    let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let shape = shape.join(", ");
    Err(ModelError::setting(
        format!("cannot plan the KV cache: the input {past} of shape [{shape}] has more bytes than 64 bits count"),
        "give a smaller --context, or correct the shape that the model declares for this input",
    ))
}

/// Tokens to plan for; `None` when neither the user nor the model says.
fn planned_context(asked: Option<u64>, model: Option<u64>) -> Result<Option<u64>, ModelError> {
    match (asked, model) {
        (Some(0), _) => {
            Err(ModelError::setting("a context of 0 tokens holds nothing", "give --context a number of tokens"))
        }
        (Some(asked), Some(most)) if asked > most => Err(ModelError::setting(
            format!("--context {asked} is longer than the {most} tokens this model was built for"),
            "ask for at most what the model's configuration allows",
        )),
        (Some(asked), _) => Ok(Some(asked)),
        (None, Some(most)) => Ok(Some(most.clamp(1, DEFAULT_CONTEXT))),
        (None, None) => Ok(None),
    }
}

fn describe(
    model: Model,
    graph: Graph,
    segmentation: Segmentation,
    config: ModelConfig,
    context: u64,
    notes: Vec<String>,
) -> Analysis {
    let mut layer = 0;
    let mut states = Vec::new();
    for found in &segmentation.states {
        layer = found.layer.unwrap_or(layer);
        states.extend(plan_state(&graph, &found.pair, layer, &config, Capacity { context }));
    }
    let mut inputs = roles::model_inputs(&graph, |id| states.iter().any(|s| s.past == id));
    for input in inputs.iter_mut().filter(|input| input.name == LOGIT_POSITIONS) {
        input.role = InputRole::LogitPositions;
    }
    inputs.extend(model.branch().filter(|branch| branch.value).map(|branch| ModelInput {
        name: branch.condition.clone(),
        dtype: DType::Bool,
        shape: vec![Dim::fixed(1)],
        role: InputRole::UseCacheBranch,
    }));
    let outputs = roles::model_outputs(&graph, config.vocab_size, |id| states.iter().any(|s| s.present == id));
    let kind = roles::kind(&inputs, &outputs, !states.is_empty());
    let logits = outputs.iter().find(|output| output.role == OutputRole::Logits);
    let vocab_size = logits.and_then(|l| l.shape.last()).and_then(Dim::as_fixed).or(config.vocab_size);
    let name = name(&model);
    Analysis {
        model,
        before: None,
        name,
        graph,
        segmentation,
        config,
        states,
        inputs,
        outputs,
        kind,
        vocab_size,
        context,
        notes,
    }
}

/// The directory's name for `dir/model.onnx`, else the file's.
fn name(model: &Model) -> String {
    let text = |part: Option<&std::ffi::OsStr>| part.map(|name| name.to_string_lossy().into_owned());
    let stem = text(model.path().file_stem()).unwrap_or_default();
    let dir = std::path::absolute(model.dir()).ok().and_then(|dir| text(dir.file_name()));
    dir.filter(|_| stem.starts_with("model") || stem.starts_with("decoder")).unwrap_or(stem)
}

impl Analysis {
    /// Says that the context is a guess, where it matters.
    fn with_assumed_context(mut self) -> Self {
        if self.kind != ModelKind::SingleRun {
            let tokens = self.context;
            self.notes.push(format!("the model does not say how long a context it takes; planned {tokens} tokens"));
        }
        self
    }

    /// Most tokens a prefill pass may take: one where the model's branch takes one at a time.
    pub fn prefill_chunk(&self, load: Load) -> Option<u64> {
        if self.takes_one_token() {
            return Some(1);
        }
        (load.chunk < load.context).then_some(load.chunk)
    }

    /// Whether a present is declared one longer than its past, whatever the pass: a branch exported for single tokens.
    fn takes_one_token(&self) -> bool {
        let declared = |id: ValueId| self.graph.value(id).shape.as_ref();
        self.states.iter().any(|s| {
            let StateUpdate::Append { axis, .. } = s.state.update else { return false };
            let dim = |shape: Option<&Shape>| shape.and_then(|shape| shape.get(axis)).cloned();
            match (dim(declared(s.past)), dim(declared(s.present))) {
                (Some(past), Some(present)) => (present - past).as_fixed() == Some(1),
                _ => false,
            }
        })
    }
}
