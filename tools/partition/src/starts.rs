//! Starting placements of a search that need no solver: all blocks at one place, the greedy planner's placement, and full GPUs of which one
//! streams the blocks that are left.
//!
//! With several GPUs and streaming the integer program often has no good solution within its nodes. The last kind of start then decides.

use crate::evaluate::Goal;
use crate::greedy::greedy_run;
use crate::memory::check_gpu;
use crate::{BlockPlacement, BlockRole, Placement, Problem};

/// All blocks at one place, and the greedy planner's placement; whether they fit or not. `allowed` has the placements of each block.
pub(crate) fn simple_placements(
    problem: &Problem,
    goal: &Goal,
    allowed: &[Vec<BlockPlacement>],
) -> Vec<Vec<BlockPlacement>> {
    let mut places = vec![Placement::Cpu];
    places.extend((0..problem.budget.vram.len()).map(Placement::Resident));
    if goal.mechanisms.streams() {
        places.extend((0..problem.budget.vram.len()).map(Placement::Streamed));
    }
    let slots = goal.slots.iter().copied().max().unwrap_or(0);
    let everywhere = places.into_iter().map(|place| vec![BlockPlacement::both(place); problem.blocks.len()]);
    everywhere.chain([greedy_run(problem, slots)]).filter(|placements| are_allowed(placements, allowed)).collect()
}

/// Full GPUs, each in turn with the blocks that are left streamed to it; whether host memory is large enough or not.
pub(crate) fn full_gpus(problem: &Problem, goal: &Goal, allowed: &[Vec<BlockPlacement>]) -> Vec<Vec<BlockPlacement>> {
    let gpus = 0..if goal.mechanisms.streams() { problem.budget.vram.len() } else { 0 };
    let all = gpus.flat_map(|gpu| with_streamed_rest(problem, goal, allowed, gpu));
    all.filter(|placements| are_allowed(placements, allowed)).collect()
}

fn are_allowed(placements: &[BlockPlacement], allowed: &[Vec<BlockPlacement>]) -> bool {
    placements.iter().zip(allowed).all(|(placement, allowed)| allowed.contains(placement))
}

/// All GPUs hold as many blocks as fit, and the rest is streamed to one of them: in both phases, or for the prompt while the host decodes. The
/// blocks of that GPU come before those of the others, or behind.
fn with_streamed_rest(
    problem: &Problem,
    goal: &Goal,
    allowed: &[Vec<BlockPlacement>],
    gpu: usize,
) -> Vec<Vec<BlockPlacement>> {
    let others: Vec<usize> = (0..problem.budget.vram.len()).filter(|other| *other != gpu).collect();
    let orders = [[&[gpu], &others[..]].concat(), [&others[..], &[gpu]].concat()];
    let streamed = Placement::Streamed(gpu);
    let rests = [BlockPlacement::both(streamed), BlockPlacement { prefill: streamed, decode: Placement::Cpu }];
    let fill = |order: &Vec<usize>| rests.map(|rest| FullGpus::new(problem, allowed, order, rest).fill(goal));
    orders.iter().take(if others.is_empty() { 1 } else { 2 }).flat_map(fill).collect()
}

/// GPUs that are being filled.
struct FullGpus<'a> {
    problem: &'a Problem,
    allowed: &'a [Vec<BlockPlacement>],
    /// The GPUs in the order of their blocks, each with its number of resident blocks.
    gpus: Vec<(usize, usize)>,
    /// The placement of blocks that no GPU holds.
    rest: BlockPlacement,
    /// The layers that may be resident on every GPU and may have the placement `rest`. Embedding and head are larger than layers: they would need
    /// larger slots.
    movable: Vec<usize>,
}

impl<'a> FullGpus<'a> {
    fn new(problem: &'a Problem, allowed: &'a [Vec<BlockPlacement>], order: &[usize], rest: BlockPlacement) -> Self {
        let may_move = |block: &usize| {
            let resident = |gpu: &usize| allowed[*block].contains(&BlockPlacement::both(Placement::Resident(*gpu)));
            let is_layer = matches!(problem.blocks[*block].kind, BlockRole::Layer(_));
            is_layer && allowed[*block].contains(&rest) && order.iter().all(resident)
        };
        let movable = (0..allowed.len()).filter(may_move).collect();
        FullGpus { problem, allowed, gpus: order.iter().map(|gpu| (*gpu, 0)).collect(), rest, movable }
    }

    /// Adds resident blocks to one GPU after the other while they fit its memory.
    fn fill(mut self, goal: &Goal) -> Vec<BlockPlacement> {
        let mut placements = self.placements();
        for at in 0..self.gpus.len() {
            while self.gpus.iter().map(|(_, resident)| resident).sum::<usize>() < self.movable.len() {
                self.gpus[at].1 += 1;
                let more = self.placements();
                let fits = |(gpu, _): &(usize, usize)| check_gpu(self.problem, &more, goal.slots[*gpu], *gpu).is_ok();
                if !self.gpus.iter().all(fits) {
                    self.gpus[at].1 -= 1;
                    break;
                }
                placements = more;
            }
        }
        placements
    }

    /// The blocks of each GPU follow one another. Between them the rest is spread evenly, so that copies have as much time as possible.
    fn placements(&self) -> Vec<BlockPlacement> {
        let mut placements: Vec<BlockPlacement> = (0..self.allowed.len()).map(|block| self.unmoved(block)).collect();
        let blocks = self.movable.len();
        let resident = |(gpu, resident): &(usize, usize)| {
            std::iter::repeat_n(BlockPlacement::both(Placement::Resident(*gpu)), *resident)
        };
        let mut residents = self.gpus.iter().flat_map(resident);
        let left = blocks - self.gpus.iter().map(|(_, resident)| resident).sum::<usize>();
        for (at, block) in self.movable.iter().enumerate() {
            // Of every `blocks / left` blocks the one in the middle.
            let is_left = |at: usize| (2 * at * left + blocks) / (2 * blocks);
            let is_rest = is_left(at + 1) > is_left(at);
            placements[*block] = if is_rest { self.rest } else { residents.next().unwrap_or(self.rest) };
        }
        placements
    }

    /// The placement of a block that is not movable: on the last GPU, else on the host, else the first that it may have. Tables of which a token
    /// reads one row are on the host.
    fn unmoved(&self, block: usize) -> BlockPlacement {
        let on_host = BlockPlacement::both(Placement::Cpu);
        let last = self.gpus.last().filter(|_| !self.problem.is_lookup_table(block));
        let on_last = last.map(|(gpu, _)| BlockPlacement::both(Placement::Resident(*gpu)));
        let wanted = on_last.into_iter().chain([on_host]).find(|placement| self.allowed[block].contains(placement));
        wanted.or_else(|| self.allowed[block].first().copied()).unwrap_or(on_host)
    }
}
