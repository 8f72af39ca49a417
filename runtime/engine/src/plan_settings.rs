//! What every program decides from a plan before it loads the plan: whether reading from disk limits its speed, and which providers and options of
//! providers replace the plan's own.

use crate::options::WeightReads;
use hpp_schema::{Device, DeviceKind, Partition, Plan, Provider, ProviderOptions, Residency};
use std::collections::BTreeMap;

/// Whether reading from disk limits the speed of a plan: then threads that have nothing to do should sleep, because the threads that read
/// and decompress weights need a processor at once, and the disk idles while a spinning thread holds it.
///
/// Experts that are read by demand do not count: nothing computes while they are read, and waking threads that sleep took a sixth of each
/// token (docs/BENCHMARKS.md, "Experts by demand").
pub fn is_limited_by_disk(plan: &Plan, reads: WeightReads) -> bool {
    let on_host = |name: &str| plan.devices.iter().any(|device| device.name == name && device.kind == DeviceKind::Cpu);
    let computes = |partition: &&Partition| on_host(&partition.device) && partition.residency != Residency::Mapped;
    match reads {
        WeightReads::Prefetch | WeightReads::OnDemand => reads_much(plan.partitions.iter().filter(computes)),
        WeightReads::Mapped => false,
    }
}

/// Whether a pass reads more than a tenth of the weights that are not experts read by demand: memory delivers them more than ten times as
/// fast as a disk.
fn reads_much<'a>(partitions: impl Iterator<Item = &'a Partition>) -> bool {
    let (mut total, mut read) = (0_u64, 0_u64);
    for Partition { bytes, experts, .. } in partitions {
        let of_experts = experts.as_ref().map_or(0, |experts| experts.bytes.0);
        let others = bytes.weights.0.saturating_sub(of_experts);
        total = total.saturating_add(others);
        read = read.saturating_add(bytes.locked.map_or(0, |locked| others.saturating_sub(locked.0)));
    }
    read > total / 10
}

/// The plan with these providers, best first, for its partitions; with its own if there are none. Partitions on the host take those providers that
/// compute from host memory, and stay on the CPU provider if their weights are read from disk. The unsplit model stays on the CPU provider too,
/// because plans are compared with it.
pub fn with_providers(plan: &Plan, providers: &[Provider]) -> Plan {
    let mut plan = plan.clone();
    if providers.is_empty() || plan.is_unsplit() {
        return plan;
    }
    let on_host: Vec<Provider> = providers.iter().copied().filter(|provider| provider.uses_host_memory()).collect();
    let host_name = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu).map(|device| device.name.clone());
    let list_for = |device: &str, residency: Residency| match host_name.as_deref() == Some(device) {
        true if on_host.is_empty() || !residency.is_resident() => None,
        true => Some(on_host.clone()),
        false => Some(providers.to_vec()),
    };
    for partition in &mut plan.partitions {
        if let Some(list) = list_for(&partition.device, partition.residency) {
            partition.providers = list;
        }
        if let Some(prefill) = &mut partition.prefill
            && let Some(list) = list_for(&prefill.device, prefill.residency)
        {
            prefill.providers = list;
        }
    }
    plan
}

/// The plan with these options for providers, which replace its own.
pub fn with_provider_options(mut plan: Plan, options: &BTreeMap<Provider, ProviderOptions>) -> Plan {
    for device in &mut plan.devices {
        for (provider, more) in options {
            device.provider_options.entry(*provider).or_default().extend(more.clone());
        }
    }
    plan
}

/// The plan as it runs where some of its GPUs are missing: what it has on these is in host memory. A GPU is missing if none of its providers has
/// it.
pub fn without_missing_gpus(plan: &Plan, has_device: impl Fn(Provider, &Device) -> bool) -> Plan {
    let mut plan = plan.clone();
    let Some(host) = plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu).map(|host| host.name.clone())
    else {
        return plan;
    };
    let devices = &plan.devices;
    let is_missing = |name: &str, providers: &[Provider]| {
        let device = devices.iter().find(|device| device.name == name);
        let has_it = |provider: Provider| device.is_some_and(|device| has_device(provider, device));
        name != host && !providers.iter().any(|provider| *provider != Provider::CPU && has_it(*provider))
    };
    let mut missing: Vec<String> = Vec::new();
    for partition in &mut plan.partitions {
        if is_missing(&partition.device, &partition.providers) {
            missing.push(std::mem::replace(&mut partition.device, host.clone()));
            partition.residency = Residency::Resident;
        }
        if let Some(prefill) = partition.prefill.take_if(|prefill| is_missing(&prefill.device, &prefill.providers)) {
            missing.push(prefill.device);
        }
    }
    for state in plan.states.iter_mut().filter(|state| missing.contains(&state.device)) {
        state.device.clone_from(&host);
    }
    for device in plan.devices.iter_mut().filter(|device| missing.contains(&device.name)) {
        device.ring = None;
    }
    plan
}

