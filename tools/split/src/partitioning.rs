//! From a planning request to a placement of every block, by the planner or manually, and to the partitions that
//! follow from it.

use crate::cli::{KvHomeArg, LayerCount, SplitArgs};
use crate::error::{NeededBudget, SplitError};
use crate::group::{OwnPartition, group};
use crate::predicted::PredictedTimes;
use crate::request::{PlanningRequest, default_margin, with_default_margin};
use crate::{gpu_experts, split_mode, with_launches};
use hpp_model::{DiskStreaming, PartitionSpec};
use hpp_partition::{
    BlockPlacement, BlockSpec, DeviceId, EXPERT_WINDOW, ExpertMemory, KvHome, MemoryUsage, OverBudget, Phase,
    Placement, Problem, Solution, evaluate, fits, gpu_layers, plan, stream_layers, usage_of_partitions,
};
use hpp_schema::memory::{READ_AHEAD, state_window};
use std::num::NonZeroU32;

/// Slots of a ring if the user names the streamed blocks, without `--slots`: one computes, one is ready, one is being
/// filled.
const DEFAULT_SLOTS: u32 = 3;

/// How often a refusal raises the budget that it names.
const MOST_RAISES: usize = 4;

/// Who placed the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The planner.
    Planner,
    /// The user: every block has the same place whatever the budgets are.
    User,
    /// The user placed some blocks and the planner the others.
    Both,
}

/// A place for every block, its predicted times, and the partitions that it makes of the model.
#[derive(Clone, Debug)]
pub struct Partitioning {
    /// The placement of every block, with predicted times.
    pub solution: Solution,
    /// Runs of blocks that become partitions, in order. Invariant: they cover all blocks.
    pub partitions: Vec<PartitionSpec>,
    /// Who placed the blocks.
    pub decided_by: DecidedBy,
    /// Whether its times were measured.
    pub is_measured: bool,
    /// The minimum number of partitions that the user asked for.
    pub min_partitions: usize,
}

/// Decides where every block computes. A refusal names a budget with which this succeeds.
pub fn place_blocks(request: &PlanningRequest, args: &SplitArgs) -> Result<Partitioning, SplitError> {
    place(request, args).map_err(|refusal| with_confirmed_budget(request, args, refusal))
}

/// Raises the budget that a refusal names until planning succeeds with it. The budget is that of the placement that did not fit;
/// within it the planner may choose another placement, whose cuts take more.
pub fn with_confirmed_budget(request: &PlanningRequest, args: &SplitArgs, refusal: SplitError) -> SplitError {
    let mut refusal = with_raised_budget(request, args, refusal);
    if let SplitError::OverBudget { bytes, needed, source, .. } = &mut refusal
        && request.machine_memory(source.device).is_some_and(|memory| *bytes > memory)
    {
        *needed = NeededBudget::BeyondMachine;
    }
    if let SplitError::OverBudget { fitting_slots, source, .. } = &mut refusal
        && source.demand.ring > 0
    {
        *fitting_slots = most_slots(request, args);
    }
    refusal
}

fn with_raised_budget(request: &PlanningRequest, args: &SplitArgs, mut refusal: SplitError) -> SplitError {
    if let SplitError::OverBudget { bytes, fitting_layers, source, needed, on_each_gpu, .. } = &mut refusal
        && source.device != DeviceId::Cpu
    {
        *fitting_layers = most_layers(request, args);
        // With other budgets counted layers are divided in another way.
        if request.problem.gpus.len() > 1 && matches!(args.gpu_layers, Some(LayerCount::Count(_))) {
            (*bytes, *needed, *on_each_gpu) = (needed_on_each(request, source), NeededBudget::Enough, true);
        }
    }
    for _ in 0..MOST_RAISES {
        let SplitError::OverBudget { bytes, needed, source, on_each_gpu, .. } = &mut refusal else { break };
        let Err(next) = place(&with_enough(request, source.device, *bytes, *on_each_gpu), args) else { break };
        let SplitError::OverBudget { bytes: more, source: other, .. } = &next else { break };
        if other.device != source.device {
            // More of this memory alone may be enough.
            let is_enough = !*on_each_gpu && place(&request.with_budget(other.device, *more), args).is_ok();
            if is_enough {
                return next;
            }
            let too_small_too = match (source.device, other.device) {
                (DeviceId::Gpu(_), DeviceId::Gpu(_)) => None,
                (_, DeviceId::Cpu) => Some(NeededBudget::WithMoreRam),
                (DeviceId::Cpu, DeviceId::Gpu(_)) => Some(NeededBudget::WithMoreVram),
            };
            if let Some(too_small_too) = too_small_too {
                *needed = too_small_too;
                return refusal;
            }
            if !*on_each_gpu {
                let most = needed_on_each(request, source).max(needed_on_each(request, other));
                (*bytes, *needed, *on_each_gpu) = (most, NeededBudget::Enough, true);
                continue;
            }
        }
        let more = if *on_each_gpu { needed_on_each(request, other) } else { *more };
        if more <= *bytes {
            break;
        }
        *bytes = more;
        *needed = NeededBudget::Enough;
    }
    refusal
}

