//! The planning request: costs and limits as a planning problem, planner options, and budgets as the plan records them.

use crate::analysis::Computation;
use crate::cli::{CompressArg, DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, ExpertsArg, KvHomeArg, LayerCount, SplitArgs};
use crate::costs::Costs;
use crate::host_providers::{PhaseWeights, choose_host_providers};
use crate::input_errors::{InputError, InputErrors};
use crate::local_machine::LocalMachine;
use crate::measured_run::Corrections;
use hpp_model::{
    Analysis, CostSource, DEFAULT_CHUNK, ExpertComputation, ExpertsOnGpu, ProviderPolicy, Scenario, ThisHost,
    avoid_faults, mark_blocks_without_kernels, packing, problem, widest_workspace,
};
use hpp_partition::{
    BlockPlacement, Budget, DeviceId, KvHome, Mechanisms, Objective, Options, Packing, Placement, Problem,
};
use hpp_schema::memory::{PROCESS, READ_AHEAD, RESERVE, heap_beyond_process};
use hpp_schema::{Budgets, ByteSize, ModelKind, names_a_file, provider_options};

/// Device memory for manual placement without a budget: no limit.
const UNLIMITED: u64 = 1 << 50;
/// A described machine's host memory divided by this is left to other programs.
const HOST_RESERVE_DIVISOR: u64 = 16;
/// A pass on the host may use the memory budget divided by this for its activations: the rest is for weights.
const WORKSPACE_DIVISOR: u64 = 8;
/// Tokens that a pass on the host takes even if their activations exceed that: more than a KV page of 128.
pub const MIN_CHUNK: u64 = 192;
/// Tokens of the shortest passes, which are planned where nothing else fits, where estimates gain by them, and for drafts of the model itself.
pub const LEAST_CHUNK: u64 = 32;

/// Whether this system can keep KV caches on disk.
pub const STATES_ON_DISK: bool = cfg!(target_os = "linux");

/// A planning problem and how to solve it.
#[derive(Clone, Debug)]
pub struct PlanningRequest {
    /// Batch, context, prompt and answer lengths that the costs assume.
    pub scenario: Scenario,
    /// The problem; for several sequences if `single` is set.
    pub problem: Problem,
    /// The problem for one sequence, if `problem` is for several.
    pub single: Option<Problem>,
    /// What a run of an earlier plan changed about the costs.
    pub corrections: Corrections,
    /// Planner options.
    pub options: Options,
    /// The limits that the plan records.
    pub recorded_budgets: Budgets,
    /// Weights that are read from disk are compressed where that takes at most this many of 1000 bytes.
    pub compress_permille: u32,
    /// `--movable`.
    pub movable: bool,
    /// Whether each GPU has a shard of every layer.
    pub divides_rows: bool,
    /// Whether experts are read ahead that a mixture probably selects.
    pub read_experts_ahead: bool,
    /// Whether the margin on GPUs is the default.
    pub default_margin: bool,
    /// `--allow-unknown-operators`.
    pub allow_unknown_operators: bool,
    /// Heap of sessions and the tokenizer beyond that of every process, bytes. The process's part of the budget includes
    /// it.
    pub heap: u64,
    /// What limits the plan beside its budgets.
    pub limits: Limits,
    /// Whether tables stay memory-mapped where host memory holds them too.
    pub maps_tables: bool,
    /// The providers of partitions.
    pub providers: ProviderPolicy,
    /// Memory of this machine; empty where the plan is for another machine.
    pub local: LocalMachine,
    /// Device memory of each GPU of the described or profiled machine, bytes; empty if there is none.
    machine_vram: Vec<u64>,
    /// Its host memory, bytes.
    machine_ram: Option<u64>,
}

/// What limits a plan beside its budgets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of a pass.
    pub longest_pass: u64,
    /// Passes get no shorter than this many tokens to leave memory for something else.
    pub shortest_pass: u64,
    /// Bytes of the host budget that something else takes, such as the model's own draft.
    pub reserved: u64,
    /// Why KV caches of layers on the CPU lie on disk although no argument asks for it; `None` if they lie where the
    /// arguments say.
    pub kv_on_disk: Option<WhyOnDisk>,
}

