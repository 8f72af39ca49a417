//! Passes of several sequences over several devices, on a clock that only the mock advances: devices compute for different sequences at
//! the same time, and every sequence gets the scores that it gets alone.

use hpp_engine::mock::{Chain, ChainPart, ChainVariant, MockBackend};
use hpp_engine::port::MemoryId;
use hpp_engine::{
    CancelHandle, Engine, EngineError, EngineOptions, LogitRows, Logits, NamedTensors, Sequence, Silent, StepInput,
    WorkItem,
};
use hpp_schema::{Span, SpanKind};
use std::cell::RefCell;
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
    engine_on(chain, MockBackend::queue)
}

/// An engine whose GPUs queue their runs and do not report when they ran.
fn untimed_engine(chain: &Chain) -> (Engine<MockBackend>, MockBackend) {
    engine_on(chain, MockBackend::queue_untimed)
}

fn engine_on(chain: &Chain, queue: fn(&MockBackend, MemoryId)) -> (Engine<MockBackend>, MockBackend) {
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let gpus = chain.parts.iter().flat_map(|part| [part.gpu, part.prefill.as_ref().and_then(|prefill| prefill.gpu)]);
    let gpus = gpus.flatten().max().map_or(0, |gpu| gpu + 1);
    (0..gpus).for_each(|gpu| queue(&backend, MemoryId(gpu as u32 + 1)));
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

/// This includes a device that reports no timing: the engine lets the backend watch it while the host computes.
#[test]
fn a_timeline_shows_both_devices_computing() {
    for is_timed in [true, false] {
        let (mut engine, backend) = match is_timed {
            true => engine(&chain(vec![part(Some(0), 300), part(None, 400)])),
            false => untimed_engine(&chain(vec![part(Some(0), 300), part(None, 400)])),
        };
        engine.record_timeline(true);
        let (time, _) = passes(&mut engine, &backend, 3);
        assert_eq!(time, us(300 + 3 * 400), "recording takes no time");
        let spans = engine.timeline().spans;
        let lane = |name: &str| {
            let is_run = |span: &&Span| span.kind == SpanKind::Compute && span.pass == 1 && span.duration_us > 0.0;
            let runs = spans.iter().filter(|span| span.lane == name).filter(is_run);
            runs.map(|span| (span.start_us, span.start_us + span.duration_us, span.item)).collect::<Vec<_>>()
        };
        let (gpu, cpu) = (lane("gpu0"), lane("cpu"));
        assert_eq!((gpu.len(), cpu.len()), (3, 3), "{gpu:?} {cpu:?}");
        let items = |runs: &[(f64, f64, Option<u64>)]| runs.iter().map(|run| run.2).collect::<Vec<_>>();
        assert_eq!((items(&gpu), items(&cpu)), (vec![Some(0), Some(1), Some(2)], vec![Some(0), Some(1), Some(2)]));
        let mut overlaps = Vec::new();
        for (on_gpu, on_host) in gpu.iter().flat_map(|gpu| cpu.iter().map(move |cpu| (gpu, cpu))) {
            let both = on_gpu.1.min(on_host.1) - on_gpu.0.max(on_host.0);
            if both > 0.0 {
                overlaps.push((on_gpu.2, on_host.2, both));
            }
        }
        let expected = [(Some(1), Some(0), 300.0), (Some(2), Some(1), 300.0)];
        assert_eq!(overlaps, expected, "the second and third sequence on the GPU while the host computes");
    }
}

/// A pass in which each sequence gets these tokens: a prompt, or its next token. Returns the scores.
fn mixed_pass(
    engine: &mut Engine<MockBackend>,
    sequences: &mut [Sequence<MockBackend>],
    tokens: &[Vec<u32>],
) -> Vec<Vec<f32>> {
    let outcomes = try_mixed_pass(engine, sequences, tokens).unwrap();
    outcomes.into_iter().map(Result::unwrap).collect()
}

/// The scores of each sequence, or why it failed alone.
fn try_mixed_pass(
    engine: &mut Engine<MockBackend>,
    sequences: &mut [Sequence<MockBackend>],
    tokens: &[Vec<u32>],
) -> Result<Vec<Result<Vec<f32>, EngineError>>, EngineError> {
    let mut logits = vec![Logits::default(); sequences.len()];
    let mut items = Vec::new();
    for ((sequence, tokens), logits) in sequences.iter_mut().zip(tokens).zip(&mut logits) {
        let input = StepInput::Tokens(tokens);
        items.push(WorkItem { sequence, input, rows: LogitRows::Last, extra: &NO_EXTRA, logits });
    }
    let outcomes = engine.pass(&mut items)?;
    let scores = outcomes.into_iter().zip(logits).map(|(outcome, logits)| outcome.map(|()| logits.data));
    Ok(scores.collect())
}

/// The tokens of each sequence in two passes: in the second, two sequences begin with a prompt, and the others go on.
fn mixed_tokens() -> [Vec<Vec<u32>>; 2] {
    [vec![vec![1, 2], vec![3]], vec![vec![4], vec![2], vec![0, 1, 2, 3], vec![3, 1, 2, 4]]]
}

/// Runs [`mixed_tokens`] on new sequences; returns the time of the second pass and its scores.
fn run_mixed(engine: &mut Engine<MockBackend>, backend: &MockBackend) -> (Duration, Vec<Vec<f32>>) {
    let [first, second] = mixed_tokens();
    let mut sequences: Vec<_> = second.iter().map(|_| engine.new_sequence().unwrap()).collect();
    mixed_pass(engine, &mut sequences[..first.len()], &first);
    let started = backend.clock().now();
    let scores = mixed_pass(engine, &mut sequences, &second);
    (backend.clock().now() - started, scores)
}

/// A part that takes `micros` for each token, with a state.
fn part_per_token(gpu: Option<usize>, micros: u64) -> ChainPart {
    ChainPart { states: 1, ..ChainPart::new(gpu, Rc::new(move |tokens| us(micros * tokens))) }
}

/// The same part, whose prompts compute on the host if its tokens compute on a GPU, and the reverse.
fn with_other_device_for_prompts(part: ChainPart, gpu: Option<usize>, micros: u64) -> ChainPart {
    let takes = Rc::new(move |tokens| us(micros * tokens));
    ChainPart { prefill: Some(ChainVariant { gpu, takes, inputs: None, other: true }), ..part }
}

#[test]
fn prompts_and_next_tokens_share_a_pipeline() {
    let chain = chain(vec![part_per_token(Some(0), 100), part_per_token(None, 80)]);
    let (mut engine, backend) = engine(&chain);
    // Items of 4, 4, 1 and 1 tokens, the longest first. In each turn the host computes the item that the GPU had in the turn before.
    let (on_gpu, on_host) = ([400, 400, 100, 100, 0], [0, 320, 320, 80, 80]);
    let turns = on_gpu.iter().zip(on_host).map(|(gpu, host)| host.max(*gpu));
    assert_eq!(run_mixed(&mut engine, &backend).0, us(turns.sum()));
}

#[test]
fn prompts_and_next_tokens_in_a_pipeline_get_the_scores_that_they_get_alone() {
    let alike = || vec![part(Some(0), 300), part(None, 400), part(Some(1), 200), part(None, 100)];
    // The second part computes prompts elsewhere, so that pipelines end before it and begin after it.
    let different = || {
        let mut parts = alike();
        parts[1] = with_other_device_for_prompts(part(None, 400), Some(1), 50);
        parts
    };
    let [first, second] = mixed_tokens();
    for parts in [alike(), different()] {
        let (mut engine, backend) = engine(&chain(parts));
        let scores = run_mixed(&mut engine, &backend).1;
        for (sequence, scores) in scores.iter().enumerate() {
            let passes: Vec<Vec<u32>> = first.get(sequence).into_iter().chain([&second[sequence]]).cloned().collect();
            assert_eq!(scores[0], *chain(alike()).scores(&passes).last().unwrap(), "sequence {sequence}");
        }
    }
}

/// Wherever in the pipeline a run fails, its sequence fails alone; the others get their scores, and go on.
#[test]
fn a_run_that_fails_in_a_pipeline_ends_one_sequence() {
    let chain = chain(vec![part(Some(0), 300), part(None, 400), part(Some(1), 200), part(None, 100)]);
    let [first, second] = mixed_tokens();
    for before in 0..16 {
        let (mut engine, backend) = engine(&chain);
        let mut sequences: Vec<_> = second.iter().map(|_| engine.new_sequence().unwrap()).collect();
        mixed_pass(&mut engine, &mut sequences[..first.len()], &first);
        backend.fail_run(before);
        let outcomes = try_mixed_pass(&mut engine, &mut sequences, &second).unwrap();
        assert_eq!(outcomes.iter().filter(|outcome| outcome.is_err()).count(), 1, "{before}: {outcomes:?}");
        let third = vec![vec![2]; second.len()];
        let after = try_mixed_pass(&mut engine, &mut sequences, &third).unwrap();
        for (at, (outcome, after)) in outcomes.iter().zip(&after).enumerate() {
            let passes = first.get(at).into_iter().chain([&second[at], &third[at]]).cloned().collect::<Vec<_>>();
            let [.., expected, then] = chain.scores(&passes)[..] else { panic!("two passes") };
            match outcome {
                Ok(scores) => assert_eq!((scores[0], after.as_ref().unwrap()[0]), (expected, then), "{before} {at}"),
                Err(_) => assert!(matches!(after, Err(EngineError::Interrupted)), "{before} {at}: {after:?}"),
            }
        }
    }
}

#[test]
fn a_pass_cancelled_in_a_pipeline_ends_its_sequences_and_the_next_pass_is_right() {
    let cancel: Rc<RefCell<Option<CancelHandle>>> = Rc::default();
    let requested = Rc::clone(&cancel);
    let mut parts = vec![part(Some(0), 300), part(None, 400)];
    parts[1].takes = Rc::new(move |_| {
        if let Some(cancel) = requested.take() {
            cancel.cancel();
        }
        us(400)
    });
    let chain = chain(parts);
    let (mut engine, backend) = engine(&chain);
    let [_, second] = mixed_tokens();
    let mut sequences: Vec<_> = second.iter().map(|_| engine.new_sequence().unwrap()).collect();
    *cancel.borrow_mut() = Some(engine.cancel_handle());
    let started = backend.clock().now();
    let outcome = try_mixed_pass(&mut engine, &mut sequences, &second);
    assert!(matches!(outcome, Err(EngineError::Cancelled)), "{outcome:?}");
    assert_eq!(backend.clock().now() - started, us(300 + 400), "it ends after the host's first run");
    engine.cancel_handle().reset();
    let outcome = try_mixed_pass(&mut engine, &mut sequences, &second).unwrap();
    assert!(outcome.iter().all(|outcome| matches!(outcome, Err(EngineError::Interrupted))), "{outcome:?}");
    let mut sequences: Vec<_> = second.iter().map(|_| engine.new_sequence().unwrap()).collect();
    for (scores, tokens) in mixed_pass(&mut engine, &mut sequences, &second).iter().zip(second) {
        assert_eq!(scores[0], chain.scores(&[tokens])[0]);
    }
}
