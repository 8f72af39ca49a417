//! What every program that loads a plan decides from it before: whether reading from disk limits its speed, and other providers and
//! options of providers than its own.

use crate::options::WeightReads;
use hpp_schema::{DeviceKind, Partition, PartitionBytes, Plan, Provider, ProviderOptions, Residency};
use std::collections::BTreeMap;

/// Whether reading from disk limits the speed of a plan: then threads that have nothing to do should sleep, because the threads that read
/// and decompress weights need a processor at once, and the disk idles while a spinning thread holds it.
pub fn is_limited_by_disk(plan: &Plan, reads: WeightReads) -> bool {
    let on_host = |name: &str| plan.devices.iter().any(|device| device.name == name && device.kind == DeviceKind::Cpu);
    let computes = |partition: &&Partition| on_host(&partition.device) && partition.residency != Residency::Mapped;
    match reads {
        WeightReads::Prefetch | WeightReads::OnDemand => {
            reads_much(plan.partitions.iter().filter(computes).map(|partition| &partition.bytes))
        }
        WeightReads::Mapped => false,
    }
}

/// Whether a pass reads more than a tenth of the weights: memory delivers them more than ten times as fast as a disk.
fn reads_much<'a>(partitions: impl Iterator<Item = &'a PartitionBytes>) -> bool {
    let (mut total, mut read) = (0_u64, 0_u64);
    for PartitionBytes { weights, locked, .. } in partitions {
        total = total.saturating_add(weights.0);
        read = read.saturating_add(locked.map_or(0, |locked| weights.0.saturating_sub(locked.0)));
    }
    read > total / 10
}

/// The plan with these providers, best first, for its partitions; with its own if there are none. Partitions on the host take those of
/// them that compute from host memory, and stay on the CPU provider if their weights are read from disk. The unsplit model stays on the CPU
/// provider too: others are compared with it.
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

/// The first of these providers that no partition of the plan tries; `None` for the unsplit model, which stays on the CPU provider.
pub fn untried(plan: &Plan, providers: impl IntoIterator<Item = Provider>) -> Option<Provider> {
    let tried: Vec<_> = plan.partitions.iter().flat_map(Partition::variants).flat_map(|v| v.providers).collect();
    providers.into_iter().find(|provider| !plan.is_unsplit() && !tried.contains(&provider))
}

/// Whether these providers, if there are any, are for no partition of the plan.
pub fn tries_none(plan: &Plan, providers: &[Provider]) -> bool {
    let plan = with_providers(plan, providers);
    !providers.is_empty() && providers.iter().all(|provider| untried(&plan, [*provider]).is_some())
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::ByteSize;

    #[test]
    fn reading_limits_the_speed_if_more_than_a_tenth_of_the_weights_is_read_from_disk() {
        let bytes = |weights, locked: Option<u64>| {
            let locked = locked.map(ByteSize);
            PartitionBytes { weights: ByteSize(weights), locked, ..PartitionBytes::default() }
        };
        let much = |partitions: &[PartitionBytes]| reads_much(partitions.iter());
        assert!(!much(&[bytes(100, None), bytes(50, None)]));
        assert!(!much(&[bytes(100, Some(90)), bytes(50, Some(45))]));
        assert!(much(&[bytes(100, Some(90)), bytes(50, Some(44))]));
        assert!(much(&[bytes(900, None), bytes(110, Some(0))]));
        assert!(!much(&[]));
    }
}
