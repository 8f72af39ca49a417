//! The machine that is assumed where nobody says: a desktop with two-channel memory and mid-range cards on PCIe 4.0. Round
//! numbers that order placements correctly, not a promise. Starting a partition is taken at a fifth of what it was measured to
//! cost on a slow host, so that small models are still split where there is a budget for it.

use hpp_schema::{ByteSize, CpuRates, GpuRates, Link, MACHINE_VERSION, Machine, Provider};

/// With this many accelerators. Memory is as large as anyone likes: budgets alone limit it.
pub fn machine(gpus: usize) -> Machine {
    let gpu = |index| GpuRates {
        name: format!("gpu{index}"),
        provider: Provider::Cuda,
        memory: ByteSize(u64::MAX),
        memory_gb_per_s: 450.0,
        tflops: 30.0,
        launch_us: 20.0,
        link: Link { to_device_gb_per_s: 20.0, from_device_gb_per_s: 20.0, latency_us: 10.0 },
        contention: None,
    };
    Machine {
        hpp_machine: MACHINE_VERSION,
        name: "assumed".to_owned(),
        sources: vec![],
        cpu: CpuRates { memory: ByteSize(u64::MAX), memory_gb_per_s: 30.0, tflops: 0.2, launch_us: 20.0 },
        gpus: (0..gpus).map(gpu).collect(),
        disk: None,
    }
}
