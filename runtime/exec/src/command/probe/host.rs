//! The machine and the software versions, as a profile records them.

use hpp_backend::SystemReport;
use hpp_schema::{ByteSize, Host, HostDevice, Provider};

/// The host as ONNX Runtime and the system report it, without providers that cannot be used.
pub(super) fn describe(report: &SystemReport) -> Host {
    let usable = report.providers.iter().filter(|provider| provider.problem.is_none());
    let devices = usable.flat_map(|provider| {
        provider.devices.iter().map(|device| HostDevice {
            provider: provider.provider,
            name: device.description.clone(),
            memory: device.total.map(ByteSize),
        })
    });
    let cpu_provider = report.providers.iter().find(|provider| provider.provider == Provider::CPU);
    let cpu = cpu_provider.and_then(|provider| provider.devices.first()).map(|device| device.description.clone());
    Host {
        cpu: cpu.unwrap_or_default(),
        cores: u32::try_from(report.cores).unwrap_or(u32::MAX),
        memory: ByteSize(report.memory.0.unwrap_or(0)),
        system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        threads: u32::try_from(report.threads).unwrap_or(u32::MAX),
        onnxruntime: report.version.clone(),
        hpp: env!("CARGO_PKG_VERSION").to_owned(),
        devices: devices.collect(),
    }
}
