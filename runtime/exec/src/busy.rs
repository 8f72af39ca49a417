//! Whether other processes had the processors while something was measured.

/// Part of the machine's CPU time, in percent, from which on others disturb a measurement.
const DISTURBS: u64 = 10;
/// Clock ticks, summed over cores, below which the share is not reported: one second of two cores. In a shorter run the end of
/// whatever ran before is most of what is seen.
const FEWEST: u64 = 200;

/// CPU time so far, in clock ticks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CpuTime {
    /// Of all processors, idle or not.
    all: u64,
    /// Of those the time in which they computed, for anybody.
    used: u64,
    /// By this process and the children it has waited for.
    own: u64,
}

/// A look at the machine's CPU time when something began.
pub struct Busy {
    began: Option<CpuTime>,
}

impl Busy {
    /// From now on.
    pub fn begin() -> Self {
        Self { began: CpuTime::now() }
    }

    /// What a person should know of the time since then: nothing where others took little, or where the system does not tell.
    pub fn note(&self) -> Option<String> {
        let percent = self.began?.others_until(CpuTime::now()?)?;
        (percent >= DISTURBS).then(|| {
            format!(
                "this machine is busy: {percent} % of its CPU time went to other processes during this run; timings are not \
                 representative"
            )
        })
    }
}

impl CpuTime {
    #[cfg(target_os = "linux")]
    fn now() -> Option<Self> {
        let machine = std::fs::read_to_string("/proc/stat").ok()?;
        let own = std::fs::read_to_string("/proc/self/stat").ok()?;
        Self::read(&machine, &own)
    }

    #[cfg(not(target_os = "linux"))]
    fn now() -> Option<Self> {
        None
    }

    /// Out of `/proc/stat` and `/proc/self/stat`.
    fn read(machine: &str, own: &str) -> Option<Self> {
        let fields = machine.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        // user nice system idle iowait irq softirq steal; guests are part of user and nice.
        let ticks: Vec<u64> = fields.take(8).map(|field| field.parse().ok()).collect::<Option<_>>()?;
        let idle = ticks.get(3)?.checked_add(*ticks.get(4)?)?;
        let all: u64 = ticks.iter().sum();
        // The name may hold spaces and parentheses. Behind it come the state and ten numbers, then user and system time of the
        // process and of children.
        let behind_name = &own[own.rfind(')')? + 1..];
        let own: Vec<u64> =
            behind_name.split_whitespace().skip(11).take(4).map(|t| t.parse().ok()).collect::<Option<_>>()?;
        Some(Self { all, used: all.checked_sub(idle)?, own: own.iter().sum() })
    }

    /// Percent of the machine's CPU time that others took until `later`.
    fn others_until(self, later: Self) -> Option<u64> {
        let all = later.all.checked_sub(self.all).filter(|ticks| *ticks >= FEWEST)?;
        let used = later.used.checked_sub(self.used)?;
        Some(used.saturating_sub(later.own.saturating_sub(self.own)) * 100 / all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: &str = "77 (a (b) c) R 1 2 3 4 5 6 7 8 9 10 300 100 20 0 20 0 1";

    #[test]
    fn time_of_others_is_what_neither_this_process_took_nor_nobody() {
        let read = |line: &str, own: &str| CpuTime::read(line, own).unwrap();
        let before = read("cpu  1000 0 500 8000 500 0 0 0 0 0\ncpu0 1 2", OWN);
        assert_eq!(before, CpuTime { all: 10_000, used: 1500, own: 420 });
        // 200 ticks: 100 by this process, 60 by others, 40 idle.
        let own = OWN.replace("300 100", "360 140");
        let later = read("cpu  1100 0 550 8030 510 0 0 10 0 0", &own);
        assert_eq!(before.others_until(later), Some(30));
        assert_eq!(before.others_until(before), None, "too short to tell");
        assert_eq!(CpuTime::read("cpu 1 2", OWN), None);
        assert_eq!(CpuTime::read("", ""), None);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_machine_tells() {
        assert!(CpuTime::now().is_some());
    }
}
