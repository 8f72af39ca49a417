//! Partition benches on the mock: which runs count and which cases are refused, on a clock that only runs and copies advance.

use hpp_engine::mock::{Frame, LinkCost, MockBackend, MockModel};
use hpp_engine::port::{MemoryId, Port, Tensor};
use hpp_engine::{BackendError, CacheFlusher, EngineError, PartitionBench, Silent};
use hpp_schema::probe::{Carried, Case, Feed, Fill, OutputSpec, PartitionProbe};
use hpp_schema::{DType, HostKernels, Provider};
use std::cell::{Cell, RefCell};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

const GPU: MemoryId = MemoryId(1);

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn port(name: &str, dtype: DType, rank: usize, memory: MemoryId) -> Port {
    Port { name: name.into(), dtype, shape: vec![None; rank], memory }
}

/// `x` and a cache in, `y` and the cache out. Each run takes a millisecond longer than the one before.
fn block(memory: MemoryId) -> MockModel {
    let runs = Cell::new(0);
    let kernel = move |frame: &mut Frame<'_>| {
        let (x, cache) = (frame.input(0)?, frame.input(1)?);
        assert_eq!((x.f32(0), x.f32(5), cache.f32(0)), (4.0, 9.0, 0.0), "inputs are filled");
        if frame.output(0, &[1, 6])?.is_none() {
            return Err(BackendError::Stopped);
        }
        frame.output(1, &[1, 8])?.expect("the cache is bound");
        Ok(())
    };
    MockModel {
        inputs: vec![port("x", DType::Float32, 2, memory), port("past", DType::Float32, 2, memory)],
        outputs: vec![port("y", DType::Float32, 2, memory), port("present", DType::Float32, 2, memory)],
        in_place: vec![(1, 1)],
        kernel: Rc::new(kernel),
        takes: None,
    }
    .taking(
        (0, 1),
        Rc::new(move |_| {
            runs.set(runs.get() + 1);
            ms(runs.get())
        }),
    )
}

/// A product that takes a millisecond for each MiB it reads, and what it read.
fn product(read: &Rc<RefCell<Vec<u64>>>, memory: MemoryId) -> MockModel {
    let read = Rc::clone(read);
    MockModel {
        inputs: vec![port("a", DType::Float32, 2, memory), port("b", DType::Float32, 2, memory)],
        outputs: vec![port("c", DType::Float32, 2, memory)],
        in_place: vec![],
        kernel: Rc::new(move |frame: &mut Frame<'_>| {
            let matrix = frame.input(1)?;
            let (rows, columns) = (matrix.shape()[0], matrix.shape()[1]);
            assert!(
                memory != MemoryId::HOST || (0..rows).all(|row| matrix.f32(row * columns) == 1.0),
                "every page was written"
            );
            Ok(())
        }),
        takes: None,
    }
    .taking(
        (1, 0),
        Rc::new(move |rows| {
            let bytes = rows * 16384 * 4;
            read.borrow_mut().push(bytes);
            ms(bytes >> 20)
        }),
    )
}

fn backend(memory: MemoryId) -> MockBackend {
    let backend = MockBackend::new();
    backend.model("block.onnx", block(memory));
    backend
}

fn request(provider: Provider) -> PartitionProbe {
    PartitionProbe {
        file: "block.onnx".into(),
        weights_dir: ".".into(),
        host_kernels: HostKernels::default(),
        weight_bytes: 0,
        provider,
        cases: vec![],
    }
}

fn case() -> Case {
    let feed = |name: &str, shape: &[u64], fill| Feed {
        name: name.into(),
        dtype: DType::Float32,
        shape: shape.to_vec(),
        fill,
    };
    Case {
        name: "decode".into(),
        inputs: vec![feed("x", &[1, 6], Fill::Positions { start: 4 }), feed("past", &[1, 8], Fill::Zeros)],
        outputs: vec![OutputSpec { name: "y".into(), dtype: DType::Float32, shape: vec![1, 6] }],
        carried: vec![Carried { past: "past".into(), present: "present".into(), in_place: true }],
        evict_bytes: 0,
        warmup: 2,
        min_runs: 3,
        max_runs: 5,
        budget_ms: 1e6,
    }
}

fn times(backend: &MockBackend, case: &Case) -> Vec<Duration> {
    let mut bench = PartitionBench::load(backend, &request(Provider::CPU), &Silent).unwrap();
    bench.case(case, None).unwrap().times
}

#[test]
fn warm_up_does_not_count_and_the_most_is_the_most() {
    assert_eq!(times(&backend(MemoryId::HOST), &case()), [3, 4, 5, 6, 7].map(ms));
}

#[test]
fn a_budget_ends_the_runs_once_there_are_enough() {
    let spent = |budget_ms, min_runs| times(&backend(MemoryId::HOST), &Case { budget_ms, min_runs, ..case() }).len();
    assert_eq!(spent(0.0, 3), 3);
    // 3 + 4 ms are not yet 8; 3 + 4 + 5 are.
    assert_eq!(spent(8.0, 1), 3);
    assert_eq!(spent(0.0, 0), 1, "one run at least");
    assert_eq!(spent(f64::NAN, 1), 5, "no number is no limit");
}

#[test]
fn an_unknown_output_is_left_to_the_session() {
    assert_eq!(times(&backend(MemoryId::HOST), &Case { outputs: vec![], ..case() }).len(), 5);
}

