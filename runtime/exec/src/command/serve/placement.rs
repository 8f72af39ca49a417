//! Where the weights of a model lie: as planned, or as an engine has loaded them.

use crate::runtime::OrtBackend;
use hpp_engine::port::WeightResidency;
use hpp_engine::{Engine, StageTelemetry};
use hpp_schema::{Partition, Plan, Residency};
use hpp_serve::WeightPlacement;

/// The placement that the plan intends.
pub(super) fn planned_placement(plan: &Plan) -> Vec<WeightPlacement> {
    let locked = |partition: &Partition| partition.bytes.locked.map_or(0, |locked| locked.0);
    placement(plan, &[], &plan.partitions.iter().map(locked).collect::<Vec<_>>())
}

/// The placement in a loaded engine: the devices that its stages run on, and the bytes of each partition that it has locked.
pub(super) fn loaded_placement(engine: &Engine<OrtBackend>) -> Vec<WeightPlacement> {
    placement(engine.plan(), &engine.telemetry().stages, &engine.locked_of_partitions())
}

/// One entry for each device and kind of residency.
fn placement(plan: &Plan, stages: &[StageTelemetry], locked: &[u64]) -> Vec<WeightPlacement> {
    let mut places: Vec<WeightPlacement> = Vec::new();
    for (partition, locked) in plan.partitions.iter().zip(locked) {
        let loaded = stages.iter().find(|stage| stage.partition == partition.name && stage.device == partition.device);
        let own = of_partition(partition, loaded, *locked);
        let same = |place: &&mut WeightPlacement| {
            (&place.device, &place.planned_device, place.weights) == (&own.device, &own.planned_device, own.weights)
        };
        match places.iter_mut().find(same) {
            Some(place) => {
                place.partitions += 1;
                place.blocks.extend(own.blocks);
                place.bytes += own.bytes;
                place.locked_bytes = place.locked_bytes.into_iter().chain(own.locked_bytes).reduce(|a, b| a + b);
            }
            None => places.push(own),
        }
    }
    places
}

fn of_partition(partition: &Partition, loaded: Option<&StageTelemetry>, locked: u64) -> WeightPlacement {
    let planned = match partition.residency {
        Residency::Resident => "resident",
        Residency::Streamed => "streamed",
        Residency::Mapped => "mapped",
    };
    let weights = loaded.filter(|stage| stage.is_on_host()).map_or(planned, |stage| match stage.residency {
        WeightResidency::InMemory => "resident",
        WeightResidency::ReadFromDisk => "streamed",
        WeightResidency::Mapped { .. } => "mapped",
    });
    let fell_back = loaded.is_some_and(StageTelemetry::fell_back);
    let device = loaded.map_or(&*partition.device, StageTelemetry::used_device);
    WeightPlacement {
        device: device.to_owned(),
        planned_device: fell_back.then(|| partition.device.clone()),
        weights,
        partitions: 1,
        blocks: partition.blocks.clone(),
        bytes: partition.bytes.weights.0,
        // Kernels may store weights in a larger layout than the file; the report counts no more than the file has.
        locked_bytes: (weights == "streamed" && device == "cpu").then_some(locked.min(partition.bytes.weights.0)),
    }
}