/// Why KV caches lie on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyOnDisk {
    /// Memory is too small for them.
    TooLittleMemory,
    /// Another use of the memory that they leave makes the plan faster.
    Faster,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { longest_pass: u64::MAX, shortest_pass: MIN_CHUNK, reserved: 0, kv_on_disk: None }
    }
}

impl PlanningRequest {
    /// Builds the request from the settings; reports all obstacles at once.
    pub fn new(
        args: &SplitArgs,
        analysis: &Analysis,
        costs: &Costs,
        local: &LocalMachine,
        limits: Limits,
    ) -> Result<Self, InputErrors> {
        let (budget, recorded_vram) = budget(args, costs, local);
        let mut scenario = scenario(analysis, args, costs, &budget, local);
        scenario.prefill_chunk = scenario.prefill_chunk.min(limits.longest_pass);
        let mut recorded_budgets = Budgets {
            vram: recorded_vram.into_iter().map(ByteSize).collect(),
            ram: budget.ram.map(ByteSize),
            context: scenario.context,
            batch: scenario.batch,
            margin: ByteSize(budget.margin),
        };
        let error = |finding: &hpp_schema::Finding| InputError {
            hint: match finding.place.as_str() {
                "gpus" => Some(missing_gpus_hint(args, costs)),
                place if place == "--ram" || place.starts_with("gpus[") => Some(beyond_machine_hint(costs)),
                place if place.starts_with("classes.") => Some(FAILED_MEASUREMENT),
                _ => None,
            },
            ..InputError::in_file(&costs.label(), finding)
        };
        let heap = heap_of(analysis);
        let process = [heap, limits.reserved].into_iter().fold(budget.process, u64::saturating_add);
        let budget =
            Budget { process, host_kv_on_disk: budget.host_kv_on_disk || limits.kv_on_disk.is_some(), ..budget };
        let mut problem = problem(analysis, scenario, costs.source(), budget)
            .map_err(|findings| InputErrors(findings.iter().map(error).collect()))?;
        let compress_permille = match args.planning.compress {
            CompressArg::Auto => costs.source().compress_permille(scenario.threads),
            CompressArg::Always => 1000,
            CompressArg::Never => 0,
        };
        if args.planning.compress != CompressArg::Auto {
            problem.budget.packing = packing(analysis, costs.source(), &problem.budget, compress_permille);
        }
        if args.planning.experts == ExpertsArg::All {
            problem.blocks.iter_mut().for_each(|block| block.experts = None);
        }
        let options = args.planning.options(args.avoids_streaming());
        avoid_gpus(&mut problem);
        set_assigned(&mut problem, args, options.mechanisms);
        if analysis.rows.is_some() {
            // Each part of a layer is a partition, and so is what lies before and behind them.
            problem.cuts = (1..problem.blocks.len()).collect();
        }
        if !args.allow_unknown_operators {
            mark_blocks_without_kernels(&mut problem, analysis);
        }
        for (index, block) in problem.blocks.iter_mut().enumerate() {
            block.needs_gpu |= analysis.has_gpu_experts(index);
        }
        if args.kv == KvHomeArg::Gpu && !problem.gpus.is_empty() {
            problem.blocks.iter_mut().for_each(|block| block.needs_gpu |= block.kv_bytes > 0);
        }
        // Manual placement may override this; the plan still lists no provider that computes a block wrongly.
        if manual_gpus(args) == 0 {
            avoid_faults(&mut problem, analysis, costs.source());
        }
        // Record this machine's free memory as a limit only if the model can exceed it, so that a plan for a model that
        // fits is the same on every machine.
        if let Some(ram) = local.ram().filter(|ram| args.ram.is_none() && *ram < max_host_bytes(&problem)) {
            problem.budget.ram = Some(ram);
            recorded_budgets.ram = Some(ByteSize(ram));
        }
        let providers = providers(args, analysis, costs, scenario, &mut problem);
        let corrections = costs
            .run()
            .map(|run| run.corrections(analysis, scenario, costs.source(), &problem.budget))
            .transpose()?
            .unwrap_or_default();
        let corrections = match args.planning.experts {
            ExpertsArg::All => corrections.without_expert_hits(),
            ExpertsArg::Auto | ExpertsArg::Selected => corrections,
        };
        corrections.apply(&mut problem);
        Ok(PlanningRequest {
            scenario,
            problem,
            providers,
            corrections,
            single: None,
            options,
            recorded_budgets,
            compress_permille,
            movable: args.movable,
            divides_rows: analysis.rows.is_some(),
            read_experts_ahead: args.planning.experts == ExpertsArg::Auto,
            default_margin: args.margin.is_none(),
            allow_unknown_operators: args.allow_unknown_operators,
            heap,
            limits,
            maps_tables: false,
            local: local.clone(),
            machine_vram: costs.source().gpu_memory(),
            machine_ram: costs.source().host_memory(),
        })
    }
}

