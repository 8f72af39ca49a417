//! Stages that read nothing of each other compute at the same time for one sequence, on a clock that only the mock advances. Two layers
//! are divided between two devices; both parts of the second layer read both parts of the first.

mod support;

use hpp_engine::mock::{Frame, MockBackend, MockModel};
use hpp_engine::port::{MemoryId, Port, Tensor};
use hpp_engine::{BackendError, Engine, EngineOptions, LogitRows, Silent, StepInput};
use hpp_schema::{DType, FileRole, Plan};
use std::rc::Rc;
use std::time::Duration;
use support::{VOCAB, port, record};
use tempfile::TempDir;

/// A partition that multiplies the sum of what it reads by `factor`. Tensors are float32 `[1, tokens, 1]`.
#[derive(Clone, Copy)]
struct Part {
    name: &'static str,
    /// `None` on the host.
    gpu: Option<u32>,
    micros: u64,
    /// Producers of what it reads. The first partition reads token ids, and has the only state.
    reads: &'static [&'static str],
    factor: f32,
}

const START: Part = Part { name: "start", gpu: None, micros: 50, reads: &[], factor: 1.0 };
const END: Part = Part { name: "end", gpu: None, micros: 30, reads: &["second_0", "second_1"], factor: 1.0 };

/// The parts of both layers on these GPUs.
fn divided(gpus: [Option<u32>; 2]) -> Vec<Part> {
    let part = |name, gpu: usize, micros, reads, factor| Part { name, gpu: gpus[gpu], micros, reads, factor };
    vec![
        START,
        part("first_0", 0, 300, &["start"], 2.0),
        part("first_1", 1, 400, &["start"], 3.0),
        part("second_0", 0, 200, &["first_0", "first_1"], 0.5),
        part("second_1", 1, 100, &["first_0", "first_1"], 0.25),
        END,
    ]
}

impl Part {
    fn memory(&self) -> MemoryId {
        self.gpu.map_or(MemoryId::HOST, |gpu| MemoryId(gpu + 1))
    }

    fn device(&self) -> String {
        self.gpu.map_or("cpu".to_owned(), |gpu| format!("gpu{gpu}"))
    }

    fn wide(&self, name: &str) -> Port {
        port(name, DType::Float32, &[None, None, Some(1)], self.memory())
    }

