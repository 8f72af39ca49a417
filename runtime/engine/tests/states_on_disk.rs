//! States on disk: what is read before each run, what is evicted after it, and the memory that is left for it.

use hpp_engine::mock::{Chain, ChainPart, DiskBufferEvent, EVICTION, MockBackend};
use hpp_engine::{Engine, EngineOptions, HostTensor, LogitRows, Logits, Sequence, Silent, StepInput, WorkItem};
use hpp_schema::{ByteSize, Plan};
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

const PARTS: usize = 3;
static NO_EXTRA: BTreeMap<String, HostTensor> = BTreeMap::new();

/// Three partitions with a state each.
fn chain() -> Chain {
    let part = || ChainPart { states: 1, ..ChainPart::new(None, Rc::new(|_| Duration::ZERO)) };
    Chain { parts: (0..PARTS).map(|_| part()).collect(), ..Chain::default() }
}

fn plan(dir: &Path, backend: &MockBackend, on_disk: bool) -> Plan {
    let mut plan = chain().set_up(dir, backend).unwrap();
    plan.states.iter_mut().for_each(|state| state.on_disk = on_disk);
    plan
}

fn engine(on_disk: bool) -> (Engine<MockBackend>, MockBackend) {
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let plan = plan(dir.path(), &backend, on_disk);
    let engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    (engine, backend)
}

fn step(engine: &mut Engine<MockBackend>, sequence: &mut Sequence<MockBackend>, tokens: &[u32]) -> Vec<f32> {
    engine.step(sequence, StepInput::Tokens(tokens), LogitRows::Last).unwrap().data
}

/// Without the bytes: prefetched and evicted buffers in order.
fn order(events: &[DiskBufferEvent]) -> Vec<(char, usize)> {
    let short = |event: &DiskBufferEvent| match event {
        DiskBufferEvent::Prefetch(buffer, _) => ('p', *buffer),
        DiskBufferEvent::Evict(buffers) => ('e', buffers[0]),
    };
    events.iter().map(short).collect()
}

#[test]
fn the_next_states_are_read_while_a_partition_runs_and_its_own_are_evicted_after_it() {
    let (mut engine, backend) = engine(true);
    let mut sequence = engine.new_sequence().unwrap();
    step(&mut engine, &mut sequence, &[1, 2, 3]);
    let prompt = backend.take_disk_events();
    assert_eq!(order(&prompt), [('p', 0), ('p', 1), ('e', 0), ('p', 2), ('e', 1), ('p', 0), ('e', 2)]);
    step(&mut engine, &mut sequence, &[4]);
    let token = backend.take_disk_events();
    assert_eq!(order(&token), order(&prompt));
    // The bytes of three tokens, not of the context.
    let width = match (&token[0], &prompt[0]) {
        (DiskBufferEvent::Prefetch(_, three), DiskBufferEvent::Prefetch(_, none)) => {
            assert_eq!(*none, 0, "an empty sequence has nothing to read");
            *three / 3
        }
        other => panic!("{other:?}"),
    };
    engine.reset_telemetry();
    step(&mut engine, &mut sequence, &[5]);
    assert_eq!(backend.take_disk_events()[0], DiskBufferEvent::Prefetch(0, 4 * width));
    // Three evictions.
    let (total, pass) = (engine.telemetry().state_stalls, engine.last_pass().state_stalls);
    assert_eq!((total.time, pass), (3 * EVICTION, total));
}

/// File systems may take long to allocate and free the blocks of states.
#[test]
fn creating_and_freeing_a_sequence_counts_as_waiting_for_its_states() {
    for (on_disk, expected) in [(true, 2), (false, 0)] {
        let (mut engine, _) = engine(on_disk);
        let sequence = engine.new_sequence().unwrap();
        engine.free(sequence);
        assert_eq!(engine.telemetry().state_stalls.count, expected, "{on_disk}");
    }
}

#[test]
fn sequences_of_a_pass_take_turns() {
    let (mut engine, backend) = engine(true);
    let mut sequences = [engine.new_sequence().unwrap(), engine.new_sequence().unwrap()];
    sequences.iter_mut().for_each(|sequence| drop(step(&mut engine, sequence, &[1, 2])));
    backend.take_disk_events();
    let mut logits = [Logits::default(), Logits::default()];
    let items = sequences.iter_mut().zip(&mut logits).map(|(sequence, logits)| WorkItem {
        sequence,
        input: StepInput::Tokens(&[3]),
        rows: LogitRows::Last,
        extra: &NO_EXTRA,
        logits,
    });
    let outcomes = engine.pass(&mut items.collect::<Vec<_>>()).unwrap();
    assert!(outcomes.iter().all(Result::is_ok));
    // The second sequence's states are buffers 3 to 5.
    let of_stage = |stage: usize, next: usize| [('p', stage + 3), ('e', stage), ('p', next), ('e', stage + 3)];
    let expected: Vec<(char, usize)> =
        [('p', 0)].into_iter().chain([of_stage(0, 1), of_stage(1, 2), of_stage(2, 0)].concat()).collect();
    assert_eq!(order(&backend.take_disk_events()), expected);
}

#[test]
fn answers_are_those_of_states_in_memory() {
    let answers = [false, true].map(|on_disk| {
        let (mut engine, _) = engine(on_disk);
        let mut sequence = engine.new_sequence().unwrap();
        [&[1, 2, 3][..], &[4], &[5]].map(|tokens| step(&mut engine, &mut sequence, tokens))
    });
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn sequences_take_no_memory_for_states_and_the_window_is_theirs_together() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let mut plan = plan(dir.path(), &backend, true);
    let engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    assert_eq!(engine.host_state_bytes(), 0);
    let of_one = plan.states[0].bytes.0;
    assert_eq!(plan.state_window(), 3 * of_one);
    backend.set_resident(1 << 20);
    // Room for the window and the tensors of each pass, and none for states: the sequences that are wanted fit all the same. The tensors of
    // one: token ids and positions of 8 bytes, four float32 numbers that cross twice, 16 scores; and its bindings to three partitions.
    let workspace = plan.partitions.iter().map(|partition| partition.bytes.workspace.0).max().unwrap();
    let lanes = 39 * (plan.budgets.context * (8 + 8 + 2 * 4 * 4 + 16 * 4) + 3 * (16 << 10));
    plan.budgets.ram = Some(ByteSize((1 << 20) + (5 << 20) + workspace + 3 * of_one + lanes));
    let options = EngineOptions { sequences: Some(40), ..EngineOptions::default() };
    assert_eq!(Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap().max_sequences(), 40);
}