impl PlanningRequest {
    /// Half of the longest pass, for a plan that does not fit otherwise; `None` where passes are as short as they may be.
    pub fn shorter_pass(&self) -> Option<u64> {
        self.shorter_passes(self.limits.shortest_pass).next()
    }

    /// Shorter and shorter lengths of passes: half of this request's longest, half of that and so on; the last is
    /// `shortest`.
    pub fn shorter_passes(&self, shortest: u64) -> impl Iterator<Item = u64> + use<> {
        let Scenario { prefill_chunk, divides_prompts, .. } = self.scenario;
        let half = move |pass: &u64| (divides_prompts && *pass > shortest).then(|| (pass / 2).max(shortest));
        std::iter::successors(half(&prefill_chunk), half)
    }

    /// Whether memory may be too small for all weights: there is a GPU, or the host cannot hold every placement.
    pub fn may_be_short_of_memory(&self) -> bool {
        let Problem { gpus, budget, .. } = &self.problem;
        !gpus.is_empty() || budget.ram.is_some_and(|ram| ram < max_host_bytes(&self.problem))
    }

    /// The longest pass whose activations leave the host room for weights, if these placements compute prompts there in longer passes.
    /// With GPUs, the length of passes is planned for their memory first.
    pub fn shorter_pass_on_host(&self, analysis: &Analysis, placements: &[BlockPlacement]) -> Option<u64> {
        let Scenario { prefill_chunk, divides_prompts, .. } = self.scenario;
        let room = self.problem.budget.ram? / WORKSPACE_DIVISOR;
        let blocks = self.problem.blocks.iter().zip(placements);
        let on_host = blocks.filter(|(_, placement)| placement.prefill == Placement::Cpu);
        let workspace = on_host.map(|(block, placement)| block.host_workspace(*placement)).max()?;
        if !divides_prompts || self.problem.gpus.is_empty() || workspace <= room {
            return None;
        }
        Some(chunk_within(analysis, self.scenario, room)).filter(|pass| *pass < prefill_chunk)
    }

    /// The same request where a device may use this many bytes. The length of passes stays.
    pub fn with_budget(&self, device: DeviceId, bytes: u64) -> PlanningRequest {
        let mut request = self.clone();
        for problem in std::iter::once(&mut request.problem).chain(&mut request.single) {
            let budget = &mut problem.budget;
            match device {
                DeviceId::Cpu => budget.ram = Some(bytes),
                DeviceId::Gpu(gpu) => {
                    budget.vram[gpu] = bytes;
                    if self.default_margin {
                        budget.margin = default_margin(&budget.vram);
                    }
                }
            }
        }
        request
    }

    /// Makes it a request for one sequence again.
    pub fn reset_to_single_sequence(&mut self) {
        if let Some(single) = self.single.take() {
            self.problem = single;
        }
    }

    /// Memory of a device of the described or profiled machine, bytes; `None` if the plan is for no such machine.
    pub fn machine_memory(&self, device: DeviceId) -> Option<u64> {
        match device {
            DeviceId::Cpu => self.machine_ram,
            DeviceId::Gpu(gpu) => self.machine_vram.get(gpu).copied(),
        }
    }

    /// The problem for one sequence.
    pub fn single(&self) -> &Problem {
        self.single.as_ref().unwrap_or(&self.problem)
    }
}

