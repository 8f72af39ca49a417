//! What placements hold, worked out by hand.

use super::*;
use crate::cost::tests::{dense, problem};
use crate::{Budget, GrowingState, Packing, Streamed};

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
    problem.blocks[1].kv_grows = Some(GrowingState { fixed: 0, token: 1 });
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

/// A small model takes less whole than one block and room to read ahead: that is the smallest budget then.
#[test]
fn the_smallest_host_memory_may_hold_everything() {
    let mut problem = problem(dense(2, 1000), Budget { ram: Some(100), reading: 50_000, ..Budget::default() });
    problem.disk_bytes_per_ms = Some(1.0);
    let smallest = |problem: &Problem| fits(problem, &placed("...."), &[], Mechanisms::ResidentCpuDisk);
    let error = smallest(&problem).unwrap_err();
    assert_eq!(error.demand.weights, 6000);
    problem.budget.ram = Some(error.smallest());
    assert_eq!(smallest(&problem), Ok(()));
    problem.budget.ram = Some(error.smallest() - 1);
    assert_eq!(smallest(&problem), Err(NoFit { budget: error.smallest() - 1, ..error }));
}

/// Each partition has constants of its own, and read from disk each block is a partition.
#[test]
fn partitions_of_the_host_hold_shared_weights_each() {
    let mut problem = problem(dense(3, 1000), Budget::default());
    problem.blocks[1..4].iter_mut().for_each(|block| block.weights.push((9, 50)));
    let choices = placed(".....");
    let held = |problem: &Problem| usage_of_partitions(problem, &choices, &[]).host.weights;
    assert_eq!((usage(&problem, &choices, &[]).host.weights, held(&problem)), (7050, 7050));
    problem.cuts = vec![2];
    assert_eq!((usage(&problem, &choices, &[]).host.weights, held(&problem)), (7050, 7100));
    let reads = |usage: Usage| usage.host_reads[Phase::Decode as usize].computed;
    assert_eq!(reads(usage(&problem, &choices, &[])) + 100, reads(usage_of_partitions(&problem, &choices, &[])));
}

/// Blocks of 1000 bytes that memory wants as 1200, of which 400 are made from 200 on disk: embedding and head are two
/// of them each.
fn dense_on_disk(ram: u64, packing: Packing) -> Problem {
    let mut problem = problem(dense(4, 1000), Budget { ram: Some(ram), packing, ..Budget::default() });
    problem.disk_bytes_per_ms = Some(1.0);
    for block in &mut problem.blocks {
        (block.kv_bytes, block.workspace_bytes) = (0, 0);
    }
    problem.blocks.remove(0);
    problem
}

const DENSE: Packing = Packing { more: 200, made: 333, stored: 500 };

/// Places by letters: on the host, streamed to the GPU, or on it for good.
fn missing(problem: &Problem, text: &str) -> (f64, u64) {
    let place = |c: char| match c {
        's' => Where::Streamed(0),
        '0' => Where::Resident(0),
        _ => Where::Cpu,
    };
    let choices: Vec<Choice> = text.chars().map(|c| Choice::both(place(c))).collect();
    let mut problem = problem.clone();
    problem.budget.vram = vec![1 << 20];
    let usage = usage(&problem, &choices, &[3]);
    (usage.locked_share(&problem, Phase::Decode), usage.missing(&problem, Phase::Decode))
}

/// 4 layers and a head: 6000 bytes, 7200 as packed, of which 2397.6 are made and 1198.8 of those read. The largest
/// block has 2400.
#[test]
fn what_is_not_made_stays_first() {
    // A share of half needs half of all and half of the largest. Half is brought: all that is made, of which 1198.8
    // are not read.
    assert_eq!(missing(&dense_on_disk(4800, DENSE), "....."), (0.5, 3600 - 1198));
    // Nothing stays: all is read, as it lies on disk.
    assert_eq!(missing(&dense_on_disk(2400, DENSE), "....."), (0.0, 7200 - 1198));
    // Three quarters stay: 1800 are brought, all of them made from half.
    assert_eq!(missing(&dense_on_disk(6000, DENSE), "....."), (0.75, 900));
    // As much stays as is not made: both ways of counting agree.
    let even = Packing { made: 250, ..DENSE };
    assert_eq!(missing(&dense_on_disk(6000, even), "....."), (0.75, 900));
    assert_eq!(missing(&dense_on_disk(7199, DENSE), ".....").1, 1);
    assert_eq!(missing(&dense_on_disk(7200, DENSE), "....."), (1.0, 0));
}

#[test]
fn where_nothing_is_made_all_that_does_not_stay_is_read() {
    let packed = Packing { more: 200, ..Packing::default() };
    assert_eq!(missing(&dense_on_disk(4800, packed), "....."), (0.5, 3600));
    assert_eq!(missing(&dense_on_disk(4000, Packing::default()), "....."), (0.5, 3000));
}

/// Something is brought wherever something does not stay, even if nothing is stored of it.
#[test]
fn nothing_is_missing_only_where_all_stays() {
    let all_made = Packing { more: 200, made: 1000, stored: 0 };
    let (share, missing) = missing(&dense_on_disk(4800, all_made), ".....");
    assert_eq!((share, missing), (0.5, 1));
}

/// What is copied on to a GPU is read as it is, and what is there for good is not read.
#[test]
fn nothing_is_made_of_what_goes_to_a_gpu() {
    // Two layers are copied, 2400 bytes; 4800 are computed with, of which 1598.4 are made.
    assert_eq!(missing(&dense_on_disk(4800, DENSE), "ss..."), (0.5, 1200 + (2400 - 799)));
    assert_eq!(missing(&dense_on_disk(6000, DENSE), "ss..."), (0.75, 600 + 600));
    assert_eq!(missing(&dense_on_disk(4800, DENSE), "sssss"), (0.5, 3600));
    // One layer on the GPU: 6000 bytes, of which 3600 do not stay.
    assert_eq!(missing(&dense_on_disk(3840, DENSE), "0...."), (0.4, 3600 - 999));
}
