//! Rows of several sequences in one run: the same scores as alone wherever sequences start and end, and no batches where a model's
//! rows are not those of single runs.

mod support;

use hpp_engine::mock::{Frame, MockBackend, MockModel};
use hpp_engine::port::{MemoryId, Tensor};
use hpp_engine::{
    BackendError, Engine, EngineOptions, LogitRows, Logits, NamedTensors, RowBatching, Sequence, Silent, StepInput,
    WorkItem,
};
use hpp_schema::{DType, FileRole, ModelOutput, OutputRole, OutputUse, PartitionOutput, Plan};
use proptest::prelude::*;
use std::rc::Rc;
use support::{DEVICE, VOCAB, port, record};
use tempfile::TempDir;

static NO_EXTRA: NamedTensors = NamedTensors::new();
const CAPACITY: u64 = 64;

const PLAN: &str = "
hpp_plan: 2
model:
  name: rows
  source: model.onnx
  weights_dir: .
  kind: decoder
  layers: 1
  context_length: 64
  vocab_size: 16
  inputs:
    - { name: input_ids, dtype: int64, shape: [batch, seq], role: token_ids }
    - { name: attention_mask, dtype: int64, shape: [batch, total], role: attention_mask }
    - { name: position_ids, dtype: int64, shape: [batch, seq], role: position_ids }
    - { name: hpp.logit_positions, dtype: int64, shape: [rows], role: logit_positions }
  outputs:
    - { name: logits, dtype: float32, shape: [batch, rows, 16], role: logits }
budgets: { vram: [], context: 64, batch: 1, margin: 0 B }
devices:
  - { name: cpu, kind: cpu }
partitions:
  - name: cpu_0
    file: cpu_0.onnx
    weights_dir: .
    device: cpu
    providers: [cpu]
    blocks: [embedding, layers.0, lm_head]
    inputs:
      - { name: input_ids, dtype: int64, shape: [batch, seq], from: model }
      - { name: attention_mask, dtype: int64, shape: [batch, total], from: model }
      - { name: position_ids, dtype: int64, shape: [batch, seq], from: model }
      - { name: hpp.logit_positions, dtype: int64, shape: [rows], from: model }
      - { name: past.0.key, dtype: float32, shape: [batch, 1, past, 1], from: state }
    outputs:
      - { name: logits, dtype: float32, shape: [batch, rows, 16], to: model }
      - { name: present.0.key, dtype: float32, shape: [batch, 1, total, 1], to: state }
    bytes: { weights: 0 B, kv: 1 KiB, workspace: 0 B }
    reason: a toy
states:
  - past: past.0.key
    present: present.0.key
    partition: cpu_0
    layer: 0
    dtype: float32
    shape: [batch, 1, past, 1]
    update: { kind: in_place, axis: 2, capacity: 64 }
    device: cpu
    bytes: 256 B
schedule: { prefill: [{ run: cpu_0 }], decode: [{ run: cpu_0 }] }
buffers: []
predictions: { source: static, decode_ms: 0, time_to_first_token_ms: 0, prompt_tokens: 0, decode_tokens_per_second: 0 }
files: []
";

/// What the model does with several rows.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Rows {
    /// What it does with each alone.
    Apart,
    /// What it does with each alone, up to rounding.
    Rounded,
    /// What it does with each alone, up to rounding that few texts show.
    Seldom,
    /// Reads the first row in place of all others.
    Mixed,
    /// Refuses them.
    Refused,
}

/// Scores of the text's next token: the sum of its ids, each times its place, decides.
fn scores(text: &[u32]) -> Vec<f32> {
    let sum: u64 = text.iter().zip(1..).map(|(id, place)| u64::from(*id) * place).sum();
    (0..VOCAB).map(|token| ((sum + token * 5) % 13) as f32 / 2.0).collect()
}

