//! Constants for host memory that the planner and the runtime must agree on.

/// Host memory of the process itself, bytes: code and tables of ONNX Runtime, its arena, and [`HEAP_IN_PROCESS`].
pub const PROCESS: u64 = 64 << 20;
/// The part of [`PROCESS`] for the heap of sessions and the tokenizer, bytes. Measured: without sessions and tokenizer, the process takes 55.4 MiB.
const HEAP_IN_PROCESS: u64 = 8 << 20;
/// Heap of a partition's session, bytes: its graph and kernels, without weights. Measured: 64 more sessions took 17.3 MiB.
const SESSION: u64 = 272 << 10;
/// Heap of the tokenizer for each token of its vocabulary, bytes. The tokenizer takes another byte for each byte of its file. Measured: 43 MiB for
/// 128,000 tokens and as many merges (file of 5.6 MB); 36 MiB for as many tokens without merges (2.2 MB); 11 MiB for 32,000 tokens (0.5 MB).
const TOKEN: u64 = 300;

/// Heap beyond the room in [`PROCESS`], bytes, of `sessions` sessions and of a tokenizer with a file of `tokenizer_file` bytes and `vocabulary`
/// tokens.
pub fn heap_beyond_process(sessions: u64, tokenizer_file: u64, vocabulary: u64) -> u64 {
    let tokenizer =
        if tokenizer_file > 0 { vocabulary.saturating_mul(TOKEN).saturating_add(tokenizer_file) } else { 0 };
    sessions.saturating_mul(SESSION).saturating_add(tokenizer).saturating_sub(HEAP_IN_PROCESS)
}

/// Host memory that the runtime leaves free for heap and code pages that are first touched after weights are locked, bytes.
pub const RESERVE: u64 = 5 << 20;
/// Bytes of weights read ahead of the next block. A disk of 4 GB/s reads them in 4 ms, which is longer than a block
/// computes on the host when reading is the bottleneck.
pub const READ_AHEAD: u64 = 16 << 20;

/// Heap that each further sequence takes for each partition, bytes: ONNX Runtime's binding, its tensors, and unused memory between them. Measured:
/// 30 sequences of 17 partitions took 8 MiB.
pub const BINDING: u64 = 16 << 10;

/// Host memory for states on disk, bytes. `largest` are the bytes for the partition with the largest states. Three times as much is needed: for the
/// states that a run uses, those that are read for the next run, and those that are written after the run before.
pub fn state_window(largest: u64) -> u64 {
    largest.saturating_mul(3)
}

/// Granularity, in tokens, of the layout of states that are kept in host memory and copied to a device. A change of layout copies all filled
/// tokens.
const STATE_STEP: u64 = 64;

/// Number of tokens for which such a state is laid out, and which are copied, while it holds `held` of at most `capacity` tokens.
pub fn state_tokens(held: u64, capacity: u64) -> u64 {
    held.max(1).checked_next_multiple_of(STATE_STEP).map_or(capacity, |tokens| tokens.min(capacity))
}

/// Divides `room` bytes of locked memory among blocks of these sizes, and returns the locked bytes of each. The rest of a block is read for each
/// run. The division makes the largest rest as small as possible, because the rest of one block needs memory, too.
///
/// The rest of a block is `min(size, level)`, with the smallest `level` for which `sum max(size - level, 0) <= room`.
pub fn locked_bytes(sizes: &[u64], room: u64) -> Vec<u64> {
    let level = read_level(sizes, room, 0);
    sizes.iter().map(|size| size - size.min(&level)).collect()
}

/// The largest rest of a block, if `room` bytes hold the locked parts of all blocks and, at the same time, the rest of one block: the smallest
/// level with `sum max(size - level, 0) + level <= room`. The largest size if not even the largest block fits.
pub fn read_level_beside_one(sizes: &[u64], room: u64) -> u64 {
    read_level(sizes, room, 1)
}

/// The smallest level with `sum max(size - level, 0) + at_once * level <= room`. `at_once` is 0 or 1.
fn read_level(sizes: &[u64], room: u64, at_once: u64) -> u64 {
    let mut largest_first = sizes.to_vec();
    largest_first.sort_unstable_by_key(|size| std::cmp::Reverse(*size));
    // The `count` largest blocks are partly locked: `above - (count - at_once) * level = room`, where `above` is the sum of their sizes.
    let (mut above, mut level) = (0u128, largest_first.first().copied().unwrap_or(0));
    for (count, next) in (0u64..).zip(largest_first.iter().copied().chain([0])) {
        let levelled = u128::from(count.saturating_sub(at_once));
        let missing = above.saturating_sub(room.into());
        match levelled {
            0 if count < at_once && next > room => return level,
            // The locked part and the rest of a single block together always take its size.
            0 => level = next,
            // Fits into 64 bits: at most the previous level, which is a size.
            _ if missing > levelled * u128::from(next) => return missing.div_ceil(levelled) as u64,
            _ => level = next,
        }
        above += u128::from(next);
    }
    level
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_blocks_are_locked_first_down_to_one_level() {
        let sizes = [100, 100, 700, 100];
        let locked = |room| locked_bytes(&sizes, room);
        assert_eq!(locked(0), [0; 4]);
        assert_eq!(locked(400), [0, 0, 400, 0]);
        assert_eq!(locked(600), [0, 0, 600, 0]);
        assert_eq!(locked(800), [50, 50, 650, 50]);
        // A level is a whole number of bytes.
        assert_eq!(locked(801), [50, 50, 650, 50]);
        assert_eq!(locked(999), [99, 99, 699, 99]);
        assert_eq!((locked(1000), locked(u64::MAX)), (sizes.to_vec(), sizes.to_vec()));
        assert!(locked_bytes(&[], 5).is_empty());
        assert_eq!(locked_bytes(&[u64::MAX; 3], 9), [3; 3]);
        assert_eq!(locked_bytes(&[u64::MAX; 3], 0), [0; 3]);
    }

    #[test]
    fn the_process_has_room_for_a_small_model_and_not_for_a_large_vocabulary() {
        assert_eq!(heap_beyond_process(18, 100 << 10, 4096), 0);
        assert_eq!(heap_beyond_process(32, 0, 128_000), 512 << 10);
        let heap = heap_beyond_process(34, 9 << 20, 128_256);
        assert!((46 << 20..47 << 20).contains(&heap), "{heap}");
        assert_eq!(heap_beyond_process(u64::MAX, u64::MAX, u64::MAX), u64::MAX - HEAP_IN_PROCESS);
    }

    #[test]
    fn the_rest_of_one_block_needs_memory_beside_what_is_locked() {
        let level = |room| read_level_beside_one(&[100, 100, 700, 100], room);
        // Too little for the largest block; then enough for it, of which no more is read than of the others.
        assert_eq!((level(699), level(700)), (700, 100));
        // 650 + 3 * 50 bytes are locked, and 50 are read.
        assert_eq!(level(850), 50);
        assert_eq!((level(999), level(1000), level(u64::MAX)), (1, 0, 0));
        assert_eq!([read_level_beside_one(&[80], 79), read_level_beside_one(&[80], 80)], [80, 0]);
        assert_eq!(read_level_beside_one(&[], 0), 0);
    }
}
