//! Placement: weights that are copied or read have room to go to, and nothing is asked for that this build cannot do.

use super::{Findings, names};
use crate::{DeviceKind, Partition, Placement, Plan, Residency};

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    for (at, partition) in plan.partitions.iter().enumerate() {
        let place = format!("partitions[{at}]");
        for (field, placement) in placements(partition) {
            streamed(plan, found, &format!("{place}{field}"), &placement);
        }
        let on_gpu = partition.is_streamed() && !is_on_host(plan, partition);
        if on_gpu || partition.prefill.is_some() {
            let what = "this build cannot run partitions whose weights are streamed to a GPU or that change device between \
                        phases; plan with --mechanisms resident,cpu,disk";
            found.error(&place, what);
        }
        let locked = partition.bytes.locked.map_or(0, |locked| locked.0);
        found.require(
            locked <= partition.bytes.weights.0,
            format!("{place}.bytes.locked"),
            "it is more than the weights",
        );
    }
    for (at, device) in plan.devices.iter().enumerate() {
        let place = format!("devices[{at}]");
        let on_host = device.kind == DeviceKind::Cpu;
        if let Some(ring) = device.ring {
            found.require(!on_host, format!("{place}.ring"), "weights on the host are not copied anywhere");
            let is_room = ring.slots > 0 && ring.slot_bytes.0 > 0;
            found.require(is_room, format!("{place}.ring"), "a ring without room holds nothing");
        }
        if let Some(window) = device.window {
            found.require(on_host, format!("{place}.window"), "weights are read from disk into host memory only");
            found.require(window.0 > 0, format!("{place}.window"), "a window without room holds nothing");
        }
    }
}

fn is_on_host(plan: &Plan, partition: &Partition) -> bool {
    names::device(plan, &partition.device).is_none_or(|device| device.kind == DeviceKind::Cpu)
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
    let name = &device.name;
    let (room, what) = match (placement.residency, device.kind) {
        (Residency::Resident, _) => return,
        (Residency::Streamed, DeviceKind::Gpu) => {
            (device.ring.is_some(), format!("{name} has no ring to stream weights into"))
        }
        (Residency::Streamed, DeviceKind::Cpu) => {
            (device.window.is_some(), format!("{name} has no window to read weights into"))
        }
        (Residency::Mapped, kind) => (kind == DeviceKind::Cpu, format!("{name} cannot map files")),
    };
    found.require(room, place, what);
}