/// The kernel for [`scores`], which keeps ids in a cache and asks the mask for the length of each row.
fn run(frame: &mut Frame<'_>, rows: Rows) -> Result<(), BackendError> {
    let (ids, mask, positions, wanted) = (frame.input(0)?, frame.input(1)?, frame.input(2)?, frame.input(3)?);
    let (batch, tokens, total) = (ids.shape()[0], ids.shape()[1], mask.shape()[1]);
    if batch > 1 && rows == Rows::Refused {
        return Err(BackendError::Misfit { what: "rows".into(), why: "one at a time".into() });
    }
    let cache = frame.output(1, &[batch, 1, CAPACITY, 1])?.expect("the cache is bound");
    let count = wanted.shape()[0];
    let Some(logits) = frame.output(0, &[batch, count, VOCAB])? else { return Ok(()) };
    for row in 0..batch {
        let length: i64 = (0..total).map(|at| mask.i64(row * total + at)).sum();
        let past = length as u64 - tokens;
        for at in 0..tokens {
            assert_eq!(positions.i64(row * tokens + at) as u64, past + at);
            cache.set_f32(row * CAPACITY + past + at, ids.i64(row * tokens + at) as f32);
        }
        for index in 0..count {
            let end = past + wanted.i64(index) as u64 + 1;
            let first = if rows == Rows::Mixed { 0 } else { row };
            let text: Vec<u32> = (0..end).map(|at| cache.f32(first * CAPACITY + at) as u32).collect();
            let is_off = rows == Rows::Rounded || (rows == Rows::Seldom && text.len() == 9);
            let off = if batch > 1 && is_off { 1e-3 } else { 0.0 };
            for (token, score) in scores(&text).into_iter().enumerate() {
                logits.set_f32((row * count + index) * VOCAB + token as u64, score + off);
            }
        }
    }
    Ok(())
}

struct Toy {
    engine: Engine<MockBackend>,
    _dir: TempDir,
}

fn load(rows: Rows, row_batching: RowBatching, sequences: u64) -> Toy {
    load_plan(Plan::from_yaml(PLAN).unwrap(), rows, row_batching, (sequences, MemoryId::HOST), &MockBackend::new())
}

/// Loads a plan whose states lie on a device. `has_parts`: whether the device's buffers can be divided.
fn load_on_device(rows: Rows, row_batching: RowBatching, has_parts: bool) -> Toy {
    let backend = MockBackend::new();
    if !has_parts {
        backend.refuse_slices(DEVICE);
    }
    let on_device =
        PLAN.replace("vram: []", "vram: [1 MiB]").replace("kind: cpu }", "kind: cpu }\n  - { name: gpu0, kind: gpu }");
    let on_device =
        on_device.replace("device: cpu\n", "device: gpu0\n").replace("providers: [cpu]", "providers: [cuda]");
    load_plan(Plan::from_yaml(&on_device).unwrap(), rows, row_batching, (4, DEVICE), &backend)
}

/// Loads a plan whose hidden states have 16 bits.
fn load_half(rows: Rows, sequences: u64) -> Toy {
    let mut plan = Plan::from_yaml(PLAN).unwrap();
    let hidden = PartitionOutput {
        name: "hidden".into(),
        dtype: DType::Float16,
        shape: plan.partitions[0].outputs[0].shape.clone(),
        to: OutputUse::Model,
    };
    let (name, dtype, shape) = (hidden.name.clone(), hidden.dtype, hidden.shape.clone());
    plan.model.outputs.push(ModelOutput { name, dtype, shape, role: OutputRole::Free });
    plan.partitions[0].outputs.push(hidden);
    load_plan(plan, rows, RowBatching::Exact, (sequences, MemoryId::HOST), &MockBackend::new())
}

