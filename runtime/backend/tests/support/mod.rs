//! Single-partition plans of the recorded models, made from their recorded metadata.

#![allow(dead_code)]

use hpp_backend::{OrtBackend, OrtOptions};
use hpp_engine::{HostTensor, Silent};
use hpp_schema::*;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model directory with recorded answers.
pub struct Recorded {
    pub dir: PathBuf,
    pub facts: Value,
}

/// Every recorded model under `fixtures/models`, and under `HPP_MODELS` if that is set.
pub fn recorded() -> Vec<Recorded> {
    let fixtures = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models"));
    let roots = [Some(fixtures), std::env::var_os("HPP_MODELS").map(PathBuf::from)];
    let mut found: Vec<Recorded> = Vec::new();
    for exporter in roots.iter().flatten().flat_map(|root| folders(root)) {
        for dir in folders(&exporter) {
            let Ok(text) = std::fs::read_to_string(dir.join("reference.json")) else { continue };
            let key = |dir: &Path| dir.iter().rev().take(2).map(|part| part.to_owned()).collect::<Vec<_>>();
            if found.iter().all(|other| key(&other.dir) != key(&dir)) {
                found.push(Recorded { facts: serde_json::from_str(&text).unwrap(), dir });
            }
        }
    }
    found.sort_by(|a, b| a.dir.cmp(&b.dir));
    assert!(!found.is_empty(), "no fixture models");
    found
}

fn folders(root: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect()
}

/// One backend for all tests of a process. Panics if ONNX Runtime is not installed.
pub fn backend() -> OrtBackend {
    OrtBackend::open(&OrtOptions::default(), Arc::new(Silent))
        .unwrap_or_else(|error| panic!("{error}\n{}", error.hint()))
}

/// The largest difference relative to the largest recorded number.
pub fn error(have: &[f32], want: &[f32]) -> f32 {
    assert_eq!(have.len(), want.len());
    let scale = want.iter().fold(1e-9f32, |most, value| most.max(value.abs()));
    have.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / scale
}

impl Recorded {
    pub fn name(&self) -> String {
        let parts: Vec<_> = self.dir.iter().rev().take(2).map(|part| part.to_string_lossy()).collect();
        format!("{}/{}", parts[1], parts[0])
    }

    pub fn kind(&self) -> &str {
        self.facts["kind"].as_str().unwrap_or("")
    }

    fn genai(&self) -> Option<Value> {
        serde_json::from_str(&std::fs::read_to_string(self.dir.join("genai_config.json")).ok()?).ok()
    }

