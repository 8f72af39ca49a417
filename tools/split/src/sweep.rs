//! `--sweep-vram`: plans for each VRAM budget of a range and prints the predicted speeds as a table with bars, or as
//! JSON.

use crate::amount::{ESTIMATED, MEASURED, digits, time};
use crate::choose::PlanInputs;
use crate::cli::VramRange;
use crate::error::SplitError;
use crate::predicted::round;
use crate::print::print_json;
use crate::request::PlanningRequest;
use crate::table::table;
use hpp_io::print_line;
use hpp_partition::{BlockPlacement, Placement, Solution};
use hpp_schema::{ByteSize, Predictions};
use serde::Serialize;

/// Width of the longest bar, characters.
const BAR: f64 = 24.0;

/// The result for one budget.
#[derive(Debug, Serialize)]
struct Point {
    /// Bytes on each GPU.
    vram: u64,
    /// Predictions, if a plan fits.
    #[serde(flatten)]
    plan: Option<Expectation>,
    /// Why no plan fits.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
struct Expectation {
    tokens_per_s: f64,
    decode_ms: f64,
    time_to_first_token_ms: f64,
    objective_ms: f64,
    proven: bool,
    on_gpus: usize,
    streamed: usize,
}

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Sweep<'a> {
    source: &'a str,
    prompt_tokens: u64,
    new_tokens: u64,
    decode_context: u64,
    context: u64,
    points: &'a [Point],
}

/// Plans for each budget, as `hpp-split` would with this `--vram`, and prints the results. `first` is the request without budgets.
pub fn run(inputs: &PlanInputs, first: &PlanningRequest, range: VramRange, source: &str) -> Result<(), SplitError> {
    if inputs.args.planning.explain {
        tell!("note: --explain has no effect: --sweep-vram writes no plan");
    }
    if inputs.args.planning.trace.is_some() {
        tell!("note: --trace has no effect: --sweep-vram writes no plan");
    }
    let gpus = first.problem.gpus.len();
    let budgets = range.points();
    // A budget beyond the machine's is an error: it is known before planning, which may take minutes.
    if let Some(largest) = budgets.iter().copied().max() {
        inputs.with_memory(vec![largest; gpus], None, |inputs| inputs.request(inputs.limits()))?;
    }
    let points = budgets.into_iter().map(|vram| point(inputs, gpus, vram));
    let points = points.collect::<Result<Vec<Point>, SplitError>>()?;
    let scenario = first.scenario;
    if inputs.args.json {
        let sweep = Sweep {
            source,
            prompt_tokens: scenario.prompt,
            new_tokens: scenario.new_tokens,
            decode_context: scenario.decode_context(),
            context: scenario.context,
            points: &points,
        };
        print_json(&sweep)?;
    } else {
        print_line(&text(&points, first, source))?;
    }
    Ok(())
}

fn point(inputs: &PlanInputs, gpus: usize, vram: u64) -> Result<Point, SplitError> {
    match inputs.with_memory(vec![vram; gpus], None, |inputs| inputs.choose()) {
        Ok(chosen) => Ok(Point { vram, plan: Some(expectation(&chosen.partitioning.solution)), refused: None }),
        Err(SplitError::OverBudget { source, bytes, .. }) => {
            let refused = format!("{} needs {}", source.device, ByteSize(bytes).human_rounded_up());
            Ok(Point { vram, plan: None, refused: Some(refused) })
        }
        Err(error) => Err(error),
    }
}

fn expectation(solution: &Solution) -> Expectation {
    let [on_gpus, streamed] = blocks_on_gpus(&solution.placements);
    Expectation {
        tokens_per_s: round(1e3 / solution.decode_ms),
        decode_ms: round(solution.decode_ms),
        time_to_first_token_ms: round(solution.prefill_ms),
        objective_ms: round(solution.objective_ms),
        proven: solution.proven,
        on_gpus,
        streamed,
    }
}

