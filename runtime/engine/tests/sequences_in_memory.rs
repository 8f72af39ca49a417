//! How many sequences an engine has room for within the plan's host memory.

use hpp_engine::mock::{Chain, ChainPart, MockBackend};
use hpp_engine::{Engine, EngineOptions, LogitRows, Logits, Silent, StepInput, WorkItem};
use hpp_schema::ByteSize;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// The resident set of the process once sessions are loaded, bytes.
const RESIDENT: u64 = 50 << 20;
/// What the engine leaves free, bytes.
const RESERVE: u64 = 4 << 20;

/// Tokens of a chunk of a prompt.
const CHUNK: u64 = 8;
/// What one more sequence needs for a chunk, bytes: token ids and positions of 8 bytes, four float32 numbers that cross, 16 scores.
const LANE: u64 = CHUNK * (8 + 8 + 4 * 4 + 16 * 4);

/// Sequences that fit, of 100, in `room` bytes of host memory; `room` and `reserve` are given the bytes of the states of one.
fn fitting(room: impl Fn(u64) -> u64, reserve: impl Fn(u64) -> EngineOptions) -> u64 {
    let part = || ChainPart { states: 3, ..ChainPart::new(None, Rc::new(|_| Duration::ZERO)) };
    let chain = Chain { parts: vec![part(), part()], prefill_chunk: Some(CHUNK), ..Chain::default() };
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let mut plan = chain.set_up(dir.path(), &backend).unwrap();
    let engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let states = engine.host_state_bytes();
    assert!(states > 0);
    backend.set_resident(RESIDENT);
    let workspace = plan.partitions.iter().map(|partition| partition.bytes.workspace.0).max().unwrap();
    plan.budgets.ram = Some(ByteSize(RESIDENT + RESERVE + workspace + room(states)));
    let options = EngineOptions { sequences: Some(100), ..reserve(states) };
    Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap().max_sequences()
}

/// Room for this many sequences, in bytes, by the bytes of the states of one.
fn room_for(sequences: u64) -> impl Fn(u64) -> u64 {
    move |states| sequences * states + (sequences - 1) * LANE
}

#[test]
fn what_the_caller_takes_is_reserved_for_the_sequences_that_fit_not_for_those_wanted() {
    let options =
        |reserved, reserved_per_sequence| EngineOptions { reserved, reserved_per_sequence, ..EngineOptions::default() };
    assert_eq!(fitting(room_for(12), |_| options(0, 0)), 12);
    assert_eq!(fitting(room_for(12), |states| options(0, states)), 6);
    assert_eq!(fitting(room_for(12), |states| options(0, 2 * states)), 4);
    assert_eq!(fitting(room_for(12), |states| options(6 * states, states)), 3);
    assert_eq!(fitting(room_for(12), |states| options(20 * states, states)), 1, "one always runs");
    assert_eq!(fitting(room_for(500), |states| options(0, states)), 100);
}

#[test]
fn every_sequence_but_the_first_needs_room_for_the_tensors_of_a_chunk() {
    assert_eq!(fitting(room_for(12), |_| EngineOptions::default()), 12);
    assert_eq!(fitting(|states| room_for(12)(states) - 1, |_| EngineOptions::default()), 11);
    assert_eq!(fitting(|states| states, |_| EngineOptions::default()), 1);
}

/// How often the heap is trimmed in a pass of this many sequences.
fn heap_trims(sequences: usize, ram: Option<ByteSize>) -> u64 {
    let chain = Chain { parts: vec![ChainPart::new(None, Rc::new(|_| Duration::ZERO))], ..Chain::default() };
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let mut plan = chain.set_up(dir.path(), &backend).unwrap();
    plan.budgets.ram = ram;
    let options = EngineOptions { sequences: Some(8), ..EngineOptions::default() };
    let mut engine = Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap();
    let before = backend.heap_trims();
    let mut sequences: Vec<_> = (0..sequences).map(|_| engine.new_sequence().unwrap()).collect();
    let (mut logits, extra) = (vec![Logits::default(); sequences.len()], BTreeMap::new());
    let item = |(sequence, logits)| {
        let input = StepInput::Tokens(&[1]);
        WorkItem { sequence, input, rows: LogitRows::Last, extra: &extra, logits }
    };
    let mut items: Vec<_> = sequences.iter_mut().zip(&mut logits).map(item).collect();
    assert!(engine.pass(&mut items).unwrap().iter().all(Result::is_ok));
    backend.heap_trims() - before
}

#[test]
fn freed_heap_is_returned_after_passes_of_several_sequences_under_a_limit() {
    let limit = Some(ByteSize(1 << 30));
    assert_eq!([heap_trims(1, limit), heap_trims(2, limit), heap_trims(3, limit)], [0, 1, 1]);
    assert_eq!(heap_trims(2, None), 0);
}
