//! Passes on a clock that only the mock advances: what the engine does takes exactly as long as its parts.

use hpp_engine::mock::{Chain, ChainPart, LinkCost, MockBackend};
use hpp_engine::port::MemoryId;
use hpp_engine::{Engine, EngineOptions, LogitRows, Silent, StepInput};
use hpp_schema::{SpanKind, Timeline};
use std::rc::Rc;
use std::time::Duration;

fn us(micros: u64) -> Duration {
    Duration::from_micros(micros)
}

/// A part that takes `decode` for one token and `each` for every token of several.
fn part(gpu: Option<usize>, decode: u64, each: u64) -> ChainPart {
    let takes = Rc::new(move |tokens| us(if tokens == 1 { decode } else { each * tokens }));
    ChainPart::new(gpu, takes)
}

const GPU0: MemoryId = MemoryId(1);

/// Host, device, host: 64 bytes a token cross, at 64 bytes a millisecond after 100 us down and at twice that up.
fn backend() -> MockBackend {
    let backend = MockBackend::new();
    backend.link(MemoryId::HOST, GPU0, LinkCost { latency: us(100), bytes_per_ms: 64.0 });
    backend.link(GPU0, MemoryId::HOST, LinkCost { latency: us(50), bytes_per_ms: 128.0 });
    backend
}

fn chain(chunk: Option<u64>) -> Chain {
    let parts = vec![part(None, 500, 10), part(Some(0), 70, 2), part(None, 300, 5)];
    Chain { parts, width: 16, prefill_chunk: chunk, ..Chain::default() }
}

fn run(chunk: Option<u64>, prompt: &[u32], decoded: u32) -> (Engine<MockBackend>, MockBackend, Timeline) {
    run_chain(&chain(chunk), prompt, decoded)
}

fn run_chain(chain: &Chain, prompt: &[u32], decoded: u32) -> (Engine<MockBackend>, MockBackend, Timeline) {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let plan = chain.set_up(dir.path(), &backend).unwrap();
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    engine.record_timeline(true);
    engine.step(&mut sequence, StepInput::Tokens(prompt), LogitRows::Last).unwrap();
    for _ in 0..decoded {
        engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
    }
    let timeline = engine.timeline();
    (engine, backend, timeline)
}

#[test]
fn a_token_takes_the_sum_of_its_parts() {
    let (engine, backend, _) = run(None, &[1, 2, 3, 0], 10);
    let telemetry = engine.telemetry();
    // 4 tokens: 40 + 8 + 20 us of computing, 256 bytes each way.
    assert_eq!(telemetry.prefill.time, us(40 + 8 + 20) + us(100 + 4000) + us(50 + 2000));
    let token = us(500 + 70 + 300) + us(100 + 1000) + us(50 + 500);
    assert_eq!(telemetry.decode.time, token * 10);
    assert_eq!(telemetry.copies.time, us(6150) + us(1650) * 10);
    assert_eq!(backend.clock().now(), telemetry.prefill.time + telemetry.decode.time, "nothing else takes time");
    let stage = |at: usize| telemetry.stages[at].decode.time;
    assert_eq!([stage(0), stage(1), stage(2)], [us(5000), us(700), us(3000)]);
}

/// Two tensors cross and three states are copied to a device: each is a copy with the link's latency.
#[test]
fn every_tensor_is_a_copy_of_its_own() {
    let mut chain = chain(None);
    chain.parts[1].enters = 2;
    chain.parts[1].states = 3;
    for (on_host, visits) in [(false, us(0)), (true, us(3 * (100 + 64_000)) + us(3 * (50 + 32_000)))] {
        chain.states_on_host = on_host;
        let (engine, ..) = run_chain(&chain, &[1, 2], 1);
        let crossings = us(2 * (100 + 1000)) + us(50 + 500);
        assert_eq!(engine.telemetry().decode.time, us(500 + 70 + 300) + crossings + visits);
    }
}

