//! The exact planner against brute force: the cost is always equal.

use super::brute_force_tables::brute_force_with_tables;
use super::instances::{brute_force, disk_bound_instance, instance};
use crate::{KvHome, Mechanisms, Objective, Options, Planner, Problem, evaluate, fits, plan};
use proptest::prelude::*;

fn options(mechanisms: Mechanisms, objective: Objective, slots: Option<u32>) -> Options {
    Options { planner: Planner::Exact, objective, mechanisms, slots }
}

/// The planner's cost is that of the best placement, or it refuses if no placement fits.
fn compare(problem: &Problem, options: &Options) -> Result<(), TestCaseError> {
    let slots = match (options.mechanisms, options.slots) {
        (Mechanisms::ResidentCpu, _) => vec![0],
        (_, Some(slots)) => vec![slots],
        (_, None) => vec![1, 2, 3, 4],
    };
    let best = brute_force(problem, options.mechanisms, options.objective, &slots);
    match (plan(problem, options), best) {
        (Ok(solution), Some(best)) => {
            let same = |a: f64, b: f64| (a - b).abs() <= 1e-7 * a.max(b);
            prop_assert!(same(solution.objective_ms, best), "planned {:?}, best {best}", solution);
            prop_assert!(solution.proven && solution.bound_ms == solution.objective_ms);
            prop_assert!(fits(problem, &solution.placements, &solution.slots, options.mechanisms).is_ok());
            let again = evaluate(problem, options, solution.placements.clone(), solution.slots.clone());
            prop_assert_eq!(again.objective_ms, solution.objective_ms);
        }
        (Err(over_budget), None) => prop_assert!(over_budget.required_budget() > over_budget.budget),
        (Ok(solution), None) => prop_assert!(false, "planned {solution:?}, but nothing fits"),
        (Err(over_budget), Some(best)) => prop_assert!(false, "{over_budget}, but a placement takes {best}"),
    }
    Ok(())
}

/// Instances on which the planner and brute force once disagreed: cuts with shared weights, scores that only the host keeps for a prompt,
/// a budget below what the process takes, pipelines that a state swap divides; and one on which both brute-force searches disagreed.
#[test]
fn instances_that_once_disagreed() {
    let check = |problem: Problem, objective: Objective, slots: Option<u32>| {
        let compared = compare(&problem, &options(Mechanisms::All, objective, slots));
        assert!(compared.is_ok(), "{compared:?}");
    };
    check(instance(7371199808648089221, 3, 1), Objective::Decode, None);
    check(instance(15321441640681223225, 2, 1), Objective::Decode, Some(1));
    check(instance(17529002227174057935, 2, 1), Objective::Mixed, Some(1));
    check(instance(909380818777804226, 4, 1).with_sequences(2, false), Objective::Decode, Some(1));
    check(disk_bound_instance(9078456354478605472, 4, 1), Objective::Decode, Some(1));
    check(instance(10626827911489918090, 1, 1), Objective::Decode, None);
    check(instance(6521603795650754893, 4, 1).with_sequences(3, false), Objective::Prefill, Some(1));
    let problem = instance(4849567311616957570, 4, 1);
    let best = brute_force(&problem, Mechanisms::All, Objective::Decode, &[1]).unwrap();
    let with_tables = brute_force_with_tables(&problem, Objective::Decode, 1).unwrap();
    assert!((best - with_tables).abs() <= 1e-9 * best, "{best} and {with_tables}");
}

