//! `--explain`: why each partition is on its device, what other devices would cost, and what more memory or another
//! context length would change.

use crate::amount::{self, MEASURED};
use crate::analysis::analyse;
use crate::cli::SplitArgs;
use crate::costs::Costs;
use crate::error::SplitError;
use crate::expert_report::ExpertReport;
use crate::neurons::NeuronReport;
use crate::partitioning::Partitioning;
use crate::predicted::round;
use crate::reason::{difference, is_rounding, place_name};
use crate::request::{Limits, PlanningRequest};
use crate::table;
use hpp_model::Analysis;
use hpp_onnx::QuantizeOptions;
use hpp_partition::{BlockPlacement, Change, DeviceId, Explanation, RunExplanation, Solution, change, evaluate};
use hpp_schema::ModelKind;
use serde::Serialize;

/// The explanation, as `--json` adds it to the plan.
#[derive(Debug, Serialize)]
pub struct ExplanationReport {
    /// In the order of blocks.
    partitions: Vec<PartitionReason>,
    /// Bottlenecks while decoding and in the prompt.
    limits: [String; 2],
    /// Devices on which more memory would help.
    scarce: Vec<String>,
    /// Effects of one more GiB, or of another context length.
    changes: Vec<WhatIf>,
    /// Neurons that are off and read from disk all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    neurons: Option<NeuronReport>,
    /// Experts that are read by demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertReport>,
}

#[derive(Debug, Serialize)]
struct PartitionReason {
    blocks: String,
    here: String,
    elsewhere: Vec<String>,
}