/// A device without timing reports may go on computing after the call that began a run has returned. While a timeline is recorded, the wait for the
/// device before a copy counts as computing.
#[test]
fn what_goes_on_behind_a_call_is_computing_and_no_copy() {
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    backend.queue_untimed(GPU0);
    let plan = chain(None).set_up(dir.path(), &backend).unwrap();
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    for recording in [false, true] {
        engine.record_timeline(recording);
        engine.step(&mut sequence, StepInput::Tokens(&[1, 2]), LogitRows::Last).unwrap();
        engine.step(&mut sequence, StepInput::Tokens(&[3]), LogitRows::Last).unwrap();
        let (pass, copies) = (engine.last_pass(), us(100 + 1000) + us(50 + 500));
        let gpu = if recording { us(70) } else { us(0) };
        assert_eq!(pass.compute, [("cpu".to_owned(), us(500 + 300)), ("gpu0".to_owned(), gpu)]);
        assert_eq!(pass.copies.time, copies + us(70) - gpu);
    }
    let spans = engine.timeline().spans;
    let last = spans.iter().filter(|span| span.lane == "gpu0" && span.kind == SpanKind::Compute && span.pass == 1);
    assert_eq!(last.map(|span| span.duration_us).sum::<f64>(), 70.0);
    assert_eq!(engine.telemetry().stages[1].decode.count, 2);
}

#[test]
fn chunks_are_passes_of_their_own() {
    let (engine, ..) = run(Some(3), &[1, 2, 3, 0, 1], 0);
    let telemetry = engine.telemetry();
    assert_eq!(telemetry.prefill.count, 2);
    assert_eq!(telemetry.prefill.time, us(5 * 17) + us(2 * 150) + us(5 * 1500));
}

#[test]
fn a_timeline_has_every_run_copy_and_pass_in_order() {
    let (_, _, timeline) = run(None, &[1, 2, 3, 0], 1);
    let decode: Vec<_> = timeline.spans.iter().filter(|span| span.pass == 1).collect();
    let seen: Vec<_> = decode.iter().map(|s| (s.lane.as_str(), s.name.as_str(), s.kind, s.bytes)).collect();
    assert_eq!(
        seen,
        [
            ("passes", "decode", SpanKind::Pass, None),
            ("cpu", "p0", SpanKind::Compute, None),
            ("to gpu0", "x0_0", SpanKind::Transfer, Some(64)),
            ("gpu0", "p1", SpanKind::Compute, None),
            ("from gpu0", "x1_0", SpanKind::Transfer, Some(64)),
            ("cpu", "p2", SpanKind::Compute, None),
        ]
    );
    let begun = 6218.0;
    let starts: Vec<f64> = decode.iter().map(|span| span.start_us - begun).collect();
    for (start, want) in starts.iter().zip([0.0, 0.0, 500.0, 1600.0, 1670.0, 2220.0]) {
        assert!((start - want).abs() < 1e-6, "{starts:?}");
    }
    assert!((decode[0].duration_us - 2520.0).abs() < 1e-6);
    assert_eq!(timeline.spans[0].name, "prefill of 4");
}

#[test]
fn nothing_is_recorded_unless_asked_and_recording_starts_anew() {
    let (mut engine, ..) = run(None, &[1, 2], 3);
    assert_eq!(engine.timeline().spans.len(), 24);
    engine.record_timeline(true);
    assert_eq!(engine.timeline(), Timeline::default());
    engine.record_timeline(false);
    let mut sequence = engine.new_sequence().unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&[1, 2]), LogitRows::Last).unwrap();
    assert_eq!(engine.timeline(), Timeline::default());
}

/// A state on the host is copied to a device as far as it is filled, in steps of 64 tokens, and keeps its contents when it is laid out for more
/// tokens.
#[test]
fn state_on_the_host_is_copied_as_far_as_it_is_filled() {
    let mut chain = Chain { context: 4096, states_on_host: true, ..chain(None) };
    chain.parts[1].states = 2;
    let mut passes: Vec<Vec<u32>> = vec![vec![1; 9]];
    passes.extend((0..200).map(|at| vec![at % 7]));
    let (dir, backend) = (tempfile::tempdir().unwrap(), backend());
    let plan = chain.set_up(dir.path(), &backend).unwrap();
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let token = 16 * 4;
    for (pass, score) in passes.iter().zip(chain.scores(&passes)) {
        let logits = engine.step(&mut sequence, StepInput::Tokens(pass), LogitRows::Last).unwrap();
        assert_eq!(logits.last()[0], score, "after {} tokens", sequence.len());
        let crossings = 2 * token * pass.len() as u64;
        let filled = sequence.len().next_multiple_of(64);
        assert_eq!(engine.last_pass().copied_bytes, crossings + 2 * 2 * token * filled);
    }
    assert_eq!(engine.truncate(&mut sequence, 9).unwrap(), Some(9));
    let again = engine.step(&mut sequence, StepInput::Tokens(&passes[1]), LogitRows::Last).unwrap();
    assert_eq!(again.last()[0], chain.scores(&passes[..2])[1]);
}
