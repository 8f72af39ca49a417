//! Weights in slots: tokens do not depend on where weights are or what moves between passes, and on a clock that only the mock advances, each copy
//! begins as soon as it may and no sooner.

use hpp_engine::mock::{Chain, ChainInputs, ChainPart, ChainVariant, LinkCost, MockBackend};
use hpp_engine::port::MemoryId;
use hpp_engine::{
    Engine, EngineError, EngineOptions, Fallback, LogitRows, Logits, NamedTensors, Reporter, Silent, StepInput,
    WeightReads, WorkItem,
};
use hpp_schema::{Residency, Span, SpanKind};
use proptest::prelude::*;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::Duration;

/// Where a part computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Host,
    /// On the GPU, with weights that are constants.
    Constants,
    /// On the GPU, in a slot of its own.
    Slot,
    /// On the GPU, through the ring.
    Ring,
}

static NO_EXTRA: NamedTensors = NamedTensors::new();

/// How long each part computes, microseconds.
const COMPUTE: u64 = 1000;
/// Numbers in each of the three weights of a part, and the bytes of all of them.
const WEIGHTS: [u64; 3] = [2, 8, 4];
const BYTES: u64 = 14 * 4;

fn takes() -> Rc<dyn Fn(u64) -> Duration> {
    Rc::new(|_| Duration::from_micros(COMPUTE))
}

/// The variant of a part; the first and the last have other inputs and outputs than those between, and so classes of their own.
fn variant(at: At, number: usize, of: usize) -> ChainVariant {
    let class = if number == 0 {
        0
    } else if number + 1 == of {
        2
    } else {
        1
    };
    let inputs = match at {
        At::Host | At::Constants => None,
        At::Slot | At::Ring => Some(ChainInputs { streamed: at == At::Ring, class }),
    };
    ChainVariant { gpu: (at != At::Host).then_some(0), takes: takes(), inputs, other: false }
}

/// Parts with one state each. `places`: where each part decodes and where it computes prompts.
fn chain(places: &[(At, At)], slots: u32, chunk: Option<u64>) -> Chain {
    let part = |(number, (decode, prefill)): (usize, &(At, At))| {
        let ChainVariant { gpu, takes, inputs, .. } = variant(*decode, number, places.len());
        let prefill =
            (prefill != decode).then(|| ChainVariant { other: true, ..variant(*prefill, number, places.len()) });
        ChainPart { gpu, takes, inputs, prefill, enters: 1, states: 1 }
    };
    let parts = places.iter().enumerate().map(part).collect();
    Chain { parts, weights: WEIGHTS.to_vec(), slots, prefill_chunk: chunk, ..Chain::default() }
}

fn backend(us_per_part: u64) -> MockBackend {
    let backend = MockBackend::new();
    let cost = LinkCost { latency: Duration::ZERO, bytes_per_ms: BYTES as f64 * 1e3 / us_per_part.max(1) as f64 };
    backend.link(MemoryId::HOST, MemoryId(1), cost);
    backend
}

/// Like [`backend`], but with a device that computes while the engine goes on.
fn queueing(us_per_part: u64, queues: bool) -> MockBackend {
    let backend = backend(us_per_part);
    if queues {
        backend.queue(MemoryId(1));
    }
    backend
}

fn load(
    chain: &Chain,
    backend: &MockBackend,
    options: EngineOptions,
    reporter: &dyn Reporter,
) -> Result<Engine<MockBackend>, EngineError> {
    let dir = tempfile::tempdir().unwrap();
    let plan = chain.set_up(dir.path(), backend).unwrap();
    Engine::load(&plan, dir.path(), backend, options, reporter)
}

/// Scores after a prompt and after each token behind it.
fn scores(
    engine: &mut Engine<MockBackend>,
    prompt: &[u32],
    more: &[u32],
    mut between: impl FnMut(&mut Engine<MockBackend>),
) -> Vec<f32> {
    let mut sequence = engine.new_sequence().unwrap();
    let mut step = |engine: &mut Engine<MockBackend>, tokens: &[u32]| {
        engine.step(&mut sequence, StepInput::Tokens(tokens), LogitRows::Last).unwrap().data[0]
    };
    let mut scores = vec![step(engine, prompt)];
    for token in more {
        between(engine);
        scores.push(step(engine, &[*token]));
    }
    scores
}

