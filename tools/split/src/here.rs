//! What this machine has and leaves free: the budgets of a plan where nobody gives any.

use crate::refine::exec;
use hpp_model::HostMemory;
use hpp_schema::ByteSize;
use serde::Deserialize;
use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Part of the free host memory that a plan leaves to other programs.
const HOST_SHARE: u64 = 16;
/// Budgets are multiples of this, so that two plans made one after the other are the same.
const STEP: u64 = 64 << 20;
/// How long `hpp-exec devices` may take.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often it is looked at.
const GLANCE: Duration = Duration::from_millis(5);
/// Where Linux shows that there is a GPU: without any of these, nobody is asked.
const SIGNS_OF_A_GPU: [&str; 4] = ["/sys/class/drm", "/dev/dri", "/dev/nvidiactl", "/dev/dxg"];

/// Memory of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Here {
    /// Of the host, where it is known.
    pub host: Option<HostMemory>,
    /// GPUs that were asked for their memory.
    pub gpus: Vec<Gpu>,
}

/// A GPU that hpp-exec can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// What it is called.
    pub name: String,
    /// Free device memory, where it is known.
    pub free: Option<u64>,
}

impl Here {
    /// Looks at the host, and at GPUs where they are wanted.
    pub fn look(gpus: bool) -> Here {
        Here { host: HostMemory::read(), gpus: if gpus { find_gpus() } else { vec![] } }
    }

    /// Host memory a plan may use where nobody says.
    pub fn ram(&self) -> Option<u64> {
        let available = self.host?.available;
        Some(rounded(available - available / HOST_SHARE))
    }

    /// Device memory a plan may use where nobody says: of the GPUs from the first one on whose memory is known.
    pub fn vram(&self) -> Vec<u64> {
        self.gpus.iter().map_while(|gpu| gpu.free).map(rounded).collect()
    }

    /// What a plan is made for, in one line: the budgets that nobody gave.
    pub fn note(&self, host: bool, gpus: bool) -> Option<String> {
        let human = |bytes: u64| ByteSize(bytes).human();
        let host = self.host.zip(self.ram()).filter(|_| host).map(|(memory, ram)| {
            format!("{} of host memory ({} free of {})", human(ram), human(memory.available), human(memory.total))
        });
        let gpus = gpus.then(|| match (self.vram().as_slice(), self.gpus.first()) {
            ([], None) => "no GPU".to_owned(),
            ([], Some(gpu)) => format!("no GPU, because nothing says how much memory {} has free", gpu.name),
            (vram, _) => {
                let names = self.gpus.iter().zip(vram).map(|(gpu, vram)| format!("{} of {}", human(*vram), gpu.name));
                names.collect::<Vec<_>>().join(" and ")
            }
        });
        let parts: Vec<String> = host.into_iter().chain(gpus).collect();
        let flags = "--ram and --vram say otherwise";
        (!parts.is_empty()).then(|| format!("planning for this machine: {}; {flags}", parts.join(" and ")))
    }
}

/// Down to a size that reads well, and that two runs agree on.
fn rounded(bytes: u64) -> u64 {
    if bytes > 16 * STEP { bytes / STEP * STEP } else { bytes >> 20 << 20 }
}

/// GPUs of this machine in the order of plans; none where there is no sign of any, or hpp-exec is not there to ask.
fn find_gpus() -> Vec<Gpu> {
    let there = !cfg!(target_os = "linux") || SIGNS_OF_A_GPU.iter().any(|path| Path::new(path).exists());
    if !there && std::env::var_os(crate::refine::EXEC).is_none() {
        return vec![];
    }
    exec().ok().and_then(|exec| ask(&exec)).map(|found| found.gpus()).unwrap_or_default()
}

/// The part of `hpp-exec devices --json` that is needed here.
#[derive(Debug, Deserialize)]
struct Found {
    providers: Vec<Provider>,
}

#[derive(Debug, Deserialize)]
struct Provider {
    usable: bool,
    devices: Vec<Device>,
}

#[derive(Debug, Deserialize)]
struct Device {
    plan_name: String,
    description: String,
    memory_free: Option<u64>,
}

impl Found {
    /// `gpu0`, `gpu1`, ...: of providers that share a device the first, which plans prefer.
    fn gpus(&self) -> Vec<Gpu> {
        let usable = || self.providers.iter().filter(|provider| provider.usable).flat_map(|p| &p.devices);
        let named = |name: String| usable().find(|device| device.plan_name == name);
        let gpu = |device: &Device| Gpu { name: device.description.clone(), free: device.memory_free };
        (0..).map_while(|number| named(format!("gpu{number}")).map(gpu)).collect()
    }
}

/// What hpp-exec finds here; nothing where it fails or takes too long.
fn ask(exec: &Path) -> Option<Found> {
    let mut child = Command::new(exec)
        .args(["devices", "--json"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut out = child.stdout.take()?;
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        out.read_to_end(&mut text).map(|_| text)
    });
    ended(child)?;
    serde_json::from_slice(&reader.join().ok()?.ok()?).ok()
}

fn ended(mut child: Child) -> Option<()> {
    let begun = Instant::now();
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return status.success().then_some(()),
            Ok(None) if begun.elapsed() < PATIENCE => std::thread::sleep(GLANCE),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpus_are_those_of_usable_providers_in_the_order_of_plans() {
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
        let found: Found = serde_json::from_str(&text).unwrap();
        let here = Here { host: None, gpus: found.gpus() };
        assert_eq!(here.gpus.len(), 2);
        assert_eq!(here.vram(), [12 << 30], "memory that is not known is no budget");
        assert!(here.note(false, true).unwrap().contains("12 GiB of gpu0 card"));
    }

    #[test]
    fn some_memory_is_left_to_others() {
        let host = HostMemory { total: 32 << 30, available: 16 << 30 };
        let here = Here { host: Some(host), gpus: vec![] };
        assert_eq!(here.ram(), Some(15 << 30));
        let note = here.note(true, true).unwrap();
        assert!(note.contains("15 GiB of host memory (16 GiB free of 32 GiB) and no GPU"), "{note}");
        assert_eq!(here.note(false, false), None);
        assert_eq!(Here::default().ram(), None);
        assert_eq!(rounded(100_000_000), 95 << 20);
    }
}