/// The first of these providers that no partition of the plan tries; `None` for the unsplit model, which stays on the CPU provider.
pub fn untried(plan: &Plan, providers: impl IntoIterator<Item = Provider>) -> Option<Provider> {
    let tried: Vec<_> = plan.partitions.iter().flat_map(Partition::variants).flat_map(|v| v.providers).collect();
    providers.into_iter().find(|provider| !plan.is_unsplit() && !tried.contains(&provider))
}

/// Whether no partition of the plan tries any of these providers; false if there are no providers.
pub fn tries_none(plan: &Plan, providers: &[Provider]) -> bool {
    let plan = with_providers(plan, providers);
    !providers.is_empty() && providers.iter().all(|provider| untried(&plan, [*provider]).is_some())
}

/// Why a list of providers has no effect on a plan; `None` if it has one.
pub fn without_effect(plan: &Plan, providers: &[Provider]) -> Option<String> {
    let ids: Vec<&str> = providers.iter().map(Provider::id).collect();
    tries_none(plan, providers).then(|| format!("no partition of this plan can compute with {}", ids.join(" or ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::{ByteSize, Experts, PartitionBytes, SelectedBy};

    #[test]
    fn reading_limits_the_speed_if_more_than_a_tenth_of_the_weights_is_read_from_disk() {
        let first = example().partitions.remove(0);
        let bytes = |weights, locked: Option<u64>| {
            let bytes = PartitionBytes { weights: ByteSize(weights), locked: locked.map(ByteSize), ..first.bytes };
            Partition { bytes, experts: None, ..first.clone() }
        };
        let much = |partitions: &[Partition]| reads_much(partitions.iter());
        assert!(!much(&[bytes(100, None), bytes(50, None)]));
        assert!(!much(&[bytes(100, Some(90)), bytes(50, Some(45))]));
        assert!(much(&[bytes(100, Some(90)), bytes(50, Some(44))]));
        assert!(much(&[bytes(900, None), bytes(110, Some(0))]));
        assert!(!much(&[]));
        let experts = |bytes| {
            let router = "router".to_owned();
            Some(Experts {
                router,
                count: 8,
                active: 2,
                selected_by: SelectedBy::default(),
                weights: vec![],
                apart: false,
                bytes,
                next: None,
            })
        };
        let with_experts =
            |weights, locked| Partition { experts: experts(ByteSize(800)), ..bytes(weights, Some(locked)) };
        assert!(!much(&[with_experts(900, 100), bytes(100, Some(80))]));
        assert!(much(&[with_experts(900, 100), bytes(100, Some(79))]));
    }

    fn example() -> Plan {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        Plan::from_yaml(plan).unwrap()
    }

    #[test]
    fn what_a_missing_gpu_would_hold_is_in_host_memory() {
        let plan = example();
        assert_eq!(without_missing_gpus(&plan, |_, _| true), plan);
        let gpus = |plan: &Plan| {
            let is_gpu = |name: &str| plan.devices.iter().any(|d| d.name == name && d.kind != DeviceKind::Cpu);
            let variants = plan.partitions.iter().flat_map(Partition::variants).filter(|v| is_gpu(v.device)).count();
            let states = plan.states.iter().filter(|state| is_gpu(&state.device)).count();
            let rings = plan.devices.iter().filter(|device| device.ring.is_some()).count();
            (variants, states, rings)
        };
        let (variants, states, _) = gpus(&plan);
        assert!(variants > 0 && states > 0);
        let here = without_missing_gpus(&plan, |provider, _| provider == Provider::CPU);
        assert_eq!(gpus(&here), (0, 0, 0));
        assert_eq!(here.partitions.len(), plan.partitions.len());
        let needed = |plan: &Plan| crate::host_memory_needed(plan, 1);
        assert!(needed(&here) > needed(&plan));
    }

    #[test]
    fn the_second_of_two_gpus_is_missed_where_one_is_there() {
        let mut plan = example();
        plan.devices.push(Device::new("gpu1", DeviceKind::Gpu));
        let second = Partition { name: "gpu_1".into(), device: "gpu1".into(), ..plan.partitions[0].clone() };
        plan.partitions.insert(1, second);
        let here = without_missing_gpus(&plan, |_, device| device.name == "gpu0");
        let devices: Vec<&str> = here.partitions.iter().map(|partition| partition.device.as_str()).collect();
        assert_eq!(devices, ["gpu0", "cpu", "cpu"]);
    }
}