    /// An array of `reference.npz` as f32.
    pub fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let mut archive = npyz::npz::NpzArchive::open(self.dir.join("reference.npz")).unwrap();
        let array = archive.by_name(name).unwrap()?;
        Some(array.into_vec::<f32>().unwrap())
    }

    /// An array of `reference.npz`, as a tensor of its element type.
    pub fn array(&self, name: &str) -> HostTensor {
        let mut archive = npyz::npz::NpzArchive::open(self.dir.join("reference.npz")).unwrap();
        let array = archive.by_name(name).unwrap().unwrap();
        let shape = array.shape().to_vec();
        match array.dtype().descr().as_str() {
            "'<f4'" => HostTensor::from_f32(&shape, &array.into_vec::<f32>().unwrap()),
            "'<i8'" => HostTensor::from_i64(&shape, &array.into_vec::<i64>().unwrap()),
            other => panic!("{other}"),
        }
    }

    pub fn prompt(&self) -> Vec<u32> {
        self.ids("prompt_ids")
    }

    pub fn tokens(&self) -> Vec<u32> {
        self.ids("tokens")
    }

    fn ids(&self, name: &str) -> Vec<u32> {
        self.facts[name].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    /// The last dimension of the logits, if the exporter has fixed it.
    fn vocab_size(&self) -> Option<u64> {
        let outputs = self.facts["outputs"].as_array()?;
        outputs.iter().find(|output| output["name"] == "logits")?["shape"].as_array()?.last()?.as_u64()
    }

    /// A plan that runs the unsplit model as one partition with this context.
    pub fn plan(&self, context: u64) -> Plan {
        let pairs = self.facts["state_pairs"].as_object().cloned().unwrap_or_default();
        let merged = self.kind() == "decoder_merged_if";
        let file = if merged { "decoder_model_merged.onnx" } else { "model.onnx" };
        let io = |side: &str| self.facts[side].as_array().cloned().unwrap_or_default();
        let outputs = io("outputs");
        let is_present = |name: &str| pairs.values().any(|present| present == name);
        let states: Vec<State> = io("inputs")
            .iter()
            .filter(|input| pairs.contains_key(text(&input["name"])))
            .map(|input| self.state(input, text(&pairs[text(&input["name"])]), context))
            .collect();
        let inputs: Vec<ModelInput> =
            io("inputs").iter().filter(|input| !pairs.contains_key(text(&input["name"]))).map(model_input).collect();
        let model_outputs: Vec<ModelOutput> =
            outputs.iter().filter(|output| !is_present(text(&output["name"]))).map(model_output).collect();
        let mut partition_inputs: Vec<PartitionInput> = inputs.iter().map(partition_input).collect();
        partition_inputs.extend(states.iter().map(|state| PartitionInput {
            name: state.past.clone(),
            dtype: state.dtype,
            shape: state.shape.clone(),
            from: "state".into(),
        }));
        let partition_outputs = outputs.iter().map(|output| PartitionOutput {
            name: text(&output["name"]).into(),
            dtype: dtype(output),
            shape: shape(output),
            to: if is_present(text(&output["name"])) { OutputUse::State } else { OutputUse::Model },
        });
        let kv = states.iter().map(|state| state.bytes.0).sum();
        let steps = vec![Step::Run("whole".into())];
        Plan {
            hpp_plan: PLAN_VERSION,
            model: SourceModel {
                name: self.name(),
                source: file.into(),
                tapped: None,
                states: vec![],
                gpu_experts: None,
                rounds_activations: false,
                rounded_by: vec![],
                rounds_whole_passes: false,
                tables_change_after: None,
                weights_dir: ".".into(),
                kind: match self.kind() {
                    "single_run" => ModelKind::SingleRun,
                    "decoder_no_cache" => ModelKind::DecoderWithoutCache,
                    _ => ModelKind::Decoder,
                },
                no_text: None,
                layers: 4,
                context_length: None,
                positions: None,
                vocab_size: self.vocab_size().filter(|_| self.kind() != "single_run"),
                inputs,
                outputs: model_outputs,
                host_kernels: self.host_kernels(file),
            },
            budgets: Budgets { vram: vec![], ram: None, context, batch: 1, margin: ByteSize(0) },
            devices: vec![Device::new("cpu", DeviceKind::Cpu)],
            partitions: vec![Partition {
                name: "whole".into(),
                file: file.into(),
                weights_dir: ".".into(),
                device: "cpu".into(),
                weights: vec![],
                host_file: None,
                residency: Residency::Resident,
                prefill: None,
                experts: None,
                providers: vec![Provider::CPU],
                blocks: vec![],
                inputs: partition_inputs,
                outputs: partition_outputs.collect(),
                host_kernels: self.host_kernels(file),
                bytes: PartitionBytes { kv: ByteSize(kv), ..Default::default() },
                reason: "a test".into(),
            }],
            states,
            schedule: Schedule {
                prefill: steps.clone(),
                decode: steps,
                prefill_chunk: merged.then_some(1),
                decode_tokens: None,
            },
            buffers: vec![],
            generation: None,
            draft: None,
            predictions: Predictions::default(),
            files: vec![self.record(file)],
            seal: None,
        }
    }

    /// What hpp-split would write, as far as the recorded models need it: it finds operators by their names.
    fn host_kernels(&self, file: &str) -> HostKernels {
        let bytes = std::fs::read(self.dir.join(file)).unwrap();
        let has = |name: &str| bytes.windows(name.len()).any(|window| window == name.as_bytes());
        let constant_weights = has("QMoE");
        let packed = constant_weights || has("MatMulNBits") || self.name().contains("fp16");
        HostKernels { packed, constant_weights, ..HostKernels::default() }
    }

    /// What a plan records of a file.
    pub fn record(&self, file: &str) -> FileRecord {
        let bytes = std::fs::read(self.dir.join(file)).unwrap();
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        for (offset, length) in sample_ranges(bytes.len() as u64) {
            hasher.update(&bytes[offset as usize..(offset + length) as usize]);
        }
        FileRecord {
            path: file.into(),
            role: FileRole::Source,
            bytes: ByteSize(bytes.len() as u64),
            sampled: hasher.finalize().to_hex().to_string(),
            blake3: Some(blake3::hash(&bytes).to_hex().to_string()),
        }
    }

    /// The tokens that a cache holds at most, if it dropped some of the recorded text.
    fn kept_of(&self, past: &str) -> Option<u64> {
        let held = self.facts["arrays"][format!("final_state/{past}")][1][2].as_u64()?;
        (held < (self.prompt().len() + self.tokens().len()) as u64).then_some(held)
    }

    fn state(&self, input: &Value, present: &str, context: u64) -> State {
        let name = text(&input["name"]);
        let decoder = self.genai().map(|config| config["model"]["decoder"].clone());
        let mut shape = shape(input);
        let whole = name.ends_with(".conv") || name.ends_with(".recurrent");
        let update = match &decoder {
            _ if whole => StateUpdate::Replace,
            Some(decoder) => {
                let sliding = shape[2].as_symbol() == Some("past_sliding_length");
                let window = decoder["sliding_window"]["window_size"].as_u64();
                StateUpdate::InPlace { axis: 2, capacity: window.filter(|_| sliding).unwrap_or(context) }
            }
            None => match self.kept_of(name) {
                Some(kept) => StateUpdate::Sliding { axis: 2, capacity: kept },
                None => StateUpdate::Append { axis: 2, capacity: context },
            },
        };
        if let (Some(decoder), false) = (&decoder, whole) {
            shape[3] = Dim::fixed(decoder["head_size"].as_u64().unwrap());
        }
        let dtype = dtype(input);
        let length = update.tokens().map_or(1, |(_, capacity)| capacity);
        let sizes = shape.iter().enumerate().map(|(at, dim)| {
            let by_token = !whole && at == 2;
            if by_token { length } else { dim.as_fixed().unwrap_or(1) }
        });
        let bytes = ByteSize(dtype.bytes_for(sizes.product()).unwrap());
        let (past, present) = (name.to_owned(), present.to_owned());
        State {
            past,
            present,
            partition: "whole".into(),
            layer: 0,
            dtype,
            shape,
            update,
            any_capacity: false,
            device: "cpu".into(),
            on_disk: false,
            bytes,
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

fn dtype(port: &Value) -> DType {
    match text(&port["type"]) {
        "tensor(float)" => DType::Float32,
        "tensor(float16)" => DType::Float16,
        "tensor(int64)" => DType::Int64,
        "tensor(int32)" => DType::Int32,
        "tensor(bool)" => DType::Bool,
        other => panic!("{other}"),
    }
}

fn shape(port: &Value) -> Shape {
    let dim = |size: &Value| match size {
        Value::String(name) => Dim::from_param(name),
        Value::Number(size) => Dim::fixed(size.as_u64().unwrap()),
        _ => Dim::Unknown,
    };
    port["shape"].as_array().unwrap().iter().map(dim).collect()
}

fn model_input(port: &Value) -> ModelInput {
    let role = match text(&port["name"]) {
        "input_ids" => InputRole::TokenIds,
        "inputs_embeds" => InputRole::Embeddings,
        "attention_mask" => InputRole::AttentionMask,
        "position_ids" => InputRole::PositionIds,
        "token_type_ids" => InputRole::TokenTypeIds,
        "use_cache_branch" => InputRole::UseCacheBranch,
        _ => InputRole::Free,
    };
    ModelInput { name: text(&port["name"]).into(), dtype: dtype(port), shape: shape(port), role }
}

fn model_output(port: &Value) -> ModelOutput {
    let is_logits = text(&port["name"]) == "logits";
    let role = if is_logits { OutputRole::Logits } else { OutputRole::Free };
    ModelOutput { name: text(&port["name"]).into(), dtype: dtype(port), shape: shape(port), role }
}

fn partition_input(input: &ModelInput) -> PartitionInput {
    let ModelInput { name, dtype, shape, .. } = input.clone();
    PartitionInput { name, dtype, shape, from: "model".into() }
}
