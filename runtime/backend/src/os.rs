//! Operating system services: lazily allocated pages, memory limits and use, processor description.
//!
//! Linux: procfs, sysfs and control groups. Windows and macOS: the crate `sysinfo`, and on Windows the limits of job objects (`windows`).
//! A function without a counterpart there says so.

mod pages;
pub(crate) use pages::Pages;

#[cfg(not(target_os = "linux"))]
mod non_linux;
#[cfg(windows)]
mod windows;

/// Returns free heap pages to the system (glibc only).
pub(crate) fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: frees only pages without allocations.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Blocks of at least this many bytes get a mapping of their own, which the system takes back when they are freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const OWN_MAPPING: libc::c_int = 128 << 10;

/// Keeps large temporary blocks out of the heap (glibc only).
///
/// By default glibc raises its mmap threshold up to 32 MiB as large blocks are freed. Later blocks below it come from the heap, and before
/// version 2.38 an aligned block does not reuse the space of a freed one of its size: kernels' scratch memory left 1 MiB of unused heap in
/// each of 192 partitions. Setting the threshold fixes it.
pub(crate) fn map_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: `mallopt` takes the allocator's lock and changes only how later blocks are allocated.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, OWN_MAPPING);
    }
}

/// The peak and the current resident set size of this process in bytes, where the system reports them.
pub(crate) fn resident() -> (Option<u64>, Option<u64>) {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        (kibibytes(&status, "VmHWM:"), kibibytes(&status, "VmRSS:"))
    }
    #[cfg(not(target_os = "linux"))]
    {
        (non_linux::peak_resident(), non_linux::resident())
    }
}

/// This machine's memory in bytes, total and available, where the system reports it.
pub fn machine_memory() -> (Option<u64>, Option<u64>) {
    #[cfg(target_os = "linux")]
    {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        (kibibytes(&info, "MemTotal:"), kibibytes(&info, "MemAvailable:"))
    }
    #[cfg(not(target_os = "linux"))]
    {
        non_linux::machine_memory()
    }
}

/// The memory limit of this process in bytes: the least of the machine's memory and its control groups' or job's limits; `None` if
/// unknown.
pub fn memory_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let files = limit_files(&groups);
    let limit = |path: &String| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = files.iter().filter_map(limit).chain(machine_memory().0);
    limits.chain(job().map(|job| job.limit)).min()
}

/// The resident set size of this process in bytes; 0 where the system does not report it.
pub fn resident_memory() -> u64 {
    resident().1.unwrap_or(0)
}

/// The memory in bytes that this process can still allocate: the least of the machine's available memory and what each control group's
/// limit leaves, reclaimable page cache included, or what its job leaves; `None` if unknown.
pub fn available_memory() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let left = |limit: &String| {
        let (used, reclaimable) = match limit.strip_suffix("memory.max") {
            Some(group) => (format!("{group}memory.current"), "inactive_file "),
            None => (limit.replace("limit_in_bytes", "usage_in_bytes"), "total_inactive_file "),
        };
        let statistics = std::path::Path::new(&used).with_file_name("memory.stat");
        let statistics = std::fs::read_to_string(statistics).unwrap_or_default();
        // The kernel reclaims inactive page cache before it enforces the limit.
        let cached = statistics.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok());
        let used = number(&used)?.saturating_sub(cached.unwrap_or(0));
        Some(number(limit)?.saturating_sub(used))
    };
    limit_files(&groups).iter().filter_map(left).chain(machine_memory().1).chain(job().map(|job| job.left)).min()
}

/// The memory in bytes that this process may take in all at this moment: what it has already, plus the least that the machine and each
/// control group's limit leave beside other processes; at most its job's limit. Files in the page cache count as free, also those that
/// processes have mapped. `None` if unknown.
pub fn allowed_memory() -> Option<u64> {
    let (groups, own) = (std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), own_memory());
    let left_for_us = |limit: &String| {
        let group = GroupMemory::read(limit)?;
        Some(group.limit.saturating_sub(group.used.saturating_sub(group.files).saturating_sub(own)))
    };
    let machine = machine_memory().1.map(|available| available.saturating_add(own));
    limit_files(&groups).iter().filter_map(left_for_us).chain(machine).chain(job().map(|job| job.limit)).min()
}

