//! Random small problems, and a brute-force search for the best placement that uses only the simulator.

use crate::{
    BlockPlacement, BlockRole, BlockSpec, Budget, Contention, Cost, GpuCosts, GrowingState, KvHome, Mechanisms,
    Objective, Packing, Phase, Placement, Problem, RowBatching, Streamed, Work, Workload, simulate,
};
use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

/// A pseudorandom number generator (splitmix64).
pub struct Random(pub u64);

impl Random {
    /// A number from 0 to 1.
    pub fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    pub fn below(&mut self, number: u64) -> u64 {
        (self.unit() * number as f64) as u64
    }

    pub fn one_in(&mut self, number: u64) -> bool {
        self.below(number) == 0
    }
}

/// A problem with this many blocks and GPUs, and random costs, sizes, links, contention and budgets.
pub fn instance(seed: u64, blocks: usize, gpus: usize) -> Problem {
    let mut random = Random(seed);
    let d = &mut random;
    let passes: Vec<u64> = (0..1 + d.below(3)).map(|_| 1 + d.below(200)).collect();
    let alike = d.one_in(3);
    let mut all_blocks: Vec<BlockSpec> = Vec::new();
    for i in 0..blocks {
        let copy = alike && i > 0 && i + 1 < blocks;
        let before = all_blocks.last().cloned().filter(|_| copy);
        let mut block = before.unwrap_or_else(|| block(d, i));
        block.label = format!("layers.{i}");
        block.weights = vec![(i as u32, block.weights[0].1)];
        all_blocks.push(block);
    }
    if blocks > 1 && d.one_in(4) {
        let shared = all_blocks[0].weights[0];
        all_blocks[blocks - 1].weights.push(shared);
    }
    let (constant_bytes, constant_keys) = (if d.one_in(2) { 70 + d.below(30) } else { 0 }, 1 + d.below(2));
    for block in &mut all_blocks {
        let all: u64 = block.weights.iter().map(|(_, bytes)| bytes).sum();
        let constants = (constant_bytes > 0).then(|| (d.below(constant_keys) as u32, constant_bytes));
        block.streamed = Streamed::new(vec![all - constant_bytes], constants);
    }
    let slow = d.between(1.0, 8.0);
    let cpu: Vec<Cost> = all_blocks.iter().map(|block| cost(d, block, slow, passes.len(), alike)).collect();
    let gpus: Vec<GpuCosts> = (0..gpus).map(|_| gpu(d, &all_blocks, passes.len(), alike)).collect();
    let all: u64 = all_blocks.iter().map(|b| b.weights[0].1 + b.kv_bytes + b.workspace_bytes).sum();
    let vram = gpus.iter().map(|_| (d.between(0.1, 1.1) * all as f64) as u64).collect();
    let ram = d.one_in(2).then(|| (d.between(0.3, 1.5) * all as f64) as u64);
    Problem {
        blocks: all_blocks,
        cpu,
        gpus,
        cpu_launch_ms: d.between(0.0, 0.3),
        pass_overhead_ms: d.between(0.0, 0.5),
        disk_bytes_per_ms: d.one_in(2).then(|| d.between(50.0, 2000.0)),
        disk_contention: Contention::NONE,
        decompression: None,
        budget: Budget {
            vram,
            ram,
            margin: d.below(50),
            movable: false,
            kv: if d.one_in(5) { KvHome::Host } else { KvHome::Device },
            host_kv_on_disk: false,
            process: if d.one_in(3) { d.below(100) } else { 0 },
            read_ahead: if d.one_in(2) { d.below(100) } else { 0 },
            reserve: if d.one_in(2) { d.below(100) } else { 0 },
            packing: packing(d),
        },
        load: Workload { batch: 1, sequences: 1, prompt_tokens: passes.iter().sum(), new_tokens: d.below(100), passes },
        row_batching: RowBatching::Never,
        expert_hits: vec![],
        cuts: if d.one_in(5) { vec![d.below(blocks as u64) as usize] } else { vec![] },
    }
}

