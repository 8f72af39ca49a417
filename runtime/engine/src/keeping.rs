//! What of the weights stays in host memory: as the plan says, or less where this process may use less than the plan was made for.

use crate::error::EngineError;
use crate::options::WeightReads;
use crate::port::{Backend, Keep};
use crate::reporter::Reporter;
use hpp_schema::{ByteSize, DeviceKind, Partition, Plan, Residency};

/// How the weights of each partition are kept.
pub(crate) struct Keeping<'a> {
    plan: &'a Plan,
    reads: WeightReads,
    /// The part of the plan's locked bytes that stays locked.
    share: f64,
}

impl<'a> Keeping<'a> {
    /// As the plan says; where the system gives this process less memory than that, less is locked. Refuses where even
    /// nothing locked would not do.
    pub fn new<B: Backend>(
        plan: &'a Plan,
        backend: &B,
        reads: WeightReads,
        reporter: &dyn Reporter,
    ) -> Result<Self, EngineError> {
        let keeping = Keeping { plan, reads, share: 1.0 };
        let locked: u64 =
            plan.partitions.iter().filter_map(|partition| partition.bytes.locked).map(|bytes| bytes.0).sum();
        let streams = reads != WeightReads::ByTheSystem && plan.partitions.iter().any(is_streamed);
        let planned = plan.budgets.ram.map(|ram| ram.0).filter(|_| streams);
        let Some((planned, limit)) = planned.zip(backend.memory_limit()).filter(|(planned, limit)| limit < planned)
        else {
            return Ok(keeping);
        };
        let human = |bytes: u64| ByteSize(bytes).human();
        let Some(left) = locked.checked_sub(planned - limit) else {
            let needed = planned - locked;
            return Err(EngineError::TooLittleMemory { planned, limit, needed });
        };
        reporter.warning(&format!(
            "the plan was made for {} of host memory and this process may use {}: {} of weights stay in memory instead of {}",
            human(planned),
            human(limit),
            human(left),
            human(locked)
        ));
        Ok(Keeping { share: left as f64 / locked as f64, ..keeping })
    }

    /// Where a partition's weights are while it does not run.
    pub fn of(&self, partition: &Partition) -> Keep {
        let bytes = &partition.bytes;
        match partition.residency {
            Residency::Streamed if is_on_host(self.plan, partition) && self.reads == WeightReads::ByTheSystem => {
                Keep::Mapped { rows: false }
            }
            Residency::Streamed if is_on_host(self.plan, partition) => {
                let locked = bytes.locked.map_or(0, |locked| locked.0) as f64;
                Keep::Streamed { locked: (self.share * locked) as u64 }
            }
            Residency::Mapped => Keep::Mapped { rows: self.reads != WeightReads::ByTheSystem },
            Residency::Resident | Residency::Streamed => Keep::InMemory,
        }
    }

    /// Most bytes of weights on their way that lie in memory at once; 0 where each partition's are read when it is about to run.
    pub fn window(&self) -> u64 {
        if self.reads == WeightReads::OnTime {
            return 0;
        }
        let host = self.plan.devices.iter().find(|device| device.kind == DeviceKind::Cpu);
        host.and_then(|host| host.window).map_or(0, |window| window.0)
    }

    /// Says so where more memory is used than the plan was made for.
    pub fn check<B: Backend>(&self, backend: &B, reporter: &dyn Reporter) {
        let planned = self.plan.budgets.ram.map(|ram| ram.0);
        let used = backend.memory_use().resident;
        if let Some((planned, used)) = planned.zip(used).filter(|(planned, used)| used > planned) {
            reporter.warning(&format!(
                "{} of host memory are in use after loading, and the plan was made for {}",
                ByteSize(used).human(),
                ByteSize(planned).human()
            ));
        }
    }
}

fn is_streamed(partition: &Partition) -> bool {
    partition.residency == Residency::Streamed
}

fn is_on_host(plan: &Plan, partition: &Partition) -> bool {
    plan.devices.iter().any(|device| device.name == partition.device && device.kind == DeviceKind::Cpu)
}
