//! Brute force on one GPU for up to nine blocks: seven placements for each block, forty million placements. The simulator computes the time
//! of each placement of one phase once; tables over sets of blocks hold the memory use.

use super::instances::{from_disk, legal};
use crate::{BlockPlacement, BlockRole, BlockSpec, KvHome, Mechanisms, Objective, Phase, Placement, Problem, simulate};
use std::cell::RefCell;
use std::collections::HashMap;

/// A set of blocks, one bit for each.
type Set = usize;

/// A placement as sets of blocks.
#[derive(Clone, Copy, Default)]
struct Sets {
    streamed: Set,
    on_host: Set,
    on_cpu: Set,
    prompt_on_cpu: Set,
    on_gpu: [Set; 2],
    reads: [Set; 2],
    copies: [Set; 2],
    state_on_host: Set,
    moved: Set,
    /// For each phase, a number with one digit to base six for each block: its place, and whether its state is swapped differently than
    /// with the same place in both phases.
    code: [usize; 2],
    /// The placement of the previous block, and the resident partition that it belongs to.
    previous: Option<(BlockPlacement, Set)>,
    /// Bytes of all resident partitions.
    resident_bytes: u64,
    /// The partition in host memory that the previous block belongs to, and the bytes of all such partitions, each with its own
    /// copies.
    host_partition: Set,
    host_bytes: u64,
}

struct Tables<'a> {
    problem: &'a Problem,
    weights: Vec<u64>,
    state: Vec<u64>,
    state_tensors: Vec<u64>,
    most_state: Vec<u64>,
    workspace: Vec<u64>,
    with_scores: Vec<u64>,
    largest: Vec<u64>,
    largest_streamed: Vec<u64>,
    constants: Vec<u64>,
    own_state: Vec<u64>,
    most_shared_state: Vec<u64>,
    free: Problem,
    slots: u32,
    ms: [RefCell<HashMap<usize, f64>>; 2],
}

/// The smallest objective of all placements, milliseconds; `None` if nothing fits.
pub fn brute_force_with_tables(problem: &Problem, objective: Objective, slots: u32) -> Option<f64> {
    let tables = Tables::new(problem, slots);
    let legal = legal(problem, Mechanisms::All);
    let mut best = None;
    descend(&tables, &legal, objective, slots, 0, Sets::default(), &mut best);
    best
}

fn descend(
    tables: &Tables,
    legal: &[BlockPlacement],
    objective: Objective,
    slots: u32,
    block: usize,
    sets: Sets,
    best: &mut Option<f64>,
) {
    if block == tables.problem.blocks.len() {
        if let Some(ms) = tables.evaluate(&sets, objective, slots, *best) {
            *best = Some(best.map_or(ms, |best| best.min(ms)));
        }
        return;
    }
    for placement in legal {
        descend(tables, legal, objective, slots, block + 1, sets.with(block, *placement, tables), best);
    }
}

fn digit(place: Placement) -> usize {
    match place {
        Placement::Cpu => 0,
        Placement::Resident(_) => 1,
        Placement::Streamed(_) => 2,
    }
}

impl Sets {
    fn with(mut self, block: usize, placement: BlockPlacement, tables: &Tables) -> Sets {
        let (problem, bit) = (tables.problem, 1 << block);
        let phases = [placement.prefill, placement.decode];
        let alone = problem.budget.kv == KvHome::Host || problem.cuts.contains(&block);
        let mut partition =
            self.previous.filter(|(previous, _)| *previous == placement && !alone).map_or(0, |(_, set)| set);
        if phases.contains(&Placement::Resident(0)) {
            self.resident_bytes += tables.weights[partition | bit] - tables.weights[partition];
            partition |= bit;
        }
        if phases.iter().any(|place| *place != Placement::Resident(0)) {
            let joins = self.previous.is_some_and(|(previous, _)| previous == placement)
                && !problem.cuts.contains(&block)
                && !phases.contains(&Placement::Streamed(0))
                && (problem.budget.kv == KvHome::Device || !phases.contains(&Placement::Resident(0)));
            let before = if joins { self.host_partition } else { 0 };
            self.host_partition = before | bit;
            self.host_bytes += tables.weights[before | bit] - tables.weights[before];
        }
        self.previous = Some((placement, partition));
        let differ = placement.prefill.gpu() != placement.decode.gpu();
        let put = |set: &mut Set, selects: bool| *set |= if selects { bit } else { 0 };
        put(&mut self.streamed, phases.contains(&Placement::Streamed(0)));
        put(&mut self.on_host, phases.iter().any(|place| *place != Placement::Resident(0)));
        put(&mut self.on_cpu, phases.contains(&Placement::Cpu));
        put(&mut self.prompt_on_cpu, placement.prefill == Placement::Cpu);
        put(&mut self.state_on_host, problem.budget.kv == KvHome::Host || phases.contains(&Placement::Cpu));
        let goes_home = problem.budget.kv == KvHome::Device || placement.decode == Placement::Cpu;
        let has_state = problem.blocks[block].kv_bytes > 0 && problem.blocks[block].kv_grows.is_none();
        put(&mut self.moved, differ && goes_home && has_state);
        for (phase, place) in phases.into_iter().enumerate() {
            put(&mut self.on_gpu[phase], place != Placement::Cpu);
            put(&mut self.reads[phase], place != Placement::Resident(0));
            put(&mut self.copies[phase], place == Placement::Streamed(0));
            let same_place = BlockPlacement::both(place);
            let swap = |placement| problem.state_swap(block, placement, Phase::BOTH[phase]);
            let swaps_differ = swap(placement) != swap(same_place);
            self.code[phase] += (digit(place) + if swaps_differ { 3 } else { 0 }) * 6usize.pow(block as u32);
        }
        self
    }
}