/// The passes a prompt and more tokens make.
fn passes(prompt: &[u32], chunk: Option<u64>, more: &[u32]) -> Vec<Vec<u32>> {
    let chunks = prompt.chunks(chunk.unwrap_or(64) as usize).map(<[u32]>::to_vec);
    chunks.chain(more.iter().map(|token| vec![*token])).collect()
}

fn expected(chain: &Chain, prompt: &[u32], chunk: Option<u64>, more: &[u32]) -> Vec<f32> {
    let all = chain.scores(&passes(prompt, chunk, more));
    all[all.len() - more.len() - 1..].to_vec()
}

fn place() -> impl Strategy<Value = At> {
    prop_oneof![Just(At::Host), Just(At::Constants), Just(At::Slot), Just(At::Ring), Just(At::Ring)]
}

/// Where a part decodes and where it computes prompts: a part with two variants is on the GPU in only one of them.
fn both() -> impl Strategy<Value = (At, At)> {
    (place(), place()).prop_map(|(decode, prefill)| {
        let differs = (decode == At::Host) != (prefill == At::Host);
        (decode, if differs { prefill } else { decode })
    })
}

/// A sequence of a pass of several: the pass in which it starts, its prompt, and how many tokens follow.
#[derive(Clone, Debug)]
struct Text {
    starts: usize,
    prompt: Vec<u32>,
    more: Vec<u32>,
}

fn texts() -> impl Strategy<Value = Vec<Text>> {
    let tokens = |count| proptest::collection::vec(1u32..16, count);
    let text = (0usize..4, tokens(1..3), tokens(0..5));
    proptest::collection::vec(text.prop_map(|(starts, prompt, more)| Text { starts, prompt, more }), 1..7)
}

/// The scores of each text, all of them decoded in common passes.
fn scores_together(engine: &mut Engine<MockBackend>, texts: &[Text]) -> Vec<Vec<f32>> {
    let mut sequences: Vec<_> = texts.iter().map(|_| engine.new_sequence().unwrap()).collect();
    let mut scores = vec![Vec::new(); texts.len()];
    let passes = texts.iter().map(|text| text.starts + 1 + text.more.len()).max().unwrap_or(0);
    for pass in 0..passes {
        let mut logits: Vec<Logits> = texts.iter().map(|_| Logits::default()).collect();
        let mut items = Vec::new();
        let mut owners = Vec::new();
        let buffers = sequences.iter_mut().zip(&mut logits).enumerate();
        for (owner, (sequence, logits)) in buffers {
            let text = &texts[owner];
            let tokens = match pass.checked_sub(text.starts) {
                Some(0) => &text.prompt[..],
                Some(at) if at <= text.more.len() => &text.more[at - 1..at],
                _ => continue,
            };
            let input = StepInput::Tokens(tokens);
            items.push(WorkItem { sequence, input, rows: LogitRows::Last, extra: &NO_EXTRA, logits });
            owners.push(owner);
        }
        let outcomes = engine.pass(&mut items).unwrap();
        assert!(outcomes.iter().all(Result::is_ok), "{outcomes:?}");
        owners.into_iter().for_each(|owner| scores[owner].push(logits[owner].data[0]));
    }
    scores
}

proptest! {
    #[test]
    fn items_of_one_pass_score_as_alone(
        places in proptest::collection::vec(both(), 2..7),
        slots in 1u32..4,
        texts in texts(),
        states_on_host in any::<bool>(),
        queues in any::<bool>(),
    ) {
        let chain = Chain { states_on_host, ..chain(&places, slots, None) };
        let mut engine = load(&chain, &queueing(700, queues), EngineOptions::default(), &Silent).unwrap();
        let alone: Vec<Vec<f32>> = texts.iter().map(|text| expected(&chain, &text.prompt, None, &text.more)).collect();
        prop_assert_eq!(scores_together(&mut engine, &texts), alone);
    }
}

#[test]
fn weights_are_copied_once_for_all_items_of_a_pass() {
    let chain = chain(&[(At::Ring, At::Ring); 4], 2, None);
    let copied = |count: usize| {
        let mut engine = load(&chain, &backend(100), EngineOptions::default(), &Silent).unwrap();
        let text = Text { starts: 0, prompt: vec![1, 2], more: vec![3, 4, 5] };
        scores_together(&mut engine, &vec![text; count]);
        engine.telemetry().uploaded_bytes
    };
    assert_eq!(copied(8), copied(1));
}

