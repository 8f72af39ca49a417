//! What a placement holds in each memory, phase by phase, and whether it fits.
//!
//! A GPU holds, at once: weights resident in either phase, once for each partition that reads them, what streamed
//! blocks keep there as constants, the state of the blocks that compute there (prefill or decode, whichever is more:
//! what leaves after the prompt leaves before anything else comes), the largest block's activations, and a ring of
//! slots for any streamed block. Where state lies on the host, blocks take turns at room for that of one, but for
//! those that compute on the host in one phase: theirs has room of its own. The host holds the weights it computes
//! with or that are copied from it, and the state of every block that does not stay on one GPU. Where not all of that
//! fits and there is a disk, an equal share of each block stays and the rest is read in each pass; the largest block
//! must still fit. What the host computes with may lie on disk more densely than in memory ([`crate::Packing`]): then
//! less is read than comes to lie there.

use crate::cost::slot;
use crate::schedule::merges;
use crate::{Block, BlockKind, Choice, Demand, KvHome, Mechanisms, NoFit, Phase, Place, Problem, Where};

/// What a placement holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// On each GPU.
    pub gpus: Vec<Demand>,
    /// On the host, if all of it lay in memory.
    pub host: Demand,
    /// Weights the host reads in each pass of a prefill and of decoding.
    pub host_reads: [Reads; 2],
    /// The largest block the host holds, those that read a few rows only apart, bytes.
    pub largest_on_host: u64,
    /// The largest block the host reads in each phase, bytes.
    pub largest_read: [u64; 2],
}

/// Weights the host reads in each pass of a phase, as its kernels want them, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// What the host computes with and nothing else reads.
    pub computed: u64,
    /// What is copied on to GPUs.
    pub copied: u64,
}

impl Reads {
    /// All of it.
    pub fn all(self) -> u64 {
        self.computed + self.copied
    }
}

/// What a placement holds in each memory, as planners count: a weight that several blocks of the host read is held once.
pub fn usage(problem: &Problem, choices: &[Choice], slots: &[u32]) -> Usage {
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let is_read = |i: usize, phase| !matches!(choices[i].of(phase), Where::Resident(_)) && !problem.reads_rows(i);
    let is_copied = |i: usize, phase| is_read(i, phase) && choices[i].of(phase) != Where::Cpu;
    let reads = |phase: Phase| {
        let all = packed(weights_of(problem, |i| is_read(i, phase)));
        let copied = packed(weights_of(problem, |i| is_copied(i, phase)));
        Reads { computed: all - copied, copied }
    };
    let largest_read = |phase: Phase| {
        (0..choices.len()).filter(|i| is_read(*i, phase)).map(|i| problem.weight_bytes(i)).max().unwrap_or(0)
    };
    let on_host = |i: &usize| choices[*i].on_host() && !problem.reads_rows(*i);
    Usage {
        gpus: (0..problem.budget.vram.len()).map(|gpu| on_gpu(problem, choices, slots[gpu], gpu)).collect(),
        host: Demand {
            weights: packed(weights_of(problem, |i| choices[i].on_host())),
            kv: (0..choices.len()).filter(|i| state_on_host(problem, choices[*i])).map(|i| kv(problem, i)).sum(),
            workspace: workspace(problem, choices, |place| place == Where::Cpu),
            ring: 0,
        },
        host_reads: Phase::BOTH.map(reads),
        largest_read: Phase::BOTH.map(largest_read).map(packed),
        largest_on_host: (0..choices.len()).filter(on_host).map(|i| problem.weight_bytes(i)).max().map_or(0, packed),
    }
}

/// The same as partitions will hold it: each has constants of its own, and read from disk each block is a partition. Between
/// this and [`usage`] lies what planners leave out because it depends on every cut.
pub fn usage_of_partitions(problem: &Problem, choices: &[Choice], slots: &[u32]) -> Usage {
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let once = usage(problem, choices, slots);
    let on_host = |i: usize| choices[i].on_host();
    let weights = distinct(problem, |block| &block.weights, on_host, |i| !is_joined(problem, choices, i));
    let computed = |phase: Phase| {
        let is_computed = |i: usize| choices[i].of(phase) == Where::Cpu && !problem.reads_rows(i);
        Reads {
            computed: packed(distinct(problem, |block| &block.weights, is_computed, |_| true)),
            ..once.host_reads[phase as usize]
        }
    };
    Usage {
        host: Demand { weights: packed(weights), ..once.host },
        host_reads: Phase::BOTH.map(computed),
        ..once.clone()
    }
}

