//! The plan: all decisions of `hpp-split`. `hpp-exec` carries them out, and departs from them only where its machine has
//! less memory than the plan assumes or lacks a device.
//!
//! Paths are relative to the plan's directory. Unknown fields are refused. A plan is untrusted input:
//! [`Plan::check`](crate::Plan::check) must pass before any file that it names is opened.

mod draft;
mod generation;
mod gpu_states;
mod host_kernels;
mod partition;
mod predictions;
mod state;

pub use draft::*;
pub use generation::*;
pub use gpu_states::*;
pub use host_kernels::*;
pub use partition::*;
pub use predictions::*;
pub use state::*;

use crate::memory::state_window;
use crate::{ByteSize, DType, Provider, ProviderOptions, Seal, Shape};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The plan version that this build reads and writes.
pub const PLAN_VERSION: u32 = 2;

/// A complete plan: which partition computes where, from which files, in which order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    /// Format version of this file. Always the first field.
    pub hpp_plan: u32,
    /// The model.
    pub model: SourceModel,
    /// The limits that the plan keeps.
    pub budgets: Budgets,
    /// The host, and the GPUs that partitions may use.
    pub devices: Vec<Device>,
    /// Runs of blocks in execution order, each one ONNX file.
    pub partitions: Vec<Partition>,
    /// Tensors carried from pass to pass: KV caches, convolution and recurrent state.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub states: Vec<State>,
    /// The steps of each phase, in order.
    pub schedule: Schedule,
    /// Buffers for the tensors that cross a partition boundary.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub buffers: Vec<BoundaryBuffer>,
    /// Tokenizer, special tokens and sampling defaults; absent for models that are not language models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<GenerationConfig>,
    /// The draft that the model has of itself; absent if it has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<OwnDraft>,
    /// Predicted times.
    pub predictions: Predictions,
    /// Every file that this plan depends on, with its size and hashes.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub files: Vec<FileRecord>,
    /// Digests of what `hpp-split` decided. Only in the file: [`Plan::to_yaml`] writes it, [`Plan::from_yaml`] compares
    /// and removes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seal: Option<Seal>,
}

/// The model that a plan was made from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceModel {
    /// Label, usually the name of the model's directory.
    pub name: String,
    /// The unsplit ONNX file, relative to the plan; `hpp-exec verify` compares with it.
    pub source: String,
    /// The unsplit model with all boundary tensors as additional outputs, relative to the plan; `hpp-exec verify` uses
    /// it to find the first boundary that differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tapped: Option<String>,
    /// Directory, relative to the plan, that external data locations in `source` resolve against.
    pub weights_dir: String,
    /// How the runtime runs the model.
    pub kind: ModelKind,
    /// Why it generates no text, where a user may expect text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub no_text: Option<String>,
    /// Number of layers.
    pub layers: u32,
    /// Longest sequence that the model supports, tokens, if its configuration says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub context_length: Option<u64>,
    /// Positions that the plan's caches of rotary embeddings have rows for, if they were shortened: no run has a longer context.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub positions: Option<u64>,
    /// Most tokens of a text for which the model uses its first tables of rotary embeddings (LongRoPE); beyond, it gives all tokens of a
    /// pass others. Absent if it has one set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables_change_after: Option<u64>,
    /// Size of the vocabulary, if known; the runtime refuses larger token ids.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<u64>,
    /// Inputs of the unsplit model, in its own order, states excluded.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub inputs: Vec<ModelInput>,
    /// Outputs of the unsplit model, in its own order, states excluded.
    #[serde(serialize_with = "crate::dim::each_on_one_line")]
    pub outputs: Vec<ModelOutput>,
    /// The states of the unsplit model, where its layers are divided by rows and those of the plan are parts of them; otherwise they are the same,
    /// and this is empty. They belong to no partition and no device.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub states: Vec<State>,
    /// The number of experts of each layer that stay on a GPU while the CPU computes the others; absent where mixtures are whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_experts: Option<u64>,
    /// Whether operators round the activations of all tokens of a pass with one scale (`DynamicQuantizeLinear`). The logits of a token
    /// then depend on the other tokens of its pass.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rounds_whole_passes: bool,
    /// Whether the CPU's kernels round activations to 8 bits, of each token or block by itself (`accuracy_level` 4). Kernels of other providers
    /// may not; and where sums in another order differ in their last bit, that may decide between two levels.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rounds_activations: bool,
    /// The options of `hpp-split` that round weights or activations: `source` has them rounded too, and computes otherwise than the exported
    /// model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rounded_by: Vec<String>,
    /// What its operators and weights demand of CPU kernels.
    #[serde(default, skip_serializing_if = "HostKernels::is_default", serialize_with = "crate::dim::map_on_one_line")]
    pub host_kernels: HostKernels,
}

