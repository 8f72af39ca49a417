//! Tests of streams with a fake driver (`examples/fake_cuda.rs`) that executes work as late, or as early, as events allow.
//! Each test runs itself again in child processes that load the fake driver in place of the real one.

use super::feeder::{FeedWeight, Feeder, PendingFeed};
use super::streams::{CopyRange, CopyStream, QueuedCopies, Streams};
use crate::raw::ReadWeight;
use cudarc::driver::sys;
use hpp_engine::port::{Timing, TimingToken};
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

const EAGER: &str = "HPP_FAKE_CUDA";

/// A directory that holds the fake driver under the driver's file name.
fn fake_driver() -> tempfile::TempDir {
    let me = std::env::current_exe().unwrap();
    let target = me.ancestors().nth(2).unwrap();
    let built: PathBuf = [target.join("examples/libfake_cuda.so"), target.join("examples/libfake_cuda.dylib")]
        .into_iter()
        .find(|path| path.exists())
        .expect("the fake driver is built with all tests: cargo build -p hpp-backend --example fake_cuda");
    let dir = tempfile::tempdir().unwrap();
    let name = format!("{}cuda{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::fs::copy(built, dir.path().join(name)).unwrap();
    dir
}

/// Runs the named test in three child processes: with eager copies, with eager computation, and with neither.
fn with_fake_driver(name: &str, test: impl FnOnce()) {
    if std::env::var_os(EAGER).is_some() {
        return test();
    }
    let dir = fake_driver();
    for eager in ["copies", "compute", "none"] {
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", &format!("cuda::tests::{name}"), "--nocapture"]).env(EAGER, eager);
        again.env("LD_LIBRARY_PATH", dir.path()).env("DYLD_LIBRARY_PATH", dir.path());
        let ran = again.output().unwrap();
        let output = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && output.contains("1 passed"), "with {eager} eager:\n{output}");
    }
}

/// A fake run: it records the contents of a slot at the time it executes.
struct Run {
    slot: *const u8,
    bytes: usize,
    seen: *mut Vec<u8>,
}

extern "C" fn record_slot(run: *mut c_void) {
    // SAFETY: `begin_run` leaked this box for this call.
    let run = unsafe { Box::from_raw(run.cast::<Run>()) };
    // SAFETY: slot and list live until all runs have finished.
    let (slot, seen) = unsafe { (std::slice::from_raw_parts(run.slot, run.bytes), &mut *run.seen) };
    let same = slot.iter().all(|byte| *byte == slot[0]);
    seen.push(if same { slot[0] } else { u8::MAX });
}

fn begin_run(streams: &Streams, slot: &[u8], seen: *mut Vec<u8>) -> TimingToken {
    let start = streams.record_compute().unwrap();
    let run = Box::new(Run { slot: slot.as_ptr(), bytes: slot.len(), seen });
    let data = Box::into_raw(run).cast();
    // SAFETY: the stream is alive and `record_slot` takes ownership of `data`.
    let status = unsafe { sys::cuLaunchHostFunc(streams.compute().cast(), Some(record_slot), data) };
    status.result().unwrap();
    streams.timing_since(start).unwrap()
}

/// The upload of a slot's weights.
enum Upload {
    Queued(QueuedCopies),
    Feeding(PendingFeed),
}

/// The weights of stage `n` are `SIZE` bytes of value `n`.
const SIZE: usize = 3000;
/// Bytes that a direct read returns before the weight.
const LEAD: usize = 7;
const STAGES: usize = 5;
const SLOTS: usize = 2;
const PASSES: usize = 4;

