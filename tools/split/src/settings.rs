//! Settings that make no sense whatever the model is, all of them at once.

use crate::cli::{GpuLayers, SplitArgs, Stream};
use crate::complaint::Complaints;

/// Largest batch: beyond it the bytes of states and activations leave 64 bits.
const MOST_SEQUENCES: u64 = 1 << 20;

/// Everything wrong with the settings themselves.
pub fn check(args: &SplitArgs) -> Complaints {
    let mut found = Complaints::default();
    sizes(args, &mut found);
    streaming(args, &mut found);
    targets(args, &mut found);
    without_gpus(args, &mut found);
    by_hand(args, &mut found);
    refining(args, &mut found);
    found
}

fn sizes(args: &SplitArgs, found: &mut Complaints) {
    found.require(args.batch > 0, "a batch of 0 sequences computes nothing", "give --batch 1 or more");
    let (most, few) = ("the largest batch is 1048576 sequences", "give --batch what one pass is to compute");
    found.require(args.batch <= MOST_SEQUENCES, most, few);
    found.require(args.partitions > 0, "0 partitions hold nothing", "give --partitions 1 or more");
    found.require(args.prompt_tokens > 0, "a prompt of 0 tokens predicts nothing", "give --prompt-tokens 1 or more");
    found.require(args.new_tokens > 0, "an answer of 0 tokens takes no time", "give --new-tokens 1 or more");
    let vram = args.vram.len() == 1 || args.vram.iter().all(|size| size.0 > 0);
    let hint = "give a size for each GPU to use, or --vram 0 alone to compute on the CPU";
    found.require(vram, "a VRAM budget of 0 holds nothing", hint);
    let ram = args.ram.is_none_or(|size| size.0 > 0);
    found.require(ram, "a RAM budget of 0 holds nothing", "give --ram what the host can spare, or leave it out");
}

fn streaming(args: &SplitArgs, found: &mut Complaints) {
    let planning = &args.planning;
    found.require(
        planning.slots != Some(0),
        "a ring of 0 slots holds nothing",
        "give --slots 1 or more; 3 or 4 do best",
    );
    found.require(
        planning.slots.is_none() || args.streams(),
        "--slots are for weights streamed to a GPU, and nothing is streamed",
        "add --stream auto or --stream N, or leave --slots out",
    );
    found.require(
        planning.stream != Some(Stream::Count(0)),
        "--stream 0 streams nothing",
        "give --stream a number of layers, or leave it out",
    );
    let (planned, counted) = (planning.stream == Some(Stream::Auto), matches!(planning.stream, Some(Stream::Count(_))));
    found.require(
        !(planned && matches!(args.gpu_layers, Some(GpuLayers::Count(_)))),
        "--stream auto lets the planner decide, and --gpu-layers with a number leaves it nothing to decide",
        "give --stream a number of layers, or leave --gpu-layers out",
    );
    found.require(
        !(counted && args.gpu_layers == Some(GpuLayers::Auto)),
        "--gpu-layers auto lets the planner decide, and --stream with a number leaves it nothing to decide",
        "give --gpu-layers a number, or say --stream auto",
    );
}

fn targets(args: &SplitArgs, found: &mut Complaints) {
    let good = |value: Option<f64>| value.is_none_or(|value| value.is_finite() && value > 0.0);
    found.require(good(args.planning.at_least), "--at-least is no speed", "give tokens per second above 0");
    let hint = "give milliseconds above 0";
    found.require(good(args.planning.first_token_within), "--first-token-within is no time", hint);
}

fn without_gpus(args: &SplitArgs, found: &mut Complaints) {
    let none = args.vram.len() == 1 && args.vram[0].0 == 0;
    let wanted = args.gpu_layers.is_some_and(|layers| layers != GpuLayers::Count(0)) || args.planning.stream.is_some();
    found.require(
        !(none && wanted),
        "--vram 0 plans without a GPU, and --gpu-layers or --stream ask for one",
        "give --vram the size of the GPU, or leave the others out",
    );
}

fn by_hand(args: &SplitArgs, found: &mut Complaints) {
    let by_hand = args.by_hand();
    let planning = &args.planning;
    let what = "there is nothing to plan where blocks are placed by hand";
    let hint = "leave --gpu-layers, --stream and --assign out, or --sweep-vram and --refine";
    found.require(!by_hand || (planning.sweep_vram.is_none() && planning.refine.is_none()), what, hint);
}

fn refining(args: &SplitArgs, found: &mut Complaints) {
    let planning = &args.planning;
    if planning.refine.is_none() {
        return;
    }
    found.require(planning.refine != Some(0), "0 tokens measure nothing", "give --refine 8 or more");
    found.require(
        planning.machine.is_none(),
        "--refine runs plans here, and --machine plans for a machine that need not be here",
        "leave one of them out",
    );
    let only_looks = args.dry_run || planning.sweep_vram.is_some();
    let hint = "leave --refine out, or --dry-run and --sweep-vram";
    found.require(!only_looks, "--refine writes plans and runs them, which a look does not", hint);
    found.require(
        !planning.asks_for_streaming(),
        "--refine learns what a partition takes, and one that is streamed waits for its weights as well",
        "leave --refine out, or --stream and --mechanisms all",
    );
}
