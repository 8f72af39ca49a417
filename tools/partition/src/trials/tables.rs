//! Trying everything on one GPU up to nine blocks: seven choices for each block, forty million placements. Times come from
//! the simulator, once for each placement of one phase; memory from tables over sets of blocks.

use super::instances::legal;
use crate::{BlockKind, Choice, KvHome, Mechanisms, Objective, Phase, Problem, Where, simulate};

/// Sets of blocks as bits.
type Set = usize;

/// What a placement does with each block, as sets.
#[derive(Clone, Copy, Default)]
struct Sets {
    resident: Set,
    streamed: Set,
    on_host: Set,
    on_cpu: Set,
    on_gpu: [Set; 2],
    reads: [Set; 2],
    state_on_host: Set,
    moved: Set,
    /// Places of each phase as a number to the base of three.
    code: [usize; 2],
}

struct Tables<'a> {
    problem: &'a Problem,
    weights: Vec<u64>,
    state: Vec<u64>,
    state_tensors: Vec<u64>,
    most_state: Vec<u64>,
    workspace: Vec<u64>,
    largest: Vec<u64>,
    ms: [Vec<f64>; 2],
}

/// The least objective of all placements, `None` when nothing fits.
pub fn try_all(problem: &Problem, objective: Objective, slots: u32) -> Option<f64> {
    let tables = Tables::new(problem, slots);
    let legal = legal(problem, Mechanisms::All);
    let mut best = None;
    descend(&tables, &legal, objective, slots, 0, Sets::default(), &mut best);
    best
}

fn descend(
    tables: &Tables,
    legal: &[Choice],
    objective: Objective,
    slots: u32,
    block: usize,
    sets: Sets,
    best: &mut Option<f64>,
) {
    if block == tables.problem.blocks.len() {
        if let Some(ms) = tables.price(&sets, objective, slots) {
            *best = Some(best.map_or(ms, |best| best.min(ms)));
        }
        return;
    }
    for choice in legal {
        descend(tables, legal, objective, slots, block + 1, sets.with(block, *choice, tables.problem), best);
    }
}

fn digit(place: Where) -> usize {
    match place {
        Where::Cpu => 0,
        Where::Resident(_) => 1,
        Where::Streamed(_) => 2,
    }
}