impl SourceModel {
    /// Whether layers are divided by rows, or mixtures between a GPU and the CPU: some sums are computed in another order than in the
    /// unsplit model.
    pub fn is_divided(&self) -> bool {
        !self.states.is_empty() || self.gpu_experts.is_some()
    }

    /// The longest context that this plan's files allow, tokens; `None` for any.
    pub fn longest_context(&self) -> Option<u64> {
        self.context_length.into_iter().chain(self.positions).min()
    }

    /// Whether the model returns logits only for the last position of a pass.
    pub fn gives_one_position(&self) -> bool {
        gives_one_position(&self.outputs)
    }

    /// Size of the vocabulary, from the shape of the logits. `None` if it is not fixed.
    pub fn vocabulary(&self) -> Option<u64> {
        let logits = self.outputs.iter().find(|output| output.role == OutputRole::Logits)?;
        logits.shape.last()?.as_fixed()
    }
}

/// Whether a model with these outputs returns logits only for the last position of a pass.
pub fn gives_one_position(outputs: &[ModelOutput]) -> bool {
    let mut logits = outputs.iter().filter(|output| output.role == OutputRole::Logits);
    logits.any(|output| matches!(output.shape.as_slice(), [_, positions, _] if positions.as_fixed() == Some(1)))
}

/// How a model is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ModelKind {
    /// Generates tokens and carries state from pass to pass.
    Decoder,
    /// Generates tokens without state: every pass recomputes the sequence.
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
    /// What the runtime writes into it.
    pub role: InputRole,
}

/// What the runtime writes into an input. Symbols: B batch, S tokens of this pass, T tokens so far including this pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum InputRole {
    /// Token ids `[B, S]`.
    TokenIds,
    /// Token embeddings `[B, S, hidden]`, computed by the caller.
    Embeddings,
    /// Ones `[B, T]`.
    AttentionMask,
    /// Positions of this pass's tokens `[B, S]`, or `[3, B, S]` for three-axis rotary positions.
    PositionIds,
    /// Tokens before this pass `[B]`: where its keys and values are written into caches of fixed size (`TensorScatter`).
    PastLengths,
    /// Tokens so far, including this pass `[B]`: how much of such caches is filled (`Attention` with `nonpad_kv_seqlen`).
    TotalLengths,
    /// Segment ids `[B, S]`, zero for a single text.
    TokenTypeIds,
    /// Indices `[n]` of the tokens of this pass whose logits are computed. `hpp-split` adds it; the source model lacks
    /// it.
    LogitPositions,
    /// A boolean that is always true: the cache branch of a merged decoder. Bound only when the source model runs.
    UseCacheBranch,
    /// Zeros, with 1 for sizes that the shape leaves open: an input that only the other branch of a merged decoder reads, a condition
    /// that is false for the branch that generates, or a number of logits that is 0 for all. Bound only when the source model runs.
    Zeros,
    /// Any other input, which the caller must supply.
    Free,
}

impl InputRole {
    /// Whether only the source model has the input: splitting chose a branch of a merged decoder.
    pub fn is_of_source_only(self) -> bool {
        matches!(self, InputRole::UseCacheBranch | InputRole::Zeros)
    }

    /// Whether the second axis of the input counts tokens.
    pub fn counts_tokens(self) -> bool {
        matches!(self, InputRole::TokenIds | InputRole::TokenTypeIds | InputRole::AttentionMask | InputRole::Embeddings)
    }
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
    /// Whether it is the logits.
    pub role: OutputRole,
}

/// The meaning of an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum OutputRole {
    /// Logits of the next token `[B, positions, vocab]`.
    Logits,
    /// Any other output.
    Free,
}

/// The limits that a plan keeps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Budgets {
    /// Device memory of each GPU, in the order gpu0, gpu1, ...
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub vram: Vec<ByteSize>,
    /// Host memory, if limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ram: Option<ByteSize>,
    /// Longest sequence, tokens; the KV cache has this capacity.
    pub context: u64,
    /// Sequences in one run: rows of the input tensors.
    pub batch: u64,
    /// Device memory left unused on each GPU, for other programs and allocator overhead.
    pub margin: ByteSize,
}

