//! What a split says when it is done.

use crate::cli::SplitArgs;
use crate::explain::{self, Explained};
use crate::output::PLAN_FILE;
use crate::refine::Tried;
use crate::run;
use crate::table::{plan_summary, table};
use hpp_io::{StdoutError, print_line};
use hpp_schema::Plan;
use serde::Serialize;
use std::path::Path;

/// The plan with what was asked for besides it.
#[derive(Serialize)]
struct Answer<'a> {
    plan: &'a Plan,
    #[serde(skip_serializing_if = "Option::is_none")]
    explanation: Option<&'a Explained>,
    #[serde(skip_serializing_if = "<[Tried]>::is_empty")]
    refined: &'a [Tried],
}

/// The plan, why it is so and what was measured, as text or as JSON. JSON is the plan alone where nothing else was asked
/// for.
pub fn all(
    args: &SplitArgs,
    plan: &Plan,
    explanation: Option<&Explained>,
    refined: &[Tried],
) -> Result<(), StdoutError> {
    let json = |value: Result<String, _>| value.expect("plain data serialises");
    match args.json {
        true if explanation.is_none() && refined.is_empty() => print_line(&json(serde_json::to_string_pretty(plan))),
        true => print_line(&json(serde_json::to_string_pretty(&Answer { plan, explanation, refined }))),
        false => {
            print_line(&plan_summary(plan))?;
            if let Some(explanation) = explanation {
                print_line(&format!("\n{}", explain::text(explanation)))?;
            }
            if !refined.is_empty() {
                print_line(&format!("\n{}", measured(refined)))?;
            }
            Ok(())
        }
    }
}

/// Where the plan is, and the command that runs it.
pub fn written(target: &Path, plan: &Plan) {
    let path = target.join(PLAN_FILE);
    eprintln!("wrote {}", path.display());
    eprintln!("{}", run::hint(&path, plan));
}

/// Predicted beside measured.
fn measured(tried: &[Tried]) -> String {
    let rows = tried.iter().map(|run| {
        let cells = [run.decode_ms, run.time_to_first_token_ms].concat();
        let mut row = vec![if run.kept { "kept" } else { "" }.to_owned()];
        row.extend(cells.iter().map(|ms| format!("{ms:.2}")));
        row.push(run.placement.clone());
        row
    });
    let header = ["", "ms a token, expected", "measured", "first token, ms, expected", "measured", "plan"];
    table(&header, &[1, 2, 3, 4], rows).to_string()
}
