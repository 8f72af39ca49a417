//! The draft that a model has of itself.

use crate::ByteSize;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A plan of the same model with quantized weights. In speculative decoding it proposes tokens, which one pass of the model verifies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct OwnDraft {
    /// Its `plan.yaml`, relative to the plan.
    pub plan: String,
    /// Bits of its weight matrices: 4 or 8.
    pub bits: u32,
    /// Host memory that it takes of `budgets.ram` with the state of one sequence, bytes.
    pub host_memory: ByteSize,
    /// Bytes of `host_memory` that belong to a sequence; further sequences take as many each.
    pub sequence_memory: ByteSize,
}
