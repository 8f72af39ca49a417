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
}

/// A decoder of partitions that follow each other. Token ids enter and scores leave in host memory, at no cost; between two
/// partitions one float32 tensor `[1, tokens, width]` crosses, which is copied where they are on different devices.
pub struct Chain {
    /// The partitions in order.
    pub parts: Vec<ChainPart>,
    /// Numbers for each token that cross from one partition to the next.
    pub width: u64,
    /// Most tokens of one sequence.
    pub context: u64,
    /// Most tokens of a prefill pass.
    pub prefill_chunk: Option<u64>,
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
        let first = port("input_ids".into(), DType::Int64, &[any, any], MemoryId::HOST);
        let last = port("logits".into(), DType::Float32, &[any, any, Some(VOCABULARY)], MemoryId::HOST);
        let crossing = |number: usize| port(format!("x{number}"), DType::Float32, &[any, any, width], memory);
        MockModel {
            inputs: vec![if number == 0 { first } else { crossing(number - 1) }],
            outputs: vec![if number + 1 == self.parts.len() { last } else { crossing(number) }],
            in_place: vec![],
            kernel: Rc::new(nothing),
            takes: None,
        }
        .taking((0, 1), Rc::clone(&part.takes))
    }

    /// The plan as text, so that fields with defaults keep them.
    fn plan(&self) -> String {
        let mut devices: Vec<String> = (0..self.gpus()).map(|gpu| format!("{{ name: gpu{gpu}, kind: gpu }}")).collect();
        devices.push("{ name: cpu, kind: cpu }".into());
        let numbers = || 0..self.parts.len();
        let partitions: Vec<String> = numbers().map(|number| self.partition(number)).collect();
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
             states: []\n\
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
            schedule = schedule.join(", "),
            files = files.join(", "),
        )
    }

    fn partition(&self, number: usize) -> String {
        let part = &self.parts[number];
        let crossing = |number: usize| format!("name: x{number}, dtype: float32, shape: [batch, seq, {}]", self.width);
        let input = match number.checked_sub(1) {
            None => format!("{IDS}, from: model"),
            Some(before) => format!("{}, from: p{before}", crossing(before)),
        };
        let output = match number + 1 == self.parts.len() {
            true => format!("{SCORES}, to: model"),
            false => format!("{}, to: boundary", crossing(number)),
        };
        format!(
            "{{ name: p{number}, file: p{number}.onnx, weights_dir: ., device: {}, providers: [{}], blocks: [b{number}], \
             inputs: [{{ {input} }}], outputs: [{{ {output} }}], bytes: {{ weights: 0 B, kv: 0 B, workspace: 0 B }}, \
             reason: a test }}",
            device(part),
            if part.gpu.is_some() { "webgpu" } else { "cpu" },
        )
    }

    /// A partition's run, after the copy of what it reads where that comes from another device.
    fn steps(&self, number: usize) -> Vec<String> {
        let run = format!("{{ run: p{number} }}");
        let to = device(&self.parts[number]);
        match number.checked_sub(1).map(|before| (before, device(&self.parts[before]))) {
            Some((before, from)) if from != to => {
                vec![format!("{{ copy: {{ values: [x{before}], from: {from}, to: {to} }} }}"), run]
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

/// What a plan remembers of an empty file.
fn record(path: &str, role: &str) -> String {
    let sampled = blake3::hash(&0u64.to_le_bytes()).to_hex();
    format!("{{ path: {path}, role: {role}, bytes: 0 B, sampled: {sampled} }}")
}

/// Leaves everything as it is: only its time counts.
fn nothing(_: &mut Frame<'_>) -> Result<(), BackendError> {
    Ok(())
}
