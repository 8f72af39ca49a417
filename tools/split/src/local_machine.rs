//! Free memory of this machine: the default budgets of a plan.

use crate::exec::{EXEC, find_exec, wait};
use hpp_model::HostMemory;
use hpp_schema::ByteSize;
use serde::Deserialize;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// Fraction (1/16) of the free host memory that a plan leaves to other programs.
const HOST_RESERVE: u64 = 16;
/// Default budgets above 16 steps are multiples of this, so that two plans made in succession are equal.
const STEP: u64 = 64 << 20;
/// Time limit of `hpp-exec devices`.
const TIMEOUT: Duration = Duration::from_secs(20);
/// Interval at which it is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Paths that exist on Linux machines with a GPU. Without any of them hpp-exec is not started.
const GPU_PATHS: [&str; 4] = ["/sys/class/drm", "/dev/dri", "/dev/nvidiactl", "/dev/dxg"];

/// Memory of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalMachine {
    /// Host memory, where known.
    pub host: Option<HostMemory>,
    /// Usable GPUs, if they were queried.
    pub gpus: Vec<LocalGpu>,
}

/// A GPU that hpp-exec can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LocalGpu {
    /// Its name.
    pub name: String,
    /// Free device memory, bytes, where known.
    pub free: Option<u64>,
}

impl LocalMachine {
    /// Reads the host's memory, and queries hpp-exec for GPUs if `query_gpus`. On Windows hpp-exec also knows the limits of the job that both
    /// run in.
    pub fn detect(query_gpus: bool) -> LocalMachine {
        let report = if query_gpus || cfg!(windows) { query_exec() } else { None };
        let gpus = report.as_ref().filter(|_| query_gpus).map(DevicesReport::gpus).unwrap_or_default();
        let limit = report.as_ref().and_then(DevicesReport::host);
        LocalMachine { host: HostMemory::read().map(|host| limited(host, limit)), gpus }
    }

    /// The default host budget, bytes.
    pub fn ram(&self) -> Option<u64> {
        let available = self.host?.available;
        Some(rounded_down(available - available / HOST_RESERVE))
    }

    /// The default device budgets, bytes: the first GPUs, up to the first whose free memory is unknown.
    pub fn vram(&self) -> Vec<u64> {
        self.gpus.iter().map_while(|gpu| gpu.free).map(rounded_down).collect()
    }

    /// One line with the default budgets of the host and the GPUs that are used.
    pub fn note(&self, host: bool, gpus: bool) -> Option<String> {
        let human = |bytes: u64| ByteSize(bytes).human();
        let host = self.host.zip(self.ram()).filter(|_| host).map(|(memory, ram)| {
            format!("{} of host memory ({} free of {})", human(ram), human(memory.available), human(memory.total))
        });
        let gpus = gpus.then(|| match (self.vram().as_slice(), self.gpus.first()) {
            ([], None) => "no GPU".to_owned(),
            ([], Some(gpu)) => format!("no GPU, because the free memory of {} is unknown", gpu.name),
            (vram, _) => {
                let names = self.gpus.iter().zip(vram).map(|(gpu, vram)| format!("{} of {}", human(*vram), gpu.name));
                names.collect::<Vec<_>>().join(" and ")
            }
        });
        let options: Vec<&str> = host.iter().map(|_| "--ram").chain(gpus.iter().map(|_| "--vram")).collect();
        let options = options.join(" and ");
        let parts: Vec<String> = host.into_iter().chain(gpus).collect();
        (!parts.is_empty())
            .then(|| format!("planning for this machine: {}; {options} for another plan", parts.join(" and ")))
    }
}

/// Rounds down to a multiple of 64 MiB, or of 1 MiB up to 1 GiB.
fn rounded_down(bytes: u64) -> u64 {
    if bytes > 16 * STEP { bytes / STEP * STEP } else { bytes >> 20 << 20 }
}

/// The smaller of two views of the same memory.
fn limited(host: HostMemory, limit: Option<HostMemory>) -> HostMemory {
    limit.map_or(host, |limit| HostMemory {
        total: host.total.min(limit.total),
        available: host.available.min(limit.available),
    })
}

