//! The host memory budget: decides how many bytes of each partition's weights stay in host memory beside everything else.

use crate::buffers::Lane;
use crate::error::{EngineError, fallback_needs};
use crate::options::{EngineOptions, WeightReads};
use crate::port::{Backend, WeightResidency};
use crate::program::Program;
use crate::reporter::Reporter;
use crate::weights::locked::{LockedWeights, in_kernel_layout, lockable_sizes, without_experts};
use hpp_schema::memory::{BINDING, PROCESS, READ_AHEAD, RESERVE};
use hpp_schema::{ByteSize, DeviceKind, Partition, PartitionVariant, Plan, Residency, State};

/// Bytes of a page: control groups count in pages.
const PAGE: u64 = 4 << 10;

/// Whether `limit` is `bytes` rounded down to whole pages, as a control group stores limits.
fn is_rounded_down(bytes: u64, limit: u64) -> bool {
    limit > 0 && limit == bytes / PAGE * PAGE
}

/// Decides where the weights of each partition are between its runs, and how many bytes are locked.
#[derive(Clone, Copy)]
pub(crate) struct HostMemoryBudget {
    reads: WeightReads,
    /// Most host memory to use, bytes: the plan's or this process's limit, whichever is less. `None` if no partition streams.
    limit: Option<u64>,
    /// Where the weights of partitions are that were planned for a GPU and fell back to the host.
    gpu_fallback: WeightResidency,
    /// Sequences whose states have room.
    sequences: u64,
    /// Bytes that the caller takes.
    reserved: u64,
    /// Bytes that the caller takes for each sequence.
    reserved_per_sequence: u64,
    /// The plan's limit plus what other engines of this process take, bytes; without streamed partitions at most the process's limit. `None` if
    /// the plan has no limit.
    planned: Option<u64>,
}

/// Host memory in use apart from weights, bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostMemoryInUse {
    /// The resident set of the process once sessions are loaded, if the system reports it.
    pub rss: Option<u64>,
    /// The states of one sequence.
    pub states: u64,
    /// The tensors that a pass needs for one more sequence ([`Lane::host_bytes`]), and its bindings.
    pub lane: u64,
    /// What all sequences have in memory of states on disk.
    pub state_window: u64,
}

impl HostMemoryInUse {
    /// The memory in use once the sessions of a program are loaded.
    pub fn of<B: Backend>(program: &Program, lane: &Lane<B>, backend: &B) -> Self {
        let (states, state_window) = (program.host_state_bytes(), program.state_window());
        let bindings = BINDING.saturating_mul(program.stages.iter().count() as u64);
        let lane = lane.host_bytes(program).saturating_add(bindings);
        HostMemoryInUse { rss: backend.memory_use().resident, states, lane, state_window }
    }
}

impl HostMemoryBudget {
    /// The plan's budget. If this process may use less memory than planned, less is locked; an error if the memory is too little even with nothing
    /// locked.
    pub fn new<B: Backend>(
        plan: &Plan,
        backend: &B,
        options: &EngineOptions,
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        let reads = options.weights;
        let sequences = options.sequences.unwrap_or(plan.budgets.batch).max(1);
        let (reserved, reserved_per_sequence) = (options.reserved, options.reserved_per_sequence);
        let is_read = reads != WeightReads::Mapped;
        let process_limit = backend.memory_limit();
        let whole = plan.budgets.ram.map(|ram| ram.0.saturating_add(options.others));
        let tightest_limit = whole.into_iter().chain(process_limit).min();
        let fits_host =
            tightest_limit.is_none_or(|limit| holds_all_on_host(plan, limit.saturating_sub(options.others)));
        let gpu_fallback =
            if is_read && !fits_host { WeightResidency::ReadFromDisk } else { WeightResidency::InMemory };
        let streams = is_read && streams_on_host(plan);
        let planned = whole.filter(|_| streams);
        let is_less = |(planned, limit): &(u64, u64)| limit < planned && !is_rounded_down(*planned, *limit);
        let Some((planned, limit)) = planned.zip(process_limit).filter(is_less) else {
            let limit = planned.or(tightest_limit.filter(|_| gpu_fallback == WeightResidency::ReadFromDisk));
            let planned = whole.and(tightest_limit);
            return Ok(HostMemoryBudget {
                reads,
                limit,
                gpu_fallback,
                sequences,
                reserved,
                reserved_per_sequence,
                planned,
            });
        };
        let cache = planned_expert_cache(plan).saturating_sub(largest_experts(plan));
        let locked: u64 = plan.partitions.iter().map(planned_locked).fold(cache, u64::saturating_add);
        // Memory planned for the plan's own draft, if the caller loads none.
        let draft = plan.draft.as_ref().map_or(0, |draft| draft.host_memory.0);
        let unused = draft.saturating_sub(reserved.saturating_add(reserved_per_sequence));
        let missing = (planned - limit).saturating_sub(unused);
        // `RESERVE` stays free beside locked weights; where none are locked, it is not needed.
        let free = if locked > 0 { RESERVE } else { 0 };
        let needed = planned.saturating_sub(locked).saturating_sub(free).saturating_sub(unused);
        if limit < needed {
            return Err(EngineError::TooLittleMemory { planned, limit, needed });
        }
        let left = locked.saturating_sub(missing);
        let [planned_locked, now_locked] = [locked, left].map(|bytes| ByteSize(bytes).human());
        // Do not warn of a difference that the printed numbers do not show.
        if now_locked != planned_locked {
            reporter.warning(&format!(
                "the plan was made for {} of host memory and this process may use {}: about {now_locked} of weights stay in \
                 memory instead of {planned_locked}",
                ByteSize(planned).human(),
                ByteSize(limit).human(),
            ));
        }
        let (limit, planned) = (Some(limit), whole);
        Ok(HostMemoryBudget { reads, limit, gpu_fallback, sequences, reserved, reserved_per_sequence, planned })
    }

