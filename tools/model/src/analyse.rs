//! Reads a model and determines its graph, blocks, states, roles of inputs and outputs, and configuration.

use crate::activations::round_to_8_bits;
use crate::config::ModelConfig;
use crate::context_limit::{ContextLimit, context_limit, tables_change_after};
use crate::costs::Scenario;
use crate::error::ModelError;
use crate::expert_layout;
use crate::gpu_experts::{self, GpuExperts};
use crate::operators::{has_own_kernel, without_cpu_kernel};
use crate::roles;
use crate::rotary_caches;
use crate::rows::{self, DividedRows};
use crate::sliding_cache::SlidingCaches;
use crate::state_shapes;
use crate::states::{Capacity, PlannedState, bytes_at_capacity, is_carried, plan_state};
use crate::streams::BlockFiles;
use hpp_graph::{BlockKind, Graph, NodeId, Segmentation, ValueId, infer, segment};
use hpp_onnx::{
    ActiveNeurons, BlockFormat, BranchChoice, Candidates, DroppedInput, HeadReason, MeasureProgress, Model,
    QuantizeError, QuantizeOptions, QuantizeSummary, Quantized, Roles, VirtualFile, choose_formats,
    compute_selected_experts, product_inputs, quantize, store_reshaped,
};
use hpp_schema::{
    Activations, Dim, ExpertStatistics, InputRole, ModelInput, ModelKind, ModelOutput, OutputRole, Shape, State,
    StateUpdate,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;
use tracing::{debug, info};

/// Name of the graph input that selects the positions to compute logits for.
pub const LOGIT_POSITIONS: &str = "hpp.logit_positions";
/// Context length in tokens unless the user gives one: the default, and the upper limit on the one of the model.
const DEFAULT_CONTEXT: u64 = 8192;
/// Default limit on the tokens of a prefill pass when a GPU's workspace is planned.
pub const DEFAULT_CHUNK: u64 = 2048;

/// An analysed model.
pub struct Analysis {
    /// The flattened protobuf, ready to cut.
    pub model: Model,
    /// Model and graph before its head was rewritten and its layers or mixtures were divided; `None` if none of this was done.
    pub before: Option<(Model, Graph)>,
    /// Its directory's or file's name.
    pub name: String,
    /// The graph with inferred types and shapes.
    pub graph: Graph,
    /// The graph with experts as exported, from before they were put into the branches of an `If`; `None` if no expert was put
    /// under a condition.
    pub exported: Option<Graph>,
    /// Its blocks.
    pub segmentation: Segmentation,
    /// Configuration from the files beside it.
    pub config: ModelConfig,
    /// States that the runtime carries from pass to pass.
    pub states: Vec<PlannedState>,
    /// Inputs without states.
    pub inputs: Vec<ModelInput>,
    /// Outputs without states.
    pub outputs: Vec<ModelOutput>,
    /// How it is run.
    pub kind: ModelKind,
    /// Size of the vocabulary.
    pub vocab_size: Option<u64>,
    /// Context length to plan for, tokens.
    pub context: u64,
    /// Rows of its caches of rotary embeddings, if they were shortened: the most tokens of context that a plan can have.
    pub positions: Option<u64>,
    /// Why it generates no text, where a user may expect text.
    pub no_text: Option<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
    /// Most tokens of a text for which the model uses its first tables of rotary embeddings; `None` if it has one set.
    pub tables_change_after: Option<u64>,
    /// The weights that will be quantized when a plan is written; `None` without quantization.
    pub quantized: Option<QuantizedWeights>,
    /// What is known of layers that are divided by rows; `None` if no layer is divided.
    pub rows: Option<DividedRows>,
    /// What is known of experts that stay on a GPU while the CPU computes the others; `None` if no mixture is divided.
    pub gpu_experts: Option<GpuExperts>,
    /// How many operators take activations of 8 bits because that was asked for; `None` with activations as exported.
    pub integer_operators: Option<usize>,
    /// The products of ReLU networks of which host partitions compute only active neurons; `None` if they compute all neurons.
    pub active_neurons: Option<ActiveNeurons>,
    /// A cache of what the file of each block would hold: planning asks for it once for each length of passes.
    pub(crate) block_files: BlockFiles,
}

/// Weights of an analysed model that are quantized when a plan is written.
#[derive(Clone, Debug)]
pub struct QuantizedWeights {
    /// The contents of [`hpp_onnx::QUANTIZED_FILE`], which the model refers to and which does not exist on disk.
    pub contents: VirtualFile,
    /// What was quantized.
    pub summary: QuantizeSummary,
}

/// Positions that the model computes logits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitsMode {
    /// Requested positions only: the analysis rewrites the head.
    Requested,
    /// All positions, as exported.
    All,
}