/// What hpp-exec knows of this machine; `None` if there is no sign of a GPU (on Linux), or hpp-exec is missing or fails.
fn query_exec() -> Option<DevicesReport> {
    let may_have_gpu = !cfg!(target_os = "linux") || GPU_PATHS.iter().any(|path| Path::new(path).exists());
    if !may_have_gpu && std::env::var_os(EXEC).is_none() {
        return None;
    }
    let exec = find_exec().ok();
    let report = exec.as_deref().and_then(query);
    tracing::info!(?exec, answered = report.is_some(), "hpp-exec asked for devices");
    report
}

/// The fields of `hpp-exec devices --json` that planning uses.
#[derive(Debug, Deserialize)]
struct DevicesReport {
    #[serde(default)]
    memory_total: Option<u64>,
    #[serde(default)]
    memory_available: Option<u64>,
    providers: Vec<ReportedProvider>,
}

#[derive(Debug, Deserialize)]
struct ReportedProvider {
    usable: bool,
    devices: Vec<ReportedDevice>,
}

#[derive(Debug, Deserialize)]
struct ReportedDevice {
    plan_name: String,
    description: String,
    memory_free: Option<u64>,
}

impl DevicesReport {
    /// The host's memory, within the limits of this process.
    fn host(&self) -> Option<HostMemory> {
        Some(HostMemory { total: self.memory_total?, available: self.memory_available? })
    }

    /// `gpu0`, `gpu1`, ...: where providers share a device, that of the first provider, which plans prefer.
    fn gpus(&self) -> Vec<LocalGpu> {
        let usable = || self.providers.iter().filter(|provider| provider.usable).flat_map(|p| &p.devices);
        let named = |name: String| usable().find(|device| device.plan_name == name);
        let gpu = |device: &ReportedDevice| LocalGpu { name: device.description.clone(), free: device.memory_free };
        (0..).map_while(|number| named(format!("gpu{number}")).map(gpu)).collect()
    }
}

/// Runs `hpp-exec devices`; `None` if it fails or takes too long.
fn query(exec: &Path) -> Option<DevicesReport> {
    let mut child = Command::new(exec)
        .args(["devices", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut out = child.stdout.take()?;
    // Read concurrently: the child blocks once the pipe is full.
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text).map(|_| text)
    });
    let started = Instant::now();
    let status = wait(child, POLL_INTERVAL, || started.elapsed() >= TIMEOUT).ok()??;
    status.success().then_some(())?;
    serde_json::from_slice(&reader.join().ok()?.ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_come_from_usable_providers_in_plan_order() {
        let device = |name: &str, free: &str| {
            format!(r#"{{"plan_name":"{name}","description":"{name} card","memory_total":9,"memory_free":{free}}}"#)
        };
        let text = format!(
            r#"{{"providers":[{{"name":"CUDA","usable":true,"devices":[{},{}]}},{{"name":"WebGPU","usable":false,"devices":[{}]}},
               {{"name":"CPU","usable":true,"devices":[{}]}}]}}"#,
            device("gpu1", "null"),
            device("gpu0", "12884901888"),
            device("gpu2", "1"),
            device("cpu", "2")
        );
        let report: DevicesReport = serde_json::from_str(&text).unwrap();
        assert_eq!(report.host(), None, "hpp-exec does not know the memory");
        let local = LocalMachine { host: None, gpus: report.gpus() };
        assert_eq!(local.gpus.len(), 2);
        assert_eq!(local.vram(), [12 << 30], "unknown memory gives no budget");
        assert!(local.note(false, true).unwrap().contains("12 GiB of gpu0 card"));
    }

    #[test]
    fn limits_that_only_hpp_exec_knows_count() {
        let text = r#"{"memory_total":100,"memory_available":60,"providers":[]}"#;
        let report: DevicesReport = serde_json::from_str(text).unwrap();
        let memory = |total, available| HostMemory { total, available };
        assert_eq!(limited(memory(90, 70), report.host()), memory(90, 60));
        assert_eq!(limited(memory(90, 70), None), memory(90, 70));
    }

    #[test]
    fn a_sixteenth_of_the_host_memory_is_reserved() {
        let host = HostMemory { total: 32 << 30, available: 16 << 30 };
        let local = LocalMachine { host: Some(host), gpus: vec![] };
        assert_eq!(local.ram(), Some(15 << 30));
        let note = local.note(true, true).unwrap();
        assert!(note.contains("15 GiB of host memory (16 GiB free of 32 GiB) and no GPU"), "{note}");
        assert_eq!(local.note(false, false), None);
        assert_eq!(LocalMachine::default().ram(), None);
        assert_eq!(rounded_down(100_000_000), 95 << 20);
    }
}