    /// Most host memory to use, bytes.
    pub fn limit(&self) -> Option<u64> {
        self.limit
    }

    /// Whether host memory is limited, also where no weights are streamed.
    pub fn is_limited(&self) -> bool {
        self.limit.or(self.planned).is_some()
    }

    /// Sequences whose states have room.
    pub fn sequences(&self) -> u64 {
        self.sequences
    }

    /// The budget for as many of the wanted sequences as fit beside everything but locked weights, at least one.
    pub fn fit_sequences(self, plan: &Plan, is_fallback: &[bool], in_use: HostMemoryInUse) -> Self {
        let limit = self.limit.or(self.planned);
        let Some((limit, rss)) = limit.zip(in_use.rss) else { return self };
        let fallen_back = fallen_back(plan, is_fallback);
        let window = self.window_beside(plan, &fallen_back);
        let activations = activations(plan, &fallen_back);
        let used = [rss, window, largest_experts(plan), activations, RESERVE, self.reserved, in_use.state_window];
        let free = used.into_iter().fold(limit, u64::saturating_sub);
        // The first sequence's lane counts as activations.
        let each = self.of_sequence(in_use).saturating_add(in_use.lane);
        let fitting = free.saturating_add(in_use.lane).checked_div(each).unwrap_or(self.sequences);
        HostMemoryBudget { sequences: fitting.clamp(1, self.sequences), ..self }
    }

    /// Bytes of one sequence: its states and what the caller takes for it.
    fn of_sequence(&self, in_use: HostMemoryInUse) -> u64 {
        in_use.states.saturating_add(self.reserved_per_sequence)
    }

    /// Bytes of all sequences, without the lane of the first.
    fn of_sequences(&self, in_use: HostMemoryInUse) -> u64 {
        let lanes = in_use.lane.saturating_mul(self.sequences.saturating_sub(1));
        self.of_sequence(in_use).saturating_mul(self.sequences).saturating_add(lanes)
    }

    /// Whether partitions that fell back from a GPU to the host are streamed.
    pub fn streams_gpu_fallback(&self) -> bool {
        self.gpu_fallback == WeightResidency::ReadFromDisk
    }

    /// The largest partition that fell back from a GPU to the host, if it does not fit in the budget beside `rss` bytes in use: a run needs
    /// all of its weights at once.
    pub fn too_large_fallback(&self, plan: &Plan, is_fallback: &[bool], rss: Option<u64>) -> Option<LargeFallback> {
        let (limit, rss) = self.limit.zip(rss)?;
        let fallen_back = fallen_back(plan, is_fallback);
        let largest = fallen_back.iter().max_by_key(|partition| partition.bytes.weights)?;
        let weights = largest.bytes.weights.0;
        // The experts of one partition stay in memory, too.
        let parts = [weights, largest_experts(plan), activations(plan, &fallen_back)];
        let needed = parts.into_iter().fold(rss, u64::saturating_add);
        (needed > limit).then(|| LargeFallback { partition: largest.name.clone(), weights, needed, limit })
    }

