//! Mixtures of experts whose experts are read from disk by demand: the bytes that a pass reads, and the memory that caches them.

use crate::host_reads::HostReads;

/// The window, in bytes, for weights other than experts where all of these are planned to stay locked: the layout that kernels want
/// may be a little larger than planned, and the excess is read from disk.
pub const EXPERT_WINDOW: u64 = 2 << 20;

/// The experts of a block. Each token selects some of them, and the runtime reads only those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Experts {
    /// Bytes of all experts.
    pub bytes: u64,
    /// How many there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
}

impl Experts {
    /// Expected bytes of the experts that `tokens` tokens select, if every expert is as likely as any other:
    /// `bytes (1 - (1 - active / count)^tokens)`.
    pub fn visited_bytes(self, tokens: u64) -> u64 {
        let unvisited = (1.0 - self.active as f64 / self.count as f64).powf(tokens as f64);
        (self.bytes as f64 * (1.0 - unvisited)) as u64
    }
}

/// The experts that the host computes with in a pass of a phase, packed bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertReads {
    /// All experts.
    pub all: u64,
    /// The experts that the tokens of a pass select.
    pub visited: u64,
    /// The experts of the block that has most.
    pub largest: u64,
}

/// How host memory is divided between experts and other weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertMemory {
    /// Memory for experts that were read, bytes.
    pub cache: u64,
    /// The most bytes of other weights that are read of one block; 0 if all stay locked.
    pub rest_level: u64,
}

impl ExpertMemory {
    /// The division of `available` bytes. The other weights come first, because every pass reads them; the cache holds at least the
    /// experts of one block, because a prompt may select all of them.
    pub(crate) fn divide(available: u64, rest: &HostReads, experts: ExpertReads) -> ExpertMemory {
        let all = rest.all();
        let cache = available.saturating_sub(all).clamp(experts.largest, experts.all.max(experts.largest));
        let room = available.saturating_sub(cache);
        let rest_level = if all <= room { 0 } else { rest.level(room) };
        ExpertMemory { cache, rest_level }
    }

    /// Expected bytes of experts that a pass reads. The hit rate of the cache is the measured one for a cache of this size
    /// ([`Problem::expert_hits`](crate::Problem::expert_hits())), or, without measurements, the share of all experts that the cache holds.
    /// It falls with the share of experts that a pass selects: a pass that selects nearly all evicts experts before they are needed again.
    pub fn read_bytes(self, experts: ExpertReads, measured: &[f64]) -> u64 {
        if self.cache >= experts.all {
            return 0;
        }
        let (all, visited) = (experts.all as f64, experts.visited as f64);
        let hits = (hit_rate(self.cache as f64 / all, measured) * (1.0 - visited / all)).min(1.0);
        (visited * (1.0 - hits)) as u64
    }
}

/// The hit rate, 0 to 1, of a cache for a share of all experts: interpolated linearly between measured points; without
/// points, the share.
fn hit_rate(share: f64, measured: &[f64]) -> f64 {
    let Some(last) = measured.len().checked_sub(1).filter(|last| *last > 0) else { return share };
    let at = share.clamp(0.0, 1.0) * last as f64;
    let below = (at as usize).min(last - 1);
    measured[below] + (measured[below + 1] - measured[below]) * (at - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_reads::BlockRead;

    const EXPERTS: Experts = Experts { bytes: 1600, count: 16, active: 4 };

    #[test]
    fn tokens_select_experts_independently() {
        assert_eq!([1, 2, 1000].map(|tokens| EXPERTS.visited_bytes(tokens)), [400, 700, 1600]);
    }

    #[test]
    fn other_weights_are_locked_first_and_a_block_always_fits() {
        let experts = ExpertReads { all: 3200, visited: 800, largest: 1600 };
        let block = |block| BlockRead { block, bytes: 100, experts: 0, is_computed: true };
        let rest = HostReads::new(vec![block(0), block(1)]);
        let divide = |available| ExpertMemory::divide(available, &rest, experts);
        assert_eq!(divide(2800), ExpertMemory { cache: 2600, rest_level: 0 });
        // Half of both blocks is locked, and the other half of one is in memory too.
        assert_eq!(divide(1750), ExpertMemory { cache: 1600, rest_level: 50 });
        assert_eq!(divide(1900), ExpertMemory { cache: 1700, rest_level: 0 });
        // Half of the experts are cached: of a quarter that is selected, 3/8 are hits.
        let half = ExpertMemory { cache: 1600, rest_level: 0 };
        assert_eq!(half.read_bytes(experts, &[]), 500);
        // The measured hit rate instead, times 3/4 because a pass that selects a quarter evicts as much; then a rate
        // interpolated between two points.
        assert_eq!(half.read_bytes(experts, &[0.0, 0.75, 1.0]), 350);
        assert_eq!(half.read_bytes(experts, &[0.0, 0.75, 1.0, 1.0]), 275);
        // A prompt that selects all has no hits, and a cache for all reads nothing.
        assert_eq!(half.read_bytes(ExpertReads { visited: 3200, ..experts }, &[0.0, 1.0]), 3200);
        assert_eq!(divide(4000).read_bytes(experts, &[]), 0);
    }
}
