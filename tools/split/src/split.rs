//! `hpp-split MODEL`: analyse the model, place its blocks, cut it, write the plan, print the result.

use crate::amount::{ESTIMATED, count, time};
use crate::analysis::{Computation, analyse};
use crate::choose::{Alternative, Chosen, PlanInputs, WORTH_THE_DISK};
use crate::cli::{GpuExpertsArg, KvHomeArg, PlanningArgs, SplitArgs};
use crate::costs::Costs;
use crate::error::SplitError;
use crate::explain::explain;
use crate::files::{PlanWriter, WriteOptions};
use crate::gpu_experts::Fitting;
use crate::local_machine::LocalMachine;
use crate::own_draft::{self, OwnDraft};
use crate::partitioning::{Partitioning, note_of_surplus_layers, refuse_split_kv, sufficient_budget};
use crate::refine::refine;
use crate::request::{PlanningRequest, WhyOnDisk};
use crate::tell::while_telling;
use crate::unwritten_plan::{UnwrittenPlan, unwritten_plan};
use crate::{
    calibrate, experts, fitting_context, gpu_experts, interrupt, operators, output, presets, print, quantize, request,
    settings, split_mode, sweep, table, targets, trace, unknown_providers, unused_options, written_out,
};
use hpp_graph::{Block, PartitionGraph};
use hpp_model::{Analysis, ExpertComputation, faulty_blocks, has_paged_caches};
use hpp_onnx::QuantizeOptions;
use hpp_partition::{BlockPlacement, Placement, useless_gpus};
use hpp_schema::{ByteSize, Plan, Provider, TRACE_START};
use std::path::{Path, PathBuf};

/// Splits a model as the arguments say.
pub fn run(args: &SplitArgs) -> Result<(), SplitError> {
    if args.planning.machine.as_deref() == Some(Path::new(presets::LIST)) {
        let list = if args.json { presets::json() } else { presets::list() };
        return Ok(hpp_io::print_line(&list)?);
    }
    let with_experts = with_fitting_experts(args)?;
    let args = with_experts.as_ref().unwrap_or(args);
    let Inputs { analysis, experts_on_cpu, costs, local, quantize } = read_inputs(args)?;
    let own_draft = own_draft(args, &analysis, &costs)?;
    let reserved = own_draft.as_ref().map_or(0, |draft| draft.host_memory);
    let alternative = experts_on_cpu.as_ref().map(|(args, analysis)| Alternative { args, analysis });
    let inputs = PlanInputs { args, analysis: &analysis, costs: &costs, local: &local, reserved, alternative };
    let first = inputs.request(inputs.limits())?;
    print_notes(args, &analysis, &costs, &first);
    own_draft.iter().for_each(|draft| tell!("{}", draft.note()));
    if let Some(range) = args.planning.sweep_vram {
        return while_telling("planning", || sweep::run(&inputs, &first, range, &costs.label()));
    }
    refuse_without_gpus(args, &analysis, &first)?;
    refuse_without_disk(args, &costs)?;
    let out_dir = args.out.clone().unwrap_or_else(|| default_out(&analysis));
    check_target(args, Some(&out_dir))?;
    if let Some(path) = &args.planning.trace {
        hpp_io::check_replaceable(path, TRACE_START.as_bytes())?;
        hpp_io::check_creatable(path)?;
    }
    let Chosen { mut request, partitioning, is_alternative, with_kv_on_disk_ms } =
        while_telling("planning", || fitting_context::choose(&inputs, quantize.as_ref()))?;
    let inputs = if is_alternative { inputs.swapped() } else { inputs };
    let PlanInputs { args, analysis, .. } = inputs;
    if is_alternative {
        tell!("note: {}", written_out::NOTE);
    }
    let planned = partitioning.clone();
    let (partitioning, trials) = match args.planning.refine {
        Some(tokens) => refine(&mut request, args, analysis, tokens, &out_dir)?,
        None => (partitioning, vec![]),
    };
    let partitioning = while_telling("planning", || targets::enforce(&mut request, &inputs, partitioning))?;
    let source = if trials.is_empty() { costs.label() } else { format!("{}, refined", costs.label()) };
    let UnwrittenPlan { partitioning, parts, plan } = unwritten_plan(&request, analysis, partitioning, source)?;
    if let Some(note) = useless_gpus_note(args, &request, &partitioning) {
        tell!("note: {note}");
    }
    if let Some(note) = experts::note_of_whole_mixtures(&request, analysis, &partitioning) {
        tell!("note: {note}");
    }
    if let Some(note) = experts::note_of_float_activations(&request, analysis, &partitioning) {
        tell!("note: {note}");
    }
    if args.kv == KvHomeArg::Auto && request.problem.budget.host_kv_on_disk {
        tell!("note: {}", kv_on_disk_note(&request));
    }
    if let Some(ms) = with_kv_on_disk_ms {
        tell!("note: {}", kv_in_memory_note(ms, planned.solution.decode_ms));
    }
    unused_options::notes(args, analysis, &plan).iter().for_each(|note| tell!("note: {note}"));
    if let Some(path) = &args.planning.trace {
        trace::write(&request, &partitioning, path)?;
    }
    let plan = write(args, analysis, own_draft.as_ref(), &parts, plan, &out_dir)?;
    let explanation = match args.planning.explain {
        true => Some(while_telling("planning what --explain compares", || {
            explain(&inputs, &planned, &request, &partitioning, quantize.as_ref(), &plan)
        })?),
        false => None,
    };
    // stdout may be closed or full: print the location of the plan, which goes to stderr, before reporting that.
    let printed = print::result(args, analysis, &plan, explanation.as_ref(), &trials);
    if !args.dry_run {
        print::location(&out_dir, &plan);
        if analysis.quantized.is_some() || !analysis.activations().are_exported() {
            tell!("{}", quantize::how_to_measure(analysis));
        }
    }
    Ok(printed?)
}

