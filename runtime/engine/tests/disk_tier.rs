//! Weights read from disk while others compute, on a clock that only the mock advances: the contracts of the ports hold, and the time is what a
//! separate calculation from window, disk and chain gives.

use hpp_engine::mock::{Chain, ChainPart, MockBackend};
use hpp_engine::{
    CancelHandle, Engine, EngineError, EngineOptions, LogitRows, Logits, NamedTensors, Reporter, Sequence, Silent,
    StepInput, WeightReads, WorkItem,
};
use hpp_schema::memory::RESERVE;
use hpp_schema::{ByteSize, FileRecord, FileRole, OwnDraft, Plan, Residency, SelectedBy, SpanKind};
use proptest::prelude::*;
use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::sync::Mutex;
use std::time::Duration;

static NO_EXTRA: NamedTensors = NamedTensors::new();

/// Ten stages, of each of which 4 MiB - 1 MiB are read, and a window that is a little smaller than two stages. Weights are unlocked so that the
/// window holds two stages, and the unlocked weights are read too.
#[test]
fn a_window_that_lacks_a_little_of_two_stages_gets_it_from_locked_weights() {
    const MIB: u64 = 1 << 20;
    let (stage, window) = (4 * MIB, 6 * MIB - MIB / 5);
    let run = |window: u64| {
        let case = Case {
            us: vec![10; 10],
            chunks: vec![vec![stage / 8; 8]; 10],
            window,
            bytes_per_ms: 1 << 20,
            density: 1,
            tokens: 1,
        };
        let (backend, dir) = (case.backend(), tempfile::tempdir().unwrap());
        let mut plan = case.plan(dir.path(), &backend);
        plan.partitions.iter_mut().for_each(|partition| partition.bytes.locked = Some(ByteSize(MIB)));
        let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
        decode(&mut engine, 3);
        (engine.last_pass().read_bytes, backend.disk().peak_held())
    };
    let (read, held) = run(window);
    let unlocked = read - 10 * (stage - MIB);
    assert!((MIB / 5..MIB / 2).contains(&unlocked), "{unlocked} bytes unlocked");
    assert!((2 * (stage - MIB)..=window + unlocked + 10).contains(&held), "{held} bytes in memory");
    // A window that holds two stages and a window that lacks much stay as they are.
    for window in [7 * MIB, 4 * MIB] {
        let (read, held) = run(window);
        assert!(read == 10 * (stage - MIB) && held <= window, "{read} bytes read, {held} in memory");
    }
}

/// A chain on the host, its weights, and a disk.
#[derive(Clone, Debug)]
struct Case {
    /// How long each part computes, microseconds a token.
    us: Vec<u64>,
    /// Chunks of each part's weights, bytes; no chunks where they stay in memory.
    chunks: Vec<Vec<u64>>,
    /// Room for weights on their way.
    window: u64,
    bytes_per_ms: u64,
    /// Bytes that each byte read fills.
    density: u64,
    tokens: usize,
}

impl Case {
    fn backend(&self) -> MockBackend {
        let backend = MockBackend::new();
        backend.disk().reads_at(self.bytes_per_ms as f64);
        backend.disk().compresses(self.density);
        for (part, chunks) in self.chunks.iter().enumerate() {
            backend.streams(&format!("p{part}.onnx"), chunks.clone());
        }
        backend
    }

    fn plan(&self, dir: &Path, backend: &MockBackend) -> Plan {
        let part = |us: &u64| {
            let us = *us;
            let takes = Rc::new(move |tokens: u64| Duration::from_micros(us * tokens));
            ChainPart::new(None, takes)
        };
        let parts = self.us.iter().map(part).collect();
        let chain = Chain { parts, ..Chain::default() };
        let mut plan = chain.set_up(dir, backend).unwrap();
        for (partition, chunks) in plan.partitions.iter_mut().zip(&self.chunks) {
            partition.bytes.weights = ByteSize(chunks.iter().sum());
            partition.residency = if chunks.is_empty() { Residency::Resident } else { Residency::Streamed };
        }
        let host = plan.devices.iter_mut().find(|device| device.name == "cpu").unwrap();
        host.window = Some(ByteSize(self.window));
        plan
    }

