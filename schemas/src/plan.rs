//! The plan: everything `hpp-split` decided, with no choice left for `hpp-exec`.
//!
//! Paths are relative to the directory the plan lies in. Unknown fields are refused. A plan is hostile input:
//! [`Plan::check`](crate::Plan::check) says what is wrong with one before anything it names is opened.

mod generation;
mod partition;
mod predictions;
mod state;

pub use generation::*;
pub use partition::*;
pub use predictions::*;
pub use state::*;

use crate::{ByteSize, DType, Seal, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The plan version this build writes and the newest it reads.
pub const PLAN_VERSION: u32 = 1;

/// A complete, ordered decision: which partition computes where, from which files, in which order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Format version of this file. Always the first field.
    pub hpp_plan: u32,
    /// Which model this is a plan for.
    pub model: Model,
    /// The limits the plan was made for.
    pub budgets: Budgets,
    /// Where partitions may compute.
    pub devices: Vec<Device>,
    /// Runs of blocks in execution order, each one ONNX file.
    pub partitions: Vec<Partition>,
    /// Tensors carried from one step to the next: KV caches, convolution and recurrent state.
    pub states: Vec<State>,
    /// What happens, in order, in each phase.
    pub schedule: Schedule,
    /// Room for the tensors that cross a partition boundary.
    pub buffers: Vec<Buffer>,
    /// How text becomes tokens and tokens become text; absent for models that are not language models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<Generation>,
    /// What the cost model expects.
    pub predictions: Predictions,
    /// Every file this plan depends on, with what it must contain.
    pub files: Vec<FileRecord>,
    /// Digests of what `hpp-split` decided. Only in the file: written by [`Plan::to_yaml`], compared and taken out by
    /// [`Plan::from_yaml`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Seal>,
}

/// The model a plan was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A label for people: usually the model directory's name.
    pub name: String,
    /// The unsplit ONNX file, relative to the plan; what `hpp-exec verify` compares with.
    pub source: String,
    /// The unsplit model with every boundary tensor added to its outputs, relative to the plan; used by
    /// `hpp-exec verify` to find the first boundary that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tapped: Option<String>,
    /// Directory, relative to the plan, that external data locations in `source` resolve against.
    pub weights_dir: String,
    /// What kind of step the runtime has to drive.
    pub kind: ModelKind,
    /// Number of layers found.
    pub layers: u32,
    /// Longest sequence the model was built for, in tokens, where its configuration says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_length: Option<u64>,
    /// Number of token ids, where known; larger ids are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<u64>,
    /// Inputs of the unsplit model, in its own order, states excluded.
    pub inputs: Vec<ModelInput>,
    /// Outputs of the unsplit model, in its own order, states excluded.
    pub outputs: Vec<ModelOutput>,
}

/// What drives the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// Generates tokens and carries state from step to step.
    Decoder,
    /// Generates tokens but keeps no state: every step recomputes the sequence.
    DecoderWithoutCache,
    /// One run from inputs to outputs: encoders, vision models, parts of a pipeline.
    SingleRun,
}

/// An input of the unsplit model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelInput {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// What the runtime puts there.
    pub role: InputRole,
}

/// What the runtime puts into an input. Symbols: B batch, S tokens of this step, T tokens so far including this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputRole {
    /// Token ids `[B, S]`.
    TokenIds,
    /// Token embeddings `[B, S, hidden]`, computed by the caller.
    Embeddings,
    /// Ones `[B, T]`.
    AttentionMask,
    /// Positions of this step's tokens `[B, S]`, or `[3, B, S]` for three-axis rotary positions.
    PositionIds,
    /// Segment ids `[B, S]`, zero for a single text.
    TokenTypeIds,
    /// Indices into this step's tokens `[n]` whose logits are wanted. Added by `hpp-split`; absent in the source model.
    LogitPositions,
    /// A boolean that is always true: the cache branch of a merged decoder. Bound only when the source model runs.
    UseCacheBranch,
    /// Anything else: the caller must supply it.
    Free,
}

/// An output of the unsplit model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelOutput {
    /// The ONNX name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Symbolic shape.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub shape: Shape,
    /// Whether this is the next-token scores.
    pub role: OutputRole,
}

/// What an output means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputRole {
    /// Next-token scores `[B, positions, vocab]`.
    Logits,
    /// Anything else.
    Free,
}

/// The limits a plan keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Budgets {
    /// Device memory of each GPU, in the order gpu0, gpu1, ...
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub vram: Vec<ByteSize>,
    /// Host memory, where a limit was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<ByteSize>,
    /// Tokens one sequence may grow to; KV capacity is planned for this many.
    pub context: u64,
    /// Sequences in one pass.
    pub batch: u64,
    /// Device memory left for other programs and allocator slack, per GPU.
    pub margin: ByteSize,
}

