//! Constants for host memory that the planner and the runtime must agree on.

/// Memory of the process itself, bytes: code and tables of ONNX Runtime, its arena, and [`HEAP_IN_PROCESS`].
pub const PROCESS: u64 = 64 << 20;
/// What [`PROCESS`] leaves for the heap of sessions and the tokenizer, bytes. Measured: without them the process takes 55.4 MiB.
const HEAP_IN_PROCESS: u64 = 8 << 20;
/// Heap of the session of a partition, bytes: its graph and its kernels, without weights. Measured: 64 sessions more took 17.3 MiB.
const SESSION: u64 = 272 << 10;
/// Heap of the tokenizer for each token of its vocabulary, bytes, beside one for each byte of its file. Measured: 43 MiB for 128,000 tokens and
/// as many merges, whose file has 5.6 MB; 36 MiB for as many tokens without merges, 2.2 MB; 11 MiB for 32,000 tokens, 0.5 MB.
const TOKEN: u64 = 300;

/// Heap of `sessions` and of a tokenizer, its file and its vocabulary, that [`PROCESS`] has no room for, bytes.
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

/// Heap that a further sequence takes for each partition, bytes: ONNX Runtime's binding and its tensors, and what lies unused between them.
/// Measured: 30 sequences of 17 partitions took 8 MiB.
pub const BINDING: u64 = 16 << 10;

/// Host memory for states on disk, bytes, where those of the partition that has most of them take `largest` for one sequence: what a run
/// uses, what is read for the next one, and what is written from the one before.
pub fn state_window(largest: u64) -> u64 {
    largest.saturating_mul(3)
}

/// Granularity, tokens, of the layout of state that is kept in host memory and copied to a device: a change of layout
/// copies all filled tokens.
const STATE_STEP: u64 = 64;

/// Tokens that such a state is laid out for, and copied, while it holds `held` of at most `capacity` tokens.
pub fn state_tokens(held: u64, capacity: u64) -> u64 {
    held.max(1).checked_next_multiple_of(STATE_STEP).map_or(capacity, |tokens| tokens.min(capacity))
}

/// Locks up to `room` bytes of blocks of these sizes, bytes, so that the most that is read of one block is as small as possible: memory for the
/// rest of one block is needed, too. Returns the bytes that are locked of each.
///
/// What is read of a block is `min(size, level)`, with the smallest level for which `sum max(size - level, 0) <= room`.
pub fn locked_bytes(sizes: &[u64], room: u64) -> Vec<u64> {
    let level = read_level(sizes, room, 0);
    sizes.iter().map(|size| size - size.min(&level)).collect()
}

/// The most bytes that are read of one block, if `room` bytes hold what is locked of all and, at the same time, the rest of one:
/// the smallest level with `sum max(size - level, 0) + level <= room`; the largest size if not even that block fits.
pub fn read_level_beside_one(sizes: &[u64], room: u64) -> u64 {
    read_level(sizes, room, 1)
}

/// The smallest level with `sum max(size - level, 0) + at_once level <= room`, `at_once` 0 or 1.
fn read_level(sizes: &[u64], room: u64, at_once: u64) -> u64 {
    let mut largest_first = sizes.to_vec();
    largest_first.sort_unstable_by_key(|size| std::cmp::Reverse(*size));
    // Of the `count` largest blocks part is locked: `above - (count - at_once) level = room`.
    let (mut above, mut level) = (0u128, largest_first.first().copied().unwrap_or(0));
    for (count, next) in (0u64..).zip(largest_first.iter().copied().chain([0])) {
        let levelled = u128::from(count.saturating_sub(at_once));
        let missing = above.saturating_sub(room.into());
        match levelled {
            0 if count < at_once && next > room => return level,
            // What is locked of a single block needs no memory to be read to.
            0 => level = next,
            // At most the level before, which is a size.
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
        // Too little for the largest; it alone, of which no more is read than of the others.
        assert_eq!((level(699), level(700)), (700, 100));
        // 650 + 3 * 50 locked, and 50.
        assert_eq!(level(850), 50);
        assert_eq!((level(999), level(1000), level(u64::MAX)), (1, 0, 0));
        assert_eq!([read_level_beside_one(&[80], 79), read_level_beside_one(&[80], 80)], [80, 0]);
        assert_eq!(read_level_beside_one(&[], 0), 0);
    }
}
