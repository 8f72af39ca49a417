//! How hard to measure: runs, and what is read between them.

use crate::derive::Phase;
use crate::pieces::Repeats;
use std::path::Path;

/// Runs of each case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// A few runs: minutes for a small model.
    Quick,
    /// Enough for medians that repeat.
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

/// Last-level cache where the system does not tell.
const USUAL_CACHE: u64 = 32 << 20;

/// Memory that is nobody's trouble, however small the model.
const LITTLE: u64 = 256 << 20;

/// Bytes to read between two runs so that caches are as cold as in a pass of the whole model: what the rest of the model reads
/// in it, weights and states. With what the piece holds itself, which passes through the caches as well, it is no more than the
/// model's weights: that bounds memory.
pub fn evict_bytes(read_by_rest: u64, all_weights: u64, held_by_piece: u64) -> u64 {
    read_by_rest.min(all_weights.saturating_sub(held_by_piece))
}

/// Bytes that a run of blocks may hold in a case: a quarter more than the model's weights. A long prompt can be timed with one
/// block, whose launch is nothing against it; a long context is worth a run, since caches matter there.
pub fn most_held(all_weights: u64) -> u64 {
    all_weights.saturating_add(all_weights / 4).max(LITTLE)
}

/// Bytes of the host's last-level cache.
pub fn last_level_cache() -> u64 {
    largest_cache(Path::new("/sys/devices/system/cpu/cpu0/cache")).unwrap_or(USUAL_CACHE)
}

/// The largest of the caches that Linux lists, `index0/size` and so on, written like `2048K`.
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
    fn as_much_is_read_as_the_rest_of_the_model_reads() {
        assert_eq!(evict_bytes(50, 100, 30), 50);
        assert_eq!(evict_bytes(500, 100, 30), 70);
        assert_eq!(evict_bytes(500, 10, 30), 0);
        assert_eq!(most_held(400 << 20), 500 << 20);
        assert_eq!(most_held(1), LITTLE);
    }
}
