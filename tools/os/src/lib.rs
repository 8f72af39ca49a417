//! System calls that planning and running need alike, because both ask how much memory this process may have: the limits of a job object.
//!
//! Only Windows has job objects. Does not know the machine's memory, control groups or other crates of this workspace.

#[cfg(windows)]
mod windows;

/// Memory that a job object allows this process, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobMemory {
    /// The least of the job's limits for each process and for all of its processes together.
    pub limit: u64,
    /// What of it this process has not committed. What other processes of the job have committed is not subtracted.
    pub left: u64,
}

/// The memory that this process's job object allows. Of nested jobs, the innermost. `None` without a job, without a limit in it, or on
/// another system than Windows.
pub fn job_memory() -> Option<JobMemory> {
    #[cfg(windows)]
    {
        windows::job_memory()
    }
    #[cfg(not(windows))]
    {
        None
    }
}

/// The most bytes of this process that were in physical memory; `None` if the system does not say.
#[cfg(windows)]
pub fn peak_resident() -> Option<u64> {
    windows::process_memory().map(|memory| memory.peak_resident)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_leaves_no_more_than_its_limit() {
        assert!(job_memory().is_none_or(|job| cfg!(windows) && job.left <= job.limit), "{:?}", job_memory());
    }
}
