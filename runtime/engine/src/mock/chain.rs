//! Made-up models for tests of time: a chain of partitions on devices, each of which takes as long as a test says.
//!
//! The engine loads and runs them as it does any plan. Nothing is computed; what is bound is checked as ever.

use super::{Frame, MockBackend, MockModel};
use crate::error::BackendError;
use crate::port::{MemoryId, Port};
use hpp_schema::{DType, Plan};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// A partition of a chain.
pub struct ChainPart {
    /// `None` on the host, `Some(n)` on `gpu<n>`, whose memory is number `n + 1`.
    pub gpu: Option<usize>,
    /// What a run takes with so many tokens.
    pub takes: Rc<dyn Fn(u64) -> Duration>,
    /// Tensors that enter it from the partition before, at least one; nothing enters the first.
    pub enters: usize,
    /// States it carries.
    pub states: usize,
}

/// A decoder of partitions that follow each other. Token ids enter and scores leave in host memory, at no cost; between two
/// partitions float32 tensors `[1, tokens, width]` cross, which are copied where they are on different devices. A state is a
/// float32 tensor `[1, context, width]`, updated in place.
pub struct Chain {
    /// The partitions in order.
    pub parts: Vec<ChainPart>,
    /// Numbers for each token in each tensor that crosses, and in each state.
    pub width: u64,
    /// Most tokens of one sequence.
    pub context: u64,
    /// Most tokens of a prefill pass.
    pub prefill_chunk: Option<u64>,
    /// Whether states lie on the host, and visit the device they are computed on; else they lie there.
    pub states_on_host: bool,
}

/// Scores for each token.
const VOCABULARY: u64 = 4;
/// What enters and what leaves, as a plan describes it.
const IDS: &str = "name: input_ids, dtype: int64, shape: [batch, seq]";
const SCORES: &str = "name: logits, dtype: float32, shape: [batch, seq, 4]";

impl Chain {
    /// Writes the (empty) files of the plan to `dir` and tells the backend what they hold; the plan, ready to load from `dir`.
    pub fn set_up(&self, dir: &Path, backend: &MockBackend) -> std::io::Result<Plan> {
        for (number, part) in self.parts.iter().enumerate() {
            std::fs::write(dir.join(format!("p{number}.onnx")), [])?;
            backend.model(&format!("p{number}.onnx"), self.model(number, part));
        }
        std::fs::write(dir.join("model.onnx"), [])?;
        Plan::from_yaml(&self.plan()).map_err(std::io::Error::other)
    }

    fn model(&self, number: usize, part: &ChainPart) -> MockModel {
        let memory = part.gpu.map_or(MemoryId::HOST, |gpu| MemoryId(gpu as u32 + 1));
        let port =
            |name: String, dtype, shape: &[Option<u64>], memory| Port { name, dtype, shape: shape.to_vec(), memory };
        let (any, width) = (None, Some(self.width));
        let wide = |name| port(name, DType::Float32, &[any, any, width], memory);
        let mut inputs: Vec<Port> = self.entering(number).map(wide).collect();
        if number == 0 {
            inputs.push(port("input_ids".into(), DType::Int64, &[any, any], MemoryId::HOST));
        }
        let mut outputs: Vec<Port> = self.entering(number + 1).map(wide).collect();
        if number + 1 == self.parts.len() {
            outputs.push(port("logits".into(), DType::Float32, &[any, any, Some(VOCABULARY)], MemoryId::HOST));
        }
        let in_place = (0..part.states).map(|state| (inputs.len() + state, outputs.len() + state)).collect();
        inputs.extend((0..part.states).map(|state| wide(past(number, state))));
        outputs.extend((0..part.states).map(|state| wide(present(number, state))));
        MockModel { inputs, outputs, in_place, kernel: Rc::new(nothing), takes: None }
            .taking((0, 1), Rc::clone(&part.takes))
    }

