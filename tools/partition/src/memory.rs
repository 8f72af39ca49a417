//! What a placement holds in each memory, phase by phase, and whether it fits.
//!
//! A GPU holds, at once: weights resident in either phase, the state of the blocks that compute there (prefill or decode,
//! whichever is more: what leaves after the prompt leaves before anything else comes), the largest block's activations,
//! and a ring of slots for the largest streamed block. The host holds the weights it computes with or that are copied
//! from it, and the state of every block that does not stay on one GPU. Where not all of that fits and there is a disk, an equal
//! share of each block stays and the rest is read in each pass; the largest block must still fit.

use crate::{BlockKind, Choice, Demand, KvHome, Mechanisms, NoFit, Phase, Place, Problem, Where};

/// What a placement holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// On each GPU.
    pub gpus: Vec<Demand>,
    /// On the host, if all of it lay in memory.
    pub host: Demand,
    /// Weights the host reads in each pass of a prefill and of decoding, as its kernels want them, bytes.
    pub host_reads: [u64; 2],
    /// The largest block the host holds, those that read a few rows only apart, bytes.
    pub largest_on_host: u64,
    /// The largest block the host reads in each phase, bytes.
    pub largest_read: [u64; 2],
}

/// What a placement holds in each memory.
pub fn usage(problem: &Problem, choices: &[Choice], slots: &[u32]) -> Usage {
    let is_read = |i: usize, phase| !matches!(choices[i].of(phase), Where::Resident(_)) && !problem.reads_rows(i);
    let reads = |phase: Phase| weights_of(problem, |i| is_read(i, phase));
    let largest_read = |phase: Phase| {
        (0..choices.len()).filter(|i| is_read(*i, phase)).map(|i| problem.weight_bytes(i)).max().unwrap_or(0)
    };
    let on_host = |i: &usize| choices[*i].on_host() && !problem.reads_rows(*i);
    let packed = |bytes: u64| problem.packed(bytes);
    Usage {
        gpus: (0..problem.budget.vram.len()).map(|gpu| on_gpu(problem, choices, slots[gpu], gpu)).collect(),
        host: Demand {
            weights: packed(weights_of(problem, |i| choices[i].on_host())),
            kv: (0..choices.len()).filter(|i| state_on_host(problem, choices[*i])).map(|i| kv(problem, i)).sum(),
            workspace: workspace(problem, choices, |place| place == Where::Cpu),
            ring: 0,
        },
        host_reads: Phase::BOTH.map(reads).map(packed),
        largest_read: Phase::BOTH.map(largest_read).map(packed),
        largest_on_host: (0..choices.len()).filter(on_host).map(|i| problem.weight_bytes(i)).max().map_or(0, packed),
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
            Some(ram) => NoFit::unless(Place::Cpu, self.host_least(problem, mechanisms), ram, 0),
            None => Ok(()),
        }
    }

    /// What host memory must hold: with a disk to read from, one block's weights at a time.
    pub(crate) fn host_least(&self, problem: &Problem, mechanisms: Mechanisms) -> Demand {
        let fits = problem.budget.ram.is_none_or(|ram| self.host.total() <= ram);
        match may_read_disk(problem, mechanisms) && !fits {
            true => Demand { weights: self.largest_on_host.saturating_add(problem.budget.reading), ..self.host },
            false => self.host,
        }
    }

    /// Weights read from disk in each pass of a phase, bytes; 0 where all that the host holds fits into its memory.
    ///
    /// Where it does not, an equal share of each block stays: of R bytes of room, W of weights and l of the largest block, the
    /// share f for which `f W + (1 - f) l = R`, because beside the shares one block's rest lies in memory.
    pub fn missing(&self, problem: &Problem, phase: Phase) -> u64 {
        let reads = self.host_reads[phase as usize];
        reads - (self.locked_share(problem, phase) * reads as f64) as u64
    }

    /// The part of each block's weights that stays in host memory, 0 to 1; see [`missing`](Self::missing).
    pub fn locked_share(&self, problem: &Problem, phase: Phase) -> f64 {
        let beside = self.host.kv.saturating_add(self.host.workspace);
        let Some(ram) = problem.budget.ram.filter(|ram| self.host.total() > *ram) else { return 1.0 };
        let room = ram.saturating_sub(beside).saturating_sub(problem.budget.reading) as f64;
        let (reads, largest) = (self.host_reads[phase as usize] as f64, self.largest_read[phase as usize] as f64);
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
    /// Bytes that weights take on the host, as its kernels want them.
    fn packed(&self, bytes: u64) -> u64 {
        bytes.saturating_add(bytes / 1000 * self.budget.packing)
    }

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
    let state = |phase| match problem.budget.kv {
        KvHome::Device => there(phase).map(|i| kv(problem, i)).sum::<u64>(),
        KvHome::Host => there(phase).map(|i| kv(problem, i)).max().unwrap_or(0),
    };
    let streamed = |phase| there(phase).filter(move |i| choices[*i].of(phase) == Where::Streamed(gpu));
    let largest = Phase::BOTH.into_iter().flat_map(streamed).map(|i| problem.weight_bytes(i)).max().unwrap_or(0);
    Demand {
        weights: weights_of(problem, |i| choices[i].resident().any(|there| there == gpu)),
        kv: Phase::BOTH.map(state).into_iter().max().unwrap_or(0),
        workspace: workspace(problem, choices, |place| place.gpu() == Some(gpu)),
        ring: largest.saturating_mul(slots.into()),
    }
}