    fn engine(&self, backend: &MockBackend) -> Engine<MockBackend> {
        let dir = tempfile::tempdir().unwrap();
        let plan = self.plan(dir.path(), backend);
        Engine::load(&plan, dir.path(), backend, EngineOptions::default(), &Silent).unwrap()
    }

    fn largest(&self) -> u64 {
        self.chunks.iter().map(|chunks| chunks.iter().sum()).max().unwrap_or(0)
    }

    /// When the last token is done, microseconds, by a separate calculation: the read of a chunk begins as soon as enough chunks before it were
    /// evicted, or when its own part runs next; the disk reads one chunk after the other.
    fn expected(&self) -> f64 {
        let window = self.window.max(self.largest());
        let order: Vec<(usize, u64)> = self
            .chunks
            .iter()
            .enumerate()
            .flat_map(|(part, chunks)| chunks.iter().map(move |bytes| (part, *bytes)))
            .collect();
        let total = order.len() * self.tokens;
        let (mut now, mut disk, mut held, mut begun) = (0.0_f64, 0.0_f64, 0, 0);
        let mut done: Vec<f64> = Vec::new();
        let mut begin = |now: f64, begun: &mut usize, held: &mut u64, done: &mut Vec<f64>| {
            let (_, bytes) = order[*begun % order.len()];
            disk = disk.max(now) + (bytes / self.density) as f64 * 1e3 / self.bytes_per_ms as f64;
            done.push(disk);
            *held += bytes;
            *begun += 1;
        };
        let mut let_go = 0;
        for part in (0..self.tokens).flat_map(|_| 0..self.us.len()) {
            let own = self.chunks[part].len();
            let room = |begun: usize, held: u64, let_go: usize| {
                begun - let_go < order.len() && held + order[begun % order.len()].1 <= window
            };
            while !order.is_empty() && begun < total + order.len() && room(begun, held, let_go) {
                begin(now, &mut begun, &mut held, &mut done);
            }
            while begun < let_go + own {
                begin(now, &mut begun, &mut held, &mut done);
            }
            now = done[let_go..let_go + own].iter().copied().fold(now, f64::max) + self.us[part] as f64;
            held -= self.chunks[part].iter().sum::<u64>();
            let_go += own;
        }
        now
    }
}

fn cases() -> impl Strategy<Value = Case> {
    let part = (1u64..500, proptest::collection::vec(1u64..400, 0..5));
    (proptest::collection::vec(part, 1..7), 0u64..2500, 50u64..5000, 1u64..5, 1usize..8).prop_map(
        |(parts, window, bytes_per_ms, density, tokens)| {
            let (us, chunks) = parts.into_iter().unzip();
            Case { us, chunks, window: window.max(1), bytes_per_ms, density, tokens }
        },
    )
}

fn decode(engine: &mut Engine<MockBackend>, tokens: usize) {
    let mut sequence = engine.new_sequence().unwrap();
    for _ in 0..tokens {
        engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
    }
}

proptest! {
    /// The mock itself checks that no run computes before its weights are there and that nothing is read twice.
    #[test]
    fn it_takes_what_room_disk_and_chain_allow(case in cases()) {
        let backend = case.backend();
        let mut engine = case.engine(&backend);
        engine.record_timeline(true);
        decode(&mut engine, case.tokens);
        let us = backend.clock().now().as_secs_f64() * 1e6;
        let expected = case.expected();
        prop_assert!((us - expected).abs() <= 0.01 * expected, "{us} us, and {expected} by another account");
        prop_assert!(backend.disk().peak_held() <= case.window.max(case.largest()));
        let telemetry = engine.telemetry();
        let bytes: u64 = case.chunks.iter().flatten().map(|held| held / case.density).sum();
        prop_assert_eq!(telemetry.read_bytes, bytes * case.tokens as u64);
        let computed: u64 = case.us.iter().sum::<u64>() * case.tokens as u64;
        let stalled = telemetry.disk_stalls.time.as_secs_f64() * 1e6;
        prop_assert!((us - stalled - computed as f64).abs() < 1.0, "what is not computing is waiting");
    }
}

/// 3 parts of 1 ms and 100 bytes each: at 200 bytes a millisecond reading takes half as long as computing.
fn half_as_long() -> Case {
    let chunks = vec![vec![50, 50]; 3];
    Case { us: vec![1000; 3], chunks, window: 200, bytes_per_ms: 200, density: 1, tokens: 4 }
}

