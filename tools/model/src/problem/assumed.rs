//! The machine that is assumed without a profile or machine file: a desktop with two-channel memory and mid-range GPUs
//! on PCIe 4.0. Round numbers that rank placements correctly; they do not predict absolute times.

use hpp_schema::{ByteSize, CpuRates, GpuRates, Link, MACHINE_VERSION, Machine, Provider};

/// Launch of a partition, microseconds. Two server cores of the 2 GHz class measured 80 to 100; a desktop core is 1.5
/// times as fast, as in `fixtures/machines/rtx4090-desktop.yaml`.
const LAUNCH_US: f64 = 60.0;

/// Read rate of a low-end solid-state disk, 1e9 bytes per second.
pub const DISK_GB_PER_S: f64 = 2.0;

/// What a read costs beside its bytes, milliseconds, with many reads in flight. A virtual machine's disk measured 0.006 with 64 and
/// 0.013 with 8 in flight.
pub const DISK_REQUEST_MS: f64 = 0.01;

/// Decompression of weights by one thread, 1e9 uncompressed bytes per second. Server cores of 2.4 GHz measured 7 to 9.
pub const DECOMPRESS_GB_PER_S: f64 = 6.0;

/// The machine with `gpus` GPUs. Its memory is unlimited, so that only budgets apply.
pub fn machine(gpus: usize) -> Machine {
    let gpu = |index| GpuRates {
        name: format!("gpu{index}"),
        provider: Provider::CUDA,
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