#[test]
fn an_item_that_fails_leaves_the_others_alone() {
    let chain = chain(&[(At::Host, At::Host), (At::Ring, At::Ring)], 1, None);
    let mut engine = load(&chain, &backend(100), EngineOptions::default(), &Silent).unwrap();
    let [mut first, mut second, mut third] = [(); 3].map(|()| engine.new_sequence().unwrap());
    let [mut a, mut b, mut c] = [(); 3].map(|()| Logits::default());
    let too_long = vec![1; 65];
    let item = |sequence, tokens, logits| WorkItem {
        sequence,
        input: StepInput::Tokens(tokens),
        rows: LogitRows::Last,
        extra: &NO_EXTRA,
        logits,
    };
    let mut items =
        [item(&mut first, &[3], &mut a), item(&mut second, &too_long, &mut b), item(&mut third, &[4], &mut c)];
    let outcomes = engine.pass(&mut items).unwrap();
    assert!(matches!(outcomes[..], [Ok(()), Err(EngineError::ContextExceeded { .. }), Ok(())]), "{outcomes:?}");
    assert_eq!([a.data[0], c.data[0]], [3, 4].map(|token| chain.scores(&[vec![token]])[0]));
    assert_eq!((first.len(), second.len(), third.len()), (1, 0, 1));
    // The refused item changed nothing: its sequence can be used.
    engine.step(&mut second, StepInput::Tokens(&[5]), LogitRows::Last).unwrap();
}

