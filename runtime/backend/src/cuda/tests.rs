//! Streams against a stand-in for the driver (`examples/fake_cuda.rs`) that does things as late, or as early, as events allow.
//! Each test runs itself again in a process of its own, which finds the stand-in where the driver would be.

use super::feeder::{Feeder, Feeding, Weight};
use super::streams::{Address, Copied, Streams};
use crate::raw::Fill;
use cudarc::driver::sys;
use hpp_engine::port::{Timing, TimingToken};
use std::collections::BTreeSet;
use std::ffi::c_void;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

const EAGER: &str = "HPP_FAKE_CUDA";

/// The stand-in's directory, made for this test: a library under the driver's name.
fn stand_in() -> tempfile::TempDir {
    let me = std::env::current_exe().unwrap();
    let target = me.ancestors().nth(2).unwrap();
    let built: PathBuf = [target.join("examples/libfake_cuda.so"), target.join("examples/libfake_cuda.dylib")]
        .into_iter()
        .find(|path| path.exists())
        .expect("the stand-in is built with all tests: cargo build -p hpp-backend --example fake_cuda");
    let dir = tempfile::tempdir().unwrap();
    let name = format!("{}cuda{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    std::fs::copy(built, dir.path().join(name)).unwrap();
    dir
}

/// Runs the test of this name in processes in which one side or the other is eager, or none.
fn with_stand_in(name: &str, test: impl FnOnce()) {
    if std::env::var_os(EAGER).is_some() {
        return test();
    }
    let dir = stand_in();
    for eager in ["copies", "compute", "none"] {
        let mut again = Command::new(std::env::current_exe().unwrap());
        again.args(["--exact", &format!("cuda::tests::{name}"), "--nocapture"]).env(EAGER, eager);
        again.env("LD_LIBRARY_PATH", dir.path()).env("DYLD_LIBRARY_PATH", dir.path());
        let ran = again.output().unwrap();
        let said = String::from_utf8_lossy(&ran.stderr).into_owned() + &String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.contains("1 passed"), "with {eager} eager:\n{said}");
    }
}

/// What a run does: it looks at a slot and writes down what is there.
struct Run {
    slot: *const u8,
    bytes: usize,
    seen: *mut Vec<u8>,
}

extern "C" fn look(run: *mut c_void) {
    // SAFETY: made by `begin_run`, which gave it away.
    let run = unsafe { Box::from_raw(run.cast::<Run>()) };
    // SAFETY: slot and list live until all runs are over.
    let (slot, seen) = unsafe { (std::slice::from_raw_parts(run.slot, run.bytes), &mut *run.seen) };
    let same = slot.iter().all(|byte| *byte == slot[0]);
    seen.push(if same { slot[0] } else { u8::MAX });
}

fn begin_run(streams: &Streams, slot: &[u8], seen: *mut Vec<u8>) -> TimingToken {
    let from = streams.mark().unwrap();
    let run = Box::new(Run { slot: slot.as_ptr(), bytes: slot.len(), seen });
    // SAFETY: the stream is alive and `look` takes what it is given.
    let status = unsafe { sys::cuLaunchHostFunc(streams.compute().cast(), Some(look), Box::into_raw(run).cast()) };
    status.result().unwrap();
    streams.since(from).unwrap()
}

/// A copy on its way into a slot.
enum Coming {
    Queued(Copied),
    Feeding(Feeding),
}

/// Weights of stage `n` are `SIZE` bytes of that number.
const SIZE: usize = 3000;
const HEAD: usize = 7;
const STAGES: usize = 5;
const SLOTS: usize = 2;
const PASSES: usize = 4;

