//! How many sequences an engine has room for within the plan's host memory.

use hpp_engine::mock::{Chain, ChainPart, MockBackend};
use hpp_engine::{Engine, EngineOptions, LogitRows, Logits, Silent, StepInput, WorkItem};
use hpp_schema::ByteSize;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// The resident set of the process once sessions are loaded, bytes. A limit above it holds the whole plan.
const RESIDENT: u64 = 100 << 20;
/// What the engine leaves free, bytes.
const RESERVE: u64 = 5 << 20;

/// Tokens of a chunk of a prompt.
const CHUNK: u64 = 8;
/// What one more sequence needs for a chunk, bytes: token ids and positions of 8 bytes, four float32 numbers that cross, 16 scores; and
/// 16 KiB for its bindings to each of two partitions.
const LANE: u64 = CHUNK * (8 + 8 + 4 * 4 + 16 * 4) + 2 * (16 << 10);

/// How many of 100 sequences fit in `room` bytes of host memory. `room` is given the bytes of one sequence's states, `reserve` all bytes of one
/// sequence.
fn fitting(room: impl Fn(u64) -> u64, reserve: impl Fn(u64) -> EngineOptions) -> u64 {
    fitting_in(|_, room| room, room, reserve)
}

/// Like [`fitting`]. `plan_limit` returns the plan's limit of host memory; it is given the backend and the limit that leaves this room.
fn fitting_in(
    plan_limit: impl Fn(&MockBackend, u64) -> u64,
    room: impl Fn(u64) -> u64,
    reserve: impl Fn(u64) -> EngineOptions,
) -> u64 {
    let part = || ChainPart { states: 3, ..ChainPart::new(None, Rc::new(|_| Duration::ZERO)) };
    let chain = Chain { parts: vec![part(), part()], prefill_chunk: Some(CHUNK), ..Chain::default() };
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let mut plan = chain.set_up(dir.path(), &backend).unwrap();
    let engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let states = engine.host_state_bytes();
    assert!(states > 0);
    backend.set_resident(RESIDENT);
    let workspace = plan.partitions.iter().map(|partition| partition.bytes.workspace.0).max().unwrap();
    let limit = plan_limit(&backend, RESIDENT + RESERVE + workspace + room(states));
    plan.budgets.ram = Some(ByteSize(limit));
    let options = EngineOptions { sequences: Some(100), ..reserve(states + LANE) };
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
    assert_eq!(fitting(room_for(12), |one| options(0, one)), 6);
    assert_eq!(fitting(room_for(12), |one| options(0, 2 * one)), 4);
    assert_eq!(fitting(room_for(12), |one| options(6 * one, one)), 3);
    assert_eq!(fitting(room_for(12), |one| options(20 * one, one)), 1, "one always runs");
    assert_eq!(fitting(room_for(500), |one| options(0, one)), 100);
}

/// Also where all weights stay in memory.
#[test]
fn a_process_that_may_use_less_than_planned_has_room_for_fewer_sequences() {
    let in_smaller_process = |backend: &MockBackend, limit: u64| {
        backend.limit_memory(limit);
        10 * limit
    };
    assert_eq!(fitting_in(in_smaller_process, room_for(12), |_| EngineOptions::default()), 12);
}

#[test]
fn every_sequence_but_the_first_needs_room_for_the_tensors_of_a_chunk() {
    assert_eq!(fitting(room_for(12), |_| EngineOptions::default()), 12);
    assert_eq!(fitting(|states| room_for(12)(states) - 1, |_| EngineOptions::default()), 11);
    assert_eq!(fitting(|states| states, |_| EngineOptions::default()), 1);
}

/// How often the heap is trimmed in a pass of `sequences` sequences of `tokens` tokens each through two partitions.
fn heap_trims(sequences: usize, tokens: usize, ram: Option<ByteSize>) -> u64 {
    let part = || ChainPart::new(None, Rc::new(|_| Duration::ZERO));
    let chain = Chain { parts: vec![part(), part()], ..Chain::default() };
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let mut plan = chain.set_up(dir.path(), &backend).unwrap();
    plan.budgets.ram = ram;
    let options = EngineOptions { sequences: Some(8), ..EngineOptions::default() };
    let mut engine = Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap();
    let before = backend.heap_trims();
    let mut sequences: Vec<_> = (0..sequences).map(|_| engine.new_sequence().unwrap()).collect();
    let (mut logits, extra) = (vec![Logits::default(); sequences.len()], BTreeMap::new());
    let item = |(sequence, logits)| {
        let input = StepInput::Tokens(&[1, 2, 3][..tokens]);
        WorkItem { sequence, input, rows: LogitRows::Last, extra: &extra, logits }
    };
    let mut items: Vec<_> = sequences.iter_mut().zip(&mut logits).map(item).collect();
    assert!(engine.pass(&mut items).unwrap().iter().all(Result::is_ok));
    backend.heap_trims() - before
}

#[test]
fn freed_heap_is_returned_after_passes_of_several_sequences_under_a_limit() {
    let limit = Some(ByteSize(1 << 30));
    assert_eq!([heap_trims(1, 1, limit), heap_trims(2, 1, limit), heap_trims(3, 1, limit)], [0, 1, 1]);
    // Prompts take more: also before each partition.
    assert_eq!([heap_trims(1, 3, limit), heap_trims(2, 3, limit)], [0, 3]);
    assert_eq!(heap_trims(2, 3, None), 0);
}
