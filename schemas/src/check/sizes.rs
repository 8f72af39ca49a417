//! Sizes are not 0 where they must not be, sums fit in 64 bits, and numbers are finite.

use super::Findings;
use crate::{ByteSize, DeviceKind, Partition, Plan};

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    let budgets = &plan.budgets;
    found.require(budgets.context > 0, "budgets.context", "a sequence must hold a token");
    found.require(budgets.batch > 0, "budgets.batch", "a pass must hold a sequence");
    if let Some(most) = plan.model.context_length.filter(|most| budgets.context > *most) {
        found.error("budgets.context", format!("{} tokens, but the model was built for {most}", budgets.context));
    }
    if let Some(most) = plan.model.positions.filter(|most| budgets.context > *most) {
        let problem = format!("{} tokens, but the plan's tables have {most} positions", budgets.context);
        found.error("budgets.context", problem);
    }
    found.require(plan.model.vocab_size != Some(0), "model.vocab_size", "a vocabulary cannot be empty");
    found.require(plan.schedule.prefill_chunk != Some(0), "schedule.prefill_chunk", "a pass must take a token");
    totals(plan, found);
    numbers(plan, found);
    draft(plan, found);
}

fn draft(plan: &Plan, found: &mut Findings) {
    let Some(draft) = &plan.draft else { return };
    found.require(matches!(draft.bits, 4 | 8), "draft.bits", format!("{} bits; weights have 4 or 8", draft.bits));
    let (all, one) = (draft.host_memory, draft.sequence_memory);
    found.require(one <= all, "draft.sequence_memory", format!("{one} for a sequence, but {all} in all"));
    if let Some(ram) = plan.budgets.ram.filter(|ram| all >= *ram) {
        found.error("draft.host_memory", format!("{all} leave nothing of budgets.ram, {ram}, for the model"));
    }
}

fn totals(plan: &Plan, found: &mut Findings) {
    let files = sum(plan.files.iter().map(|file| file.bytes));
    found.require(files.is_some(), "files", "the sum of their sizes overflows 64 bits");
    let gpus = plan.devices.iter().filter(|device| device.kind == DeviceKind::Gpu);
    for (at, device) in gpus.enumerate() {
        let place = format!("devices.{}", device.name);
        match (needed(plan, &device.name), plan.budgets.vram.get(at)) {
            (None, _) => found.error(place, "the bytes that its partitions need overflow 64 bits"),
            (Some(need), Some(budget)) if need > budget.0 => {
                found.warning(place, format!("its partitions need {}, the budget is {budget}", ByteSize(need)));
            }
            // A plan made by hand may have no budgets.
            _ => {}
        }
    }
    for (at, partition) in plan.partitions.iter().enumerate() {
        let bytes = &partition.bytes;
        let known = sum([bytes.weights, bytes.kv, bytes.workspace].into_iter()).is_some();
        found.require(known, format!("partitions[{at}].bytes"), "their sum overflows 64 bits");
    }
}

/// Bytes that a GPU needs: resident weights, the ring, states and their staging buffers, the largest workspace, and the margin. `None` on overflow
/// of 64 bits.
fn needed(plan: &Plan, device: &str) -> Option<u64> {
    let computes = |partition: &&Partition| partition.device == device || partition.prefill_device() == device;
    let workspace = plan.partitions.iter().filter(computes).map(|partition| partition.bytes.workspace).max();
    let ring = plan.devices.iter().find(|other| other.name == device).and_then(|device| device.ring);
    let ring = ring.map_or(Some(0), |ring| ring.slot_bytes.0.checked_mul(u64::from(ring.slots)))?;
    let states = Some(plan.states_on(device)).filter(|bytes| *bytes < u64::MAX)?;
    let fixed = [ByteSize(plan.weights_on(device)?), ByteSize(ring), ByteSize(states), plan.budgets.margin];
    sum(workspace.into_iter().chain(fixed))
}

fn numbers(plan: &Plan, found: &mut Findings) {
    let said = &plan.predictions;
    for (name, value) in [
        ("decode_ms", said.decode_ms),
        ("time_to_first_token_ms", said.time_to_first_token_ms),
        ("decode_tokens_per_second", said.decode_tokens_per_second),
    ] {
        let place = format!("predictions.{name}");
        found.require(
            value.is_finite() && value >= 0.0,
            place,
            format!("{value} is not a finite number of at least 0"),
        );
    }
    if let Some(objective) = &said.objective {
        for (name, value) in [("ms", objective.ms), ("bound_ms", objective.bound_ms)] {
            let place = format!("predictions.objective.{name}");
            found.require(
                value.is_finite() && value >= 0.0,
                place,
                format!("{value} is not a finite number of at least 0"),
            );
        }
    }
    if let Some(throughput) = &said.throughput {
        let times = throughput.passes.iter().map(|pass| pass.ms).chain([throughput.tokens_per_second]);
        let place = "predictions.throughput";
        found.require(
            times.clone().all(|value| value.is_finite() && value >= 0.0),
            place,
            "times and rates must be finite numbers of at least 0",
        );
        let sizes = throughput.passes.iter().flat_map(|pass| [pass.sequences, pass.tokens]);
        found.require(
            sizes.chain([throughput.sequences, throughput.free_sequences]).all(|number| number > 0),
            place,
            "numbers of sequences and tokens must be at least 1",
        );
    }
    let Some(text) = &plan.generation else { return };
    let sampling = &text.sampling;
    for (name, value) in [
        ("temperature", sampling.temperature),
        ("top_p", sampling.top_p),
        ("min_p", sampling.min_p),
        ("repetition_penalty", sampling.repetition_penalty),
    ] {
        let sane = value.is_none_or(|value| value.is_finite() && value >= 0.0);
        found.require(sane, format!("generation.sampling.{name}"), "it must be a number that is not negative");
    }
}

fn sum(sizes: impl Iterator<Item = ByteSize>) -> Option<u64> {
    sizes.into_iter().try_fold(0u64, |sum, size| sum.checked_add(size.0))
}