#[test]
fn reading_hides_behind_computing() {
    let case = half_as_long();
    let backend = case.backend();
    let mut engine = case.engine(&backend);
    engine.record_timeline(true);
    decode(&mut engine, 4);
    // Only the first part is waited for.
    assert_eq!(backend.clock().now(), Duration::from_micros(500 + 4 * 3000));
    let timeline = engine.timeline();
    let stalls = timeline.spans.iter().filter(|span| span.kind == SpanKind::Stall).count();
    assert_eq!(stalls, 1);
    let computing: Vec<_> = timeline.spans.iter().filter(|span| span.kind == SpanKind::Compute).collect();
    let hidden = |disk: &&hpp_schema::Span| {
        computing.iter().any(|span| {
            span.start_us < disk.start_us + disk.duration_us && disk.start_us < span.start_us + span.duration_us
        })
    };
    let reads: Vec<_> = timeline.spans.iter().filter(|span| span.lane == "disk").collect();
    assert_eq!(reads.iter().filter(|span| hidden(span)).count(), reads.len() - 2, "all but the first part's two");
}

#[test]
fn a_stopped_pass_begins_again() {
    let case = Case {
        us: vec![10; 3],
        chunks: vec![vec![60], vec![60], vec![60]],
        window: 130,
        bytes_per_ms: 10,
        density: 1,
        tokens: 1,
    };
    let backend = case.backend();
    let mut engine = case.engine(&backend);
    let mut sequence = engine.new_sequence().unwrap();
    backend.disk().fails("the disk is on fire");
    let broken = engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap_err();
    assert!(matches!(&broken, EngineError::Run { partition, .. } if partition == "p0"), "{broken}");
    // The sequence is lost, but the engine goes on: chunks that were read for the rest of the pass are evicted.
    decode(&mut engine, 2);
    assert_eq!(backend.disk().peak_held(), 120);
}

#[derive(Default)]
struct Heard(Mutex<Vec<String>>);

impl Reporter for Heard {
    fn warning(&self, message: &str) {
        self.0.lock().unwrap().push(message.to_owned());
    }
}

#[test]
fn less_is_locked_where_less_memory_may_be_used() {
    let case =
        Case { us: vec![10; 2], chunks: vec![vec![1000]; 2], window: 1000, bytes_per_ms: 100, density: 1, tokens: 1 };
    let held_beside = |ram: u64, limit: u64, draft: Option<u64>, reserved: u64| {
        let (dir, backend, heard) = (tempfile::tempdir().unwrap(), case.backend(), Heard::default());
        let mut plan = case.plan(dir.path(), &backend);
        plan.budgets.ram = Some(ByteSize(ram));
        std::fs::write(dir.path().join("draft.yaml"), b"a draft").unwrap();
        plan.files.extend(draft.map(|_| FileRecord {
            path: "draft.yaml".into(),
            role: FileRole::Draft,
            bytes: ByteSize(7),
            sampled: blake3::hash(b"\x07\0\0\0\0\0\0\0a draft").to_hex().to_string(),
            blake3: Some(blake3::hash(b"a draft").to_hex().to_string()),
        }));
        plan.draft = draft.map(|bytes| OwnDraft {
            plan: "draft.yaml".into(),
            bits: 4,
            host_memory: ByteSize(bytes),
            sequence_memory: ByteSize(0),
        });
        plan.partitions.iter_mut().for_each(|partition| partition.bytes.locked = Some(ByteSize(500)));
        backend.limit_memory(limit);
        let options = EngineOptions { reserved, ..EngineOptions::default() };
        let engine = Engine::load(&plan, dir.path(), &backend, options, &heard);
        let read = engine.map(|mut engine| {
            decode(&mut engine, 1);
            engine.telemetry().read_bytes
        });
        (read, heard.0.into_inner().unwrap())
    };
    let held_of = |ram: u64, limit: u64| held_beside(ram, limit, None, 0);
    let held = |limit: u64| held_of(2000, limit);
    assert_eq!(held(2000).0.unwrap(), 1000, "half of it is locked");
    let (read, said) = held_of((64 << 10) + 1000, 64 << 10);
    assert!(read.unwrap() == 1000 && said.is_empty(), "a control group rounds to pages: {said:?}");
    let (read, said) = held(1500);
    assert_eq!(read.unwrap(), 1500, "500 bytes less");
    assert!(said[0].contains("stay in memory instead of"), "{said:?}");
    assert_eq!(held(900).0.unwrap(), 2000, "nothing is locked, and less than planned stays free");
    let planned = 2000 + RESERVE;
    let refused = held_of(planned, 900).0.unwrap_err();
    assert!(matches!(refused, EngineError::TooLittleMemory { limit: 900, needed: 1000, .. }), "{refused}");
    // The plan's own draft has a part of the planned memory, which is free if no draft is loaded.
    let needed = |reserved: u64| match held_beside(planned + 700, 250, Some(700), reserved).0 {
        Err(EngineError::TooLittleMemory { needed, .. }) => needed,
        other => panic!("{other:?}"),
    };
    assert_eq!([needed(0), needed(300), needed(700)], [1000, 1300, 1700]);
    assert!(held_beside(planned + 700, 1100, Some(700), 0).0.is_ok());
}