/// Which experts compute a pass, of a mixture that an exporter wrote out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertComputation {
    /// As exported: every expert.
    AsExported,
    /// The experts that a token selects. Each is in the branch of an `If`: its weights can be read by demand, and cannot be inputs of a
    /// session.
    Selected,
}

/// How a model is analysed, and what of it is computed otherwise than exported.
#[derive(Clone, Copy, Debug)]
pub struct AnalysisOptions<'a> {
    /// The context length to plan for, tokens; `None` for the model's, or 8192 if that is less.
    pub context: Option<u64>,
    /// Positions with logits.
    pub logits: LogitsMode,
    /// How weights are quantized; `None` for weights as exported.
    pub quantize: Option<&'a QuantizeOptions>,
    /// Which experts compute a pass.
    pub experts: ExpertComputation,
    /// What 4- and 8-bit weights multiply.
    pub activations: Activations,
    /// How many shards every layer is divided into by rows; `None` for whole layers.
    pub shards: Option<usize>,
    /// Which experts stay on a GPU while the CPU computes the others; `None` for whole mixtures.
    pub gpu_experts: Option<ExpertsOnGpu<'a>>,
}

/// Which experts stay on a GPU while the CPU computes the others.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsOnGpu<'a> {
    /// The number of first layers whose experts are divided.
    pub layers: u32,
    /// How many experts of each layer stay on a GPU: those that tokens select most.
    pub experts: u64,
    /// How often tokens of a profile's corpus selected each expert; empty without one.
    pub statistics: &'a [ExpertStatistics],
}

impl AnalysisOptions<'_> {
    /// The model as exported, but for its logits.
    pub fn as_exported(context: Option<u64>, logits: LogitsMode) -> Self {
        AnalysisOptions {
            context,
            logits,
            quantize: None,
            experts: ExpertComputation::AsExported,
            activations: Activations::Exported,
            shards: None,
            gpu_experts: None,
        }
    }
}

/// Reads and analyses a model, with experts as exported. `context` is the context length to plan for, tokens.
pub fn analyse(path: &Path, context: Option<u64>, logits: LogitsMode) -> Result<Analysis, ModelError> {
    analyse_with(path, AnalysisOptions::as_exported(context, logits))
}

