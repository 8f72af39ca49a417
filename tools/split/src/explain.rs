//! `--explain`: why each partition is on its device, what other devices would cost, and what more memory or another
//! context length would change.

use crate::amount::{self, MEASURED};
use crate::analysis::analyse;
use crate::choose::PlanInputs;
use crate::error::SplitError;
use crate::expected::Expected;
use crate::expert_report::ExpertReport;
use crate::neurons::{NeuronReport, NeuronsInMemory};
use crate::partitioning::Partitioning;
use crate::predicted::round;
use crate::reason::{difference, is_rounding, place_name};
use crate::request::{PlanningRequest, computation};
use crate::table;
use hpp_onnx::QuantizeOptions;
use hpp_partition::{BlockPlacement, DeviceId, Phase, RunExplanation, Throughput, bottleneck, explain_runs};
use hpp_schema::{ModelKind, Plan};
use serde::Serialize;

const GIB: u64 = 1 << 30;
/// Gains below this share of the time are not worth naming a device.
const NEGLIGIBLE: f64 = 1e-3;

/// The explanation, as `--json` adds it to the plan.
#[derive(Debug, Serialize)]
pub struct ExplanationReport {
    /// Whether the model runs once: it has no tokens.
    #[serde(skip)]
    runs_once: bool,
    /// In the order of blocks.
    partitions: Vec<PartitionReason>,
    /// What bounds the speed.
    bottlenecks: Bottlenecks,
    /// Devices on which more memory would help.
    scarce: Vec<String>,
    /// Effects of one more GiB, or of another context length.
    changes: Vec<WhatIf>,
    /// Neurons that are off and read from disk all the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    neurons: Option<NeuronReport>,
    /// Neurons that are off and computed all the same, from memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    neurons_in_memory: Option<NeuronsInMemory>,
    /// Experts that are read by demand.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertReport>,
}

/// What bounds the speed in each phase, such as `compute on cpu`.
#[derive(Debug, Serialize)]
struct Bottlenecks {
    /// While decoding.
    decode: String,
    /// In the prompt.
    prefill: String,
}

#[derive(Debug, Serialize)]
struct PartitionReason {
    blocks: String,
    here: String,
    elsewhere: Vec<String>,
}

/// The effect of one change, as differences. Times are those of one sequence alone.
#[derive(Debug, Serialize)]
struct WhatIf {
    what: String,
    /// Change of the tokens per second of all sequences together; for the throughput objective.
    #[serde(skip_serializing_if = "Option::is_none")]
    tokens_per_second_change: Option<f64>,
    /// Change of the milliseconds per token; negative if they become less.
    #[serde(skip_serializing_if = "Option::is_none")]
    decode_ms_change: Option<f64>,
    /// Change of the time to the first token.
    #[serde(skip_serializing_if = "Option::is_none")]
    time_to_first_token_ms_change: Option<f64>,
    /// Change of the time of the whole answer: the prompt and all new tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    answer_ms_change: Option<f64>,
    /// The share by which a better plan for the present memory may be faster than this plan, where the change gains less: then the gain may be due to
    /// the search.
    #[serde(skip_serializing_if = "Option::is_none")]
    less_than_gap: Option<f64>,
    /// Why there is no plan with this change.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl WhatIf {
    /// A change of the plan `now` without an effect.
    fn nothing(what: String, now: &Expected) -> Self {
        WhatIf {
            what,
            tokens_per_second_change: now.throughput.as_ref().map(|_| 0.0),
            decode_ms_change: Some(0.0),
            time_to_first_token_ms_change: Some(0.0),
            answer_ms_change: Some(0.0),
            less_than_gap: None,
            refused: None,
        }
    }

    /// No plan has this change.
    fn refused(what: String, why: String) -> Self {
        WhatIf {
            what,
            tokens_per_second_change: None,
            decode_ms_change: None,
            time_to_first_token_ms_change: None,
            answer_ms_change: None,
            less_than_gap: None,
            refused: Some(why),
        }
    }
}

