//! Passes of several sequences over several devices, on a clock that only the mock advances: devices compute for different sequences at
//! the same time, and every sequence gets the scores that it gets alone.

use hpp_engine::mock::{Chain, ChainPart, MockBackend};
use hpp_engine::port::MemoryId;
use hpp_engine::{Engine, EngineOptions, LogitRows, Logits, NamedTensors, Silent, StepInput, WorkItem};
use hpp_schema::SpanKind;
use std::rc::Rc;
use std::time::Duration;

static NO_EXTRA: NamedTensors = NamedTensors::new();

fn us(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// A part on the host (`None`) or on a GPU that takes `micros` for each run, with a state.
fn part(gpu: Option<usize>, micros: u64) -> ChainPart {
    ChainPart { states: 1, ..ChainPart::new(gpu, Rc::new(move |_| us(micros))) }
}

/// An engine whose GPUs queue their runs.
fn engine(chain: &Chain) -> (Engine<MockBackend>, MockBackend) {
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let gpus = chain.parts.iter().filter_map(|part| part.gpu).max().map_or(0, |gpu| gpu + 1);
    (0..gpus).for_each(|gpu| backend.queue(MemoryId(gpu as u32 + 1)));
    let plan = chain.set_up(dir.path(), &backend).unwrap();
    let options = EngineOptions { sequences: Some(8), ..EngineOptions::default() };
    (Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap(), backend)
}

/// A pass of one token for each of `count` new sequences, twice. Returns the time of the second pass and the last scores.
fn passes(engine: &mut Engine<MockBackend>, backend: &MockBackend, count: usize) -> (Duration, Vec<Vec<f32>>) {
    let mut sequences: Vec<_> = (0..count).map(|_| engine.new_sequence().unwrap()).collect();
    let mut logits = vec![Logits::default(); count];
    let mut time = Duration::ZERO;
    for pass in 0..2 {
        let tokens: Vec<[u32; 1]> = (0..count as u32).map(|sequence| [pass + sequence % 5]).collect();
        let mut items = Vec::new();
        for ((sequence, tokens), logits) in sequences.iter_mut().zip(&tokens).zip(&mut logits) {
            let input = StepInput::Tokens(tokens);
            items.push(WorkItem { sequence, input, rows: LogitRows::Last, extra: &NO_EXTRA, logits });
        }
        let started = backend.clock().now();
        let outcomes = engine.pass(&mut items).unwrap();
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        time = backend.clock().now() - started;
    }
    (time, logits.into_iter().map(|logits| logits.data).collect())
}

fn chain(parts: Vec<ChainPart>) -> Chain {
    Chain { parts, ..Chain::default() }
}

#[test]
fn host_and_device_compute_for_different_sequences_at_the_same_time() {
    let (host, gpu) = (|micros| part(None, micros), |micros| part(Some(0), micros));
    // Scores are wanted in host memory, so that a GPU at the end would not return before it is done.
    let end = || part(None, 0);
    for (parts, expected) in [
        // The device begins: the first sequence waits for it, then the host computes without a break, and the reverse.
        (vec![gpu(300), host(400)], 300 + 4 * 400),
        (vec![gpu(400), host(300)], 4 * 400 + 300),
        (vec![host(400), gpu(300), end()], 4 * 400 + 300),
        (vec![host(300), gpu(400), end()], 300 + 4 * 400),
        // Two stages of one device, each of which overlaps with the host: the host is the bottleneck.
        (vec![gpu(100), host(400), gpu(100), end()], 100 + 4 * 400 + 100),
        // Neighbours on one device are not a pipeline: the first is done with all sequences before the second begins.
        (vec![host(100), host(100), gpu(200), end()], 4 * 100 + 100 + 4 * 200),
    ] {
        let places: Vec<_> = parts.iter().map(|part| part.gpu).collect();
        let (mut engine, backend) = engine(&chain(parts));
        assert_eq!(passes(&mut engine, &backend, 4).0, us(expected), "{places:?}");
    }
}

#[test]
fn a_pass_of_one_sequence_takes_the_sum_of_its_stages() {
    let (mut engine, backend) = engine(&chain(vec![part(Some(0), 300), part(None, 400), part(Some(0), 100)]));
    assert_eq!(passes(&mut engine, &backend, 1).0, us(300 + 400 + 100));
}

#[test]
fn sequences_in_a_pipeline_get_the_scores_that_they_get_alone() {
    let parts = || vec![part(Some(0), 300), part(None, 400), part(Some(1), 200), part(None, 100), part(Some(0), 50)];
    let (mut engine, backend) = engine(&chain(parts()));
    let (_, scores) = passes(&mut engine, &backend, 6);
    for (sequence, scores) in scores.iter().enumerate() {
        let tokens: Vec<Vec<u32>> = (0..2).map(|pass| vec![pass + sequence as u32 % 5]).collect();
        assert_eq!(scores[0], chain(parts()).scores(&tokens)[1], "sequence {sequence}");
    }
}

#[test]
fn a_timeline_shows_both_devices_computing() {
    let (mut engine, backend) = engine(&chain(vec![part(Some(0), 300), part(None, 400)]));
    engine.record_timeline(true);
    passes(&mut engine, &backend, 3);
    let spans = engine.timeline().spans;
    let lane = |name: &str| {
        let computes =
            spans.iter().filter(|span| span.lane == name && span.kind == SpanKind::Compute && span.pass == 1);
        computes.map(|span| (span.start_us, span.start_us + span.duration_us)).collect::<Vec<_>>()
    };
    let (gpu, cpu) = (lane("gpu0"), lane("cpu"));
    assert_eq!((gpu.len(), cpu.len()), (3, 3));
    let overlap = gpu.iter().flat_map(|a| cpu.iter().map(|b| (a.1.min(b.1) - a.0.max(b.0)).max(0.0))).sum::<f64>();
    assert_eq!(overlap, 600.0, "the second and third sequence on the GPU while the host computes: {gpu:?} {cpu:?}");
}