/// Same as [`analyse`], as the options say.
pub fn analyse_with(path: &Path, options: AnalysisOptions<'_>) -> Result<Analysis, ModelError> {
    let AnalysisOptions { context, logits, quantize: quantization, experts, activations, shards, gpu_experts } =
        options;
    let started = Instant::now();
    let mut model = open(path)?;
    info!(
        path = %model.path().display(),
        nodes = model.graph_proto().node.len(),
        weights = model.graph_proto().initializer.len(),
        bytes = model.weights().files.iter().map(|file| file.bytes).sum::<u64>(),
        ms = started.elapsed().as_millis(),
        "model read"
    );
    let zeroed: Vec<DroppedInput> =
        roles::LOGIT_COUNTS.iter().filter_map(|name| hpp_onnx::zero_input(&mut model, name)).collect();
    let reshaped = store_reshaped(&mut model);
    debug!(reshaped, "weights stored in the shape that their readers want");
    let mut config = ModelConfig::read(model.dir())?;
    let mut notes: Vec<String> = model.notes().iter().map(ToString::to_string).collect();
    notes.extend(chosen_file_note(path, model.path()));
    let (mut graph, mut segmentation) = infer_and_segment(&model)?;
    expert_layout::state(&mut model, &mut graph, &config);
    let integer_operators = (activations == Activations::Int8).then(|| round_to_8_bits(&mut model, &mut graph));
    let limit = context_limit(&graph, &segmentation.states);
    let change = tables_change_after(&graph);
    let planned = planned_context(context, config.context_length, limit.as_ref(), change)?;
    let positions = rotary_caches::shorten(&mut model, &mut graph, planned.unwrap_or(DEFAULT_CONTEXT));
    if state_shapes::derive(&mut model, &graph, &segmentation, &config) {
        (graph, segmentation) = infer_and_segment(&model)?;
    }
    let mut quantized = None;
    if let Some(options) = quantization {
        let done = quantize(&model, &graph, &quantize_roles(&graph, &segmentation), options)?;
        let Quantized { model: rewritten, contents, summary } = done;
        model = rewritten;
        (graph, segmentation) = infer_and_segment(&model)?;
        quantized = Some(QuantizedWeights { contents, summary });
    }
    let mut exported = None;
    if experts == ExpertComputation::Selected
        && let Some((rewritten, count)) = compute_selected_experts(&model, &graph)
    {
        info!(count, "experts are computed for tokens that select them");
        exported = Some(graph);
        model = rewritten;
        (graph, segmentation) = infer_and_segment(&model)?;
    }
    let mut before = None;
    if logits == LogitsMode::Requested {
        match gather_positions(&model, &graph, &segmentation, &config) {
            Some(Ok(rewritten)) => {
                let source = (std::mem::replace(&mut model, rewritten), graph);
                before = Some(source);
                (graph, segmentation) = infer_and_segment(&model)?;
            }
            // Nothing is saved by asking for positions.
            Some(Err(HeadReason::OnePosition)) => {}
            Some(Err(why)) => notes.push(format!("logits are computed for every position: {why}")),
            None => {}
        }
    }
    let logits_are_requested = before.is_some();
    let mut on_gpu = None;
    if let Some(options) = gpu_experts {
        let found = gpu_experts::divide(&model, &graph, &segmentation, options, quantized.as_ref())?;
        on_gpu = Some(found.experts);
        before.get_or_insert((model, graph));
        (model, graph, segmentation) = (found.model, found.graph, found.segmentation);
    }
    let mut divided = None;
    if let Some(shards) = shards {
        let found = rows::divide(&model, &graph, &segmentation, shards, quantized.as_ref())?;
        let tokens = planned.unwrap_or(DEFAULT_CONTEXT);
        let whole_states = rows::whole_states(&graph, &segmentation, &config, tokens);
        divided = Some(DividedRows { shards, contents: found.contents, whole_states });
        before.get_or_insert((model, graph));
        (model, graph, segmentation) = (found.model, found.graph, found.segmentation);
    }
    notes.extend(segmentation.undecided.iter().cloned());
    notes.extend(limit_note(config.context_length, limit.as_ref()));
    config.context_length = config.context_length.into_iter().chain(limit.map(|limit| limit.tokens)).min();
    let mut analysis = describe(model, graph, segmentation, config, planned.unwrap_or(DEFAULT_CONTEXT), notes);
    refuse_states_without_axes(&analysis)?;
    refuse_states_beyond_64_bits(&analysis)?;
    analysis.inputs.extend(zeroed.iter().filter_map(|input| input_of_source(input, InputRole::Zeros)));
    analysis.before = before;
    analysis.exported = exported;
    analysis.positions = positions;
    analysis.tables_change_after = change;
    analysis.notes.extend(change_note(change, analysis.context, analysis.config.context_length));
    analysis.quantized = quantized;
    analysis.rows = divided;
    analysis.gpu_experts = on_gpu;
    analysis.integer_operators = integer_operators;
    let blocks = &analysis.segmentation.blocks;
    info!(
        kind = ?analysis.kind,
        blocks = blocks.len(),
        classes = blocks.iter().map(|block| block.class.0 + 1).max().unwrap_or(0),
        states = analysis.states.len(),
        context = analysis.context,
        logits_of_requested_positions = logits_are_requested,
        ms = started.elapsed().as_millis(),
        "model analysed"
    );
    for (index, block) in blocks.iter().enumerate() {
        let crossing = analysis.segmentation.boundaries.get(index).map(|boundary| boundary.values.len());
        debug!(block = block.label, class = ?block.class, nodes = block.nodes.len(), crossing, "block");
    }
    let analysis = analysis.with_single_tokens_noted();
    Ok(if planned.is_none() { analysis.with_assumed_context() } else { analysis })
}

/// Opens a model. Its functions with the names of ONNX Runtime's own operators stay calls, unless the operators' kernels do not take these calls.
fn open(path: &Path) -> Result<Model, ModelError> {
    let read = |error| ModelError::Read(Box::new(error));
    let model = Model::open_for(path, &has_own_kernel).map_err(read)?;
    if model.proto().functions.is_empty() {
        return Ok(model);
    }
    let mut graph = model.graph().map_err(read)?;
    infer::infer(&mut graph);
    let is_called = |id: &NodeId| {
        let node = graph.node(*id);
        let mut functions = model.proto().functions.iter();
        functions.any(|function| function.name() == node.op_type && function.domain() == node.domain)
    };
    let calls: Vec<NodeId> = graph.node_ids().filter(is_called).collect();
    if without_cpu_kernel(&graph, calls).is_empty() { Ok(model) } else { Model::open(path).map_err(read) }
}

