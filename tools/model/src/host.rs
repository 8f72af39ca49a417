//! Identifies this machine, to check whether a profile was measured on it.

use crate::memory::kibibytes;
use hpp_schema::{ByteSize, Host};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// Fraction (1/16) by which the reported memory of one machine may vary: kernels reserve different amounts.
const MEMORY_TOLERANCE: u64 = 16;

/// Properties that identify a machine. Invariant: read in the same way as by `hpp-exec probe`, which records them in a
/// profile.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThisHost {
    /// Model name of the processor, else the architecture.
    pub cpu: String,
    /// Physical cores, else hardware threads.
    pub cores: u32,
    /// Memory; 0 if unknown.
    pub memory: ByteSize,
    /// Operating system and architecture: `linux x86_64`.
    pub system: String,
}

/// What a system without procfs says about itself.
#[derive(Default)]
struct Identity {
    cpu: Option<String>,
    cores: Option<u32>,
    memory: Option<u64>,
}

impl Identity {
    /// Reads it on Windows and macOS.
    #[cfg(not(target_os = "linux"))]
    fn portable() -> Identity {
        use sysinfo::{CpuRefreshKind, MemoryRefreshKind, RefreshKind, System};
        let read = RefreshKind::nothing().with_cpu(CpuRefreshKind::nothing());
        let system = System::new_with_specifics(read.with_memory(MemoryRefreshKind::nothing().with_ram()));
        let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
        let cores = System::physical_core_count().and_then(|cores| u32::try_from(cores).ok());
        Identity {
            cpu: brand.filter(|brand| !brand.is_empty()),
            cores: cores.filter(|cores| *cores > 0),
            memory: Some(system.total_memory()).filter(|bytes| *bytes > 0),
        }
    }

    #[cfg(target_os = "linux")]
    fn portable() -> Identity {
        Identity::default()
    }
}

impl ThisHost {
    /// The machine this process runs on.
    pub fn read() -> ThisHost {
        let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let known = Identity::portable();
        ThisHost {
            cpu: known.cpu.unwrap_or_else(|| cpu_name(&text("/proc/cpuinfo"))),
            cores: known.cores.or_else(|| physical_cores(Path::new("/sys/devices/system/cpu"))).unwrap_or_else(threads),
            memory: ByteSize(known.memory.or_else(|| kibibytes(&text("/proc/meminfo"), "MemTotal")).unwrap_or(0)),
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
        }
    }

    /// Differences from the machine that a profile records; empty if there are none.
    pub fn differences(&self, other: &Host) -> Vec<String> {
        let mut found = Vec::new();
        let mut differ = |what: &str, here: &dyn std::fmt::Display, there: &dyn std::fmt::Display| {
            found.push(format!("{what} is {here} here and {there} in the profile"));
        };
        if self.cpu != other.cpu {
            differ("the processor", &self.cpu, &other.cpu);
        }
        if self.cores != other.cores {
            differ("the number of cores", &self.cores, &other.cores);
        }
        if self.memory.0.abs_diff(other.memory.0) > self.memory.0.max(other.memory.0) / MEMORY_TOLERANCE {
            differ("memory", &self.memory.human(), &other.memory.human());
        }
        if self.system != other.system {
            differ("the system", &self.system, &other.system);
        }
        found
    }
}

fn cpu_name(cpuinfo: &str) -> String {
    let mut pairs = cpuinfo.lines().filter_map(|line| line.split_once(':'));
    let name = pairs.find(|(key, _)| key.trim() == "model name").map(|(_, name)| name.trim());
    name.unwrap_or(std::env::consts::ARCH).to_owned()
}

/// The number of distinct (package, core) pairs below `/sys/devices/system/cpu`.
fn physical_cores(dir: &Path) -> Option<u32> {
    let mut seen = BTreeSet::new();
    for entry in fs::read_dir(dir).ok()?.flatten() {
        let number =
            |name: &str| fs::read_to_string(entry.path().join("topology").join(name)).ok()?.trim().parse::<i64>().ok();
        seen.extend(number("physical_package_id").zip(number("core_id")));
    }
    u32::try_from(seen.len()).ok().filter(|cores| *cores > 0)
}

fn threads() -> u32 {
    std::thread::available_parallelism().map_or(1, |threads| u32::try_from(threads.get()).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn as_profiled(of: &ThisHost) -> Host {
        let ThisHost { cpu, cores, memory, system } = of.clone();
        Host { cpu, cores, memory, system, threads: 1, onnxruntime: String::new(), hpp: String::new(), devices: vec![] }
    }

    #[test]
    fn a_machine_equals_itself() {
        let here = ThisHost::read();
        assert!(here.cores > 0 && !here.cpu.is_empty());
        assert_eq!(here.differences(&as_profiled(&ThisHost::read())), Vec::<String>::new());
    }

    #[test]
    fn every_difference_is_named_and_a_little_memory_is_tolerated() {
        let here = ThisHost { memory: ByteSize(32 << 30), ..ThisHost::read() };
        let mut there = as_profiled(&here);
        there.memory.0 -= 1 << 30;
        assert_eq!(here.differences(&there), Vec::<String>::new());
        there.memory.0 /= 2;
        there.cores += 1;
        there.cpu.push('x');
        there.system = "plan9 mips".into();
        assert_eq!(here.differences(&there).len(), 4);
    }

    #[test]
    fn the_processor_name_is_read_from_cpuinfo() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU: 2 GHz\nflags\t\t: fpu\n";
        assert_eq!(cpu_name(cpuinfo), "Some CPU: 2 GHz");
        assert_eq!(cpu_name(""), std::env::consts::ARCH);
    }

    #[test]
    fn hardware_threads_of_a_core_count_once() {
        let dir = tempfile::tempdir().unwrap();
        for (cpu, package, core) in [(0, 0, 0), (1, 0, 0), (2, 0, 1), (3, 1, 0)] {
            let topology = dir.path().join(format!("cpu{cpu}/topology"));
            fs::create_dir_all(&topology).unwrap();
            fs::write(topology.join("physical_package_id"), format!("{package}\n")).unwrap();
            fs::write(topology.join("core_id"), format!("{core}\n")).unwrap();
        }
        fs::create_dir(dir.path().join("cpufreq")).unwrap();
        assert_eq!(physical_cores(dir.path()), Some(3));
        assert_eq!(physical_cores(&dir.path().join("none")), None);
    }
}
