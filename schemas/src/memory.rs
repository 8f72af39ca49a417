//! Host memory that is neither weights nor state nor activations: the same for who plans it and for who keeps to it.

/// What the process takes for itself, bytes: the runtime's library, its arena, its tables.
pub const PROCESS: u64 = 64 << 20;
/// Weights read ahead of the block that is needed next, bytes: what a disk of 4 GB/s reads in 4 ms, longer than a
/// block on the host computes where reading is the bottleneck.
pub const READ_AHEAD: u64 = 16 << 20;
