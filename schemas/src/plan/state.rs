//! States: tensors carried from pass to pass.

use crate::{ByteSize, DType, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A tensor carried from pass to pass.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Graph input that receives the carried value.
    pub past: String,
    /// Graph output that produces the next value.
    pub present: String,
    /// The partition that owns both.
    pub partition: String,
    /// The layer it belongs to.
    pub layer: u32,
    /// Element type.
    pub dtype: DType,
    /// Shape of `past`. All dimensions except the one at `axis` are known once the batch is.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// How `present` relates to `past`.
    pub update: StateUpdate,
    /// Whether its operator accepts a buffer of any capacity that holds the tokens so far; a sliding window needs its
    /// full buffer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub any_capacity: bool,
    /// Device that holds it.
    pub device: String,
    /// Whether it lies in a file between the runs of its partition, and not in host memory.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_disk: bool,
    /// Bytes of `past` at full capacity, or at the context if that is less, for one sequence.
    pub bytes: ByteSize,
}

impl State {
    /// Bytes of memory that it takes for one sequence: runs write a state that is not updated in place to a second buffer.
    pub fn memory(&self) -> u64 {
        match self.update {
            StateUpdate::Append { .. } | StateUpdate::Sliding { .. } | StateUpdate::Replace => {
                self.bytes.0.saturating_mul(2)
            }
            StateUpdate::InPlace { .. } | StateUpdate::ReadOnly => self.bytes.0,
        }
    }

    /// The state in sequences of `context` tokens, of a plan for `planned` tokens. Its bytes change with its tokens.
    pub fn for_context(&self, planned: u64, context: u64) -> Self {
        let update = self.update.for_context(planned, context);
        let tokens = |update: StateUpdate, context: u64| match update {
            StateUpdate::Sliding { capacity, .. } => Some(capacity.min(context)),
            other => other.tokens().map(|(_, capacity)| capacity),
        };
        let bytes = match tokens(self.update, planned).zip(tokens(update, context)) {
            Some((before, after)) => {
                let bytes = (u128::from(self.bytes.0) * u128::from(after)).div_ceil(u128::from(before.max(1)));
                u64::try_from(bytes).unwrap_or(u64::MAX)
            }
            None => self.bytes.0,
        };
        State { update, bytes: ByteSize(bytes), ..self.clone() }
    }
}

/// How a state's `present` relates to its `past`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", tag = "kind", deny_unknown_fields)]
pub enum StateUpdate {
    /// The operator writes new tokens into the buffer that it reads: one buffer with `capacity` tokens along `axis` is
    /// bound as both `past` and `present`.
    InPlace {
        /// The token axis.
        axis: usize,
        /// Tokens that the buffer holds.
        capacity: u64,
    },
    /// `present` is `past` with the tokens of this pass appended along `axis`; initially empty.
    Append {
        /// The token axis.
        axis: usize,
        /// Limit on its tokens.
        capacity: u64,
    },
    /// `present` is the last tokens, at most `capacity`, of `past` with the tokens of this pass appended along `axis`; initially empty.
    Sliding {
        /// The token axis.
        axis: usize,
        /// Tokens that the graph keeps; they may be more than the context.
        capacity: u64,
    },
    /// `present` has the shape of `past` and replaces it; initially zero.
    Replace,
    /// The caller computes `past` once, and the model only reads it.
    ReadOnly,
}

impl StateUpdate {
    /// The update in sequences of `context` tokens, of a plan for `planned` tokens. Buffers planned for the whole context scale with it; smaller ones
    /// are sliding windows and keep their size. A window that the graph keeps itself holds at most the context.
    pub fn for_context(self, planned: u64, context: u64) -> Self {
        let scale = |capacity: u64| if capacity == planned { context } else { capacity };
        match self {
            StateUpdate::InPlace { axis, capacity } => StateUpdate::InPlace { axis, capacity: scale(capacity) },
            StateUpdate::Append { axis, capacity } => StateUpdate::Append { axis, capacity: scale(capacity) },
            StateUpdate::Sliding { axis, capacity } => StateUpdate::Sliding { axis, capacity: capacity.min(context) },
            other @ (StateUpdate::Replace | StateUpdate::ReadOnly) => other,
        }
    }

    /// The axis of tokens and the most tokens along it; `None` for a state whose shape does not depend on tokens.
    pub fn tokens(self) -> Option<(usize, u64)> {
        match self {
            StateUpdate::InPlace { axis, capacity }
            | StateUpdate::Append { axis, capacity }
            | StateUpdate::Sliding { axis, capacity } => Some((axis, capacity)),
            StateUpdate::Replace | StateUpdate::ReadOnly => None,
        }
    }
}