impl<'a> Tables<'a> {
    fn new(problem: &'a Problem, slots: u32) -> Self {
        let blocks = problem.blocks.len();
        let sets = || 0..1usize << blocks;
        let members = |set: Set| (0..blocks).filter(move |i| set >> i & 1 == 1);
        let max = |of: &dyn Fn(usize) -> u64| sets().map(|set| members(set).map(of).max().unwrap_or(0)).collect();
        let distinct = |of: fn(&BlockSpec) -> &[(u32, u64)], set: Set| {
            let mut all: Vec<(u32, u64)> = members(set).flat_map(|i| of(&problem.blocks[i]).to_vec()).collect();
            all.sort_unstable();
            all.dedup();
            all.iter().map(|(_, bytes)| bytes).sum()
        };
        let mut free = problem.clone();
        (free.budget.ram, free.disk_bytes_per_ms) = (None, None);
        let kv = |i: usize| problem.blocks[i].kv_bytes;
        let in_place = |i: &usize| problem.blocks[*i].kv_grows.is_none();
        Tables {
            problem,
            weights: sets().map(|set| distinct(|block| &block.weights, set)).collect(),
            constants: sets().map(|set| distinct(|block| block.streamed.constants(), set)).collect(),
            state: sets().map(|set| members(set).map(kv).sum()).collect(),
            state_tensors: sets().map(|set| members(set).map(|i| problem.blocks[i].kv_tensors).sum()).collect(),
            most_state: max(&kv),
            workspace: max(&|i| problem.blocks[i].workspace_bytes),
            with_scores: max(&|i| problem.blocks[i].workspace_bytes + problem.blocks[i].score_bytes),
            largest: max(&|i| problem.blocks[i].weights.iter().map(|(_, bytes)| bytes).sum()),
            largest_streamed: max(&|i| problem.blocks[i].streamed.bytes()),
            own_state: sets().map(|set| members(set).filter(in_place).map(kv).sum()).collect(),
            most_shared_state: max(&|i| if in_place(&i) { 0 } else { kv(i) }),
            free,
            slots,
            ms: Default::default(),
        }
    }

    /// Time of a phase without the handover, milliseconds.
    fn ms(&self, phase: Phase, code: usize) -> f64 {
        let simulated = || {
            let placement_of = |i: usize| {
                let digit = code / 6usize.pow(i as u32) % 6;
                let place = [Placement::Cpu, Placement::Resident(0), Placement::Streamed(0)][digit % 3];
                let other = match (digit < 3, place) {
                    (true, _) => place,
                    (false, Placement::Cpu) => Placement::Resident(0),
                    (false, _) => Placement::Cpu,
                };
                if phase == Phase::Prefill {
                    BlockPlacement { prefill: place, decode: other }
                } else {
                    BlockPlacement { prefill: other, decode: place }
                }
            };
            let placements: Vec<BlockPlacement> = (0..self.problem.blocks.len()).map(placement_of).collect();
            let handover = |i: usize| self.problem.handover_ms(i, placements[i]);
            let handover_ms: f64 =
                if phase == Phase::Prefill { (0..placements.len()).map(handover).sum() } else { 0.0 };
            simulate(&self.free, &placements, &[self.slots], phase).ms - handover_ms
        };
        *self.ms[phase as usize].borrow_mut().entry(code).or_insert_with(simulated)
    }