/// The model and the source of costs.
struct Inputs {
    analysis: Analysis,
    /// Alternative settings, and the model analysed with them: experts on the CPU. Only if an exporter wrote experts out and all of
    /// them would compute otherwise.
    experts_on_cpu: Option<(SplitArgs, Analysis)>,
    costs: Costs,
    local: LocalMachine,
    /// How the model is quantized.
    quantize: Option<QuantizeOptions>,
}

/// Checks the settings, reads the costs and analyses the model. Reports all errors in settings and cost files at once,
/// before it opens the model.
fn read_inputs(args: &SplitArgs) -> Result<Inputs, SplitError> {
    let mut errors = settings::check(args);
    // A profile that is refused whatever it holds is not read, so that nothing else is reported about it.
    let profile = args.planning.profile.clone().filter(|_| !settings::refuses_profile(args));
    let costs = Costs::read(&PlanningArgs { profile, ..args.planning.clone() }, &mut errors);
    errors.into_result()?;
    let hint =
        "hpp-split MODEL, an ONNX file or the directory that an exporter wrote; `hpp-split --help` lists the options";
    let path = args.model.as_deref().ok_or_else(|| SplitError::setting("no model was given", hint))?;
    check_target(args, args.out.as_deref())?;
    if args.out.is_none() && args.quantize.takes_long() {
        // Only the name counts, not the formats that a budget allows: measuring these takes long.
        let options = args.quantize.options().map(|options| QuantizeOptions { budget: None, ..options });
        let analysis = analyse(path, args.context, args, options.as_ref(), Computation::SELECTED)?;
        check_target(args, Some(&default_out(&analysis)))?;
    }
    let local = request::local_machine(args, &costs);
    let computation = request::computation(args, &costs, &local);
    split_mode::check_gpus(args, computation.shards.unwrap_or(0), &local)?;
    gpu_experts::check_gpus(args, request::gpus(args, &costs, &local))?;
    let quantize = calibrate::options(args, path, &costs)?;
    let analysis = analyse(path, args.context, args, quantize.as_ref(), computation)?;
    operators::check(&analysis, args.allow_unknown_operators)?;
    let is_exported = computation.experts == ExpertComputation::AsExported;
    let costs = match quantize {
        // Only the sensitivity of blocks in a profile counts: its times are those of unquantized weights.
        Some(_) => costs.without_profile(),
        None => {
            costs.check_origin(&analysis, args.planning.allow_other_machine)?;
            costs.check_activations(&analysis)?;
            costs
        }
    };
    let experts_on_cpu = is_exported.then(|| written_out::on_cpu(args, &analysis, path, quantize.as_ref())).flatten();
    Ok(Inputs { analysis, experts_on_cpu, costs, local, quantize })
}

