//! `--explain`: why each partition is where it is, what it would cost elsewhere, and what more memory or context changes.

use crate::amount::{self, MEASURED};
use crate::cli::SplitArgs;
use crate::costs::Costs;
use crate::error::SplitError;
use crate::place::Placement;
use crate::predict::round;
use crate::reason::{difference, is_nothing, place};
use crate::request::Request;
use crate::table;
use hpp_model::{Analysis, Logits, analyse};
use hpp_partition::{Change, Choice, Explanation, Place, RunExplanation, Solution, change, evaluate, explain};
use hpp_schema::ModelKind;
use serde::Serialize;

/// What `--json` adds to the plan.
#[derive(Debug, Serialize)]
pub struct Explained {
    /// In the order of blocks.
    partitions: Vec<Why>,
    /// What decides the time of a token and the time to the first one.
    limits: [String; 2],
    /// Memories of which more would help.
    scarce: Vec<String>,
    /// What one more GiB or another context changes.
    changes: Vec<Changed>,
}

#[derive(Debug, Serialize)]
struct Why {
    blocks: String,
    here: String,
    elsewhere: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Changed {
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_to_first_token_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

/// Explains a placement.
pub fn explained(
    request: &Request,
    placement: &Placement,
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
) -> Result<Explained, SplitError> {
    // The same problem and cuts that the table's reasons are told of.
    let cuts = |choices: &[Choice]| placement.cuts(request, choices);
    let explanation = explain(&placement.problem(request), &request.options, &placement.solution, &cuts);
    let mut changes = memory(&explanation, &placement.solution);
    changes.extend(context(request, placement, args, analysis, costs)?);
    let now = placement.solution.objective_ms;
    Ok(Explained {
        partitions: explanation.runs.iter().map(|run| why(request, run, now)).collect(),
        limits: [explanation.decode, explanation.prefill].map(|limit| limit.to_string()),
        scarce: explanation.scarce.iter().map(Place::to_string).collect(),
        changes,
    })
}

fn why(request: &Request, run: &RunExplanation, now: f64) -> Why {
    let labels: Vec<String> = request.problem.blocks[run.blocks.clone()].iter().map(|b| b.label.clone()).collect();
    let (prefill, decode) = (place(run.choice.prefill), place(run.choice.decode));
    let elsewhere = run.elsewhere.iter().map(|other| match &other.no_fit {
        Some(no_fit) => format!("{}: {no_fit}", place(other.place)),
        None => {
            let ms = difference(other.objective_ms - now, now, request.options.objective);
            format!("{}: {ms}", place(other.place))
        }
    });
    Why {
        blocks: table::blocks(&labels),
        here: if prefill == decode { decode } else { format!("{decode}, prompts {prefill}") },
        elsewhere: elsewhere.collect(),
    }
}

/// What one more GiB changes.
fn memory(explanation: &Explanation, now: &Solution) -> Vec<Changed> {
    let of =
        |(gpu, change): (usize, &Option<Change>)| changed(format!("1 GiB more VRAM on gpu{gpu}"), change.as_ref(), now);
    let mut changes: Vec<Changed> = explanation.more_vram.iter().enumerate().map(of).collect();
    changes.extend(explanation.more_ram.as_ref().map(|change| changed("1 GiB more RAM".to_owned(), Some(change), now)));
    changes
}

fn changed(what: String, change: Option<&Change>, now: &Solution) -> Changed {
    let ms = |change: f64, now: f64| if is_nothing(change, now) { 0.0 } else { round(change) };
    Changed {
        what,
        decode_ms: change.map(|change| ms(change.decode_ms, now.decode_ms)),
        time_to_first_token_ms: change.map(|change| ms(change.prefill_ms, now.prefill_ms)),
        refused: None,
    }
}

/// What twice the context changes, or half of it where the model takes no more.
fn context(
    request: &Request,
    placement: &Placement,
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
) -> Result<Option<Changed>, SplitError> {
    if analysis.kind != ModelKind::Decoder || placement.by_hand || analysis.context < 2 {
        return Ok(None);
    }
    let twice = analysis.context.saturating_mul(2);
    let most = analysis.config.context_length.unwrap_or(u64::MAX);
    let other = if twice <= most { twice } else { analysis.context / 2 };
    let logits = if args.all_logits { Logits::All } else { Logits::AskedFor };
    let other = analyse(analysis.model.path(), Some(other), logits)?;
    let what = format!("{} tokens of context instead of {}", other.context, analysis.context);
    let request_there = Request::new(args, &other, costs, &request.here)?;
    let options = request.options;
    // Both without the cuts of this placement, which are not those of the other.
    let Solution { choices, slots, .. } = placement.solution.clone();
    let now = evaluate(&request.problem, &options, choices, slots);
    Ok(Some(match change(&now, &request_there.problem, &options) {
        Ok(change) => changed(what, Some(&change), &now),
        Err(no_fit) => Changed { refused: Some(no_fit.to_string()), ..changed(what, None, &now) },
    }))
}

/// As a person reads it.
pub fn text(explained: &Explained) -> String {
    let mut lines = Vec::new();
    for why in &explained.partitions {
        lines.push(format!("{}: {}", why.blocks, why.here));
        lines.extend(why.elsewhere.iter().map(|other| format!("    {other}")));
    }
    let [decode, prefill] = &explained.limits;
    lines.push(format!("bottleneck while decoding: {decode}; in the prompt: {prefill}"));
    if !explained.scarce.is_empty() {
        lines.push(format!("more memory on {} would make it faster", explained.scarce.join(", ")));
    }
    lines.extend(explained.changes.iter().map(line));
    lines.join("\n")
}

fn line(change: &Changed) -> String {
    let ms = |value: f64| match value {
        0.0 => "no change".to_owned(),
        value => amount::difference(value, MEASURED).to_string(),
    };
    match (&change.refused, change.decode_ms.zip(change.time_to_first_token_ms)) {
        (Some(why), _) => format!("{}: {why}", change.what),
        (None, Some((decode, first))) => {
            format!("{}: per token {}, to the first token {}", change.what, ms(decode), ms(first))
        }
        (None, None) => format!("{}: no plan fits then", change.what),
    }
}