/// Loads a plan for `sequences` sequences, with states in this memory.
fn load_plan(
    mut plan: Plan,
    rows: Rows,
    row_batching: RowBatching,
    (sequences, states): (u64, MemoryId),
    backend: &MockBackend,
) -> Toy {
    let dir = tempfile::tempdir().unwrap();
    let cache = |name| port(name, DType::Float32, &[None, Some(1), None, Some(1)], states);
    let port = |name, dtype, shape: &[Option<u64>]| port(name, dtype, shape, MemoryId::HOST);
    let is_half = plan.model.outputs.len() > 1;
    let hidden = is_half.then(|| port("hidden", DType::Float16, &[None, None, Some(VOCAB)]));
    backend.model(
        "cpu_0.onnx",
        MockModel {
            inputs: vec![
                port("input_ids", DType::Int64, &[None, None]),
                port("attention_mask", DType::Int64, &[None, None]),
                port("position_ids", DType::Int64, &[None, None]),
                port("hpp.logit_positions", DType::Int64, &[None]),
                cache("past.0.key"),
            ],
            outputs: vec![port("logits", DType::Float32, &[None, None, Some(VOCAB)]), cache("present.0.key")]
                .into_iter()
                .chain(hidden)
                .collect(),
            in_place: vec![(4, 1)],
            kernel: Rc::new(move |frame: &mut Frame<'_>| {
                if is_half {
                    let (batch, rows) = (frame.input(0)?.shape()[0], frame.input(3)?.shape()[0]);
                    frame.output(2, &[batch, rows, VOCAB])?;
                }
                run(frame, rows)
            }),
            takes: None,
        },
    );
    for (file, role) in [("model.onnx", FileRole::Source), ("cpu_0.onnx", FileRole::Partition)] {
        std::fs::write(dir.path().join(file), file).unwrap();
        plan.files.push(record(dir.path(), file, role));
    }
    let options = EngineOptions { sequences: Some(sequences), row_batching, ..EngineOptions::default() };
    Toy { engine: Engine::load(&plan, dir.path(), backend, options, &Silent).unwrap(), _dir: dir }
}

/// A text in progress: its tokens, and how many of them its sequence has.
struct Text {
    sequence: Sequence<MockBackend>,
    tokens: Vec<u32>,
    fed: usize,
    logits: Logits,
    rests: bool,
}

impl Toy {
    fn start(&mut self, tokens: &[u32]) -> Text {
        let sequence = self.engine.new_sequence().unwrap();
        Text { sequence, tokens: tokens.to_vec(), fed: 0, logits: Logits::default(), rests: false }
    }

    /// One pass with the new tokens of each text that does not rest. These texts go on with the best token. Returns whether all scores were those
    /// of single runs, up to `tolerance`.
    fn pass(&mut self, texts: &mut [Text], tolerance: f32) -> bool {
        let mut items = Vec::new();
        for Text { sequence, tokens, fed, logits, .. } in texts.iter_mut().filter(|text| !text.rests) {
            let input = StepInput::Tokens(&tokens[*fed..]);
            items.push(WorkItem { sequence, input, rows: LogitRows::Last, extra: &NO_EXTRA, logits });
        }
        let outcomes = self.engine.pass(&mut items).unwrap();
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        let mut right = true;
        for Text { sequence, tokens, fed, logits, .. } in texts.iter_mut().filter(|text| !text.rests) {
            let want = scores(tokens);
            right &= logits.rows == 1 && logits.data.iter().zip(&want).all(|(a, b)| (a - b).abs() <= tolerance);
            *fed = tokens.len();
            assert_eq!(sequence.len(), tokens.len() as u64);
            let best = want.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).unwrap().0;
            tokens.push(best as u32);
        }
        right
    }

    fn batches(&self) -> (u64, u64) {
        let telemetry = self.engine.telemetry();
        (telemetry.row_batches, telemetry.batched_rows)
    }
}

