//! How many sequences an engine has room for within the plan's host memory.

use hpp_engine::mock::{Chain, ChainPart, MockBackend};
use hpp_engine::{Engine, EngineOptions, Silent};
use hpp_schema::ByteSize;
use std::rc::Rc;
use std::time::Duration;

/// The resident set of the process once sessions are loaded, bytes.
const RESIDENT: u64 = 50 << 20;
/// What the engine leaves free, bytes.
const RESERVE: u64 = 4 << 20;

/// Sequences that fit, of 100, if the host memory holds the states of `room` sequences.
fn fitting(room: u64, reserve: impl Fn(u64) -> EngineOptions) -> u64 {
    let part = || ChainPart { states: 3, ..ChainPart::new(None, Rc::new(|_| Duration::ZERO)) };
    let chain = Chain { parts: vec![part(), part()], ..Chain::default() };
    let (dir, backend) = (tempfile::tempdir().unwrap(), MockBackend::new());
    let mut plan = chain.set_up(dir.path(), &backend).unwrap();
    let engine = Engine::load(&plan, dir.path(), &backend, EngineOptions::default(), &Silent).unwrap();
    let states = engine.host_state_bytes();
    assert!(states > 0);
    backend.set_resident(RESIDENT);
    let workspace = plan.partitions.iter().map(|partition| partition.bytes.workspace.0).max().unwrap();
    plan.budgets.ram = Some(ByteSize(RESIDENT + RESERVE + workspace + room * states));
    let options = EngineOptions { sequences: Some(100), ..reserve(states) };
    Engine::load(&plan, dir.path(), &backend, options, &Silent).unwrap().max_sequences()
}

#[test]
fn what_the_caller_takes_is_reserved_for_the_sequences_that_fit_not_for_those_wanted() {
    let options =
        |reserved, reserved_per_sequence| EngineOptions { reserved, reserved_per_sequence, ..EngineOptions::default() };
    assert_eq!(fitting(12, |_| options(0, 0)), 12);
    assert_eq!(fitting(12, |states| options(0, states)), 6);
    assert_eq!(fitting(12, |states| options(0, 2 * states)), 4);
    assert_eq!(fitting(12, |states| options(6 * states, states)), 3);
    assert_eq!(fitting(12, |states| options(20 * states, states)), 1, "one always runs");
    assert_eq!(fitting(500, |states| options(0, states)), 100);
}