/// The memory of this process in bytes that no file backs; where the system does not say, all that is resident.
fn own_memory() -> u64 {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let parts = ["RssAnon:", "RssShmem:"].map(|field| kibibytes(&status, field));
        parts.into_iter().flatten().reduce(|a, b| a + b).unwrap_or_else(resident_memory)
    }
    #[cfg(not(target_os = "linux"))]
    {
        resident_memory()
    }
}

/// What a control group says about its memory, bytes.
struct GroupMemory {
    limit: u64,
    used: u64,
    /// The part of `used` that is files in the page cache.
    files: u64,
}

impl GroupMemory {
    /// Reads the memory of the group that has this limit file. The limit of version 2 is the least of `memory.max` and `memory.high`, above
    /// which the kernel slows the group down.
    fn read(limit: &str) -> Option<Self> {
        let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
        let (used, prefix, soft) = match limit.strip_suffix("memory.max") {
            Some(group) => (format!("{group}memory.current"), "", number(&format!("{group}memory.high"))),
            None => (limit.replace("limit_in_bytes", "usage_in_bytes"), "total_", None),
        };
        let limit = number(limit).into_iter().chain(soft).min()?;
        let statistics = std::path::Path::new(&used).with_file_name("memory.stat");
        let statistics = std::fs::read_to_string(statistics).unwrap_or_default();
        let field = |name: &str| {
            let name = format!("{prefix}{name} ");
            statistics.lines().find_map(|line| line.strip_prefix(&name)?.trim().parse::<u64>().ok()).unwrap_or(0)
        };
        let files = field("inactive_file").saturating_add(field("active_file"));
        Some(GroupMemory { limit, used: number(&used)?, files })
    }
}

/// Memory that a job object allows this process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct JobMemory {
    limit: u64,
    left: u64,
}

/// The limit of this process's job object (Windows), if it has one.
fn job() -> Option<JobMemory> {
    #[cfg(windows)]
    {
        windows::job_memory()
    }
    #[cfg(not(windows))]
    {
        None
    }
}

/// The limit files of the control groups in `/proc/self/cgroup`, version 1 or 2, and of their ancestors. Some may not exist.
fn limit_files(groups: &str) -> Vec<String> {
    let mut files = Vec::new();
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let (root, file) = match controllers {
            "" => ("/sys/fs/cgroup", "memory.max"),
            _ if controllers.split(',').any(|name| name == "memory") => {
                ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            }
            _ => continue,
        };
        let groups = std::path::Path::new(path).ancestors().filter_map(std::path::Path::to_str);
        files.extend(groups.map(|group| format!("{root}{}/{file}", group.trim_end_matches('/'))));
    }
    files
}

/// The vendor's name of the processor, or else the architecture.
pub fn processor_name() -> String {
    #[cfg(target_os = "linux")]
    {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = info.lines().find_map(|line| line.strip_prefix("model name"));
        if let Some((_, name)) = line.and_then(|line| line.split_once(':')) {
            return name.trim().to_owned();
        }
    }
    #[cfg(not(target_os = "linux"))]
    if let Some(name) = non_linux::processor_name() {
        return name;
    }
    std::env::consts::ARCH.to_owned()
}

/// The processor's instruction set extensions as `/proc/cpuinfo` lists them; empty elsewhere.
pub(crate) fn processor_features() -> String {
    #[cfg(target_os = "linux")]
    {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = info.lines().find(|line| line.starts_with("flags") || line.starts_with("Features"));
        if let Some(line) = line {
            return line.to_owned();
        }
    }
    String::new()
}

/// A field in KiB of a file under `/proc`, in bytes.
#[cfg(target_os = "linux")]
fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// The cores that this process may use: physical cores if the system reports them, else hardware threads.
pub(crate) fn cores() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(available, |physical| physical.clamp(1, available))
}