/// The effect of one change, as differences in milliseconds.
#[derive(Debug, Serialize)]
struct WhatIf {
    what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time_to_first_token_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

/// Explains a placement.
pub fn explain(
    request: &PlanningRequest,
    partitioning: &Partitioning,
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
    quantize: Option<&QuantizeOptions>,
) -> Result<ExplanationReport, SplitError> {
    // The same problem and cuts as for the reasons in the table, so that both show the same times.
    let cuts = |placements: &[BlockPlacement]| partitioning.cuts_for(request, placements);
    let explanation =
        hpp_partition::explain(&partitioning.problem(request), &request.options, &partitioning.solution, &cuts);
    let mut changes = more_memory(&explanation, &partitioning.solution);
    changes.extend(other_context(request, partitioning, args, analysis, costs, quantize)?);
    let now = partitioning.solution.objective_ms;
    Ok(ExplanationReport {
        partitions: explanation.runs.iter().map(|run| reason(request, run, now)).collect(),
        limits: [explanation.decode, explanation.prefill].map(|limit| limit.to_string()),
        scarce: explanation.scarce.iter().map(DeviceId::to_string).collect(),
        changes,
        neurons: NeuronReport::new(request, partitioning, analysis, costs.source()),
        experts: ExpertReport::new(request, partitioning),
    })
}

fn reason(request: &PlanningRequest, run: &RunExplanation, now: f64) -> PartitionReason {
    let labels: Vec<String> = request.problem.blocks[run.blocks.clone()].iter().map(|b| b.label.clone()).collect();
    let (prefill, decode) = (place_name(run.placement.prefill), place_name(run.placement.decode));
    let elsewhere = run.elsewhere.iter().map(|other| match &other.over_budget {
        Some(over_budget) => format!("{}: {over_budget}", place_name(other.place)),
        None => {
            let ms = difference(other.objective_ms - now, now, request.options.objective);
            format!("{}: {ms}", place_name(other.place))
        }
    });
    PartitionReason {
        blocks: table::blocks(&labels),
        here: if prefill == decode { decode } else { format!("{decode}, prompts {prefill}") },
        elsewhere: elsewhere.collect(),
    }
}

/// The effect of one more GiB on each device.
fn more_memory(explanation: &Explanation, now: &Solution) -> Vec<WhatIf> {
    let vram = explanation.more_vram.iter().enumerate();
    let vram = vram.map(|(gpu, change)| what_if(format!("1 GiB more VRAM on gpu{gpu}"), change.as_ref(), now));
    let ram = explanation.more_ram.as_ref().map(|change| what_if("1 GiB more RAM".to_owned(), Some(change), now));
    vram.chain(ram).collect()
}

fn what_if(what: String, change: Option<&Change>, now: &Solution) -> WhatIf {
    let ms = |change: f64, now: f64| if is_rounding(change, now) { 0.0 } else { round(change) };
    WhatIf {
        what,
        decode_ms: change.map(|change| ms(change.decode_ms, now.decode_ms)),
        time_to_first_token_ms: change.map(|change| ms(change.prefill_ms, now.prefill_ms)),
        refused: None,
    }
}

/// The effect of twice the context length, or of half of it where the model does not support more.
fn other_context(
    request: &PlanningRequest,
    partitioning: &Partitioning,
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
    quantize: Option<&QuantizeOptions>,
) -> Result<Option<WhatIf>, SplitError> {
    if analysis.kind != ModelKind::Decoder || partitioning.is_manual() || analysis.context < 2 {
        return Ok(None);
    }
    let twice = analysis.context.saturating_mul(2);
    let longest = analysis.config.context_length.unwrap_or(u64::MAX);
    let other = if twice <= longest { twice } else { analysis.context / 2 };
    let other = analyse(analysis.model.path(), Some(other), args, quantize)?;
    let limits = Limits { longest_pass: request.scenario.prefill_chunk, ..request.limits };
    let other_request = PlanningRequest::new(args, &other, costs, &request.local, limits)?;
    let mut what = format!("{} tokens of context instead of {}", other.context, analysis.context);
    let (now, then) = (request.scenario, other_request.scenario);
    if (now.prompt, now.new_tokens) != (then.prompt, then.new_tokens) {
        what += &format!(" (prompt of {} instead of {}", then.prompt, now.prompt);
        if now.new_tokens != then.new_tokens {
            what += &format!(", answer of {} instead of {}", then.new_tokens, now.new_tokens);
        }
        what += ")";
    }
    let options = request.options;
    // Compare both without cuts: the other placement would have other cuts.
    let Solution { placements, slots, .. } = partitioning.solution.clone();
    let now = evaluate(&request.problem, &options, placements, slots);
    Ok(Some(match change(&now, &other_request.problem, &options) {
        Ok(change) => what_if(what, Some(&change), &now),
        Err(over_budget) => WhatIf { refused: Some(over_budget.to_string()), ..what_if(what, None, &now) },
    }))
}

/// The explanation as text.
pub fn text(report: &ExplanationReport) -> String {
    let mut lines = Vec::new();
    for partition in &report.partitions {
        lines.push(format!("{}: {}", partition.blocks, partition.here));
        lines.extend(partition.elsewhere.iter().map(|other| format!("    {other}")));
    }
    let [decode, prefill] = &report.limits;
    lines.push(format!("bottleneck while decoding: {decode}; in the prompt: {prefill}"));
    if !report.scarce.is_empty() {
        lines.push(format!("more memory on {} would make the plan faster", report.scarce.join(", ")));
    }
    lines.extend(report.changes.iter().map(line));
    lines.extend(report.neurons.iter().map(NeuronReport::text));
    lines.extend(report.experts.iter().map(ExpertReport::text));
    lines.join("\n")
}

fn line(change: &WhatIf) -> String {
    let ms = |value: f64| match value {
        0.0 => "no change".to_owned(),
        value => amount::difference(value, MEASURED),
    };
    match (&change.refused, change.decode_ms.zip(change.time_to_first_token_ms)) {
        (Some(why), _) => format!("{}: {why}", change.what),
        (None, Some((decode, first))) => {
            format!("{}: per token {}, to the first token {}", change.what, ms(decode), ms(first))
        }
        (None, None) => format!("{}: nothing fits", change.what),
    }
}
