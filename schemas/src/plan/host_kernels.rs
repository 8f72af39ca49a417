//! What a partition's operators and weights demand of ONNX Runtime's CPU kernels.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What operators and weights demand of CPU kernels. `hpp-split` decides it, so that a run reads no graph.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct HostKernels {
    /// Kernels read the weights from a packed copy in a layout of their own, however long packing takes.
    #[serde(default, skip_serializing_if = "is_false")]
    pub packed: bool,
    /// Kernels compute 16-bit weights in 32 bits. ONNX Runtime widens them when it creates a session.
    #[serde(default, skip_serializing_if = "is_false")]
    pub widened: bool,
    /// Something large depends on weights alone, such as a transposed table. ONNX Runtime computes it when it creates a session, and it stays in
    /// memory unless it is prepared in a file.
    #[serde(default, skip_serializing_if = "is_false")]
    pub folded: bool,
    /// An operator whose packed weights may change when they are saved and loaded again: they are never saved, so these
    /// weights stay in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unsaved: Option<String>,
    /// A kernel computes wrong results if its weights are inputs instead of constants.
    #[serde(default, skip_serializing_if = "is_false")]
    pub constant_weights: bool,
    /// Experts state that their activations are rounded to 8 bits (`accuracy_level` 4).
    #[serde(default, skip_serializing_if = "is_false")]
    pub integer_experts: bool,
}

impl HostKernels {
    /// Whether nothing is demanded.
    pub fn is_default(&self) -> bool {
        *self == HostKernels::default()
    }
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(value: &bool) -> bool {
    !value
}