fn infer_and_segment(model: &Model) -> Result<(Graph, Segmentation), ModelError> {
    let mut graph = model.graph().map_err(|e| ModelError::Read(Box::new(e)))?;
    infer::infer(&mut graph);
    let segmentation = segment(&graph);
    Ok((graph, segmentation))
}

/// The matrices of a model whose formats may be chosen, with the errors of each format. The model must not be quantized already.
/// Calls `progress` with the bytes of weights that are measured, and with the bytes of all: first with 0, before any is
/// read.
pub fn quantization_candidates(
    analysis: &Analysis,
    options: &QuantizeOptions,
    progress: MeasureProgress<'_>,
) -> Result<Candidates, ModelError> {
    let roles = quantize_roles(&analysis.graph, &analysis.segmentation);
    Ok(Candidates::measure(&analysis.model, &analysis.graph, &roles, options, progress)?)
}

/// The format of each matrix that the options' budget allows, which [`analyse_with`] would choose with these options. The model must have
/// logits of all positions, and must not be quantized already. `progress` as in [`quantization_candidates`].
pub fn quantization_formats(
    analysis: &Analysis,
    options: &QuantizeOptions,
    progress: MeasureProgress<'_>,
) -> Result<BTreeMap<String, Option<BlockFormat>>, ModelError> {
    let roles = quantize_roles(&analysis.graph, &analysis.segmentation);
    Ok(choose_formats(&analysis.model, &analysis.graph, &roles, options, progress)?)
}

/// Refuses a model of which these options quantize no weight, whatever the budget. Reads no weight.
///
/// # Errors
/// [`QuantizeError::Nothing`].
pub fn check_quantizable(analysis: &Analysis, options: &QuantizeOptions) -> Result<(), QuantizeError> {
    let roles = quantize_roles(&analysis.graph, &analysis.segmentation);
    hpp_onnx::check_quantizable(&analysis.graph, &roles, options)
}

/// The value that each weight to quantize multiplies, by the weight's name; without weights that multiply several, or that lookups read.
pub fn quantization_inputs(analysis: &Analysis, options: &QuantizeOptions) -> BTreeMap<String, ValueId> {
    let roles = quantize_roles(&analysis.graph, &analysis.segmentation);
    product_inputs(&analysis.graph, &roles, options)
}

/// The nodes of the head, and the inputs that hold token ids.
fn quantize_roles(graph: &Graph, segmentation: &Segmentation) -> Roles {
    let heads = segmentation.blocks.iter().filter(|block| block.kind == BlockKind::Head);
    let is_tokens = |id: &ValueId| roles::input_role(graph, *id) == InputRole::TokenIds;
    Roles {
        head: heads.flat_map(|block| block.nodes.iter().copied()).collect(),
        tokens: graph.inputs.iter().copied().filter(is_tokens).collect(),
    }
}

/// Names the file that was chosen of several in a directory.
fn chosen_file_note(path: &Path, chosen: &Path) -> Option<String> {
    let others = hpp_onnx::passed_over(path, chosen);
    let name = chosen.file_name()?.to_string_lossy();
    let others = (!others.is_empty()).then(|| others.join(", "))?;
    Some(format!("{name} is the model; to take another file, give its path (in the same directory: {others})"))
}

/// Rewrites the head of a decoder to compute requested positions only; `None` if the model is not a decoder with
/// logits.
fn gather_positions(
    model: &Model,
    graph: &Graph,
    segmentation: &Segmentation,
    config: &ModelConfig,
) -> Option<Result<Model, HeadReason>> {
    let is_state = |id: ValueId| segmentation.states.iter().any(|s| s.pair.present == Some(id) && is_carried(&s.pair));
    let is_past = |id: ValueId| segmentation.states.iter().any(|s| s.pair.past == id && is_carried(&s.pair));
    let inputs = roles::model_inputs(graph, is_past);
    let outputs = roles::model_outputs(graph, config.vocab_size, is_state);
    let logits = outputs.iter().position(|output| output.role == OutputRole::Logits)?;
    let has_states = segmentation.states.iter().any(|s| is_carried(&s.pair));
    if roles::kind(&inputs, &outputs, has_states, config) == ModelKind::SingleRun {
        return None;
    }
    let logits = graph.outputs.iter().copied().filter(|id| !is_state(*id)).nth(logits)?;
    Some(hpp_onnx::gather_logit_positions(model, graph, logits, LOGIT_POSITIONS))
}