/// A device that computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Device {
    /// `cpu`, `gpu0`, `gpu1`, ...
    pub name: String,
    /// Whether it is the host or a GPU.
    pub kind: DeviceKind,
    /// Ring of slots for streamed weights; absent if nothing is streamed to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ring: Option<Ring>,
    /// Memory for weights while they are read from disk, bytes; absent if none are read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<ByteSize>,
    /// Memory for experts that were read by demand and stay until others need it, bytes; absent if none are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_cache: Option<ByteSize>,
    /// What CPU kernels hold beside the weights of the model that stay in host memory, bytes: weights in a larger layout, copies of
    /// scales. Absent if nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel_layout: Option<ByteSize>,
    /// Memory beyond what runs need while sessions are created: the largest weight that is widened or folded is in memory twice then. Absent
    /// if states and activations, which come later, take as much, or if weights are read from disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_creation: Option<ByteSize>,
    /// Heap of sessions and the tokenizer beyond the 64 MiB that every process takes, bytes. Absent if nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heap: Option<ByteSize>,
    /// Weights that are read from disk are stored compressed, without loss, where that takes at most this many of 1000 bytes: otherwise
    /// decompressing them takes longer than reading them. Absent if nothing is read from disk, or reading is not the bottleneck.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(max = 1000))]
    pub compress_permille: Option<u32>,
    /// Options for the providers of its partitions, by provider; those given to `hpp-exec` replace them. Options that name files or
    /// directories are refused here.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub provider_options: BTreeMap<Provider, ProviderOptions>,
}

impl Plan {
    /// Bytes of each piece of a slot on a device, in decreasing order. A slot has as many pieces as the partition with
    /// the most weight inputs on that device, each as large as the largest weight assigned to it. See [`in_slot`].
    pub fn slot(&self, device: &str) -> Vec<u64> {
        let mut slot: Vec<u64> = Vec::new();
        for variant in self.partitions.iter().flat_map(Partition::variants).filter(|variant| variant.device == device) {
            for (at, weight) in in_slot(variant.weights).into_iter().enumerate() {
                let bytes = variant.weights[weight].bytes().unwrap_or(u64::MAX);
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
    /// The inputs that the user must give: those that the runtime cannot fill. For a model that runs once, these are all inputs and the past of
    /// every state; at the beginning, a past has length 0 on its growing axis.
    pub fn user_inputs(&self) -> Vec<ModelInput> {
        let runs_once = self.model.kind == ModelKind::SingleRun;
        let is_user_input = |input: &&ModelInput| match input.role {
            InputRole::LogitPositions | InputRole::UseCacheBranch | InputRole::Zeros => false,
            InputRole::Free => true,
            _ => runs_once,
        };
        let past = |state: &State| ModelInput {
            name: state.past.clone(),
            dtype: state.dtype,
            shape: state.shape.clone(),
            role: InputRole::Free,
        };
        let states = if runs_once { self.states.as_slice() } else { &[] };
        self.model.inputs.iter().filter(is_user_input).cloned().chain(states.iter().map(past)).collect()
    }

    /// Why a pass cannot verify drafted tokens: it has one token, or does not return the logits that each token would have alone. `None` if it can.
    pub fn why_drafts_fail(&self) -> Option<&'static str> {
        if self.model.gives_one_position() {
            return Some(
                "this model gives scores for the last token of a pass only, and a draft needs them for each token",
            );
        }
        if self.schedule.prefill_chunk == Some(1) {
            return Some("this plan computes one token in a pass, and a pass that verifies a draft has more");
        }
        self.model.rounds_whole_passes.then_some(
            "this model rounds the activations of all tokens of a pass with one scale (DynamicQuantizeLinear), so a draft would \
             change the answer",
        )
    }

    /// Names of the outputs of a model that runs once, states last.
    pub fn result_names(&self) -> impl Iterator<Item = &str> {
        let outputs = self.model.outputs.iter().map(|output| output.name.as_str());
        outputs.chain(self.states.iter().map(|state| state.present.as_str()))
    }

    /// Bytes of weights that are resident on a GPU: weights of partitions without weight inputs, weights in slots of
    /// their own, and the constants of files with weight inputs, once per file. `None` on overflow of 64 bits.
    pub fn weights_on(&self, device: &str) -> Option<u64> {
        let mut files: BTreeMap<&str, u64> = BTreeMap::new();
        let mut slots = 0u64;
        for partition in &self.partitions {
            for variant in partition.variants().filter(|variant| variant.device == device) {
                let inputs = variant.weights.iter().try_fold(0u64, |sum, weight| sum.checked_add(weight.bytes()?))?;
                let constants = files.entry(variant.file).or_default();
                *constants = partition.bytes.weights.0.saturating_sub(inputs).max(*constants);
                slots = slots.checked_add(if variant.residency.is_resident() { inputs } else { 0 })?;
            }
        }
        files.into_values().try_fold(slots, u64::checked_add)
    }

    /// The plan with sequences of `context` tokens: its states take the memory that they then have.
    pub fn for_context(&self, context: u64) -> Self {
        let planned = self.budgets.context;
        let states = self.states.iter().map(|state| state.for_context(planned, context)).collect();
        Plan { budgets: Budgets { context, ..self.budgets.clone() }, states, ..self.clone() }
    }

    /// Bytes of host memory for states on disk; 0 without such states.
    pub fn state_window(&self) -> u64 {
        let mut by_partition: BTreeMap<&str, u64> = BTreeMap::new();
        for state in self.states.iter().filter(|state| state.on_disk) {
            let bytes = by_partition.entry(&state.partition).or_default();
            *bytes = bytes.saturating_add(state.memory().saturating_mul(self.budgets.batch));
        }
        state_window(by_partition.into_values().max().unwrap_or(0))
    }
}

/// Indices of the weights of one partition in the order of the slot pieces that they go to: in decreasing size, equal
/// sizes in file order. So partitions of one class, whose weights differ only in their contents, share slots without
/// waste.
pub fn in_slot(weights: &[WeightInput]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(weights[*at].bytes()));
    order
}

impl Device {
    /// A device without ring, window and cache of experts.
    pub fn new(name: impl Into<String>, kind: DeviceKind) -> Device {
        Device {
            name: name.into(),
            kind,
            ring: None,
            window: None,
            expert_cache: None,
            kernel_layout: None,
            session_creation: None,
            heap: None,
            compress_permille: None,
            provider_options: BTreeMap::new(),
        }
    }
}

/// A ring of slots in device memory. Each slot holds the weights of any partition streamed through it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Ring {
    /// Number of slots.
    pub slots: u32,
    /// Bytes of one slot.
    pub slot_bytes: ByteSize,
}