/// The request where a device, or each GPU (`on_each_gpu`), may use this many bytes.
fn with_enough(request: &PlanningRequest, device: DeviceId, bytes: u64, on_each_gpu: bool) -> PlanningRequest {
    if device == DeviceId::Cpu || !on_each_gpu {
        return request.with_budget(device, bytes);
    }
    let each = (0..request.problem.gpus.len()).map(DeviceId::Gpu);
    each.fold(request.clone(), |request, gpu| request.with_budget(gpu, bytes))
}

/// The most layers, fewer than `--gpu-layers` asks for, with which the plan fits; `None` if it asks for no number, or if none fits.
fn most_layers(request: &PlanningRequest, args: &SplitArgs) -> Option<NonZeroU32> {
    let Some(LayerCount::Count(asked)) = args.gpu_layers else { return None };
    let fits = |layers: &u32| {
        let args = SplitArgs { gpu_layers: Some(LayerCount::Count((*layers).into())), ..args.clone() };
        place(request, &args).is_ok()
    };
    let most = u32::try_from(asked.min(request.problem.blocks.len() as u64)).ok()?;
    let candidates: Vec<u32> = (1..most).collect();
    NonZeroU32::new(candidates.partition_point(fits) as u32)
}

/// The most slots, fewer than planned, with which the plan fits; `None` if it does with no number.
fn most_slots(request: &PlanningRequest, args: &SplitArgs) -> Option<NonZeroU32> {
    let fits = |slots: &u32| {
        let (mut request, mut args) = (request.clone(), args.clone());
        (request.options.slots, args.planning.slots) = (Some(*slots), Some(*slots));
        place(&request, &args).is_ok()
    };
    let planned = request.options.slots.unwrap_or(DEFAULT_SLOTS);
    let candidates: Vec<u32> = (1..planned.min(request.problem.blocks.len() as u32 + 1)).collect();
    NonZeroU32::new(candidates.partition_point(fits) as u32)
}

/// Decides where every block computes. The budget that a refusal names may be a little too small.
pub fn place(request: &PlanningRequest, args: &SplitArgs) -> Result<Partitioning, SplitError> {
    let problem = &request.problem;
    let budget = &problem.budget;
    tracing::info!(
        blocks = problem.blocks.len(),
        vram = ?budget.vram,
        ram = budget.ram,
        margin = budget.margin,
        disk_bytes_per_ms = problem.disk_bytes_per_ms,
        "planning problem"
    );
    let (solution, decided_by) = choose(request, args)?;
    let partitioning = match decided_by {
        DecidedBy::User => Partitioning::new(request, args.partitions, solution, decided_by),
        by_planner => with_launches::from_planner(request, args, solution, by_planner),
    };
    let Solution { objective_ms, bound_ms, proven, ref slots, .. } = partitioning.solution;
    let gap = partitioning.solution.gap();
    let partitions = partitioning.partitions.len();
    tracing::info!(?decided_by, partitions, ?slots, objective_ms, bound_ms, gap, proven, "placement chosen");
    for partition in &partitioning.partitions {
        let blocks = &problem.blocks[partition.blocks.clone()];
        let (first, last) = (blocks.first().map(|block| &*block.label), blocks.last().map(|block| &*block.label));
        tracing::debug!(first, last, prefill = %partition.placement.prefill, decode = %partition.placement.decode, "partition");
    }
    partitioning.check(request)?;
    split_mode::refuse_moved_shards(request, &partitioning.solution.placements)?;
    gpu_experts::refuse_on_host(args, &request.problem.blocks, &partitioning.solution.placements)?;
    refuse_split_kv(&request.problem.blocks, &partitioning.solution.placements, args.kv)?;
    refuse_too_many(&partitioning.partitions, args.max_partitions)?;
    Ok(partitioning)
}