/// Refuses a state whose token axis its declared shape lacks: it cannot be allocated.
fn refuse_states_without_axes(analysis: &Analysis) -> Result<(), ModelError> {
    for planned in &analysis.states {
        let Some((axis, _)) = planned.state.update.tokens() else { continue };
        let (name, axes) = (&planned.state.past, planned.state.shape.len());
        if axis >= axes {
            let shape = match analysis.graph.value(planned.past).shape {
                None => "the model does not declare its shape".to_owned(),
                Some(_) => format!("its shape has {axes} axes"),
            };
            return Err(ModelError::setting(
                format!("cannot plan the KV cache: axis {axis} of the input {name} holds the tokens, but {shape}"),
                "declare the shape of this input, such as [batch_size, heads, past_sequence_length, head_size], and \
                 export again",
            ));
        }
    }
    Ok(())
}

/// Refuses states of more bytes than 64 bits count: they fit no machine, and their size would not fit the plan.
fn refuse_states_beyond_64_bits(analysis: &Analysis) -> Result<(), ModelError> {
    let size = |state: &State| bytes_at_capacity(state.dtype, &state.shape, state.update, analysis.context);
    let Some(planned) = analysis.states.iter().find(|planned| size(&planned.state).is_none()) else { return Ok(()) };
    let State { past, shape, .. } = &planned.state;
    let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let shape = shape.join(", ");
    Err(ModelError::setting(
        format!("cannot plan the KV cache: the input {past} of shape [{shape}] has a size that overflows 64 bits"),
        "give a smaller --context, or correct the shape that the model declares for this input",
    ))
}

/// Context length to plan for; `None` if neither the user nor the model's configuration or graph gives one.
fn planned_context(
    asked: Option<u64>,
    configured: Option<u64>,
    limit: Option<&ContextLimit>,
    change: Option<u64>,
) -> Result<Option<u64>, ModelError> {
    let most = configured.into_iter().chain(limit.map(|limit| limit.tokens)).min();
    match (asked, limit) {
        (Some(0), _) => {
            Err(ModelError::setting("a context of 0 tokens holds nothing", "give --context a number of tokens"))
        }
        (Some(asked), Some(limit)) if asked > limit.tokens => Err(ModelError::setting(
            limit.refusal(asked),
            "lower --context, or export the model again with a larger table or cache, or without a sliding window in its cache",
        )),
        (Some(asked), _) if most.is_some_and(|most| asked > most) => Err(ModelError::setting(
            format!("--context {asked} is longer than the {} tokens this model was built for", most.unwrap_or(asked)),
            "lower --context to what the model's configuration allows",
        )),
        (Some(asked), _) => Ok(Some(asked)),
        (None, _) => Ok(most.into_iter().chain(change).min().map(|most| most.clamp(1, DEFAULT_CONTEXT))),
    }
}

/// The note on a limit of the graph, where the configuration does not say it.
fn limit_note(configured: Option<u64>, limit: Option<&ContextLimit>) -> Option<String> {
    limit?.note(configured)
}

/// The note on a model that changes its tables within the planned context, or within the context that it allows.
fn change_note(change: Option<u64>, context: u64, configured: Option<u64>) -> Option<String> {
    let change = change?;
    if context > change {
        return Some(format!(
            "beyond {change} tokens the model gives all tokens of a pass other tables of rotary embeddings: where a longer prompt is computed \
             in several passes, or a conversation grows beyond them, its first tokens keep the first tables, and answers differ from those of \
             one pass; --context {change} avoids that"
        ));
    }
    configured.filter(|longest| *longest > change).map(|_| {
        format!("beyond {change} tokens the model uses other tables of rotary embeddings, for all tokens of a pass: see docs/USAGE.md")
    })
}

fn describe(
    model: Model,
    graph: Graph,
    segmentation: Segmentation,
    config: ModelConfig,
    context: u64,
    mut notes: Vec<String>,
) -> Analysis {
    let mut layer = 0;
    let mut states = Vec::new();
    let sliding = SlidingCaches::of(&graph, segmentation.states.iter().map(|state| &state.pair));
    for found in &segmentation.states {
        layer = found.layer.unwrap_or(layer);
        states.extend(plan_state(&graph, &found.pair, layer, &config, Capacity { context }, &sliding));
    }
    let mut inputs = roles::model_inputs(&graph, |id| states.iter().any(|s| s.past == id));
    for input in inputs.iter_mut().filter(|input| input.name == LOGIT_POSITIONS) {
        input.role = InputRole::LogitPositions;
    }
    inputs.extend(model.branch().into_iter().flat_map(inputs_of_source));
    let outputs = roles::model_outputs(&graph, config.vocab_size, |id| states.iter().any(|s| s.present == id));
    let kind = roles::kind(&inputs, &outputs, !states.is_empty(), &config);
    let vocab_size = vocab_size(kind, &outputs, &config);
    let unnamed = roles::unnamed_logits(&graph).map(|id| graph.value(id).name.as_str());
    let no_text = roles::why_no_text(unnamed, &inputs, &outputs, !states.is_empty(), &config);
    notes.extend(
        no_text
            .iter()
            .map(|why| format!("the model is run on tensors, one step at a time, instead of generating text: {why}")),
    );
    let name = name(&model, &config);
    Analysis {
        model,
        before: None,
        name,
        graph,
        exported: None,
        segmentation,
        config,
        states,
        inputs,
        outputs,
        kind,
        vocab_size,
        context,
        positions: None,
        tables_change_after: None,
        no_text,
        notes,
        quantized: None,
        rows: None,
        gpu_experts: None,
        integer_operators: None,
        active_neurons: None,
        block_files: BlockFiles::default(),
    }
}