#[test]
fn without_reading_ahead_each_part_waits_for_its_own() {
    let case = half_as_long();
    let (dir, backend) = (tempfile::tempdir().unwrap(), case.backend());
    let plan = case.plan(dir.path(), &backend);
    let options = EngineOptions { weights: WeightReads::OnDemand, ..EngineOptions::default() };
    let mut engine = Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap();
    decode(&mut engine, 4);
    assert_eq!(backend.clock().now(), Duration::from_micros(4 * 3 * (500 + 1000)));
    assert_eq!(backend.disk().peak_held(), 100);
    // With mapped weights the system reads pages, and the engine reads nothing.
    let options = EngineOptions { weights: WeightReads::Mapped, ..EngineOptions::default() };
    let mut engine = Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap();
    decode(&mut engine, 1);
    assert_eq!(engine.telemetry().read_bytes, 0);
}

/// Ctrl-C cuts a pass short while weights of any stage are in memory; the next text finds them as if nothing had happened.
#[test]
fn after_a_cancelled_pass_weights_are_read_anew() {
    for stop_at in 1..=4 {
        let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
        backend.disk().reads_at(1e3);
        let (cancel, runs) = (CancelHandle::new(), Rc::new(Cell::new(0)));
        let part = |number: usize| {
            backend.streams(&format!("p{number}.onnx"), vec![100, 50]);
            let (cancel, runs) = (cancel.clone(), runs.clone());
            let takes = Rc::new(move |_| {
                runs.set(runs.get() + 1);
                if runs.get() == stop_at {
                    cancel.cancel();
                }
                Duration::from_micros(10)
            });
            ChainPart::new(None, takes)
        };
        let chain = Chain { parts: (0..2).map(part).collect(), ..Chain::default() };
        let mut plan = chain.set_up(dir.path(), &backend).unwrap();
        for partition in &mut plan.partitions {
            (partition.bytes.weights, partition.residency) = (ByteSize(150), Residency::Streamed);
        }
        plan.devices.iter_mut().find(|device| device.name == "cpu").unwrap().window = Some(ByteSize(200));
        let options = EngineOptions { cancel: Some(cancel.clone()), ..EngineOptions::default() };
        let mut engine = Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap();
        let before = runs.replace(0);
        assert_eq!(before, 0, "loading runs nothing here");
        let mut sequence = engine.new_sequence().unwrap();
        let step = |engine: &mut Engine<_>, sequence: &mut _| {
            engine.step(sequence, StepInput::Tokens(&[1]), LogitRows::Last).map(|_| ())
        };
        let stopped = (0..3).find_map(|_| step(&mut engine, &mut sequence).err());
        assert!(matches!(stopped, Some(EngineError::Cancelled)), "{stop_at}: {stopped:?}");
        cancel.reset();
        decode(&mut engine, 3);
    }
}

/// Four experts of 100 bytes, of which each token selects one.
fn experts(router: &str) -> hpp_schema::Experts {
    hpp_schema::Experts {
        router: router.to_owned(),
        count: 4,
        active: 1,
        selected_by: SelectedBy::Logits,
        apart: false,
        weights: vec!["w".into()],
        bytes: ByteSize(400),
        next: None,
    }
}

/// A chain of two parts, the second of which begins with four experts of 100 bytes: the tensor that enters it has four numbers for each token, and
/// the largest selects the expert.
fn mixture(dir: &Path, backend: &MockBackend, cache: u64) -> Plan {
    computing_mixture(dir, backend, cache, Duration::from_micros(10))
}