/// A solution by the planner or by manual placement, and who decided it.
fn choose(request: &PlanningRequest, args: &SplitArgs) -> Result<(Solution, DecidedBy), SplitError> {
    let problem = &request.problem;
    let named = args.assign.as_ref().map(|assign| assign.placements(&problem.blocks)).transpose()?;
    refuse_missing_gpus(request, named.iter().flatten().flatten())?;
    let all_on_host =
        || evaluate_manual(request, args, vec![BlockPlacement::both(Placement::Cpu); problem.blocks.len()], &[]);
    let is_counted = matches!(args.planning.stream, Some(LayerCount::Count(_)))
        || matches!(args.gpu_layers, Some(LayerCount::Count(_)));
    let (solution, decided_by) = if is_counted {
        (counted_layers(request, args)?, DecidedBy::User)
    } else if named
        .as_ref()
        .is_some_and(|places| request.recorded_budgets.vram.is_empty() || places.iter().all(Option::is_some))
    {
        // Without a budget only the named blocks go to a GPU.
        (all_on_host(), DecidedBy::User)
    } else {
        let decided_by = if named.is_none() { DecidedBy::Planner } else { DecidedBy::Both };
        (plan(problem, &request.options).map_err(over_budget(request, decided_by))?, decided_by)
    };
    let Some(places) = named else { return Ok((solution, decided_by)) };
    let named = places.into_iter().zip(&problem.blocks);
    let named = named.map(|(place, block)| place.filter(|_| !block.kept_on_host).map(BlockPlacement::both));
    let placements: Vec<BlockPlacement> =
        named.zip(&solution.placements).map(|(named, placement)| named.unwrap_or(*placement)).collect();
    if decided_by == DecidedBy::Both && solution.placements == placements {
        return Ok((solution, decided_by));
    }
    // Where the user places all blocks the budgets have no influence, nor has the number of slots that the planner found for them.
    let planned = if decided_by == DecidedBy::User { &[][..] } else { &solution.slots };
    Ok((evaluate_manual(request, args, placements, planned), decided_by))
}

/// The note that `--stream N` names more layers than would compute on the host.
pub fn note_of_surplus_layers(problem: &Problem, args: &SplitArgs) -> Option<String> {
    let Some(LayerCount::Count(count)) = args.planning.stream else { return None };
    let (_, streamed) = counted_places(problem, args);
    let streamed = streamed.filter(|streamed| *streamed > 0 && count != u64::MAX && count > *streamed as u64)?;
    let layers = crate::amount::count(streamed, "layer");
    Some(format!("--stream {count}: only {layers} would compute on the host, all of them are streamed"))
}

/// The places of `--gpu-layers N` and `--stream N`, and how many layers are streamed; `None` without `--stream N`.
fn counted_places(problem: &Problem, args: &SplitArgs) -> (Vec<Placement>, Option<usize>) {
    let count = if let Some(LayerCount::Count(count)) = args.gpu_layers { count } else { 0 };
    let resident = gpu_layers(problem, count).into_iter().map(|place| match place {
        DeviceId::Cpu => Placement::Cpu,
        DeviceId::Gpu(gpu) => Placement::Resident(gpu),
    });
    let mut places: Vec<Placement> = resident.collect();
    let streamed = match args.planning.stream {
        Some(LayerCount::Count(count)) => Some(stream_layers(&problem.blocks, &mut places, count)),
        _ => None,
    };
    (places, streamed)
}