impl Sets {
    fn with(mut self, block: usize, choice: Choice, problem: &Problem) -> Sets {
        let bit = 1 << block;
        let phases = [choice.prefill, choice.decode];
        let differ = choice.prefill.gpu() != choice.decode.gpu();
        let put = |set: &mut Set, is_so: bool| *set |= if is_so { bit } else { 0 };
        put(&mut self.resident, phases.contains(&Where::Resident(0)));
        put(&mut self.streamed, phases.contains(&Where::Streamed(0)));
        put(&mut self.on_host, phases.iter().any(|place| *place != Where::Resident(0)));
        put(&mut self.on_cpu, phases.contains(&Where::Cpu));
        put(&mut self.state_on_host, problem.budget.kv == KvHome::Host || phases.contains(&Where::Cpu));
        put(&mut self.moved, differ && problem.budget.kv == KvHome::Device && problem.blocks[block].kv_bytes > 0);
        for (phase, place) in phases.into_iter().enumerate() {
            put(&mut self.on_gpu[phase], place != Where::Cpu);
            put(&mut self.reads[phase], place != Where::Resident(0));
            self.code[phase] += digit(place) * 3usize.pow(block as u32);
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
        let distinct = |set: Set| {
            let mut all: Vec<(u32, u64)> = members(set).flat_map(|i| problem.blocks[i].weights.clone()).collect();
            all.sort_unstable();
            all.dedup();
            all.iter().map(|(_, bytes)| bytes).sum()
        };
        let mut free = problem.clone();
        (free.budget.ram, free.disk_bytes_per_ms) = (None, None);
        let ms = Phase::BOTH.map(|phase| {
            let one = |code: usize| {
                let place = |i: u32| [Where::Cpu, Where::Resident(0), Where::Streamed(0)][code / 3usize.pow(i) % 3];
                let choices: Vec<Choice> = (0..blocks as u32).map(|i| Choice::both(place(i))).collect();
                simulate(&free, &choices, &[slots], phase).ms
            };
            (0..3usize.pow(blocks as u32)).map(one).collect()
        });
        let kv = |i: usize| problem.blocks[i].kv_bytes;
        Tables {
            problem,
            weights: sets().map(distinct).collect(),
            state: sets().map(|set| members(set).map(kv).sum()).collect(),
            state_tensors: sets().map(|set| members(set).map(|i| problem.blocks[i].kv_tensors).sum()).collect(),
            most_state: max(&kv),
            workspace: max(&|i| problem.blocks[i].workspace_bytes),
            largest: max(&|i| problem.blocks[i].weights.iter().map(|(_, bytes)| bytes).sum()),
            ms,
        }
    }

    fn price(&self, sets: &Sets, objective: Objective, slots: u32) -> Option<f64> {
        let budget = &self.problem.budget;
        let state = |set: Set| if budget.kv == KvHome::Host { self.most_state[set] } else { self.state[set] };
        let on_gpu = self.weights[sets.resident]
            + state(sets.on_gpu[0]).max(state(sets.on_gpu[1]))
            + self.workspace[sets.on_gpu[0] | sets.on_gpu[1]]
            + u64::from(slots) * self.largest[sets.streamed];
        if on_gpu > 0 && on_gpu + budget.margin > budget.vram[0] {
            return None;
        }
        let beside = self.state[sets.state_on_host] + self.workspace[sets.on_cpu];
        let mut disk = [0.0; 2];
        if let Some(ram) = budget.ram {
            let is_table = |i: &usize| self.problem.blocks[*i].kind == BlockKind::Embedding;
            let tables: Set = (0..self.problem.blocks.len()).filter(is_table).map(|i| 1 << i).sum();
            let fits = self.weights[sets.on_host] + beside <= ram;
            let least = match self.problem.disk_bytes_per_ms {
                Some(_) => self.largest[sets.on_host & !tables] + budget.reading,
                None => self.weights[sets.on_host],
            };
            if !fits && least + beside > ram {
                return None;
            }
            let rate = self.problem.disk_bytes_per_ms.unwrap_or(f64::INFINITY);
            let passes = [self.problem.load.passes.len() as f64, 1.0];
            for phase in 0..2 {
                let read = sets.reads[phase] & !tables;
                let (reads, largest) = (self.weights[read], self.largest[read]);
                // f W + (1 - f) l = R; the rest is read.
                let share = || {
                    let room = (ram - beside - budget.reading) as f64;
                    if reads as f64 <= room { 1.0 } else { (room - largest as f64) / (reads as f64 - largest as f64) }
                };
                let missing = if fits { 0 } else { reads - (reads as f64 * share()) as u64 } as f64;
                disk[phase] = passes[phase] * missing / rate;
            }
        }
        let ms = |phase: usize| self.ms[phase][sets.code[phase]].max(disk[phase]);
        let prefill = ms(0) + self.handover(sets);
        Some(match objective {
            Objective::Prefill => prefill,
            Objective::Decode => ms(1),
            Objective::Mixed => prefill + self.problem.load.new_tokens as f64 * ms(1),
        })
    }

    fn handover(&self, sets: &Sets) -> f64 {
        let gpu = &self.problem.gpus[0];
        let way = |set: Set, rate: f64| {
            let moved = set & sets.moved;
            self.state_tensors[moved] as f64 * gpu.latency_ms + self.state[moved] as f64 / rate
        };
        way(sets.on_gpu[0], gpu.from_device) + way(sets.on_gpu[1], gpu.to_device)
    }
}