fn objectives() -> impl Strategy<Value = Objective> {
    prop_oneof![Just(Objective::Decode), Just(Objective::Prefill), Just(Objective::Mixed)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    #[test]
    fn small_instances(seed: u64, blocks in 1usize..=4, objective in objectives(), slots in proptest::option::of(1u32..5)) {
        compare(&instance(seed, blocks, 1), &options(Mechanisms::All, objective, slots))?;
    }

    #[test]
    fn two_gpus(seed: u64, blocks in 1usize..=3, objective in objectives()) {
        compare(&instance(seed, blocks, 2), &options(Mechanisms::All, objective, Some(2)))?;
    }

    #[test]
    fn disk_bound_instances(seed: u64, blocks in 1usize..=4, objective in objectives(), slots in 1u32..5) {
        compare(&disk_bound_instance(seed, blocks, 1), &options(Mechanisms::All, objective, Some(slots)))?;
    }

    #[test]
    fn several_sequences(seed: u64, blocks in 1usize..=4, sequences in 2u64..5, objective in objectives(), slots in 1u32..4) {
        let problem = instance(seed, blocks, 1).with_sequences(sequences, false);
        compare(&problem, &options(Mechanisms::All, objective, Some(slots)))?;
    }

    #[test]
    fn several_sequences_on_two_gpus(seed: u64, blocks in 1usize..=5, sequences in 2u64..5, objective in objectives()) {
        let problem = instance(seed, blocks, 2).with_sequences(sequences, false);
        compare(&problem, &options(Mechanisms::ResidentCpu, objective, None))?;
    }

    #[test]
    fn resident_and_host(seed: u64, blocks in 1usize..=9, gpus in 0usize..=1, objective in objectives()) {
        compare(&instance(seed, blocks, gpus), &options(Mechanisms::ResidentCpu, objective, None))?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 8, ..ProptestConfig::default() })]

    #[test]
    fn resident_and_host_with_two_gpus(seed: u64, blocks in 4usize..=7, objective in objectives()) {
        compare(&instance(seed, blocks, 2), &options(Mechanisms::ResidentCpu, objective, None))?;
    }

    #[test]
    fn five_to_seven_blocks(seed: u64, blocks in 5usize..=7, objective in objectives(), slots in 1u32..5) {
        compare_with_tables(seed, blocks, objective, slots)?;
    }

    #[test]
    fn both_brute_force_searches_agree(seed: u64, blocks in 1usize..=4, objective in objectives(), slots in 1u32..5) {
        for problem in [instance(seed, blocks, 1), disk_bound_instance(seed, blocks, 1)] {
            let same = |a: f64, b: f64| (a - b).abs() <= 1e-9 * a.max(b);
            match (brute_force_with_tables(&problem, objective, slots), brute_force(&problem, Mechanisms::All, objective, &[slots])) {
                (Some(a), Some(b)) => prop_assert!(same(a, b), "{a} and {b}"),
                (a, b) => prop_assert_eq!(a, b),
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1, ..ProptestConfig::default() })]

    #[test]
    fn eight_and_nine_blocks(seed: u64, blocks in 8usize..=9, objective in objectives()) {
        compare_with_tables(seed, blocks, objective, 3)?;
    }
}

fn compare_with_tables(seed: u64, blocks: usize, objective: Objective, slots: u32) -> Result<(), TestCaseError> {
    let mut problem = instance(seed, blocks, 1);
    if blocks > 7 {
        // Without state swaps: with them the tables have too many entries.
        problem.budget.kv = KvHome::Device;
        problem.blocks.iter_mut().for_each(|block| block.kv_grows = None);
    }
    let planned = plan(&problem, &options(Mechanisms::All, objective, Some(slots)));
    match (planned, brute_force_with_tables(&problem, objective, slots)) {
        (Ok(solution), Some(best)) => {
            prop_assert!(solution.objective_ms <= best * (1.0 + 1e-7), "planned {solution:?}, best {best}");
            prop_assert!(solution.proven);
            // In rare cases the plan is better than what the tables find: then it must be real.
            prop_assert!(
                fits(&problem, &solution.placements, &solution.slots, Mechanisms::All).is_ok(),
                "{solution:?}"
            );
            let options = options(Mechanisms::All, objective, Some(slots));
            let again = evaluate(&problem, &options, solution.placements.clone(), solution.slots.clone());
            prop_assert_eq!(again.objective_ms, solution.objective_ms);
        }
        (Err(over_budget), None) => prop_assert!(over_budget.required_budget() > over_budget.budget),
        (Err(over_budget), Some(best)) => prop_assert!(false, "{over_budget}, but a placement takes {best}"),
        (Ok(solution), None) => prop_assert!(false, "planned {solution:?}, but nothing fits"),
    }
    Ok(())
}
