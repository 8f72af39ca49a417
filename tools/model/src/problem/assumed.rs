//! The machine that is assumed where nobody says: a desktop with two-channel memory and mid-range cards on PCIe 4.0. Round
//! numbers that order placements correctly, not a promise.

use hpp_schema::{ByteSize, CpuRates, GpuRates, Link, MACHINE_VERSION, Machine, Provider};

/// Starting a partition, microseconds. Measured were 80 to 100 on two server cores of the 2 GHz class; a desktop core is half
/// as fast again, as `fixtures/machines/rtx4090-desktop.yaml` has it.
const LAUNCH_US: f64 = 60.0;

/// A solid-state disk of the cheaper kind.
pub const DISK_GB_PER_S: f64 = 2.0;

/// With this many accelerators. Memory is as large as anyone likes: budgets alone limit it.
pub fn machine(gpus: usize) -> Machine {
    let gpu = |index| GpuRates {
        name: format!("gpu{index}"),
        provider: Provider::Cuda,
        memory: ByteSize(u64::MAX),
        memory_gb_per_s: 450.0,
        tflops: 30.0,
        launch_us: LAUNCH_US,
        link: Link { to_device_gb_per_s: 20.0, from_device_gb_per_s: 20.0, latency_us: 10.0 },
        contention: None,
    };
    Machine {
        hpp_machine: MACHINE_VERSION,
        name: "assumed".to_owned(),
        sources: vec![],
        cpu: CpuRates { memory: ByteSize(u64::MAX), memory_gb_per_s: 30.0, tflops: 0.2, launch_us: LAUNCH_US },
        gpus: (0..gpus).map(gpu).collect(),
        disk: None,
    }
}
