//! Total and available memory of this machine, or of the control group that limits this process.

use std::fs;
use std::path::{Path, PathBuf};

/// Memory of the host, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Installed memory, or the limit of the control group.
    pub total: u64,
    /// Memory that a program can still allocate without swapping.
    pub available: u64,
}

impl HostMemory {
    /// Reads it for this process; `None` if the system does not report it.
    pub fn read() -> Option<HostMemory> {
        HostMemory::under(Path::new("/")).or_else(HostMemory::portable)
    }

    /// Reads it on Windows and macOS. Limits of a job object (Windows) are not considered.
    #[cfg(not(target_os = "linux"))]
    fn portable() -> Option<HostMemory> {
        let memory = sysinfo::MemoryRefreshKind::nothing().with_ram();
        let system = sysinfo::System::new_with_specifics(sysinfo::RefreshKind::nothing().with_memory(memory));
        let (total, available) = (system.total_memory(), system.available_memory());
        (total > 0 && available > 0).then_some(HostMemory { total, available })
    }

    #[cfg(target_os = "linux")]
    fn portable() -> Option<HostMemory> {
        None
    }

    /// Like [`read`](Self::read), but with `/proc` and `/sys` below `root`.
    fn under(root: &Path) -> Option<HostMemory> {
        let info = fs::read_to_string(root.join("proc/meminfo")).ok()?;
        let machine = HostMemory { total: kibibytes(&info, "MemTotal")?, available: kibibytes(&info, "MemAvailable")? };
        let groups = fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
        let limits = groups.lines().flat_map(|line| enclosing_groups(root, line)).filter_map(|group| group.memory());
        let smaller = |a: HostMemory, b: HostMemory| HostMemory {
            total: a.total.min(b.total),
            available: a.available.min(b.available),
        };
        Some(limits.fold(machine, smaller))
    }
}

/// Bytes of a field of `/proc/meminfo`. (The `procfs` crate refuses the whole file if any other field is missing, as in
/// some sandboxes.)
pub(crate) fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// A control group, with the file names of its version.
struct ControlGroup {
    dir: PathBuf,
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
}

/// The group that a line of `/proc/self/cgroup` names, and its ancestors. Version 1 has one line per controller,
/// version 2 one line without a controller.
fn enclosing_groups(root: &Path, line: &str) -> Vec<ControlGroup> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { return vec![] };
    let (mount, limit, usage, cache) = match controllers {
        "" => ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        _ if controllers.split(',').any(|name| name == "memory") => {
            ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        }
        _ => return vec![],
    };
    let group = |path: &Path| ControlGroup {
        dir: root.join(mount).join(path.strip_prefix("/").unwrap_or(path)),
        limit,
        usage,
        cache,
    };
    Path::new(path).ancestors().map(group).collect()
}

impl ControlGroup {
    /// `None` if the group has no limit.
    fn memory(&self) -> Option<HostMemory> {
        let text = |name: &str| fs::read_to_string(self.dir.join(name)).ok();
        // Without a limit the file contains `max`, which is not a number.
        let total = text(self.limit)?.trim().parse::<u64>().ok()?;
        let used = text(self.usage).and_then(|text| text.trim().parse::<u64>().ok()).unwrap_or(0);
        // The kernel reclaims the page cache under memory pressure.
        let stat = text("memory.stat").unwrap_or_default();
        let cache = stat.lines().filter_map(|line| line.split_once(' ')).find(|(name, _)| *name == self.cache);
        let cache = cache.and_then(|(_, bytes)| bytes.trim().parse::<u64>().ok()).unwrap_or(0);
        Some(HostMemory { total, available: total.saturating_sub(used.saturating_sub(cache)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> Option<HostMemory> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        HostMemory::under(dir.path())
    }

    const INFO: (&str, &str) = ("proc/meminfo", "MemTotal:  8192 kB\nMemFree: 1 kB\nMemAvailable:  4096 kB\n");

    #[test]
    fn without_a_limit_it_is_the_systems() {
        let plain = Some(HostMemory { total: 8192 << 10, available: 4096 << 10 });
        assert_eq!(machine(&[INFO]), plain);
        // No limit: version 2 has the word `max`, version 1 a huge number.
        let group = ("proc/self/cgroup", "0::/user/app\n");
        assert_eq!(machine(&[INFO, group, ("sys/fs/cgroup/user/app/memory.max", "max\n")]), plain);
        let group = ("proc/self/cgroup", "4:memory:/\n2:cpu,cpuacct:/x\n");
        let unlimited = ("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(machine(&[INFO, group, unlimited]), plain);
        assert_eq!(machine(&[]), None);
    }

    #[test]
    fn limits_of_this_group_and_its_ancestors_count() {
        let mib = |total: u64, available: u64| Some(HostMemory { total: total << 20, available: available << 20 });
        let two = [
            INFO,
            ("proc/self/cgroup", "0::/user/app\n"),
            ("sys/fs/cgroup/user/memory.max", "3145728\n"),
            ("sys/fs/cgroup/user/memory.current", "2097152\n"),
            // 1 MiB of the 2 MiB in use is cache.
            ("sys/fs/cgroup/user/memory.stat", "anon 1048576\ninactive_file 1048576\n"),
            ("sys/fs/cgroup/user/app/memory.max", "max\n"),
        ];
        assert_eq!(machine(&two), mib(3, 2));
        let one = [
            INFO,
            ("proc/self/cgroup", "4:memory:/box\n"),
            ("sys/fs/cgroup/memory/box/memory.limit_in_bytes", "2097152\n"),
            ("sys/fs/cgroup/memory/box/memory.usage_in_bytes", "1048576\n"),
        ];
        assert_eq!(machine(&one), mib(2, 1));
    }

    #[test]
    fn meminfo_fields_are_in_kibibytes() {
        assert_eq!(kibibytes("MemTotal:       24576000 kB\nMemFree: 1 kB\n", "MemTotal"), Some(24576000 * 1024));
        assert_eq!(kibibytes("MemTotal: many\n", "MemTotal"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        if let Some(memory) = HostMemory::read() {
            assert!(memory.available <= memory.total && memory.total > 0, "{memory:?}");
        }
    }
}
