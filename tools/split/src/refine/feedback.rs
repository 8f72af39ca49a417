//! Measured times fed back into the costs.
//!
//! A stage's blocks are scaled to what the stage took beyond its start and beyond what others of its blocks showed before.
//! Blocks that never ran at a place are scaled by what all stages there took together, or the planner would go on
//! preferring what it has not seen. Copies scale the links, and
//! what neither stages nor copies account for is the cost of a pass.

use super::bench::Measured;
use crate::place::Placement;
use hpp_model::Piece;
use hpp_partition::{Cost, Phase, Problem, Where, simulate};
use std::collections::BTreeSet;

/// What has been measured so far.
#[derive(Debug, Default)]
pub struct Feedback {
    /// Blocks that ran at a place.
    seen: BTreeSet<(usize, Where)>,
}

/// One stage: what its blocks were expected to take and took, milliseconds.
struct Share {
    expected: f64,
    measured: f64,
}

impl Share {
    /// Never nothing: a stage faster than its own start still computes.
    fn factor(&self) -> f64 {
        if self.expected > 0.0 && self.measured > 0.0 { self.measured / self.expected } else { 1.0 }
    }
}

impl Feedback {
    /// Corrects the costs by a run of this placement.
    pub fn learn(&mut self, problem: &mut Problem, placement: &Placement, measured: &Measured) {
        problem.cuts = placement.pieces.iter().skip(1).map(|piece| piece.blocks.start).collect();
        links(problem, placement, measured);
        for phase in Phase::BOTH {
            self.blocks(problem, placement, measured, phase);
        }
        for piece in &placement.pieces {
            self.seen.extend(piece.blocks.clone().map(|block| (block, piece.choice.decode)));
        }
        pass(problem, placement, measured);
        problem.cuts.clear();
    }

    fn blocks(&self, problem: &mut Problem, placement: &Placement, measured: &Measured, phase: Phase) {
        let stages = || placement.pieces.iter().zip(&measured.stages);
        let places: BTreeSet<Where> = placement.pieces.iter().map(|piece| piece.choice.of(phase)).collect();
        let mut factors = Vec::new();
        for place in places {
            let there: Vec<(&Piece, Share)> = stages()
                .filter(|(piece, _)| piece.choice.of(phase) == place)
                .map(|(piece, took)| (piece, self.share(problem, piece, place, phase, *took)))
                .collect();
            let together = Share {
                expected: there.iter().map(|(_, share)| share.expected).sum(),
                measured: there.iter().map(|(_, share)| share.measured).sum(),
            };
            for block in 0..problem.blocks.len() {
                let own = there.iter().find(|(piece, _)| piece.blocks.contains(&block));
                let new = !self.seen.contains(&(block, place));
                let factor = match own {
                    Some((piece, share)) if new || self.all_seen(piece, place) => share.factor(),
                    None if new => together.factor(),
                    _ => continue,
                };
                factors.push((place, block, factor));
            }
        }
        for (place, block, factor) in factors {
            scale(costs(problem, place), block, phase, factor);
        }
    }

    /// What a stage says of its blocks: of those that never ran there before, where there are any, else of all.
    fn share(&self, problem: &Problem, piece: &Piece, place: Where, phase: Phase, took: (f64, f64)) -> Share {
        let took = if phase == Phase::Prefill { took.0 } else { took.1 };
        let started = launch_ms(problem, place) * passes(problem, phase);
        let ms = |block: usize| block_ms(problem, block, place, phase);
        let is_known = |block: &usize| !self.all_seen(piece, place) && self.seen.contains(&(*block, place));
        let known: f64 = piece.blocks.clone().filter(is_known).map(ms).sum();
        let expected = piece.blocks.clone().filter(|block| !is_known(block)).map(ms).sum();
        // At least a twentieth of a stage is what is to be learnt.
        Share { expected, measured: (took - started - known).max(took * 0.05) }
    }