/// Host or GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The host processor and its memory.
    Cpu,
    /// An accelerator with its own memory.
    Gpu,
}

/// The steps of each phase, in order.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Steps of a pass over prompt tokens.
    pub prefill: Vec<Step>,
    /// Steps of a pass that generates one token.
    pub decode: Vec<Step>,
    /// Limit on the tokens of a prefill pass; absent if only the context limits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill_chunk: Option<u64>,
    /// The most tokens of a pass after the prompt that follows `decode`, such as a draft to verify; passes of more tokens follow
    /// `prefill`. Absent if only single tokens follow `decode`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode_tokens: Option<u64>,
}

/// One step of a schedule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Step {
    /// Run a partition.
    Run(String),
    /// Copy boundary tensors to another device.
    Copy(CopyStep),
}

/// A copy of boundary tensors between devices.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CopyStep {
    /// Tensor names.
    #[serde(serialize_with = "crate::dim::on_one_line")]
    pub values: Vec<String>,
    /// Source device.
    pub from: String,
    /// Target device.
    pub to: String,
}

/// The buffer of one boundary tensor on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BoundaryBuffer {
    /// Name of the tensor.
    pub value: String,
    /// Device of the buffer.
    pub device: String,
    /// Bytes per token of a pass, if known; the runtime sizes the buffer for each pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_token: Option<u64>,
}

/// A file that the plan depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Path relative to the plan.
    pub path: String,
    /// Its purpose.
    pub role: FileRole,
    /// Its length.
    pub bytes: ByteSize,
    /// BLAKE3 over the length and 4 KiB samples (the first, the last and evenly spaced ones): cheap, detects a replaced
    /// file.
    pub sampled: String,
    /// BLAKE3 over the whole file; absent for large files unless `--hash-weights` was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blake3: Option<String>,
}

/// The purpose of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileRole {
    /// The unsplit model.
    Source,
    /// The unsplit model with boundary tensors as outputs.
    Tapped,
    /// A partition.
    Partition,
    /// Weight bytes.
    Weights,
    /// Tokenizer or chat template.
    Text,
    /// The plan of the model's own draft.
    Draft,
}
