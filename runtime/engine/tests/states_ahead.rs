//! States on the host that are copied to a device for each run: while one stage runs, the states of the next are copied there. On a clock that only
//! the mock advances, a pass then takes as long as the slower of computing and copying; and whatever happens, each run reads the rows that the pass
//! before has written. The mock refuses a run that reads a state that has not arrived, a copy to a buffer that a run uses, and a source that
//! changes while it is copied.

use hpp_engine::mock::{Chain, ChainPart, LinkCost, MockBackend};
use hpp_engine::port::MemoryId;
use hpp_engine::{
    CancelHandle, Engine, EngineError, EngineOptions, LogitRows, Logits, NamedTensors, Sequence, Silent, StepInput,
    WorkItem,
};
use proptest::prelude::*;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

static NO_EXTRA: NamedTensors = NamedTensors::new();
const GPU: MemoryId = MemoryId(1);
/// Bytes of the state of a part of [`chain`]: 64 tokens of 4 numbers.
const STATE: u64 = 64 * 4 * 4;

fn us(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

fn part(gpu: Option<usize>, micros: u64) -> ChainPart {
    ChainPart { states: 1, ..ChainPart::new(gpu, Rc::new(move |_| us(micros))) }
}

/// `staged` parts with a state on a GPU, and one on the host that ends them, where scores are wanted.
fn chain(staged: usize, micros: u64) -> Chain {
    let end = ChainPart { states: 0, ..part(None, 0) };
    Chain {
        parts: (0..staged).map(|_| part(Some(0), micros)).chain([end]).collect(),
        states_on_host: true,
        ..Chain::default()
    }
}

/// A GPU that queues its runs. Copying a state takes `to` microseconds to it and `from` microseconds back.
fn backend(to: u64, from: u64) -> MockBackend {
    let backend = MockBackend::new();
    let cost =
        |micros: u64| LinkCost { latency: Duration::ZERO, bytes_per_ms: STATE as f64 * 1e3 / micros.max(1) as f64 };
    if to > 0 {
        backend.link(MemoryId::HOST, GPU, cost(to));
    }
    if from > 0 {
        backend.link(GPU, MemoryId::HOST, cost(from));
    }
    backend.queue(GPU);
    backend
}

fn load(chain: &Chain, backend: &MockBackend, cancel: Option<CancelHandle>) -> Engine<MockBackend> {
    let dir = tempfile::tempdir().unwrap();
    let plan = chain.set_up(dir.path(), backend).unwrap();
    let options = EngineOptions { cancel, sequences: Some(8), ..EngineOptions::default() };
    Engine::load(&plan, dir.path(), backend, options, &Silent).unwrap()
}

/// The time of a token behind another one.
fn token(chain: &Chain, backend: &MockBackend) -> Duration {
    let mut engine = load(chain, backend, None);
    let mut sequence = engine.new_sequence().unwrap();
    let mut step = || {
        let start = backend.clock().now();
        engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
        backend.clock().now() - start
    };
    step();
    step()
}

/// Beside states, only crossings of 16 bytes are copied here: each takes a 64th of a state's time.
fn crossing(micros: u64) -> Duration {
    us(micros) / 64
}

#[test]
fn a_token_takes_the_longer_of_computing_and_copying() {
    // The first state is copied before its run, each other state during the run before its own.
    assert_eq!(token(&chain(4, 500), &backend(300, 0)), us(300 + 4 * 500));
    assert_eq!(token(&chain(4, 300), &backend(500, 0)), us(4 * 500 + 300));
    // A copy back overlaps with nothing: its stage waits for it.
    assert_eq!(token(&chain(4, 500), &backend(300, 64)), us(300 + 4 * (500 + 64)) + crossing(64));
    // A single stage has nothing to overlap with, and no second set of buffers.
    assert_eq!(token(&chain(1, 500), &backend(300, 64)), us(300 + 500 + 64) + crossing(64));
}

#[test]
fn the_host_computes_while_the_state_of_the_next_stage_comes() {
    let end = ChainPart { states: 0, ..part(None, 0) };
    let parts = vec![part(None, 400), part(Some(0), 100), part(None, 400), part(Some(0), 100), end];
    let chain = Chain { parts, states_on_host: true, ..Chain::default() };
    // All copies of states overlap with runs; only crossings take time.
    assert_eq!(token(&chain, &backend(320, 0)), us(400 + 100 + 400 + 100) + 2 * crossing(320));
}

/// A stage on another device between two stages has no second set, and does not disturb the copy for the stage after it.
#[test]
fn a_stage_alone_on_its_device_does_not_disturb_copies_ahead() {
    let end = ChainPart { states: 0, ..part(None, 0) };
    let parts = vec![part(Some(0), 400), part(Some(1), 100), part(Some(0), 400), end];
    let chain = Chain { parts, states_on_host: true, ..Chain::default() };
    let (backend, crossings) = (backend(320, 0), crossing(320));
    assert_eq!(token(&chain, &backend), us(320 + 400 + 100 + 400) + crossings);
}

#[test]
fn without_room_for_a_second_set_states_are_copied_between_runs() {
    let fits = |room: u64| {
        let backend = backend(300, 0);
        backend.limit_device(GPU, room);
        (token(&chain(3, 500), &backend), backend.reserved())
    };
    let (crowded, reserved) = fits(STATE + 1000);
    assert_eq!(crowded, us(3 * (300 + 500)));
    let (roomy, more) = fits(2 * STATE + 1000);
    assert_eq!((roomy, more - reserved), (us(300 + 3 * 500), 0), "both ask for the second set");
}

#[test]
fn items_of_a_pass_take_turns_with_both_sets() {
    let backend = backend(300, 0);
    let mut engine = load(&chain(2, 500), &backend, None);
    let mut sequences: Vec<_> = (0..3).map(|_| engine.new_sequence().unwrap()).collect();
    let mut time = Duration::ZERO;
    for _ in 0..2 {
        let start = backend.clock().now();
        assert!(pass(&mut engine, &mut sequences, &[&[1], &[2], &[3]]).iter().all(Result::is_ok));
        time = backend.clock().now() - start;
    }
    assert_eq!(time, us(300 + 2 * 3 * 500));
}

/// Waits for copies count as time of copies, and copies that overlap with runs do not.
#[test]
fn only_waits_for_states_count_as_time_of_copies() {
    let backend = backend(300, 0);
    let mut engine = load(&chain(4, 500), &backend, None);
    let mut sequence = engine.new_sequence().unwrap();
    engine.record_timeline(true);
    engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
    let pass = engine.last_pass();
    assert_eq!(pass.copies.time, us(300));
    assert_eq!(pass.copied_bytes, 8 * STATE + 16);
    let spans = engine.timeline().spans;
    let copies = spans.iter().filter(|span| span.lane == "to gpu0" && span.name.starts_with("states of p"));
    assert_eq!(
        copies.map(|span| (span.start_us, span.duration_us)).collect::<Vec<_>>(),
        [(0.0, 300.0), (300.0, 300.0), (800.0, 300.0), (1300.0, 300.0)]
    );
}

fn pass(
    engine: &mut Engine<MockBackend>,
    sequences: &mut [Sequence<MockBackend>],
    tokens: &[&[u32]],
) -> Vec<Result<(), EngineError>> {
    let mut logits = vec![Logits::default(); sequences.len()];
    let items = sequences.iter_mut().zip(tokens).zip(&mut logits);
    let mut items: Vec<_> = items
        .map(|((sequence, tokens), logits)| WorkItem {
            sequence,
            input: StepInput::Tokens(tokens),
            rows: LogitRows::Last,
            extra: &NO_EXTRA,
            logits,
        })
        .collect();
    engine.pass(&mut items).unwrap()
}

/// A cancelled pass leaves no copy behind: the next one finds its buffers unused.
#[test]
fn after_a_cancelled_pass_other_sequences_go_on() {
    for stops_at in 1..11 {
        let (cancel, runs) = (CancelHandle::new(), Rc::new(Cell::new(0)));
        // While the host computes, the states of the stage behind it are being copied.
        let host = || ChainPart { states: 0, ..part(None, 0) };
        let parts = vec![part(Some(0), 0), host(), part(Some(0), 0), part(Some(0), 0), host()];
        let mut chain = Chain { parts, states_on_host: true, ..Chain::default() };
        for part in &mut chain.parts {
            let (cancel, runs) = (cancel.clone(), Rc::clone(&runs));
            part.takes = Rc::new(move |_| {
                runs.set(runs.get() + 1);
                if runs.get() == stops_at {
                    cancel.cancel();
                }
                us(500)
            });
        }
        let backend = backend(800, 100);
        let mut engine = load(&chain, &backend, Some(cancel.clone()));
        let [mut lost, mut kept] = [(); 2].map(|()| engine.new_sequence().unwrap());
        let outcomes = [3, 4].map(|token| engine.step(&mut lost, StepInput::Tokens(&[token]), LogitRows::Last));
        assert!(outcomes.iter().any(|outcome| matches!(outcome, Err(EngineError::Cancelled))), "{outcomes:?}");
        cancel.reset();
        let scores = [5, 6].map(|token| engine.step(&mut kept, StepInput::Tokens(&[token]), LogitRows::Last).unwrap());
        assert_eq!(scores.map(|logits| logits.data[0]).to_vec(), chain.scores(&[vec![5], vec![6]]), "run {stops_at}");
    }
}

#[derive(Clone, Debug)]
struct Case {
    /// Where each part computes, and whether it has a state.
    parts: Vec<(Option<usize>, bool)>,
    /// The tokens of each sequence in each pass.
    passes: Vec<Vec<u32>>,
    /// After how many runs one fails.
    fails_after: Option<u64>,
    times: (u64, u64, u64),
    queues: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let gpu = prop_oneof![Just(None), Just(Some(0)), Just(Some(0)), Just(Some(1))];
    (
        proptest::collection::vec((gpu, any::<bool>()), 1..7),
        proptest::collection::vec(proptest::collection::vec(0u32..7, 1..4), 1..5),
        proptest::option::of(0u64..60),
        (0u64..900, 1u64..900, 1u64..900),
        any::<bool>(),
    )
        .prop_map(|(parts, passes, fails_after, times, queues)| Case { parts, passes, fails_after, times, queues })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Sequences score as alone, also those that go on after a run of another has failed.
    #[test]
    fn every_sequence_scores_as_alone(case in case(), count in 1usize..4) {
        let (takes, to, from) = case.times;
        let parts = case.parts.iter().map(|(gpu, has_state)| ChainPart {
            states: usize::from(*has_state),
            ..part(*gpu, takes)
        });
        let chain = Chain { parts: parts.collect(), states_on_host: true, ..Chain::default() };
        let backend = MockBackend::new();
        for memory in [GPU, MemoryId(2)] {
            let cost = |micros: u64| LinkCost { latency: us(micros), bytes_per_ms: STATE as f64 };
            backend.link(MemoryId::HOST, memory, cost(to));
            backend.link(memory, MemoryId::HOST, cost(from));
            if case.queues {
                backend.queue(memory);
            }
        }
        let mut engine = load(&chain, &backend, None);
        if let Some(before) = case.fails_after {
            backend.fail_run(before);
        }
        let mut sequences: Vec<_> = (0..count).map(|_| engine.new_sequence().unwrap()).collect();
        let mut alive = vec![true; count];
        for (number, tokens) in case.passes.iter().enumerate() {
            let mut logits = vec![Logits::default(); count];
            let inputs: Vec<Vec<u32>> = (0..count as u32).map(|at| tokens.iter().map(|token| (token + at) % 7).collect()).collect();
            let items = sequences.iter_mut().zip(&inputs).zip(&mut logits).zip(&alive).filter(|(_, alive)| **alive);
            let mut items: Vec<_> = items.map(|(((sequence, tokens), logits), _)| WorkItem {
                sequence, input: StepInput::Tokens(tokens), rows: LogitRows::Last, extra: &NO_EXTRA, logits,
            }).collect();
            if items.is_empty() {
                break;
            }
            let outcomes = engine.pass(&mut items).unwrap();
            let mut outcomes = outcomes.into_iter();
            for at in (0..count).filter(|at| alive[*at]).collect::<Vec<_>>() {
                alive[at] = outcomes.next().unwrap().is_ok();
                if alive[at] {
                    let passes: Vec<Vec<u32>> = case.passes[..=number].iter()
                        .map(|tokens| tokens.iter().map(|token| (token + at as u32) % 7).collect()).collect();
                    prop_assert_eq!(logits[at].data[0], chain.scores(&passes)[number]);
                }
            }
        }
        prop_assert!(alive.iter().filter(|alive| !**alive).count() <= 1);
    }
}
