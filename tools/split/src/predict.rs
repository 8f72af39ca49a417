//! What is expected of a placement, in numbers that do not pretend.

use crate::place::Placement;
use crate::request::Request;
use hpp_partition::{Objective, Phase, Solution, bottleneck};
use hpp_schema::{Achieved, ObjectiveKind, Predictions};

/// Milliseconds expected of a placement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// One more token.
    pub decode_ms: f64,
    /// To the first token.
    pub prefill_ms: f64,
}

impl Expected {
    /// Of a placement.
    pub fn of(solution: &Solution) -> Self {
        Expected { decode_ms: solution.decode_ms, prefill_ms: solution.prefill_ms }
    }

    /// What the objective makes of it, milliseconds.
    pub fn objective_ms(self, objective: Objective, new_tokens: u64) -> f64 {
        match objective {
            Objective::Decode => self.decode_ms,
            Objective::Prefill => self.prefill_ms,
            Objective::Mixed => self.prefill_ms + new_tokens as f64 * self.decode_ms,
        }
    }

    /// Tokens a second while decoding.
    pub fn tokens_per_s(self) -> f64 {
        if self.decode_ms > 0.0 { 1e3 / self.decode_ms } else { 0.0 }
    }
}

/// As a plan says it, to four significant digits.
pub fn predictions(request: &Request, placement: &Placement, source: String) -> Predictions {
    let (expected, objective) = (Expected::of(&placement.solution), request.options.objective);
    let load = request.load;
    let achieved = || Achieved {
        kind: match objective {
            Objective::Decode => ObjectiveKind::Decode,
            Objective::Prefill => ObjectiveKind::Prefill,
            Objective::Mixed => ObjectiveKind::Mixed,
        },
        ms: round(expected.objective_ms(objective, load.new_tokens)),
        bound_ms: round(placement.solution.bound_ms),
        proven: placement.solution.proven,
    };
    Predictions {
        source,
        decode_ms: round(expected.decode_ms),
        time_to_first_token_ms: round(expected.prefill_ms),
        prompt_tokens: load.prompt,
        decode_tokens_per_second: round(expected.tokens_per_s()),
        decode_context: load.decode_context(),
        new_tokens: load.new_tokens,
        limit: Some(limits(request, placement)),
        objective: (!placement.by_hand).then(achieved),
    }
}

/// What is busy longest while decoding and while the prompt is taken in.
fn limits(request: &Request, placement: &Placement) -> String {
    let problem = placement.problem(request);
    let of = |phase| bottleneck(&problem, &placement.solution, phase);
    match (of(Phase::Decode), of(Phase::Prefill)) {
        (decode, prefill) if decode == prefill => decode.to_string(),
        (decode, prefill) => format!("{decode} while decoding, {prefill} in the prompt"),
    }
}

/// Four significant digits: more would pretend.
pub fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}