/// Like [`mixture`], with parts that take this long for each run.
fn computing_mixture(dir: &Path, backend: &MockBackend, cache: u64, takes: Duration) -> Plan {
    backend.disk().reads_at(1e3);
    backend.streams("p1.onnx", vec![30, 100, 100, 100, 100]);
    let part = || ChainPart::new(None, Rc::new(move |_| takes));
    let chain = Chain { parts: vec![part(), part()], ..Chain::default() };
    let mut plan = chain.set_up(dir, backend).unwrap();
    let router = plan.partitions[1].inputs[0].name.clone();
    let second = &mut plan.partitions[1];
    (second.bytes.weights, second.residency) = (ByteSize(430), Residency::Streamed);
    second.experts = Some(experts(&router));
    let host = plan.devices.iter_mut().find(|device| device.name == "cpu").unwrap();
    (host.window, host.expert_cache) = (Some(ByteSize(64)), Some(ByteSize(cache)));
    plan
}

#[test]
fn only_selected_experts_are_read_and_they_stay() {
    let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
    let plan = mixture(dir.path(), &backend, 400);
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    decode(&mut engine, 6);
    let telemetry = engine.telemetry();
    // Each pass of one token selects one expert.
    assert_eq!(telemetry.expert_hits + telemetry.expert_misses, 6);
    assert!((1..=4).contains(&telemetry.expert_misses), "{} misses", telemetry.expert_misses);
    // The 30 bytes of other weights are read for each pass and ahead for the next.
    let (least, experts) = (6 * 30, telemetry.expert_misses * 100);
    assert!((least + experts..=least + 30 + experts).contains(&telemetry.read_bytes), "{}", telemetry.read_bytes);
}

/// A pass of one token of each of some new sequences.
fn pass_of(engine: &mut Engine<MockBackend>, tokens: &[u32]) {
    let mut sequences = new_sequences(engine, tokens.len());
    run_pass(engine, &mut sequences, tokens);
}

fn new_sequences(engine: &mut Engine<MockBackend>, count: usize) -> Vec<Sequence<MockBackend>> {
    (0..count).map(|_| engine.new_sequence().unwrap()).collect()
}

/// A pass of one token of each sequence, all of which succeed.
fn run_pass(engine: &mut Engine<MockBackend>, sequences: &mut [Sequence<MockBackend>], tokens: &[u32]) {
    assert!(try_pass(engine, sequences, tokens).unwrap().iter().all(Result::is_ok));
}

fn try_pass(
    engine: &mut Engine<MockBackend>,
    sequences: &mut [Sequence<MockBackend>],
    tokens: &[u32],
) -> Result<Vec<Result<(), EngineError>>, EngineError> {
    let mut logits = vec![Logits::default(); tokens.len()];
    let inputs: Vec<[u32; 1]> = tokens.iter().map(|token| [*token]).collect();
    let buffers = sequences.iter_mut().zip(&mut logits).zip(&inputs);
    let mut items: Vec<WorkItem<'_, MockBackend>> = buffers
        .map(|((sequence, logits), tokens)| {
            let input = StepInput::Tokens(tokens);
            WorkItem { sequence, input, rows: LogitRows::Last, extra: &NO_EXTRA, logits }
        })
        .collect();
    engine.pass(&mut items)
}

#[test]
fn a_sequence_computes_while_the_experts_of_another_are_read() {
    let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
    // A run takes longer than the read of an expert, 100 us.
    let plan = computing_mixture(dir.path(), &backend, 400, Duration::from_micros(150));
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let stalled =
        |engine: &Engine<MockBackend>| (engine.telemetry().expert_misses, engine.telemetry().disk_stalls.time);
    pass_of(&mut engine, &[0, 3]);
    // They select different experts. The first waits for its own, the second need not.
    assert_eq!(stalled(&engine), (2, Duration::from_micros(100)));

    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    pass_of(&mut engine, &[0]);
    let (_, alone) = stalled(&engine);
    // The sequence whose expert is in memory comes first, and the other then need not wait.
    pass_of(&mut engine, &[3, 0]);
    assert_eq!(stalled(&engine), (2, alone));
}

