//! Properties of the simulator that hold for every placement.

use super::instances::{instance, random_placements};
use crate::bound::PhaseWork;
use crate::schedule::{ScheduleStep, StepKind, copies, handover, placements_in_phase, steps};
use crate::simulate::{queued_ms, sequence_ms};
use crate::{BlockPlacement, Phase, Placement, Problem, Simulation, simulate};
use hpp_schema::{Span, SpanKind};
use proptest::prelude::*;

/// Tolerance for rounding errors, microseconds.
const ROUNDING_US: f64 = 1e-3;

fn end(span: &Span) -> f64 {
    span.start_us + span.duration_us
}

fn on<'a>(simulation: &'a Simulation, lane: &'a str) -> impl Iterator<Item = &'a Span> {
    simulation.timeline.spans.iter().filter(move |span| span.lane == lane)
}

/// Asserts that no two spans overlap.
fn assert_disjoint(mut spans: Vec<&Span>) -> Result<(), TestCaseError> {
    spans.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(end(a).total_cmp(&end(b))));
    for pair in spans.windows(2) {
        prop_assert!(pair[1].start_us >= end(pair[0]) - ROUNDING_US, "{:?} and {:?}", pair[0], pair[1]);
    }
    Ok(())
}

/// The work of a phase, added up from its steps.
fn work(problem: &Problem, placements: &[BlockPlacement], phase: Phase) -> PhaseWork {
    let mut work = PhaseWork { links: vec![0.0; problem.gpus.len()], ..PhaseWork::default() };
    let copies = copies(problem, &placements_in_phase(placements, phase));
    for pass in 0..problem.passes(phase) {
        for step in steps(problem, placements, phase, pass) {
            match step.kind {
                StepKind::Ahead(..) => {}
                _ => work.sequence += step.ms,
            }
            match step.kind {
                StepKind::Compute(crate::DeviceId::Cpu) => work.host += step.ms,
                StepKind::To(gpu, _) | StepKind::Ahead(gpu, _) => work.links[gpu] += step.ms,
                _ => {}
            }
        }
        for (gpu, copies) in copies.iter().enumerate() {
            work.links[gpu] += copies.iter().map(|(_, ms)| ms).sum::<f64>();
        }
    }
    work
}

