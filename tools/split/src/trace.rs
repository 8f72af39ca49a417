//! `--trace FILE`: the simulated timeline of a prompt and some tokens, as Perfetto opens it.

use crate::error::SplitError;
use crate::place::Placement;
use crate::request::Request;
use hpp_partition::{Phase, simulate};
use hpp_schema::Timeline;
use std::path::Path;

/// Most tokens drawn after the prompt; they are all alike.
const MOST_TOKENS: u64 = 8;

/// Writes the timeline.
pub fn write(request: &Request, placement: &Placement, path: &Path) -> Result<(), SplitError> {
    let trace = timeline(request, placement).to_chrome_trace();
    hpp_io::write_file(path, trace.as_bytes())?;
    eprintln!("wrote {}: open it at https://ui.perfetto.dev", path.display());
    Ok(())
}

/// The prompt's passes, then tokens in the steady state, one after the other.
fn timeline(request: &Request, placement: &Placement) -> Timeline {
    let solution = &placement.solution;
    let problem = placement.problem(request);
    let of = |phase| simulate(&problem, &solution.choices, &solution.slots, phase);
    let (prefill, decode) = (of(Phase::Prefill), of(Phase::Decode));
    let (mut at_us, passes) = (prefill.ms * 1e3, request.problem.load.passes.len() as u64);
    let mut timeline = prefill.timeline;
    for token in 0..request.load.new_tokens.min(MOST_TOKENS) {
        let shifted = decode.timeline.spans.iter().map(|span| hpp_schema::Span {
            start_us: span.start_us + at_us,
            pass: passes + token,
            ..span.clone()
        });
        timeline.spans.extend(shifted);
        at_us += decode.ms * 1e3;
    }
    timeline
}