/// Sets the cost of the blocks that the user keeps on the host to infinity on GPUs, so that no planner places them there.
fn avoid_gpus(problem: &mut Problem) {
    for gpu in &mut problem.gpus {
        let kept = gpu.blocks.iter_mut().zip(&problem.blocks).filter(|(_, block)| block.kept_on_host);
        kept.for_each(|(cost, _)| cost.make_impossible());
    }
}

/// Tells the planner where the user places blocks, as far as that is possible. Impossible places are refused later.
fn set_assigned(problem: &mut Problem, args: &SplitArgs, mechanisms: Mechanisms) {
    let named = args.assign.iter().filter_map(|assign| assign.placements(&problem.blocks).ok()).next();
    for (block, place) in named.into_iter().flatten().enumerate() {
        let is_possible =
            |place: &Placement| problem.placements(block, mechanisms).contains(&BlockPlacement::both(*place));
        problem.blocks[block].assigned = place.filter(is_possible);
    }
}

/// The memory of this machine that the plan needs; nothing if the plan is for a described or profiled machine.
pub fn local_machine(args: &SplitArgs, costs: &Costs) -> LocalMachine {
    if !costs.is_assumed() {
        return LocalMachine::default();
    }
    LocalMachine::detect(
        uses_local_gpus(args) || manual_gpus(args) > 0 || !excludes_gpus(args) && !args.vram.is_empty(),
    )
}

/// Notes on a prompt that does not fit the context, on budgets taken from this machine, on given budgets that exceed its free memory, and on planned GPUs that it lacks.
pub fn notes(args: &SplitArgs, request: &PlanningRequest, costs: &Costs, kind: ModelKind) -> Vec<String> {
    let local = &request.local;
    let default_gpus = local.host.is_some() && uses_local_gpus(args);
    let mut notes: Vec<String> = local.note(args.ram.is_none(), default_gpus).into_iter().collect();
    if let Some((given, host)) = args.ram.zip(local.host).filter(|(given, host)| given.0 > host.available) {
        let [free, total] = [host.available, host.total].map(|bytes| ByteSize(bytes).human());
        let given = given.human();
        notes.push(format!("--ram {given} is more than this machine has free ({free} of {total})"));
    }
    if kind != ModelKind::SingleRun {
        notes.extend(shortened_texts(args, request.scenario));
    }
    let (planned, found) = (request.problem.gpus.len(), local.gpus.len());
    notes.extend(unused_gpus(args, planned, costs.described_gpus().unwrap_or(found)));
    if local.host.is_some() && planned > found {
        let found = if found == 0 { "no GPU".to_owned() } else { format!("{found} of {planned} GPUs") };
        notes.push(format!(
            "HPP finds {found} here (hpp-exec devices says why): the GPU of this plan and its speed are assumed"
        ));
    }
    for (number, (given, gpu)) in args.vram.iter().zip(&local.gpus).enumerate() {
        if let Some(free) = gpu.free.filter(|free| given.0 > *free) {
            let (given, free) = (given.human(), ByteSize(free).human());
            notes.push(format!("--vram {given} is more than gpu{number} ({}) has free: {free}", gpu.name));
        }
    }
    notes
}

/// The note on GPUs of the machine that the plan does not use because `--vram` has fewer sizes.
fn unused_gpus(args: &SplitArgs, planned: usize, has: usize) -> Option<String> {
    let wants_gpus = args.vram.iter().any(|size| size.0 > 0) && args.gpu_layers != Some(LayerCount::Count(0));
    if !wants_gpus || args.planning.sweep_vram.is_some() || planned >= has {
        return None;
    }
    let all = vec!["SIZE"; has].join(",");
    Some(format!("--vram uses {planned} of the machine's {has} GPUs; --vram {all} plans for all"))
}

