//! Constants for host memory that the planner and the runtime must agree on.

/// Memory of the process itself, bytes: code and tables of ONNX Runtime, its arena.
pub const PROCESS: u64 = 64 << 20;
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
