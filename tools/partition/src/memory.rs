//! Memory use of a placement on each device, and whether it fits the budget.
//!
//! A GPU holds at the same time: weights that are resident in either phase, once per partition that reads them; constants of streamed
//! blocks; the state of the blocks that it decodes; the activations of the largest block; a slot ring for streamed blocks. State that is
//! kept elsewhere is copied to staging buffers, which hold the state of one sequence. A block whose state is updated in place, and is at home in the
//! other phase, has its own. The other blocks, if all state is kept on the host, share staging buffers: one for the state of one block, and a second
//! one if several blocks use them, because states are copied ahead.
//!
//! The host holds the weights that it computes with or that are copied from it, and the state of every block that does not stay on
//! one GPU. If that exceeds its budget and there is a disk, part of each block stays locked and the rest is read in every
//! pass ([`crate::HostReads`]); the largest block must still fit. Weights may be compressed on disk ([`crate::Packing`]): then fewer bytes are read than are
//! written to memory. Of experts that are read by demand ([`crate::Experts`]) a pass reads only those that its tokens select and that the
//! cache does not have.

use crate::cost::slot;
use crate::experts::{EXPERT_WINDOW, ExpertMemory, ExpertReads, Experts};
use crate::host_reads::{BlockRead, HostReads};
use crate::schedule::merges;
use crate::{
    BlockPlacement, BlockRole, BlockSpec, Demand, DeviceId, KvHome, Mechanisms, OverBudget, Phase, Placement, Problem,
    Workload,
};
use hpp_schema::memory::state_window;
use std::borrow::Cow;

/// The memory use of a placement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryUsage {
    /// Demand on each GPU.
    pub gpus: Vec<Demand>,
    /// Demand on the host with all weights in memory. Its workspace includes `host_sessions`.
    pub host: Demand,
    /// Bytes that sessions on the host hold beside weights from their creation on.
    pub host_sessions: u64,
    /// Weights that the host reads in a prefill pass and in a decode pass, if its memory does not hold them.
    pub host_reads: [HostReads; 2],
    /// The largest block on the host, packed bytes; without blocks that read only some rows of their weights.
    pub largest_on_host: u64,
    /// The experts that the host reads by demand in a pass of each phase.
    pub expert_reads: [ExpertReads; 2],
    /// States on disk in a pass of each phase.
    pub states_on_disk: [StatesOnDisk; 2],
    /// What the host's blocks compute from weights alone when their sessions are created, bytes. It stays in memory unless weights are read
    /// from disk.
    pub folded: u64,
    /// `folded` of the block that has most.
    pub largest_folded: u64,
    /// The largest `widened_bytes` of the host's blocks, without blocks that read only some rows of their weights.
    pub largest_widened: u64,
}

/// States on disk in a pass of a phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatesOnDisk {
    /// Bytes that the pass reads.
    pub read_bytes: u64,
    /// Runs of a layer for a sequence after which its states are written and evicted.
    pub evictions: u64,
}

/// The memory use of a placement as the planner counts it: a weight that several blocks on the host share counts once.
pub fn usage(problem: &Problem, placements: &[BlockPlacement], slots: &[u32]) -> MemoryUsage {
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let blocks_on_host =
        || (0..placements.len()).filter(|i| placements[*i].holds_weights_on_host() && !problem.is_lookup_table(*i));
    let folded = || {
        (0..placements.len())
            .filter(|i| placements[*i].holds_weights_on_host())
            .map(|i| problem.blocks[i].folded_once())
    };
    MemoryUsage {
        gpus: (0..problem.budget.vram.len()).map(|gpu| gpu_demand(problem, placements, slots[gpu], gpu)).collect(),
        host: Demand {
            weights: packed(weights_of(problem, |i| placements[i].holds_weights_on_host())),
            kv: host_state(problem, placements),
            workspace: host_workspace(problem, placements).saturating_add(host_sessions(problem, placements)),
            ring: 0,
        },
        host_sessions: host_sessions(problem, placements),
        host_reads: Phase::BOTH.map(|phase| host_reads(problem, placements, phase)),
        expert_reads: Phase::BOTH.map(|phase| expert_reads(problem, placements, phase)),
        states_on_disk: Phase::BOTH.map(|phase| state_passes(problem, placements, phase)),
        folded: folded().sum(),
        largest_folded: folded().max().unwrap_or(0),
        largest_widened: blocks_on_host().map(|i| problem.blocks[i].widened_bytes).max().unwrap_or(0),
        largest_on_host: blocks_on_host().map(|i| problem.weight_bytes(i)).max().map_or(0, packed),
    }
}