/// The note on given lengths of prompt and answer that do not fit the context together.
fn shortened_texts(args: &SplitArgs, scenario: Scenario) -> Option<String> {
    let Scenario { prompt, new_tokens, context, .. } = scenario;
    let is_shorter = |planned: u64, given: u64, default: u64| planned < given && given != default;
    let is_shorter = (
        is_shorter(prompt, args.prompt_tokens, DEFAULT_PROMPT),
        is_shorter(new_tokens, args.new_tokens, DEFAULT_NEW_TOKENS),
    );
    let assumed = match is_shorter {
        (false, false) => return None,
        (true, false) => format!(
            "a prompt of {prompt} tokens, not {}: with {new_tokens} new tokens, no more fit",
            args.prompt_tokens
        ),
        (false, true) => {
            format!("{new_tokens} new tokens, not {}: with a prompt of {prompt} tokens, no more fit", args.new_tokens)
        }
        (true, true) => format!(
            "a prompt of {prompt} tokens, not {}, and {new_tokens} new tokens, not {}: together, no more fit",
            args.prompt_tokens, args.new_tokens
        ),
    };
    Some(format!("predictions assume {assumed} in {context} tokens of context"))
}

/// What to do where the profile lacks times because a measurement failed.
const FAILED_MEASUREMENT: &str = "profile the model again (hpp-profile --resume --retry-failures), or plan without --profile, which says what a device cannot compute";

/// What to do where the profile or the described machine has fewer GPUs than the plan.
fn missing_gpus_hint(args: &SplitArgs, costs: &Costs) -> &'static str {
    match costs.profile() {
        Some(_) if args.planning.sweep_vram.is_some() => {
            "profile the GPUs too (hpp-profile with --providers cpu,cuda or cpu,webgpu), or leave out --sweep-vram"
        }
        Some(_) => {
            "profile the GPUs too (hpp-profile with --providers cpu,cuda or cpu,webgpu), or plan without a GPU: --vram 0"
        }
        None if costs.has_no_gpu() && args.planning.sweep_vram.is_some() => {
            "leave out --sweep-vram, or choose a machine with a GPU: `--machine list` shows the presets"
        }
        None if costs.has_no_gpu() => {
            "leave out --vram, or choose a machine with a GPU: `--machine list` shows the presets"
        }
        None => {
            "give --vram a size for each GPU of the machine, or describe a machine with more GPUs: --machine with a YAML file like those \
             in fixtures/machines that has an entry under `gpus` for each"
        }
    }
}

/// What to do about a budget that the machine does not have.
fn beyond_machine_hint(costs: &Costs) -> &'static str {
    match costs.profile() {
        Some(_) => {
            "give at most what this machine has, or plan for another machine: --machine with a YAML file like those in fixtures/machines"
        }
        None => {
            "give at most what it has, or describe a machine that has more in a YAML file like those in fixtures/machines"
        }
    }
}

/// Whether no option mentions GPUs, so that the plan uses those of this machine.
fn uses_local_gpus(args: &SplitArgs) -> bool {
    let is_manual = manual_gpus(args) > 0 || matches!(args.gpu_layers, Some(LayerCount::Count(_)));
    args.vram.is_empty() && args.planning.sweep_vram.is_none() && !is_manual
}

/// `--vram 0`.
fn excludes_gpus(args: &SplitArgs) -> bool {
    matches!(args.vram.as_slice(), [ByteSize(0)])
}

/// The providers of partitions: on GPUs those that the user or the table names; on the host those that the profile found fastest, but
/// only if host memory holds the model twice, because another provider keeps a copy of its weights in its own layout.
fn providers(
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
    scenario: Scenario,
    problem: &mut Problem,
) -> ProviderPolicy {
    let planning = &args.planning;
    let gpus = (!planning.providers.is_empty()).then(|| planning.providers.clone());
    let mut policy = ProviderPolicy { host: Vec::new(), gpus, options: provider_options(&planning.ep_option) };
    let CostSource::Profile(profile) = costs.source() else { return policy };
    for (provider, options) in &profile.settings.provider_options {
        policy.options.entry(*provider).or_insert_with(|| options.clone());
    }
    for options in policy.options.values_mut() {
        options.retain(|key, value| !names_a_file(key, value));
    }
    let twice = max_host_bytes(problem).saturating_mul(2);
    if problem.budget.ram.is_some_and(|ram| ram < twice) {
        return policy;
    }
    let candidates = if planning.providers.is_empty() { &profile.settings.providers } else { &planning.providers };
    let decoded_tokens = problem.load.decoded_tokens() as f64;
    let (decode, prefill) = match planning.options(args.avoids_streaming()).objective {
        Objective::Decode => (1.0, 0.0),
        Objective::Prefill => (0.0, 1.0),
        Objective::Mixed | Objective::Throughput => (decoded_tokens, 1.0),
    };
    policy.host =
        choose_host_providers(problem, analysis, profile, scenario, candidates, PhaseWeights { decode, prefill });
    policy
}

