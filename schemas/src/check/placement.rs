//! Streamed weights have a ring or window to go to, and weight inputs are within recorded files.

use super::{Findings, names};
use crate::{
    DType, DeviceKind, Experts, NextExperts, Partition, PartitionVariant, Plan, Residency, SelectedBy, WeightInput,
};
use std::collections::BTreeSet;

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    for (at, partition) in plan.partitions.iter().enumerate() {
        for (variant, field) in partition.variants().zip(["", ".prefill"]) {
            let place = format!("partitions[{at}]{field}");
            streamed(plan, found, &place, &variant);
            weights(plan, found, &place, partition, &variant);
        }
        if let Some(wanted) = &partition.experts {
            experts(plan, found, &format!("partitions[{at}].experts"), partition, wanted);
        }
        let locked = partition.bytes.locked.map_or(0, |locked| locked.0);
        found.require(
            locked <= partition.bytes.weights.0,
            format!("partitions[{at}].bytes.locked"),
            "it is larger than the weights",
        );
    }
    for (at, device) in plan.devices.iter().enumerate() {
        let place = format!("devices[{at}]");
        let on_host = device.kind == DeviceKind::Cpu;
        if let Some(ring) = device.ring {
            found.require(!on_host, format!("{place}.ring"), "the host has no ring");
            let has_room = ring.slots > 0 && ring.slot_bytes.0 > 0;
            found.require(has_room, format!("{place}.ring"), "a ring needs slots and slot bytes");
            let need = plan.slot(&device.name).into_iter().try_fold(0u64, u64::checked_add);
            let holds = need.is_some_and(|need| need <= ring.slot_bytes.0);
            let why = format!("a slot of {} is too small for the weights streamed through it", ring.slot_bytes.human());
            found.require(holds, format!("{place}.ring"), why);
        }
        if let Some(window) = device.window {
            found.require(on_host, format!("{place}.window"), "only the host reads weights from disk");
            found.require(window.0 > 0, format!("{place}.window"), "a window needs bytes");
        }
        if device.compress_permille.is_some() {
            found.require(on_host, format!("{place}.compress_permille"), "only the host reads weights from disk");
        }
        if device.expert_cache.is_some() {
            found.require(on_host, format!("{place}.expert_cache"), "only the host reads experts from disk");
        }
    }
}

fn streamed(plan: &Plan, found: &mut Findings, place: &str, variant: &PartitionVariant<'_>) {
    let Some(device) = names::device(plan, variant.device) else {
        // `names` checks the device for decoding.
        if place.ends_with(".prefill") {
            found.error(place, format!("the plan has no device {:?}", variant.device));
        }
        return;
    };
    let name = &device.name;
    let (is_possible, why) = match (variant.residency, device.kind) {
        (Residency::Resident, _) => return,
        (Residency::Streamed, DeviceKind::Gpu) => {
            let what = "weights that are streamed to a GPU must be inputs of the file";
            found.require(!variant.weights.is_empty(), place, what);
            (device.ring.is_some(), format!("{name} has no ring to stream weights into"))
        }
        (Residency::Streamed, DeviceKind::Cpu) => {
            (device.window.is_some(), format!("{name} has no window to read weights into"))
        }
        (Residency::Mapped, kind) => (kind == DeviceKind::Cpu, format!("{name} cannot map files")),
    };
    found.require(is_possible, place, why);
}

/// Checks the experts of a partition: the router is an input with one row of numbers for each token, and the device has
/// a cache for the experts.
fn experts(plan: &Plan, found: &mut Findings, place: &str, partition: &Partition, experts: &Experts) {
    let Experts { router: name, count, active, weights, apart, bytes, next, .. } = experts;
    router(plan, found, place, partition, name, experts);
    if let Some(next) = next {
        next_experts(plan, found, &format!("{place}.next"), partition, next);
    }
    found.require((1..=*count).contains(active), place, format!("{active} of {count} experts cannot be selected"));
    found.require(!weights.is_empty(), place, "no weight holds the experts");
    let is_even = !apart || (weights.len() as u64).is_multiple_of((*count).max(1));
    found.require(is_even, place, format!("{} weights cannot be those of {count} experts", weights.len()));
    found.require(bytes.0 <= partition.bytes.weights.0, place, "the experts are larger than the weights");
    let is_streamed = partition.variants().all(|variant| {
        let device = names::device(plan, variant.device);
        variant.residency == Residency::Streamed && device.is_some_and(|device| device.kind == DeviceKind::Cpu)
    });
    found.require(is_streamed, place, "experts are read by demand only where the host computes and streams");
    let cache = names::device(plan, &partition.device).and_then(|device| device.expert_cache);
    let why = format!("{} has no cache that holds the experts of the partition", partition.device);
    found.require(cache.is_some_and(|cache| cache.0 >= bytes.0), place, why);
}

