//! Prints the result of a split: the plan as a table or JSON, the explanation, measured plans, and the command that
//! runs it.

use crate::cli::SplitArgs;
use crate::experts;
use crate::explain::{self, ExplanationReport};
use crate::output::PLAN_FILE;
use crate::refine::TrialRun;
use crate::run_hint::run_hint;
use crate::table::{plan_summary, table};
use hpp_io::{StdoutError, print_line};
use hpp_model::Analysis;
use hpp_schema::Plan;
use serde::Serialize;
use std::path::Path;

/// The plan and the other requested results, as JSON.
#[derive(Serialize)]
struct JsonResult<'a> {
    plan: &'a Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<&'a ExplanationReport>,
    #[serde(skip_serializing_if = "<[TrialRun]>::is_empty")]
    refined: &'a [TrialRun],
}

/// Prints the plan, its explanation and the measured plans, as text or JSON. JSON is the plan alone if there is nothing
/// else.
pub fn result(
    args: &SplitArgs,
    analysis: &Analysis,
    plan: &Plan,
    explanation: Option<&ExplanationReport>,
    refined: &[TrialRun],
) -> Result<(), StdoutError> {
    if args.json {
        return match explanation.is_none() && refined.is_empty() {
            true => print_json(plan),
            false => print_json(&JsonResult { plan, explanation, refined }),
        };
    }
    print_line(&plan_summary(plan, experts::are_undivided(args, analysis)))?;
    if let Some(explanation) = explanation {
        print_line(&format!("\n{}", explain::text(explanation)))?;
    }
    if !refined.is_empty() {
        print_line(&format!("\n{}", trial_table(refined)))?;
    }
    Ok(())
}

/// Prints indented JSON to stdout.
pub fn print_json(value: &impl Serialize) -> Result<(), StdoutError> {
    print_line(&serde_json::to_string_pretty(value).expect("plain data serialises"))
}

/// Prints where the plan is and the command that runs it, to stderr.
pub fn location(out_dir: &Path, plan: &Plan) {
    let path = out_dir.join(PLAN_FILE);
    tell!("wrote {}", path.display());
    tell!("{}", run_hint(&path, plan));
}

/// Predicted and measured times of each plan that was run.
fn trial_table(trials: &[TrialRun]) -> String {
    let rows = trials.iter().map(|run| {
        let cells = [run.decode_ms, run.time_to_first_token_ms].concat();
        let mut row = vec![if run.kept { "kept" } else { "" }.to_owned()];
        row.extend(cells.iter().map(|ms| format!("{ms:.2}")));
        row.push(run.placement.clone());
        row
    });
    let header = ["", "ms/token expected", "measured", "first token ms expected", "measured", "plan"];
    table(&header, &[1, 2, 3, 4], rows).to_string()
}