    /// Where a variant's weights are between its runs.
    pub fn residency(&self, plan: &Plan, variant: &PartitionVariant<'_>) -> WeightResidency {
        let mapped = self.reads == WeightReads::Mapped;
        match variant.residency {
            Residency::Mapped => WeightResidency::Mapped { sparse_rows: !mapped },
            // A partition of a GPU: used only if its session falls back to the host.
            Residency::Resident | Residency::Streamed if !is_on_host(plan, variant.device) => self.gpu_fallback,
            Residency::Streamed if mapped => WeightResidency::Mapped { sparse_rows: false },
            Residency::Streamed => WeightResidency::ReadFromDisk,
            Residency::Resident => WeightResidency::InMemory,
        }
    }

    /// Most bytes of streamed weights that are in memory or being read; 0 disables prefetching. `is_fallback`: for each
    /// partition, whether it was planned for a GPU and streams on the host instead.
    pub fn window(&self, plan: &Plan, is_fallback: &[bool]) -> u64 {
        self.window_beside(plan, &fallen_back(plan, is_fallback))
    }

    fn window_beside(&self, plan: &Plan, fallen_back: &[&Partition]) -> u64 {
        if self.reads == WeightReads::OnDemand {
            return 0;
        }
        let host = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu);
        let planned = host.and_then(|host| host.window).map_or(0, |window| window.0);
        let largest = fallen_back.iter().map(|partition| partition.bytes.weights.0).max();
        planned.max(largest.map_or(0, |largest| largest.saturating_add(READ_AHEAD)))
    }

    /// Bytes of weights to lock: as many as were planned, and all of partitions that fell back to the host (`is_fallback`), as far as they fit.
    /// Where experts are cached, room for the experts of one partition is left. If there is enough room beside it, partitions whose weights are all
    /// planned to be locked may take half as much more, for the layout of the kernels.
    pub fn locked(&self, plan: &Plan, is_fallback: &[bool], in_use: HostMemoryInUse) -> LockedWeights {
        let partitions = || plan.partitions.iter().zip(is_fallback);
        let wanted = |(partition, is_fallback): (&Partition, &bool)| match is_fallback {
            true => partition.bytes.weights.0,
            false => planned_locked(partition),
        };
        let sizes = lockable_sizes(plan, is_fallback);
        let total = partitions().map(wanted).fold(0, u64::saturating_add);
        let cache = planned_expert_cache(plan);
        let planned = total.saturating_add(cache);
        let room = self.room_to_lock(plan, planned, &fallen_back(plan, is_fallback), in_use);
        let locked = room.saturating_sub(largest_experts(plan));
        if cache > 0 && locked >= in_kernel_layout(total) {
            let all = partitions().map(|each| with_room_for_kernel_layout(each.0, wanted(each)));
            return LockedWeights::of_each(all.collect(), sizes);
        }
        LockedWeights::new(sizes, if total > 0 { locked } else { 0 })
    }

    /// Bytes for experts that were read by demand: what the limit leaves once other weights are locked; the planned bytes if the system
    /// does not report the resident set.
    pub fn expert_cache(&self, plan: &Plan, is_fallback: &[bool], in_use: HostMemoryInUse) -> u64 {
        match planned_expert_cache(plan) {
            0 => 0,
            planned => self.room_to_lock(plan, planned, &fallen_back(plan, is_fallback), in_use),
        }
    }

    /// Most bytes of weights that may be locked, where `wanted` were planned: what the limit leaves beside the resident set, states,
    /// activations and the window. If the system does not report the resident set, what the plan says.
    fn room_to_lock(&self, plan: &Plan, wanted: u64, fallen_back: &[&Partition], in_use: HostMemoryInUse) -> u64 {
        let Some(limit) = self.limit else { return wanted };
        let Some(rss) = in_use.rss else {
            let missing = self.planned.map_or(0, |planned| planned.saturating_sub(limit));
            return wanted.saturating_sub(missing);
        };
        let states = self.of_sequences(in_use);
        let window = self.window_beside(plan, fallen_back);
        let activations = activations(plan, fallen_back);
        let used = [rss, window, states, in_use.state_window, activations, RESERVE, self.reserved];
        used.into_iter().fold(limit, u64::saturating_sub)
    }

    /// Bytes that the host may hold of weights that are streamed to devices, once all sessions are loaded; `None` without a limit.
    /// [`RESERVE`] is not subtracted here but when the host's own weights are locked, after these bytes are in use; nowhere if the host
    /// locks none.
    pub fn for_devices(&self, plan: &Plan, in_use: HostMemoryInUse) -> Option<u64> {
        let limit = self.planned?.min(self.limit.unwrap_or(u64::MAX));
        let locked: u64 = plan.partitions.iter().map(planned_locked).sum();
        let states = self.of_sequences(in_use);
        let window = self.window_beside(plan, &[]);
        let cache = planned_expert_cache(plan);
        let states = states.saturating_add(in_use.state_window);
        let used = [in_use.rss.unwrap_or(0), locked, window, cache, states, activations(plan, &[]), self.reserved];
        Some(used.into_iter().fold(limit, u64::saturating_sub))
    }
}