/// Like [`instance`], with a slow disk, host memory for the largest block and a part of the others, and compressed weights.
pub fn disk_bound_instance(seed: u64, blocks: usize, gpus: usize) -> Problem {
    let mut problem = instance(seed, blocks, gpus);
    let d = &mut Random(!seed);
    problem.budget.packing =
        Packing { growth_permille: d.below(500), decompressed_permille: d.below(1001), read_permille: d.below(1001) };
    let packed = |bytes: u64| problem.budget.packing.packed(bytes);
    let weights = |block: &BlockSpec| block.weights.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let largest = packed(problem.blocks.iter().map(weights).max().unwrap_or(0));
    let all = packed(problem.blocks.iter().map(weights).sum());
    let state: u64 = problem.blocks.iter().map(|block| block.kv_bytes).sum();
    let workspace = problem.blocks.iter().map(|block| block.workspace_bytes + block.score_bytes).max().unwrap_or(0);
    let state_and_workspace = state + workspace;
    let room = largest + (d.between(0.0, 1.0) * (all - largest) as f64) as u64;
    problem.budget.ram = Some(problem.budget.process + problem.budget.read_ahead + state_and_workspace + room);
    problem.disk_bytes_per_ms = Some(d.between(2.0, 20.0));
    problem
}

/// With or without packing, with or without compression. Not widened: the tables that judge these instances do not count the creation of sessions.
fn packing(d: &mut Random) -> Packing {
    let growth_permille = if d.one_in(3) { 0 } else { d.below(500) };
    let is_compressed = d.one_in(2);
    let (decompressed_permille, read_permille) = if is_compressed { (d.below(1001), d.below(1001)) } else { (0, 0) };
    Packing { growth_permille, decompressed_permille, read_permille }
}

fn block(d: &mut Random, i: usize) -> BlockSpec {
    let weights = 100 + d.below(1000);
    let table = i == 0 && d.one_in(3);
    BlockSpec {
        label: String::new(),
        kind: if table { BlockRole::Embedding } else { BlockRole::Layer(i as u32) },
        weights: vec![(0, weights)],
        streamed: Streamed::whole(weights),
        experts: None,
        kv_bytes: if d.one_in(3) { 0 } else { d.below(300) },
        kv_tensors: 1 + d.below(3),
        kv_grows: d.one_in(4).then(|| GrowingState { fixed: d.below(100), token: d.below(3) }),
        kept_on_host: false,
        assigned: None,
        needs_gpu: false,
        kv_filled: None,
        workspace_bytes: d.below(60),
        folded_bytes: 0,
        widened_bytes: 0,
        session_bytes: 0,
        score_bytes: if d.one_in(3) { d.below(60) } else { 0 },
        boundary_bytes: 1 + d.below(20),
        boundary_tensors: 1 + d.below(3),
        decode: Work { flops: 2 * weights, bytes: if table { 1 } else { weights } },
        prefill: Work { flops: 200 * weights, bytes: weights },
    }
}

fn cost(d: &mut Random, block: &BlockSpec, rate: f64, passes: usize, alike: bool) -> Cost {
    let ms = block.weights[0].1 as f64 / 400.0 * rate;
    let mut noise = || if alike { 1.0 } else { d.between(0.5, 1.5) };
    let prefill_ms = (0..passes).map(|_| 3.0 * ms * noise()).collect();
    Cost { decode_ms: ms * noise(), short_pass_ms: vec![], prefill_ms }
}

fn gpu(d: &mut Random, blocks: &[BlockSpec], passes: usize, alike: bool) -> GpuCosts {
    let rate = d.between(0.1, 1.2);
    let contention = d.one_in(2);
    GpuCosts {
        blocks: blocks.iter().map(|block| cost(d, block, rate, passes, alike)).collect(),
        launch_ms: d.between(0.0, 0.3),
        to_device: d.between(50.0, 800.0),
        from_device: d.between(50.0, 800.0),
        latency_ms: if d.one_in(4) { 0.0 } else { d.between(0.0, 0.4) },
        compute_contention: if contention { d.between(1.0, 2.0) } else { 1.0 },
        link_contention: if contention { d.between(1.0, 2.0) } else { 1.0 },
    }
}

