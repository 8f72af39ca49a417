//! States: tensors carried from one step to the next.

use crate::{ByteSize, DType, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A tensor carried from one step to the next.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Graph input that receives the carried value.
    pub past: String,
    /// Graph output that holds the next one.
    pub present: String,
    /// The partition that owns both.
    pub partition: String,
    /// The layer it belongs to.
    pub layer: u32,
    /// Element type.
    pub dtype: DType,
    /// Shape of `past`; every dimension but the one at `axis` has a size once the batch is known.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// How `present` relates to `past`.
    pub update: StateUpdate,
    /// Whether its operator takes a buffer of any capacity that holds the tokens so far; a sliding window wants all of its buffer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub any_capacity: bool,
    /// Device that holds it.
    pub device: String,
    /// Bytes at full capacity for one sequence.
    pub bytes: ByteSize,
}

/// How a state's present relates to its past.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum StateUpdate {
    /// The operator writes new tokens into the buffer it reads: one buffer of fixed `capacity` along `axis` is bound
    /// as both past and present.
    InPlace {
        /// The token axis.
        axis: usize,
        /// Tokens the buffer holds.
        capacity: u64,
    },
    /// Present is past with this step's tokens appended along `axis`; empty at first.
    Append {
        /// The token axis.
        axis: usize,
        /// Most tokens it can grow to.
        capacity: u64,
    },
    /// Present has the shape of past and replaces it; zero at first.
    Replace,
    /// Past is computed once by the caller and only read.
    ReadOnly,
}
