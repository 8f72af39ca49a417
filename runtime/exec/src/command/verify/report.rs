//! The result of a verification: JSON and tables.

use super::difference::{Difference, Tolerance};
use crate::report::table;
use serde::Serialize;
use std::fmt::Write;

/// The whole result.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// Whether everything compared is within tolerance.
    pub within_tolerance: bool,
    /// Whether everything compared is bit-identical.
    pub bit_identical: bool,
    /// Largest `max_rel` allowed.
    pub tolerance: Tolerance,
    /// The file of the unsplit model. For a quantized plan, its `whole.onnx` with the same quantized weights.
    pub unsplit_model: String,
    /// The options of hpp-split that rounded the unsplit model too.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rounded_by: Vec<String>,
    /// The plan's partitions and the provider that ran each.
    pub partitions: Vec<(String, String)>,
    /// The passes into which the plan divides the prompt; the unsplit model computes it in the same passes. Absent if it is one pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_passes: Option<PromptPasses>,
    /// The steps of a text.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<StepResult>,
    /// The outputs of a model that runs once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub outputs: Vec<TensorResult>,
    /// Where the difference begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_difference: Option<FirstDifference>,
}

/// A prompt that is divided into passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct PromptPasses {
    /// Tokens of the prompt.
    pub tokens: u64,
    /// Most tokens of a pass.
    pub longest: u64,
}

impl PromptPasses {
    /// The passes of a prompt of `tokens` with a plan's chunk size; `None` if one pass computes it.
    pub fn of_prompt(tokens: u64, chunk: u64) -> Option<PromptPasses> {
        (tokens > chunk).then_some(PromptPasses { tokens, longest: chunk })
    }
}

/// One step.
#[derive(Debug, Serialize)]
pub struct StepResult {
    /// From 0, the step that computes the prompt.
    pub step: usize,
    /// The unsplit model's choice, which both are fed.
    pub token: u32,
    /// The plan's choice.
    pub plan_token: Option<u32>,
    /// How clear the choice was: largest minus second largest logit, relative to the largest magnitude.
    pub margin: f64,
    /// The difference of the logits.
    #[serde(flatten)]
    pub difference: Difference,
    /// Whether the logits are within tolerance and, if the choice was clear, the tokens are equal.
    pub within_tolerance: bool,
}

/// One tensor.
#[derive(Debug, Serialize)]
pub struct TensorResult {
    /// Its name.
    pub name: String,
    /// The partition that computes it.
    pub partition: String,
    /// The difference.
    #[serde(flatten)]
    pub difference: Difference,
}

/// Where a difference begins.
#[derive(Debug, Serialize)]
pub struct FirstDifference {
    /// The first step whose logits are not bit-identical.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<usize>,
    /// The first boundary that is not bit-identical; null if all are, so that the difference begins after the last.
    pub boundary: Option<String>,
    /// The partition that computes it, or the last one.
    pub partition: String,
    /// Every boundary, in order.
    pub boundaries: Vec<TensorResult>,
    /// Whether the unsplit model with its boundaries as outputs gives the plan's logits bit for bit. Then the difference comes from
    /// operators that ONNX Runtime fuses across the cuts, not from splitting. Null if it was not compared.
    pub fusion_only: Option<bool>,
    /// Whether layers or mixtures are divided, also in the unsplit model with its boundaries as outputs. Then the difference comes from sums in another
    /// order, not from fusion.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_divided: bool,
}

