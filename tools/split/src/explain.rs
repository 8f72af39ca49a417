//! `--explain`: why each partition is where it is, what it would cost elsewhere, and what more memory or context changes.

use crate::cli::SplitArgs;
use crate::costs::Costs;
use crate::error::SplitError;
use crate::place::Placement;
use crate::predict::round;
use crate::reason::{difference, place};
use crate::request::Request;
use crate::table;
use hpp_model::{Analysis, Logits, analyse};
use hpp_partition::{Change, Explanation, Place, RunExplanation, change, explain};
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
    let explanation = explain(&request.problem, &request.options, &placement.solution);
    let mut changes = memory(&explanation);
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
            let ms = difference(other.objective_ms - now, request.options.objective);
            format!("{}: {ms}", place(other.place))
        }
    });
    Why {
        blocks: table::blocks(&labels),
        here: if prefill == decode { decode } else { format!("{decode}, the prompt {prefill}") },
        elsewhere: elsewhere.collect(),
    }
}

/// What one more GiB changes.
fn memory(explanation: &Explanation) -> Vec<Changed> {
    let of = |(gpu, change): (usize, &Option<Change>)| changed(format!("1 GiB more VRAM on gpu{gpu}"), change.as_ref());
    let mut changes: Vec<Changed> = explanation.more_vram.iter().enumerate().map(of).collect();
    changes.extend(explanation.more_ram.as_ref().map(|change| changed("1 GiB more RAM".to_owned(), Some(change))));
    changes
}

fn changed(what: String, change: Option<&Change>) -> Changed {
    Changed {
        what,
        decode_ms: change.map(|change| round(change.decode_ms)),
        time_to_first_token_ms: change.map(|change| round(change.prefill_ms)),
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
    let request_there = Request::new(args, &other, costs)?;
    let options = request.options;
    Ok(Some(match change(&placement.solution, &request_there.problem, &options) {
        Ok(change) => changed(what, Some(&change)),
        Err(no_fit) => Changed { refused: Some(no_fit.to_string()), ..changed(what, None) },
    }))
}

/// As a person reads it.
pub fn text(explained: &Explained) -> String {
    let mut lines = Vec::new();
    for why in &explained.partitions {
        lines.push(format!("{} {}", why.blocks, why.here));
        lines.extend(why.elsewhere.iter().map(|other| format!("    {other}")));
    }
    let [decode, prefill] = &explained.limits;
    lines.push(format!("a token is limited by {decode}, the first one by {prefill}"));
    if !explained.scarce.is_empty() {
        lines.push(format!("more memory would help on {}", explained.scarce.join(", ")));
    }
    lines.extend(explained.changes.iter().map(line));
    lines.join("\n")
}

fn line(change: &Changed) -> String {
    let ms = |value: f64| if value == 0.0 { "no change".to_owned() } else { format!("{value:+} ms") };
    match (&change.refused, change.decode_ms.zip(change.time_to_first_token_ms)) {
        (Some(why), _) => format!("{}: {why}", change.what),
        (None, Some((decode, first))) => {
            format!("{}: a token {}, the first one {}", change.what, ms(decode), ms(first))
        }
        (None, None) => format!("{}: nothing can be planned then", change.what),
    }
}
