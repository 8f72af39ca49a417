//! Partitions: what is inside, where it computes, what goes in and out.

use super::Provider;
use crate::{ByteSize, DType, Shape};
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
    /// Name of the device it computes on: in both phases, or while decoding where `prefill` says otherwise.
    pub device: String,
    /// Whether its weights stay on that device.
    #[serde(default, skip_serializing_if = "Residency::is_resident")]
    pub residency: Residency,
    /// Weights that are inputs of the file, behind `inputs`, in the file's order; empty where they are constants in it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<WeightInput>,
    /// Where weights are inputs: the same partition with its weights as constants, relative to the plan, for a machine without
    /// the device.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_file: Option<String>,
    /// How it computes while the prompt is taken in, where that is elsewhere or otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Placement>,
    /// Execution providers to try, best first.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub providers: Vec<Provider>,
    /// Labels of the blocks inside, in order.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub blocks: Vec<String>,
    /// Graph inputs. A file whose weights are inputs may serve several partitions: there they are meant by position, else by
    /// name.
    pub inputs: Vec<PartitionInput>,
    /// Graph outputs, likewise.
    pub outputs: Vec<PartitionOutput>,
    /// Memory this partition needs on its device.
    pub bytes: PartitionBytes,
    /// Why it is here, in one line.
    pub reason: String,
}

/// One graph input of a partition and where its value comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionInput {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape; `?` where nothing is known before it runs.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// `model`, `state`, or the name of the earlier partition that produces it.
    pub from: String,
}

/// One graph output of a partition and where its value goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionOutput {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape; `?` where nothing is known before it runs.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// Who reads it.
    pub to: OutputUse,
}

/// Who reads a partition's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputUse {
    /// It is an output of the model (a later partition may read it too).
    Model,
    /// It is the present value of a state.
    State,
    /// Later partitions read it.
    Boundary,
}

/// Memory a partition needs on its device.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PartitionBytes {
    /// Weights, each counted once.
    pub weights: ByteSize,
    /// The part of them that stays in memory, where the others are read from disk each time it computes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub locked: Option<ByteSize>,
    /// State at the planned context and batch.
    pub kv: ByteSize,
    /// Activations at the planned prefill.
    pub workspace: ByteSize,
}

/// Where a partition's weights are when it computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Residency {
    /// On its device for good.
    #[default]
    Resident,
    /// One tier below its device: those of an accelerator in host memory, copied into a slot each time it computes; those
    /// of the host on disk, read each time but for the locked part.
    Streamed,
    /// On disk, for the host only: a run touches few of them (rows of a table), and those are read page by page.
    Mapped,
}

/// How a partition computes in one phase, where that differs from the other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Placement {
    /// Name of the device.
    pub device: String,
    /// Whether weights stay there.
    #[serde(default, skip_serializing_if = "Residency::is_resident")]
    pub residency: Residency,
    /// The ONNX file, relative to the plan.
    pub file: String,
    /// Execution providers to try, best first.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub providers: Vec<Provider>,
    /// Weights that are inputs of that file, as in the partition itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub weights: Vec<WeightInput>,
    /// The file for a machine without the device, as in the partition itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_file: Option<String>,
}

/// A weight that is an input of a partition's file, and where its bytes lie.
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
    /// Its first byte there.
    pub offset: u64,
}

impl WeightInput {
    /// Bytes it takes; `None` beyond 64 bits, and for elements without a size.
    pub fn bytes(&self) -> Option<u64> {
        let elements = self.shape.iter().try_fold(1u64, |product, size| product.checked_mul(*size))?;
        self.dtype.bytes_for(elements)
    }
}

/// How a partition computes in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form<'a> {
    /// Name of the device.
    pub device: &'a str,
    /// Whether weights stay there.
    pub residency: Residency,
    /// The ONNX file, relative to the plan.
    pub file: &'a str,
    /// Execution providers to try, best first.
    pub providers: &'a [Provider],
    /// Weights that are inputs of the file.
    pub weights: &'a [WeightInput],
    /// The same with weights as constants.
    pub host_file: Option<&'a str>,
}

impl Residency {
    /// Whether weights stay.
    pub fn is_resident(&self) -> bool {
        *self == Residency::Resident
    }
}

impl Partition {
    /// How it computes while decoding, and in both phases where nothing else is said.
    pub fn form(&self) -> Form<'_> {
        Form {
            device: &self.device,
            residency: self.residency,
            file: &self.file,
            providers: &self.providers,
            weights: &self.weights,
            host_file: self.host_file.as_deref(),
        }
    }

    /// How it computes while the prompt is taken in.
    pub fn prefill_form(&self) -> Form<'_> {
        self.prefill.as_ref().map_or(self.form(), |placement| Form {
            device: &placement.device,
            residency: placement.residency,
            file: &placement.file,
            providers: &placement.providers,
            weights: &placement.weights,
            host_file: placement.host_file.as_deref(),
        })
    }

    /// Its forms: that of decoding, and another for the prompt where there is one.
    pub fn forms(&self) -> impl Iterator<Item = Form<'_>> {
        std::iter::once(self.form()).chain(self.prefill.is_some().then(|| self.prefill_form()))
    }

    /// Where it computes while the prompt is taken in.
    pub fn prefill_device(&self) -> &str {
        self.prefill_form().device
    }

    /// Whether its weights are copied or read each time it computes, in either phase.
    pub fn is_streamed(&self) -> bool {
        self.forms().any(|form| form.residency == Residency::Streamed)
    }
}
