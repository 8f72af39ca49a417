//! A toy decoder of two partitions on two memories, with every kind of carried state, and what it must answer.
//!
//! Layer 0 adds up token ids in a cache written in place and looks at the token before through a replaced state. Layer 1 adds up
//! what layer 0 said, weighted by position, in a cache that is appended to. The sum names the next token.

#![allow(dead_code)]

use hpp_engine::mock::{Frame, MockBackend, MockModel};
use hpp_engine::port::{MemoryId, Port, Tensor};
use hpp_engine::{BackendError, Engine, EngineError, EngineOptions, Silent};
use hpp_schema::{ByteSize, DType, FileRecord, FileRole, Plan, sample_ranges};
use std::path::Path;
use std::rc::Rc;
use tempfile::TempDir;

pub const VOCAB: u64 = 16;

/// The memory of the toy's device.
pub const DEVICE: MemoryId = MemoryId(1);

pub struct Toy {
    pub plan: Plan,
    pub backend: MockBackend,
    pub dir: TempDir,
}

impl Toy {
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut plan = Plan::from_yaml(include_str!("toy.yaml")).unwrap();
        for file in ["model.onnx", "gpu_0.onnx", "cpu_0.onnx"] {
            std::fs::write(dir.path().join(file), file).unwrap();
            let role = if file == "model.onnx" { FileRole::Source } else { FileRole::Partition };
            plan.files.push(record(dir.path(), file, role));
        }
        let backend = MockBackend::new();
        backend.model("gpu_0.onnx", first(DEVICE));
        backend.model("cpu_0.onnx", second());
        Toy { plan, backend, dir }
    }

    pub fn load(&self) -> Result<Engine<MockBackend>, EngineError> {
        self.load_with(EngineOptions::default())
    }

    pub fn load_with(&self, options: EngineOptions) -> Result<Engine<MockBackend>, EngineError> {
        Engine::load(&self.plan, self.dir.path(), &self.backend, options, &Silent)
    }
}

/// A plan's record of a file.
pub fn record(dir: &Path, file: &str, role: FileRole) -> FileRecord {
    let bytes = std::fs::read(dir.join(file)).unwrap();
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    for (offset, length) in sample_ranges(bytes.len() as u64) {
        hasher.update(&bytes[offset as usize..(offset + length) as usize]);
    }
    FileRecord {
        path: file.into(),
        role,
        bytes: ByteSize(bytes.len() as u64),
        sampled: hasher.finalize().to_hex().to_string(),
        blake3: Some(blake3::hash(&bytes).to_hex().to_string()),
    }
}

/// The token the toy answers after this text, computed the plain way.
pub fn answer(text: &[u32]) -> u32 {
    let mut sum = 0u64;
    let mut weighted = 0u64;
    for (at, id) in text.iter().enumerate() {
        sum += u64::from(*id);
        let before = if at == 0 { 0 } else { u64::from(text[at - 1]) };
        weighted += (sum + 3 * before) * (at as u64 + 1);
    }
    (weighted % VOCAB) as u32
}

pub fn best(scores: &[f32]) -> u32 {
    scores.iter().position(|score| *score == 1.0).unwrap() as u32
}

pub fn port(name: &str, dtype: DType, shape: &[Option<u64>], memory: MemoryId) -> Port {
    Port { name: name.into(), dtype, shape: shape.to_vec(), memory }
}

const ANY: Option<u64> = None;
const ONE: Option<u64> = Some(1);

/// Layer 0, whose tensors lie in `memory` but for the mask.
pub fn first(memory: MemoryId) -> MockModel {
    MockModel {
        inputs: vec![
            port("input_ids", DType::Int64, &[ANY, ANY], memory),
            port("attention_mask", DType::Int64, &[ANY, ANY], MemoryId::HOST),
            port("past.0.key", DType::Float32, &[ANY, ONE, ANY, ONE], memory),
            port("past.0.conv", DType::Float32, &[ANY, ONE], memory),
        ],
        outputs: vec![
            port("hidden.0", DType::Float32, &[ANY, ANY, ONE], memory),
            port("present.0.key", DType::Float32, &[ANY, ONE, ANY, ONE], memory),
            port("present.0.conv", DType::Float32, &[ANY, ONE], memory),
        ],
        in_place: vec![(2, 1)],
        kernel: Rc::new(run_first),
        takes: None,
    }
}

fn run_first(frame: &mut Frame<'_>) -> Result<(), BackendError> {
    let (ids, mask, conv) = (frame.input(0)?, frame.input(1)?, frame.input(3)?);
    let (tokens, total) = (ids.shape()[1], mask.shape()[1]);
    let past = total - tokens;
    assert!((0..total).all(|at| mask.i64(at) == 1), "the mask is all ones");
    let capacity = frame.input(2)?.shape()[2];
    assert!(total <= capacity, "{total} tokens in a cache of {capacity}");
    let cache = frame.output(1, &[1, 1, capacity, 1])?.expect("the cache is bound");
    let hidden = frame.output(0, &[1, tokens, 1])?;
    let mut before = conv.f32(0);
    for at in 0..tokens {
        let id = ids.i64(at) as f32;
        cache.set_f32(past + at, id);
        let sum: f32 = (0..=past + at).map(|at| cache.f32(at)).sum();
        if let Some(hidden) = &hidden {
            hidden.set_f32(at, sum + 3.0 * before);
        }
        before = id;
    }
    frame.output(2, &[1, 1])?.expect("the convolution state is bound").set_f32(0, before);
    Ok(())
}

/// Layer 1 and the head, on the host.
pub fn second() -> MockModel {
    MockModel {
        inputs: vec![
            port("hidden.0", DType::Float32, &[ANY, ANY, ONE], MemoryId::HOST),
            port("position_ids", DType::Int64, &[ANY, ANY], MemoryId::HOST),
            port("hpp.logit_positions", DType::Int64, &[ANY], MemoryId::HOST),
            port("past.1.key", DType::Float32, &[ANY, ONE, ANY, ONE], MemoryId::HOST),
        ],
        outputs: vec![
            port("logits", DType::Float32, &[ANY, ANY, Some(VOCAB)], MemoryId::HOST),
            port("present.1.key", DType::Float32, &[ANY, ONE, ANY, ONE], MemoryId::HOST),
        ],
        in_place: vec![],
        kernel: Rc::new(run_second),
        takes: None,
    }
}

fn run_second(frame: &mut Frame<'_>) -> Result<(), BackendError> {
    let (hidden, positions, rows, past) = (frame.input(0)?, frame.input(1)?, frame.input(2)?, frame.input(3)?);
    let (tokens, before) = (hidden.shape()[1], past.shape()[2]);
    let present = frame.output(1, &[1, 1, before + tokens, 1])?.expect("the cache is bound");
    (0..before).for_each(|at| present.set_f32(at, past.f32(at)));
    for at in 0..tokens {
        assert_eq!(positions.i64(at) as u64, before + at, "positions go on from the past");
        present.set_f32(before + at, hidden.f32(at));
    }
    let wanted = rows.shape()[0];
    let Some(logits) = frame.output(0, &[1, wanted, VOCAB])? else { return Ok(()) };
    for row in 0..wanted {
        let last = before + rows.i64(row) as u64;
        let sum: u64 = (0..=last).map(|at| present.f32(at) as u64 * (at + 1)).sum();
        for token in 0..VOCAB {
            logits.set_f32(row * VOCAB + token, if token == sum % VOCAB { 1.0 } else { 0.0 });
        }
    }
    Ok(())
}