/// A place that computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// `cpu`, `gpu0`, `gpu1`, ...
    pub name: String,
    /// Whether this is an accelerator or the host.
    pub kind: DeviceKind,
    /// Room for streamed weights; absent where nothing is streamed there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<Ring>,
    /// Most bytes of weights read from disk that lie in memory at once; absent where none are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<ByteSize>,
}

impl Plan {
    /// Bytes of each piece of a slot on a device, largest first: as many pieces as the partition with the most weights among
    /// its inputs there has, each as large as the largest that may come to lie in it. See [`in_slot`].
    pub fn slot(&self, device: &str) -> Vec<u64> {
        let mut slot: Vec<u64> = Vec::new();
        for form in self.partitions.iter().flat_map(Partition::forms).filter(|form| form.device == device) {
            for (at, weight) in in_slot(form.weights).into_iter().enumerate() {
                let bytes = form.weights[weight].bytes().unwrap_or(u64::MAX);
                match slot.get_mut(at) {
                    Some(piece) => *piece = bytes.max(*piece),
                    None => slot.push(bytes),
                }
            }
        }
        slot
    }
}

impl Plan {
    /// Bytes of weights that lie on an accelerator for good: all of those that are constants of their partition's file, those in
    /// slots of their own, and what files whose weights are inputs keep as constants, each file once. `None` beyond 64 bits.
    pub fn weights_on(&self, device: &str) -> Option<u64> {
        let mut files: BTreeMap<&str, u64> = BTreeMap::new();
        let mut slots = 0u64;
        for partition in &self.partitions {
            for form in partition.forms().filter(|form| form.device == device) {
                let inputs = form.weights.iter().try_fold(0u64, |sum, weight| sum.checked_add(weight.bytes()?))?;
                let constants = files.entry(form.file).or_default();
                *constants = partition.bytes.weights.0.saturating_sub(inputs).max(*constants);
                slots = slots.checked_add(if form.residency.is_resident() { inputs } else { 0 })?;
            }
        }
        files.into_values().try_fold(slots, u64::checked_add)
    }
}

/// Weights of one partition in the order of the pieces of a slot they go to: largest first, equal ones as they come. So
/// partitions of one class, whose weights differ in nothing but their contents, share slots without waste.
pub fn in_slot(weights: &[WeightInput]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(weights[*at].bytes()));
    order
}

impl Device {
    /// A device through which nothing is streamed.
    pub fn new(name: impl Into<String>, kind: DeviceKind) -> Device {
        Device { name: name.into(), kind, ring: None, window: None }
    }
}

/// A ring of slots in device memory, each with room for any partition streamed through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ring {
    /// Slots.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: ByteSize,
}

/// Host or accelerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The host processor and its memory.
    Cpu,
    /// An accelerator with memory of its own.
    Gpu,
}

/// An ONNX Runtime execution provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Provider {
    /// NVIDIA CUDA.
    Cuda,
    /// The WebGPU plugin (Vulkan, Metal or Direct3D 12 underneath).
    Webgpu,
    /// The CPU provider.
    Cpu,
}

impl Provider {
    /// As people call it.
    pub fn name(self) -> &'static str {
        match self {
            Provider::Cuda => "CUDA",
            Provider::Webgpu => "WebGPU",
            Provider::Cpu => "CPU",
        }
    }
}

/// What happens, in order, in each phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Steps that take the prompt in.
    pub prefill: Vec<Step>,
    /// Steps that produce one more token.
    pub decode: Vec<Step>,
    /// Most tokens one prefill pass may take; absent when there is no limit but the context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_chunk: Option<u64>,
}

/// One step of a schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Run a partition.
    Run(String),
    /// Move boundary tensors to another device.
    Copy(CopyStep),
}

/// A move of boundary tensors between devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyStep {
    /// Tensor names.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub values: Vec<String>,
    /// Device they are on.
    pub from: String,
    /// Device they go to.
    pub to: String,
}

/// Room for one boundary tensor on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Buffer {
    /// Name of the tensor.
    pub value: String,
    /// Device it lies on.
    pub device: String,
    /// Bytes per token of the pass where that is known; the runtime sizes it for the pass at hand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_token: Option<u64>,
}

/// A file the plan depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Path relative to the plan.
    pub path: String,
    /// What it is for.
    pub role: FileRole,
    /// Its exact length.
    pub bytes: ByteSize,
    /// BLAKE3 over the length, the first, last and evenly spaced 4 KiB samples: cheap, catches replacement.
    pub sampled: String,
    /// BLAKE3 over everything, where the file was small enough to read or reading it was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
}

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// The unsplit model.
    Source,
    /// The unsplit model with boundary outputs.
    Tapped,
    /// A partition.
    Partition,
    /// Weight bytes.
    Weights,
    /// Tokenizer, chat template.
    Text,
}
