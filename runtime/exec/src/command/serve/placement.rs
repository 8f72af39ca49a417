//! Where the weights of a model lie: as its plan wants it, or as its engine has it.

use hpp_engine::StageTelemetry;
use hpp_engine::port::WeightResidency;
use hpp_schema::{Partition, Plan, Residency};
use hpp_serve::WeightPlacement;

/// One entry for each device and kind of residency. Without stages, as the plan wants it.
pub(super) fn placement(plan: &Plan, stages: &[StageTelemetry]) -> Vec<WeightPlacement> {
    let mut places: Vec<WeightPlacement> = Vec::new();
    for partition in &plan.partitions {
        let loaded = stages.iter().find(|stage| stage.partition == partition.name && stage.device == partition.device);
        let own = of_partition(partition, loaded);
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

fn of_partition(partition: &Partition, loaded: Option<&StageTelemetry>) -> WeightPlacement {
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
    WeightPlacement {
        device: loaded.map_or(&*partition.device, StageTelemetry::used_device).to_owned(),
        planned_device: fell_back.then(|| partition.device.clone()),
        weights,
        partitions: 1,
        blocks: partition.blocks.clone(),
        bytes: partition.bytes.weights.0,
        // What the plan locks is for its device.
        locked_bytes: partition.bytes.locked.map(|locked| locked.0).filter(|_| !fell_back && weights == planned),
    }
}