    fn all_seen(&self, piece: &Piece, place: Where) -> bool {
        piece.blocks.clone().all(|block| self.seen.contains(&(block, place)))
    }
}

/// Scales the links by what all copies of a run took.
fn links(problem: &mut Problem, placement: &Placement, measured: &Measured) {
    let (choices, slots) = (&placement.solution.choices, &placement.solution.slots);
    let of = |phase| simulate(problem, choices, slots, phase).transfer_ms.iter().sum::<f64>();
    let expected = of(Phase::Prefill) + measured.decoded * of(Phase::Decode);
    if expected <= 0.0 || measured.transfer_ms <= 0.0 {
        return;
    }
    let factor = measured.transfer_ms / expected;
    let used: BTreeSet<usize> = choices.iter().filter_map(|choice| choice.decode.gpu()).collect();
    for gpu in used {
        let costs = &mut problem.gpus[gpu];
        costs.latency_ms *= factor;
        costs.to_device /= factor;
        costs.from_device /= factor;
    }
}

/// What stages and copies leave of a token is the cost of a pass.
fn pass(problem: &mut Problem, placement: &Placement, measured: &Measured) {
    let (choices, slots) = (&placement.solution.choices, &placement.solution.slots);
    let moved: f64 = simulate(problem, choices, slots, Phase::Decode).transfer_ms.iter().sum();
    let stages: f64 = measured.stages.iter().map(|stage| stage.1).sum();
    problem.pass_ms = (measured.decode_ms - stages - moved).max(0.0);
}

fn passes(problem: &Problem, phase: Phase) -> f64 {
    if phase == Phase::Prefill { problem.load.passes.len() as f64 } else { 1.0 }
}

fn launch_ms(problem: &Problem, place: Where) -> f64 {
    place.gpu().map_or(problem.cpu_launch_ms, |gpu| problem.gpus[gpu].launch_ms)
}

fn costs(problem: &mut Problem, place: Where) -> &mut [Cost] {
    match place.gpu() {
        None => &mut problem.cpu,
        Some(gpu) => &mut problem.gpus[gpu].blocks,
    }
}

fn block_ms(problem: &Problem, block: usize, place: Where, phase: Phase) -> f64 {
    let cost = place.gpu().map_or(&problem.cpu, |gpu| &problem.gpus[gpu].blocks);
    match phase {
        Phase::Decode => cost[block].decode_ms,
        Phase::Prefill => cost[block].prefill_ms.iter().sum(),
    }
}

