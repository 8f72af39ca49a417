//! Partitions: their blocks, devices, weights, inputs and outputs.

use super::HostKernels;
use crate::{ByteSize, DType, Provider, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A run of blocks written as one ONNX file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Partition {
    /// `gpu_0`, `cpu_0`, ... unique in the plan.
    pub name: String,
    /// The ONNX file, relative to the plan.
    pub file: String,
    /// Directory, relative to the plan, that external data locations in `file` resolve against.
    pub weights_dir: String,
    /// Device that it computes on: in both phases, or only while decoding if `prefill` is present.
    pub device: String,
    /// Residency of its weights on that device.
    #[serde(default, skip_serializing_if = "Residency::is_resident")]
    pub residency: Residency,
    /// Weights that are inputs of the file, after `inputs`, in the file's order; empty if weights are constants.
    #[serde(default, skip_serializing_if = "Vec::is_empty", serialize_with = "crate::dim::each_on_one_line")]
    pub weights: Vec<WeightInput>,
    /// If weights are inputs: the file of the same partition with weights as constants, relative to the plan, for
    /// machines without the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_file: Option<String>,
    /// How it computes in prefill, if that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<PrefillVariant>,
    /// If it begins with a mixture of experts: the experts, which the runtime reads from disk by demand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
    /// Execution providers in order of preference.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub providers: Vec<Provider>,
    /// Labels of the blocks inside, in order.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub blocks: Vec<String>,
    /// Graph inputs. A file with weight inputs may serve several partitions: its inputs are matched by position, those
    /// of other files by name.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub inputs: Vec<PartitionInput>,
    /// Graph outputs, matched like inputs.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub outputs: Vec<PartitionOutput>,
    /// What its operators and weights demand of CPU kernels. `packed` is the same in all partitions.
    #[serde(default, skip_serializing_if = "HostKernels::is_default", serialize_with = "crate::dim::map_on_one_line")]
    pub host_kernels: HostKernels,
    /// Memory that it needs on its device.
    #[serde(serialize_with = "crate::dim::map_on_one_line")]
    pub bytes: PartitionBytes,
    /// Why it is on this device, in one line.
    pub reason: String,
}

/// The experts of a mixture whose router computes in an earlier partition. Before a run the runtime reads the router's
/// logits and brings the experts that they select into memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// The input that selects them, with one row for each token.
    pub router: String,
    /// How many experts there are.
    pub count: u64,
    /// How many of them each token selects.
    pub active: u64,
    /// How the numbers of the router select them.
    #[serde(default, skip_serializing_if = "SelectedBy::is_default")]
    pub selected_by: SelectedBy,
    /// The weights that hold one slice for each expert, by their names in the partition's file. If each expert has weights of its own, those of
    /// the first expert, then those of the second, as many of each.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub weights: Vec<String>,
    /// Whether each expert has weights of its own.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub apart: bool,
    /// Their bytes.
    pub bytes: ByteSize,
    /// Which experts a later partition will probably select.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<NextExperts>,
}

/// A prediction of the experts that a later partition selects: its router, computed early with the hidden state of an earlier layer. While the
/// partition with this prediction runs, the runtime reads an expert of the later one ahead, if no other weights are read from disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NextExperts {
    /// The later partition, which has experts.
    pub partition: String,
    /// The input with the predicted logits of its router, one row for each token. No operator reads it.
    pub router: String,
}

/// How the router of a mixture selects experts for a token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SelectedBy {
    /// Those with the largest logits; of equal ones those with the larger index.
    #[default]
    Logits,
    /// The kernel compares rounded probabilities instead of logits, so that it may select another expert whose logit is nearly equal. The
    /// runtime then reads all that it may select.
    Probabilities,
    /// Those whose score is other than zero.
    Scores,
    /// Those whose numbers the input has, as many for each token as it selects.
    Numbers,
    /// Those with the largest weights, without those of weight 0.
    Weights,
}

impl SelectedBy {
    fn is_default(&self) -> bool {
        *self == SelectedBy::default()
    }
}

/// A graph input of a partition and its source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionInput {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape; `?` for sizes that are unknown before a run.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// `model`, `state`, or the name of the earlier partition that produces it.
    pub from: String,
}

