//! Whether other processes disturbed a measurement by using the CPU.

use hpp_io::CpuMonitor;

/// Other processes disturb a measurement if they take at least this percent of the machine's CPU time.
const DISTURBING_PERCENT: u64 = 10;

/// CPU time of other processes since a moment.
pub struct OtherLoad(CpuMonitor);

impl OtherLoad {
    /// Starts counting.
    pub fn start() -> Self {
        Self(CpuMonitor::start(None))
    }

    /// Percent of the machine's CPU time that other processes took since the start. `None` if too little to disturb, if the run was too short to tell,
    /// or if the system does not report it.
    pub fn disturbing_percent(&self) -> Option<u64> {
        let time = self.0.since_start(None)?;
        Some(time.others * 100 / time.total).filter(|percent| *percent >= DISTURBING_PERCENT)
    }

    /// A note for the user if other processes disturbed since the start.
    pub fn note(&self) -> Option<String> {
        self.disturbing_percent().map(busy_note)
    }
}

/// A note that other processes took `percent` of the machine's CPU time.
pub fn busy_note(percent: u64) -> String {
    format!(
        "this machine is busy: {percent} % of its CPU time went to other processes during this run; timings are not representative"
    )
}
