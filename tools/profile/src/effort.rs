//! The number of runs of each case, and the bytes read between runs to evict caches.

use crate::pieces::Repeats;
use hpp_partition::Phase;
use std::path::Path;

/// Runs of each case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Few runs: minutes for a small model.
    Quick,
    /// Enough runs for reproducible medians.
    Thorough,
}

impl Effort {
    /// Runs of a case of this phase. A decoded token takes milliseconds and varies; a pass takes longer and varies less.
    pub fn repeats(self, phase: Phase) -> Repeats {
        match (self, phase) {
            (Effort::Quick, Phase::Decode) => Repeats { warmup: 3, min: 9, max: 60, budget_ms: 600.0 },
            (Effort::Quick, Phase::Prefill) => Repeats { warmup: 1, min: 3, max: 9, budget_ms: 700.0 },
            (Effort::Thorough, Phase::Decode) => Repeats { warmup: 5, min: 21, max: 300, budget_ms: 3000.0 },
            (Effort::Thorough, Phase::Prefill) => Repeats { warmup: 1, min: 5, max: 31, budget_ms: 5000.0 },
        }
    }
}

/// Last-level cache if the system does not report it, bytes.
const USUAL_CACHE: u64 = 32 << 20;

/// Memory that measuring may always use, even for a small model, bytes.
const MINIMUM_HELD: u64 = 256 << 20;

/// How many times the last-level cache is read to evict everything else from it. One time is not enough, because replacement is not exactly
/// least-recently-used.
const CACHES_TO_EVICT: u64 = 4;

/// Bytes to read between two runs so that caches are as cold as in a pass of the whole model: as many as the rest of the model reads, weights and
/// states, but no more than surely evict `last_level_cache`. Together with the bytes of the piece itself, which pass through the caches too, at
/// most the size of the model's weights, which bounds memory.
pub fn evict_bytes(read_by_rest: u64, all_weights: u64, held_by_piece: u64, last_level_cache: u64) -> u64 {
    let enough = last_level_cache.saturating_mul(CACHES_TO_EVICT);
    read_by_rest.min(all_weights.saturating_sub(held_by_piece)).min(enough)
}

/// Memory of the measuring process beside the blocks, bytes: the library, its arena, the session that evicts caches. 140 MiB were measured
/// (ONNX Runtime 1.31.1, CPU).
const PROCESS: u64 = 160 << 20;

/// Limit on the bytes that a run of blocks may hold in a case: 1.25 times the model's weights, and together with [`PROCESS`] 1.5 times. For a long
/// prompt, one block is enough, because its launch cost is negligible; for a long context, a run is needed, because caches matter.
pub fn most_held(all_weights: u64) -> u64 {
    let beside_process = all_weights.saturating_add(all_weights / 2).saturating_sub(PROCESS);
    all_weights.saturating_add(all_weights / 4).min(beside_process).max(MINIMUM_HELD)
}

/// Bytes of the host's last-level cache.
pub fn last_level_cache() -> u64 {
    largest_cache(Path::new("/sys/devices/system/cpu/cpu0/cache")).unwrap_or(USUAL_CACHE)
}

/// The largest cache that Linux lists in `index*/size`, in a format like `2048K`.
fn largest_cache(dir: &Path) -> Option<u64> {
    let entries = std::fs::read_dir(dir).ok()?.flatten();
    let size = |path: &Path| {
        let text = std::fs::read_to_string(path.join("size")).ok()?;
        text.trim().parse::<hpp_schema::ByteSize>().ok().map(|size| size.0)
    };
    entries.filter_map(|entry| size(&entry.path())).max().filter(|size| *size > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_cache_counts() {
        let dir = tempfile::tempdir().unwrap();
        for (index, size) in [("index0", "48K"), ("index3", "266240K"), ("index2", "2048K")] {
            std::fs::create_dir(dir.path().join(index)).unwrap();
            std::fs::write(dir.path().join(index).join("size"), format!("{size}\n")).unwrap();
        }
        assert_eq!(largest_cache(dir.path()), Some(260 << 20));
        assert_eq!(largest_cache(&dir.path().join("none")), None);
        assert!(last_level_cache() > 0);
    }

    #[test]
    fn eviction_reads_as_much_as_the_rest_of_the_model() {
        assert_eq!(evict_bytes(50, 100, 30, 1000), 50);
        assert_eq!(evict_bytes(500, 100, 30, 1000), 70);
        assert_eq!(evict_bytes(500, 10, 30, 1000), 0);
        assert_eq!(evict_bytes(500, 100, 30, 10), 40);
        assert_eq!(most_held(800 << 20), 1000 << 20);
        assert_eq!(most_held(400 << 20) + PROCESS, 600 << 20);
        assert_eq!(most_held(1), MINIMUM_HELD);
    }
}