/// The weights that the host reads in a pass of a phase. Each weight counts for the first block that has it. Blocks that are copied to GPUs
/// come first, because a copied weight is not compressed.
fn host_reads(problem: &Problem, placements: &[BlockPlacement], phase: Phase) -> HostReads {
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let is_computed = |i: usize| placements[i].in_phase(phase) == Placement::Cpu;
    let is_read =
        |i: &usize| !matches!(placements[*i].in_phase(phase), Placement::Resident(_)) && !problem.is_lookup_table(*i);
    let read_as = |computed: bool| (0..placements.len()).filter(is_read).filter(move |i| is_computed(*i) == computed);
    let mut reads = Vec::with_capacity(placements.len());
    each_distinct(
        problem,
        |block| &block.weights,
        read_as(false).chain(read_as(true)),
        |_| false,
        |block, bytes| {
            let experts = experts_by_demand(problem, placements, block).map_or(0, |experts| packed(experts.bytes));
            reads.push(BlockRead { block, bytes: packed(bytes), experts, is_computed: is_computed(block) });
        },
    );
    HostReads::new(reads)
}

/// The experts of a block that the host reads by demand: those of blocks that it computes in both phases.
fn experts_by_demand(problem: &Problem, placements: &[BlockPlacement], block: usize) -> Option<Experts> {
    problem.blocks[block].experts.filter(|_| placements[block] == BlockPlacement::both(Placement::Cpu))
}

/// Host memory for state: of all blocks and sequences, or the window for state on disk.
fn host_state(problem: &Problem, placements: &[BlockPlacement]) -> u64 {
    let on_host = (0..placements.len()).filter(|i| state_on_host(problem, placements[*i]));
    match problem.budget.host_kv_on_disk {
        true => on_host.map(|i| window_of(problem, i)).max().unwrap_or(0),
        false => on_host.map(|i| kv(problem, i)).sum(),
    }
}

/// The size of the state window for the runs of a block. Sequences run one after another, so a run needs the states of
/// one sequence.
pub(crate) fn window_of(problem: &Problem, block: usize) -> u64 {
    state_window(problem.staged_state(block))
}

/// States on disk that a pass of a phase reads and evicts; for a prompt of several passes the mean. The window holds the states of three runs (in
/// use, being read, being written). In its remaining room the states of some other runs stay in memory.
fn state_passes(problem: &Problem, placements: &[BlockPlacement], phase: Phase) -> StatesOnDisk {
    if !problem.budget.host_kv_on_disk {
        return StatesOnDisk::default();
    }
    let Workload { prompt_tokens, new_tokens, passes, .. } = &problem.load;
    let count = (passes.len() as u64).max(1);
    // The tokens before a pass and after it.
    let [before, after] = match phase {
        Phase::Decode => [prompt_tokens + new_tokens / 2; 2],
        Phase::Prefill => {
            let starts = passes.iter().scan(0, |start, tokens| Some(std::mem::replace(start, *start + tokens)));
            let start = starts.sum::<u64>() / count;
            [start, start + passes.iter().sum::<u64>() / count]
        }
    };
    // The bytes of each layer's states, and how many bytes of all states do not stay in memory.
    let states = |tokens: u64| -> (Vec<u64>, u64) {
        let filled = |i: usize| match problem.blocks[i].kv_filled {
            _ if tokens == 0 => 0,
            Some(state) => state.bytes(tokens).min(kv(problem, i)),
            None => kv(problem, i),
        };
        let on_host = (0..placements.len()).filter(|i| state_on_host(problem, placements[*i]));
        let filled: Vec<u64> = on_host.map(filled).filter(|bytes| *bytes > 0).collect();
        let of_run = filled.iter().copied().max().unwrap_or(0) / problem.load.sequences.max(1);
        let kept = host_state(problem, placements).saturating_sub(state_window(of_run));
        let evicted = filled.iter().sum::<u64>().saturating_sub(kept);
        (filled, evicted)
    };
    let (_, read_bytes) = states(before);
    let (written, evicted) = states(after);
    let runs = problem.load.sequences as f64 * written.len() as f64;
    let share = evicted as f64 / written.iter().sum::<u64>().max(1) as f64;
    StatesOnDisk { read_bytes, evictions: (runs * share).ceil() as u64 }
}

