//! The seam to the operating system: pages that are not touched until used, and what the process takes. Everything special to
//! one system is here, with a portable way beside it.

use std::io;

/// Zeroed memory of fixed length. On Unix no page of it exists until it is written.
pub(crate) struct Pages {
    #[cfg(unix)]
    at: *mut u8,
    #[cfg(unix)]
    length: usize,
    #[cfg(not(unix))]
    bytes: std::cell::UnsafeCell<Vec<u64>>,
    #[cfg(not(unix))]
    length: usize,
}

#[cfg(unix)]
impl Pages {
    pub fn reserve(length: usize) -> io::Result<Self> {
        let length = length.max(1);
        // SAFETY: a new anonymous private mapping at an address of the system's choice touches nothing that exists.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | NO_RESERVE,
                -1,
                0,
            )
        };
        if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(Pages { at: at.cast(), length }) }
    }

    pub fn address(&self) -> *mut u8 {
        self.at
    }
}

#[cfg(unix)]
// SAFETY: a mapping belongs to no thread; whoever reads or writes through its address answers for that.
unsafe impl Send for Pages {}

#[cfg(unix)]
impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `reserve`, which nothing uses any more: whoever hands out its address keeps this alive.
        unsafe { libc::munmap(self.at.cast(), self.length) };
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const NO_RESERVE: libc::c_int = libc::MAP_NORESERVE;
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
const NO_RESERVE: libc::c_int = 0;

#[cfg(not(unix))]
impl Pages {
    pub fn reserve(length: usize) -> io::Result<Self> {
        let length = length.max(1);
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(length.div_ceil(8)).map_err(io::Error::other)?;
        bytes.resize(length.div_ceil(8), 0u64);
        Ok(Pages { bytes: std::cell::UnsafeCell::new(bytes), length })
    }

    pub fn address(&self) -> *mut u8 {
        // SAFETY: the vector is never resized, so its elements stay where they are; the cell allows writing through the address.
        unsafe { (*self.bytes.get()).as_mut_ptr().cast() }
    }
}

impl Pages {
    pub fn len(&self) -> usize {
        self.length
    }
}

/// Gives pages of the heap that hold nothing back to the system, where the heap keeps such pages.
pub(crate) fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the heap gives back free pages; what is allocated is not touched.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Most bytes of this process that were in RAM at once, and how many are now, where the system tells.
pub(crate) fn resident() -> (Option<u64>, Option<u64>) {
    #[cfg(target_os = "linux")]
    {
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        (kibibytes(&status, "VmHWM:"), kibibytes(&status, "VmRSS:"))
    }
    #[cfg(all(unix, not(target_os = "linux")))]
    {
        (peak_by_usage(), None)
    }
    #[cfg(not(unix))]
    {
        (None, None)
    }
}

#[cfg(all(unix, not(target_os = "linux")))]
fn peak_by_usage() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: a place for one rusage, which the call fills; all zero is a valid one before.
    let usage = unsafe { (libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) == 0).then(|| usage.assume_init()) }?;
    let unit = if cfg!(any(target_os = "macos", target_os = "ios")) { 1 } else { 1024 };
    u64::try_from(usage.ru_maxrss).ok()?.checked_mul(unit)
}

/// This machine's memory, and what a program could get of it now, where the system tells.
pub fn machine_memory() -> (Option<u64>, Option<u64>) {
    #[cfg(target_os = "linux")]
    {
        let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
        (kibibytes(&info, "MemTotal:"), kibibytes(&info, "MemAvailable:"))
    }
    #[cfg(not(target_os = "linux"))]
    {
        (None, None)
    }
}

/// Most memory this process may use: the machine's, or less where a control group says so; `None` where nobody tells.
pub fn memory_limit() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let files = limit_files(&groups);
    let limit = |path: &String| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limits = files.iter().filter_map(limit).chain(machine_memory().0);
    limits.min()
}

/// Memory a process here could still get: what the machine has free or can free, or less where a control group has a limit;
/// `None` where nobody tells.
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
        // Cached files that nobody uses make room when somebody needs it.
        let cached = statistics.lines().find_map(|line| line.strip_prefix(reclaimable)?.trim().parse::<u64>().ok());
        let used = number(&used)?.saturating_sub(cached.unwrap_or(0));
        Some(number(limit)?.saturating_sub(used))
    };
    limit_files(&groups).iter().filter_map(left).chain(machine_memory().1).min()
}

/// Files that may hold a limit of the groups that `/proc/self/cgroup` names, of either version, and of those around them.
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
        let around = std::path::Path::new(path).ancestors().filter_map(std::path::Path::to_str);
        files.extend(around.map(|group| format!("{root}{}/{file}", group.trim_end_matches('/'))));
    }
    files
}

/// What the maker calls the processor, or its architecture.
pub fn processor_name() -> String {
    #[cfg(target_os = "linux")]
    {
        let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let line = info.lines().find_map(|line| line.strip_prefix("model name"));
        if let Some((_, name)) = line.and_then(|line| line.split_once(':')) {
            return name.trim().to_owned();
        }
    }
    std::env::consts::ARCH.to_owned()
}

/// What the processor's instruction set has beyond the least, as the system lists it.
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

/// A field of a file under `/proc` that counts KiB, in bytes.
#[cfg(target_os = "linux")]
fn kibibytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.starts_with(field))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok()?.checked_mul(1024)
}

/// Processor cores this process may use: physical ones where the system tells them from hardware threads.
pub(crate) fn cores() -> usize {
    let available = std::thread::available_parallelism().map_or(1, usize::from);
    physical_cores().map_or(available, |physical| physical.clamp(1, available))
}

/// Physical cores of this machine, whatever of it this process may use.
pub fn machine_cores() -> usize {
    physical_cores().unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// Distinct (package, core) pairs of the processors the system lists.
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
    None
}

/// Most files this process may have open at once, where the system limits them.
#[cfg(target_os = "linux")]
pub(crate) fn most_open_files() -> Option<usize> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a place for one limit, which the call fills.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } == 0;
    usize::try_from(limit.rlim_cur).ok().filter(|_| known && limit.rlim_cur != libc::RLIM_INFINITY)
}

/// Tells the system not to keep in memory what was read of a file there; a length of 0 means to its end. Advice only.
pub(crate) fn forget(file: &std::fs::File, offset: u64, length: u64) {
    #[cfg(target_os = "linux")]
    {
        use std::os::fd::AsRawFd;
        let (offset, length) = (offset.try_into().unwrap_or(0), length.try_into().unwrap_or(0));
        // SAFETY: advice on a descriptor that is open; it changes no contents.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, length, libc::POSIX_FADV_DONTNEED) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (file, offset, length);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_pages_cost_nothing_until_used() {
        let (_, before) = resident();
        let pages = Pages::reserve(1 << 32).unwrap();
        let (_, after) = resident();
        if let (Some(before), Some(after)) = (before, after) {
            assert!(after < before + (64 << 20), "{before} to {after}");
        }
        assert_eq!(pages.len(), 1 << 32);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn memory_has_a_limit() {
        assert!(memory_limit().is_some_and(|limit| limit > 64 << 20));
        assert!(memory_limit() <= machine_memory().0);
        assert!(available_memory().is_some_and(|available| available > 0 && Some(available) < memory_limit()));
    }

    #[test]
    fn limits_are_looked_for_in_the_own_group_and_around_it() {
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
    fn there_is_a_core() {
        assert!(cores() >= 1);
    }
}