    /// The objective of a placement, milliseconds; `None` if it does not fit, or if it is no better than `best` without reads from disk.
    fn evaluate(&self, sets: &Sets, objective: Objective, slots: u32, best: Option<f64>) -> Option<f64> {
        let budget = &self.problem.budget;
        // Blocks that compute on the host in one phase have their own state buffers.
        let (both, one) = (sets.on_gpu[0] & sets.on_gpu[1], sets.on_gpu[0] ^ sets.on_gpu[1]);
        let state = match budget.kv {
            KvHome::Host => {
                let with_state = |selects: &dyn Fn(usize) -> bool| -> Set {
                    (0..self.problem.blocks.len()).filter(|i| selects(*i)).map(|i| 1 << i).sum()
                };
                let blocks = &self.problem.blocks;
                let (has_state, grows) =
                    (with_state(&|i| blocks[i].kv_bytes > 0), with_state(&|i| blocks[i].kv_grows.is_some()));
                let visits = |phase: usize| (sets.on_gpu[phase] & has_state & (both | grows)).count_ones();
                let buffers = if visits(0).max(visits(1)) > 1 { 2 } else { 1 };
                let of_all = buffers * self.most_state[both].max(self.most_shared_state[one]) + self.own_state[one];
                of_all / self.problem.load.sequences
            }
            KvHome::Device => {
                let [prompt, decode] = sets.on_gpu;
                self.state[decode] + self.state[prompt & !decode] / self.problem.load.sequences
            }
        };
        let on_gpu = sets.resident_bytes
            + state
            + self.workspace[sets.on_gpu[0] | sets.on_gpu[1]]
            + self.constants[sets.streamed]
            + u64::from(slots) * self.largest_streamed[sets.streamed];
        if on_gpu > 0 && on_gpu + budget.margin > budget.vram[0] {
            return None;
        }
        let workspace = self.workspace[sets.on_cpu].max(self.with_scores[sets.prompt_on_cpu]);
        let state_and_workspace = self.state[sets.state_on_host] + workspace;
        let mut disk = [0.0; 2];
        if budget.ram.is_some_and(|ram| ram < budget.process) {
            return None;
        }
        if let Some(ram) = budget.host() {
            let is_table = |i: &usize| self.problem.blocks[*i].kind == BlockRole::Embedding;
            let tables: Set = (0..self.problem.blocks.len()).filter(is_table).map(|i| 1 << i).sum();
            let packed = |bytes: u64| (bytes * (1000 + budget.packing.growth_permille)).div_ceil(1000);
            // Where partitions are known by their cuts, each has its own copy of the weights that several blocks read.
            let knows_partitions = !self.problem.cuts.is_empty();
            let on_host = if knows_partitions { sets.host_bytes } else { self.weights[sets.on_host] };
            let fits = packed(on_host) + state_and_workspace <= ram;
            let min_weights = match self.problem.disk_bytes_per_ms {
                Some(_) => packed(self.largest[sets.on_host & !tables]) + budget.read_ahead,
                None => packed(on_host),
            };
            if !fits && min_weights + state_and_workspace > ram {
                return None;
            }
            if best.is_some_and(|best| self.objective_ms(sets, objective, [0.0; 2]) >= best) {
                return None;
            }
            let rate = self.problem.disk_bytes_per_ms.unwrap_or(f64::INFINITY);
            let passes = [self.problem.load.passes.len() as f64, 1.0];
            for phase in 0..2 {
                let read = sets.reads[phase] & !tables;
                // Each weight counts for the first block that reads it, those that are copied first, and for each block that is a partition
                // of its own.
                let copied = read & sets.copies[phase];
                let of_block = |i: usize| {
                    let (earlier, is_copied) = (read & ((1 << i) - 1), copied & 1 << i != 0);
                    let before = if is_copied { earlier & copied } else { earlier | copied };
                    let new = self.weights[before | 1 << i] - self.weights[before];
                    (packed(if knows_partitions && !is_copied { self.weights[1 << i] } else { new }), is_copied)
                };
                let disk_bytes = || {
                    let room = (ram - state_and_workspace - budget.read_ahead).saturating_sub(budget.reserve);
                    let blocks = (0..self.problem.blocks.len()).filter(|i| read & 1 << i != 0).map(of_block);
                    from_disk(self.problem, &blocks.collect::<Vec<_>>(), room)
                };
                let disk_bytes = if fits { 0 } else { disk_bytes() };
                disk[phase] = passes[phase] * disk_bytes as f64 / rate;
            }
        }
        Some(self.objective_ms(sets, objective, disk))
    }

    /// The objective if reads from disk take these milliseconds in each phase.
    fn objective_ms(&self, sets: &Sets, objective: Objective, disk: [f64; 2]) -> f64 {
        let ms = |phase: usize| self.ms(Phase::BOTH[phase], sets.code[phase]).max(disk[phase]);
        let prefill = ms(0) + self.handover(sets);
        match objective {
            Objective::Prefill => prefill,
            Objective::Decode => ms(1),
            Objective::Mixed | Objective::Throughput => self.problem.load.answer_ms(prefill, ms(1)),
        }
    }

    fn handover(&self, sets: &Sets) -> f64 {
        let gpu = &self.problem.gpus[0];
        let copy_ms = |set: Set, rate: f64| {
            let moved = set & sets.moved;
            self.state_tensors[moved] as f64 * gpu.latency_ms + self.state[moved] as f64 / rate
        };
        copy_ms(sets.on_gpu[0], gpu.from_device) + copy_ms(sets.on_gpu[1], gpu.to_device)
    }
}
