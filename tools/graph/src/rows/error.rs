//! The reasons why a layer cannot be divided by rows.

/// A layer cannot be divided by rows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot divide {block} by rows: {}{reason}", at(.node))]
pub struct RowsError {
    /// Label of the block.
    pub block: String,
    /// Operator and name of the node; empty if the reason is not a node.
    pub node: String,
    /// The reason.
    pub reason: RowsReason,
}

fn at(node: &str) -> String {
    if node.is_empty() { String::new() } else { format!("{node} ") }
}

/// Why a node or a layer cannot be divided. With the node in front of it, the text is a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum RowsReason {
    #[error("only layers can be divided, into 2 or more shards (asked for {shards})")]
    NotALayer { shards: usize },
    #[error("reads a part of {value:?}, and this build does not know how that operator computes on parts")]
    Operator { value: String },
    #[error("has {heads} {kind}, which cannot be divided equally among {shards} shards")]
    Heads { heads: u64, kind: &'static str, shards: u64 },
    #[error("has {columns} {kind}, which cannot be divided equally among {shards} shards")]
    Columns { columns: u64, kind: &'static str, shards: u64 },
    #[error("has quantization blocks of {block_size} rows, and the {rows} rows of a shard are not a multiple of them")]
    Blocks { block_size: u64, rows: u64 },
    #[error("has zero points of {bits} bits, and those of a shard's {blocks} blocks do not fill whole bytes")]
    ZeroPoints { bits: u64, blocks: u64 },
    #[error("reads {weight:?}, which is computed from another weight; only stored weights can be divided")]
    ComputedWeight { weight: String },
    #[error("reads the matrix {weight:?}, and this build does not know how that operator's matrices are divided")]
    Matrix { weight: String },
    #[error("is a mixture of experts; its experts are not divided by rows")]
    Mixture,
    #[error("reads the state {state:?}, which is not the KV cache of a GroupQueryAttention, or only its shape")]
    OtherState { state: String },
    #[error("has a body (If, Loop, Scan), which is not copied for each shard")]
    Body,
    #[error("is unknown to this build, or gives other results each time, so that copies in each shard may differ")]
    Random,
    #[error("combines a part of {part:?} with all of {whole:?}")]
    Mixed { part: String, whole: String },
    #[error("{0}")]
    Form(&'static str),
    #[error("reads {value:?}, of which each shard has a part, outside the divided layers")]
    ReadOutside { value: String },
    #[error("produces {value:?}, a model output of which each shard would have a part")]
    Returned { value: String },
    #[error("no matrix product in it ends a path that begins with another, so that nothing can be divided")]
    Nothing,
    #[error("no block follows it that could add what the shards computed")]
    NoBlockAfter,
}