/// The physical cores of this machine, or its hardware threads if the system does not report cores.
pub fn machine_cores() -> usize {
    physical_cores().unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// The number of distinct (package, core) pairs that the system lists.
#[cfg(target_os = "linux")]
fn physical_cores() -> Option<usize> {
    let mut seen = std::collections::BTreeSet::new();
    for entry in std::fs::read_dir("/sys/devices/system/cpu").ok()?.flatten() {
        let topology = entry.path().join("topology");
        let read = |name: &str| std::fs::read_to_string(topology.join(name)).ok()?.trim().parse::<i64>().ok();
        if let (Some(package), Some(core)) = (read("physical_package_id"), read("core_id")) {
            seen.insert((package, core));
        }
    }
    (!seen.is_empty()).then_some(seen.len())
}

#[cfg(not(target_os = "linux"))]
fn physical_cores() -> Option<usize> {
    sysinfo::System::physical_core_count().filter(|cores| *cores > 0)
}

/// The limit on open files of this process; `None` if unlimited or unknown.
#[cfg(target_os = "linux")]
pub(crate) fn most_open_files() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` has room for the limit that the call writes.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    usize::try_from(limit.rlim_cur).ok().filter(|_| known && limit.rlim_cur != libc::RLIM_INFINITY)
}

/// Drops a range of a file from the page cache; a length of 0 means up to its end. Advice only: failures are ignored,
/// and other systems than Linux take no such advice.
pub(crate) fn drop_cached(file: &std::fs::File, offset: u64, length: u64) {
    #[cfg(target_os = "linux")]
    {
        let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(length), rustix::fs::Advice::DontNeed);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, length);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_pages_take_no_memory_until_written() {
        let (_, before) = resident();
        let pages = Pages::reserve(1 << 32).unwrap();
        let (_, after) = resident();
        if let (Some(before), Some(after)) = (before, after) {
            assert!(after < before + (64 << 20), "{before} to {after}");
        }
        assert_eq!(pages.len(), 1 << 32);
    }

    #[test]
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    fn freed_scratch_memory_does_not_stay_in_the_heap() {
        /// Bytes that the allocator's main heap takes from the system.
        fn heap() -> usize {
            // SAFETY: only reads the allocator's counters.
            unsafe { libc::mallinfo2() }.arena
        }
        map_large_blocks();
        // Frees a large block, after which glibc would take blocks of its size from the heap.
        drop(std::hint::black_box(vec![1_u8; 8 << 20]));
        let before = heap();
        let mut small = Vec::new();
        for number in 0..64_usize {
            let layout = std::alloc::Layout::from_size_align(983_040 + 64 * number, 64).unwrap();
            // SAFETY: the block has a size, and is freed with the layout it was allocated with.
            unsafe {
                // Or the compiler leaves out the allocation.
                let scratch = std::hint::black_box(std::alloc::alloc(layout));
                assert!(!scratch.is_null());
                small.push(std::hint::black_box(vec![1_u8; 2000]));
                std::alloc::dealloc(scratch, layout);
            }
        }
        assert!(heap() < before + (4 << 20), "the heap grew from {before} to {} bytes", heap());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_has_a_limit() {
        assert!(memory_limit().is_some_and(|limit| limit > 64 << 20));
        assert!(memory_limit() <= machine_memory().0);
        assert!(allowed_memory() <= memory_limit() && allowed_memory() > available_memory());
        assert!(available_memory().is_some_and(|available| available > 0 && Some(available) < memory_limit()));
    }

    #[test]
    fn limits_of_a_group_and_its_ancestors_are_read() {
        let second = limit_files("0::/user.slice/a.scope");
        assert_eq!(
            second,
            ["/user.slice/a.scope", "/user.slice", ""].map(|group| format!("/sys/fs/cgroup{group}/memory.max"))
        );
        let first = limit_files("9:cpu,cpuacct:/x\n4:memory:/job\n0::/");
        let limits = ["/memory/job", "/memory"].map(|group| format!("/sys/fs/cgroup{group}/memory.limit_in_bytes"));
        assert_eq!(first, [&limits[..], &["/sys/fs/cgroup/memory.max".to_owned()]].concat());
        assert!(limit_files("nonsense").is_empty());
    }

    #[test]
    fn a_machine_has_at_least_one_core() {
        assert!(cores() >= 1);
    }
}