    /// What its file holds.
    fn model(&self) -> MockModel {
        let mut inputs: Vec<Port> = self.reads.iter().map(|producer| self.wide(&tensor(producer))).collect();
        let mut outputs = vec![self.wide(&tensor(self.name))];
        let mut in_place = vec![];
        if self.name == START.name {
            inputs = vec![port("input_ids", DType::Int64, &[None, None], MemoryId::HOST), self.wide("past")];
            outputs.push(self.wide("present"));
            in_place.push((1, 1));
        }
        if self.name == END.name {
            outputs = vec![port("logits", DType::Float32, &[None, None, Some(VOCAB)], MemoryId::HOST)];
        }
        let part = *self;
        let kernel = Rc::new(move |frame: &mut Frame<'_>| compute(frame, part));
        let micros = self.micros;
        let model = MockModel { inputs, outputs, in_place, kernel, takes: None };
        model.taking((0, 1), Rc::new(move |_| Duration::from_micros(micros)))
    }

    /// Its entry in a plan.
    fn entry(&self) -> String {
        let wide = |name: String| format!("name: {name}, dtype: float32, shape: [batch, seq, 1]");
        let mut inputs: Vec<String> =
            self.reads.iter().map(|producer| format!("{{ {}, from: {producer} }}", wide(tensor(producer)))).collect();
        let mut outputs = vec![format!("{{ {}, to: boundary }}", wide(tensor(self.name)))];
        if self.name == START.name {
            inputs.push(format!("{{ {IDS}, from: model }}"));
            inputs.push("{ name: past, dtype: float32, shape: [batch, 64, 1], from: state }".into());
            outputs.push("{ name: present, dtype: float32, shape: [batch, 64, 1], to: state }".into());
        }
        if self.name == END.name {
            outputs = vec![format!("{{ {LOGITS}, to: model }}")];
        }
        let provider = if self.gpu.is_some() { "webgpu" } else { "cpu" };
        format!(
            "{{ name: {0}, file: {0}.onnx, weights_dir: ., device: {1}, providers: [{provider}], blocks: [{0}], inputs: [{2}], \
             outputs: [{3}], bytes: {{ weights: 0 B, kv: {4} B, workspace: 0 B }}, reason: a test }}",
            self.name,
            self.device(),
            inputs.join(", "),
            outputs.join(", "),
            if self.name == START.name { 256 } else { 0 }
        )
    }
}

const IDS: &str = "name: input_ids, dtype: int64, shape: [batch, seq]";
const LOGITS: &str = "name: logits, dtype: float32, shape: [batch, seq, 16]";

fn tensor(producer: &str) -> String {
    format!("x.{producer}")
}

fn compute(frame: &mut Frame<'_>, part: Part) -> Result<(), BackendError> {
    let tokens = frame.input(0)?.shape()[1];
    if part.name == START.name {
        let ids = frame.input(0)?;
        let out = frame.output(0, &[1, tokens, 1])?.expect("it is read");
        (0..tokens).for_each(|at| out.set_f32(at, ids.i64(at) as f32));
        return Ok(());
    }
    let read = (0..part.reads.len()).map(|input| frame.input(input)).collect::<Result<Vec<_>, _>>()?;
    let sum = |at: u64| read.iter().map(|tensor| tensor.f32(at)).sum::<f32>() * part.factor;
    if part.name == END.name {
        let logits = frame.output(0, &[1, tokens, VOCAB])?.expect("it is read");
        (0..tokens).for_each(|at| logits.set_f32(at * VOCAB, sum(at)));
        return Ok(());
    }
    let out = frame.output(0, &[1, tokens, 1])?.expect("it is read");
    (0..tokens).for_each(|at| out.set_f32(at, sum(at)));
    Ok(())
}

/// The plan of these partitions. Copies come before the first run that reads what they copy.
fn plan(parts: &[Part], dir: &TempDir) -> Plan {
    let mut steps: Vec<String> = Vec::new();
    for part in parts {
        for producer in part.reads.iter().filter_map(|name| parts.iter().find(|part| part.name == *name)) {
            let (from, to) = (producer.device(), part.device());
            let copied = format!("{{ copy: {{ values: [{}], from: {from}, to: {to} }} }}", tensor(producer.name));
            if from != to && !steps.contains(&copied) {
                steps.push(copied);
            }
        }
        steps.push(format!("{{ run: {} }}", part.name));
    }
    let entries: Vec<String> = parts.iter().map(Part::entry).collect();
    let steps = steps.join(", ");
    let text = format!(
        "hpp_plan: 2\n\
         model: {{ name: divided, source: model.onnx, weights_dir: ., kind: decoder, layers: 2, vocab_size: {VOCAB}, \
         inputs: [{{ {IDS}, role: token_ids }}], outputs: [{{ {LOGITS}, role: logits }}] }}\n\
         budgets: {{ vram: [1 GiB, 1 GiB], context: 64, batch: 1, margin: 0 B }}\n\
         devices: [{{ name: gpu0, kind: gpu }}, {{ name: gpu1, kind: gpu }}, {{ name: cpu, kind: cpu }}]\n\
         partitions: [{}]\n\
         states: [{{ past: past, present: present, partition: start, layer: 0, dtype: float32, shape: [batch, 64, 1], \
         update: {{ kind: in_place, axis: 1, capacity: 64 }}, device: cpu, bytes: 256 B }}]\n\
         schedule: {{ prefill: [{steps}], decode: [{steps}] }}\n\
         buffers: []\n\
         predictions: {{ source: static, decode_ms: 0, time_to_first_token_ms: 0, prompt_tokens: 0, decode_tokens_per_second: 0 }}\n\
         files: []\n",
        entries.join(", ")
    );
    let mut plan = Plan::from_yaml(&text).unwrap();
    std::fs::write(dir.path().join("model.onnx"), []).unwrap();
    plan.files.push(record(dir.path(), "model.onnx", FileRole::Source));
    for part in parts {
        let file = format!("{}.onnx", part.name);
        std::fs::write(dir.path().join(&file), part.name).unwrap();
        plan.files.push(record(dir.path(), &file, FileRole::Partition));
    }
    plan
}

/// The time of a token after a prompt of three, and its score.
fn token(parts: &[Part]) -> (Duration, f32) {
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    (1..=2).for_each(|gpu| backend.queue(MemoryId(gpu)));
    parts.iter().for_each(|part| backend.model(&format!("{}.onnx", part.name), part.model()));
    let plan = plan(parts, &dir);
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&[3, 1, 2]), LogitRows::Last).unwrap();
    let started = backend.clock().now();
    let logits = engine.step(&mut sequence, StepInput::Tokens(&[4]), LogitRows::Last).unwrap();
    (backend.clock().now() - started, logits.data[0])
}

/// Of token 4: 8 and 12 of the first layer, 10 and 5 of the second.
const SCORE: f32 = 15.0;

#[test]
fn parts_of_a_layer_on_two_devices_take_as_long_as_the_longer_one() {
    let (time, score) = token(&divided([Some(0), Some(1)]));
    assert_eq!((time, score), (Duration::from_micros(50 + 400 + 200 + 30), SCORE));
}

#[test]
fn a_part_on_the_host_computes_beside_one_on_a_device() {
    for gpus in [[Some(0), None], [None, Some(0)]] {
        let (time, score) = token(&divided(gpus));
        assert_eq!((time, score), (Duration::from_micros(50 + 400 + 200 + 30), SCORE), "{gpus:?}");
    }
}

#[test]
fn parts_on_one_device_compute_one_after_the_other() {
    let (time, score) = token(&divided([Some(0), Some(0)]));
    assert_eq!((time, score), (Duration::from_micros(50 + 700 + 300 + 30), SCORE));
}