/// Every legal block placement; does not use the planner's rules.
pub fn legal(problem: &Problem, mechanisms: Mechanisms) -> Vec<BlockPlacement> {
    let mut places = vec![Placement::Cpu];
    for gpu in 0..problem.gpus.len() {
        places.push(Placement::Resident(gpu));
        places.push(Placement::Streamed(gpu));
    }
    let mut legal = Vec::new();
    for prefill in &places {
        for decode in &places {
            let placement = BlockPlacement { prefill: *prefill, decode: *decode };
            let mixed = prefill.gpu().is_some() && prefill.gpu() == decode.gpu() && prefill != decode;
            let fixed = prefill == decode && !matches!(prefill, Placement::Streamed(_));
            if if mechanisms == Mechanisms::All { !mixed } else { fixed } {
                legal.push(placement);
            }
        }
    }
    legal
}

/// Tries every placement. Returns the smallest objective, milliseconds; `None` if nothing fits.
pub fn brute_force(problem: &Problem, mechanisms: Mechanisms, objective: Objective, slots: &[u32]) -> Option<f64> {
    let mut times: [HashMap<Vec<Placement>, f64>; 2] = Default::default();
    let mut free = problem.clone();
    free.budget.ram = None;
    let legal = legal(problem, mechanisms);
    let (blocks, mut best) = (problem.blocks.len(), None);
    let mut counter = vec![0usize; blocks];
    loop {
        let placements: Vec<BlockPlacement> = counter.iter().map(|at| legal[*at]).collect();
        for slots in slots {
            let slots = vec![*slots; problem.gpus.len()];
            if let Some(disk_bytes) =
                disk_bytes_if_fits(problem, &placements, slots[..].first().copied().unwrap_or(0), mechanisms)
            {
                let ms = Phase::BOTH.map(|phase| {
                    let mut key: Vec<Placement> = placements.iter().map(|c| c.in_phase(phase)).collect();
                    key.push(Placement::Streamed(slots.first().map_or(0, |s| *s as usize)));
                    // State swaps depend on the device that keeps the state, and on the device that computes the other phase.
                    let other = |c: &BlockPlacement| match (problem.budget.kv, phase) {
                        (KvHome::Device, Phase::Decode) => Placement::Cpu,
                        _ => c.in_phase(phase.other()).gpu().map_or(Placement::Cpu, Placement::Resident),
                    };
                    key.extend(placements.iter().map(other));
                    let handover_ms = if phase == Phase::Prefill { handover(problem, &placements) } else { 0.0 };
                    let cached = times[phase as usize].entry(key);
                    let without_disk =
                        *cached.or_insert_with(|| simulate(&free, &placements, &slots, phase).ms - handover_ms);
                    let passes = if phase == Phase::Prefill { problem.load.passes.len() as f64 } else { 1.0 };
                    let disk = match disk_bytes[phase as usize] {
                        0 => 0.0,
                        bytes => passes * bytes as f64 / problem.disk_bytes_per_ms.unwrap(),
                    };
                    without_disk.max(disk) + handover_ms
                });
                let value = match objective {
                    Objective::Prefill => ms[0],
                    Objective::Decode => ms[1],
                    Objective::Mixed | Objective::Throughput => problem.load.answer_ms(ms[0], ms[1]),
                };
                best = Some(best.map_or(value, |best: f64| best.min(value)));
            }
        }
        let Some(at) = (0..blocks).find(|at| counter[*at] + 1 < legal.len()) else { return best };
        counter[at] += 1;
        counter[..at].fill(0);
    }
}