/// `--gpu-layers N` and `--stream N`: the last layers resident on the GPU, others streamed, the rest on the host.
fn counted_layers(request: &PlanningRequest, args: &SplitArgs) -> Result<Solution, SplitError> {
    let (places, streamed) = counted_places(&request.problem, args);
    if streamed == Some(0) {
        return Err(SplitError::setting(
            "--stream streams layers that would compute on the host, and there are none",
            "lower --gpu-layers, or name blocks with --assign BLOCKS=stream",
        ));
    }
    refuse_missing_gpus(request, places.iter())?;
    let evaluated = |places: &[Placement]| {
        evaluate_manual(request, args, places.iter().copied().map(BlockPlacement::both).collect(), &[])
    };
    let fits = |solution: &Solution| {
        fits(&request.problem, &solution.placements, &solution.slots, request.options.mechanisms).is_ok()
    };
    let divided = evaluated(&places);
    if fits(&divided) {
        return Ok(divided);
    }
    // The division does not count everything, such as slots, so a single GPU may hold what several do not.
    let on_one = |gpu: usize| -> Vec<Placement> {
        let to_gpu =
            |place: &Placement| if matches!(place, Placement::Resident(_)) { Placement::Resident(gpu) } else { *place };
        places.iter().map(to_gpu).collect()
    };
    let alone = (0..request.problem.gpus.len()).map(|gpu| evaluated(&on_one(gpu))).find(fits);
    Ok(alone.unwrap_or(divided))
}

/// Predicts the times of a manual placement. A GPU that streams has the planner's number of slots (`planned`), else
/// `--slots`, else the default.
fn evaluate_manual(
    request: &PlanningRequest,
    args: &SplitArgs,
    placements: Vec<BlockPlacement>,
    planned: &[u32],
) -> Solution {
    let streams =
        |gpu| placements.iter().any(|c| Phase::BOTH.iter().any(|phase| c.in_phase(*phase) == Placement::Streamed(gpu)));
    let given = args.planning.slots.unwrap_or(DEFAULT_SLOTS);
    let slots = |gpu: usize| match planned.get(gpu) {
        _ if !streams(gpu) => 0,
        Some(planned) if *planned > 0 => *planned,
        _ => given,
    };
    let slots = (0..request.problem.gpus.len()).map(slots).collect();
    evaluate(&request.problem, &request.options, placements, slots)
}

impl Partitioning {
    /// Whether the user placed blocks (manual placement).
    pub fn is_manual(&self) -> bool {
        self.decided_by != DecidedBy::Planner
    }

    /// Groups blocks into at least `min_partitions` partitions and predicts the times with their launches. `proven`
    /// survives only if the extra cuts cost nothing.
    pub fn new(request: &PlanningRequest, min_partitions: usize, solution: Solution, decided_by: DecidedBy) -> Self {
        let partitions = partitions(request, min_partitions, &solution.placements, &solution.slots);
        Partitioning { solution, partitions, decided_by, is_measured: false, min_partitions }.reevaluated(request)
    }

    /// Positions of the blocks that begin a partition, without the first block.
    pub fn cuts(&self) -> Vec<usize> {
        starts(&self.partitions)
    }

    /// The cuts that other block placements for the same blocks would lead to.
    pub fn cuts_for(&self, request: &PlanningRequest, placements: &[BlockPlacement]) -> Vec<usize> {
        starts(&partitions(request, self.min_partitions, placements, &self.solution.slots))
    }

    /// How the host's weights are read from disk; `None` where host memory holds them all.
    pub fn disk_streaming(&self, request: &PlanningRequest) -> Option<DiskStreaming> {
        disk_streaming(request, &self.problem(request), &self.solution.placements, &self.solution.slots)
    }

    /// Whether weights are read from disk in each pass or streamed to a GPU.
    pub fn streams_weights(&self, request: &PlanningRequest) -> bool {
        let is_streamed = |placement: &BlockPlacement| {
            Phase::BOTH.into_iter().any(|phase| matches!(placement.in_phase(phase), Placement::Streamed(_)))
        };
        self.disk_streaming(request).is_some_and(|disk| !disk.holds_all())
            || self.solution.placements.iter().any(is_streamed)
    }

    /// The request's problem with the cuts between these partitions.
    pub fn problem(&self, request: &PlanningRequest) -> Problem {
        Problem { cuts: self.cuts(), ..request.problem.clone() }
    }

