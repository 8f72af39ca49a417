//! What engines need of each memory.

use std::collections::BTreeMap;

/// Bytes of each memory: what an engine needs, or what all engines may take.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryNeeds {
    /// Host memory, bytes, without what the process takes by itself.
    pub host: u64,
    /// Memory of devices by name, bytes. As a budget: a device that is missing has no limit.
    pub devices: BTreeMap<String, u64>,
}

impl MemoryNeeds {
    /// The sum of both needs.
    pub(super) fn plus(mut self, other: &MemoryNeeds) -> MemoryNeeds {
        self.host = self.host.saturating_add(other.host);
        for (device, bytes) in &other.devices {
            let sum = self.devices.entry(device.clone()).or_default();
            *sum = sum.saturating_add(*bytes);
        }
        self
    }

    /// Whether they are within a budget.
    pub fn fits(&self, budget: &MemoryNeeds) -> bool {
        let fits = |(device, bytes): (&String, &u64)| budget.devices.get(device).is_none_or(|most| bytes <= most);
        self.host <= budget.host && self.devices.iter().all(fits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_memory_has_its_limit() {
        let on = |host, device: u64| MemoryNeeds { host, devices: BTreeMap::from([("gpu0".to_owned(), device)]) };
        let budget = on(10, 20);
        assert!(on(4, 15).fits(&budget) && on(6, 5).fits(&budget));
        assert!(on(4, 15).plus(&on(6, 5)).fits(&budget));
        assert!(!on(4, 15).plus(&on(4, 6)).fits(&budget), "the device is full");
        assert!(!on(7, 1).plus(&on(4, 1)).fits(&budget), "the host is full");
        let other = MemoryNeeds { host: 1, devices: BTreeMap::from([("gpu1".to_owned(), 99)]) };
        assert!(other.fits(&budget), "no limit is known");
    }
}
