//! `--assign` with budgets: the planner places the blocks that it does not name.

use crate::support::{Done, LLAMA, fixture, planned, split};

/// Runs a dry run with these blocks assigned and this VRAM.
fn run(assign: &str, vram: &str) -> Done {
    split(&[fixture(LLAMA).to_str().unwrap(), "--assign", assign, "--vram", vram, "--dry-run", "--kv", "follow"])
}

/// A named placement that fits is planned, with any larger budget too.
#[test]
fn blocks_without_an_entry_leave_the_named_ones_room() {
    for assign in ["layers.0=gpu", "layers.1=stream", "layers.3=gpu,embedding=cpu"] {
        let refused = run(assign, "300K").refusal(&["the budget of gpu0 is too small"]);
        let bytes = refused.stderr.split('(').next_back().and_then(|rest| rest.split(' ').next()).unwrap();
        let smallest: u64 = bytes.parse().unwrap();
        for more in [0, 1, 2, 3, 5, 8, 13, 21].map(|steps| smallest + steps * smallest / 8) {
            run(assign, &more.to_string()).success();
        }
    }
}

/// Without `--assign` all blocks of this small model are on the GPU.
#[test]
fn reasons_tell_the_user_s_blocks_from_the_planner_s() {
    let plan = planned(&["--assign", "layers.1=cpu", "--vram", "1G"]);
    let of = |block: &str| plan.partitions.iter().find(|part| part.blocks.iter().any(|b| b == block)).unwrap();
    assert_eq!(of("layers.1").reason, "placed manually");
    assert!(!of("layers.3").reason.contains("manually"), "{}", of("layers.3").reason);
    let plan = planned(&["--assign", "layers.3=gpu", "--vram", "1G"]);
    let last = plan.partitions.last().unwrap();
    assert!(
        last.reason.contains("layers.3 placed manually; other blocks placed there by the planner"),
        "{}",
        last.reason
    );
}