/// Stages go through a ring of slots as in the engine; some weights are in pinned memory, others are read from files.
#[test]
fn runs_see_their_weights_and_copies_overwrite_no_slot_in_use() {
    with_fake_driver("runs_see_their_weights_and_copies_overwrite_no_slot_in_use", || {
        let streams = Arc::new(Streams::new(0).unwrap());
        let feeder = Feeder::new(Arc::clone(&streams), CopyStream::Weights).unwrap();
        let pinned: Vec<Vec<u8>> = (0..STAGES).map(|stage| vec![stage as u8; SIZE]).collect();
        let mut staging = vec![0u8; 2 * SIZE];
        let halves = [staging.as_mut_ptr(), staging[SIZE..].as_mut_ptr()];
        let mut slots = vec![vec![u8::MAX; SIZE]; SLOTS];
        let addresses: Vec<*mut u8> = slots.iter_mut().map(|slot| slot.as_mut_ptr()).collect();
        let mut seen: Vec<u8> = Vec::new();
        let half = SIZE / 2;
        let begin = |number: usize| {
            let (stage, to) = (number % STAGES, addresses[number % SLOTS]);
            // SAFETY: the middle of a slot.
            let targets = [to.cast::<c_void>(), unsafe { to.add(half) }.cast()];
            let copy =
                |at: usize| CopyRange { from: pinned[stage][at * half..].as_ptr(), to: targets[at], bytes: half };
            if stage.is_multiple_of(2) {
                let after = streams.record_compute().unwrap();
                // SAFETY: sources and targets live until all copies have finished.
                return Upload::Queued(unsafe { streams.copy(after, [copy(0), copy(1)]) }.unwrap());
            }
            // As in direct reads, the weight is a part of the bytes that are read.
            let read: ReadWeight = Arc::new(move |bytes: &mut [u8]| {
                bytes.fill(u8::MAX);
                bytes[LEAD..LEAD + half].fill(stage as u8);
                Ok(())
            });
            let from_file = |at: usize| FeedWeight::Read {
                read: Arc::clone(&read),
                length: LEAD + half + 5,
                weight: LEAD..LEAD + half,
                to: targets[at],
            };
            let weights = match stage {
                1 => vec![from_file(0), from_file(1)],
                _ => vec![FeedWeight::Pinned(copy(0)), from_file(1)],
            };
            Upload::Feeding(feeder.begin(streams.record_compute().unwrap(), weights, halves, vec![]))
        };
        let mut uploads: Vec<Upload> = (0..SLOTS).map(&begin).collect();
        let (mut tokens, mut reported, mut valid) = (BTreeSet::new(), BTreeSet::new(), 0);
        let list: *mut Vec<u8> = &mut seen;
        for number in 0..PASSES * STAGES {
            let queued = match uploads.remove(0) {
                Upload::Queued(queued) => queued,
                Upload::Feeding(feed) => feed.wait().unwrap(),
            };
            let uploaded = streams.order_runs_after(queued).unwrap();
            let Timing::Pending(copy) = uploaded.copy else { panic!("{uploaded:?}") };
            tokens.extend([copy.0, uploaded.stall.unwrap().0]);
            tokens.insert(begin_run(&streams, &slots[number % SLOTS], list).0);
            if number + SLOTS < PASSES * STAGES {
                uploads.push(begin(number + SLOTS));
            }
            if (number + 1) % STAGES == 0 {
                let report = &mut |token: TimingToken, interval: hpp_engine::port::Interval| {
                    valid += usize::from(interval.end >= interval.start);
                    assert!(reported.insert(token.0));
                };
                streams.report(report).unwrap();
            }
        }
        let expected: Vec<u8> = (0..PASSES * STAGES).map(|number| (number % STAGES) as u8).collect();
        assert_eq!(seen, expected);
        assert_eq!((reported, valid), (tokens.clone(), tokens.len()));
        streams.wait().unwrap();
    });
}

/// States go from host memory through two sets of buffers, used in turn, as in the engine. The next states are copied once a run is
/// enqueued, and the host waits for a run before the buffers of this run are copied to again. Once the host has waited for an upload, its
/// source may change.
#[test]
fn runs_see_states_that_were_copied_ahead() {
    with_fake_driver("runs_see_states_that_were_copied_ahead", || {
        let streams = Arc::new(Streams::new(0).unwrap());
        let feeder = Feeder::new(Arc::clone(&streams), CopyStream::States).unwrap();
        let piece = SIZE / 3 - 1;
        let mut staging = vec![0u8; 2 * piece];
        let halves = [staging.as_mut_ptr(), staging[piece..].as_mut_ptr()];
        let mut sets = vec![vec![u8::MAX; SIZE]; 2];
        let targets: Vec<*mut c_void> = sets.iter_mut().map(|set| set.as_mut_ptr().cast()).collect();
        let mut home = vec![0u8; SIZE];
        let source = home.as_mut_ptr();
        let mut seen: Vec<u8> = Vec::new();
        let list: *mut Vec<u8> = &mut seen;
        let begin = |number: usize| {
            // SAFETY: nothing else uses the source now: the upload before was waited for.
            unsafe { std::ptr::write_bytes(source, number as u8, SIZE) };
            let range = CopyRange { from: source, to: targets[number % 2], bytes: SIZE };
            let after = streams.record_copies(CopyStream::States).unwrap();
            feeder.begin(after, vec![FeedWeight::Host { range, piece }], halves, vec![])
        };
        let mut ahead = begin(0);
        for number in 0..6 {
            streams.order_runs_after(ahead.wait().unwrap()).unwrap();
            begin_run(&streams, &sets[number % 2], list);
            ahead = begin(number + 1);
            // The copy back.
            streams.wait_for_runs().unwrap();
        }
        drop(ahead);
        streams.wait().unwrap();
        assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    });
}

