//! What a placement holds in each memory, phase by phase, and whether it fits.
//!
//! A GPU holds, at once: weights resident in either phase, the state of the blocks that compute there (prefill or decode,
//! whichever is more: what leaves after the prompt leaves before anything else comes), the largest block's activations,
//! and a ring of slots for the largest streamed block. The host holds the weights it computes with or that are copied
//! from it, and the state of every block that does not stay on one GPU. What does not fit there is read from disk in each
//! pass where there is a disk, and the largest block must still fit.

use crate::{Choice, Demand, KvHome, Mechanisms, NoFit, Phase, Place, Problem, Where};

/// What a placement holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// On each GPU.
    pub gpus: Vec<Demand>,
    /// On the host, if all of it lay in memory.
    pub host: Demand,
    /// Weights the host reads in each pass of a prefill and of decoding, bytes.
    pub host_reads: [u64; 2],
    /// The largest block the host holds, bytes.
    pub largest_on_host: u64,
}

/// What a placement holds in each memory.
pub fn usage(problem: &Problem, choices: &[Choice], slots: &[u32]) -> Usage {
    let reads = |phase: Phase| weights_of(problem, choices, |c| !matches!(c.of(phase), Where::Resident(_)));
    let on_host = |i: &usize| choices[*i].on_host();
    Usage {
        gpus: (0..problem.budget.vram.len()).map(|gpu| on_gpu(problem, choices, slots[gpu], gpu)).collect(),
        host: Demand {
            weights: weights_of(problem, choices, Choice::on_host),
            kv: (0..choices.len()).filter(|i| state_on_host(problem, choices[*i])).map(|i| kv(problem, i)).sum(),
            workspace: workspace(problem, choices, |place| place == Where::Cpu),
            ring: 0,
        },
        host_reads: Phase::BOTH.map(reads),
        largest_on_host: (0..choices.len()).filter(on_host).map(|i| problem.weight_bytes(i)).max().unwrap_or(0),
    }
}

/// Whether a placement fits. What is too small first is named: GPUs in order, then the host.
pub fn fits(problem: &Problem, choices: &[Choice], slots: &[u32], mechanisms: Mechanisms) -> Result<(), NoFit> {
    usage(problem, choices, slots).check(problem, mechanisms)
}

impl Usage {
    /// Whether this fits the problem's budget.
    pub fn check(&self, problem: &Problem, mechanisms: Mechanisms) -> Result<(), NoFit> {
        let budget = &problem.budget;
        for (gpu, demand) in self.gpus.iter().enumerate().filter(|(_, demand)| demand.total() > 0) {
            NoFit::unless(Place::Gpu(gpu), *demand, budget.vram[gpu], budget.margin)?;
        }
        match budget.ram {
            Some(ram) => NoFit::unless(Place::Cpu, self.host_least(problem, mechanisms), ram, 0),
            None => Ok(()),
        }
    }

    /// What host memory must hold: with a disk to read from, one block's weights at a time.
    pub(crate) fn host_least(&self, problem: &Problem, mechanisms: Mechanisms) -> Demand {
        match may_read_disk(problem, mechanisms) {
            true => Demand { weights: self.largest_on_host, ..self.host },
            false => self.host,
        }
    }

    /// Weights read from disk in each pass of a phase, bytes: what the host reads beyond what its memory can keep.
    pub fn missing(&self, problem: &Problem, phase: Phase) -> u64 {
        let room = |ram: u64| ram.saturating_sub(self.host.kv).saturating_sub(self.host.workspace);
        let reads = self.host_reads[phase as usize];
        problem.budget.ram.map_or(0, |ram| reads.saturating_sub(room(ram)))
    }
}

/// Whether weights that do not fit in host memory may be read from disk in each pass.
pub(crate) fn may_read_disk(problem: &Problem, mechanisms: Mechanisms) -> bool {
    mechanisms == Mechanisms::All && problem.disk_bytes_per_ms.is_some_and(|rate| rate > 0.0)
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
    let state = |phase| match problem.budget.kv {
        KvHome::Device => there(phase).map(|i| kv(problem, i)).sum::<u64>(),
        KvHome::Host => there(phase).map(|i| kv(problem, i)).max().unwrap_or(0),
    };
    let streamed = |phase| there(phase).filter(move |i| choices[*i].of(phase) == Where::Streamed(gpu));
    let largest = Phase::BOTH.into_iter().flat_map(streamed).map(|i| problem.weight_bytes(i)).max().unwrap_or(0);
    Demand {
        weights: weights_of(problem, choices, |choice| choice.resident().any(|there| there == gpu)),
        kv: Phase::BOTH.map(state).into_iter().max().unwrap_or(0),
        workspace: workspace(problem, choices, |place| place.gpu() == Some(gpu)),
        ring: largest.saturating_mul(slots.into()),
    }
}

/// Weights of the blocks whose choice is so, each weight once.
fn weights_of(problem: &Problem, choices: &[Choice], is_so: impl Fn(Choice) -> bool) -> u64 {
    let blocks = || problem.blocks.iter().zip(choices).filter(|(_, choice)| is_so(**choice)).map(|(block, _)| block);
    // Planners ask this for every placement: a table of keys, which are small, is several times faster than a set.
    let keys = blocks().flat_map(|block| &block.weights).map(|(key, _)| *key as usize + 1).max().unwrap_or(0);
    let mut seen = vec![false; keys];
    let mut first = |key: u32| !std::mem::replace(&mut seen[key as usize], true);
    blocks().flat_map(|block| &block.weights).filter(|(key, _)| first(*key)).map(|(_, bytes)| bytes).sum()
}

/// The largest activations of a block that computes at such a place in either phase.
fn workspace(problem: &Problem, choices: &[Choice], is_so: impl Fn(Where) -> bool) -> u64 {
    let there = |(_, choice): &(_, &Choice)| Phase::BOTH.iter().any(|phase| is_so(choice.of(*phase)));
    problem.blocks.iter().zip(choices).filter(there).map(|(block, _)| block.workspace_bytes).max().unwrap_or(0)
}