/// The experts that the host reads by demand in a pass of a phase.
fn expert_reads(problem: &Problem, placements: &[BlockPlacement], phase: Phase) -> ExpertReads {
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let sequences = problem.load.sequences.saturating_mul(problem.load.batch);
    let tokens = match phase {
        Phase::Decode => sequences,
        Phase::Prefill => problem.load.passes.iter().copied().max().unwrap_or(1).saturating_mul(sequences),
    };
    let mut reads = ExpertReads::default();
    for experts in (0..placements.len()).filter_map(|block| experts_by_demand(problem, placements, block)) {
        reads.all += packed(experts.bytes);
        reads.visited += packed(experts.visited_bytes(tokens));
        reads.largest = reads.largest.max(packed(experts.bytes));
    }
    reads
}

/// The memory use of the partitions of a placement: every partition has its own copy of shared weights, and blocks that are read
/// from disk are partitions of their own. The planner ignores the difference from [`usage`], because it depends on every cut.
pub fn usage_of_partitions(problem: &Problem, placements: &[BlockPlacement], slots: &[u32]) -> MemoryUsage {
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let counted_once = usage(problem, placements, slots);
    let on_host = |i: usize| placements[i].holds_weights_on_host();
    let weights = distinct_bytes(problem, |block| &block.weights, on_host, |i| !is_joined(problem, placements, i));
    let of_partitions = |reads: &HostReads| reads.clone().with_computed(|block| packed(problem.weight_bytes(block)));
    MemoryUsage {
        host: Demand { weights: packed(weights), ..counted_once.host },
        host_reads: counted_once.host_reads.each_ref().map(of_partitions),
        ..counted_once
    }
}

/// The memory use that a search checks and predicts times from: of partitions where a problem has cuts, else with each weight counted once.
pub(crate) fn usage_with_cuts(problem: &Problem, placements: &[BlockPlacement], slots: &[u32]) -> MemoryUsage {
    match problem.cuts.is_empty() {
        true => usage(problem, placements, slots),
        false => usage_of_partitions(problem, placements, slots),
    }
}

/// Checks that a placement fits. The error names the first device that is too small: GPUs in order, then the host.
pub fn fits(
    problem: &Problem,
    placements: &[BlockPlacement],
    slots: &[u32],
    mechanisms: Mechanisms,
) -> Result<(), OverBudget> {
    usage_with_cuts(problem, placements, slots).check(problem, mechanisms)
}

/// Whether the host has memory for every placement, so that its limit changes nothing. No placement needs more than that with all blocks on the host,
/// but for the creation of sessions, of which states and activations may hide a part.
pub(crate) fn host_holds_any_placement(problem: &Problem) -> bool {
    let on_host = vec![BlockPlacement::both(Placement::Cpu); problem.blocks.len()];
    let usage = usage(problem, &on_host, &vec![0; problem.budget.vram.len()]);
    // Partitions may have copies of weights that they share.
    let in_blocks = (0..problem.blocks.len()).map(|i| problem.weight_bytes(i)).fold(0, u64::saturating_add);
    let demand = Demand { weights: problem.budget.packing.packed(in_blocks), ..usage.host };
    let most = [demand.total(), usage.largest_created(), usage.folded].into_iter().fold(0, u64::saturating_add);
    problem.budget.host().is_none_or(|ram| most <= ram)
}

