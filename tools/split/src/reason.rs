//! One line for each partition that says why it is where it is.

use crate::place::Placement;
use hpp_partition::{Block, BlockKind, Budget, Demand, Place, Rates, Run, hotness};
use hpp_schema::ByteSize;

/// Why this run of blocks computes where it does.
pub fn reason(placement: &Placement, blocks: &[Block], run: &Run) -> String {
    let inside = &blocks[run.blocks.clone()];
    match run.place {
        _ if placement.by_hand => "placed by hand".to_owned(),
        Place::Cpu if placement.budget.vram.is_empty() => "no VRAM budget was given".to_owned(),
        Place::Cpu => why_host(blocks, inside, &placement.budget),
        Place::Gpu(index) => why_device(inside, placement.budget.vram[index]),
    }
}

fn why_device(inside: &[Block], vram: u64) -> String {
    let saved: f64 = inside.iter().map(|b| hotness(b, &Rates::ASSUMED)).map(|h| h.cpu_ms - h.gpu_ms).sum();
    let used = ByteSize(Demand::of(inside).total()).human();
    format!("saves {saved:.2} ms a token for {used} of {}", ByteSize(vram).human())
}

fn why_host(blocks: &[Block], inside: &[Block], budget: &Budget) -> String {
    if inside.iter().all(|block| block.kind == BlockKind::Embedding) {
        return "a table of which each token reads one row".to_owned();
    }
    let missing = Demand::of(blocks).total().saturating_add(budget.margin).saturating_sub(budget.vram.iter().sum());
    match missing {
        0 => "what is left of each GPU is too small for one more block".to_owned(),
        _ => format!("VRAM is {} short of the whole model", ByteSize(missing).human()),
    }
}
