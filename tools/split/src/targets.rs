//! `--at-least` and `--first-token-within`: a plan that keeps them, or what the best one gives and what would be needed.

use crate::cli::SplitArgs;
use crate::complaint::{Complaint, Complaints};
use crate::error::SplitError;
use crate::place::{Placement, place};
use crate::predict::Expected;
use crate::request::{Request, default_margin};
use hpp_partition::{Objective, plan};
use hpp_schema::ByteSize;

/// What a person wants at least.
#[derive(Clone, Copy, Debug)]
struct Targets {
    tokens_per_s: Option<f64>,
    first_token_ms: Option<f64>,
}

impl Targets {
    fn kept_by(self, expected: Expected) -> bool {
        self.tokens_per_s.is_none_or(|least| expected.tokens_per_s() >= least)
            && self.first_token_ms.is_none_or(|most| expected.prefill_ms <= most)
    }
}

/// The placement for the objective if it keeps the targets, else one for another objective that does, else a refusal
/// with numbers.
pub fn keep(request: &mut Request, args: &SplitArgs, placement: Placement) -> Result<Placement, SplitError> {
    let planning = &args.planning;
    let targets = Targets { tokens_per_s: planning.at_least, first_token_ms: planning.first_token_within };
    let mut tried = vec![(request.options.objective, Expected::of(&placement.solution))];
    if targets.kept_by(tried[0].1) {
        return Ok(placement);
    }
    if placement.by_hand {
        return Err(refusal(request, targets, &tried).into());
    }
    for objective in [Objective::Mixed, Objective::Decode, Objective::Prefill] {
        if tried.iter().any(|(known, _)| *known == objective) {
            continue;
        }
        request.options.objective = objective;
        let placement = place(request, args)?;
        let expected = Expected::of(&placement.solution);
        if targets.kept_by(expected) {
            eprintln!(
                "note: planned for {} instead of {}: that keeps what was asked for",
                name(objective),
                name(tried[0].0)
            );
            return Ok(placement);
        }
        tried.push((objective, expected));
    }
    Err(refusal(request, targets, &tried).into())
}

fn refusal(request: &Request, targets: Targets, tried: &[(Objective, Expected)]) -> Complaints {
    let mut found = Complaints::default();
    let fastest = tried.iter().map(|(_, expected)| expected.tokens_per_s()).fold(0.0, f64::max);
    let first = tried.iter().map(|(_, expected)| expected.prefill_ms).fold(f64::INFINITY, f64::min);
    let (too_slow, too_late) =
        (targets.tokens_per_s.filter(|least| fastest < *least), targets.first_token_ms.filter(|most| first > *most));
    let mut complain = |what: String, alone: Targets, objective| {
        let needed = needed(request, alone, objective);
        found.0.push(Complaint { message: format!("{what}; {needed}"), hint: Some(HINT) });
    };
    if let Some(least) = too_slow {
        let what =
            format!("--at-least {least} tokens/s is out of reach: the fastest plan is expected to give {fastest:.2}");
        complain(what, Targets { first_token_ms: None, ..targets }, Objective::Decode);
    }
    if let Some(most) = too_late {
        let what =
            format!("--first-token-within {most} ms is out of reach: the earliest is expected after {first:.0} ms");
        complain(what, Targets { tokens_per_s: None, ..targets }, Objective::Prefill);
    }
    if too_slow.is_none() && too_late.is_none() {
        let what = format!(
            "each target can be kept, but no plan was found that keeps both ({fastest:.2} tokens/s, {first:.0} ms)"
        );
        complain(what, targets, Objective::Mixed);
    }
    found
}

const HINT: &str = "ask for less, give more memory with --vram, or lower --prompt-tokens or --context";

/// The smallest VRAM budget under which a plan keeps these targets, or that there is none.
fn needed(request: &Request, targets: Targets, objective: Objective) -> String {
    let problem = &request.problem;
    if problem.gpus.is_empty() {
        return "no GPU is planned for".to_owned();
    }
    let whole: u64 = problem.blocks.iter().flat_map(|block| &block.weights).map(|(_, bytes)| bytes).sum();
    let rest: u64 = problem.blocks.iter().map(|block| block.kv_bytes + block.workspace_bytes).sum();
    let all = whole.saturating_add(rest).saturating_mul(2).max(1 << 30);
    let least = (1 << 20, all);
    match (keeps(request, targets, objective, all), smallest(least, |vram| keeps(request, targets, objective, vram))) {
        (true, vram) => format!("{} of VRAM on each GPU would do", ByteSize(vram).human()),
        (false, _) => "no VRAM budget would do on this machine".to_owned(),
    }
}

fn keeps(request: &Request, targets: Targets, objective: Objective, vram: u64) -> bool {
    let mut problem = request.problem.clone();
    problem.budget.vram.fill(vram);
    problem.budget.margin = default_margin(&problem.budget.vram);
    let options = hpp_partition::Options { objective, ..request.options };
    plan(&problem, &options).is_ok_and(|solution| targets.kept_by(Expected::of(&solution)))
}

/// The smallest number in a range that will do, to one part in a hundred, where the largest does.
fn smallest((mut low, mut high): (u64, u64), will_do: impl Fn(u64) -> bool) -> u64 {
    while high - low > high / 100 {
        let middle = low + (high - low) / 2;
        if will_do(middle) {
            high = middle;
        } else {
            low = middle;
        }
    }
    high
}

fn name(objective: Objective) -> &'static str {
    match objective {
        Objective::Decode => "decode",
        Objective::Prefill => "prefill",
        Objective::Mixed => "mixed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_that_will_do_is_close() {
        let found = smallest((0, 1 << 40), |n| n >= 123_456_789);
        assert!((123_456_789..123_456_789 + 123_456_789 / 50).contains(&found), "{found}");
    }
}