/// A graph output of a partition and its use.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionOutput {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape; `?` for sizes that are unknown before a run.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// Its use.
    pub to: OutputUse,
}

/// The use of a partition's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputUse {
    /// An output of the model, which later partitions may read too.
    Model,
    /// The new value of a state.
    State,
    /// A boundary tensor, which later partitions read.
    Boundary,
}

/// Memory that a partition needs on its device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionBytes {
    /// Weights, each counted once.
    pub weights: ByteSize,
    /// The part of the weights that is locked in memory (`mlock`), if the rest is read from disk in each pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<ByteSize>,
    /// State at the planned context and batch.
    pub kv: ByteSize,
    /// Activations in a prefill pass of the planned size.
    pub workspace: ByteSize,
}

/// Where a partition's weights are between passes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// In the memory of its device.
    #[default]
    Resident,
    /// Not in the memory of its device. Weights of a GPU are in host memory, or on disk if that is too small, and
    /// copied into a slot before each run. Weights of the host are on disk and read before each run, except for the
    /// locked part.
    Streamed,
    /// In a memory-mapped file, for the host only: a run touches a few rows of a table, and the system reads those
    /// pages.
    Mapped,
}

/// How a partition computes in prefill, if that differs from decoding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PrefillVariant {
    /// Device.
    pub device: String,
    /// Residency of its weights there.
    #[serde(default, skip_serializing_if = "Residency::is_resident")]
    pub residency: Residency,
    /// The ONNX file, relative to the plan.
    pub file: String,
    /// Execution providers in order of preference.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub providers: Vec<Provider>,
    /// Weights that are inputs of that file.
    #[serde(default, skip_serializing_if = "Vec::is_empty", serialize_with = "crate::dim::each_on_one_line")]
    pub weights: Vec<WeightInput>,
    /// The file with weights as constants, for machines without the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_file: Option<String>,
}

/// A weight that is an input of a partition's file, and the location of its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightInput {
    /// Its name in the model.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Sizes.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Vec<u64>,
    /// The file that holds it, relative to the partition's `weights_dir`.
    pub file: String,
    /// Offset of its first byte.
    pub offset: u64,
}

impl WeightInput {
    /// Its bytes; `None` for strings and on overflow of 64 bits.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
        self.dtype.bytes_for(elements)
    }
}

/// How a partition computes in one phase, borrowed from the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartitionVariant<'a> {
    /// Device.
    pub device: &'a str,
    /// Residency of its weights there.
    pub residency: Residency,
    /// The ONNX file, relative to the plan.
    pub file: &'a str,
    /// Execution providers in order of preference.
    pub providers: &'a [Provider],
    /// Weights that are inputs of the file.
    pub weights: &'a [WeightInput],
    /// The file with weights as constants.
    pub host_file: Option<&'a str>,
}

impl Residency {
    /// Whether it is `Resident`.
    pub fn is_resident(&self) -> bool {
        *self == Residency::Resident
    }
}

impl Partition {
    /// How it computes while decoding, and in both phases without `prefill`.
    pub fn decode_variant(&self) -> PartitionVariant<'_> {
        PartitionVariant {
            device: &self.device,
            residency: self.residency,
            file: &self.file,
            providers: &self.providers,
            weights: &self.weights,
            host_file: self.host_file.as_deref(),
        }
    }

    /// How it computes in prefill.
    pub fn prefill_variant(&self) -> PartitionVariant<'_> {
        self.prefill.as_ref().map_or(self.decode_variant(), |variant| PartitionVariant {
            device: &variant.device,
            residency: variant.residency,
            file: &variant.file,
            providers: &variant.providers,
            weights: &variant.weights,
            host_file: variant.host_file.as_deref(),
        })
    }

    /// Its distinct variants: for decoding, and for prefill if that differs.
    pub fn variants(&self) -> impl Iterator<Item = PartitionVariant<'_>> {
        std::iter::once(self.decode_variant()).chain(self.prefill.is_some().then(|| self.prefill_variant()))
    }

    /// Device that it computes on in prefill.
    pub fn prefill_device(&self) -> &str {
        self.prefill_variant().device
    }

    /// Whether its weights are streamed in either phase.
    pub fn is_streamed(&self) -> bool {
        self.variants().any(|variant| variant.residency == Residency::Streamed)
    }
}