proptest! {
    #[test]
    fn any_placement_gives_the_same_scores(
        places in proptest::collection::vec(both(), 2..9),
        slots in 1u32..5,
        chunk in prop_oneof![Just(None), Just(Some(2))],
        ahead in any::<bool>(),
        us in 1u64..5000,
        queues in any::<bool>(),
    ) {
        let chain = chain(&places, slots, chunk);
        let weights = if ahead { WeightReads::Prefetch } else { WeightReads::OnDemand };
        let options = EngineOptions { weights, poison_slots: true, ..Default::default() };
        let mut engine = load(&chain, &queueing(us, queues), options, &Silent).unwrap();
        let (prompt, more) = ([3, 1, 4, 1, 5], [9, 2, 6, 5]);
        let found = scores(&mut engine, &prompt, &more, |_| ());
        prop_assert_eq!(found, expected(&chain, &prompt, chunk, &more));
        // A second text over the same slots.
        let found = scores(&mut engine, &more, &prompt, |_| ());
        prop_assert_eq!(found, expected(&chain, &more, chunk, &prompt));
        let streamed = places.iter().filter(|(decode, _)| *decode == At::Ring).count() as u64;
        let telemetry = engine.telemetry();
        prop_assert!(telemetry.slot_hits + telemetry.slot_misses >= streamed * 9);
        prop_assert!(ahead || telemetry.slot_hits == 0);
    }

    #[test]
    fn moving_weights_between_tokens_changes_nothing(
        places in proptest::collection::vec(prop_oneof![Just(At::Slot), Just(At::Ring)], 2..7),
        moves in proptest::collection::vec((0usize..7, any::<bool>()), 8),
        slots in 1u32..4,
        queues in any::<bool>(),
    ) {
        let mut places: Vec<(At, At)> = places.into_iter().map(|place| (place, place)).collect();
        places.push((At::Ring, At::Ring));
        let chain = chain(&places, slots, None);
        let options = EngineOptions { poison_slots: true, ..Default::default() };
        let mut engine = load(&chain, &queueing(700, queues), options, &Silent).unwrap();
        let (prompt, more) = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5]);
        let mut moves = moves.into_iter();
        let found = scores(&mut engine, &prompt, &more, |engine| {
            let (part, stays) = moves.next().unwrap();
            let residency = if stays { Residency::Resident } else { Residency::Streamed };
            engine.set_residency(&format!("p{}", part % places.len()), residency).unwrap();
        });
        prop_assert_eq!(found, expected(&chain, &prompt, None, &more));
    }

    /// Where prompts stream and tokens compute on the host, single parts may decode on the device too, and go back.
    #[test]
    fn computing_elsewhere_between_tokens_changes_nothing(
        count in 2usize..6,
        moves in proptest::collection::vec((0usize..6, any::<bool>()), 8),
        queues in any::<bool>(),
    ) {
        let chain = chain(&vec![(At::Host, At::Ring); count], 2, None);
        let mut engine = load(&chain, &queueing(700, queues), EngineOptions::default(), &Silent).unwrap();
        let (prompt, more) = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3, 5]);
        let mut moves = moves.into_iter();
        let found = scores(&mut engine, &prompt, &more, |engine| {
            let (part, on_gpu) = moves.next().unwrap();
            engine.decode_on(&format!("p{}", part % count), if on_gpu { "gpu0" } else { "cpu" }).unwrap();
        });
        prop_assert_eq!(found, expected(&chain, &prompt, None, &more));
    }

    /// Copies begin as soon as the one before is done and a slot is free, and runs as soon as their weights are there.
    #[test]
    fn copies_begin_when_they_may(
        places in proptest::collection::vec(prop_oneof![Just(At::Ring), Just(At::Constants)], 2..8),
        slots in 1u32..5,
        us in 1u64..3000,
        queues in any::<bool>(),
    ) {
        let mut places: Vec<(At, At)> = places.into_iter().map(|place| (place, place)).collect();
        places[0] = (At::Ring, At::Ring);
        let backend = queueing(us, queues);
        let mut engine = load(&chain(&places, slots, None), &backend, EngineOptions::default(), &Silent).unwrap();
        engine.record_timeline(true);
        scores(&mut engine, &[3, 1, 4], &[1, 5, 9, 2, 6], |_| ());
        let spans = engine.timeline().spans;
        let copies: Vec<&Span> = spans.iter().filter(|span| span.lane == "to gpu0" && span.kind == SpanKind::Transfer && span.bytes == Some(BYTES)).collect();
        let ring = |span: &&Span| span.kind == SpanKind::Compute && places[span.name[1..].parse::<usize>().unwrap()].0 == At::Ring;
        let runs: Vec<&Span> = spans.iter().filter(ring).collect();
        let end = |span: &Span| span.start_us + span.duration_us;
        let streams = places.iter().filter(|place| place.0 == At::Ring).count();
        // The ring holds no more copies than there are streamed parts, or slots.
        let room = streams.min(slots as usize);
        for (number, copy) in copies.iter().enumerate() {
            prop_assert_eq!(&copy.name, &runs[number].name);
            prop_assert!(end(copy) <= runs[number].start_us + 1e-6, "a run before its weights");
            let free = number.checked_sub(room).map_or(0.0, |before| end(runs[before]));
            let before = number.checked_sub(1).map_or(0.0, |before| end(copies[before]));
            prop_assert!((copy.start_us - free.max(before)).abs() < 1e-6, "copy {number} at {} of {} and {}", copy.start_us, free, before);
        }
    }
}

/// A device that computes while the engine goes on is waited for where its scores are wanted, and nowhere before.
#[test]
fn a_token_waits_for_its_device_once() {
    let places = [At::Ring, At::Slot, At::Ring, At::Constants, At::Ring, At::Ring].map(|place| (place, place));
    for us in [100, 2500] {
        let backend = queueing(us, true);
        let chain = chain(&places, 2, None);
        let mut engine = load(&chain, &backend, EngineOptions::default(), &Silent).unwrap();
        let before = backend.waits();
        let found = scores(&mut engine, &[3, 1, 4], &[1, 5, 9], |_| ());
        assert_eq!(found, expected(&chain, &[3, 1, 4], None, &[1, 5, 9]));
        assert_eq!(backend.waits() - before, 4);
        let telemetry = engine.telemetry();
        let runs: Duration = telemetry.stages.iter().map(|stage| stage.prefill.time + stage.decode.time).sum();
        assert_eq!(runs, Duration::from_micros(4 * 6 * COMPUTE));
        assert_eq!(telemetry.uploads.count, 4 * 4);
        // The telemetry of the last pass has the same times for the last token alone.
        let last = engine.last_pass();
        assert_eq!(last.compute, [("gpu0".to_owned(), Duration::from_micros(6 * COMPUTE))]);
        assert_eq!((last.uploads.count, last.uploaded_bytes, last.slot_hits), (4, 4 * BYTES, 4));
        assert_eq!(last.accounted(), telemetry.decode.time / 3);
        // What is not computing is waiting for weights.
        assert_eq!(telemetry.prefill.time + telemetry.decode.time, runs + telemetry.slot_stalls.time);
    }
}