/// Heap, beyond that of every process, of the model's tokenizer and of a session for each block, bytes.
fn heap_of(analysis: &Analysis) -> u64 {
    let file = analysis.config.tokenizer.as_ref().and_then(|path| path.metadata().ok());
    let sessions = analysis.segmentation.blocks.len() as u64;
    heap_beyond_process(sessions, file.map_or(0, |file| file.len()), analysis.vocab_size.unwrap_or(0))
}

/// Upper bound on the host memory of any placement: every block on the host as a partition of its own.
pub fn max_host_bytes(problem: &Problem) -> u64 {
    let all = 0..problem.blocks.len();
    let weights = all.map(|block| problem.weight_bytes(block)).fold(0, u64::saturating_add);
    let state = problem.blocks.iter().map(|block| block.kv_bytes).fold(0, u64::saturating_add);
    let on_host = BlockPlacement::both(Placement::Cpu);
    let workspace = problem.blocks.iter().map(|block| block.host_workspace(on_host)).max().unwrap_or(0);
    let sessions = problem.blocks.iter().map(|block| block.session_bytes).fold(0, u64::saturating_add);
    let budget = &problem.budget;
    [state, workspace, sessions, budget.process].into_iter().fold(budget.packing.packed(weights), u64::saturating_add)
}

/// The default margin is the smallest GPU's memory divided by this, at most [`MAX_MARGIN`] bytes.
const MARGIN_DIVISOR: u64 = 16;
const MAX_MARGIN: u64 = 1 << 30;

/// Bytes left unused on each GPU without `--margin`.
pub fn default_margin(vram: &[u64]) -> u64 {
    vram.iter().min().map_or(0, |smallest| (smallest / MARGIN_DIVISOR).min(MAX_MARGIN))
}

/// The smallest VRAM budget, bytes, that holds `demand` beside the default margin.
pub fn with_default_margin(demand: u64) -> u64 {
    // The smallest V with V - floor(V / 16) >= demand.
    let scaled = u128::from(demand.saturating_sub(1)) * u128::from(MARGIN_DIVISOR) / u128::from(MARGIN_DIVISOR - 1) + 1;
    u64::try_from(scaled).unwrap_or(u64::MAX).min(demand.saturating_add(MAX_MARGIN))
}

/// How the model computes. Of experts that an exporter wrote out, only the selected ones compute, unless a GPU may compute them: it takes their
/// weights as inputs and would wait for each condition. With `--split-mode row` each GPU has a shard of every layer.
pub fn computation<'a>(args: &SplitArgs, costs: &'a Costs, local: &LocalMachine) -> Computation<'a> {
    let gpus = gpus(args, costs, local);
    let experts = match gpus > 0 && !args.cpu_moe {
        true => ExpertComputation::AsExported,
        false => ExpertComputation::Selected,
    };
    let gpu_experts = args.experts_on_gpu().map(|experts| ExpertsOnGpu {
        layers: args.layers_with_host_experts().unwrap_or(0),
        experts,
        statistics: costs.source().experts(),
    });
    Computation { experts, shards: args.divides_rows().then_some(gpus), gpu_experts }
}

/// The number of GPUs in the planner's budget.
pub fn gpus(args: &SplitArgs, costs: &Costs, local: &LocalMachine) -> usize {
    budget(args, costs, local).0.vram.len()
}