/// The tables for people.
pub fn text(verdict: &Verdict) -> String {
    let mut out = String::new();
    let names: Vec<String> = verdict.partitions.iter().map(|(name, on)| format!("{name} ({on})")).collect();
    let _ = writeln!(out, "unsplit model ({}) against {}", verdict.unsplit_model, names.join(", "));
    if let Some(PromptPasses { tokens, longest }) = verdict.prompt_passes {
        let _ = writeln!(
            out,
            "both compute the prompt of {tokens} tokens in passes of {longest} at most, as the plan divides it; one pass over all of it \
             may round differently"
        );
    }
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
    // Boundaries are not compared against the tolerance: they only locate where a difference begins.
    let compared = if verdict.steps.is_empty() { "outputs" } else { "logits" };
    let _ = match (verdict.bit_identical, verdict.within_tolerance) {
        (true, _) => writeln!(out, "bit-identical to the unsplit model"),
        (false, true) => {
            writeln!(out, "{compared} within tolerance ({tolerance:e}), largest max rel {:.3e}", largest(verdict))
        }
        (false, false) => writeln!(
            out,
            "DIFFERENT: {compared} beyond the tolerance ({tolerance:e}), largest max rel {:.3e}",
            largest(verdict)
        ),
    };
    if !verdict.rounded_by.is_empty() {
        let advice = match verdict.steps.is_empty() {
            true => "",
            false => "; hpp-exec verify PLAN --kl PROMPTS.jsonl --against MODEL compares with the exported model",
        };
        let _ = writeln!(out, "both are rounded by hpp-split {}{advice}", verdict.rounded_by.join(" "));
    }
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
    table(&[what, "computed by", "max abs", "max rel", "identical"], rows)
}

fn first_difference(first: &FirstDifference) -> String {
    let mut out = String::from("\n");
    if first.fusion_only == Some(true) && first.is_divided {
        out.push_str("in one partition, the divided layers give the plan's logits bit for bit:\n");
        out.push_str("only the order of sums differs from the unsplit model\n\n");
        return out;
    }
    let at = first.step.map_or(String::new(), |step| format!(" at step {step}"));
    let _ = match &first.boundary {
        Some(name) => writeln!(out, "first difference{at}: {name}, computed by {}", first.partition),
        None => writeln!(out, "first difference{at}: in {}, after the last boundary", first.partition),
    };
    if !first.boundaries.is_empty() {
        out.push_str(&tensor_table("boundary", &first.boundaries));
        out.push('\n');
    }
    if first.fusion_only == Some(true) {
        out.push_str("with its boundaries as outputs, the unsplit model gives the plan's logits bit for bit:\n");
        out.push_str("only operators that ONNX Runtime fuses across the cuts differ\n\n");
    }
    out
}

fn yes_no(yes: bool) -> String {
    (if yes { "yes" } else { "no" }).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A verdict on a prompt of `tokens` tokens.
    fn verdict(tokens: u64) -> Verdict {
        Verdict {
            within_tolerance: true,
            bit_identical: true,
            tolerance: Tolerance(1e-4),
            unsplit_model: "model.onnx".to_owned(),
            rounded_by: vec![],
            partitions: vec![("cpu_0".to_owned(), "cpu".to_owned())],
            prompt_passes: PromptPasses::of_prompt(tokens, 192),
            steps: vec![],
            outputs: vec![],
            first_difference: None,
        }
    }

    /// The last line counts differences of logits only. The table of boundaries may show larger ones.
    #[test]
    fn the_last_line_says_what_was_compared() {
        let difference = Difference { max_rel: 1e-6, ..Difference::NONE };
        let steps =
            vec![StepResult { step: 0, token: 1, plan_token: None, margin: 0.1, difference, within_tolerance: true }];
        let of_text = text(&Verdict { bit_identical: false, steps, ..verdict(1) });
        assert!(of_text.ends_with("logits within tolerance (1e-4), largest max rel 1.000e-6\n"), "{of_text}");
        let outputs = text(&Verdict { bit_identical: false, within_tolerance: false, ..verdict(1) });
        assert!(outputs.contains("DIFFERENT: outputs beyond the tolerance"), "{outputs}");
    }

    #[test]
    fn rounding_that_both_have_is_named() {
        let rounded = text(&Verdict { rounded_by: vec!["--quantize".to_owned()], ..verdict(1) });
        assert!(rounded.ends_with("both are rounded by hpp-split --quantize\n"), "without text no --kl: {rounded}");
        assert!(!text(&verdict(1)).contains("rounded"));
    }

    #[test]
    fn the_passes_of_a_divided_prompt_are_named() {
        let divided = text(&verdict(193));
        assert!(divided.contains("the prompt of 193 tokens in passes of 192 at most"), "{divided}");
        assert!(!text(&verdict(192)).contains("passes"));
    }
}
