//! Synthetic models for tests of timing and placement: a chain of partitions on devices, with run times that the test sets.
//!
//! The engine loads and runs them like any plan. They compute just enough to show whether every token, state and weight was in its
//! place ([`Chain::scores`]).

mod kernel;

use super::{MockBackend, MockModel};
use crate::port::{MemoryId, Port};
use hpp_schema::{DType, Plan, sample_ranges};
use std::fmt::Write;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// A partition of a chain.
#[derive(Clone)]
pub struct ChainPart {
    /// `None` on the host, `Some(n)` on `gpu<n>`, whose memory is number `n + 1`.
    pub gpu: Option<usize>,
    /// Duration of a run, by its number of tokens.
    pub takes: Rc<dyn Fn(u64) -> Duration>,
    /// Its weights, where they are inputs; else they are constants of its own.
    pub inputs: Option<ChainInputs>,
    /// How it computes in prefill, if that differs.
    pub prefill: Option<ChainVariant>,
    /// Tensors that enter it from the partition before, at least one; nothing enters the first.
    pub enters: usize,
    /// States it carries.
    pub states: usize,
}

/// Weights that are inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChainInputs {
    /// Whether they are streamed.
    pub streamed: bool,
    /// Parts of one class share a session: they differ in nothing but their weights.
    pub class: usize,
}

/// How a partition computes in one phase.
#[derive(Clone)]
pub struct ChainVariant {
    /// As in [`ChainPart`].
    pub gpu: Option<usize>,
    /// As in [`ChainPart`].
    pub takes: Rc<dyn Fn(u64) -> Duration>,
    /// As in [`ChainPart`].
    pub inputs: Option<ChainInputs>,
    /// Whether it is another than the variant for decoding.
    pub other: bool,
}

impl ChainPart {
    /// A part with constants, without state.
    pub fn new(gpu: Option<usize>, takes: Rc<dyn Fn(u64) -> Duration>) -> Self {
        ChainPart { gpu, takes, inputs: None, prefill: None, enters: 1, states: 0 }
    }

    fn decode_variant(&self) -> ChainVariant {
        ChainVariant { gpu: self.gpu, takes: Rc::clone(&self.takes), inputs: self.inputs, other: false }
    }

    fn prefill_variant(&self) -> ChainVariant {
        self.prefill.clone().unwrap_or_else(|| self.decode_variant())
    }
}

/// A decoder of partitions that follow each other. Token ids enter and scores leave in host memory, at no cost; between two
/// partitions float32 tensors `[1, tokens, width]` cross, which are copied where they are on different devices. A state is a
/// float32 tensor `[1, context, width]`, updated in place.
pub struct Chain {
    /// The partitions in order.
    pub parts: Vec<ChainPart>,
    /// Numbers for each token in each tensor that crosses, and in each state; at least two.
    pub width: u64,
    /// Most tokens of one sequence.
    pub context: u64,
    /// Most tokens of a prefill pass.
    pub prefill_chunk: Option<u64>,
    /// Whether states lie on the host and are copied to the device that updates them; else they lie on that device.
    pub states_on_host: bool,
    /// Numbers in each weight of every part.
    pub weights: Vec<u64>,
    /// Indices of the weights that sessions on a GPU want in host memory.
    pub weights_on_host: Vec<usize>,
    /// Slots of the ring of each GPU.
    pub slots: u32,
}

/// Scores for each token.
const VOCABULARY: u64 = 16;
/// The model's inputs and outputs, as a plan describes them.
const IDS: &str = "name: input_ids, dtype: int64, shape: [batch, seq]";
const POSITIONS: &str = "name: position_ids, dtype: int64, shape: [batch, seq]";
const SCORES: &str = "name: logits, dtype: float32, shape: [batch, seq, 16]";

impl Default for Chain {
    fn default() -> Self {
        Chain {
            parts: vec![],
            width: 4,
            context: 64,
            prefill_chunk: None,
            states_on_host: false,
            weights: vec![],
            weights_on_host: vec![],
            slots: 0,
        }
    }
}

