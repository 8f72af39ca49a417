//! Caches of which the graph keeps only the last tokens: the same answers however a text is divided into passes, goes back, is saved and restored.

mod support;

use hpp_engine::mock::{Frame, MockBackend};
use hpp_engine::port::{MemoryId, Tensor};
use hpp_engine::{BackendError, Engine, LogitRows, PageLayout, PageToSave, Sequence, StepInput};
use hpp_schema::{ByteSize, StateUpdate};
use std::rc::Rc;
use support::{DEVICE, Toy, VOCAB, best, second};

/// Tokens that the cache of layer 1 keeps.
const KEPT: u64 = 5;
const TEXT: [u32; 12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8];

/// A toy whose layer 1 weights what layer 0 said about the last tokens by their distance.
fn toy(memory: MemoryId) -> Toy {
    let mut toy = Toy::new();
    let state = toy.plan.states.iter_mut().find(|state| state.past == "past.1.key").unwrap();
    state.update = StateUpdate::Sliding { axis: 2, capacity: KEPT };
    state.bytes = ByteSize(4 * KEPT);
    if memory == DEVICE {
        state.device = "gpu0".into();
    }
    let mut model = second();
    (model.inputs[3].memory, model.outputs[1].memory) = (memory, memory);
    model.kernel = Rc::new(run);
    toy.backend.model("cpu_0.onnx", model);
    toy
}

fn run(frame: &mut Frame<'_>) -> Result<(), BackendError> {
    let (hidden, rows, past) = (frame.input(0)?, frame.input(2)?, frame.input(3)?);
    let (tokens, before) = (hidden.shape()[1], past.shape()[2]);
    assert!(before <= KEPT, "{before} tokens in a cache of {KEPT}");
    let mut all: Vec<f32> = (0..before).map(|at| past.f32(at)).collect();
    all.extend((0..tokens).map(|at| hidden.f32(at)));
    let left = (before + tokens).min(KEPT);
    let present = frame.output(1, &[1, 1, left, 1])?.expect("the cache is bound");
    (0..left).for_each(|at| present.set_f32(at, all[(before + tokens - left + at) as usize]));
    let wanted = rows.shape()[0];
    let Some(logits) = frame.output(0, &[1, wanted, VOCAB])? else { return Ok(()) };
    for row in 0..wanted {
        let seen = &all[..=(before + rows.i64(row) as u64) as usize];
        (0..VOCAB)
            .for_each(|token| logits.set_f32(row * VOCAB + token, if token == weighted(seen) { 1.0 } else { 0.0 }));
    }
    Ok(())
}

/// The last value counts once, the one before twice, and so on, as far as the cache and the token itself reach.
fn weighted(values: &[f32]) -> u64 {
    let seen = values.iter().rev().take(KEPT as usize + 1);
    seen.zip(1..).map(|(value, times)| *value as u64 * times).sum::<u64>() % VOCAB
}

/// The answer after a text, computed the plain way.
fn answer(text: &[u32]) -> u32 {
    let said = |at: usize| {
        let sum: u32 = text[..=at].iter().sum();
        (sum + 3 * at.checked_sub(1).map_or(0, |before| text[before])) as f32
    };
    weighted(&(0..text.len()).map(said).collect::<Vec<_>>()) as u32
}

fn say(engine: &mut Engine<MockBackend>, sequence: &mut Sequence<MockBackend>, ids: &[u32]) -> u32 {
    best(engine.step(sequence, StepInput::Tokens(ids), LogitRows::Last).unwrap().last())
}

#[test]
fn passes_of_any_length_give_the_same_answers() {
    for memory in [MemoryId::HOST, DEVICE] {
        let toy = toy(memory);
        let mut engine = toy.load().unwrap();
        for tokens in 1..=TEXT.len() {
            let (mut sequence, mut read) = (engine.new_sequence().unwrap(), 0);
            for pass in TEXT.chunks(tokens) {
                read += pass.len();
                assert_eq!(say(&mut engine, &mut sequence, pass), answer(&TEXT[..read]), "{tokens} tokens a pass");
            }
        }
    }
}

#[test]
fn a_sequence_goes_back_to_before_its_last_pass() {
    for memory in [MemoryId::HOST, DEVICE] {
        let toy = toy(memory);
        let mut engine = toy.load().unwrap();
        // Below the capacity, from below to above it, and above it.
        for (first, second) in [(1, 2), (2, 3), (3, 3), (4, 6), (5, 1), (7, 4)] {
            let mut sequence = engine.new_sequence().unwrap();
            say(&mut engine, &mut sequence, &TEXT[..first]);
            say(&mut engine, &mut sequence, &TEXT[first..first + second]);
            let middle = (first + second - 1) as u64;
            assert_eq!(engine.truncate(&mut sequence, middle).unwrap(), Some(first as u64), "{first} and {second}");
            let mut text = TEXT[..first].to_vec();
            for token in [7, 11, 2] {
                text.push(token);
                assert_eq!(say(&mut engine, &mut sequence, &[token]), answer(&text), "{first} and {second}");
            }
            assert_eq!(engine.truncate(&mut sequence, 0).unwrap(), None);
        }
    }
}

#[test]
fn pages_hold_the_cache_whether_it_is_full_or_not() {
    for memory in [MemoryId::HOST, DEVICE] {
        let toy = toy(memory);
        let mut engine = toy.load().unwrap();
        let layout = engine.page_layout(3).unwrap();
        assert!(layout.has_snapshots());
        let (mut sequence, mut pages) = (engine.new_sequence().unwrap(), Vec::new());
        for (first, pass) in (0..).step_by(3).zip(TEXT.chunks(3)) {
            say(&mut engine, &mut sequence, pass);
            let mut bytes = vec![0; layout.bytes() as usize];
            engine.save_pages(&sequence, vec![PageToSave { layout: &layout, first, bytes: &mut bytes }]).unwrap();
            pages.push(bytes);
        }
        let mut other = toy.load().unwrap();
        for count in 1..=pages.len() {
            let some: Vec<(&PageLayout, &[u8])> =
                pages[..count].iter().map(|page| (&layout, page.as_slice())).collect();
            let mut restored = other.restore_pages(&some).unwrap();
            let mut text = TEXT[..3 * count].to_vec();
            for token in [7, 11, 2] {
                text.push(token);
                assert_eq!(say(&mut other, &mut restored, &[token]), answer(&text), "{count} pages");
            }
        }
    }
}
