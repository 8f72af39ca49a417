//! An engine that is kept true to its plan, on a clock that only the mock advances: what it moves when copies or processors become slow, and
//! that no token changes.

use hpp_engine::mock::{Chain, ChainInputs, ChainPart, ChainVariant, LinkCost, MockBackend};
use hpp_engine::port::MemoryId;
use hpp_engine::{Engine, EngineOptions, Silent};
use hpp_generate::adapt::{Adaptation, Devices};
use hpp_generate::{ModelInputs, SingleSequence};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

/// Milliseconds of a run of a part on the host and on the device.
const HOST_MS: u64 = 100;
const DEVICE_MS: u64 = 150;
/// Bytes of the weights of a part: three of 2, 8 and 4 numbers.
const WEIGHTS: [u64; 3] = [2, 8, 4];
const BYTES: f64 = 14.0 * 4.0;
const GPU0: MemoryId = MemoryId(1);

fn takes(ms: &Rc<Cell<u64>>) -> Rc<dyn Fn(u64) -> Duration> {
    let ms = Rc::clone(ms);
    Rc::new(move |_| Duration::from_millis(ms.get()))
}

/// A copy of the weights of a part takes so long.
fn link(backend: &MockBackend, ms: f64) {
    backend.link(MemoryId::HOST, GPU0, LinkCost { latency: Duration::ZERO, bytes_per_ms: BYTES / ms });
}

/// A sequence on an engine whose plan predicts the time that its passes take now.
struct Rig {
    sequence: SingleSequence<MockBackend>,
    backend: MockBackend,
    lines: Rc<RefCell<Vec<String>>>,
    scores: Vec<f32>,
}

impl Rig {
    fn new(chain: &Chain, backend: MockBackend, devices: Devices, planned_ms: f64) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut plan = chain.set_up(dir.path(), &backend).unwrap();
        (plan.predictions.source, plan.predictions.decode_ms) = ("profile: test".into(), planned_ms);
        let engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
        let lines = Rc::<RefCell<Vec<String>>>::default();
        let said = Rc::clone(&lines);
        let report = Box::new(move |line: &str| said.borrow_mut().push(line.to_owned()));
        let mut sequence = SingleSequence::new(engine, ModelInputs::default());
        sequence.adapt(Adaptation::new(&plan, devices, report));
        sequence.feed(&[3, 1, 4]).unwrap();
        Rig { sequence, backend, lines, scores: vec![] }
    }

    /// Milliseconds of the last of so many passes of one token.
    fn passes(&mut self, count: usize) -> f64 {
        let mut last = 0.0;
        for _ in 0..count {
            let before = self.backend.clock().now();
            self.sequence.feed(&[5]).unwrap();
            self.scores.push(self.sequence.logits()[0]);
            last = (self.backend.clock().now() - before).as_secs_f64() * 1e3;
        }
        last
    }

    fn lines(&self) -> Vec<String> {
        self.lines.borrow().clone()
    }
}

/// Three parts on the device, the middle one with weights that are copied for each run.
fn streamed() -> Chain {
    let ms = Rc::new(Cell::new(DEVICE_MS));
    let part = |class: usize| ChainPart {
        gpu: Some(0),
        takes: takes(&ms),
        inputs: Some(ChainInputs { streamed: class == 1, class }),
        prefill: None,
        enters: 1,
        states: 1,
    };
    Chain { parts: (0..3).map(part).collect(), weights: WEIGHTS.to_vec(), slots: 1, context: 2048, ..Chain::default() }
}

#[test]
fn weights_stay_on_the_device_while_copies_are_slower_than_planned() {
    let backend = MockBackend::new();
    link(&backend, 100.0);
    let mut rig = Rig::new(&streamed(), backend, Devices::Planned, 450.0);
    assert_eq!(rig.passes(60), 450.0, "copies are hidden");
    assert_eq!(rig.lines(), [] as [String; 0]);
    link(&rig.backend, 1500.0);
    let slow = rig.passes(3);
    assert!(slow > 1000.0, "{slow}");
    assert_eq!(rig.passes(60), 450.0, "they are no longer needed");
    let lines = rig.lines();
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("waits for copies") && lines[0].contains("stay on their device now"), "{lines:?}");
    // Much later the planned residency is tried again, and abandoned again while copies are slow.
    rig.passes(400);
    let lines = rig.lines();
    assert!((3..=5).contains(&lines.len()) && lines[1].contains("are copied for each run again"), "{lines:?}");
    assert_eq!(rig.passes(1), 450.0);

    let backend = MockBackend::new();
    link(&backend, 1.0);
    let mut undisturbed = Rig::new(&streamed(), backend, Devices::Planned, 450.0);
    undisturbed.passes(rig.scores.len());
    assert_eq!(undisturbed.scores, rig.scores);
}

/// Two parts that decode on the host, the second also loaded on the device, for prompts.
fn on_host(ms: &Rc<Cell<u64>>) -> Chain {
    let device = Rc::new(Cell::new(DEVICE_MS));
    let prefill = ChainVariant { gpu: Some(0), takes: takes(&device), inputs: None, other: true };
    let first = ChainPart { states: 1, ..ChainPart::new(None, takes(ms)) };
    let second = ChainPart { prefill: Some(prefill), ..first.clone() };
    Chain { parts: vec![first, second], context: 2048, ..Chain::default() }
}

#[test]
fn a_partition_decodes_on_the_device_while_the_host_is_slow_if_it_may() {
    for devices in [Devices::Planned, Devices::Other] {
        let host = Rc::new(Cell::new(HOST_MS));
        let backend = MockBackend::new();
        let mut rig = Rig::new(&on_host(&host), backend, devices, 2.0 * HOST_MS as f64);
        assert_eq!(rig.passes(100), 2.0 * HOST_MS as f64);
        host.set(4 * HOST_MS);
        let slow = rig.passes(100);
        let lines = rig.lines();
        if devices == Devices::Planned {
            assert_eq!(slow, 8.0 * HOST_MS as f64);
            assert_eq!(lines.len(), 1, "{lines:?}");
            assert!(
                lines[0].contains("computing on the CPU") && lines[0].contains("--from-telemetry run.json"),
                "{lines:?}"
            );
            continue;
        }
        assert!(slow < 6.0 * HOST_MS as f64, "{slow}: {lines:?}");
        assert!(lines[0].contains("p1 decodes on gpu0 now"), "{lines:?}");
        host.set(HOST_MS);
        assert_eq!(rig.passes(1000), 2.0 * HOST_MS as f64, "{:?}", rig.lines());
        assert!(rig.lines().last().unwrap().contains("p1 decodes on cpu again"), "{:?}", rig.lines());
    }
}