/// As the engine streams: stages go through a ring of slots, weights of some lie in pinned memory and others are read.
#[test]
fn runs_find_their_weights_and_copies_overwrite_nothing_that_is_read() {
    with_stand_in("runs_find_their_weights_and_copies_overwrite_nothing_that_is_read", || {
        let streams = Arc::new(Streams::new(0).unwrap());
        let feeder = Feeder::new(Arc::clone(&streams)).unwrap();
        let pinned: Vec<Vec<u8>> = (0..STAGES).map(|stage| vec![stage as u8; SIZE]).collect();
        let mut staging = vec![0u8; 2 * SIZE];
        let halves = [staging.as_mut_ptr(), staging[SIZE..].as_mut_ptr()];
        let mut slots = vec![vec![u8::MAX; SIZE]; SLOTS];
        let addresses: Vec<*mut u8> = slots.iter_mut().map(|slot| slot.as_mut_ptr()).collect();
        let mut seen: Vec<u8> = Vec::new();
        let half = SIZE / 2;
        let begin = |number: usize| {
            let (stage, to) = (number % STAGES, addresses[number % SLOTS]);
            // SAFETY: half a slot.
            let ends = [to.cast::<c_void>(), unsafe { to.add(half) }.cast()];
            let there = |at: usize| Address { from: pinned[stage][at * half..].as_ptr(), to: ends[at], bytes: half };
            if stage.is_multiple_of(2) {
                // SAFETY: both sides live until all is over.
                return Coming::Queued(unsafe { streams.copy(streams.mark().unwrap(), [there(0), there(1)]) }.unwrap());
            }
            // As direct reads do: what is wanted lies within what is read.
            let fill: Fill = Arc::new(move |bytes: &mut [u8]| {
                bytes.fill(u8::MAX);
                bytes[HEAD..HEAD + half].fill(stage as u8);
                Ok(())
            });
            let read = |at: usize| Weight::Filled {
                fill: Arc::clone(&fill),
                room: HEAD + half + 5,
                within: HEAD..HEAD + half,
                to: ends[at],
            };
            let weights = if stage == 1 { vec![read(0), read(1)] } else { vec![Weight::There(there(0)), read(1)] };
            Coming::Feeding(feeder.begin(weights, halves, vec![]).unwrap())
        };
        let mut coming: Vec<Coming> = (0..SLOTS).map(&begin).collect();
        let (mut given, mut told, mut lengths) = (BTreeSet::new(), BTreeSet::new(), 0);
        let list: *mut Vec<u8> = &mut seen;
        for number in 0..PASSES * STAGES {
            let copied = match coming.remove(0) {
                Coming::Queued(copied) => copied,
                Coming::Feeding(feeding) => feeding.wait().unwrap(),
            };
            let arrived = streams.arrive(copied).unwrap();
            let Timing::Pending(copy) = arrived.copy else { panic!("{arrived:?}") };
            given.extend([copy.0, arrived.stall.unwrap().0]);
            given.insert(begin_run(&streams, &slots[number % SLOTS], list).0);
            if number + SLOTS < PASSES * STAGES {
                coming.push(begin(number + SLOTS));
            }
            if (number + 1) % STAGES == 0 {
                let tell = &mut |ticket: TimingToken, took: hpp_engine::port::Interval| {
                    lengths += usize::from(took.end >= took.start);
                    assert!(told.insert(ticket.0));
                };
                streams.report(tell).unwrap();
            }
        }
        let expected: Vec<u8> = (0..PASSES * STAGES).map(|number| (number % STAGES) as u8).collect();
        assert_eq!(seen, expected);
        assert_eq!((told, lengths), (given.clone(), given.len()));
        streams.wait().unwrap();
    });
}

/// A file that cannot be read is an error where its weights are waited for, and what comes later is copied all the same.
#[test]
fn what_cannot_be_read_is_an_error_when_it_is_waited_for() {
    with_stand_in("what_cannot_be_read_is_an_error_when_it_is_waited_for", || {
        let streams = Arc::new(Streams::new(0).unwrap());
        let feeder = Feeder::new(Arc::clone(&streams)).unwrap();
        let (mut staging, mut slot) = (vec![0u8; 2 * SIZE], vec![0u8; SIZE]);
        let halves = [staging.as_mut_ptr(), staging[SIZE..].as_mut_ptr()];
        let to = slot.as_mut_ptr().cast();
        let weight = |fill: Fill| Weight::Filled { fill, room: SIZE, within: 0..SIZE, to };
        let begin = |fill: Fill| feeder.begin(vec![weight(fill)], halves, vec![]).unwrap();
        let error = begin(Arc::new(|_| Err("it was changed".into()))).wait().err().unwrap();
        assert!(error.to_string().contains("it was changed"), "{error}");
        drop(begin(Arc::new(|_| Err("nobody waits".into()))));
        let ones = begin(Arc::new(|bytes| {
            bytes.fill(1);
            Ok(())
        }));
        streams.arrive(ones.wait().unwrap()).unwrap();
        streams.wait().unwrap();
        assert!(slot.iter().all(|byte| *byte == 1));
    });
}