impl MemoryUsage {
    /// Checks the problem's budget.
    pub fn check(&self, problem: &Problem, mechanisms: Mechanisms) -> Result<(), OverBudget> {
        for (gpu, demand) in self.gpus.iter().enumerate() {
            check_gpu_demand(problem, gpu, *demand)?;
        }
        match problem.budget.ram {
            Some(ram) => {
                OverBudget::check(DeviceId::Cpu, self.min_host_demand(problem, mechanisms), ram, problem.budget.process)
            }
            None => Ok(()),
        }
    }

    /// The smallest demand on host memory: with a disk only the weights of one block and the read-ahead buffers, unless all weights
    /// together need less.
    pub(crate) fn min_host_demand(&self, problem: &Problem, mechanisms: Mechanisms) -> Demand {
        let beside_all = self.beside_all();
        if may_read_disk(problem, mechanisms) && !self.host_holds_all(problem) {
            let one_block =
                self.largest_on_host.saturating_add(problem.budget.read_ahead).saturating_add(self.session_creation());
            return Demand { weights: one_block.min(self.host.weights.saturating_add(beside_all)), ..self.host };
        }
        Demand { workspace: self.host.workspace.saturating_add(beside_all), ..self.host }
    }

    /// Whether host memory holds all weights, while sessions are created too.
    pub fn host_holds_all(&self, problem: &Problem) -> bool {
        let needed = self.host.total().saturating_add(self.beside_all());
        problem.budget.host().is_none_or(|ram| needed <= ram)
    }

    /// Whether host memory holds all weights but tables of which a pass reads some rows.
    pub fn host_holds_all_but_tables(&self, problem: &Problem) -> bool {
        let Some(ram) = problem.budget.host() else { return true };
        let weights = self.host_reads.iter().map(HostReads::all).max().unwrap_or(0);
        let parts = [weights, self.host.kv, self.host.workspace, self.beside_all()];
        parts.into_iter().fold(0, u64::saturating_add) <= ram
    }

    /// Bytes that are needed beside the demand of passes if all weights stay in memory.
    fn beside_all(&self) -> u64 {
        self.session_creation().saturating_add(self.folded)
    }

    /// Bytes that the creation of a session takes beyond the demand of passes: the memory that states and activations take later is still
    /// free then.
    pub fn session_creation(&self) -> u64 {
        let later = self.host.kv.saturating_add(self.host.workspace.saturating_sub(self.host_sessions));
        self.largest_created().saturating_sub(later)
    }

    /// The largest value that is in memory twice while a session is created, bytes: ONNX Runtime packs widened weights and folded values one
    /// at a time, and frees each as soon as it is packed.
    fn largest_created(&self) -> u64 {
        self.largest_widened.max(self.largest_folded)
    }

    /// Bytes of weights read from disk in each pass of a phase; 0 if all weights fit into host memory.
    ///
    /// If they do not fit, part of each block stays locked: of a block of b bytes, `min(b, u)` are read. With R bytes of available memory, the level u
    /// is the smallest with `sum max(b - u, 0) + u <= R`, because the unlocked rest of one block is in memory too.
    ///
    /// Let c be the share of the weights that is decompressed where the host computes with them, and d the bytes read for each
    /// decompressed byte ([`crate::Packing`]). Uncompressed bytes are locked first, because that saves most reading: of the `min(b, u)` bytes that
    /// a pass loads of a block, `min(c b, b, u)` are decompressed. Weights that are copied to GPUs are not compressed. The bytes read are
    ///
    /// `sum min(b, u) - (1 - d) sum min(c b, b, u)`, the second sum over the blocks that the host computes,
    ///
    /// rounded to whole bytes, and at least 1 if u is not 0, because 0 means that nothing is read. Experts that are read by
    /// demand do not belong to b; [`expert_read_bytes`](Self::expert_read_bytes) are added.
    pub fn disk_read_bytes(&self, problem: &Problem, phase: Phase) -> u64 {
        let experts = self.expert_read_bytes(problem, phase);
        let (reads, level) = self.reads_and_level(problem, phase);
        if level == 0 {
            return experts;
        }
        let packing = problem.budget.packing;
        // Rounds only once, so that more memory never means more reading.
        let not_read = packing.unread_share() * reads.decompressed(packing.decompressed_share(), level);
        reads.unlocked(level).saturating_sub(not_read as u64).max(1) + experts
    }