fn handover(problem: &Problem, placements: &[BlockPlacement]) -> f64 {
    let moved = problem.blocks.iter().zip(placements).filter(|(_, c)| c.prefill.gpu() != c.decode.gpu());
    let moved = moved.filter(|(block, c)| block.kv_bytes > 0 && stays_for_phase(problem, block, c));
    let ms = moved.map(|(block, placement)| {
        let from = placement.prefill.gpu().map(|g| &problem.gpus[g]);
        let to = placement.decode.gpu().filter(|_| problem.budget.kv == KvHome::Device).map(|g| &problem.gpus[g]);
        let (number, bytes) = (block.kv_tensors as f64, block.kv_bytes as f64);
        from.map_or(0.0, |g| number * g.latency_ms + bytes / g.from_device)
            + to.map_or(0.0, |g| number * g.latency_ms + bytes / g.to_device)
    });
    ms.sum()
}

/// Whether state that the prompt computes on another device stays there until all passes of the prompt are done.
fn stays_for_phase(problem: &Problem, block: &BlockSpec, placement: &BlockPlacement) -> bool {
    block.kv_grows.is_none() && (problem.budget.kv == KvHome::Device || placement.decode == Placement::Cpu)
}

/// Bytes read from disk in each phase; `None` if the placement does not fit. Does not use the planner's memory model.
fn disk_bytes_if_fits(
    problem: &Problem,
    placements: &[BlockPlacement],
    slots: u32,
    mechanisms: Mechanisms,
) -> Option<[u64; 2]> {
    let blocks = &problem.blocks;
    let sum = |selects: &dyn Fn(BlockPlacement) -> bool| -> u64 {
        let of = (0..blocks.len()).filter(|i| selects(placements[*i])).flat_map(|i| blocks[i].weights.iter().copied());
        of.collect::<BTreeSet<(u32, u64)>>().iter().map(|(_, bytes)| bytes).sum()
    };
    let bytes_of_partition = |of: Range<usize>| -> u64 {
        of.flat_map(|i| blocks[i].weights.clone())
            .collect::<BTreeSet<(u32, u64)>>()
            .iter()
            .map(|(_, bytes)| bytes)
            .sum()
    };
    // A pass reads only a few rows of a table, so the rest stays on disk and is not read.
    let is_table = |i: usize| blocks[i].kind == BlockRole::Embedding;
    let whole = |i: usize| blocks[i].weights.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let max = |selects: &dyn Fn(BlockPlacement) -> bool, of: &dyn Fn(usize) -> u64| -> u64 {
        (0..blocks.len()).filter(|i| selects(placements[*i])).map(of).max().unwrap_or(0)
    };
    let either = |c: BlockPlacement, place: Placement| c.prefill == place || c.decode == place;
    for gpu in 0..problem.gpus.len() {
        let is_here = |w: Placement| w.gpu() == Some(gpu);
        let weights: u64 = resident_partitions(problem, placements, gpu).into_iter().map(bytes_of_partition).sum();
        // A block that computes on the host in one phase and on this GPU in the other has its own state buffer here.
        let has_own_buffer = |i: usize| either(placements[i], Placement::Cpu) && blocks[i].kv_grows.is_none();
        // A buffer holds the state of one sequence.
        let buffer = |i: usize| blocks[i].kv_bytes / problem.load.sequences;
        let at_all = |i: &usize| is_here(placements[*i].prefill) || is_here(placements[*i].decode);
        let here = || (0..blocks.len()).filter(at_all);
        let decodes = |i: usize| is_here(placements[i].decode);
        // If the states of two partitions visit this GPU in a pass, there are two buffers for them.
        let visits = |phase| (0..blocks.len()).filter(move |i| is_here(placements[*i].in_phase(phase)));
        let visits = |phase| visits(phase).filter(|i| blocks[*i].kv_bytes > 0 && !has_own_buffer(*i)).count();
        let buffers = if Phase::BOTH.into_iter().any(|phase| visits(phase) > 1) { 2 } else { 1 };
        let state: u64 = match problem.budget.kv {
            KvHome::Device => here().map(|i| if decodes(i) { blocks[i].kv_bytes } else { buffer(i) }).sum(),
            KvHome::Host => {
                let shared = here().filter(|i| !has_own_buffer(*i)).map(buffer).max().unwrap_or(0);
                buffers * shared + here().filter(|i| has_own_buffer(*i)).map(buffer).sum::<u64>()
            }
        };
        let workspace = max(&|c| is_here(c.prefill) || is_here(c.decode), &|i| blocks[i].workspace_bytes);
        let is_streamed = |c| either(c, Placement::Streamed(gpu));
        let ring = u64::from(slots) * max(&is_streamed, &|i| blocks[i].streamed.bytes());
        let constants = (0..blocks.len()).filter(|i| is_streamed(placements[*i]));
        let constants: BTreeSet<(u32, u64)> = constants.flat_map(|i| blocks[i].streamed.constants().to_vec()).collect();
        let constants: u64 = constants.iter().map(|(_, bytes)| bytes).sum();
        let total = weights + constants + state + workspace + ring;
        if total > 0 && total + problem.budget.margin > problem.budget.vram[gpu] {
            return None;
        }
    }
    if problem.budget.ram.is_some_and(|ram| ram < problem.budget.process) {
        return None;
    }
    let Some(ram) = problem.budget.host() else { return Some([0, 0]) };
    let resident = |w: Placement| matches!(w, Placement::Resident(_));
    let on_host = |c: BlockPlacement| !(resident(c.prefill) && resident(c.decode));
    let changes_device = |c: BlockPlacement| c.prefill.gpu().is_none() || c.prefill.gpu() != c.decode.gpu();
    let state: u64 = (0..blocks.len())
        .filter(|i| problem.budget.kv == KvHome::Host || changes_device(placements[*i]))
        .map(|i| blocks[i].kv_bytes)
        .sum();
    let on_cpu = max(&|c| either(c, Placement::Cpu), &|i| blocks[i].workspace_bytes);
    let for_prompt = max(&|c| c.prefill == Placement::Cpu, &|i| blocks[i].workspace_bytes + blocks[i].score_bytes);
    let workspace = on_cpu.max(for_prompt);
    let disk = mechanisms.reads_disk() && problem.disk_bytes_per_ms.is_some();
    let packed = |bytes: u64| bytes + (bytes * problem.budget.packing.growth_permille).div_ceil(1000);
    // Where partitions are known by their cuts, each has its own copy of the weights that several blocks read.
    let on_host_bytes: u64 = match problem.cuts.is_empty() {
        true => sum(&on_host),
        false => host_partitions(problem, placements).into_iter().map(bytes_of_partition).sum(),
    };
    if packed(on_host_bytes) + state + workspace <= ram {
        return Some([0; 2]);
    }
    let read_ahead = problem.budget.read_ahead;
    let read_whole = |i: usize| if is_table(i) { 0 } else { whole(i) };
    if !disk || packed(max(&on_host, &read_whole)) + read_ahead + state + workspace > ram {
        return None;
    }
    let room = (ram - state - workspace - read_ahead).saturating_sub(problem.budget.reserve);
    let disk_bytes = |phase: Phase| {
        let read = |c: BlockPlacement| !resident(c.in_phase(phase));
        let is_copied = |i: usize| placements[i].in_phase(phase) != Placement::Cpu;
        let mut reads: Vec<usize> = (0..blocks.len()).filter(|i| read(placements[*i]) && !is_table(*i)).collect();
        // A weight that is copied for one block is not compressed for another.
        reads.sort_by_key(|i| !is_copied(*i));
        let of_read = |at: usize| {
            let is_copied = is_copied(reads[at]);
            let before = distinct_bytes(blocks, reads[..at].iter().copied());
            let new = distinct_bytes(blocks, reads[..=at].iter().copied()) - before;
            // Blocks that are read from disk are partitions of their own, where partitions are known.
            let is_own = !problem.cuts.is_empty() && !is_copied;
            (packed(if is_own { whole(reads[at]) } else { new }), is_copied)
        };
        from_disk(problem, &(0..reads.len()).map(of_read).collect::<Vec<_>>(), room)
    };
    Some(Phase::BOTH.map(disk_bytes))
}