/// Checks that an input of `partition` selects `experts`, which may be those of another partition.
fn router(plan: &Plan, found: &mut Findings, place: &str, partition: &Partition, name: &str, experts: &Experts) {
    let Some(input) = partition.inputs.iter().find(|input| input.name == name) else {
        return found.error(place, format!("{name:?} is not an input of the partition"));
    };
    let is_boundary = plan.partitions.iter().any(|other| other.name == input.from);
    found.require(is_boundary, place, format!("{name:?} does not come from another partition"));
    let has_numbers = experts.selected_by == SelectedBy::Numbers;
    let is_fit = if has_numbers { input.dtype == DType::Int64 } else { input.dtype.is_float() };
    found.require(is_fit, place, format!("{name:?} is {}", input.dtype));
    let width = input.shape.last().and_then(|dim| dim.as_fixed());
    let wanted = if has_numbers { experts.active } else { experts.count };
    let why = format!("{name:?} does not have {wanted} numbers for each token");
    found.require(width.is_none_or(|width| width == wanted), place, why);
}

/// Checks that a prediction is for the experts of a later partition that selects them by logits.
fn next_experts(plan: &Plan, found: &mut Findings, place: &str, partition: &Partition, next: &NextExperts) {
    let later = plan.partitions.iter().skip_while(|other| other.name != partition.name).skip(1);
    let Some(experts) = later.filter(|other| other.name == next.partition).find_map(|other| other.experts.as_ref())
    else {
        return found.error(place, format!("{:?} is no later partition with experts", next.partition));
    };
    let is_ranked = matches!(experts.selected_by, SelectedBy::Logits | SelectedBy::Probabilities);
    found.require(is_ranked, place, format!("the experts of {:?} are not selected by logits", next.partition));
    router(plan, found, place, partition, &next.router, experts);
}

/// Checks that weight inputs are on a GPU, have unique names, and are within files that the plan records.
fn weights(plan: &Plan, found: &mut Findings, place: &str, partition: &Partition, variant: &PartitionVariant<'_>) {
    let on_host = names::device(plan, variant.device).is_some_and(|device| device.kind == DeviceKind::Cpu);
    found.require(
        !on_host || variant.weights.is_empty(),
        place,
        "weights must be constants on the host, because kernels can pack only constants",
    );
    let mut seen: BTreeSet<&str> = partition.inputs.iter().map(|input| input.name.as_str()).collect();
    for (number, weight) in variant.weights.iter().enumerate() {
        let place = format!("{place}.weights[{number}]");
        found.require(seen.insert(&weight.name), &place, format!("{:?} occurs twice", weight.name));
        match end(weight) {
            None => found.error(place, format!("{} {:?} has no size in bytes", weight.dtype, weight.shape)),
            Some(end) => within(plan, found, &place, partition, weight, end),
        }
    }
}

fn end(weight: &WeightInput) -> Option<u64> {
    weight.offset.checked_add(weight.bytes()?)
}

fn within(plan: &Plan, found: &mut Findings, place: &str, partition: &Partition, weight: &WeightInput, end: u64) {
    let path = match partition.weights_dir.as_str() {
        "." => weight.file.clone(),
        dir => format!("{dir}/{}", weight.file),
    };
    match plan.files.iter().find(|file| file.path == path) {
        None => found.error(place, format!("{path:?} is missing from files")),
        Some(file) => {
            let why = format!("it ends at byte {end} of {path:?}, which has only {}", file.bytes);
            found.require(end <= file.bytes.0, place, why);
        }
    }
}
