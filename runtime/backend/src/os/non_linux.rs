//! What Linux reports under `/proc`, on Windows and macOS.

use sysinfo::{MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, RefreshKind, System};

/// This machine's memory in bytes, total and available.
pub(super) fn machine_memory() -> (Option<u64>, Option<u64>) {
    let memory = MemoryRefreshKind::nothing().with_ram();
    let system = System::new_with_specifics(RefreshKind::nothing().with_memory(memory));
    let known = |bytes: u64| Some(bytes).filter(|bytes| *bytes > 0);
    (known(system.total_memory()), known(system.available_memory()))
}

/// The current resident set size of this process in bytes.
pub(super) fn resident() -> Option<u64> {
    let own = sysinfo::get_current_pid().ok()?;
    let mut system = System::new();
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[own]), false, memory);
    system.process(own).map(sysinfo::Process::memory)
}

/// The peak resident set size of this process in bytes.
#[cfg(unix)]
pub(super) fn peak_resident() -> Option<u64> {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `usage` has room for one rusage, and all zeros are a valid one.
    let usage = unsafe { (libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) == 0).then(|| usage.assume_init()) }?;
    let unit = if cfg!(any(target_os = "macos", target_os = "ios")) { 1 } else { 1024 };
    u64::try_from(usage.ru_maxrss).ok()?.checked_mul(unit)
}

/// The peak resident set size of this process in bytes.
#[cfg(windows)]
pub(super) fn peak_resident() -> Option<u64> {
    super::windows::process_memory().map(|memory| memory.peak_resident)
}

/// The vendor's name of the processor.
pub(super) fn processor_name() -> Option<String> {
    let processors = RefreshKind::nothing().with_cpu(sysinfo::CpuRefreshKind::nothing());
    let system = System::new_with_specifics(processors);
    let name = system.cpus().first()?.brand().trim().to_owned();
    (!name.is_empty()).then_some(name)
}
