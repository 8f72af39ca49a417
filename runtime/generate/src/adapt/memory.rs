//! What is reclaimed from one engine while the system allows less memory than it was loaded for.

use super::limit::{AllowedMemoryFn, HostLimit, MEMORY_INTERVAL};
use super::share::{EngineShare, Reclaimable, shares};
use hpp_schema::ByteSize;
use std::time::Instant;

/// The host memory of a process with one engine.
pub struct HostMemory {
    /// Bytes that it takes in all.
    pub needed: u64,
    /// What of them can be reclaimed.
    pub reclaimable: Reclaimable,
    /// Asks how many bytes it may take in all.
    pub allowed: Box<AllowedMemoryFn>,
}

/// Follows the memory that the system allows.
pub(super) struct MemoryFollower {
    memory: HostMemory,
    limit: HostLimit,
    /// When the system is asked next.
    next: Instant,
    share: EngineShare,
    /// Whether less is allowed than the engine takes after everything reclaimable has been reclaimed.
    is_short: bool,
}

/// A change of what the engine may take, with a line for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MemoryChange {
    pub share: EngineShare,
    pub line: String,
}

impl MemoryFollower {
    /// Starts to follow. If less is allowed at the start than the engine needs, that is the user's decision, and only a further fall
    /// counts.
    pub fn new(memory: HostMemory, now: Instant) -> Self {
        let at_start = (memory.allowed)().unwrap_or(u64::MAX).min(memory.needed);
        let share = memory.reclaimable.all();
        MemoryFollower { limit: HostLimit::new(at_start), memory, next: now + MEMORY_INTERVAL, share, is_short: false }
    }

    /// What the engine may take now.
    pub fn share(&self) -> &EngineShare {
        &self.share
    }

    /// Whether memory has been reclaimed from the engine.
    pub fn is_reduced(&self) -> bool {
        self.share != self.memory.reclaimable.all()
    }

    /// Asks the system, once a second. Returns what changes.
    pub fn observe(&mut self, now: Instant) -> Option<MemoryChange> {
        if now < self.next {
            return None;
        }
        self.next = now + MEMORY_INTERVAL;
        let allowed = (self.memory.allowed)()?;
        if !self.limit.observe(allowed, now) {
            return None;
        }
        let excess = self.limit.at_start().saturating_sub(self.limit.bytes());
        let share = shares(&[self.memory.reclaimable], excess).pop()?;
        let reclaimed = self.memory.reclaimable.reclaimed(&share);
        let (before, was_short) = (std::mem::replace(&mut self.share, share), self.is_short);
        self.is_short = reclaimed < excess;
        (share != before || self.is_short != was_short)
            .then(|| MemoryChange { share, line: self.line(&before, excess.saturating_sub(reclaimed)) })
    }

    /// What changes and why.
    fn line(&self, before: &EngineShare, missing: u64) -> String {
        let human = |bytes: u64| ByteSize(bytes).human();
        let (now, all) = (&self.share, self.memory.reclaimable.all());
        let reclaimed = |share: &EngineShare| self.memory.reclaimable.reclaimed(share);
        let more = reclaimed(now) < reclaimed(before) || (now == before && !self.is_short);
        let mut parts = Vec::new();
        if now.locked != before.locked {
            parts.push(match all.locked - now.locked {
                0 => format!("{} of weights are locked", human(now.locked)),
                read => {
                    format!("{} of weights stay locked and {} are read for each pass", human(now.locked), human(read))
                }
            });
        }
        if now.sequences != before.sequences {
            parts.push(format!("at most {} of {} sequences run at once", now.sequences, all.sequences));
        }
        if now.kv != before.kv {
            parts.push(format!("{} of saved KV pages stay in memory", human(now.kv)));
        }
        if missing > 0 {
            parts.push(format!(
                "{} are missing that this run cannot do without, so the system may swap or kill it; plan for less with hpp-split --ram",
                human(missing)
            ));
        }
        if parts.is_empty() {
            parts.push("nothing is missing any more".to_owned());
        }
        let why = if more { "more memory is allowed again" } else { "less memory is allowed" };
        format!(
            "{why}, {} of the {} that this run takes: {}",
            human(self.limit.bytes()),
            human(self.memory.needed),
            parts.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    const MIB: u64 = 1 << 20;

    #[test]
    fn less_memory_is_followed_at_once_and_more_later_each_with_a_line() {
        let allowed = Arc::new(AtomicU64::new(5000 * MIB));
        let asked = Arc::clone(&allowed);
        let reclaimable = Reclaimable { kv: 0, sequences: 3, sequence: 50 * MIB, locked: 600 * MIB };
        let memory = HostMemory {
            needed: 1000 * MIB,
            reclaimable,
            allowed: Box::new(move || Some(asked.load(Ordering::SeqCst))),
        };
        let start = Instant::now();
        let mut follower = MemoryFollower::new(memory, start);
        let mut at = |seconds: u64, mib: u64| {
            allowed.store(mib * MIB, Ordering::SeqCst);
            follower.observe(start + Duration::from_secs(seconds))
        };
        assert_eq!([at(1, 5000), at(2, 1000)], [None, None]);
        let less = at(3, 700).unwrap();
        assert_eq!((less.share.sequences, less.share.locked), (1, 400 * MIB));
        assert_eq!(
            less.line,
            "less memory is allowed, 700 MiB of the 1000 MiB that this run takes: 400 MiB of weights stay locked and 200 MiB are read for \
             each pass, at most 1 of 3 sequences run at once"
        );
        assert!((4..9).all(|second| at(second, 700).is_none()));
        let short = at(9, 100).unwrap();
        assert!(short.share.locked == 0 && short.line.contains("200 MiB are missing"), "{}", short.line);
        assert!((10..20).all(|second| at(second, 5000).is_none()));
        let more = at(20, 5000).unwrap();
        assert_eq!(more.share, reclaimable.all());
        assert!(more.line.starts_with("more memory is allowed again, 1000 MiB of"), "{}", more.line);
    }
}
