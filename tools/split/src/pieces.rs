//! From a choice for each block to the pieces that become partitions.

use hpp_model::Piece;
use hpp_partition::{Choice, KvHome, Phase, Place, Problem, Where, runs};

/// The fewest pieces these choices need, or `at_least` of them when more are asked for (never more than blocks).
/// A streamed block is a piece of its own, for it has a slot of its own; so is every block of the host where weights are read
/// `from_disk`, for they come and go block by block; and so is every GPU block while state lies on
/// the host, so that the device holds one block's at a time.
pub fn pieces(problem: &Problem, choices: &[Choice], at_least: usize, from_disk: bool) -> Vec<Piece> {
    // Blocks that may share a piece share a number, which stands in for a place.
    let mut group = 0;
    let mut groups = Vec::with_capacity(choices.len());
    for (at, choice) in choices.iter().enumerate() {
        if at > 0 && (choices[at - 1] != *choice || alone(problem, *choice, from_disk)) {
            group += 1;
        }
        groups.push(Place::Gpu(group));
    }
    let runs = runs(&problem.blocks, &groups, at_least);
    runs.into_iter().map(|run| Piece { choice: choices[run.blocks.start], blocks: run.blocks }).collect()
}

fn alone(problem: &Problem, choice: Choice, from_disk: bool) -> bool {
    let on_gpu = |place: Where| place.gpu().is_some() && problem.budget.kv == KvHome::Host;
    let read = |place: Where| place == Where::Cpu && from_disk;
    Phase::BOTH.iter().any(|phase| {
        let place = choice.of(*phase);
        matches!(place, Where::Streamed(_)) || on_gpu(place) || read(place)
    })
}
