//! Host memory that is neither weights nor state nor activations: the same for who plans it and for who keeps to it.

/// What the process takes for itself, bytes: the runtime's library, its arena, its tables.
pub const PROCESS: u64 = 64 << 20;
/// Weights read ahead of the block that is needed next, bytes: what a disk of 4 GB/s reads in 4 ms, longer than a
/// block on the host computes where reading is the bottleneck.
pub const READ_AHEAD: u64 = 16 << 20;

/// State that lies on the host and is computed on elsewhere is laid out for a multiple of so many tokens, because another layout
/// costs a copy of all that is filled.
const STATE_STEP: u64 = 64;

/// Tokens that such a state is laid out for, and copied, while it holds so many.
pub fn state_tokens(held: u64, capacity: u64) -> u64 {
    held.max(1).checked_next_multiple_of(STATE_STEP).map_or(capacity, |tokens| tokens.min(capacity))
}
