//! What only Windows has: job objects, which limit the memory of processes, and the counters of a process.

use super::JobMemory;
use std::mem::{size_of, zeroed};
use windows_sys::Win32::System::JobObjects::{
    JOB_OBJECT_LIMIT_JOB_MEMORY, JOB_OBJECT_LIMIT_PROCESS_MEMORY, JOBOBJECT_EXTENDED_LIMIT_INFORMATION,
    JobObjectExtendedLimitInformation, QueryInformationJobObject,
};
use windows_sys::Win32::System::ProcessStatus::{K32GetProcessMemoryInfo, PROCESS_MEMORY_COUNTERS};
use windows_sys::Win32::System::Threading::GetCurrentProcess;

/// Memory of this process, bytes.
pub(super) struct ProcessMemory {
    /// The most that was in physical memory.
    pub peak_resident: u64,
    /// What it has committed, in physical memory or not: what a job counts.
    committed: u64,
}

pub(super) fn process_memory() -> Option<ProcessMemory> {
    let bytes = size_of::<PROCESS_MEMORY_COUNTERS>() as u32;
    // SAFETY: all zeros are valid counters.
    let mut counters: PROCESS_MEMORY_COUNTERS = unsafe { zeroed() };
    // SAFETY: the handle of this process needs no closing, and the counters have the given size.
    let known = unsafe { K32GetProcessMemoryInfo(GetCurrentProcess(), &mut counters, bytes) } != 0;
    known.then_some(ProcessMemory {
        peak_resident: counters.PeakWorkingSetSize as u64,
        committed: counters.PagefileUsage as u64,
    })
}

/// The memory limit of this process's job: the lesser of its limit for each process and its limit for all processes together. Of the job's
/// processes only this one's committed memory counts as used.
pub(super) fn job_memory() -> Option<JobMemory> {
    // SAFETY: all zeros are a valid structure.
    let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = unsafe { zeroed() };
    let bytes = size_of::<JOBOBJECT_EXTENDED_LIMIT_INFORMATION>() as u32;
    // SAFETY: without a handle the call is about this process's own job; the structure has the given size and is the one of this class.
    let known = unsafe {
        QueryInformationJobObject(
            std::ptr::null_mut(),
            JobObjectExtendedLimitInformation,
            (&raw mut limits).cast(),
            bytes,
            std::ptr::null_mut(),
        )
    };
    if known == 0 {
        return None;
    }
    let flags = limits.BasicLimitInformation.LimitFlags;
    let set = |flag: u32, limit: usize| (flags & flag != 0).then_some(limit as u64);
    let each = set(JOB_OBJECT_LIMIT_PROCESS_MEMORY, limits.ProcessMemoryLimit);
    let together = set(JOB_OBJECT_LIMIT_JOB_MEMORY, limits.JobMemoryLimit);
    let limit = each.into_iter().chain(together).min()?;
    let committed = process_memory().map_or(0, |memory| memory.committed);
    Some(JobMemory { limit, left: limit.saturating_sub(committed) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use windows_sys::Win32::System::JobObjects::{AssignProcessToJobObject, CreateJobObjectW, SetInformationJobObject};

    /// Set in the child that puts itself into a job.
    const CHILD: &str = "HPP_TEST_JOB";

    #[test]
    fn a_job_limits_memory() {
        let own = std::env::current_exe().unwrap();
        let done = Command::new(own).args(["--exact", "os::windows::tests::child"]).env(CHILD, "1").status().unwrap();
        assert!(done.success());
    }

    /// The child process: enters a job of 1 GiB.
    #[test]
    fn child() {
        if std::env::var_os(CHILD).is_none() {
            return;
        }
        // SAFETY: all zeros are a valid structure.
        let mut limits: JOBOBJECT_EXTENDED_LIMIT_INFORMATION = unsafe { zeroed() };
        limits.BasicLimitInformation.LimitFlags = JOB_OBJECT_LIMIT_PROCESS_MEMORY;
        limits.ProcessMemoryLimit = 1 << 30;
        // SAFETY: the job is new, and the structure is the one of this class.
        let entered = unsafe {
            let job = CreateJobObjectW(std::ptr::null(), std::ptr::null());
            let bytes = size_of::<JOBOBJECT_EXTENDED_LIMIT_INFORMATION>() as u32;
            SetInformationJobObject(job, JobObjectExtendedLimitInformation, (&raw const limits).cast(), bytes) != 0
                && AssignProcessToJobObject(job, GetCurrentProcess()) != 0
        };
        assert!(entered, "{}", std::io::Error::last_os_error());
        let job = job_memory().unwrap();
        assert!(job.limit == 1 << 30 && job.left < job.limit, "{job:?}");
        assert_eq!(crate::os::memory_limit(), crate::os::machine_memory().0.map(|machine| machine.min(1 << 30)));
    }
}