impl Chain {
    /// Writes the files of the plan to `dir` and tells the backend what they hold; the plan, ready to load from `dir`.
    pub fn set_up(&self, dir: &Path, backend: &MockBackend) -> std::io::Result<Plan> {
        for (number, part) in self.parts.iter().enumerate() {
            for variant in [part.decode_variant(), part.prefill_variant()] {
                let file = file(number, &variant);
                std::fs::write(dir.join(&file), [])?;
                backend.model(&file, self.model(number, part, &variant));
            }
        }
        std::fs::write(dir.join("model.onnx"), [])?;
        let weights: Vec<u8> = (0..self.parts.len()).flat_map(|part| self.weights_of(part)).flatten().collect();
        std::fs::write(dir.join(WEIGHTS), &weights)?;
        Plan::from_yaml(&self.plan(&weights)).map_err(std::io::Error::other)
    }

    fn model(&self, number: usize, part: &ChainPart, variant: &ChainVariant) -> MockModel {
        let memory = variant.gpu.map_or(MemoryId::HOST, |gpu| MemoryId(gpu as u32 + 1));
        let port =
            |name: String, dtype, shape: &[Option<u64>], memory| Port { name, dtype, shape: shape.to_vec(), memory };
        let (any, width) = (None, Some(self.width));
        let wide = |name| port(name, DType::Float32, &[any, any, width], memory);
        let mut inputs: Vec<Port> = self.entering(number).map(wide).collect();
        if number == 0 {
            let ids = |name: &str| port(name.into(), DType::Int64, &[any, any], MemoryId::HOST);
            inputs.extend([ids("input_ids"), ids("position_ids")]);
        }
        let mut outputs: Vec<Port> = self.entering(number + 1).map(wide).collect();
        if number + 1 == self.parts.len() {
            outputs.push(port("logits".into(), DType::Float32, &[any, any, Some(VOCABULARY)], MemoryId::HOST));
        }
        let in_place = (0..part.states).map(|state| (inputs.len() + state, outputs.len() + state)).collect();
        inputs.extend((0..part.states).map(|state| wide(past(number, state))));
        outputs.extend((0..part.states).map(|state| wide(present(number, state))));
        let weights = variant.inputs.map(|_| {
            let sizes = self.weights.iter().enumerate();
            let first = inputs.len();
            inputs.extend(sizes.map(|(at, size)| {
                let memory = if self.weights_on_host.contains(&at) { MemoryId::HOST } else { memory };
                port(format!("w{at}"), DType::Float32, &[Some(*size)], memory)
            }));
            first..inputs.len()
        });
        let states = self.states_at(number, &inputs, part.states);
        let constant = kernel::constant(number, self.weights.len());
        let kernel = kernel::kernel(weights, states, outputs.len() - part.states, constant);
        MockModel { inputs, outputs, in_place, kernel, takes: None }.taking((0, 1), Rc::clone(&variant.takes))
    }

    /// Positions of a part's states among its inputs.
    fn states_at(&self, number: usize, inputs: &[Port], states: usize) -> std::ops::Range<usize> {
        let first = inputs.iter().position(|port| port.name == past(number, 0)).unwrap_or(0);
        first..first + states
    }

    /// The bytes of each weight of a part.
    fn weights_of(&self, part: usize) -> Vec<Vec<u8>> {
        let weight = |(at, size): (usize, &u64)| {
            (0..*size).flat_map(|_| kernel::weight(part, at).to_le_bytes()).collect::<Vec<u8>>()
        };
        self.weights.iter().enumerate().map(weight).collect()
    }

    /// The score of the last token after each of these passes, which begin with an empty sequence: what any placement must give.
    pub fn scores(&self, passes: &[Vec<u32>]) -> Vec<f32> {
        let mut states = vec![0.0; self.parts.len()];
        let score = |passes: &Vec<u32>| {
            let mut value = *passes.last().unwrap_or(&0) as f32;
            for (number, part) in self.parts.iter().enumerate() {
                let constant = kernel::constant(number, self.weights.len());
                value = kernel::step(value, constant, (part.states > 0).then_some(&mut states[number]));
            }
            value
        };
        passes.iter().map(score).collect()
    }