/// A job with larger halves of the same staging memory waits until all that the job before put there is copied.
#[test]
fn halves_of_another_size_overwrite_nothing_that_is_not_copied() {
    with_fake_driver("halves_of_another_size_overwrite_nothing_that_is_not_copied", || {
        let streams = Arc::new(Streams::new(0).unwrap());
        let feeder = Feeder::new(Arc::clone(&streams), CopyStream::Weights).unwrap();
        let mut staging = vec![0u8; 4 * SIZE];
        let first = staging.as_mut_ptr();
        // SAFETY: all of them lie in the staging memory.
        let [second, third] = [1, 2].map(|at| unsafe { first.add(at * SIZE) });
        let mut slots = vec![0u8; 4 * SIZE];
        let to = |at: usize| slots[at * SIZE..].as_ptr().cast_mut().cast::<c_void>();
        let weight = |value: u8, length: usize, to: *mut c_void| {
            let read: ReadWeight = Arc::new(move |bytes: &mut [u8]| {
                bytes.fill(value);
                Ok(())
            });
            FeedWeight::Read { read, length, weight: 0..length, to }
        };
        let after = || streams.record_compute().unwrap();
        let small = vec![weight(1, SIZE, to(0)), weight(2, SIZE, to(1))];
        let small = feeder.begin(after(), small, [first, second], vec![]).wait().unwrap();
        let large = feeder.begin(after(), vec![weight(3, 2 * SIZE, to(2))], [first, third], vec![]).wait().unwrap();
        for queued in [small, large] {
            streams.order_runs_after(queued).unwrap();
        }
        streams.wait().unwrap();
        let _ = &mut slots;
        for (slot, value) in slots.chunks(SIZE).zip([1, 2, 3, 3]) {
            assert!(slot.iter().all(|byte| *byte == value), "{value}");
        }
    });
}

/// Zeros are written after the runs that were enqueued before, and are there when the call returns.
#[test]
fn memory_is_zeroed_after_earlier_runs() {
    with_fake_driver("memory_is_zeroed_after_earlier_runs", || {
        let streams = Streams::new(0).unwrap();
        let (mut memory, mut seen) = (vec![7u8; SIZE], Vec::new());
        let to = memory.as_mut_ptr();
        begin_run(&streams, &memory, &mut seen);
        // SAFETY: `memory` has that many bytes.
        unsafe { streams.zero(to.cast(), SIZE - 1) }.unwrap();
        assert_eq!(seen, [7]);
        assert!(memory[..SIZE - 1].iter().all(|byte| *byte == 0) && memory[SIZE - 1] == 7);
    });
}

/// An unreadable file is an error when its upload is waited for; later uploads succeed.
#[test]
fn a_failed_read_is_an_error_of_its_upload_only() {
    with_fake_driver("a_failed_read_is_an_error_of_its_upload_only", || {
        let streams = Arc::new(Streams::new(0).unwrap());
        let feeder = Feeder::new(Arc::clone(&streams), CopyStream::Weights).unwrap();
        let (mut staging, mut slot) = (vec![0u8; 2 * SIZE], vec![0u8; SIZE]);
        let halves = [staging.as_mut_ptr(), staging[SIZE..].as_mut_ptr()];
        let to = slot.as_mut_ptr().cast();
        let weight = |read: ReadWeight| FeedWeight::Read { read, length: SIZE, weight: 0..SIZE, to };
        let begin =
            |read: ReadWeight| feeder.begin(streams.record_compute().unwrap(), vec![weight(read)], halves, vec![]);
        let error = begin(Arc::new(|_| Err("it was changed".into()))).wait().err().unwrap();
        assert!(error.to_string().contains("it was changed"), "{error}");
        drop(begin(Arc::new(|_| Err("dropped without a wait".into()))));
        let ones = begin(Arc::new(|bytes| {
            bytes.fill(1);
            Ok(())
        }));
        streams.order_runs_after(ones.wait().unwrap()).unwrap();
        streams.wait().unwrap();
        assert!(slot.iter().all(|byte| *byte == 1));
    });
}