/// Explains a placement. `planned` is the placement that the planner chose for these inputs before anything was measured; the effects of
/// more memory are relative to it.
pub fn explain(
    inputs: &PlanInputs,
    planned: &Partitioning,
    request: &PlanningRequest,
    partitioning: &Partitioning,
    quantize: Option<&QuantizeOptions>,
    plan: &Plan,
) -> Result<ExplanationReport, SplitError> {
    // The same problem and cuts as for the reasons in the table, so that both show the same times.
    let cuts = |placements: &[BlockPlacement]| partitioning.cuts_for(request, placements);
    let (problem, solution) = (partitioning.problem(request), &partitioning.solution);
    let runs = explain_runs(&problem, &request.options, solution, &cuts);
    let (mut scarce, mut changes) = (vec![], vec![]);
    if !partitioning.is_manual() {
        let expected = Expected::of(request, inputs.analysis.kind, planned);
        (scarce, changes) = more_memory(inputs, request, &expected)?;
        changes.extend(other_context(inputs, request, &expected, quantize)?);
    }
    let now = solution.objective_ms;
    let bottleneck = |phase: Phase| bottleneck(&problem, solution, phase).to_string();
    Ok(ExplanationReport {
        runs_once: inputs.analysis.kind == ModelKind::SingleRun,
        partitions: runs.iter().map(|run| reason(request, run, now)).collect(),
        bottlenecks: Bottlenecks { decode: bottleneck(Phase::Decode), prefill: bottleneck(Phase::Prefill) },
        scarce: scarce.iter().map(DeviceId::to_string).collect(),
        changes,
        neurons: NeuronReport::new(request, partitioning, inputs.analysis, inputs.costs.source()),
        neurons_in_memory: NeuronsInMemory::new(request, partitioning, inputs.analysis, inputs.costs.source()),
        experts: ExpertReport::new(request, partitioning, plan),
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

/// The devices on which one more GiB makes a plan faster, and the effect of it on each device.
fn more_memory(
    inputs: &PlanInputs,
    request: &PlanningRequest,
    now: &Expected,
) -> Result<(Vec<DeviceId>, Vec<WhatIf>), SplitError> {
    let budget = &request.problem.budget;
    let more_vram = |gpu: usize| {
        let more = |at: usize, bytes: u64| if at == gpu { bytes.saturating_add(GIB) } else { bytes };
        let vram = budget.vram.iter().enumerate().map(|(at, bytes)| more(at, *bytes)).collect();
        (DeviceId::Gpu(gpu), format!("1 GiB more VRAM on gpu{gpu}"), vram, None)
    };
    let more_ram = |ram: u64| (DeviceId::Cpu, "1 GiB more RAM".to_owned(), vec![], Some(ram.saturating_add(GIB)));
    let other = (0..budget.vram.len()).map(more_vram).chain(budget.ram.map(more_ram));
    let (mut scarce, mut changes) = (Vec::new(), Vec::new());
    for (device, what, vram, ram) in other {
        let then = inputs
            .with_memory(vram, ram, |inputs| inputs.choose())
            .map(|then| Expected::of(&then.request, inputs.analysis.kind, &then.partitioning));
        let is_faster_by =
            |part: f64| then.as_ref().is_ok_and(|then| then.objective_ms < now.objective_ms * (1.0 - part));
        if is_faster_by(NEGLIGIBLE) {
            scarce.push(device);
        }
        // Longer passes, which the planner takes where they fit, can seem slower.
        let longer_passes = then.as_ref().ok().filter(|_| !is_faster_by(0.0)).and_then(|then| {
            let (tokens, before) = (then.longest_pass, now.longest_pass);
            let is_slower = then.objective_ms > now.objective_ms * (1.0 + NEGLIGIBLE);
            (is_slower && tokens > before)
                .then(|| format!("{what}, whose plan has passes of {tokens} tokens instead of {before}"))
        });
        let stays = then.is_ok() && !is_faster_by(0.0);
        changes.push(match longer_passes {
            None if stays => WhatIf::nothing(what, now),
            longer_passes => {
                let less_than_gap = then.as_ref().ok().and_then(|then| now.gap_beyond(then)).map(round);
                WhatIf { less_than_gap, ..what_if(longer_passes.unwrap_or(what), then, now)? }
            }
        });
    }
    Ok((scarce, changes))
}

/// The effect of planning with other inputs.
fn what_if(mut what: String, then: Result<Expected, SplitError>, now: &Expected) -> Result<WhatIf, SplitError> {
    let change = |then: f64, now: f64| if is_rounding(then - now, now) { 0.0 } else { round(then - now) };
    match then {
        Ok(then) => {
            let together = then.throughput.as_ref().zip(now.throughput.as_ref());
            if let Some((then, now)) = together.filter(|(then, now)| then.sequences != now.sequences) {
                what += &match then.sequences {
                    1 => format!(", for one sequence at a time instead of {} together", now.sequences),
                    many => format!(", for {many} sequences together instead of {}", now.sequences),
                };
            }
            let rate = |(then, now): (&Throughput, &Throughput)| change(then.tokens_per_second, now.tokens_per_second);
            Ok(WhatIf {
                what,
                tokens_per_second_change: together.map(rate),
                decode_ms_change: Some(change(then.alone.decode_ms, now.alone.decode_ms)),
                time_to_first_token_ms_change: Some(change(then.alone.prefill_ms, now.alone.prefill_ms)),
                answer_ms_change: Some(change(then.answer_ms, now.answer_ms)),
                less_than_gap: None,
                refused: None,
            })
        }
        Err(SplitError::OverBudget { source, .. }) => Ok(WhatIf::refused(what, source.to_string())),
        // Only the budgets differ from those of the plan: the machine of the profile or of the description has no more.
        Err(SplitError::InputErrors(_)) => Ok(WhatIf::refused(what, "this machine has no more".to_owned())),
        Err(error) => Err(error),
    }
}

/// The effect of twice the context length, or of half of it where the model does not support more.
fn other_context(
    inputs: &PlanInputs,
    request: &PlanningRequest,
    now: &Expected,
    quantize: Option<&QuantizeOptions>,
) -> Result<Option<WhatIf>, SplitError> {
    let analysis = inputs.analysis;
    if analysis.kind != ModelKind::Decoder || analysis.context < 2 {
        return Ok(None);
    }
    let twice = analysis.context.saturating_mul(2);
    let longest = analysis.config.context_length.unwrap_or(u64::MAX);
    let other = if twice <= longest { twice } else { analysis.context / 2 };
    let computation = computation(inputs.args, inputs.costs, inputs.local);
    let other = analyse(analysis.model.path(), Some(other), inputs.args, quantize, computation)?;
    let other_inputs = PlanInputs { analysis: &other, alternative: None, ..*inputs };
    let then = other_inputs
        .with_memory(vec![], None, |inputs| inputs.choose())
        .map(|then| Expected::of(&then.request, analysis.kind, &then.partitioning));
    let mut what = format!("{} tokens of context instead of {}", other.context, analysis.context);
    let [before, after] = [request.scenario, other_inputs.request(inputs.limits())?.scenario];
    if (before.prompt, before.new_tokens) != (after.prompt, after.new_tokens) {
        what += &format!(" (prompt of {} instead of {}", after.prompt, before.prompt);
        if before.new_tokens != after.new_tokens {
            what += &format!(", answer of {} instead of {}", after.new_tokens, before.new_tokens);
        }
        what += ")";
    }
    what_if(what, then, now).map(Some)
}

/// The explanation as text.
pub fn text(report: &ExplanationReport) -> String {
    let mut lines = Vec::new();
    for partition in &report.partitions {
        lines.push(format!("{}: {}", partition.blocks, partition.here));
        lines.extend(partition.elsewhere.iter().map(|other| format!("    {other}")));
    }
    let Bottlenecks { decode, prefill } = &report.bottlenecks;
    lines.push(match report.runs_once {
        true => format!("bottleneck: {prefill}"),
        false => format!("bottleneck while decoding: {decode}; in the prompt: {prefill}"),
    });
    if !report.scarce.is_empty() {
        lines.push(format!("more memory on {} would make the plan faster", report.scarce.join(", ")));
    }
    lines.extend(report.changes.iter().map(|change| line(change, report.runs_once)));
    lines.extend(report.neurons.iter().map(NeuronReport::text));
    lines.extend(report.neurons_in_memory.iter().map(NeuronsInMemory::text));
    lines.extend(report.experts.iter().map(ExpertReport::text));
    lines.join("\n")
}

/// A share in per cent.
fn percent(share: f64) -> String {
    amount::digits(100.0 * share, MEASURED)
}

fn line(change: &WhatIf, runs_once: bool) -> String {
    let ms = |value: f64| match value {
        0.0 => "no change".to_owned(),
        value => amount::difference(value, MEASURED),
    };
    let doubt = change.less_than_gap.map_or(String::new(), |gap| {
        let most = match gap < 1.0 {
            true => format!("a plan for the present memory may be up to {} % faster than this one", percent(gap)),
            false => "no lower bound was computed for this plan".to_owned(),
        };
        format!("; the search may have missed this for the present memory: {most}")
    });
    match (&change.refused, change.decode_ms_change.zip(change.time_to_first_token_ms_change)) {
        (Some(why), _) => format!("{}: {why}", change.what),
        (None, Some((_, run))) if runs_once => format!("{}: per run {}{doubt}", change.what, ms(run)),
        (None, Some((decode, first))) => {
            let answer =
                change.answer_ms_change.map_or(String::new(), |answer| format!(", whole answer {}", ms(answer)));
            let together = change.tokens_per_second_change.map_or(String::new(), |rate| match rate {
                0.0 => "no change in tokens/s; one alone: ".to_owned(),
                rate => format!("{} tokens/s; one alone: ", amount::signed(rate, MEASURED)),
            });
            let (what, decode, first) = (&change.what, ms(decode), ms(first));
            format!("{what}: {together}per token {decode}, to the first token {first}{answer}{doubt}")
        }
        (None, None) => format!("{}: nothing fits", change.what),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gain_that_may_be_due_to_the_search_says_so() {
        let change = |less_than_gap| WhatIf {
            what: "1 GiB more RAM".to_owned(),
            tokens_per_second_change: None,
            decode_ms_change: Some(-2.0),
            time_to_first_token_ms_change: Some(0.0),
            answer_ms_change: Some(-250.0),
            less_than_gap,
            refused: None,
        };
        let said = |less_than_gap| line(&change(less_than_gap), false);
        let plain = "1 GiB more RAM: per token -2.00 ms, to the first token no change, whole answer -250 ms";
        assert_eq!(said(None), plain);
        assert!(
            said(Some(0.066)).starts_with(plain) && said(Some(0.066)).ends_with("up to 6.60 % faster than this one")
        );
        assert!(said(Some(1.0)).ends_with("no lower bound was computed for this plan"));
    }
}