/// The planner's budget, and the device memory that the plan records, which is empty where the budget is unlimited.
fn budget(args: &SplitArgs, costs: &Costs, local: &LocalMachine) -> (Budget, Vec<u64>) {
    let source = costs.source();
    let given: Vec<u64> = args.vram.iter().map(|size| size.0).collect();
    let recorded = match (given.is_empty(), args.planning.sweep_vram) {
        _ if excludes_gpus(args) => vec![],
        (false, _) => given,
        (true, None) if uses_local_gpus(args) && costs.is_assumed() => local.vram(),
        // A sweep gives the budgets; without a machine it plans for one GPU.
        (true, Some(range)) if source.gpu_memory().is_empty() => range.points().into_iter().max().into_iter().collect(),
        (true, _) => source.gpu_memory(),
    };
    let vram = if recorded.is_empty() { vec![UNLIMITED; manual_gpus(args)] } else { recorded.clone() };
    let host = source.host_memory().map(|memory| memory - memory / HOST_RESERVE_DIVISOR);
    let budget = Budget {
        vram,
        ram: args.ram.map(|size| size.0).or(host),
        margin: args.margin.map_or(default_margin(&recorded), |size| size.0),
        movable: args.movable,
        kv: if args.kv == KvHomeArg::Host { KvHome::Host } else { KvHome::Device },
        host_kv_on_disk: args.kv == KvHomeArg::Disk,
        process: PROCESS,
        read_ahead: READ_AHEAD,
        reserve: RESERVE,
        // `problem` sets it from the model.
        packing: Packing::default(),
    };
    (budget, recorded)
}

/// The number of GPUs that the options for manual placement name.
fn manual_gpus(args: &SplitArgs) -> usize {
    let layers = usize::from(matches!(args.gpu_layers, Some(LayerCount::Count(count)) if count > 0));
    let assigned = args.assign.as_ref().and_then(|assign| assign.highest_gpu()).map_or(0, |gpu| gpu + 1);
    let streamed = usize::from(matches!(args.planning.stream, Some(LayerCount::Count(_))));
    layers.max(streamed).max(assigned)
}

/// Whether the size of a run depends on a number of tokens.
fn has_tokens(analysis: &Analysis) -> bool {
    analysis.kind != ModelKind::SingleRun || analysis.inputs.iter().any(|input| input.role.counts_tokens())
}

/// The scenario to plan for. A GPU takes a prompt in chunks, which limit its workspace. The host takes it in one pass unless that would
/// use too much of its memory.
fn scenario(analysis: &Analysis, args: &SplitArgs, costs: &Costs, budget: &Budget, local: &LocalMachine) -> Scenario {
    let context = analysis.context;
    let new_tokens = if analysis.kind == ModelKind::SingleRun { 0 } else { args.new_tokens };
    // A prompt and its answer fit in the context: of a short one, the answer gets a quarter at least.
    let prompt = match has_tokens(analysis) {
        true => args.prompt_tokens.min(context - new_tokens.min(context / 4)).max(1),
        // Images and the like: a run is a run.
        false => 1,
    };
    let whole = Scenario {
        batch: args.batch,
        context,
        prompt,
        new_tokens: new_tokens.min(context - prompt.min(context)).max(new_tokens.min(1)),
        prefill_chunk: context,
        threads: costs.source().threads().unwrap_or_else(|| ThisHost::read().cores).into(),
        // Without a cache every pass computes the whole text.
        divides_prompts: analysis.kind == ModelKind::Decoder,
    };
    let chunk = match budget.ram.or(local.ram()) {
        _ if !whole.divides_prompts => context,
        _ if !budget.vram.is_empty() => context.min(DEFAULT_CHUNK),
        Some(ram) => chunk_within(analysis, whole, ram / WORKSPACE_DIVISOR),
        _ => context,
    };
    Scenario { prefill_chunk: chunk, ..whole }
}

/// The longest pass halved until its activations fit in `bytes`, but no less than [`MIN_CHUNK`] tokens: each pass reads the
/// streamed weights once more.
fn chunk_within(analysis: &Analysis, whole: Scenario, bytes: u64) -> u64 {
    let mut chunk = whole.prefill_chunk;
    let least = MIN_CHUNK.min(chunk);
    while chunk > least && widest_workspace(analysis, Scenario { prefill_chunk: chunk, ..whole }) > bytes {
        chunk = (chunk / 2).max(least);
    }
    chunk
}
