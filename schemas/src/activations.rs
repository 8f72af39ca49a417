//! The activations by which operators multiply 4- and 8-bit weights.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The activations of operators that multiply 4- and 8-bit weights on the CPU (`MatMulNBits`, `QMoE`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// As the model states for each operator.
    #[default]
    Exported,
    /// Rounded to 8 bits, block by block (`accuracy_level` 4).
    Int8,
}

impl Activations {
    /// [`Activations::Int8`] if wanted.
    pub fn int8_if(wanted: bool) -> Self {
        if wanted { Activations::Int8 } else { Activations::Exported }
    }

    /// Whether activations stay as the model states for each operator.
    pub fn are_exported(&self) -> bool {
        *self == Activations::Exported
    }
}