    /// The plan as text, so that fields with defaults keep them.
    fn plan(&self, weights: &[u8]) -> String {
        let slot_bytes = self.weights.iter().sum::<u64>() * 4;
        let ring = if self.slots > 0 {
            format!(", ring: {{ slots: {}, slot_bytes: {slot_bytes} B }}", self.slots)
        } else {
            String::new()
        };
        let mut devices: Vec<String> =
            (0..self.gpus()).map(|gpu| format!("{{ name: gpu{gpu}, kind: gpu{ring} }}")).collect();
        devices.push("{ name: cpu, kind: cpu }".into());
        let numbers = || 0..self.parts.len();
        let partitions: Vec<String> = numbers().map(|number| self.partition(number)).collect();
        let states: Vec<String> = numbers().flat_map(|number| self.states(number)).collect();
        let prefill: Vec<String> =
            numbers().flat_map(|number| self.steps(number, ChainPart::prefill_variant)).collect();
        let decode: Vec<String> = numbers().flat_map(|number| self.steps(number, ChainPart::decode_variant)).collect();
        let mut files = vec![record("model.onnx", "source", &[]), record(WEIGHTS, "weights", weights)];
        let variants = |number: usize| {
            [self.parts[number].decode_variant(), self.parts[number].prefill_variant()]
                .map(|variant| file(number, &variant))
        };
        let mut named: Vec<String> = numbers().flat_map(variants).collect();
        named.sort_unstable();
        named.dedup();
        files.extend(named.iter().map(|name| record(name, "partition", &[])));
        let chunk = self.prefill_chunk.map_or(String::new(), |chunk| format!(", prefill_chunk: {chunk}"));
        format!(
            "hpp_plan: 2\n\
             model: {{ name: chain, source: model.onnx, weights_dir: ., kind: decoder, layers: {layers}, \
             vocab_size: {VOCABULARY}, inputs: [{{ {IDS}, role: token_ids }}, {{ {POSITIONS}, role: position_ids }}], outputs: [{{ {SCORES}, role: logits }}] }}\n\
             budgets: {{ vram: [{vram}], context: {context}, batch: 1, margin: 0 B }}\n\
             devices: [{devices}]\n\
             partitions: [{partitions}]\n\
             states: [{states}]\n\
             schedule: {{ prefill: [{prefill}], decode: [{decode}]{chunk} }}\n\
             buffers: []\n\
             predictions: {{ source: static, decode_ms: 0, time_to_first_token_ms: 0, prompt_tokens: 0, \
             decode_tokens_per_second: 0 }}\n\
             files: [{files}]\n",
            layers = self.parts.len(),
            vram = vec!["1 GiB"; self.gpus()].join(", "),
            context = self.context,
            devices = devices.join(", "),
            partitions = partitions.join(", "),
            states = states.join(", "),
            prefill = prefill.join(", "),
            decode = decode.join(", "),
            files = files.join(", "),
        )
    }

    fn partition(&self, number: usize) -> String {
        let part = &self.parts[number];
        let wide = |name: String| format!("name: {name}, dtype: float32, shape: [batch, seq, {}]", self.width);
        let state = |name: String| format!("name: {name}, dtype: float32, shape: {}", self.state_shape());
        let before = number.saturating_sub(1);
        let mut inputs: Vec<String> =
            self.entering(number).map(|name| format!("{{ {}, from: p{before} }}", wide(name))).collect();
        let ids = || [IDS, POSITIONS].map(|ids| format!("{{ {ids}, from: model }}"));
        inputs.extend((number == 0).then(ids).into_iter().flatten());
        inputs.extend((0..part.states).map(|at| format!("{{ {}, from: state }}", state(past(number, at)))));
        let mut outputs: Vec<String> =
            self.entering(number + 1).map(|name| format!("{{ {}, to: boundary }}", wide(name))).collect();
        outputs.extend((number + 1 == self.parts.len()).then(|| format!("{{ {SCORES}, to: model }}")));
        outputs.extend((0..part.states).map(|at| format!("{{ {}, to: state }}", state(present(number, at)))));
        let variant = part.decode_variant();
        let weights = self.weights.iter().sum::<u64>() * 4;
        let mut text = format!("{{ name: p{number}, weights_dir: ., {}, ", self.described(number, &variant));
        if part.prefill.is_some() {
            let _ = write!(text, "prefill: {{ {} }}, ", self.described(number, &part.prefill_variant()));
        }
        let _ = write!(
            text,
            "blocks: [b{number}], inputs: [{}], outputs: [{}], bytes: {{ weights: {weights} B, kv: {} B, workspace: 0 B }}, \
             reason: a test }}",
            inputs.join(", "),
            outputs.join(", "),
            part.states as u64 * self.state_bytes(),
        );
        text
    }

