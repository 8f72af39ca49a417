//! The memory that engines may take while they run. The limit falls at once when the system allows less, and rises when it has allowed more
//! for a while.

use std::time::{Duration, Instant};

/// How often the system is asked.
pub const MEMORY_INTERVAL: Duration = Duration::from_secs(1);
/// How long more memory must be allowed before it is used: a program that takes and frees memory in turns must not make engines
/// evict and read the same pages in turns.
const RISE_AFTER: Duration = Duration::from_secs(10);
/// Changes of less than one part in `NOISE` of the memory at the start are ignored.
const NOISE: u64 = 32;

/// Asks the system how many bytes of host memory may be taken now; `None` if it does not say.
pub type AllowedMemoryFn = dyn Fn() -> Option<u64> + Send + Sync;

/// The limit that engines keep, bytes of host memory.
#[derive(Clone, Copy, Debug)]
pub struct HostLimit {
    /// The limit at the start, which is never exceeded.
    most: u64,
    now: u64,
    /// Since when more has been allowed without a break, and the least that was allowed in this time.
    rise: Option<(Instant, u64)>,
}

impl HostLimit {
    /// A limit of `most` bytes, which later limits never exceed.
    pub fn new(most: u64) -> Self {
        HostLimit { most, now: most, rise: None }
    }

    /// The limit now.
    pub fn bytes(&self) -> u64 {
        self.now
    }

    /// The limit at the start.
    pub fn at_start(&self) -> u64 {
        self.most
    }

    /// Takes what the system allows now. Returns whether the limit has changed.
    pub fn observe(&mut self, allowed: u64, now: Instant) -> bool {
        let (allowed, noise) = (allowed.min(self.most), self.most / NOISE);
        if allowed < self.now.saturating_sub(noise) {
            (self.now, self.rise) = (allowed, None);
            return true;
        }
        let rises = allowed > self.now.saturating_add(noise) || (allowed == self.most && self.now < self.most);
        if !rises {
            self.rise = None;
            return false;
        }
        let (since, least) = self.rise.get_or_insert((now, allowed));
        *least = allowed.min(*least);
        let is_lasting = now.saturating_duration_since(*since) >= RISE_AFTER;
        if is_lasting {
            (self.now, self.rise) = (*least, None);
        }
        is_lasting
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_falls_at_once_and_rises_when_more_has_been_allowed_for_a_while() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut limit = HostLimit::new(3200);
        assert!(!limit.observe(9000, at(0)) && !limit.observe(3101, at(1)), "noise");
        assert!(limit.observe(1000, at(2)));
        assert_eq!(limit.bytes(), 1000);
        assert!(!limit.observe(2000, at(3)) && !limit.observe(1500, at(8)) && !limit.observe(2500, at(12)));
        assert!(limit.observe(2500, at(13)));
        assert_eq!(limit.bytes(), 1500, "the least of the time");
        assert!(!limit.observe(3200, at(14)) && !limit.observe(1500, at(20)) && !limit.observe(3200, at(21)));
        assert!(!limit.observe(3200, at(30)), "it begins anew");
        assert!(limit.observe(9000, at(31)));
        assert_eq!(limit.bytes(), 3200);
        // The last bytes below the limit of the start are no noise.
        assert!(limit.observe(3050, at(40)) && !limit.observe(3199, at(41)) && limit.observe(3200, at(51)));
        assert!(!limit.observe(3200, at(52)) && limit.observe(3200, at(62)));
        assert_eq!(limit.bytes(), 3200);
    }

    #[test]
    fn memory_that_comes_and_goes_in_turns_does_not_flap() {
        let start = Instant::now();
        let mut limit = HostLimit::new(1 << 30);
        let changes = (0..600).filter(|second| {
            let allowed = if second / 5 % 2 == 0 { 1 << 30 } else { 1 << 29 };
            limit.observe(allowed, start + Duration::from_secs(*second))
        });
        assert_eq!(changes.count(), 1);
        assert_eq!(limit.bytes(), 1 << 29);
    }
}
