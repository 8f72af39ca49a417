//! How much of the machine's CPU time other processes take while this one measures.

/// Counts CPU time since its start.
#[derive(Debug)]
pub struct CpuMonitor {
    start: Option<Ticks>,
}

/// CPU time between two moments, in clock ticks over all cores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuTime {
    /// All time, idle time included.
    pub total: u64,
    /// Time of other processes.
    pub others: u64,
}

/// CPU time since the machine started, in clock ticks over all cores.
#[derive(Clone, Copy, Debug)]
struct Ticks {
    /// All time, including idle time.
    total: u64,
    /// Time that is not idle.
    busy: u64,
    /// Time of this process, of the children it has waited for, and of the child that runs.
    own: u64,
}

/// Fewest clock ticks for a meaningful share: one second of two cores. In a shorter run, work that began before the run dominates.
const MIN_TICKS: u64 = 200;

impl CpuMonitor {
    /// Starts counting; `child` is the process id of a running child, whose time counts as this process's.
    pub fn start(child: Option<u32>) -> Self {
        CpuMonitor { start: ticks(child) }
    }

    /// CPU time since the start. `None` if the system does not report it, or if less than a second of two cores has passed.
    pub fn since_start(&self, child: Option<u32>) -> Option<CpuTime> {
        between(self.start?, ticks(child)?).filter(|time| time.total >= MIN_TICKS)
    }

    /// The share of the machine's CPU time that other processes took since the start, 0 to 1. `None` as
    /// [`since_start`](Self::since_start).
    pub fn others_share(&self, child: Option<u32>) -> Option<f64> {
        self.since_start(child).map(CpuTime::others_share)
    }
}

impl CpuTime {
    fn others_share(self) -> f64 {
        (self.others as f64 / self.total as f64).min(1.0)
    }
}

fn between(start: Ticks, end: Ticks) -> Option<CpuTime> {
    let total = end.total.checked_sub(start.total).filter(|total| *total > 0)?;
    // The counters come from different files, read at different moments: a difference below zero counts as none.
    let busy = end.busy.saturating_sub(start.busy);
    let own = end.own.saturating_sub(start.own);
    Some(CpuTime { total, others: busy.saturating_sub(own) })
}

#[cfg(target_os = "linux")]
fn ticks(child: Option<u32>) -> Option<Ticks> {
    use procfs::CurrentSI;
    use procfs::process::{Process, Stat};

    let stat = procfs::KernelStats::current().ok()?.total;
    let idle = stat.idle + stat.iowait.unwrap_or(0);
    let busy = stat.user + stat.nice + stat.system + stat.irq.unwrap_or(0) + stat.softirq.unwrap_or(0);
    // Time that the hypervisor gives to other guests is not idle either.
    let busy = busy + stat.steal.unwrap_or(0);
    let waited_for = |stat: &Stat| u64::try_from(stat.cutime + stat.cstime).unwrap_or(0);
    let cpu_ticks = |stat: &Stat| stat.utime + stat.stime + waited_for(stat);
    let own = Process::myself().and_then(|process| process.stat()).ok()?;
    let child = child.and_then(|id| i32::try_from(id).ok()).and_then(|id| Process::new(id).ok()?.stat().ok());
    Some(Ticks { total: busy + idle, busy, own: cpu_ticks(&own) + child.as_ref().map_or(0, cpu_ticks) })
}

#[cfg(not(target_os = "linux"))]
fn ticks(_: Option<u32>) -> Option<Ticks> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_that_is_neither_idle_nor_ours_belongs_to_others() {
        let start = Ticks { total: 1000, busy: 500, own: 100 };
        let others = |total, busy, own| between(start, Ticks { total, busy, own }).map(CpuTime::others_share);
        assert_eq!(others(1200, 600, 200), Some(0.0), "all busy time was ours");
        assert_eq!(others(1200, 650, 150), Some(0.5));
        assert_eq!(others(1200, 500, 100), Some(0.0));
        assert_eq!(others(1000, 500, 100), None, "no time has passed");
        assert_eq!(others(1200, 600, 250), Some(0.0), "counters read at different moments");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn our_own_time_and_that_of_a_child_are_not_counted() {
        let mut child = std::process::Command::new("sh").args(["-c", "while :; do :; done"]).spawn().unwrap();
        let id = Some(child.id());
        let (with, without) = (CpuMonitor::start(id), CpuMonitor::start(None));
        std::thread::sleep(std::time::Duration::from_millis(400));
        let share = |since: CpuMonitor, child| {
            between(since.start.unwrap(), ticks(child).unwrap()).map(CpuTime::others_share).unwrap()
        };
        let (with, without) = (share(with, id), share(without, None));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(with < without, "{with} with the child counted as ours, {without} with it counted among the others");
    }
}