    /// The problem for one sequence with the cuts between these partitions.
    pub fn single_problem(&self, request: &PlanningRequest) -> Problem {
        Problem { cuts: self.cuts(), ..request.single().clone() }
    }

    /// This placement with times predicted from the request's current costs, one launch per partition.
    pub fn reevaluated(mut self, request: &PlanningRequest) -> Self {
        let problem = self.problem(request);
        let Solution { placements, slots, objective_ms, bound_ms, proven, .. } = self.solution;
        let evaluated = evaluate(&problem, &request.options, placements, slots);
        let proven = proven && evaluated.objective_ms <= objective_ms * (1.0 + 1e-9);
        self.solution = Solution { bound_ms, proven, ..evaluated };
        self
    }

    /// Times of one sequence alone. The solution of a plan for several sequences has the times of all of them together.
    pub fn times_alone(&self, request: &PlanningRequest) -> PredictedTimes {
        if request.single.is_none() || self.is_measured {
            return PredictedTimes::of(&self.solution);
        }
        let Solution { placements, slots, .. } = &self.solution;
        let alone = evaluate(&self.single_problem(request), &request.options, placements.clone(), slots.clone());
        PredictedTimes::of(&alone)
    }

    /// This placement with measured times as its prediction, and without a bound.
    pub fn with_measured_times(mut self, request: &PlanningRequest, times: PredictedTimes) -> Self {
        let objective_ms = times.objective_ms(request.options.objective, &request.problem.load);
        let PredictedTimes { decode_ms, prefill_ms } = times;
        self.solution = Solution { decode_ms, prefill_ms, objective_ms, bound_ms: 0.0, proven: false, ..self.solution };
        self.is_measured = true;
        self
    }

    /// Refuses a placement that exceeds the memory of a device.
    pub fn check(&self, request: &PlanningRequest) -> Result<(), SplitError> {
        let over_budget = over_budget(request, self.decided_by);
        let Solution { placements, slots, .. } = &self.solution;
        fits(&request.problem, placements, slots, request.options.mechanisms).map_err(&over_budget)?;
        // Several partitions on the host may each hold a copy of a shared weight.
        let problem = self.problem(request);
        let on_host = MemoryUsage { gpus: vec![], ..usage_of_partitions(&problem, placements, slots) };
        on_host.check(&problem, request.options.mechanisms).map_err(over_budget)
    }

    /// Host memory beyond what runs need while sessions are created, bytes; 0 if weights are read from disk.
    pub fn session_creation(&self, request: &PlanningRequest) -> u64 {
        let Solution { placements, slots, .. } = &self.solution;
        let problem = self.problem(request);
        let usage = usage_of_partitions(&problem, placements, slots);
        if usage.host_holds_all(&problem) { usage.session_creation() } else { 0 }
    }

    /// Merges a partition into the next one, on the next one's device.
    pub fn join_with_next(mut self, index: usize, request: &PlanningRequest) -> Self {
        let joined = self.partitions.remove(index).blocks;
        let next = &mut self.partitions[index];
        next.blocks.start = joined.start;
        self.solution.placements[joined].fill(next.placement);
        self.reevaluated(request)
    }
}

fn starts(partitions: &[PartitionSpec]) -> Vec<usize> {
    partitions.iter().skip(1).map(|partition| partition.blocks.start).collect()
}

fn partitions(
    request: &PlanningRequest,
    min_partitions: usize,
    placements: &[BlockPlacement],
    slots: &[u32],
) -> Vec<PartitionSpec> {
    let grouped = |problem: &Problem| {
        let disk = disk_streaming(request, problem, placements, slots);
        let rules = OwnPartition {
            from_disk: disk.as_ref().is_some_and(|disk| !disk.holds_all()),
            tables: disk.is_some(),
            states_on_disk: problem.budget.host_kv_on_disk,
            shards: request.divides_rows,
            movable: request.movable,
        };
        group(&request.problem, placements, min_partitions, rules, &request.providers.host)
    };
    // Each partition holds constants of its own: weights that fit in host memory as one partition may not fit as
    // several. The second pass decides about disk streaming with the cuts of the first.
    let cuts = starts(&grouped(&request.problem));
    grouped(&Problem { cuts, ..request.problem.clone() })
}

