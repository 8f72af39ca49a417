//! What of a token no partition bears: feeding, binding, reading the scores, choosing a token.
//!
//! A whole token is timed as `bench` times it, and what its partitions and copies took is taken off. Between two tokens other
//! memory is read, as the rest of a model's pass would.

use super::partition::{flusher, timing};
use super::{Answer, ProbeSession};
use crate::cli::RuntimeArgs;
use crate::console::{Console, Level};
use crate::error::ExecError;
use crate::machine::OrtBackend;
use crate::plan_file::PlanFile;
use crate::sampling::{SamplingError, greedy};
use crate::session::Session;
use hpp_schema::Provider;
use hpp_schema::probe::{PassProbe, Reply};
use std::time::{Duration, Instant};

/// The first tokens do not count: buffers grow, and code is read for the first time.
const WARMUP: u64 = 8;

/// Answers the request.
pub(super) fn run(session: &mut ProbeSession<'_>, probe: &PassProbe, reply: &mut Answer<'_>) -> Result<(), ExecError> {
    let plan = PlanFile::open(&probe.plan)?;
    super::super::needs_language_model(&plan.plan)?;
    let args = RuntimeArgs { library: session.library.clone(), context: Some(probe.tokens), ..RuntimeArgs::default() };
    let engine = session.machine.load(&plan.plan, &plan.dir, &args, &Console::new(Level::Quiet))?;
    let mut text = Session::new(engine, None, Default::default());
    let mut times = Vec::new();
    let mut token = 0;
    for number in 0..probe.tokens {
        if probe.evict_bytes > 0 {
            let flusher = flusher(session, Provider::Cpu)?;
            flusher.make_room(probe.evict_bytes)?;
            flusher.flush(probe.evict_bytes)?;
        }
        let before = elsewhere(&mut text);
        let started = Instant::now();
        text.feed(&[token])?;
        token = greedy(text.scores()).ok_or(SamplingError::NoCandidate { count: text.scores().len() })?;
        let whole = started.elapsed();
        let elsewhere = elsewhere(&mut text).saturating_sub(before);
        if number >= WARMUP.min(probe.tokens / 2) {
            times.push(whole.saturating_sub(elsewhere));
        }
    }
    reply(Reply::Pass { timing: timing(&times) })?;
    Ok(())
}

/// Time in partitions and copies so far.
fn elsewhere(text: &mut Session<OrtBackend>) -> Duration {
    let telemetry = text.engine().telemetry();
    let stages = telemetry.stages.iter().map(|stage| stage.prefill.time + stage.decode.time);
    stages.sum::<Duration>() + telemetry.copies.time
}
