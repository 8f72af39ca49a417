//! Placement: weights that are copied have a ring to be copied into, and nothing is asked for that this build cannot do.

use super::{Findings, names};
use crate::{DeviceKind, Partition, Placement, Plan};

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    for (at, partition) in plan.partitions.iter().enumerate() {
        let place = format!("partitions[{at}]");
        for (field, placement) in placements(partition) {
            streamed(plan, found, &format!("{place}{field}"), &placement);
        }
        if partition.is_streamed() || partition.prefill.is_some() {
            let what = "this build cannot run partitions whose weights are streamed or that change device between phases; \
                        plan with --mechanisms resident,cpu";
            found.error(place, what);
        }
    }
    for (at, device) in plan.devices.iter().enumerate() {
        let place = format!("devices[{at}].ring");
        let Some(ring) = device.ring else { continue };
        found.require(device.kind == DeviceKind::Gpu, &place, "weights on the host are not copied anywhere");
        found.require(ring.slots > 0 && ring.slot_bytes.0 > 0, &place, "a ring without room holds nothing");
    }
}

fn placements(partition: &Partition) -> impl Iterator<Item = (&'static str, Placement)> {
    let decode = Placement { device: partition.device.clone(), residency: partition.residency };
    std::iter::once(("", decode)).chain(partition.prefill.clone().map(|prefill| (".prefill", prefill)))
}

fn streamed(plan: &Plan, found: &mut Findings, place: &str, placement: &Placement) {
    let Some(device) = names::device(plan, &placement.device) else {
        // A partition's own device is looked at with its name.
        if place.ends_with(".prefill") {
            found.error(place, format!("the plan has no device {:?}", placement.device));
        }
        return;
    };
    if !placement.residency.is_resident() {
        found.require(device.ring.is_some(), place, format!("{} has no ring to stream weights into", device.name));
    }
}