/// How the host's weights are read so that both phases stay within the host budget; `None` if everything fits, unless the request maps
/// tables.
fn disk_streaming(
    request: &PlanningRequest,
    problem: &Problem,
    placements: &[BlockPlacement],
    slots: &[u32],
) -> Option<DiskStreaming> {
    let usage = usage_of_partitions(problem, placements, slots);
    let is_table: Vec<bool> = (0..problem.blocks.len()).map(|block| problem.is_lookup_table(block)).collect();
    if usage.host_holds_all(problem) {
        let tables_only =
            DiskStreaming { locked_share: 1.0, read_level: 0, window: None, expert_cache: None, is_table };
        return request.maps_tables.then_some(tables_only);
    }
    let packed_level = Phase::BOTH.map(|phase| usage.read_level(problem, phase)).into_iter().max().unwrap_or(0);
    let locked_share = Phase::BOTH.map(|phase| usage.locked_share(problem, phase)).into_iter().fold(1.0, f64::min);
    let memories: Vec<ExpertMemory> =
        Phase::BOTH.into_iter().filter_map(|phase| usage.expert_memory(problem, phase)).collect();
    // A phase without experts on the host reads its weights as if there were none.
    let expert_cache = match memories[..] {
        [prefill, decode] => Some(prefill.cache.min(decode.cache)),
        _ => None,
    };
    let window = match packed_level {
        0 if expert_cache.is_some() => Some(EXPERT_WINDOW),
        0 if usage.host_holds_all_but_tables(problem) => None,
        level => Some(level + READ_AHEAD),
    };
    let expert_cache = expert_cache.map(|cache| {
        let locked = locked_of_both_phases(problem, placements, packed_level);
        let taken = [usage.host.kv, usage.host.workspace, locked, window.unwrap_or(0)];
        let left = problem.budget.host().map(|host| taken.into_iter().fold(host, u64::saturating_sub));
        left.map_or(cache, |left| cache.min(left))
    });
    let read_level = problem.budget.packing.unpacked(packed_level);
    Some(DiskStreaming { locked_share, read_level, window, expert_cache, is_table })
}

/// Packed bytes of the weights, without experts, that stay locked on the host if some block has another place for the prompt than for decoding: the
/// memory use of one phase counts only the weights of that phase. 0 if all blocks have one place: then the planner counts them.
fn locked_of_both_phases(problem: &Problem, placements: &[BlockPlacement], packed_level: u64) -> u64 {
    let on_host = || {
        (0..placements.len())
            .filter(|block| placements[*block].holds_weights_on_host() && !problem.is_lookup_table(*block))
    };
    if on_host().all(|block| placements[block].prefill == placements[block].decode) {
        return 0;
    }
    let packed = |block: usize| {
        let by_demand =
            problem.blocks[block].experts.filter(|_| placements[block] == BlockPlacement::both(Placement::Cpu));
        let experts = by_demand.map_or(0, |experts| experts.bytes);
        problem.budget.packing.packed(problem.weight_bytes(block).saturating_sub(experts))
    };
    on_host().map(|block| packed(block).saturating_sub(packed_level)).fold(0, u64::saturating_add)
}

/// Converts the planner's error into this command's, with a budget that would suffice.
pub fn over_budget(request: &PlanningRequest, decided_by: DecidedBy) -> impl Fn(OverBudget) -> SplitError + '_ {
    move |source| {
        let what = match source.device {
            DeviceId::Cpu if request.problem.gpus.is_empty() => "the model does not fit in host memory".to_owned(),
            DeviceId::Cpu => "the blocks that the GPUs do not hold do not fit in host memory".to_owned(),
            DeviceId::Gpu(index) => format!("the budget of gpu{index} is too small"),
        };
        let has_gpus = !request.problem.gpus.is_empty();
        let gpus = u8::try_from(request.problem.gpus.len()).unwrap_or(u8::MAX);
        let needed = match decided_by {
            DecidedBy::User => NeededBudget::Smallest,
            DecidedBy::Planner | DecidedBy::Both if !has_gpus => NeededBudget::Smallest,
            DecidedBy::Planner | DecidedBy::Both => NeededBudget::Enough,
        };
        let bytes = sufficient_budget(request, &source);
        let freed_by_kv_on_disk = freed_by_kv_on_disk(&request.problem, &source);
        let draft = if source.device == DeviceId::Cpu { request.limits.reserved } else { 0 };
        let source = OverBudget { draft, ..source };
        SplitError::OverBudget {
            what: what.into(),
            bytes,
            needed,
            gpus,
            freed_by_kv_on_disk,
            divides_rows: request.divides_rows,
            on_each_gpu: request.divides_rows,
            fitting_context: None,
            fitting_slots: None,
            fitting_layers: None,
            source,
        }
    }
}

