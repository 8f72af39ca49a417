//! How the bytes that may be locked are divided among partitions whose weights are read from disk.

use crate::weights::budget::{is_on_host, is_streamed, planned_expert_cache, planned_locked};
use hpp_schema::memory::locked_bytes;
use hpp_schema::{Partition, Plan, Residency};

/// How many bytes of streamed weights are locked in host memory.
#[derive(Debug, Default)]
pub(crate) struct LockedWeights {
    /// Bytes of each partition's weights that may be locked, in the layout of the kernels.
    sizes: Vec<u64>,
    /// Bytes of each partition that are locked at load.
    at_load: Vec<u64>,
}

impl LockedWeights {
    /// Divides `room` bytes among partitions of these sizes. If `room` is more than all sizes together, each partition gets more in proportion, up
    /// to [`in_kernel_layout`], because the layout of the kernels may take more than planned.
    pub fn new(sizes: Vec<u64>, room: u64) -> Self {
        let all = sizes.iter().copied().fold(0, u64::saturating_add);
        let more = u128::from(room.min(in_kernel_layout(all)));
        let scaled = |size: &u64| u128::from(*size).saturating_mul(more) / u128::from(all.max(1));
        let at_load = match room > all {
            true => sizes.iter().map(|size| u64::try_from(scaled(size)).unwrap_or(u64::MAX)).collect(),
            false => locked_bytes(&sizes, room),
        };
        LockedWeights { sizes, at_load }
    }

    /// Locks these bytes of each partition.
    pub fn of_each(at_load: Vec<u64>, sizes: Vec<u64>) -> Self {
        LockedWeights { sizes, at_load }
    }

    /// Bytes of each partition that are locked once the plan is loaded.
    pub fn at_load(&self) -> &[u64] {
        &self.at_load
    }

    /// From now on as many are locked at load.
    pub fn set_at_load(&mut self, at_load: Vec<u64>) {
        self.at_load = at_load;
    }

    /// Bytes that are locked once the plan is loaded.
    pub fn total(&self) -> u64 {
        self.at_load.iter().copied().fold(0, u64::saturating_add)
    }

    /// Bytes to lock of each partition if `total` bytes are locked: as at load if `total` is enough for that, else so that the partition of which
    /// most is read is read as little as possible.
    pub fn divided(&self, total: u64) -> Vec<u64> {
        match total >= self.total() {
            true => self.at_load.clone(),
            false => locked_bytes(&self.sizes, total),
        }
    }
}

/// Bytes of each partition's weights that may be locked on the host, in the layout of the kernels; 0 for those that are not read from disk there.
pub(super) fn lockable_sizes(plan: &Plan, is_fallback: &[bool]) -> Vec<u64> {
    let growth = planned_growth(plan);
    let size = |(partition, is_fallback): (&Partition, &bool)| match partition.bytes.locked.is_some() || *is_fallback {
        true => (growth * lockable(plan, partition).max(planned_locked(partition)) as f64) as u64,
        false => 0,
    };
    plan.partitions.iter().zip(is_fallback).map(size).collect()
}

/// Bytes of a partition's weights without its experts.
pub(super) fn without_experts(partition: &Partition) -> u64 {
    let experts = partition.experts.as_ref().map_or(0, |experts| experts.bytes.0);
    partition.bytes.weights.0.saturating_sub(experts)
}

/// Bytes of a partition's weights that may be locked: without experts, if they are read by demand.
fn lockable(plan: &Plan, partition: &Partition) -> u64 {
    if planned_expert_cache(plan) > 0 { without_experts(partition) } else { partition.bytes.weights.0 }
}

/// Bytes in the layout of the kernels for each byte of the model, as planned for the weights that stay in memory.
fn planned_growth(plan: &Plan) -> f64 {
    let layout = plan.devices.iter().filter_map(|device| device.kernel_layout).map(|bytes| bytes.0).sum::<u64>();
    let held = |partition: &Partition| match is_on_host(plan, &partition.device) && !is_streamed(partition) {
        true if partition.residency == Residency::Resident => partition.bytes.weights.0,
        _ => planned_locked(partition),
    };
    match plan.partitions.iter().map(held).fold(0, u64::saturating_add) {
        0 => 1.0,
        held => 1.0 + layout as f64 / held as f64,
    }
}

/// A generous bound on weights in the layout that kernels want, bytes: half as much more. 4-bit weights in blocks of 32 take a fifth more,
/// in blocks of 16 a third. Bytes that are allowed and not locked go to the cache of experts
/// ([`super::budget`]), so a bound that is too large costs nothing.
pub(super) fn in_kernel_layout(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::{ByteSize, DeviceKind};

    fn plan(sizes: &[(u64, Option<u64>)]) -> Plan {
        let text = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        let mut plan = Plan::from_yaml(text).unwrap();
        plan.devices.iter_mut().for_each(|device| (device.kernel_layout, device.expert_cache) = (None, None));
        let first = plan.partitions.remove(0);
        let of_size = |(weights, locked): &(u64, Option<u64>)| {
            let mut partition = Partition { experts: None, residency: Residency::Streamed, ..first.clone() };
            (partition.bytes.weights, partition.bytes.locked) = (ByteSize(*weights), locked.map(ByteSize));
            partition
        };
        plan.partitions = sizes.iter().map(of_size).collect();
        plan
    }

    #[test]
    fn what_is_streamed_to_a_gpu_takes_nothing_of_what_may_be_locked() {
        let plan = plan(&[(100, Some(50)), (900, None), (100, Some(0)), (300, None)]);
        assert_eq!(lockable_sizes(&plan, &[false; 4]), [100, 0, 100, 0]);
        assert_eq!(lockable_sizes(&plan, &[false, false, false, true]), [100, 0, 100, 300]);
        let locked = LockedWeights::new(lockable_sizes(&plan, &[false; 4]), 60);
        assert_eq!((locked.at_load(), locked.total()), (&[30, 0, 30, 0][..], 60));
        assert_eq!((locked.divided(20), locked.divided(70)), (vec![10, 0, 10, 0], vec![30, 0, 30, 0]));
    }

    #[test]
    fn sizes_are_those_of_the_kernels_layout_and_may_be_larger() {
        let mut plan = plan(&[(100, Some(50)), (300, Some(250))]);
        let host = plan.devices.iter_mut().find(|device| device.kind == DeviceKind::Cpu).unwrap();
        host.kernel_layout = Some(ByteSize(60));
        let sizes = lockable_sizes(&plan, &[false; 2]);
        assert_eq!(sizes, [120, 360], "60 bytes more for the 300 that are locked");
        let locked = |room| LockedWeights::new(sizes.clone(), room).at_load().to_vec();
        assert_eq!((locked(280), locked(480)), (vec![20, 260], vec![120, 360]));
        // The kernels' layout may take more than planned, up to a half.
        assert_eq!((locked(600), locked(u64::MAX)), (vec![150, 450], vec![180, 540]));
    }
}