/// A read that fails, of the expert of the first sequence or, once the first has run, of the second, costs that pass and nothing else.
#[test]
fn a_failed_read_of_one_sequence_s_expert_costs_one_pass() {
    // The first pass waits for an expert, 30 bytes that every run needs, and the other expert.
    for reads in [0, 2] {
        let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
        let plan = mixture(dir.path(), &backend, 400);
        let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
        backend.disk().fails_after(reads, "the disk is broken");
        let mut sequences = new_sequences(&mut engine, 2);
        let error = try_pass(&mut engine, &mut sequences, &[0, 3]).unwrap_err();
        assert!(format!("{error:?}").contains("the disk is broken"), "{error:?}");
        pass_of(&mut engine, &[0, 3]);
        let misses = if reads == 0 { 4 } else { 3 };
        assert_eq!(engine.telemetry().expert_misses, misses, "an expert that was read stays");
    }
}

/// A chain of three parts on the host, of which the last two have four experts of 100 bytes each and no other weights. The numbers that enter the
/// second part predict the experts that the numbers entering the third select. The first number of those that enter is half of a token's number in
/// the second part and a quarter in the third; the second number is the position.
fn predicting(dir: &Path, backend: &MockBackend) -> Plan {
    backend.disk().reads_at(1e3);
    let part = || ChainPart::new(None, Rc::new(|_| Duration::from_micros(10)));
    ["p1.onnx", "p2.onnx"].iter().for_each(|file| backend.streams(file, vec![100; 4]));
    let chain = Chain { parts: vec![part(), part(), part()], ..Chain::default() };
    let mut plan = chain.set_up(dir, backend).unwrap();
    let routers = [1, 2].map(|index| plan.partitions[index].inputs[0].name.clone());
    let last = plan.partitions[2].name.clone();
    for (partition, router) in plan.partitions[1..].iter_mut().zip(&routers) {
        (partition.bytes.weights, partition.residency) = (ByteSize(400), Residency::Streamed);
        partition.experts = Some(experts(router));
    }
    let next = hpp_schema::NextExperts { partition: last, router: routers[0].clone() };
    plan.partitions[1].experts.as_mut().unwrap().next = Some(next);
    let host = plan.devices.iter_mut().find(|device| device.name == "cpu").unwrap();
    (host.window, host.expert_cache) = (Some(ByteSize(64)), Some(ByteSize(400)));
    plan
}

/// Experts used: in memory, read ahead, read when they were selected; read in vain; and bytes read.
fn experts_used(engine: &Engine<MockBackend>) -> ([u64; 4], u64) {
    let telemetry = engine.telemetry();
    let experts =
        [telemetry.expert_hits, telemetry.experts_read_ahead, telemetry.expert_misses, telemetry.experts_read_in_vain];
    (experts, telemetry.read_bytes)
}

#[test]
fn predicted_experts_are_read_ahead_and_wrong_predictions_change_nothing_else() {
    let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
    let plan = predicting(dir.path(), &backend);
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut another = engine.new_sequence().unwrap();
    let step = |engine: &mut Engine<_>, sequence: &mut _, token| {
        engine.step(sequence, StepInput::Tokens(&[token]), LogitRows::Last).unwrap();
        experts_used(engine)
    };
    // Zeros select the last expert in both parts, as predicted.
    assert_eq!(step(&mut engine, &mut sequence, 0), ([0, 1, 1, 0], 200));
    // 1.5 and 0.75 at position 1: the second part selects its first expert, which is also predicted for the third; the third part selects its
    // second.
    assert_eq!(step(&mut engine, &mut sequence, 3), ([0, 1, 3, 1], 500));
    // 1.5 at position 2: both parts select the second expert, as predicted; the third part has it in memory.
    assert_eq!(step(&mut engine, &mut sequence, 3), ([1, 1, 4, 1], 600));
    // 3.5 and 1.75 at position 3: predicted wrongly, while both parts have what they select. The disk fails, and nobody needs what it reads.
    backend.disk().fails("the disk is broken");
    assert_eq!(step(&mut engine, &mut sequence, 7), ([3, 1, 4, 2], 600));
    assert!(backend.disk().peak_held() <= 400);
    // What the disk failed to read is read for the next run that selects it: 7.5 and 3.75 at position 0.
    assert_eq!(step(&mut engine, &mut another, 15), ([4, 2, 4, 2], 700));
}