/// Whether a span is a copy that goes on beside the partition sequence.
fn is_copied_beside(span: &Span) -> bool {
    span.name.starts_with("weights of") || span.name.starts_with("states of")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn spans_of_one_lane_or_sequence_do_not_overlap(seed: u64, blocks in 1usize..9, gpus in 1usize..3, slots in 1u32..5) {
        let problem = instance(seed, blocks, gpus);
        let placements = random_placements(&problem, seed ^ 1);
        for phase in Phase::BOTH {
            let simulation = simulate(&problem, &placements, &vec![slots; gpus], phase);
            let is_in_sequence = |span: &&Span| span.lane != "disk" && !is_copied_beside(span);
            assert_disjoint(simulation.timeline.spans.iter().filter(is_in_sequence).collect())?;
            for gpu in 0..gpus {
                for kind in ["weights of", "states of"] {
                    let copied = |span: &&Span| span.name.starts_with(kind);
                    assert_disjoint(on(&simulation, &format!("to gpu{gpu}")).filter(copied).collect())?;
                }
            }
        }
    }

    /// With contention between copies of weights, the host and the links.
    #[test]
    fn one_sequence_takes_the_same_time_on_both_machines(seed: u64, blocks in 1usize..9, gpus in 1usize..3, slots in 1u32..5) {
        let problem = instance(seed, blocks, gpus);
        let (placements, slots) = (random_placements(&problem, seed ^ 1), vec![slots; gpus]);
        for phase in Phase::BOTH {
            let (one, several) = (
                sequence_ms(&problem, &placements, &slots, phase),
                queued_ms(&problem, &placements, &slots, phase),
            );
            prop_assert!((one - several).abs() <= 1e-6 * one, "{phase:?}: {one} ms and {several} ms");
        }
    }

    #[test]
    fn several_sequences_overlap_at_best_on_different_devices(seed: u64, blocks in 1usize..9, gpus in 1usize..3, sequences in 2u64..6) {
        let one = instance(seed, blocks, gpus);
        let problem = one.with_sequences(sequences, false);
        let mut placements = random_placements(&problem, seed ^ 1);
        let resident = |place: Placement| place.gpu().map_or(Placement::Cpu, Placement::Resident);
        for placement in &mut placements {
            *placement = BlockPlacement { prefill: resident(placement.prefill), decode: resident(placement.decode) };
        }
        for phase in Phase::BOTH {
            let slots = vec![0; gpus];
            let simulation = simulate(&problem, &placements, &slots, phase);
            // Each device computes one run after the other, and so does the thread that issues runs and copies.
            for lane in (0..gpus).map(|gpu| format!("gpu{gpu}")) {
                assert_disjoint(on(&simulation, &lane).collect())?;
            }
            let by_thread = |span: &&Span| span.lane != "disk" && !span.lane.starts_with("gpu") && !is_copied_beside(span);
            assert_disjoint(simulation.timeline.spans.iter().filter(by_thread).collect())?;
            // A pass of several sequences is not faster than a pass of one, nor slower than one pass for each, with two exceptions. It hides fewer
            // copies of states: in a pass of one sequence the host computes during such a copy, in this one it has then computed for all
            // sequences. And it returns states after each run that stay on a GPU for the whole prompt of one sequence.
            let is_ahead = |step: &ScheduleStep| matches!(step.kind, StepKind::Ahead(..));
            let all = (0..one.passes(phase)).flat_map(|pass| steps(&one, &placements, phase, pass)).filter(is_ahead);
            let hidden_ms = all.map(|step| step.ms).sum::<f64>();
            let copied_ms = |problem: &Problem| {
                let passes = (0..problem.passes(phase)).flat_map(|pass| steps(problem, &placements, phase, pass));
                let last = if phase == Phase::Prefill { handover(problem, &placements) } else { vec![] };
                let is_copy = |step: &ScheduleStep| matches!(step.kind, StepKind::To(..) | StepKind::From(..));
                passes.chain(last).filter(is_copy).map(|step| step.ms).sum::<f64>()
            };
            let returned_ms = (copied_ms(&problem) - copied_ms(&one) * sequences as f64).max(0.0);
            let alone = simulate(&one, &placements, &slots, phase);
            if simulation.disk_bytes == 0 && alone.disk_bytes == 0 {
                prop_assert!(simulation.ms >= alone.ms * (1.0 - 1e-9), "{} and {}", simulation.ms, alone.ms);
                let most_ms = (alone.ms + hidden_ms) * sequences as f64 + returned_ms;
                prop_assert!(simulation.ms <= most_ms * (1.0 + 1e-9), "{} and {}", simulation.ms, alone.ms);
            }
        }
    }

    /// In prefill, which starts with empty rings, so that the timeline has every copy and every use.
    #[test]
    fn copies_and_streamed_blocks_wait_for_each_other_only(seed: u64, blocks in 1usize..9, slots in 1u32..5) {
        let problem = instance(seed, blocks, 1);
        let placements = random_placements(&problem, seed ^ 1);
        let simulation = simulate(&problem, &placements, &[slots], Phase::Prefill);
        let streamed = |i: usize| placements[i].prefill == Placement::Streamed(0);
        let labels: Vec<String> = (0..blocks).filter(|i| streamed(*i)).map(|i| problem.blocks[i].label.clone()).collect();
        let computes = |span: &&Span| span.kind == SpanKind::Compute && labels.contains(&span.name);
        let uses: Vec<&Span> = on(&simulation, "gpu0").filter(computes).collect();
        let copies: Vec<&Span> = on(&simulation, "to gpu0").filter(|s| s.name.starts_with("weights of")).collect();
        prop_assert_eq!(uses.len(), labels.len() * problem.load.passes.len());
        prop_assert_eq!(copies.len(), uses.len());
        // A ring never holds the same weights twice.
        let slots = labels.len().min(slots as usize);
        for (j, (copy, used)) in copies.iter().zip(&uses).enumerate() {
            prop_assert_eq!(&copy.name, &format!("weights of {}", used.name));
            prop_assert!(used.start_us >= end(copy) - ROUNDING_US, "computed before its weights were copied");
            let free = j.checked_sub(slots).map_or(0.0, |before| end(uses[before]));
            // Weights pause while states are copied ahead.
            let states = on(&simulation, "to gpu0").filter(|span| span.name.starts_with("states of"));
            let after = states.map(end).filter(|end| *end <= copy.start_us + ROUNDING_US).fold(0.0, f64::max);
            let ready = j.checked_sub(1).map_or(0.0, |before| end(copies[before])).max(after);
            prop_assert!(copy.start_us >= free - ROUNDING_US, "copied into a slot that is in use");
            prop_assert!((copy.start_us - free.max(ready)).abs() <= ROUNDING_US, "idle while a slot was free");
        }
    }

    #[test]
    fn simulated_time_is_at_least_the_lower_bound(seed: u64, blocks in 1usize..9, gpus in 1usize..3, slots in 1u32..5) {
        let problem = instance(seed, blocks, gpus);
        let placements = random_placements(&problem, seed ^ 1);
        for phase in Phase::BOTH {
            let mut bound = work(&problem, &placements, phase).lower_bound(&problem.gpus);
            if phase == Phase::Prefill {
                bound += handover(&problem, &placements).iter().map(|step| step.ms).sum::<f64>();
            }
            let ms = simulate(&problem, &placements, &vec![slots; gpus], phase).ms;
            prop_assert!(ms >= bound * (1.0 - 1e-9), "{phase} takes {ms}, bound {bound}");
        }
    }

    #[test]
    fn totals_agree_with_the_timeline(seed: u64, blocks in 1usize..9, gpus in 1usize..3, slots in 1u32..5) {
        let mut problem = instance(seed, blocks, gpus);
        problem.budget.ram = None;
        let placements = random_placements(&problem, seed ^ 1);
        for phase in Phase::BOTH {
            let simulation = simulate(&problem, &placements, &vec![slots; gpus], phase);
            let work = work(&problem, &placements, phase);
            // The timeline has all of prefill, but only one period of decoding, in which copies may start or end.
            if phase == Phase::Prefill {
                let in_timeline: u64 = simulation.timeline.spans.iter().filter_map(|span| span.bytes).sum();
                prop_assert_eq!(simulation.bytes_moved, in_timeline);
            }
            prop_assert!(simulation.cpu_ms >= work.host * (1.0 - 1e-9));
            let computed = simulation.cpu_ms + simulation.gpu_ms.iter().sum::<f64>() + simulation.stall_ms;
            prop_assert!(computed <= simulation.ms * (1.0 + 1e-9));
        }
    }

    #[test]
    fn without_contention_one_more_slot_never_hurts(seed: u64, blocks in 1usize..9, slots in 1u32..5) {
        let mut problem = instance(seed, blocks, 1);
        (problem.gpus[0].compute_contention, problem.gpus[0].link_contention) = (1.0, 1.0);
        let placements = random_placements(&problem, seed ^ 1);
        for phase in Phase::BOTH {
            let ms = |slots: u32| simulate(&problem, &placements, &[slots], phase).ms;
            prop_assert!(ms(slots + 1) <= ms(slots) * (1.0 + 1e-6));
        }
    }
}
