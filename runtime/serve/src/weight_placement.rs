//! Where the weights of a model lie, as clients see it.

use serde::Serialize;

/// Weights on one device with one residency.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WeightPlacement {
    /// The device.
    pub device: String,
    /// The device that the plan names, if it is not available and another one is used.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned_device: Option<String>,
    /// Where its weights are between passes: `resident`, `streamed` or `mapped`.
    pub weights: &'static str,
    /// Partitions.
    pub partitions: usize,
    /// Their blocks, in the order of the model.
    pub blocks: Vec<String>,
    /// Bytes of their weights.
    pub bytes: u64,
    /// Of weights that are streamed from disk, the locked bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub locked_bytes: Option<u64>,
}