/// The settings with a number of experts instead of `--gpu-experts auto`; `None` without that.
fn with_fitting_experts(args: &SplitArgs) -> Result<Option<SplitArgs>, SplitError> {
    if args.gpu_experts != Some(GpuExpertsArg::Auto) {
        return Ok(None);
    }
    let fitting = |experts: u64| {
        let args = SplitArgs { gpu_experts: Some(GpuExpertsArg::Count(experts)), ..args.clone() };
        let Inputs { analysis, costs, local, .. } = read_inputs(&args)?;
        let inputs = PlanInputs {
            args: &args,
            analysis: &analysis,
            costs: &costs,
            local: &local,
            reserved: 0,
            alternative: None,
        };
        let request = inputs.request(inputs.limits())?;
        Ok::<_, SplitError>(gpu_experts::fitting(&analysis, &request))
    };
    // Kernels may need more memory with more experts, so the number is counted again with as many.
    let fitting = match fitting(1)? {
        Fitting::Some(experts) => fitting(experts)?,
        none_or_all => none_or_all,
    };
    Ok(Some(fitting.apply(args)))
}

/// Refuses a directory that cannot be written, before anything that takes long.
fn check_target(args: &SplitArgs, out: Option<&Path>) -> Result<(), SplitError> {
    let is_written = !args.dry_run && args.planning.sweep_vram.is_none();
    match out.filter(|_| is_written) {
        Some(out) => {
            // A packed plan holds copies of what it needs.
            if let (Some(model), false) = (&args.model, args.pack) {
                output::refuse_model_inside(out, model)?;
            }
            Ok(output::check_target(out, args.force)?)
        }
        None => Ok(()),
    }
}

/// The draft that the arguments ask for, planned; `None` if they ask for none.
fn own_draft(args: &SplitArgs, analysis: &Analysis, costs: &Costs) -> Result<Option<OwnDraft>, SplitError> {
    let Some(bits) = args.quantize.draft else { return Ok(None) };
    own_draft::check(analysis)?;
    let options = calibrate::draft_options(args, analysis, costs, bits)?;
    OwnDraft::plan(args, analysis, costs, &options).map(Some)
}

/// Refuses `--kv disk` if the machine has no disk.
fn refuse_without_disk(args: &SplitArgs, costs: &Costs) -> Result<(), SplitError> {
    if args.kv != KvHomeArg::Disk || costs.source().disk_reads().is_some() {
        return Ok(());
    }
    Err(SplitError::setting(
        format!("--kv disk needs a disk, and the rates of this machine ({}) have none", costs.label()),
        "add `disk: { read_gb_per_s: 3 }` to the machine file, or omit --kv disk",
    ))
}

/// Refuses what a plan without GPUs cannot do however much memory it has, so that no hint on memory comes before.
fn refuse_without_gpus(args: &SplitArgs, analysis: &Analysis, request: &PlanningRequest) -> Result<(), SplitError> {
    if !request.problem.gpus.is_empty() {
        return Ok(());
    }
    operators::check_all_on_host(analysis, args.allow_unknown_operators)?;
    let blocks = &request.problem.blocks;
    refuse_split_kv(blocks, &vec![BlockPlacement::both(Placement::Cpu); blocks.len()], args.kv)
}

