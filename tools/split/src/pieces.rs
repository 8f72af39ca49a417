//! From a choice for each block to the pieces that become partitions.

use hpp_model::Piece;
use hpp_partition::{Choice, KvHome, Phase, Place, Problem, Where, runs};

/// The fewest pieces these choices need, or `at_least` of them when more are asked for (never more than blocks).
/// A streamed block is a piece of its own, for it has a slot of its own; so is every block of the host where weights are read
/// from disk, for they come and go block by block; so is every GPU block while state lies on the host, so that the device
/// holds one block's at a time; and so is every GPU block with state that is to be movable.
pub fn pieces(problem: &Problem, choices: &[Choice], at_least: usize, apart: Apart) -> Vec<Piece> {
    // Blocks that may share a piece share a number, which stands in for a place.
    let mut group = 0;
    let mut groups = Vec::with_capacity(choices.len());
    let alone = |at: usize| alone(problem, at, choices[at], apart);
    for (at, choice) in choices.iter().enumerate() {
        if at > 0 && (choices[at - 1] != *choice || alone(at) || alone(at - 1)) {
            group += 1;
        }
        groups.push(Place::Gpu(group));
    }
    let runs = runs(&problem.blocks, &groups, at_least);
    runs.into_iter().map(|run| Piece { choice: choices[run.blocks.start], blocks: run.blocks }).collect()
}

/// Blocks that are pieces of their own besides those that are streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Apart {
    /// Those of the host, because their weights are read from disk.
    pub from_disk: bool,
    /// Tables on the host of which a pass reads a few rows, because they stay mapped files.
    pub tables: bool,
    /// Those with state on a GPU, so that they can move.
    pub movable: bool,
}

fn alone(problem: &Problem, at: usize, choice: Choice, apart: Apart) -> bool {
    let moves = problem.budget.kv == KvHome::Host || (apart.movable && problem.blocks[at].kv_bytes > 0);
    let on_gpu = |place: Where| place.gpu().is_some() && moves;
    let read = |place: Where| place == Where::Cpu && (apart.from_disk || (apart.tables && problem.reads_rows(at)));
    Phase::BOTH.iter().any(|phase| {
        let place = choice.of(*phase);
        matches!(place, Where::Streamed(_)) || on_gpu(place) || read(place)
    })
}
