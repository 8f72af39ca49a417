//! What placements hold, worked out by hand.

use super::*;
use crate::cost::tests::{dense, problem};
use crate::{Budget, Grows, Streamed};

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

/// Each partition is a session with constants of its own.
#[test]
fn a_weight_that_two_partitions_read_is_held_twice() {
    let mut problem = problem(dense(3, 1000), Budget { vram: vec![1 << 20], ..Budget::default() });
    problem.blocks[1..4].iter_mut().for_each(|block| block.weights.push((9, 50)));
    let weights = |problem: &Problem, text: &str| usage(problem, &placed(text), &[0]).gpus[0].weights;
    assert_eq!(weights(&problem, ".000."), 3050);
    assert_eq!(weights(&problem, ".0.0."), 2100);
    problem.cuts = vec![2];
    assert_eq!(weights(&problem, ".000."), 3100);
    (problem.cuts, problem.budget.kv) = (vec![], KvHome::Host);
    assert_eq!(weights(&problem, ".000."), 3150);
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

/// What computes on the host in one phase keeps its own room on the GPU for the other.
#[test]
fn state_that_stays_for_a_prompt_takes_no_turns() {
    let budget = Budget { vram: vec![1 << 20], kv: KvHome::Host, ..Budget::default() };
    let mut problem = problem(dense(4, 1000), budget);
    let mut choices = placed(".0000.");
    choices[1..3].iter_mut().for_each(|choice| choice.decode = Where::Cpu);
    assert_eq!(usage(&problem, &choices, &[0]).gpus[0].kv, 250 + 2 * 250);
    problem.blocks[1].kv_grows = Some(Grows { fixed: 0, token: 1 });
    assert_eq!(usage(&problem, &choices, &[0]).gpus[0].kv, 250 + 250);
}

/// Tables that streamed blocks share are on the GPU once, in no slot.
#[test]
fn slots_hold_what_is_copied_and_no_constants() {
    let mut problem = problem(dense(3, 1000), Budget { vram: vec![1 << 20], ..Budget::default() });
    for (number, pieces) in [(1, [800, 100]), (2, [500, 400]), (3, [800, 100])] {
        problem.blocks[number].streamed = Streamed::new(pieces.to_vec(), Some((number as u32 / 3, 100)));
    }
    let on_gpu = |text: &str| {
        let place = |c: char| if c == 's' { Where::Streamed(0) } else { Where::Cpu };
        let choices: Vec<Choice> = text.chars().map(|c| Choice::both(place(c))).collect();
        let usage = usage(&problem, &choices, &[3]);
        (usage.gpus[0].weights, usage.gpus[0].ring)
    };
    assert_eq!(on_gpu(".s..."), (100, 3 * 900));
    assert_eq!(on_gpu(".s.s."), (200, 3 * 900));
    // Blocks that are unlike share a slot piece by piece.
    assert_eq!(on_gpu(".ss.."), (100, 3 * (800 + 400)));
}

#[test]
fn host_memory_is_a_budget_too() {
    let problem = problem(dense(2, 1000), Budget { ram: Some(3000), ..Budget::default() });
    let error = fits(&problem, &placed("...."), &[], Mechanisms::ResidentCpu).unwrap_err();
    assert_eq!((error.place, error.demand.weights), (Place::Cpu, 6000));
}