#[test]
fn other_memory_is_read_before_each_run_and_does_not_count() {
    let (backend, read) = (backend(MemoryId::HOST), Rc::default());
    backend.model("product.onnx", product(&read, MemoryId::HOST));
    let mut flusher = CacheFlusher::load(&backend, Path::new("product.onnx"), Provider::CPU, &Silent).unwrap();
    let mut bench = PartitionBench::load(&backend, &request(Provider::CPU), &Silent).unwrap();
    let cold = Case { evict_bytes: (100 << 20) + 5, ..case() };
    let began = backend.clock().now();
    let runs = bench.case(&cold, Some(&mut flusher)).unwrap();
    assert_eq!(runs.times, [3, 4, 5, 6, 7].map(ms));
    assert_eq!(backend.clock().now() - began, ms(7 * 100 + 28), "seven sweeps of 100 MiB, and the runs");
    assert_eq!(read.borrow()[..7], [[16 << 20; 6].as_slice(), &[4 << 20]].concat());
    let reserved = backend.reserved();
    bench.case(&Case { evict_bytes: 10 << 20, ..case() }, Some(&mut flusher)).unwrap();
    assert!(backend.reserved() - reserved < 1 << 20, "what is there is used again");
    assert_eq!(read.borrow().last(), Some(&(10 << 20)));
}

#[test]
fn memory_that_is_not_read_any_more_is_given_back() {
    let (backend, read) = (backend(MemoryId::HOST), Rc::default());
    backend.model("product.onnx", product(&read, MemoryId::HOST));
    let mut flusher = CacheFlusher::load(&backend, Path::new("product.onnx"), Provider::CPU, &Silent).unwrap();
    let mut reserves = |mib: u64| {
        let before = backend.reserved();
        flusher.make_room(mib << 20).unwrap();
        (backend.reserved() - before) >> 20
    };
    assert_eq!([100, 100, 20, 100, 0, 1].map(&mut reserves), [112, 0, 0, 80, 0, 16]);
    flusher.flush(1 << 20).unwrap();
}

/// A run may return before its device has finished. Reading a few bytes of its output waits for it; the time of that read alone is subtracted.
#[test]
fn a_device_is_waited_for() {
    let backend = backend(GPU);
    backend.link(GPU, MemoryId::HOST, LinkCost { latency: ms(40), bytes_per_ms: 0.0 });
    let mut bench = PartitionBench::load(&backend, &request(Provider::WEBGPU), &Silent).unwrap();
    let before = backend.clock().now();
    let runs = bench.case(&case(), None).unwrap();
    assert_eq!(runs.times, [3, 4, 5, 6, 7].map(ms));
    assert_eq!(backend.clock().now() - before, ms(28 + 7 * 80), "two looks after each run");
}

/// A device may still read other memory after the call that started it has returned: no timed run starts before that is done.
#[test]
fn what_is_timed_does_not_wait_for_other_memory() {
    for told in [false, true] {
        let (backend, read) = (backend(GPU), Rc::default());
        backend.model("product.onnx", product(&read, GPU));
        if told {
            backend.queue(GPU)
        } else {
            backend.queue_untimed(GPU)
        }
        let mut flusher = CacheFlusher::load(&backend, Path::new("product.onnx"), Provider::WEBGPU, &Silent).unwrap();
        let mut bench = PartitionBench::load(&backend, &request(Provider::WEBGPU), &Silent).unwrap();
        let cold = Case { evict_bytes: 100 << 20, ..case() };
        let began = backend.clock().now();
        let runs = bench.case(&cold, Some(&mut flusher)).unwrap();
        assert_eq!(runs.times, [3, 4, 5, 6, 7].map(ms), "told: {told}");
        assert_eq!(backend.clock().now() - began, ms(7 * 100 + 28));
    }
}

#[test]
fn no_other_provider_is_taken() {
    let backend = backend(MemoryId::HOST);
    backend.without(Provider::WEBGPU);
    let error = PartitionBench::load(&backend, &request(Provider::WEBGPU), &Silent).err().unwrap();
    let EngineError::Load { partition, source, .. } = error else { panic!("{error}") };
    assert_eq!(partition, "block");
    assert!(source.to_string().contains("taken away"), "{source}");
}

#[test]
fn all_that_does_not_fit_is_said_at_once() {
    let mut wrong = case();
    wrong.inputs.remove(1);
    wrong.inputs[0].dtype = DType::Int64;
    wrong.inputs.push(Feed { name: "ghost".into(), dtype: DType::Int64, shape: vec![], fill: Fill::Ones });
    wrong.outputs[0].shape = vec![1];
    wrong.carried[0].present = "future".into();
    let mut bench = PartitionBench::load(&backend(MemoryId::HOST), &request(Provider::CPU), &Silent).unwrap();
    let error = bench.case(&wrong, None).unwrap_err();
    let EngineError::Case { problems, .. } = &error else { panic!("{error}") };
    let said = problems.join("\n");
    for part in ["input \"past\"", "\"x\" is float32", "no input \"ghost\"", "\"y\" is float32", "\"future\""] {
        assert!(said.contains(part), "{part} in {said}");
    }
    assert_eq!(problems.len(), 5, "{said}");
    assert_eq!(bench.case(&case(), None).unwrap().times.len(), 5, "the next case is another matter");
}

#[test]
fn a_state_of_its_own_is_not_shared() {
    let mut apart = Case { carried: vec![], ..case() };
    apart.outputs.push(OutputSpec { name: "present".into(), dtype: DType::Float32, shape: vec![1, 8] });
    let mut bench = PartitionBench::load(&backend(MemoryId::HOST), &request(Provider::CPU), &Silent).unwrap();
    let error = bench.case(&apart, None).unwrap_err();
    let cause = std::error::Error::source(&error).unwrap().to_string();
    assert!(cause.contains("do not share a buffer"), "the mock wants one buffer here: {cause}");
}