    /// The most bytes that a pass of a phase reads of one block, without experts that are read by demand; 0 if all of them stay in memory. See
    /// [`disk_read_bytes`](Self::disk_read_bytes).
    pub fn read_level(&self, problem: &Problem, phase: Phase) -> u64 {
        self.reads_and_level(problem, phase).1
    }

    /// The weights that may be read of each block, without experts that are read by demand, and the most bytes that are
    /// read of one block (the level).
    fn reads_and_level(&self, problem: &Problem, phase: Phase) -> (Cow<'_, HostReads>, u64) {
        let reads = &self.host_reads[phase as usize];
        match (self.expert_memory(problem, phase), self.room_for_weights(problem)) {
            (Some(memory), _) => (Cow::Owned(reads.without_experts()), memory.rest_level),
            (None, Some(room)) => (Cow::Borrowed(reads), reads.level(room)),
            (None, None) => (Cow::Borrowed(reads), 0),
        }
    }

    /// Bytes of experts that a pass of a phase reads by demand; see [`ExpertMemory::read_bytes`].
    pub(crate) fn expert_read_bytes(&self, problem: &Problem, phase: Phase) -> u64 {
        let memory = self.expert_memory(problem, phase);
        memory.map_or(0, |memory| memory.read_bytes(self.expert_reads[phase as usize], problem.expert_hits()))
    }

    /// Bytes of weights that a pass of a phase decompresses.
    pub(crate) fn decompressed_bytes(&self, problem: &Problem, phase: Phase) -> f64 {
        let (reads, level) = self.reads_and_level(problem, phase);
        reads.decompressed(problem.budget.packing.decompressed_share(), level)
    }

    /// How host memory is divided if experts are read by demand; `None` if all weights fit, if there are no such experts, or if memory
    /// is too small for it.
    ///
    /// The runtime reads experts by demand in both phases or in none.
    pub fn expert_memory(&self, problem: &Problem, phase: Phase) -> Option<ExpertMemory> {
        let own = self.expert_memory_of(problem, phase)?;
        self.expert_memory_of(problem, phase.other()).map(|_| own)
    }

    /// [`expert_memory`](Self::expert_memory) of one phase, whatever the other phase needs.
    fn expert_memory_of(&self, problem: &Problem, phase: Phase) -> Option<ExpertMemory> {
        let experts = self.expert_reads[phase as usize];
        let available = self.room_for_weights(problem).filter(|_| experts.all > 0)?;
        let rest = self.host_reads[phase as usize].without_experts();
        // Weights that stay locked need no buffers to read ahead.
        let more = available.saturating_add(problem.budget.read_ahead.saturating_sub(EXPERT_WINDOW));
        let without_buffers = ExpertMemory::divide(more, &rest, experts);
        if without_buffers.rest_level == 0 {
            return Some(without_buffers);
        }
        // The experts of one block and the rest of another are in memory at once; where they do not fit, whole blocks are read.
        (available >= experts.largest.saturating_add(rest.largest()))
            .then(|| ExpertMemory::divide(available, &rest, experts))
    }

    /// Host memory for weights where they do not all fit, bytes.
    fn room_for_weights(&self, problem: &Problem) -> Option<u64> {
        let other_demand = self.host.kv.saturating_add(self.host.workspace);
        let ram = problem.budget.host().filter(|_| !self.host_holds_all(problem))?;
        let beside_weights = [other_demand, problem.budget.read_ahead, problem.budget.reserve];
        Some(beside_weights.into_iter().fold(ram, u64::saturating_sub))
    }

    /// The share of the weights that stays locked in host memory, 0 to 1, without experts that are read by demand.
    pub fn locked_share(&self, problem: &Problem, phase: Phase) -> f64 {
        match self.reads_and_level(problem, phase) {
            (_, 0) => 1.0,
            (reads, level) => 1.0 - reads.unlocked(level) as f64 / reads.all() as f64,
        }
    }
}

/// Checks one GPU whose ring, if it streams, has this many slots.
pub(crate) fn check_gpu(
    problem: &Problem,
    placements: &[BlockPlacement],
    slots: u32,
    gpu: usize,
) -> Result<(), OverBudget> {
    check_gpu_demand(problem, gpu, gpu_demand(problem, placements, slots, gpu))
}