#[derive(Default)]
struct Says(Mutex<Vec<String>>);

impl Reporter for Says {
    fn warning(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

#[test]
fn a_device_with_less_memory_streams_what_does_not_fit() {
    let places = [(At::Slot, At::Slot); 5];
    let chain = chain(&places, 0, None);
    for (room, streamed) in [(5, 0), (4, 3), (3, 4), (2, 5)] {
        let (backend, says) = (backend(700), Says::default());
        backend.limit_device(MemoryId(1), room * BYTES + BYTES / 2);
        let mut engine = load(&chain, &backend, EngineOptions::default(), &says).unwrap();
        // Memory for states and boundaries is not limited here.
        backend.limit_device(MemoryId(1), 1 << 30);
        assert_eq!(scores(&mut engine, &[3, 1], &[4, 1], |_| ()), expected(&chain, &[3, 1], None, &[4, 1]));
        let said = says.0.into_inner().unwrap();
        match streamed {
            0 => assert!(said.is_empty(), "{said:?}"),
            n => assert!(said[0].contains(&format!("{n} of 5 resident partitions are streamed")), "{room}: {said:?}"),
        }
        assert_eq!(engine.telemetry().slot_hits + engine.telemetry().slot_misses, 3 * streamed);
    }
}

#[test]
fn strict_does_not_stream_what_was_to_stay_and_nothing_helps_a_device_without_room() {
    let chain = chain(&[(At::Slot, At::Slot); 5], 0, None);
    let backend = backend(700);
    backend.limit_device(MemoryId(1), 3 * BYTES);
    let strict = EngineOptions { fallback: Fallback::Refuse, ..Default::default() };
    let error = load(&chain, &backend, strict, &Silent).err().unwrap();
    assert!(error.to_string().contains("the weights on gpu0"), "{error}");
    backend.limit_device(MemoryId(1), BYTES / 2);
    let error = load(&chain, &backend, EngineOptions::default(), &Silent).err().unwrap();
    assert!(error.to_string().contains("the weights on gpu0"), "{error}");
}

/// A provider may leave an operator to the host, and then wants its weights there.
#[test]
fn weights_that_a_session_wants_on_the_host_stay_there() {
    let places = [(At::Ring, At::Ring), (At::Slot, At::Slot), (At::Ring, At::Ring), (At::Ring, At::Ring)];
    for (on_host, copied) in [(vec![1], 6 * 4), (vec![0, 2], 8 * 4), (vec![0], 12 * 4)] {
        let chain = Chain { weights_on_host: on_host, ..chain(&places, 2, None) };
        let says = Says::default();
        let options = EngineOptions { poison_slots: true, ..Default::default() };
        let mut engine = load(&chain, &queueing(700, true), options, &says).unwrap();
        assert_eq!(scores(&mut engine, &[3, 1, 4], &[1, 5], |_| ()), expected(&chain, &[3, 1, 4], None, &[1, 5]));
        assert_eq!(engine.last_pass().uploaded_bytes, 3 * copied);
        let said = says.0.into_inner().unwrap();
        let kept =
            format!("{} B of weights of p0 to p3 stay in host memory: gpu0 leaves operators", 4 * (BYTES - copied));
        assert!(said.len() == 1 && said[0].starts_with(&kept), "{said:?}");
    }
}

#[test]
fn what_cannot_be_moved_says_why() {
    let chain = chain(&[(At::Host, At::Host), (At::Constants, At::Constants), (At::Slot, At::Slot)], 0, None);
    let mut engine = load(&chain, &backend(700), EngineOptions::default(), &Silent).unwrap();
    let mut why = |partition: &str, residency| engine.set_residency(partition, residency).unwrap_err().to_string();
    assert!(why("p1", Residency::Streamed).contains("constants"));
    assert!(why("p2", Residency::Streamed).contains("no ring"));
    assert!(why("p2", Residency::Mapped).contains("cannot be mapped"));
    assert!(why("p9", Residency::Resident).contains("no such partition"));
    assert!(engine.decode_on("p2", "cpu").unwrap_err().to_string().contains("does not have it on cpu"));
}

/// Only streamed weights are worth pinning, and a warning says what could not be pinned.
#[test]
fn what_is_streamed_is_pinned_as_far_as_it_may_be() {
    let places = [(At::Slot, At::Slot), (At::Ring, At::Ring), (At::Host, At::Ring), (At::Host, At::Host)];
    let chain = chain(&places, 2, None);
    for (can, may, got, says) in [
        (u64::MAX, None, 2 * BYTES, false),
        (u64::MAX, Some(BYTES), BYTES, false),
        (BYTES, None, BYTES, true),
        (0, None, 0, false),
        (0, Some(BYTES), 0, true),
    ] {
        let (backend, said) = (backend(700), Says::default());
        backend.can_pin(can);
        let options = EngineOptions { pinned: may, ..Default::default() };
        load(&chain, &backend, options, &said).unwrap();
        let (pinned, held) = backend.held();
        assert_eq!(pinned, got);
        let share = may.map_or(BYTES, |may| may / 2);
        assert_eq!(held.iter().map(|hold| hold.pinned).collect::<Vec<_>>(), [0, share, share]);
        assert!(held.iter().all(|hold| !hold.bypass_page_cache));
        assert_eq!(said.0.into_inner().unwrap().iter().any(|said| said.contains("could be pinned")), says);
    }
}

/// The host holds an equal share of each part's streamed weights, as much as the plan's memory has room for; the rest is read for each copy and not
/// kept.
#[test]
fn the_host_holds_no_more_than_it_may() {
    let held = |ram: Option<u64>| {
        let dir = tempfile::tempdir().unwrap();
        let backend = backend(700);
        backend.can_pin(u64::MAX);
        let mut plan = chain(&[(At::Host, At::Ring); 4], 2, None).set_up(dir.path(), &backend).unwrap();
        plan.budgets.ram = ram.map(hpp_schema::ByteSize);
        Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
        let (pinned, held) = backend.held();
        assert!(held.windows(2).all(|two| two[0] == two[1]), "{held:?}");
        (pinned, held[0].bypass_page_cache)
    };
    assert_eq!(held(None), (4 * BYTES, false));
    assert_eq!(held(Some(1 << 30)), (4 * BYTES, false));
    assert_eq!(held(Some(0)), (0, true));
    // States and activations come first.
    let (mut less, mut enough) = (0, 1 << 30);
    while enough - less > 1 {
        let middle = u64::midpoint(less, enough);
        *if held(Some(middle)).1 { &mut less } else { &mut enough } = middle;
    }
    assert_eq!(held(Some(enough - 2 * BYTES)), (2 * BYTES, true));
    assert_eq!(held(Some(enough - 4 * BYTES)), (0, true));
}

/// Prompts and tokens are computed in different places: the plan says where drafts of a few tokens are computed.
#[test]
fn short_passes_after_the_prompt_follow_the_decode_schedule() {
    for (decode, prefill) in
        [(At::Host, At::Ring), (At::Host, At::Constants), (At::Ring, At::Host), (At::Slot, At::Host)]
    {
        for states_on_host in [false, true] {
            let chain = Chain { states_on_host, ..chain(&[(decode, prefill); 3], 2, None) };
            let dir = tempfile::tempdir().unwrap();
            let backend = backend(500);
            let mut plan = chain.set_up(dir.path(), &backend).unwrap();
            plan.schedule.decode_tokens = Some(4);
            let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
            let mut sequence = engine.new_sequence().unwrap();
            let passes: [&[u32]; 4] = [&[1, 2, 3], &[4, 5, 6, 7], &[8], &[9, 10, 11, 12, 13]];
            let expected = chain.scores(&passes.map(<[u32]>::to_vec));
            for (tokens, expected) in passes.iter().zip(&expected) {
                let logits = engine.step(&mut sequence, StepInput::Tokens(tokens), LogitRows::Last).unwrap();
                assert_eq!(logits.data[0], *expected, "{decode:?} {prefill:?} {states_on_host}");
            }
            let telemetry = engine.telemetry();
            assert_eq!((telemetry.prefill.count, telemetry.decode.count), (2, 2), "3 and 5 tokens; 4 and 1");
            engine.truncate(&mut sequence, 7).unwrap();
            let again = engine.step(&mut sequence, StepInput::Tokens(&[8]), LogitRows::Last).unwrap();
            assert_eq!(again.data[0], expected[2]);
        }
    }
}