/// Host memory that a plan frees by keeping states on disk, bytes: the size of the states less that of their window.
fn freed_by_kv_on_disk(problem: &Problem, source: &OverBudget) -> u64 {
    let has_disk = problem.disk_bytes_per_ms.is_some();
    if !has_disk || problem.budget.kv != KvHome::Device || problem.budget.host_kv_on_disk {
        return 0;
    }
    let largest = problem.blocks.iter().map(|block| block.kv_bytes).max().unwrap_or(0);
    source.demand.kv.saturating_sub(state_window(largest / problem.load.sequences.max(1)))
}

/// The smallest budget of a device, bytes, that holds this demand beside what blocks may not use. The default margin grows with the budget
/// of the smallest GPU.
pub fn sufficient_budget(request: &PlanningRequest, needed: &OverBudget) -> u64 {
    let DeviceId::Gpu(gpu) = needed.device else { return needed.required_budget() };
    if !request.default_margin {
        return needed.required_budget();
    }
    let demand = needed.demand.total();
    if request.divides_rows {
        return needed_on_each(request, needed);
    }
    let vram = &request.problem.budget.vram;
    let others: Vec<u64> = vram.iter().enumerate().filter(|(at, _)| *at != gpu).map(|(_, bytes)| *bytes).collect();
    let beside_others = (!others.is_empty()).then(|| demand.saturating_add(default_margin(&others)));
    with_default_margin(demand).min(beside_others.unwrap_or(u64::MAX))
}

/// The budget with which a GPU holds its demand if every GPU has as much, bytes.
fn needed_on_each(request: &PlanningRequest, needed: &OverBudget) -> u64 {
    if request.default_margin { with_default_margin(needed.demand.total()) } else { needed.required_budget() }
}

fn refuse_missing_gpus<'a>(
    request: &PlanningRequest,
    places: impl Iterator<Item = &'a Placement>,
) -> Result<(), SplitError> {
    let gpus = request.problem.gpus.len();
    match places.filter_map(|place| place.gpu()).find(|gpu| *gpu >= gpus) {
        Some(gpu) => Err(SplitError::setting(
            format!("blocks are placed on gpu{gpu}, but the plan has {}", crate::amount::count(gpus, "GPU")),
            "give --vram one size for each GPU, such as 24G,12G",
        )),
        None => Ok(()),
    }
}

/// Refuses layers with KV caches on the host where `--kv gpu` wants them on GPUs.
pub fn refuse_split_kv(blocks: &[BlockSpec], placements: &[BlockPlacement], kv: KvHomeArg) -> Result<(), SplitError> {
    let on_host = blocks.iter().zip(placements).filter(|(b, c)| b.kv_bytes > 0 && c.decode == Placement::Cpu).count();
    if kv == KvHomeArg::Gpu && on_host > 0 {
        return Err(SplitError::setting(
            format!("--kv gpu, but {on_host} layers with a KV cache compute on the CPU"),
            "a CPU layer's cache in VRAM would cross the bus twice per token: use --kv follow, or place the layers on the GPU",
        ));
    }
    Ok(())
}

fn refuse_too_many(partitions: &[PartitionSpec], limit: Option<usize>) -> Result<(), SplitError> {
    match limit {
        Some(limit) if partitions.len() > limit => Err(SplitError::setting(
            format!("this placement needs {} partitions, but --max-partitions is {limit}", partitions.len()),
            "allow more partitions, or place adjacent blocks on one device",
        )),
        _ => Ok(()),
    }
}