fn distinct_bytes(blocks: &[BlockSpec], which: impl Iterator<Item = usize>) -> u64 {
    let weights: BTreeSet<(u32, u64)> = which.flat_map(|i| blocks[i].weights.clone()).collect();
    weights.iter().map(|(_, bytes)| bytes).sum()
}

/// Bytes read from disk of `blocks` (packed bytes, whether copied to a GPU) if `room` bytes hold the locked bytes of all blocks and the rest of
/// one. The most bytes read of one block are as few as possible. Of a block that the host computes with, compressed bytes are the last to be
/// locked.
pub fn from_disk(problem: &Problem, blocks: &[(u64, bool)], room: u64) -> u64 {
    let Packing { decompressed_permille, read_permille, .. } = problem.budget.packing;
    let is_enough = |most: u64| blocks.iter().map(|(bytes, _)| bytes.saturating_sub(most)).sum::<u64>() + most <= room;
    let largest = blocks.iter().map(|(bytes, _)| *bytes).max().unwrap_or(0);
    let (mut too_little, mut most) = (None, largest);
    // Bisection: the smallest that is enough, or the largest block.
    while most > too_little.map_or(0, |below: u64| below + 1) {
        let middle = too_little.map_or(0, |below: u64| below + 1).midpoint(most - 1);
        if is_enough(middle) { most = middle } else { too_little = Some(middle) }
    }
    if most == 0 {
        return 0;
    }
    let (mut read, mut decompressed) = (0, 0.0);
    for (bytes, is_copied) in blocks {
        read += bytes.min(&most);
        let share = if *is_copied { 0.0 } else { decompressed_permille as f64 / 1000.0 };
        decompressed += (share * *bytes as f64).min(*bytes.min(&most) as f64);
    }
    let not_read = (1.0 - read_permille as f64 / 1000.0) * decompressed;
    (read - not_read as u64).max(1)
}