/// The number of tokens: that of the logits, unless a model that runs once has logits over other classes.
fn vocab_size(kind: ModelKind, outputs: &[ModelOutput], config: &ModelConfig) -> Option<u64> {
    let logits = outputs.iter().find(|output| output.role == OutputRole::Logits);
    let computed = logits.and_then(|l| l.shape.last()).and_then(Dim::as_fixed);
    match kind {
        ModelKind::SingleRun => config.vocab_size.or(computed),
        ModelKind::Decoder | ModelKind::DecoderWithoutCache => computed.or(config.vocab_size),
    }
}

/// The inputs that the source model has beside those of its branch that became the graph.
fn inputs_of_source(branch: &BranchChoice) -> impl Iterator<Item = ModelInput> + '_ {
    branch.dropped_inputs.iter().filter_map(|input| {
        let is_condition = input.name == branch.condition;
        let shape = input.shape.clone().or_else(|| is_condition.then(|| vec![Dim::fixed(1)]));
        let role = if is_condition && branch.value { InputRole::UseCacheBranch } else { InputRole::Zeros };
        input_of_source(&DroppedInput { shape, ..input.clone() }, role)
    })
}

/// An input that only the source model has.
fn input_of_source(input: &DroppedInput, role: InputRole) -> Option<ModelInput> {
    // Its symbols mean nothing to the graph.
    let known = |dim: &Dim| dim.as_fixed().map_or(Dim::Unknown, Dim::fixed);
    let shape = input.shape.as_ref()?.iter().map(known).collect();
    Some(ModelInput { name: input.name.clone(), dtype: input.dtype?, shape, role })
}

/// The directory's name for `dir/model.onnx`, else the file's.
fn name(model: &Model, config: &ModelConfig) -> String {
    let text = |part: Option<&std::ffi::OsStr>| part.map(|name| name.to_string_lossy().into_owned());
    let stem = text(model.path().file_stem()).unwrap_or_default();
    let dir = std::path::absolute(&config.dir).ok().and_then(|dir| text(dir.file_name()));
    dir.filter(|_| stem.starts_with("model") || stem.starts_with("decoder")).unwrap_or(stem)
}

impl Analysis {
    /// The experts of the mixtures in the first `layers` layers as blocks of their own, which the planner keeps on the host. `None` if
    /// none of these layers has a mixture in one operator.
    pub fn with_experts_apart(mut self, layers: u32) -> Option<Analysis> {
        let (segmentation, found) = self.segmentation.with_experts_apart(&self.graph, layers);
        self.segmentation = segmentation;
        (found > 0).then_some(self)
    }

    /// The number of layers whose experts are blocks of their own.
    pub fn layers_with_experts_apart(&self) -> usize {
        self.segmentation.blocks.iter().filter(|block| block.is_experts).count()
    }

    /// Whether its weights include parts of the exported model's weights: its layers or mixtures are divided.
    pub fn has_parts_of_weights(&self) -> bool {
        self.rows.is_some() || self.gpu_experts.is_some()
    }

    /// The model before its layers or mixtures were divided: all its weight files exist, unless it is quantized.
    pub fn undivided_model(&self) -> &Model {
        self.before.as_ref().filter(|_| self.has_parts_of_weights()).map_or(&self.model, |(model, _)| model)
    }

    /// The graph with a node for each operator: experts are as exported.
    pub fn exported_graph(&self) -> &Graph {
        self.exported.as_ref().unwrap_or(&self.graph)
    }

    /// Adds a note that the context length is assumed, where states depend on it.
    fn with_assumed_context(mut self) -> Self {
        if self.kind != ModelKind::SingleRun {
            let tokens = self.context;
            self.notes.push(format!("the model does not declare a context length; planned for {tokens} tokens"));
        }
        self
    }

