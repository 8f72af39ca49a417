//! A schedule runs each partition once: after the partitions that it reads from, and before the partition whose experts it predicts. It copies
//! values that change device.

use super::{Findings, names};
use crate::{CopyStep, ModelKind, OutputUse, Partition, Plan, Step};
use std::collections::BTreeSet;

pub(super) fn check(plan: &Plan, found: &mut Findings) {
    phase(plan, found, "schedule.prefill", &plan.schedule.prefill, Partition::prefill_device);
    // A model that runs once does not decode.
    if plan.model.kind != ModelKind::SingleRun || !plan.schedule.decode.is_empty() {
        phase(plan, found, "schedule.decode", &plan.schedule.decode, |partition| &partition.device);
    }
}

/// Device of a partition in the phase being checked.
type DeviceOf = for<'p> fn(&'p Partition) -> &'p str;

fn phase(plan: &Plan, found: &mut Findings, place: &str, steps: &[Step], device: DeviceOf) {
    let mut done = ScheduleProgress { device, ran: BTreeSet::new(), copied: BTreeSet::new() };
    for (at, step) in steps.iter().enumerate() {
        let place = format!("{place}[{at}]");
        match step {
            Step::Run(name) => run(plan, found, &place, name, &mut done),
            Step::Copy(copy) => copy_values(plan, found, &place, copy, &mut done),
        }
    }
    for partition in plan.partitions.iter().filter(|partition| !done.ran.contains(partition.name.as_str())) {
        found.error(place, format!("no step runs {:?}", partition.name));
    }
}

/// What the steps so far have done.
struct ScheduleProgress<'a> {
    device: DeviceOf,
    ran: BTreeSet<&'a str>,
    /// (producer, value, target device) of the copies so far.
    copied: BTreeSet<(&'a str, &'a str, &'a str)>,
}

fn run<'a>(plan: &'a Plan, found: &mut Findings, place: &str, name: &'a str, done: &mut ScheduleProgress<'a>) {
    let Some(partition) = plan.partitions.iter().find(|partition| partition.name == name) else {
        return found.error(place, format!("the plan has no partition {name:?}"));
    };
    let device = (done.device)(partition);
    for input in &partition.inputs {
        let Some(producer) = plan.partitions.iter().find(|other| other.name == input.from) else { continue };
        let value = (producer.name.as_str(), input.name.as_str(), device);
        if !done.ran.contains(producer.name.as_str()) {
            found.error(place, format!("{name:?} needs {:?}, which has not run", producer.name));
        } else if (done.device)(producer) != device && !done.copied.contains(&value) {
            found.error(place, format!("{name:?} needs {:?} on {device}, and no step copies it", input.name));
        }
    }
    if let Some(next) = partition.experts.as_ref().and_then(|experts| experts.next.as_ref()) {
        let is_later = !done.ran.contains(next.partition.as_str());
        let why = format!("{name:?} predicts experts of {:?}, which has run already", next.partition);
        found.require(is_later, place, why);
    }
    found.require(done.ran.insert(name), place, format!("{name:?} runs twice"));
}

fn copy_values<'a>(
    plan: &'a Plan,
    found: &mut Findings,
    place: &str,
    copy: &'a CopyStep,
    done: &mut ScheduleProgress<'a>,
) {
    for device in [&copy.from, &copy.to] {
        let known = names::device(plan, device).is_some();
        found.require(known, place, format!("the plan has no device {device:?}"));
    }
    found.require(copy.from != copy.to, place, format!("it copies from {0} to {0}", copy.from));
    for value in &copy.values {
        let sources = plan.partitions.iter().filter(|partition| {
            let produces = |o: &crate::PartitionOutput| o.name == *value && o.to != OutputUse::State;
            (done.device)(partition) == copy.from
                && done.ran.contains(partition.name.as_str())
                && partition.outputs.iter().any(produces)
        });
        let before = done.copied.len();
        let producers: Vec<_> = sources.map(|partition| partition.name.as_str()).collect();
        done.copied.extend(producers.iter().map(|producer| (*producer, value.as_str(), copy.to.as_str())));
        if producers.is_empty() {
            found.error(place, format!("no partition that ran produced {value:?} on {}", copy.from));
        } else if done.copied.len() == before {
            found.warning(place, format!("{value:?} was already copied to {}", copy.to));
        }
    }
}