/// A partition that fell back from a GPU to the host, whose memory is too small for its weights.
pub(crate) struct LargeFallback {
    partition: String,
    weights: u64,
    /// Bytes of host memory that it needs with the rest of the process.
    pub needed: u64,
    limit: u64,
}

impl LargeFallback {
    /// The error where this process may use `limit` bytes.
    pub fn error(self, limit: u64) -> EngineError {
        let LargeFallback { partition, weights, needed, .. } = self;
        EngineError::FallbackTooLarge { partition, weights, needed, limit }
    }

    /// The warning where only the plan's budget is exceeded.
    pub fn warning(&self) -> String {
        let LargeFallback { partition, weights, needed, limit } = self;
        let (needs, limit) = (fallback_needs(partition, weights, needed), ByteSize(*limit).human());
        format!(
            "{needs} instead of the planned {limit}; to stay within them, plan for this machine with --vram 0, if that is enough memory for the model"
        )
    }
}

/// The partitions that were planned for a GPU and stream on the host instead.
fn fallen_back<'a>(plan: &'a Plan, is_fallback: &[bool]) -> Vec<&'a Partition> {
    plan.partitions
        .iter()
        .zip(is_fallback)
        .filter(|(_, is_fallback)| **is_fallback)
        .map(|(partition, _)| partition)
        .collect()
}

/// Bytes of activations on the host; of all partitions if any fell back there.
fn activations(plan: &Plan, fallen_back: &[&Partition]) -> u64 {
    let counts = |partition: &&Partition| !fallen_back.is_empty() || is_on_host(plan, &partition.device);
    plan.partitions.iter().filter(counts).map(|partition| partition.bytes.workspace.0).max().unwrap_or(0)
}

/// Whether the host reads weights of a partition from disk, and locks as many of them in memory as the limit allows.
pub fn streams_on_host(plan: &Plan) -> bool {
    plan.partitions.iter().any(|partition| is_streamed(partition) && is_on_host(plan, &partition.device))
}

/// Whether a limit of host memory, bytes, holds the whole plan. If not, weights that were planned for a GPU and fell back to the host are read from
/// disk.
pub fn holds_all_on_host(plan: &Plan, limit: u64) -> bool {
    limit >= all_on_host(plan)
}

/// Bytes of host memory that the whole plan would take there: an estimate. The layout of 4-bit kernels takes about a fifth more
/// (docs/RUNTIME.md, Compression).
fn all_on_host(plan: &Plan) -> u64 {
    let weights = plan.partitions.iter().map(|partition| partition.bytes.weights.0).fold(0, u64::saturating_add);
    let in_memory = plan.states.iter().filter(|state| !state.on_disk);
    let states = in_memory.map(State::memory).fold(0, u64::saturating_add);
    let activations = plan.partitions.iter().map(|partition| partition.bytes.workspace.0).max().unwrap_or(0);
    let parts = [weights / 5, states.saturating_mul(plan.budgets.batch), activations, PROCESS];
    parts.into_iter().fold(weights, u64::saturating_add)
}

/// Bytes of a streamed partition's weights that the plan keeps in memory.
pub(super) fn planned_locked(partition: &Partition) -> u64 {
    partition.bytes.locked.filter(|_| is_streamed(partition)).map_or(0, |locked| locked.0)
}

/// The memory for experts that the plan has; 0 if none are read by demand.
pub(crate) fn planned_expert_cache(plan: &Plan) -> u64 {
    plan.devices.iter().filter_map(|device| device.expert_cache).map(|cache| cache.0).sum()
}

/// Bytes of the experts of the partition that has most; 0 if none are read by demand.
pub(crate) fn largest_experts(plan: &Plan) -> u64 {
    let experts = plan.partitions.iter().filter_map(|partition| partition.experts.as_ref());
    experts.map(|experts| experts.bytes.0).max().unwrap_or(0)
}

/// `wanted`, and half as much more if the plan locks all weights of the partition but its experts.
fn with_room_for_kernel_layout(partition: &Partition, wanted: u64) -> u64 {
    let is_all = is_streamed(partition) && wanted >= without_experts(partition);
    if is_all { in_kernel_layout(wanted) } else { wanted }
}

pub(super) fn is_streamed(partition: &Partition) -> bool {
    partition.residency == Residency::Streamed
}

/// Whether a device of the plan is the host.
pub(crate) fn is_on_host(plan: &Plan, device: &str) -> bool {
    plan.devices.iter().any(|other| other.name == device && other.kind == DeviceKind::Cpu)
}
