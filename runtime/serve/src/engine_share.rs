//! What an engine may take of the memory that all engines share.

/// What an engine may take at present, of what it can do without.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineShare {
    /// Bytes of RAM for KV pages.
    pub kv: u64,
    /// Sequences that it runs and keeps, at least one.
    pub sequences: u64,
    /// Bytes of locked weights.
    pub locked: u64,
}