/// If several sequences together select and predict as many experts as the cache holds, none is read ahead.
#[test]
fn reading_ahead_takes_no_more_than_the_cache_has() {
    let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
    let mut plan = predicting(dir.path(), &backend);
    for partition in &mut plan.partitions[1..] {
        partition.experts.as_mut().unwrap().active = 3;
    }
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequences: Vec<_> = (0..3).map(|_| engine.new_sequence().unwrap()).collect();
    for pass in 0..14u32 {
        let tokens: Vec<u32> = (0..3).map(|sequence| (7 * pass + 5 * sequence * pass + sequence) % 16).collect();
        run_pass(&mut engine, &mut sequences, &tokens);
    }
    assert!(backend.disk().peak_held() <= 400, "{} bytes in memory", backend.disk().peak_held());
}

#[test]
fn experts_are_not_read_ahead_while_other_weights_are_read() {
    let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
    let plan = predicting(dir.path(), &backend);
    backend.streams("p2.onnx", vec![30, 100, 100, 100, 100]);
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    decode(&mut engine, 3);
    let ([hits, ahead, misses, in_vain], _) = experts_used(&engine);
    assert_eq!((hits + misses, ahead, in_vain), (6, 0, 0));
}

#[test]
fn after_a_failed_read_of_an_expert_the_next_pass_reads_it_again() {
    let (backend, dir) = (MockBackend::new(), tempfile::tempdir().unwrap());
    let plan = mixture(dir.path(), &backend, 400);
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    backend.disk().fails("the disk is broken");
    let mut sequence = engine.new_sequence().unwrap();
    let failed = engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).err();
    assert!(matches!(failed, Some(EngineError::Run { .. })), "{failed:?}");
    // The same token selects the same expert.
    let mut sequence = engine.new_sequence().unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
}

#[test]
fn other_bytes_are_locked_between_passes_and_the_rest_is_read() {
    let chunks = vec![vec![100, 200], vec![300], vec![400]];
    let case = Case { us: vec![10; 3], chunks, window: 400, bytes_per_ms: 1000, density: 1, tokens: 1 };
    let backend = case.backend();
    let dir = tempfile::tempdir().unwrap();
    let mut plan = case.plan(dir.path(), &backend);
    for (partition, bytes) in plan.partitions.iter_mut().zip([300, 300, 400]) {
        (partition.bytes.weights, partition.bytes.locked) = (ByteSize(bytes), Some(ByteSize(bytes - 100)));
    }
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    let mut read_bytes = |engine: &mut Engine<MockBackend>| {
        engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
        engine.last_pass().read_bytes
    };
    assert_eq!(read_bytes(&mut engine), 300);
    for (asked, locked) in [(300, 300), (300, 300), (0, 0), (6, 6), (700, 700), (10_000, 700)] {
        assert_eq!(engine.set_locked(asked).unwrap(), locked);
        for _ in 0..2 {
            // What is read of each partition is a whole number of bytes.
            let read = read_bytes(&mut engine);
            assert!((1000 - locked..=1000 - locked + 3).contains(&read), "{read} read with {locked} locked");
        }
    }
}

/// No partition has more bytes read than the others, whatever the plan locks of each: the part of a partition that is read has to be in memory
/// beside what is locked.
#[test]
fn large_partitions_are_locked_first() {
    let chunks = vec![vec![100], vec![500], vec![100]];
    let case = Case { us: vec![10; 3], chunks, window: 200, bytes_per_ms: 1000, density: 1, tokens: 1 };
    let backend = case.backend();
    let dir = tempfile::tempdir().unwrap();
    let mut plan = case.plan(dir.path(), &backend);
    for (partition, (weights, locked)) in plan.partitions.iter_mut().zip([(100, 80), (500, 240), (100, 80)]) {
        (partition.bytes.weights, partition.bytes.locked) = (ByteSize(weights), Some(ByteSize(locked)));
    }
    let mut engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let mut sequence = engine.new_sequence().unwrap();
    for _ in 0..2 {
        engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
        assert_eq!(engine.last_pass().read_bytes, 300, "400 bytes of the large one are locked");
    }
    assert_eq!(backend.disk().peak_held(), 200, "two of three at a time");
    engine.set_locked(200).unwrap();
    engine.step(&mut sequence, StepInput::Tokens(&[1]), LogitRows::Last).unwrap();
    assert_eq!(engine.last_pass().read_bytes, 500);
}