    /// Adds a note on a branch that takes single tokens.
    fn with_single_tokens_noted(mut self) -> Self {
        if self.takes_one_token() {
            self.notes.push(
                "the branch with a cache was exported for single tokens: a prompt is computed one token at a time, and tokens cannot be drafted".to_owned(),
            );
        }
        self
    }

    /// Limit on the tokens of a prefill pass; 1 if the model's exported branch takes single tokens; `None` for no
    /// limit.
    pub fn prefill_chunk(&self, scenario: Scenario) -> Option<u64> {
        if self.takes_one_token() {
            return Some(1);
        }
        (scenario.prefill_chunk < scenario.context).then_some(scenario.prefill_chunk)
    }

    /// Whether a present state is always declared one token longer than its past: the branch was exported for single
    /// tokens.
    pub fn takes_one_token(&self) -> bool {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::symbols::{PassSize, symbol_values};
    use hpp_onnx::{Bits, BlockFormat, Choice, ScaleRule};

    /// A decoder without states and without a configuration of its own, with this one.
    fn with_config(config: &str) -> Analysis {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/torch/gpt-dynamo");
        let dir = tempfile::tempdir().unwrap();
        for file in ["model.onnx", "model.onnx.data"] {
            std::fs::copy(model.join(file), dir.path().join(file)).unwrap();
        }
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        analyse(dir.path(), None, LogitsMode::Requested).unwrap()
    }

    #[test]
    fn the_configuration_distinguishes_encoders_from_decoders_without_cache() {
        for (config, kind) in [
            ("{}", ModelKind::DecoderWithoutCache),
            (r#"{"vocab_size": 512}"#, ModelKind::DecoderWithoutCache),
            (r#"{"vocab_size": 500}"#, ModelKind::DecoderWithoutCache),
            (r#"{"vocab_size": 2048}"#, ModelKind::SingleRun),
            (r#"{"vocab_size": 2048, "architectures": ["GPT2LMHeadModel"]}"#, ModelKind::DecoderWithoutCache),
            (r#"{"architectures": ["BertForCausalLM"], "model_type": "bert"}"#, ModelKind::DecoderWithoutCache),
            (r#"{"is_decoder": true, "model_type": "bert"}"#, ModelKind::DecoderWithoutCache),
            (r#"{"model_type": "gpt2"}"#, ModelKind::DecoderWithoutCache),
            (r#"{"model_type": "distilbert"}"#, ModelKind::SingleRun),
            (r#"{"architectures": ["RobertaForMaskedLM"]}"#, ModelKind::SingleRun),
            (r#"{"architectures": ["MistralForTokenClassification"]}"#, ModelKind::SingleRun),
        ] {
            assert_eq!(with_config(config).kind, kind, "{config}");
        }
    }

    #[test]
    fn an_encoder_keeps_its_vocabulary_and_the_logits_of_every_position() {
        let labels = with_config(r#"{"vocab_size": 2048}"#);
        assert_eq!(labels.vocab_size, Some(2048));
        assert!(labels.before.is_none() && labels.inputs.iter().all(|input| input.name != LOGIT_POSITIONS));
    }

    /// Optimum's Mixtral with experts 1024 wide, all zero: in 4 bits, too, their matrices are worth reads of their own.
    fn wide_mixtral() -> tempfile::TempDir {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models/optimum/mixtral-with-past");
        let mut proto = Model::open(&path).unwrap().proto().clone();
        let graph = proto.graph.as_mut().unwrap();
        let of_experts =
            graph.node.iter().filter(|node| node.op_type() == "MatMul" && node.name().contains("/experts."));
        let names: BTreeMap<String, bool> =
            of_experts.map(|node| (node.input[1].clone(), node.name().contains("/w2/"))).collect();
        for tensor in &mut graph.initializer {
            if let Some(is_inner) = names.get(tensor.name()) {
                tensor.dims = if *is_inner { vec![1024, 64] } else { vec![64, 1024] };
                tensor.raw_data = Some(vec![0; 64 * 1024 * 4].into());
                tensor.float_data.clear();
            }
        }
        let dir = tempfile::tempdir().unwrap();
        hpp_onnx::write_model(&dir.path().join("model.onnx"), &proto).unwrap();
        std::fs::copy(path.join("config.json"), dir.path().join("config.json")).unwrap();
        dir
    }

    fn in_blocks_of_32(bits: Bits) -> QuantizeOptions {
        let format = BlockFormat { bits, block_size: 32, asymmetric: false, scale: ScaleRule::Extremes };
        let (head, embedding) = (Choice::None, Choice::None);
        QuantizeOptions { format, budget: None, formats: None, head, embedding, moments: None }
    }

    /// Bytes of 4 bits hold two elements, those of 8 bits one; scales are no elements.
    #[test]
    fn operations_of_experts_in_branches_do_not_depend_on_their_bits() {
        let dir = wide_mixtral();
        for bits in [None, Some(Bits::Four), Some(Bits::Eight)] {
            let quantize = bits.map(in_blocks_of_32);
            let options = AnalysisOptions {
                quantize: quantize.as_ref(),
                experts: ExpertComputation::Selected,
                ..AnalysisOptions::as_exported(None, LogitsMode::Requested)
            };
            let analysis = analyse_with(dir.path(), options).unwrap();
            let states: Vec<State> = analysis.states.iter().map(|planned| planned.state.clone()).collect();
            let symbols = symbol_values(&analysis.inputs, &states, PassSize { batch: 1, tokens: 1, past: 7 });
            let branches = analysis.graph.node_ids().filter(|id| analysis.graph.node(*id).op_type == "If");
            let operations: Vec<_> = branches.map(|id| infer::flops(&analysis.graph, id, &symbols)).collect();
            // A token selects each of four experts with a probability of a half.
            assert_eq!(operations, [Some(2 * 3 * 64 * 1024 / 2); 16], "{bits:?}");
        }
    }

    /// Experts that an exporter wrote out: quantization and packing see each of their matrices, whether a branch computes them or not.
    #[test]
    fn experts_in_branches_are_counted_as_exported() {
        let dir = wide_mixtral();
        let path = dir.path();
        let options = in_blocks_of_32(Bits::Four);
        let of_exported = AnalysisOptions::as_exported(None, LogitsMode::Requested);
        let read =
            |experts| analyse_with(path, AnalysisOptions { quantize: Some(&options), experts, ..of_exported }).unwrap();
        let [exported, selected] = [ExpertComputation::AsExported, ExpertComputation::Selected].map(read);
        let branches = |analysis: &Analysis| analysis.graph.nodes.iter().filter(|node| node.op_type == "If").count();
        assert_eq!((branches(&exported), branches(&selected)), (0, 16));
        let quantized = |analysis: &Analysis| analysis.quantized.as_ref().unwrap().summary.clone();
        assert_eq!(quantized(&exported), quantized(&selected));
        let packing = |analysis: &Analysis| {
            crate::packing(analysis, crate::CostSource::Assumed, &hpp_partition::Budget::default(), 1000)
        };
        assert_eq!(packing(&exported), packing(&selected));
        let whole = analyse(path, None, LogitsMode::Requested).unwrap();
        let candidates = quantization_candidates(&whole, &options, &mut |_, _| {}).unwrap();
        let of_experts =
            whole.graph.nodes.iter().filter(|node| node.name.contains("/experts.") && node.op_type == "MatMul");
        let weights: Vec<String> =
            of_experts.filter_map(|node| Some(whole.graph.value(node.inputs[1]?).name.clone())).collect();
        assert_eq!(weights.len(), 48);
        assert!(weights.iter().all(|name| candidates.matrices.iter().any(|matrix| matrix.name == *name)));
    }

    /// Measured once, with progress from before the first weight is read on.
    #[test]
    fn formats_within_a_budget_are_those_that_an_analysis_would_choose() {
        let dir = wide_mixtral();
        let options = in_blocks_of_32(Bits::Four);
        let whole = analyse(dir.path(), None, LogitsMode::All).unwrap();
        let candidates = quantization_candidates(&whole, &options, &mut |_, _| {}).unwrap();
        let budget = candidates.smallest() + (candidates.all - candidates.smallest()) / 4;
        let within = QuantizeOptions { budget: Some(budget), ..options };
        let mut heard = vec![];
        let formats = quantization_formats(&whole, &within, &mut |done, total| heard.push((done, total))).unwrap();
        let total = heard[0].1;
        assert!(heard.len() > 40 && heard.is_sorted() && heard[0].0 == 0 && heard.last() == Some(&(total, total)));
        let quantized = |options: &QuantizeOptions| {
            let options = AnalysisOptions {
                quantize: Some(options),
                ..AnalysisOptions::as_exported(None, LogitsMode::Requested)
            };
            analyse_with(dir.path(), options).unwrap().quantized.unwrap().summary
        };
        let chosen = QuantizeOptions { budget: None, formats: Some(formats), ..within.clone() };
        assert_eq!(quantized(&within), quantized(&chosen));
    }
}
