//! Starting placements of a search that need no solver: all blocks at one place, the greedy planner's placement, and full GPUs of which one
//! streams the blocks that are left, or some of them between blocks on the host.
//!
//! With streaming the integer program often has no good solution within its nodes, most often with several GPUs. The last kind of start then decides.

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

/// Full GPUs, each in turn with the blocks that are left streamed to it, and with any number of them on the host; whether host memory is large enough
/// or not. The best of each kind may lead to different placements.
pub(crate) fn full_gpus(
    problem: &Problem,
    goal: &Goal,
    allowed: &[Vec<BlockPlacement>],
) -> [Vec<Vec<BlockPlacement>>; 2] {
    let gpus = || 0..if goal.mechanisms.streams() { problem.budget.vram.len() } else { 0 };
    let streamed = gpus().flat_map(|gpu| with_streamed_rest(problem, goal, allowed, gpu)).collect();
    let on_host = gpus().flat_map(|gpu| with_rest_partly_on_host(problem, goal, allowed, gpu)).collect();
    [streamed, on_host].map(|mut all: Vec<Vec<BlockPlacement>>| {
        all.retain(|placements| are_allowed(placements, allowed));
        all
    })
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
    let others: Vec<usize> = others(problem, gpu).collect();
    let orders = [[&[gpu], &others[..]].concat(), [&others[..], &[gpu]].concat()];
    let streamed = Placement::Streamed(gpu);
    let rests = [BlockPlacement::both(streamed), BlockPlacement { prefill: streamed, decode: Placement::Cpu }];
    let fill = |order: &Vec<usize>| rests.map(|rest| FullGpus::new(problem, allowed, order, rest).fill(goal));
    orders.iter().take(if others.is_empty() { 1 } else { 2 }).flat_map(fill).collect()
}

/// All GPUs hold as many blocks as fit. Of the rest any number is on the host, always or for decoding, and the others are streamed to one GPU.
fn with_rest_partly_on_host(
    problem: &Problem,
    goal: &Goal,
    allowed: &[Vec<BlockPlacement>],
    gpu: usize,
) -> Vec<Vec<BlockPlacement>> {
    let order: Vec<usize> = std::iter::once(gpu).chain(others(problem, gpu)).collect();
    let streamed = Placement::Streamed(gpu);
    let gpus = || FullGpus::new(problem, allowed, &order, BlockPlacement::both(streamed));
    let hosts = [Placement::Cpu, streamed].map(|prefill| BlockPlacement { prefill, decode: Placement::Cpu });
    let numbers = 1..gpus().movable.len().max(1);
    let all = hosts.iter().flat_map(|host| numbers.clone().map(move |number| (*host, number)));
    all.map(|host| FullGpus { host: Some(host), ..gpus() }.fill(goal)).collect()
}

fn others(problem: &Problem, gpu: usize) -> impl Iterator<Item = usize> {
    (0..problem.budget.vram.len()).filter(move |other| *other != gpu)
}

/// GPUs that are being filled.
struct FullGpus<'a> {
    problem: &'a Problem,
    allowed: &'a [Vec<BlockPlacement>],
    /// The GPUs in the order of their blocks, each with its number of resident blocks.
    gpus: Vec<(usize, usize)>,
    /// The placement of blocks that no GPU holds.
    rest: BlockPlacement,
    /// Another placement, and how many of the blocks that no GPU holds have it.
    host: Option<(BlockPlacement, usize)>,
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
        FullGpus { problem, allowed, gpus: order.iter().map(|gpu| (*gpu, 0)).collect(), rest, host: None, movable }
    }

    /// Adds resident blocks to one GPU after the other while they fit its memory.
    fn fill(mut self, goal: &Goal) -> Vec<BlockPlacement> {
        let mut placements = self.placements();
        for at in 0..self.gpus.len() {
            while self.left() > self.host.map_or(0, |(_, number)| number) {
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

    /// Blocks that no GPU holds.
    fn left(&self) -> usize {
        self.movable.len() - self.gpus.iter().map(|(_, resident)| resident).sum::<usize>()
    }

    /// The blocks of each GPU follow one another. Between them the rest is spread evenly, so that copies have as much time as possible; between blocks
    /// on the host, if there are any, which come before the blocks of the GPUs.
    fn placements(&self) -> Vec<BlockPlacement> {
        let mut placements: Vec<BlockPlacement> = (0..self.allowed.len()).map(|block| self.unmoved(block)).collect();
        let (left, host) = (self.left(), self.host);
        // Of `number` blocks `chosen` ones, evenly spread: of every `number / chosen` blocks the one in the middle.
        let is_chosen = |at: usize, chosen: usize, number: usize| {
            let before = |at: usize| (2 * at * chosen + number) / (2 * number);
            before(at + 1) > before(at)
        };
        let resident = |(gpu, resident): &(usize, usize)| {
            std::iter::repeat_n(BlockPlacement::both(Placement::Resident(*gpu)), *resident)
        };
        let mut residents = self.gpus.iter().flat_map(resident);
        for (at, block) in self.movable.iter().enumerate() {
            placements[*block] = match host {
                None if is_chosen(at, left, self.movable.len()) => self.rest,
                Some((host, number)) if at < left => {
                    if is_chosen(at, number.min(left), left) {
                        host
                    } else {
                        self.rest
                    }
                }
                None | Some(_) => residents.next().unwrap_or(self.rest),
            };
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