    /// The plan as text, so that fields with defaults keep them.
    fn plan(&self) -> String {
        let mut devices: Vec<String> = (0..self.gpus()).map(|gpu| format!("{{ name: gpu{gpu}, kind: gpu }}")).collect();
        devices.push("{ name: cpu, kind: cpu }".into());
        let numbers = || 0..self.parts.len();
        let partitions: Vec<String> = numbers().map(|number| self.partition(number)).collect();
        let states: Vec<String> = numbers().flat_map(|number| self.states(number)).collect();
        let schedule: Vec<String> = numbers().flat_map(|number| self.steps(number)).collect();
        let mut files = vec![record("model.onnx", "source")];
        files.extend(numbers().map(|number| record(&format!("p{number}.onnx"), "partition")));
        let chunk = self.prefill_chunk.map_or(String::new(), |chunk| format!(", prefill_chunk: {chunk}"));
        format!(
            "hpp_plan: 1\n\
             model: {{ name: chain, source: model.onnx, weights_dir: ., kind: decoder, layers: {layers}, \
             vocab_size: {VOCABULARY}, inputs: [{{ {IDS}, role: token_ids }}], outputs: [{{ {SCORES}, role: logits }}] }}\n\
             budgets: {{ vram: [{vram}], context: {context}, batch: 1, margin: 0 B }}\n\
             devices: [{devices}]\n\
             partitions: [{partitions}]\n\
             states: [{states}]\n\
             schedule: {{ prefill: [{schedule}], decode: [{schedule}]{chunk} }}\n\
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
            schedule = schedule.join(", "),
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
        inputs.extend((number == 0).then(|| format!("{{ {IDS}, from: model }}")));
        inputs.extend((0..part.states).map(|at| format!("{{ {}, from: state }}", state(past(number, at)))));
        let mut outputs: Vec<String> =
            self.entering(number + 1).map(|name| format!("{{ {}, to: boundary }}", wide(name))).collect();
        outputs.extend((number + 1 == self.parts.len()).then(|| format!("{{ {SCORES}, to: model }}")));
        outputs.extend((0..part.states).map(|at| format!("{{ {}, to: state }}", state(present(number, at)))));
        format!(
            "{{ name: p{number}, file: p{number}.onnx, weights_dir: ., device: {}, providers: [{}], blocks: [b{number}], \
             inputs: [{}], outputs: [{}], bytes: {{ weights: 0 B, kv: {} B, workspace: 0 B }}, \
             reason: a test }}",
            device(part),
            if part.gpu.is_some() { "webgpu" } else { "cpu" },
            inputs.join(", "),
            outputs.join(", "),
            part.states as u64 * self.state_bytes(),
        )
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
        let device = if self.states_on_host { "cpu".to_owned() } else { device(part) };
        let state = |at: usize| {
            format!(
                "{{ past: {}, present: {}, partition: p{number}, layer: {number}, dtype: float32, shape: {}, \
                 update: {{ kind: in_place, axis: 1, capacity: {} }}, device: {device}, bytes: {} B }}",
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

    /// A partition's run, after the copy of what it reads where that comes from another device.
    fn steps(&self, number: usize) -> Vec<String> {
        let run = format!("{{ run: p{number} }}");
        let to = device(&self.parts[number]);
        match number.checked_sub(1).map(|before| device(&self.parts[before])) {
            Some(from) if from != to => {
                let values: Vec<String> = self.entering(number).collect();
                vec![format!("{{ copy: {{ values: [{}], from: {from}, to: {to} }} }}", values.join(", ")), run]
            }
            _ => vec![run],
        }
    }

    fn gpus(&self) -> usize {
        self.parts.iter().filter_map(|part| part.gpu).max().map_or(0, |most| most + 1)
    }
}

fn device(part: &ChainPart) -> String {
    part.gpu.map_or("cpu".to_owned(), |gpu| format!("gpu{gpu}"))
}

fn past(number: usize, state: usize) -> String {
    format!("past{number}_{state}")
}

fn present(number: usize, state: usize) -> String {
    format!("present{number}_{state}")
}

/// What a plan remembers of an empty file.
fn record(path: &str, role: &str) -> String {
    let sampled = blake3::hash(&0u64.to_le_bytes()).to_hex();
    format!("{{ path: {path}, role: {role}, bytes: 0 B, sampled: {sampled} }}")
}

/// Leaves everything as it is: only its time counts.
fn nothing(_: &mut Frame<'_>) -> Result<(), BackendError> {
    Ok(())
}
