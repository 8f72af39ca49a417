//! The draft that a model has of itself (`--draft`): the same model with quantized weights, planned to stay in host memory.
//!
//! Its embedding stays as it is and is memory-mapped from the model's own weights, so that both share its pages.

use crate::amount::{self, ESTIMATED};
use crate::cli::{KvHomeArg, PlanningArgs, SplitArgs};
use crate::costs::Costs;
use crate::error::SplitError;
use crate::local_machine::LocalMachine;
use crate::partitioning::{Partitioning, place_blocks};
use crate::quantize;
use crate::request::{LEAST_CHUNK, Limits, PlanningRequest};
use crate::unwritten_plan::{UnwrittenPlan, unwritten_plan};
use hpp_graph::PartitionGraph;
use hpp_model::{Analysis, AnalysisOptions, LogitsMode, analyse_with, scales_beside_packed};
use hpp_onnx::QuantizeOptions;
use hpp_partition::{Phase, usage_of_partitions};
use hpp_schema::{ByteSize, InputRole, ModelKind, Plan, gives_one_position};

/// A draft that is planned and not written yet.
pub struct OwnDraft {
    /// The model with quantized weights.
    pub analysis: Analysis,
    /// The parts of its graph, one for each partition.
    pub parts: Vec<PartitionGraph>,
    /// Its plan.
    pub plan: Plan,
    /// Bits of its weight matrices.
    pub bits: u32,
    /// Host memory that it takes beside the process itself, bytes. Without tables, whose pages are those of the model.
    pub host_memory: u64,
    /// The part of it that belongs to a sequence, bytes.
    pub sequence_memory: u64,
}

impl OwnDraft {
    /// Plans a draft whose weights are quantized with these options.
    pub fn plan(
        args: &SplitArgs,
        analysis: &Analysis,
        costs: &Costs,
        options: &QuantizeOptions,
    ) -> Result<Self, SplitError> {
        let path = analysis.model.path();
        let exported = AnalysisOptions::as_exported(Some(analysis.context), LogitsMode::Requested);
        let quantized = analyse_with(path, AnalysisOptions { quantize: Some(options), ..exported });
        let quantized = quantized.map_err(|error| SplitError::Draft(Box::new(error)))?;
        Self::of(quantized, args, costs, 1)
    }

    /// Plans a quantized model to stay in host memory, in at least this many partitions.
    pub fn of(quantized: Analysis, args: &SplitArgs, costs: &Costs, partitions: usize) -> Result<Self, SplitError> {
        let args = &arguments(args, partitions);
        // A profile and a run hold times of the model's own weights.
        let costs = &costs.of_other_model();
        let limits = Limits { longest_pass: LEAST_CHUNK, ..Limits::default() };
        let mut request = PlanningRequest::new(args, &quantized, costs, &LocalMachine::default(), limits)?;
        request.problem.budget.ram = None;
        request.recorded_budgets.ram = None;
        request.maps_tables = true;
        let partitioning = place_blocks(&request, args)?;
        let UnwrittenPlan { partitioning, parts, plan } =
            unwritten_plan(&request, &quantized, partitioning, costs.label())?;
        let (host_memory, sequence_memory) = memory(&request, &partitioning);
        let host_memory = host_memory.saturating_add(scales_beside_packed(&quantized.graph));
        let bits = args.quantize.draft.map_or(0, |bits| bits.bits().count() as u32);
        Ok(OwnDraft { analysis: quantized, parts, plan, bits, host_memory, sequence_memory })
    }

    /// Text on what the draft is and takes.
    pub fn note(&self) -> String {
        let quantized = self.analysis.quantized.as_ref().map(|quantized| quantize::summary(&quantized.summary));
        let memory = ByteSize(self.host_memory).human();
        let ms = amount::time(self.plan.predictions.decode_ms, ESTIMATED);
        format!(
            "draft: {}; it takes {memory} of host memory and is expected to propose a token in {ms}; expected speeds are without drafting",
            quantized.unwrap_or_default()
        )
    }
}

/// Refuses models that cannot draft for themselves.
pub fn check(analysis: &Analysis) -> Result<(), SplitError> {
    if analysis.kind == ModelKind::SingleRun {
        return Err(SplitError::setting("--draft is for models that generate tokens", "omit --draft"));
    }
    if gives_one_position(&analysis.outputs) {
        return Err(SplitError::setting(
            "--draft needs scores for each token of a pass, and this model gives those of the last token only",
            "omit --draft, or export the model with the scores of all tokens (GenAI's builder: without prune_lm_head and include_hidden_states)",
        ));
    }
    if analysis.takes_one_token() {
        return Err(SplitError::setting(
            "--draft needs passes of several tokens, and this model's states grow by one token in a pass",
            "omit --draft; an export whose passes may have any number of tokens can have a draft",
        ));
    }
    let reads_more = |role: InputRole| matches!(role, InputRole::Embeddings | InputRole::Free);
    match analysis.inputs.iter().find(|input| reads_more(input.role)) {
        Some(input) => Err(SplitError::setting(
            format!("a draft gets token ids only, and this model reads {} too", input.name),
            "omit --draft; hpp-exec --speculate ngram needs no draft",
        )),
        None => Ok(()),
    }
}

/// The arguments that plan the draft: on the host, without a budget.
fn arguments(args: &SplitArgs, partitions: usize) -> SplitArgs {
    let planning = PlanningArgs { refine: None, stream: None, mechanisms: None, slots: None, ..args.planning.clone() };
    SplitArgs {
        vram: vec![ByteSize(0)],
        ram: None,
        margin: None,
        planning,
        gpu_layers: None,
        assign: None,
        movable: false,
        active_neurons: false,
        kv: KvHomeArg::Follow,
        max_partitions: None,
        partitions,
        all_logits: false,
        ..args.clone()
    }
}

/// Host memory of the draft beside the process and without tables, and the part of it that is the state of a sequence.
fn memory(request: &PlanningRequest, partitioning: &Partitioning) -> (u64, u64) {
    let problem = partitioning.problem(request);
    let usage = usage_of_partitions(&problem, &partitioning.solution.placements, &partitioning.solution.slots);
    let weights = Phase::BOTH.map(|phase| usage.host_reads[phase as usize].all()).into_iter().max().unwrap_or(0);
    let parts = [usage.host.kv, usage.host.workspace];
    (parts.into_iter().fold(weights, u64::saturating_add), usage.host.kv)
}
