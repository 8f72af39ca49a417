//! The mixed-integer program never promises more than there is, and it sees models of real size as they are.

use super::instances::{brute_force, instance};
use crate::judge::{Judge, Wish};
use crate::program::{MOST_NODES, Outcome, solve};
use crate::regions::regions;
use crate::{Choice, Mechanisms, Objective, Problem};
use proptest::prelude::*;

fn bound(problem: &Problem, weights: [f64; 2], slots: u32, mechanisms: Mechanisms) -> Option<f64> {
    let wish = Wish { weights, mechanisms, slots: vec![slots; problem.gpus.len()] };
    let allowed: Vec<Vec<Choice>> = (0..problem.blocks.len()).map(|i| problem.choices(i, mechanisms)).collect();
    match solve(problem, &wish, &regions(problem, &allowed), &allowed, MOST_NODES) {
        Outcome::Answer(answer) => Some(answer.bound),
        Outcome::Infeasible => None,
        Outcome::Unknown => panic!("the solver gave up"),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn no_placement_beats_the_bound(seed: u64, blocks in 1usize..=4, slots in 1u32..5) {
        let problem = instance(seed, blocks, 1);
        let best = brute_force(&problem, Mechanisms::All, Objective::Mixed, &[slots]);
        let bound = bound(&problem, [1.0, problem.load.new_tokens as f64], slots, Mechanisms::All);
        match (best, bound) {
            (Some(best), Some(bound)) => prop_assert!(bound <= best * (1.0 + 1e-9), "bound {bound}, best {best}"),
            (best, bound) => prop_assert_eq!(best.is_some(), bound.is_some()),
        }
    }

    #[test]
    fn without_streaming_the_bound_is_what_the_best_takes(seed: u64, blocks in 1usize..=7) {
        let problem = instance(seed, blocks, 1);
        let best = brute_force(&problem, Mechanisms::ResidentCpu, Objective::Mixed, &[0]);
        let bound = bound(&problem, [1.0, problem.load.new_tokens as f64], 0, Mechanisms::ResidentCpu);
        match (best, bound) {
            (Some(best), Some(bound)) => prop_assert!((bound - best).abs() <= 1e-6 * best, "bound {bound}, best {best}"),
            (best, bound) => prop_assert_eq!(best.is_some(), bound.is_some()),
        }
    }
}

#[test]
fn a_placement_that_does_not_fit_has_no_price() {
    let problem = super::worked::four_layers();
    let wish = Wish { weights: [0.0, 1.0], mechanisms: Mechanisms::All, slots: vec![3] };
    let all = |place| vec![Choice::both(place); 4];
    let price = |vram: u64| {
        let mut problem = problem.clone();
        problem.budget.vram = vec![vram];
        Judge::new(&problem, wish.clone(), 1).price(&all(crate::Where::Resident(0))).map(|c| c.price.objective)
    };
    assert_eq!((price(400), price(399)), (Some(4.0), None));
}