#[test]
fn the_first_pass_of_a_size_is_a_check_and_later_ones_are_batches() {
    let mut toy = load(Rows::Apart, RowBatching::Exact, 4);
    let mut texts: Vec<Text> = [&[1, 2, 3][..], &[4], &[5, 6, 7, 8, 9]].map(|text| toy.start(text)).into();
    for batches in [(0, 0), (0, 0), (1, 3), (2, 6)] {
        assert!(toy.pass(&mut texts, 0.0));
        assert_eq!(toy.batches(), batches, "the prompts, the check, then batches");
    }
    // The row between two is free: it is computed for nothing.
    texts.remove(1);
    assert!(toy.pass(&mut texts, 0.0));
    assert_eq!(toy.batches(), (3, 8));
    // The row's next owner starts with a prompt, so that the row is not free and the other two rows form no batch.
    texts.insert(0, toy.start(&[3, 3]));
    assert!(toy.pass(&mut texts, 0.0));
    assert_eq!(toy.batches(), (3, 8));
    assert!(toy.pass(&mut texts, 0.0));
    assert_eq!(toy.batches(), (4, 11));
    let telemetry = toy.engine.telemetry();
    assert_eq!(telemetry.decode_tokens, 3 + 3 + 3 + 2 + 3, "rows of a batch count as tokens");
}

#[test]
fn states_on_a_device_are_rows_where_sums_may_round() {
    let prompts = [&[1, 2, 3][..], &[4], &[5, 6, 7, 8, 9]];
    for (row_batching, has_parts, batches) in
        [(RowBatching::On, true, (2, 6)), (RowBatching::On, false, (0, 0)), (RowBatching::Exact, true, (0, 0))]
    {
        let mut toy = load_on_device(Rows::Rounded, row_batching, has_parts);
        let mut texts: Vec<Text> = prompts.map(|text| toy.start(text)).into();
        for _ in 0..4 {
            assert!(toy.pass(&mut texts, 0.01));
        }
        assert_eq!(toy.batches(), batches, "{row_batching:?}, parts: {has_parts}");
        // A sequence of its own, or a row whose last owner has left.
        texts.remove(0);
        texts.push(toy.start(&[7, 7]));
        assert!((0..3).all(|_| toy.pass(&mut texts, 0.01)));
    }
}

#[test]
fn batches_that_compute_something_else_are_not_used() {
    for (rows, mode, is_batched) in [
        (Rows::Apart, RowBatching::Exact, true),
        (Rows::Apart, RowBatching::On, true),
        (Rows::Apart, RowBatching::Off, false),
        (Rows::Rounded, RowBatching::Exact, false),
        (Rows::Rounded, RowBatching::On, true),
        (Rows::Mixed, RowBatching::Exact, false),
        (Rows::Mixed, RowBatching::On, false),
        (Rows::Refused, RowBatching::On, false),
    ] {
        let mut toy = load(rows, mode, 3);
        let mut texts: Vec<Text> = [&[1, 2, 3][..], &[4], &[5, 6]].map(|text| toy.start(text)).into();
        let tolerance = if rows == Rows::Rounded && mode == RowBatching::On { 2e-3 } else { 0.0 };
        for _ in 0..6 {
            assert!(toy.pass(&mut texts, tolerance), "{rows:?} {mode:?}");
        }
        assert_eq!(toy.batches().0 > 0, is_batched, "{rows:?} {mode:?}");
    }
}

#[test]
fn nothing_is_batched_where_texts_may_be_on_both_sides_of_a_change_of_tables() {
    for (change, batches) in [(63, (0, 0)), (64, (1, 2))] {
        let mut plan = Plan::from_yaml(PLAN).unwrap();
        plan.model.tables_change_after = Some(change);
        let mut toy = load_plan(plan, Rows::Apart, RowBatching::Exact, (2, MemoryId::HOST), &MockBackend::new());
        let mut texts: Vec<Text> = (1..3).map(|id| toy.start(&[id])).collect();
        (0..3).for_each(|_| assert!(toy.pass(&mut texts, 0.0)));
        assert_eq!(toy.batches(), batches, "{change} of 64 tokens");
    }
}

