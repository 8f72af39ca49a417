//! What verification found, as JSON and as tables.

use super::difference::{Difference, Tolerance};
use crate::report::table;
use serde::Serialize;
use std::fmt::Write;

/// The whole result.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// Whether everything compared is within tolerance.
    pub within_tolerance: bool,
    /// Whether everything compared is the same to the last bit.
    pub bit_identical: bool,
    /// Largest difference allowed, relative to the largest value.
    pub tolerance: Tolerance,
    /// Partitions of the plan, with the provider each ran on.
    pub partitions: Vec<(String, &'static str)>,
    /// Each token of a text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepResult>,
    /// Each output of a model that runs once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<TensorResult>,
    /// Where it begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_difference: Option<FirstDifference>,
}

/// One token.
#[derive(Debug, Serialize)]
pub struct StepResult {
    /// Counts from 0, the step that takes the prompt in.
    pub step: usize,
    /// The unsplit model's choice, fed to both.
    pub token: u32,
    /// The plan's choice.
    pub plan_token: Option<u32>,
    /// How clear the choice was: best minus second best score, relative to the largest.
    pub margin: f64,
    /// How far the scores are apart.
    #[serde(flatten)]
    pub difference: Difference,
    /// Whether this step is within tolerance: its scores, and its token where the choice was clear.
    pub within_tolerance: bool,
}

/// One tensor.
#[derive(Debug, Serialize)]
pub struct TensorResult {
    /// Its name.
    pub name: String,
    /// The partition that makes it.
    pub partition: String,
    /// How far apart.
    #[serde(flatten)]
    pub difference: Difference,
}

/// Where a difference begins.
#[derive(Debug, Serialize)]
pub struct FirstDifference {
    /// The first step whose scores are not identical.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<usize>,
    /// The first boundary that is not; null where all are, so that it begins behind the last.
    pub boundary: Option<String>,
    /// The partition that makes it, or holds what comes after the last boundary.
    pub partition: String,
    /// Every boundary, in order.
    pub boundaries: Vec<TensorResult>,
    /// Whether the unsplit model gives the plan's scores to the last bit once its boundaries are outputs too: then only
    /// operators that ONNX Runtime fuses across the cuts differ, and nothing that was cut. Null where nobody looked.
    pub fusion_only: Option<bool>,
}

/// The tables.
pub fn text(verdict: &Verdict) -> String {
    let mut out = String::new();
    let names: Vec<String> = verdict.partitions.iter().map(|(name, on)| format!("{name} ({on})")).collect();
    let _ = writeln!(out, "unsplit model against {}", names.join(", "));
    if !verdict.steps.is_empty() {
        let rows = verdict.steps.iter().map(step_row);
        out.push_str(&table(&["step", "token", "plan", "margin", "max abs", "max rel", "identical", ""], rows));
    }
    if !verdict.outputs.is_empty() {
        out.push_str(&tensor_table("output", &verdict.outputs));
    }
    if let Some(first) = &verdict.first_difference {
        out.push_str(&first_difference(first));
    }
    let tolerance = verdict.tolerance.0;
    let _ = match (verdict.bit_identical, verdict.within_tolerance) {
        (true, _) => writeln!(out, "bit-identical"),
        (false, true) => writeln!(out, "within tolerance ({tolerance:e}), largest difference {:.3e}", largest(verdict)),
        (false, false) => {
            writeln!(
                out,
                "DIFFERENT: beyond the tolerance ({tolerance:e}), largest difference {:.3e}",
                largest(verdict)
            )
        }
    };
    out
}

fn largest(verdict: &Verdict) -> f64 {
    let steps = verdict.steps.iter().map(|s| s.difference.max_rel);
    steps.chain(verdict.outputs.iter().map(|t| t.difference.max_rel)).fold(0.0, f64::max)
}

fn step_row(step: &StepResult) -> Vec<String> {
    vec![
        step.step.to_string(),
        step.token.to_string(),
        step.plan_token.map_or("-".to_owned(), |t| t.to_string()),
        format!("{:.2e}", step.margin),
        format!("{:.3e}", step.difference.max_abs),
        format!("{:.3e}", step.difference.max_rel),
        yes_no(step.difference.bit_identical),
        if step.within_tolerance { String::new() } else { "<-- beyond tolerance".to_owned() },
    ]
}

fn tensor_table(what: &str, tensors: &[TensorResult]) -> String {
    let rows = tensors.iter().map(|t| {
        vec![
            t.name.clone(),
            t.partition.clone(),
            format!("{:.3e}", t.difference.max_abs),
            format!("{:.3e}", t.difference.max_rel),
            yes_no(t.difference.bit_identical),
        ]
    });
    table(&[what, "made by", "max abs", "max rel", "identical"], rows)
}

fn first_difference(first: &FirstDifference) -> String {
    let mut out = String::from("\n");
    let at = first.step.map_or(String::new(), |step| format!(" at step {step}"));
    let _ = match &first.boundary {
        Some(name) => writeln!(out, "first difference{at}: {name}, made by {}", first.partition),
        None => writeln!(out, "first difference{at}: inside {}, behind the last boundary", first.partition),
    };
    if !first.boundaries.is_empty() {
        out.push_str(&tensor_table("boundary", &first.boundaries));
        out.push('\n');
    }
    if first.fusion_only == Some(true) {
        out.push_str("with its boundaries as outputs, the unsplit model gives the plan's scores to the bit:\n");
        out.push_str("what differs are operators that ONNX Runtime fuses across the cuts\n\n");
    }
    out
}

fn yes_no(yes: bool) -> String {
    (if yes { "yes" } else { "no" }).to_owned()
}
