//! `--trace FILE`: writes the simulated timeline of a prompt and some tokens in the Chrome trace format, which Perfetto
//! opens.

use crate::error::SplitError;
use crate::partitioning::Partitioning;
use crate::request::PlanningRequest;
use hpp_partition::{Phase, simulate};
use hpp_schema::{TRACE_START, Timeline};
use std::path::Path;

/// Upper limit on the tokens drawn after the prompt; all take the same time.
const MAX_TOKENS: u64 = 8;

/// Writes the timeline.
pub fn write(request: &PlanningRequest, partitioning: &Partitioning, path: &Path) -> Result<(), SplitError> {
    let trace = timeline(request, partitioning).to_chrome_trace();
    hpp_io::write_file_as(path, trace.as_bytes(), TRACE_START.as_bytes())?;
    tell!("wrote {}: open it at https://ui.perfetto.dev", path.display());
    Ok(())
}

/// The passes of the prompt, then tokens in the steady state.
fn timeline(request: &PlanningRequest, partitioning: &Partitioning) -> Timeline {
    let solution = &partitioning.solution;
    let problem = partitioning.problem(request);
    let [prefill, decode] =
        [Phase::Prefill, Phase::Decode].map(|phase| simulate(&problem, &solution.placements, &solution.slots, phase));
    let passes = request.problem.load.passes.len() as u64;
    let mut start_us = prefill.ms * 1e3;
    let mut timeline = prefill.timeline;
    for token in 0..request.problem.load.decoded_tokens().min(MAX_TOKENS) {
        let shifted = decode.timeline.spans.iter().map(|span| hpp_schema::Span {
            start_us: span.start_us + start_us,
            pass: passes + token,
            ..span.clone()
        });
        timeline.spans.extend(shifted);
        start_us += decode.ms * 1e3;
    }
    timeline
}