/// Weights of the blocks for which this is so, each weight once.
fn weights_of(problem: &Problem, is_so: impl Fn(usize) -> bool) -> u64 {
    let blocks = || problem.blocks.iter().enumerate().filter(|(i, _)| is_so(*i)).map(|(_, block)| block);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;
    use crate::cost::tests::{dense, problem};

    /// Blocks on `gpu0` where the text has a `0`, on the host elsewhere.
    fn placed(text: &str) -> Vec<Choice> {
        let place = |c: char| if c == '0' { Where::Resident(0) } else { Where::Cpu };
        text.chars().map(|c| Choice::both(place(c))).collect()
    }

    #[test]
    fn the_error_names_the_smallest_budget_that_would_do() {
        let mut problem = problem(dense(2, 1000), Budget { vram: vec![2000], margin: 50, ..Budget::default() });
        let check = |problem: &Problem| fits(problem, &placed(".00."), &[0], Mechanisms::ResidentCpu);
        let error = check(&problem).unwrap_err();
        assert_eq!(error.place, Place::Gpu(0));
        assert_eq!(check_gpu(&problem, &placed(".00."), 0), Err(error.clone()));
        problem.budget.vram[0] = error.smallest() - 1;
        assert!(check(&problem).is_err());
        problem.budget.vram[0] += 1;
        assert_eq!(check(&problem), Ok(()));
    }

    #[test]
    fn state_on_the_host_leaves_one_blocks_share_on_the_device() {
        let kv = |kv: KvHome| {
            let budget = Budget { vram: vec![1 << 20], kv, ..Budget::default() };
            let usage = usage(&problem(dense(4, 1000), budget), &placed(".000.."), &[0]);
            (usage.gpus[0].kv, usage.host.kv)
        };
        assert_eq!(kv(KvHome::Device), (750, 250));
        assert_eq!(kv(KvHome::Host), (250, 1000));
    }

    #[test]
    fn host_memory_is_a_budget_too() {
        let problem = problem(dense(2, 1000), Budget { ram: Some(3000), ..Budget::default() });
        let error = fits(&problem, &placed("...."), &[], Mechanisms::ResidentCpu).unwrap_err();
        assert_eq!((error.place, error.demand.weights), (Place::Cpu, 6000));
    }
}
