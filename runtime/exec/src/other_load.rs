//! Whether other processes disturbed a measurement by using the CPU.

use hpp_io::CpuMonitor;

/// Percent of the machine's CPU time from which on other processes disturb a measurement.
const DISTURBING_PERCENT: u64 = 10;
/// Clock ticks below which a share means nothing: one second of two cores. In a shorter run the end of whatever ran before dominates.
const MIN_TICKS: u64 = 200;

/// CPU time of other processes since a moment.
pub struct OtherLoad(CpuMonitor);

impl OtherLoad {
    /// Starts counting.
    pub fn start() -> Self {
        Self(CpuMonitor::start(None))
    }

    /// A note for the user if other processes used much CPU time since the start. `None` also if the system does not report it.
    pub fn note(&self) -> Option<String> {
        let time = self.0.since_start(None).filter(|time| time.total >= MIN_TICKS)?;
        let percent = time.others * 100 / time.total;
        (percent >= DISTURBING_PERCENT).then(|| {
            format!(
                "this machine is busy: {percent} % of its CPU time went to other processes during this run; timings are not \
                 representative"
            )
        })
    }
}
