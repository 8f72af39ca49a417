//! The weights that the host reads in a pass where its memory does not hold all of them.
//!
//! At most the same number of bytes is read of every block in each pass; a block of more bytes keeps the rest locked, and a smaller one is read
//! whole. The bytes read of one block are in memory beside what is locked, so a large remainder would take memory from all
//! ([`HostReads::level`]).

use hpp_schema::memory::read_level_beside_one;

/// Weights that the host reads in a pass of a phase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostReads {
    blocks: Vec<BlockRead>,
}

/// Weights that the host reads of one block, packed bytes, without those of blocks before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BlockRead {
    /// The block.
    pub block: usize,
    /// All of them.
    pub bytes: u64,
    /// Experts among them that are read by demand.
    pub experts: u64,
    /// Whether the host computes with them; else they are copied to a GPU.
    pub is_computed: bool,
}

impl HostReads {
    pub(crate) fn new(blocks: Vec<BlockRead>) -> Self {
        HostReads { blocks }
    }

    /// The same with other bytes of the blocks that the host computes with.
    pub(crate) fn with_computed(mut self, bytes: impl Fn(usize) -> u64) -> Self {
        for read in self.blocks.iter_mut().filter(|read| read.is_computed) {
            read.bytes = bytes(read.block);
        }
        self
    }

    /// The same without experts that are read by demand.
    pub(crate) fn without_experts(&self) -> Self {
        let rest = |read: &BlockRead| BlockRead { bytes: read.bytes.saturating_sub(read.experts), experts: 0, ..*read };
        HostReads { blocks: self.blocks.iter().map(rest).collect() }
    }

    /// All bytes.
    pub fn all(&self) -> u64 {
        self.blocks.iter().map(|read| read.bytes).fold(0, u64::saturating_add)
    }

    /// The bytes of the block that has most.
    pub(crate) fn largest(&self) -> u64 {
        self.blocks.iter().map(|read| read.bytes).max().unwrap_or(0)
    }

    /// The most bytes that are read of one block, where `room` bytes hold what is locked of all blocks and the rest of one.
    pub(crate) fn level(&self, room: u64) -> u64 {
        let sizes: Vec<u64> = self.blocks.iter().map(|read| read.bytes).collect();
        read_level_beside_one(&sizes, room)
    }

    /// Bytes that are not locked at this level.
    pub(crate) fn unlocked(&self, level: u64) -> u64 {
        self.blocks.iter().map(|read| read.bytes.min(level)).fold(0, u64::saturating_add)
    }

    /// Bytes that are decompressed at this level, if that is a share of the weights that the host computes with, and bytes that are not
    /// decompressed are locked first.
    pub(crate) fn decompressed(&self, share: f64, level: u64) -> f64 {
        let computed = self.blocks.iter().filter(|read| read.is_computed);
        computed.map(|read| (share * read.bytes as f64).min(read.bytes.min(level) as f64)).sum()
    }
}