/// Checks one GPU. An unused GPU always fits.
fn check_gpu_demand(problem: &Problem, gpu: usize, demand: Demand) -> Result<(), OverBudget> {
    match demand.total() {
        0 => Ok(()),
        _ => OverBudget::check(DeviceId::Gpu(gpu), demand, problem.budget.vram[gpu], problem.budget.margin),
    }
}

impl Problem {
    /// Size of a staging buffer for a block's state, bytes: of one sequence, because sequences run one after another.
    pub(crate) fn staged_state(&self, block: usize) -> u64 {
        self.blocks[block].kv_bytes / self.load.sequences.max(1)
    }

    /// Whether a block (an embedding) reads only some rows of its weights, so that the weights may stay on disk without being read in
    /// every pass.
    pub fn is_lookup_table(&self, block: usize) -> bool {
        let numbers = &self.blocks[block];
        numbers.kind == BlockRole::Embedding && 16 * numbers.decode.bytes < self.weight_bytes(block)
    }
}

/// Whether weights that exceed host memory may be read from disk in every pass.
pub(crate) fn may_read_disk(problem: &Problem, mechanisms: Mechanisms) -> bool {
    mechanisms.reads_disk() && problem.disk_bytes_per_ms.is_some_and(|rate| rate > 0.0)
}

/// Whether the block's state is in host memory in at least one phase.
pub(crate) fn state_on_host(problem: &Problem, placement: BlockPlacement) -> bool {
    problem.budget.kv == KvHome::Host
        || placement.prefill.gpu().is_none()
        || placement.prefill.gpu() != placement.decode.gpu()
}

fn kv(problem: &Problem, block: usize) -> u64 {
    problem.blocks[block].kv_bytes
}

fn gpu_demand(problem: &Problem, placements: &[BlockPlacement], slots: u32, gpu: usize) -> Demand {
    let is_streamed = |i: usize| placements[i].is_streamed_to(gpu);
    let is_resident = |i: usize| placements[i].is_resident_on(gpu);
    let has_ring = (0..placements.len()).any(is_streamed);
    let is_in_slot = |i: &usize| is_streamed(*i) || problem.budget.movable && has_ring && is_resident(*i);
    let slot = slot((0..placements.len()).filter(is_in_slot).map(|i| &problem.blocks[i]));
    let resident = distinct_bytes(problem, |block| &block.weights, is_resident, |i| !is_joined(problem, placements, i));
    Demand {
        weights: resident + distinct_bytes(problem, |block| block.streamed.constants(), is_streamed, |_| false),
        kv: match problem.budget.kv {
            KvHome::Device => state_kept_on(problem, placements, gpu),
            KvHome::Host => state_copied_to(problem, placements, gpu),
        },
        workspace: gpu_workspace(problem, placements, gpu),
        ring: slot.saturating_mul(slots.into()),
    }
}

/// State on a GPU that keeps the state of what it decodes: of all sequences, and a staging buffer for the state of each block that it computes
/// in prompts only.
fn state_kept_on(problem: &Problem, placements: &[BlockPlacement], gpu: usize) -> u64 {
    let bytes = |i: usize| match placements[i] {
        BlockPlacement { decode, .. } if decode.gpu() == Some(gpu) => kv(problem, i),
        BlockPlacement { prefill, .. } if prefill.gpu() == Some(gpu) => problem.staged_state(i),
        _ => 0,
    };
    (0..placements.len()).map(bytes).sum()
}