/// Whether a placement fits. What is too small first is named: GPUs in order, then the host.
pub fn fits(problem: &Problem, choices: &[Choice], slots: &[u32], mechanisms: Mechanisms) -> Result<(), NoFit> {
    usage(problem, choices, slots).check(problem, mechanisms)
}

impl Usage {
    /// Whether this fits the problem's budget.
    pub fn check(&self, problem: &Problem, mechanisms: Mechanisms) -> Result<(), NoFit> {
        for (gpu, demand) in self.gpus.iter().enumerate() {
            holds(problem, gpu, *demand)?;
        }
        match problem.budget.ram {
            Some(ram) => NoFit::unless(Place::Cpu, self.host_least(problem, mechanisms), ram, problem.budget.process),
            None => Ok(()),
        }
    }

    /// What host memory must hold: with a disk to read from, one block's weights at a time, unless everything takes no more
    /// than that beside room to read ahead.
    pub(crate) fn host_least(&self, problem: &Problem, mechanisms: Mechanisms) -> Demand {
        let one_block = self.largest_on_host.saturating_add(problem.budget.reading);
        let fits = problem.budget.host().is_none_or(|ram| self.host.total() <= ram);
        match may_read_disk(problem, mechanisms) && !fits {
            true => Demand { weights: self.host.weights.min(one_block), ..self.host },
            false => self.host,
        }
    }

    /// Weights read from disk in each pass of a phase, bytes; 0 where all that the host holds fits into its memory.
    ///
    /// Where it does not, an equal share of each block stays: of R bytes of room, W of weights and l of the largest block, the
    /// share f for which `f W + (1 - f) l = R`, because beside the shares one block's rest lies in memory.
    ///
    /// Of the weights C that the host computes with, the part c is made when weights arrive, from d of its bytes
    /// ([`crate::Packing`]). What is not made stays first, because that spares most reading: `(1 - f) C` bytes are
    /// brought in each pass, of which as many as there are, `min(c C, (1 - f) C)`, are made. Of the weights G that
    /// are copied on to GPUs nothing is made. Read are
    ///
    /// `(1 - f) (C + G) - (1 - d) min(c C, (1 - f) C) = (1 - f) G + max((1 - f) C - c C (1 - d), d (1 - f) C)`,
    ///
    /// in whole bytes, and at least one where f is less than 1: 0 says that nothing is brought.
    pub fn missing(&self, problem: &Problem, phase: Phase) -> u64 {
        let (reads, share) = (self.host_reads[phase as usize], self.locked_share(problem, phase));
        if share >= 1.0 {
            return 0;
        }
        let (packing, computed) = (problem.budget.packing, reads.computed as f64);
        let made = (packing.made_share() * computed).min((1.0 - share) * computed);
        // Rounded once, so that more room never means more reading.
        let spared = share * reads.all() as f64 + packing.unread_share() * made;
        reads.all().saturating_sub(spared as u64).max(1)
    }

    /// The part of each block's weights that stays in host memory, 0 to 1; see [`missing`](Self::missing).
    pub fn locked_share(&self, problem: &Problem, phase: Phase) -> f64 {
        let beside = self.host.kv.saturating_add(self.host.workspace);
        let Some(ram) = problem.budget.host().filter(|ram| self.host.total() > *ram) else { return 1.0 };
        let room = ram.saturating_sub(beside).saturating_sub(problem.budget.reading) as f64;
        let (reads, largest) = (self.host_reads[phase as usize].all() as f64, self.largest_read[phase as usize] as f64);
        if reads <= room { 1.0 } else { ((room - largest) / (reads - largest)).clamp(0.0, 1.0) }
    }
}

/// Whether one GPU holds what a placement without streaming puts there.
pub(crate) fn check_gpu(problem: &Problem, choices: &[Choice], gpu: usize) -> Result<(), NoFit> {
    holds(problem, gpu, on_gpu(problem, choices, 0, gpu))
}

/// A GPU that is not used holds everything.
fn holds(problem: &Problem, gpu: usize, demand: Demand) -> Result<(), NoFit> {
    match demand.total() {
        0 => Ok(()),
        _ => NoFit::unless(Place::Gpu(gpu), demand, problem.budget.vram[gpu], problem.budget.margin),
    }
}

impl Problem {
    /// Whether a block reads a few rows of its weights only: those that do not fit stay on disk, and nothing waits for them.
    pub fn reads_rows(&self, block: usize) -> bool {
        let numbers = &self.blocks[block];
        numbers.kind == BlockKind::Embedding && 16 * numbers.decode.bytes < self.weight_bytes(block)
    }
}