/// Blocks whose weights stay on GPUs, and blocks that are streamed there for decoding or only for the prompt.
fn blocks_on_gpus(placements: &[BlockPlacement]) -> [usize; 2] {
    let is_streamed = |placement: &BlockPlacement| {
        [placement.prefill, placement.decode].iter().any(|place| matches!(place, Placement::Streamed(_)))
    };
    let is_resident =
        |placement: &BlockPlacement| !is_streamed(placement) && matches!(placement.decode, Placement::Resident(_));
    let count = |selects: &dyn Fn(&BlockPlacement) -> bool| placements.iter().filter(|one| selects(one)).count();
    [count(&is_resident), count(&is_streamed)]
}

fn text(points: &[Point], request: &PlanningRequest, source: &str) -> String {
    let max =
        |value: fn(&Expectation) -> f64| points.iter().filter_map(|p| p.plan.as_ref()).map(value).fold(0.0, f64::max);
    let significant = if source == Predictions::STATIC { ESTIMATED } else { MEASURED };
    let (fastest, latest) = (max(|p| p.tokens_per_s), max(|p| p.time_to_first_token_ms));
    let rows = points.iter().map(|point| {
        let cells = match (&point.plan, &point.refused) {
            (Some(plan), _) => vec![
                format!("{}+{}", plan.on_gpus, plan.streamed),
                digits(plan.tokens_per_s, significant),
                bar(plan.tokens_per_s / fastest),
                time(plan.time_to_first_token_ms, significant),
                bar(plan.time_to_first_token_ms / latest),
            ],
            (None, refused) => vec!["-".to_owned(), "-".to_owned(), refused.clone().unwrap_or_default()],
        };
        (point.vram, cells)
    });
    let rows: Vec<(u64, Vec<String>)> = rows.collect();
    // Consecutive budgets with equal results share a row.
    let rows = rows.chunk_by(|a, b| a.1 == b.1).map(|same| {
        let [first, last] = [&same[0], &same[same.len() - 1]].map(|(vram, _)| ByteSize(*vram).human());
        let vram = if same.len() == 1 { first } else { format!("{first} to {last}") };
        [vec![vram], same[0].1.clone()].concat()
    });
    let vram = if request.problem.gpus.len() > 1 { "VRAM of each GPU" } else { "VRAM" };
    let header = [vram, "blocks on GPU + streamed", "tokens/s", "", "first token", ""];
    format!(
        "{}\n\nexpected ({source}): a {}-token prompt, decoding at {} tokens of context",
        table(&header, &[0, 1, 2, 4], rows),
        request.scenario.prompt,
        request.scenario.decode_context()
    )
}

/// A bar of `part` (0 to 1) of [`BAR`] characters, in steps of an eighth.
fn bar(part: f64) -> String {
    const EIGHTHS: [&str; 8] = ["", "\u{258f}", "\u{258e}", "\u{258d}", "\u{258c}", "\u{258b}", "\u{258a}", "\u{2589}"];
    let eighths = (part.clamp(0.0, 1.0) * BAR * 8.0).round() as usize;
    "\u{2588}".repeat(eighths / 8) + EIGHTHS[eighths % 8]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_that_are_streamed_for_the_prompt_only_count_as_streamed() {
        let for_prompt = BlockPlacement { prefill: Placement::Streamed(0), decode: Placement::Cpu };
        let placements = [
            for_prompt,
            for_prompt,
            BlockPlacement::both(Placement::Resident(0)),
            BlockPlacement::both(Placement::Cpu),
        ];
        assert_eq!(blocks_on_gpus(&placements), [1, 2]);
    }

    #[test]
    fn bar_length_is_proportional() {
        assert_eq!(bar(1.0).chars().count(), 24);
        assert_eq!(bar(0.5), "\u{2588}".repeat(12));
        assert_eq!(bar(0.5 + 1.0 / 48.0), "\u{2588}".repeat(12) + "\u{258c}");
        assert_eq!((bar(0.0), bar(f64::NAN)), (String::new(), String::new()));
    }
}