/// Runs of blocks with one placement and weights in host memory that form one partition each.
fn host_partitions(problem: &Problem, placements: &[BlockPlacement]) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for (at, placement) in placements.iter().enumerate() {
        let places = [placement.prefill, placement.decode];
        let is_streamed = places.iter().any(|place| matches!(place, Placement::Streamed(_)));
        let is_resident = places.iter().any(|place| matches!(place, Placement::Resident(_)));
        let alone = is_streamed || problem.cuts.contains(&at) || (is_resident && problem.budget.kv == KvHome::Host);
        match runs.last_mut() {
            _ if places.iter().all(|place| matches!(place, Placement::Resident(_))) => {}
            Some(run) if run.end == at && placements[at - 1] == *placement && !alone => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

/// Runs of blocks that are resident on a GPU and form one partition each.
fn resident_partitions(problem: &Problem, placements: &[BlockPlacement], gpu: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    for at in 0..placements.len() {
        let placement = placements[at];
        let alone = problem.budget.kv == KvHome::Host || problem.cuts.contains(&at);
        match runs.last_mut() {
            _ if ![placement.prefill, placement.decode].contains(&Placement::Resident(gpu)) => {}
            Some(run) if run.end == at && placements[at - 1] == placement && !alone => run.end = at + 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

/// Whether a weight is read by more than one block.
pub fn shares_weights(problem: &Problem) -> bool {
    problem.blocks.last().is_some_and(|block| block.weights.len() > 1)
}

/// Any legal placement.
pub fn random_placements(problem: &Problem, seed: u64) -> Vec<BlockPlacement> {
    let legal = legal(problem, Mechanisms::All);
    let mut random = Random(seed);
    problem.blocks.iter().map(|_| legal[random.below(legal.len() as u64) as usize]).collect()
}