fn print_notes(args: &SplitArgs, analysis: &Analysis, costs: &Costs, request: &PlanningRequest) {
    if has_paged_caches(&analysis.graph) {
        tell!(
            "note: this model keeps its KV cache in pages (PagedAttention) that HPP does not manage, so its plan computes one step from --inputs and \
             generates no text; export it again without paged attention to generate"
        );
    }
    if let Some(note) = unstated_experts_note(analysis).filter(|_| !request.problem.gpus.is_empty()) {
        tell!("note: {note}");
    }
    let listed = &args.planning.providers;
    let may_use_webgpu = !request.problem.gpus.is_empty() && (listed.is_empty() || listed.contains(&Provider::WEBGPU));
    if let Some(note) = faults_note(args, analysis).filter(|_| may_use_webgpu) {
        tell!("note: {note}");
    }
    for note in costs.run().iter().flat_map(|run| run.notes(&request.corrections, request.scenario.prompt)) {
        tell!("note: {note}");
    }
    if costs.source().disk_reads().is_none() {
        tell!(
            "note: the rates of this machine ({}) have no disk, so plans read no weights from one and keep KV caches in memory; \
             `disk: {{ read_gb_per_s: 3 }}` in a machine file adds one",
            costs.label()
        );
    }
    if let Some(note) = gpu_experts::note(analysis) {
        tell!("note: {note}");
    }
    if args.layers_with_host_experts().is_some() && costs.profile().is_some() {
        tell!(
            "note: the profile has whole layers: experts and the rest of a layer share its times by their bytes and operations"
        );
    }
    let local = request::notes(args, request, costs, analysis.kind);
    let longest =
        analysis.config.context_length.filter(|longest| *longest > analysis.context && args.context.is_none());
    if let Some(longest) = longest {
        tell!(
            "note: planning for {} tokens of context, of {longest} that the model allows; --context N for another",
            analysis.context
        );
    }
    if let Some(quantized) = &analysis.quantized {
        tell!("{}", quantize::summary(&quantized.summary));
    }
    if let Some(count) = analysis.integer_operators.filter(|count| *count > 0) {
        tell!("activations of {count} operators are rounded to 8 bits");
    }
    if let Some(active) = &analysis.active_neurons {
        tell!(
            "partitions on the host compute only active neurons: {} of the weights belong to neurons",
            ByteSize(active.bytes()).human()
        );
    }
    let unknown = unknown_providers::notes(&args.planning.providers, costs.profile());
    let forms = experts::notes_of_unknown_forms(analysis);
    let surplus = note_of_surplus_layers(&request.problem, args);
    let of_machine = local.iter().chain(&unknown).chain(&surplus);
    for note in analysis.notes.iter().chain(&forms).chain(&costs.notes(request.scenario)).chain(of_machine) {
        tell!("note: {note}");
    }
}

/// Why KV caches lie on disk although no option asks for it.
fn kv_on_disk_note(request: &PlanningRequest) -> String {
    let (context, sequences) = (request.scenario.context, request.problem.load.sequences);
    match request.limits.kv_on_disk {
        Some(WhyOnDisk::TooLittleMemory) => format!(
            "memory is too small for {context} tokens of context, so KV caches of layers on the CPU lie on disk, where each token reads \
             what the window does not hold; more --ram or a shorter --context keeps them in memory"
        ),
        _ if sequences > 1 => format!(
            "KV caches of layers on the CPU lie on disk, because with {sequences} sequences together that is faster; --kv follow keeps \
             them in memory"
        ),
        _ => format!(
            "KV caches of layers on the CPU lie on disk: weights in their place are expected to gain more at {} tokens of context; --kv follow \
             keeps them in memory",
            request.scenario.decode_context()
        ),
    }
}

/// Why KV caches stay in memory although a token is expected to take only `on_disk_ms` instead of `in_memory_ms` with them on disk.
fn kv_in_memory_note(on_disk_ms: f64, in_memory_ms: f64) -> String {
    let [on_disk, in_memory] = [on_disk_ms, in_memory_ms].map(|ms| time(ms, ESTIMATED));
    let least = 100.0 * WORTH_THE_DISK;
    format!(
        "with KV caches of layers on the CPU on disk (--kv disk) a token may take {on_disk} instead of {in_memory}, since weights get their memory; \
         hpp-split leaves them in memory where the gain is less than {least:.0} %, because how fast the disk reads caches is an assumption"
    )
}