fn scale(costs: &mut [Cost], block: usize, phase: Phase, factor: f64) {
    match phase {
        Phase::Decode => costs[block].decode_ms *= factor,
        Phase::Prefill => costs[block].prefill_ms.iter_mut().for_each(|ms| *ms *= factor),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_partition::{
        Block, BlockKind, Budget, Choice, GpuCosts, Mechanisms, Objective, Options, Planner, Streamed, Workload, evaluate,
    };

    /// Six blocks, a millisecond each on the host times `cpu`, a tenth of that on the GPU times `gpu`.
    fn problem(cpu: f64, gpu: f64) -> Problem {
        let block = |at: u32| Block {
            label: format!("layers.{at}"),
            kind: BlockKind::Layer(at),
            weights: vec![(at, 1000)],
            streamed: Streamed::whole(1000),
            kv_bytes: 10,
            kv_tensors: 2,
            kv_grows: None,
            kv_filled: None,
            workspace_bytes: 10,
            boundary_bytes: 1000,
            boundary_tensors: 2,
            decode: Default::default(),
            prefill: Default::default(),
        };
        let costs = |ms: f64| vec![Cost { decode_ms: ms, prefill_ms: vec![2.0 * ms, 3.0 * ms] }; 6];
        let gpu = GpuCosts {
            blocks: costs(0.1 * gpu),
            launch_ms: 0.01,
            to_device: 1e6,
            from_device: 1e6,
            latency_ms: 0.02,
            compute_contention: 1.0,
            link_contention: 1.0,
        };
        Problem {
            blocks: (0..6).map(block).collect(),
            cpu: costs(cpu),
            gpus: vec![gpu],
            cpu_launch_ms: 0.01,
            pass_ms: 0.05,
            disk_bytes_per_ms: None,
            budget: Budget { vram: vec![1 << 20], ..Budget::default() },
            load: Workload { batch: 1, prompt_tokens: 20, new_tokens: 5, passes: vec![10, 10] },
            cuts: vec![],
        }
    }

    const OPTIONS: Options = Options {
        planner: Planner::Exact,
        objective: Objective::Mixed,
        mechanisms: Mechanisms::ResidentCpu,
        slots: None,
    };

    /// Blocks before `on_host` on the host, the rest on the GPU.
    fn placement(problem: &Problem, on_host: usize) -> Placement {
        let place = |at: usize| Choice::both(if at < on_host { Where::Cpu } else { Where::Resident(0) });
        let choices: Vec<Choice> = (0..6).map(place).collect();
        let pieces = [0..on_host, on_host..6].map(|blocks| Piece { choice: choices[blocks.start], blocks });
        Placement {
            solution: evaluate(problem, &OPTIONS, choices, vec![0]),
            pieces: pieces.to_vec(),
            by_hand: false,
            at_least: 1,
        }
    }

    /// What a machine with these costs would measure.
    fn run(truth: &Problem, on_host: usize) -> Measured {
        let Placement { solution, pieces, .. } = placement(truth, on_host);
        let of = |phase| simulate(truth, &solution.choices, &solution.slots, phase);
        let stage = |piece: &Piece, phase| {
            let place = piece.choice.of(phase);
            let blocks = piece.blocks.clone().map(|block| block_ms(truth, block, place, phase)).sum::<f64>();
            blocks + launch_ms(truth, place) * passes(truth, phase)
        };
        let moved = |phase| of(phase).transfer_ms.iter().sum::<f64>();
        Measured {
            decode_ms: solution.decode_ms,
            prefill_ms: solution.prefill_ms,
            stages: pieces.iter().map(|piece| (stage(piece, Phase::Prefill), stage(piece, Phase::Decode))).collect(),
            transfer_ms: moved(Phase::Prefill) + 5.0 * moved(Phase::Decode),
            decoded: 5.0,
        }
    }

    fn near(a: f64, b: f64) {
        assert!((a / b - 1.0).abs() < 0.01, "{a} is not {b}");
    }

    #[test]
    fn a_plan_that_was_run_is_expected_to_take_what_it_took() {
        let (mut believed, mut truth) = (problem(1.0, 1.0), problem(2.0, 7.0));
        truth.gpus[0].latency_ms = 0.5;
        truth.pass_ms = 0.3;
        let measured = run(&truth, 4);
        let (before, mut feedback) = (placement(&believed, 4), Feedback::default());
        feedback.learn(&mut believed, &before, &measured);
        let after = placement(&believed, 4).solution;
        near(after.decode_ms, measured.decode_ms);
        near(after.prefill_ms, measured.prefill_ms);
        // Blocks that did not run on the GPU are expected to be as slow there as those that did.
        near(believed.gpus[0].blocks[0].decode_ms, 0.7);
        near(believed.cpu[5].prefill_ms[1], 6.0);
        near(placement(&believed, 2).solution.decode_ms, placement(&truth, 2).solution.decode_ms);
    }

    /// What a block showed itself counts for more than what others show later.
    #[test]
    fn a_block_is_judged_by_itself_once_it_has_run() {
        let mut truth = problem(1.0, 1.0);
        truth.cpu[0].decode_ms = 9.0;
        let (mut believed, mut feedback) = (problem(1.0, 1.0), Feedback::default());
        for on_host in [1, 4] {
            let placement = placement(&believed, on_host);
            feedback.learn(&mut believed, &placement, &run(&truth, on_host));
        }
        near(placement(&believed, 1).solution.decode_ms, placement(&truth, 1).solution.decode_ms);
    }
}
