//! The overhead of a token outside its partitions: setting inputs, binding, reading logits, sampling.
//!
//! Times each token as `bench` does and subtracts the time of its partitions and copies. Between two tokens it reads other memory,
//! because the rest of a model's pass would evict the caches as well.

use super::partition::{flusher, timing};
use super::{ProbeSession, Replies};
use crate::cli::RuntimeArgs;
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::runtime::OrtBackend;
use hpp_generate::sampling::greedy;
use hpp_generate::{ModelInputs, PlanFile, SingleSequence, check_language_model};
use hpp_schema::Provider;
use hpp_schema::probe::{PassProbe, Reply};
use std::time::{Duration, Instant};

/// Tokens at the start that are not timed: buffers grow, and code is loaded.
const WARMUP: u64 = 8;

/// Answers the request.
pub(super) fn run(
    session: &mut ProbeSession<'_>,
    probe: &PassProbe,
    replies: &mut Replies<'_>,
) -> Result<(), ExecError> {
    let plan = PlanFile::open(&probe.plan)?;
    check_language_model(&plan.plan)?;
    let args = RuntimeArgs { library: session.library.clone(), context: Some(probe.tokens), ..RuntimeArgs::default() };
    let engine = session.runtime.load(&plan.plan, &plan.dir, &args, &Console::new(Level::Quiet))?;
    let mut sequence = SingleSequence::new(engine, ModelInputs::default());
    let mut times = Vec::new();
    let mut token = 0;
    for number in 0..probe.tokens {
        if probe.evict_bytes > 0 {
            let flusher = flusher(session, Provider::CPU)?;
            flusher.make_room(probe.evict_bytes)?;
            flusher.flush(probe.evict_bytes)?;
        }
        let before = partitions_and_copies(&mut sequence);
        let started = Instant::now();
        sequence.feed(&[token])?;
        token = greedy(sequence.logits())?;
        let total = started.elapsed();
        let inside = partitions_and_copies(&mut sequence).saturating_sub(before);
        if number >= WARMUP.min(probe.tokens / 2) {
            times.push(total.saturating_sub(inside));
        }
    }
    replies(Reply::Pass { timing: timing(&times) })?;
    Ok(())
}

/// Time spent in partitions and copies so far.
fn partitions_and_copies(sequence: &mut SingleSequence<OrtBackend>) -> Duration {
    let telemetry = sequence.engine().telemetry();
    let stages = telemetry.stages.iter().map(|stage| stage.prefill.time + stage.decode.time);
    stages.sum::<Duration>() + telemetry.copies.time
}
