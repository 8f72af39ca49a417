//! The weights that the host reads in a pass where its memory does not hold all of them.
//!
//! One limit, the level, applies to all blocks: a pass reads at most that many bytes of a block. A larger block keeps the rest locked, and a
//! smaller one is read whole. Memory holds the bytes read of one block beside all locked bytes, so one block with a large unlocked part would
//! take memory from the locked parts of all others ([`HostReads::level`]).

use hpp_schema::memory::read_level_beside_one;

/// Weights that the host reads in a pass of a phase.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostReads {
    blocks: Vec<BlockRead>,
}

/// Weights that the host reads of one block, packed bytes, without weights that an earlier block reads too.
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

    /// The same reads, with `bytes` of a block in place of its own for each block that the host computes with.
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

    /// The level: the most bytes that are read of one block if `room` bytes hold the locked parts of all blocks and the
    /// rest of one.
    pub(crate) fn level(&self, room: u64) -> u64 {
        let sizes: Vec<u64> = self.blocks.iter().map(|read| read.bytes).collect();
        read_level_beside_one(&sizes, room)
    }

    /// Bytes that are not locked at this level.
    pub(crate) fn unlocked(&self, level: u64) -> u64 {
        self.blocks.iter().map(|read| read.bytes.min(level)).fold(0, u64::saturating_add)
    }

    /// Bytes that are decompressed at this level. Of each block that the host computes with, `share` is stored compressed, and bytes
    /// that are not compressed are locked first.
    pub(crate) fn decompressed(&self, share: f64, level: u64) -> f64 {
        let computed = self.blocks.iter().filter(|read| read.is_computed);
        computed.map(|read| (share * read.bytes as f64).min(read.bytes.min(level) as f64)).sum()
    }
}