    /// Device, residency, file, providers and weights of a variant.
    fn described(&self, number: usize, variant: &ChainVariant) -> String {
        let (file, device) = (file(number, variant), device(variant.gpu));
        let provider = if variant.gpu.is_some() { "webgpu" } else { "cpu" };
        let streamed = variant.inputs.is_some_and(|inputs| inputs.streamed);
        let residency = if streamed { "streamed" } else { "resident" };
        let mut offset = number as u64 * self.weights.iter().sum::<u64>() * 4;
        let mut weight = |(at, size): (usize, &u64)| {
            let begins = offset;
            offset += size * 4;
            format!("{{ name: p{number}.w{at}, dtype: float32, shape: [{size}], file: {WEIGHTS}, offset: {begins} }}")
        };
        let weights: Vec<String> = match variant.inputs {
            Some(_) => self.weights.iter().enumerate().map(&mut weight).collect(),
            None => vec![],
        };
        let weights = weights.join(", ");
        format!("device: {device}, residency: {residency}, file: {file}, providers: [{provider}], weights: [{weights}]")
    }

    fn state_bytes(&self) -> u64 {
        self.context * self.width * 4
    }

    fn state_shape(&self) -> String {
        format!("[batch, {}, {}]", self.context, self.width)
    }

    /// A partition's states.
    fn states(&self, number: usize) -> Vec<String> {
        let part = &self.parts[number];
        let device = if self.states_on_host { "cpu".to_owned() } else { device(part.gpu) };
        let state = |at: usize| {
            format!(
                "{{ past: {}, present: {}, partition: p{number}, layer: {number}, dtype: float32, shape: {}, \
                 update: {{ kind: in_place, axis: 1, capacity: {} }}, any_capacity: true, device: {device}, bytes: {} B }}",
                past(number, at),
                present(number, at),
                self.state_shape(),
                self.context,
                self.state_bytes(),
            )
        };
        (0..part.states).map(state).collect()
    }

    /// Tensors that enter a partition from the one before.
    fn entering(&self, number: usize) -> impl Iterator<Item = String> + use<> {
        let enters = if number == 0 { 0 } else { self.parts.get(number).map_or(0, |part| part.enters) };
        (0..enters).map(move |at| format!("x{}_{at}", number - 1))
    }

    /// A partition's run in a phase, after the copy of what it reads where that comes from another device.
    fn steps(&self, number: usize, variant: fn(&ChainPart) -> ChainVariant) -> Vec<String> {
        let run = format!("{{ run: p{number} }}");
        let device_of = |number: usize| device(variant(&self.parts[number]).gpu);
        let to = device_of(number);
        match number.checked_sub(1).map(device_of) {
            Some(from) if from != to => {
                let values: Vec<String> = self.entering(number).collect();
                vec![format!("{{ copy: {{ values: [{}], from: {from}, to: {to} }} }}", values.join(", ")), run]
            }
            _ => vec![run],
        }
    }

    fn gpus(&self) -> usize {
        let variants = self.parts.iter().flat_map(|part| [part.gpu, part.prefill_variant().gpu]);
        variants.flatten().max().map_or(0, |most| most + 1)
    }
}

/// Weights of all parts.
const WEIGHTS: &str = "weights.bin";

/// The file of a variant: a file of its own, or the file of its class on its device.
fn file(number: usize, variant: &ChainVariant) -> String {
    match (variant.inputs, variant.gpu) {
        (Some(inputs), Some(gpu)) => format!("class{}_{gpu}.onnx", inputs.class),
        _ if variant.other => format!("p{number}_prefill.onnx"),
        _ => format!("p{number}.onnx"),
    }
}

fn device(gpu: Option<usize>) -> String {
    gpu.map_or("cpu".to_owned(), |gpu| format!("gpu{gpu}"))
}

fn past(number: usize, state: usize) -> String {
    format!("past{number}_{state}")
}

fn present(number: usize, state: usize) -> String {
    format!("present{number}_{state}")
}

/// The plan's record of a small file.
fn record(path: &str, role: &str, contents: &[u8]) -> String {
    let bytes = contents.len() as u64;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&bytes.to_le_bytes());
    for (offset, size) in sample_ranges(bytes) {
        hasher.update(&contents[offset as usize..(offset + size) as usize]);
    }
    let sampled = hasher.finalize().to_hex();
    format!("{{ path: {path}, role: {role}, bytes: {bytes} B, sampled: {sampled} }}")
}
