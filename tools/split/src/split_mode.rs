//! `--split-mode row`: each GPU computes a part of every layer. What it contradicts, and what of a plan shows it.

use crate::cli::{KvHomeArg, SplitArgs};
use crate::error::SplitError;
use crate::input_errors::InputErrors;
use crate::local_machine::LocalMachine;
use crate::request::PlanningRequest;
use hpp_partition::{BlockPlacement, BlockSpec};
use hpp_schema::Partition;

/// Why a part of a layer is where it is.
pub const REASON: &str = "each GPU computes a part of every layer (--split-mode row)";

/// Refuses options that leave nothing to divide by rows, or that say otherwise.
pub fn check(args: &SplitArgs, errors: &mut InputErrors) {
    if !args.divides_rows() {
        return;
    }
    let planning = &args.planning;
    let refused = [
        (args.gpu_layers.is_some(), "--gpu-layers", "counts whole layers"),
        (args.assign.is_some(), "--assign", "places whole layers"),
        (planning.stream.is_some() || planning.requests_streaming(), "--stream or --mechanisms all", STREAMED),
        (planning.slots.is_some(), "--slots", STREAMED),
        (
            args.layers_with_host_experts().is_some(),
            "--cpu-moe, --n-cpu-moe or --gpu-experts",
            "divides layers before their experts",
        ),
        (args.movable, "--movable", "moves whole layers"),
        (args.active_neurons, "--active-neurons", "is for layers on the host"),
        (args.kv == KvHomeArg::Host, "--kv cpu", "copies caches to one GPU at a time"),
        (planning.refine.is_some(), "--refine", "tries other places of blocks, and each shard has its own"),
        (planning.sweep_vram.is_some(), "--sweep-vram", "is for other numbers of layers on GPUs"),
        (planning.explain, "--explain", "compares other places of blocks, and each shard has its own"),
        (planning.profile.is_some(), "--profile", "has times of whole layers"),
        (planning.from_telemetry.is_some(), "--from-telemetry", "has times of whole layers"),
        (args.in_place, "--in-place", "writes no weights, and parts of weights are in no file of the model"),
    ];
    for (_, option, why) in refused.into_iter().filter(|(is_given, ..)| *is_given) {
        let what = format!("--split-mode row divides every layer among the GPUs, and {option} {why}");
        errors.require(false, what, "omit one of them");
    }
    errors.require(args.vram.is_empty() || args.vram.len() > 1, TOO_FEW, MORE_GPUS);
    let has_empty = args.vram.len() > 1 && args.vram.iter().any(|size| size.0 == 0);
    errors.require(
        !has_empty,
        "--split-mode row gives each GPU a part of every layer, and --vram gives one 0 bytes",
        MORE_GPUS,
    );
}

const STREAMED: &str = "streams whole layers";
const TOO_FEW: &str = "--split-mode row divides every layer among GPUs, and the plan is for fewer than two";
const MORE_GPUS: &str = "give --vram a size for each GPU, such as 24G,24G, or omit --split-mode";
const OTHER_MACHINE: &str = "describe a machine with several GPUs (--machine with a YAML file like those in fixtures/machines that has an entry \
                             under `gpus` for each), or omit --split-mode";

/// Refuses a machine with too few GPUs, or with GPUs of several kinds.
pub fn check_gpus(args: &SplitArgs, gpus: usize, local: &LocalMachine) -> Result<(), SplitError> {
    if !args.divides_rows() {
        return Ok(());
    }
    if gpus < 2 {
        let hint = if args.vram.is_empty() && args.planning.machine.is_some() { OTHER_MACHINE } else { MORE_GPUS };
        return Err(SplitError::setting(TOO_FEW, hint));
    }
    let used = local.gpus.get(..gpus).unwrap_or_default();
    match used.windows(2).find(|pair| pair[0].name != pair[1].name) {
        Some(pair) => Err(SplitError::setting(
            format!(
                "--split-mode row divides layers equally among GPUs of one kind, and {} and {} are not",
                pair[0].name, pair[1].name
            ),
            "omit --split-mode: whole layers are divided as the GPUs allow",
        )),
        None => Ok(()),
    }
}

/// Refuses a placement in which a shard is not on its GPU.
pub fn refuse_moved_shards(request: &PlanningRequest, placements: &[BlockPlacement]) -> Result<(), SplitError> {
    let blocks = request.problem.blocks.iter().zip(placements);
    let is_moved = |(block, placement): &(&BlockSpec, &BlockPlacement)| {
        request.divides_rows && block.assigned.is_some_and(|place| **placement != BlockPlacement::both(place))
    };
    match blocks.into_iter().find(is_moved) {
        Some((block, _)) => Err(SplitError::setting(
            format!(
                "--split-mode row computes every layer on the GPUs, and no provider of theirs computes {}",
                block.label
            ),
            "omit --split-mode, or name other --providers",
        )),
        None => Ok(()),
    }
}

/// The layer and the shard of a partition that computes a shard's part of a layer: `layers.3` and 0 of `layers.3.attention.0`.
pub fn shard(partition: &Partition) -> Option<(&str, usize)> {
    let [label] = partition.blocks.as_slice() else { return None };
    if partition.reason != REASON {
        return None;
    }
    let (part, shard) = label.rsplit_once('.')?;
    let (layer, _) = part.rsplit_once('.')?;
    Some((layer, shard.parse().ok()?))
}