/// The note with the demand of the smallest block, if the planner can place no block on a GPU and the plan uses none.
fn useless_gpus_note(args: &SplitArgs, request: &PlanningRequest, partitioning: &Partitioning) -> Option<String> {
    let mut placements = partitioning.partitions.iter().map(|partition| partition.placement);
    if args.has_manual_placement() || placements.any(|placement| placement != BlockPlacement::both(Placement::Cpu)) {
        return None;
    }
    let needed = useless_gpus(&request.problem, &request.options)?;
    let (gpu, budget) = (needed.device, ByteSize(needed.budget).human());
    let bytes = ByteSize(sufficient_budget(request, &needed));
    let longest = request.problem.load.passes.iter().copied().max().unwrap_or(1);
    Some(format!(
        "all blocks compute on the CPU: {gpu} may use {budget}, and the block that takes least of it needs {} ({} bytes) with its state, \
         its workspace for passes of {} and the margin; shorter passes may need less",
        bytes.human_rounded_up(),
        bytes.0,
        count(longest as usize, "token")
    ))
}

/// Warns of experts that CUDA and the CPU may read differently.
fn unstated_experts_note(analysis: &Analysis) -> Option<String> {
    let blocks = analysis.blocks_with_unstated_experts();
    if blocks.is_empty() {
        return None;
    }
    let labels: Vec<String> = blocks.iter().map(|label| (*label).to_owned()).collect();
    Some(format!(
        "the experts (QMoE) of {} blocks ({}) were exported for CUDA, or do not say for what: CUDA and the CPU read such weights \
         differently, so place these layers on one of them, or export the model for the CPU or WebGPU (docs/PROVIDERS.md)",
        blocks.len(),
        table::blocks_and_experts(&labels)
    ))
}

/// Names the blocks that the plan keeps off WebGPU because WebGPU computes one of their operators wrongly.
fn faults_note(args: &SplitArgs, analysis: &Analysis) -> Option<String> {
    let faulty = faulty_blocks(analysis, Provider::WEBGPU);
    let (_, fault) = faulty.first()?;
    let blocks: Vec<&Block> = faulty.iter().map(|(block, _)| &analysis.segmentation.blocks[*block]).collect();
    let labels: Vec<String> = blocks.iter().map(|block| block.label.clone()).collect();
    let advice = match fault.operator == "QMoE" && blocks.iter().any(|block| !block.is_experts) {
        true if args.gpu_experts.is_some() => {
            "; with --cpu-moe instead of --gpu-experts the rest of these layers may compute on WebGPU"
        }
        true => "; with --cpu-moe the rest of these layers may compute on WebGPU",
        false => "",
    };
    Some(format!(
        "{}'s {} {}; {} of {} blocks ({}) are not placed on WebGPU (docs/PROVIDERS.md){advice}",
        Provider::WEBGPU.name(),
        fault.operator,
        fault.what,
        blocks.len(),
        analysis.segmentation.blocks.len(),
        table::blocks_and_experts(&labels),
    ))
}

fn default_out(analysis: &Analysis) -> PathBuf {
    PathBuf::from(format!("{}.hpp", analysis.name))
}

/// Writes the plan, or computes what a dry run would write. Returns the plan with its files recorded.
fn write(
    args: &SplitArgs,
    analysis: &Analysis,
    own_draft: Option<&OwnDraft>,
    parts: &[PartitionGraph],
    plan: Plan,
    out_dir: &Path,
) -> Result<Plan, SplitError> {
    let options = WriteOptions {
        force: args.force,
        pack: args.pack,
        in_place: args.in_place,
        hash_weights: args.hash_weights,
        movable: args.movable,
    };
    if args.dry_run {
        return PlanWriter::dry_run(options, analysis, own_draft, out_dir, parts, plan);
    }
    let writer = PlanWriter::begin(options, analysis, own_draft, out_dir)?;
    if let Some(leftovers) = writer.leftovers() {
        interrupt::name_leftovers(leftovers);
    }
    writer.finish(parts, plan)
}