/// Staging buffers on a GPU for states in host memory: one for each state that stays for a phase, and one or two sets that the others share.
fn state_copied_to(problem: &Problem, placements: &[BlockPlacement], gpu: usize) -> u64 {
    let computing =
        |phase: Phase| (0..placements.len()).filter(move |i| placements[*i].in_phase(phase).gpu() == Some(gpu));
    let has_own_buffer = |i: &usize, phase| problem.has_own_state_buffer(*i, placements[*i], phase);
    let sharing = |phase| computing(phase).filter(move |i| !has_own_buffer(i, phase));
    let with_own_buffer = |phase| computing(phase).filter(move |i| has_own_buffer(i, phase));
    // States are copied ahead to a second set.
    let count = |phase| sharing(phase).filter(|i| kv(problem, *i) > 0).count();
    let sets = if Phase::BOTH.map(count).iter().any(|count| *count > 1) { 2 } else { 1 };
    let largest = Phase::BOTH.into_iter().flat_map(sharing).map(|i| problem.staged_state(i)).max().unwrap_or(0);
    sets * largest + Phase::BOTH.into_iter().flat_map(with_own_buffer).map(|i| problem.staged_state(i)).sum::<u64>()
}

/// Bytes of the weights of the selected blocks, each weight once.
fn weights_of(problem: &Problem, selects: impl Fn(usize) -> bool) -> u64 {
    distinct_bytes(problem, |block| &block.weights, selects, |_| false)
}

/// Whether a block is in one partition with the block before it.
fn is_joined(problem: &Problem, placements: &[BlockPlacement], block: usize) -> bool {
    let has_same_placement = |before: usize| placements[before] == placements[block];
    let merges =
        |phase: Phase| merges(problem, block, placements[block].in_phase(phase), placements[block].in_phase(phase));
    block.checked_sub(1).is_some_and(has_same_placement) && Phase::BOTH.into_iter().all(merges)
}

/// Bytes of the selected blocks, each key once per partition; `starts_partition` selects the blocks that start a new partition.
fn distinct_bytes(
    problem: &Problem,
    keys_of: fn(&BlockSpec) -> &[(u32, u64)],
    selects: impl Fn(usize) -> bool,
    starts_partition: impl Fn(usize) -> bool,
) -> u64 {
    let mut sum = 0;
    let blocks = (0..problem.blocks.len()).filter(|i| selects(*i));
    each_distinct(problem, keys_of, blocks, starts_partition, |_, bytes| sum += bytes);
    sum
}

/// Calls `found` for each of `blocks` with the bytes of its keys that no block before it in its partition has.
fn each_distinct(
    problem: &Problem,
    keys_of: fn(&BlockSpec) -> &[(u32, u64)],
    blocks: impl Iterator<Item = usize> + Clone,
    starts_partition: impl Fn(usize) -> bool,
    mut found: impl FnMut(usize, u64),
) {
    let keys_of = |i: usize| keys_of(&problem.blocks[i]);
    // The planner calls this for every placement: a table indexed by key is several times faster than a set.
    let keys = blocks.clone().flat_map(keys_of).map(|(key, _)| *key as usize + 1).max().unwrap_or(0);
    // By key: the last partition, counted from 1, that holds it.
    let mut last_partition = vec![0u32; keys];
    let mut partition = 1;
    for i in blocks {
        partition += u32::from(starts_partition(i));
        let is_new =
            |(key, _): &&(u32, u64)| std::mem::replace(&mut last_partition[*key as usize], partition) != partition;
        found(i, keys_of(i).iter().filter(is_new).map(|(_, bytes)| bytes).sum());
    }
}

/// The largest activations of the blocks in host memory.
fn host_workspace(problem: &Problem, placements: &[BlockPlacement]) -> u64 {
    let blocks = problem.blocks.iter().zip(placements);
    blocks.map(|(block, placement)| block.host_workspace(*placement)).max().unwrap_or(0)
}

/// What sessions on the host hold beside weights.
fn host_sessions(problem: &Problem, placements: &[BlockPlacement]) -> u64 {
    let blocks = problem.blocks.iter().zip(placements).filter(|(_, placement)| placement.computes_on_host());
    blocks.map(|(block, _)| block.session_bytes).fold(0, u64::saturating_add)
}

/// The largest activations of the blocks that compute on a GPU in either phase.
fn gpu_workspace(problem: &Problem, placements: &[BlockPlacement], gpu: usize) -> u64 {
    let computes = |(_, placement): &(_, &BlockPlacement)| {
        Phase::BOTH.iter().any(|phase| placement.in_phase(*phase).gpu() == Some(gpu))
    };
    problem.blocks.iter().zip(placements).filter(computes).map(|(block, _)| block.workspace_bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