#[test]
fn values_of_16_bits_are_checked_until_enough_rows_agreed() {
    let mut toy = load_half(Rows::Seldom, 3);
    let mut texts: Vec<Text> = [&[1, 2, 3][..], &[4], &[5, 6]].map(|text| toy.start(text)).into();
    for _ in 0..30 {
        assert!(toy.pass(&mut texts, 0.0));
    }
    assert_eq!(toy.batches(), (0, 0), "the ninth tokens differ");
    let mut toy = load_half(Rows::Apart, 8);
    let mut texts: Vec<Text> = (1..9).map(|id| toy.start(&[id])).collect();
    // The prompts, 32 checks of 8 rows, and batches.
    (0..1 + 32).for_each(|_| assert!(toy.pass(&mut texts, 0.0)));
    assert_eq!(toy.batches(), (0, 0));
    (0..5).for_each(|_| assert!(toy.pass(&mut texts, 0.0)));
    assert_eq!(toy.batches(), (5, 40));
}

#[test]
fn no_more_batches_are_checked_after_three_that_failed() {
    let runs = |mode: RowBatching| {
        let mut toy = load(Rows::Rounded, mode, 8);
        let mut texts: Vec<Text> = (1..9).map(|id| toy.start(&[id])).collect();
        assert!(toy.pass(&mut texts, 0.0));
        while texts.len() > 1 {
            assert!(toy.pass(&mut texts, 0.0));
            texts.pop();
        }
        toy.engine.telemetry().stages[0].decode.count
    };
    let alone: u64 = (2..9).sum();
    assert_eq!((runs(RowBatching::Off), runs(RowBatching::Exact)), (alone, alone + 3));
}

#[test]
fn sequences_beyond_the_arena_run_beside_the_batches() {
    let mut toy = load(Rows::Apart, RowBatching::Exact, 2);
    let mut texts: Vec<Text> = (1..5).map(|id| toy.start(&[id, id + 1])).collect();
    for _ in 0..5 {
        assert!(toy.pass(&mut texts, 0.0));
    }
    assert_eq!(toy.batches(), (3, 6));
    // Of a text whose row is batched, tokens can be dropped.
    let text = &mut texts[0];
    assert_eq!(toy.engine.truncate(&mut text.sequence, 3).unwrap(), Some(3));
    text.tokens.truncate(4);
    text.fed = 3;
    assert!(toy.pass(&mut texts, 0.0));
}

/// What happens between two passes.
#[derive(Clone, Debug)]
enum Change {
    Start(Vec<u32>),
    End(usize),
    /// The next tokens are given, not chosen.
    Say(usize, Vec<u32>),
    /// One text takes part in no pass, or does again.
    Rest(usize),
    Nothing,
}

fn change() -> impl Strategy<Value = Change> {
    let ids = || proptest::collection::vec(0u32..16, 1..4);
    prop_oneof![
        2 => ids().prop_map(Change::Start),
        1 => (0usize..8).prop_map(Change::End),
        1 => (0usize..8, ids()).prop_map(|(text, ids)| Change::Say(text, ids)),
        1 => (0usize..8).prop_map(Change::Rest),
        3 => Just(Change::Nothing),
    ]
}

proptest! {
    #[test]
    fn scores_are_those_of_single_runs_whatever_starts_and_ends(
        changes in proptest::collection::vec(change(), 1..24),
        sequences in 2u64..7,
    ) {
        let mut toy = load(Rows::Apart, RowBatching::Exact, sequences);
        let mut texts = vec![toy.start(&[7, 1])];
        for change in changes {
            match change {
                Change::Start(tokens) if texts.len() < 8 => texts.push(toy.start(&tokens)),
                Change::End(text) if text < texts.len() => drop(texts.remove(text)),
                Change::Say(text, tokens) if text < texts.len() => texts[text].tokens.extend(tokens),
                Change::Rest(text) if text < texts.len() => texts[text].rests ^= true,
                _ => {}
            }
            prop_assert!(toy.pass(&mut texts, 0.0));
        }
    }
}
