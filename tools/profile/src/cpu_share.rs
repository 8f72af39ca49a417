//! Measures the share of the machine's CPU time that other programs use during profiling.

/// Counts CPU time since it was started.
#[derive(Debug)]
pub struct CpuShare {
    start: Option<Ticks>,
}

/// CPU time since the machine started, in clock ticks over all cores.
#[derive(Clone, Copy, Debug)]
struct Ticks {
    /// All time, including idle time.
    total: u64,
    /// Time that is not idle.
    busy: u64,
    /// Time of this process, its finished children and its running child.
    own: u64,
}

impl CpuShare {
    /// Starts counting; `child` is the process id of a running child.
    pub fn start(child: Option<u32>) -> Self {
        CpuShare { start: ticks(child) }
    }

    /// The share of CPU time that other programs used since the start, 0 to 1; `None` if the system does not report it.
    pub fn others(&self, child: Option<u32>) -> Option<f64> {
        others(self.start?, ticks(child)?)
    }
}

fn others(start: Ticks, end: Ticks) -> Option<f64> {
    let total = end.total.checked_sub(start.total).filter(|total| *total > 0)?;
    let busy = end.busy.saturating_sub(start.busy);
    let own = end.own.saturating_sub(start.own);
    Some((busy.saturating_sub(own) as f64 / total as f64).min(1.0))
}

#[cfg(target_os = "linux")]
fn ticks(child: Option<u32>) -> Option<Ticks> {
    use procfs::CurrentSI;
    use procfs::process::{Process, Stat};

    let stat = procfs::KernelStats::current().ok()?.total;
    let idle = stat.idle + stat.iowait.unwrap_or(0);
    let busy = stat.user + stat.nice + stat.system + stat.irq.unwrap_or(0) + stat.softirq.unwrap_or(0);
    // Time that the hypervisor gives to other guests (steal) counts as used by others.
    let busy = busy + stat.steal.unwrap_or(0);
    let waited_for = |stat: &Stat| u64::try_from(stat.cutime + stat.cstime).unwrap_or(0);
    let of = |stat: &Stat| stat.utime + stat.stime + waited_for(stat);
    let own = Process::myself().and_then(|process| process.stat()).ok()?;
    let child = child.and_then(|id| i32::try_from(id).ok()).and_then(|id| Process::new(id).ok()?.stat().ok());
    Some(Ticks { total: busy + idle, busy, own: of(&own) + child.as_ref().map_or(0, of) })
}

#[cfg(not(target_os = "linux"))]
fn ticks(_: Option<u32>) -> Option<Ticks> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_busy_and_not_ours_belongs_to_others() {
        let start = Ticks { total: 1000, busy: 500, own: 100 };
        let after = |total, busy, own| others(start, Ticks { total, busy, own });
        assert_eq!(after(1200, 600, 200), Some(0.0), "all that was busy was ours");
        assert_eq!(after(1200, 650, 150), Some(0.5));
        assert_eq!(after(1200, 500, 100), Some(0.0));
        assert_eq!(after(1000, 500, 100), None, "no time has passed");
        // Counters of different files are read at different moments: a difference below zero is none.
        assert_eq!(after(1200, 600, 250), Some(0.0));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn our_own_work_and_that_of_a_child_is_not_counted() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let id = Some(child.id());
        let (with, without) = (CpuShare::start(id), CpuShare::start(None));
        std::thread::sleep(std::time::Duration::from_millis(400));
        let (with, without) = (with.others(id).unwrap(), without.others(None).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(with < without, "{with} with the child counted as ours, {without} with it counted among the others");
    }
}