/// Whether weights that do not fit in host memory may be read from disk in each pass.
pub(crate) fn may_read_disk(problem: &Problem, mechanisms: Mechanisms) -> bool {
    mechanisms.reads_disk() && problem.disk_bytes_per_ms.is_some_and(|rate| rate > 0.0)
}

/// Whether host memory holds this block's state at some time.
pub(crate) fn state_on_host(problem: &Problem, choice: Choice) -> bool {
    problem.budget.kv == KvHome::Host || choice.prefill.gpu().is_none() || choice.prefill.gpu() != choice.decode.gpu()
}

fn kv(problem: &Problem, block: usize) -> u64 {
    problem.blocks[block].kv_bytes
}

fn on_gpu(problem: &Problem, choices: &[Choice], slots: u32, gpu: usize) -> Demand {
    let there = |phase: Phase| (0..choices.len()).filter(move |i| choices[*i].of(phase).gpu() == Some(gpu));
    let stays = |i: &usize, phase| problem.budget.kv == KvHome::Host && problem.stays(*i, choices[*i], phase);
    let state = |phase| match problem.budget.kv {
        KvHome::Device => there(phase).map(|i| kv(problem, i)).sum::<u64>(),
        KvHome::Host => there(phase).filter(|i| !stays(i, phase)).map(|i| kv(problem, i)).max().unwrap_or(0),
    };
    let own = |phase| there(phase).filter(move |i| stays(i, phase)).map(|i| kv(problem, i)).sum::<u64>();
    let streamed = |i: usize| choices[i].is_streamed_to(gpu);
    let slot = slot((0..choices.len()).filter(|i| streamed(*i)).map(|i| &problem.blocks[i]));
    let resident = |i: usize| choices[i].resident().any(|there| there == gpu);
    let resident = distinct(problem, |block| &block.weights, resident, |i| !is_joined(problem, choices, i));
    Demand {
        weights: resident + distinct(problem, |block| block.streamed.constants(), streamed, |_| false),
        kv: Phase::BOTH.map(state).into_iter().max().unwrap_or(0) + Phase::BOTH.map(own).iter().sum::<u64>(),
        workspace: workspace(problem, choices, |place| place.gpu() == Some(gpu)),
        ring: slot.saturating_mul(slots.into()),
    }
}

/// Weights of the blocks for which this is so, each weight once.
fn weights_of(problem: &Problem, is_so: impl Fn(usize) -> bool) -> u64 {
    distinct(problem, |block| &block.weights, is_so, |_| false)
}

/// Whether a block is in one partition with the block before it.
fn is_joined(problem: &Problem, choices: &[Choice], block: usize) -> bool {
    let same = |before: usize| choices[before] == choices[block];
    let merges = |phase: Phase| merges(problem, block, choices[block].of(phase), choices[block].of(phase));
    block.checked_sub(1).is_some_and(same) && Phase::BOTH.into_iter().all(merges)
}

/// What the blocks hold for which this is so, each thing once from where it begins to where it begins anew.
fn distinct(
    problem: &Problem,
    of: fn(&Block) -> &[(u32, u64)],
    is_so: impl Fn(usize) -> bool,
    begins: impl Fn(usize) -> bool,
) -> u64 {
    let blocks = || problem.blocks.iter().enumerate().filter(|(i, _)| is_so(*i));
    // Planners ask this for every placement: a table of keys, which are small, is several times faster than a set.
    let keys = blocks().flat_map(|(_, block)| of(block)).map(|(key, _)| *key as usize + 1).max().unwrap_or(0);
    // The beginning, counted from 1, since which a key is held.
    let mut held = vec![0u32; keys];
    let (mut beginning, mut sum) = (1, 0);
    for (i, block) in blocks() {
        beginning += u32::from(begins(i));
        for (key, bytes) in of(block) {
            if std::mem::replace(&mut held[*key as usize], beginning) != beginning {
                sum += bytes;
            }
        }
    }
    sum
}

/// The largest activations of a block that computes at such a place in either phase.
fn workspace(problem: &Problem, choices: &[Choice], is_so: impl Fn(Where) -> bool) -> u64 {
    let there = |(_, choice): &(_, &Choice)| Phase::BOTH.iter().any(|phase| is_so(choice.of(*phase)));
    problem.blocks.iter().zip(choices).filter(there).map(|(block, _)| block.workspace_bytes).max().unwrap_or(0)
}

#[cfg(test)]
mod tests;
