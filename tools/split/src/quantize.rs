//! Text on what quantizing does, and on the progress of measurements for it.

use crate::error::SplitError;
use crate::lines::Lines;
use hpp_model::{Analysis, quantization_candidates, quantization_formats};
use hpp_onnx::{BlockFormat, Candidates, QuantizeOptions, QuantizeSummary, ScaleRule};
use hpp_schema::{ByteSize, InputRole, ModelKind, gives_one_position};
use std::collections::BTreeMap;

/// `quantizing 29 weights to 4 bits (blocks of 32): 7.1 MiB -> 1.1 MiB`, and what is left. Weights are read later, when they are written.
pub fn summary(summary: &QuantizeSummary) -> String {
    let formats: Vec<String> = summary.formats.iter().map(|(format, count)| format_text(*format, *count)).collect();
    let human = |bytes| ByteSize(bytes).human();
    let (before, after) = (human(summary.bytes_before), human(summary.bytes_after));
    let mut text = format!("quantizing {}: {before} -> {after}", formats.join(", "));
    if summary.compensated > 0 {
        text += &format!("; errors of {} compensated for {} positions", summary.compensated, summary.positions);
    }
    if summary.bytes_kept > 0 {
        text += &format!("; {} of them stay as floats too, for other operators", human(summary.bytes_kept));
    }
    if summary.bytes_tied > 0 {
        text += &format!(
            "; embedding and head share {}: one copy in the file, two in memory and in the table of partitions, because the head's \
             kernel packs its own",
            human(summary.bytes_tied)
        );
    }
    if !summary.left.is_empty() {
        text += &format!("; left as they are: {}", summary.left_text());
    }
    text
}

/// The matrices of a model whose formats may be chosen, with the errors of each. Says on stderr that this takes long before it starts, and
/// then every few seconds how far it is.
pub fn candidates(analysis: &Analysis, options: &QuantizeOptions) -> Result<Candidates, SplitError> {
    let mut lines = Lines::default();
    Ok(quantization_candidates(analysis, options, &mut |done, total| lines.say(&measuring(done, total)))?)
}

/// The format of each matrix that the options' budget allows, by squared errors. Reports its progress like [`candidates`]. The model must
/// have logits of all positions.
pub fn formats(
    analysis: &Analysis,
    options: &QuantizeOptions,
) -> Result<BTreeMap<String, Option<BlockFormat>>, SplitError> {
    let mut lines = Lines::default();
    Ok(quantization_formats(analysis, options, &mut |done, total| lines.say(&measuring(done, total)))?)
}

/// The line on stderr while errors are measured before formats are chosen: `done` of `total` bytes.
fn measuring(done: u64, total: u64) -> String {
    let human = |bytes| ByteSize(bytes).human();
    match done {
        0 => format!(
            "quantization: to choose formats, the errors of each are measured, which reads all weights and computes with {}",
            human(total)
        ),
        _ => format!("quantization: errors of {} of {} measured", human(done), human(total)),
    }
}

/// How to measure what quantizing changes.
pub fn how_to_measure(analysis: &Analysis) -> &'static str {
    let takes_embeddings = analysis.inputs.iter().any(|input| input.role == InputRole::Embeddings);
    match analysis.kind {
        ModelKind::SingleRun => {
            "what that changes: run hpp-exec PLAN and hpp-exec MODEL with the same --inputs, and compare what --outputs names"
        }
        _ if takes_embeddings || gives_one_position(&analysis.outputs) => {
            "what that changes: run hpp-exec PLAN and hpp-exec MODEL with the same prompts and --logits FILE.npy, and compare the files"
        }
        _ => "what that changes: hpp-exec verify PLAN --kl PROMPTS.jsonl --against MODEL",
    }
}

fn format_text(format: BlockFormat, count: usize) -> String {
    let BlockFormat { bits, block_size, asymmetric, scale } = format;
    let zero_points = match (asymmetric, scale) {
        (true, _) => ", zero points",
        (false, ScaleRule::Fitted) => ", fitted scales",
        (false, ScaleRule::Extremes) => "",
    };
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} weight{plural} to {} bits (blocks of {block_size}{zero_points})", bits.count())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_measurements_are_announced_before_they_begin() {
        assert!(
            measuring(0, 96 << 20)
                .ends_with("the errors of each are measured, which reads all weights and computes with 96 MiB")
        );
        assert_eq!(measuring(16 << 20, 96 << 20), "quantization: errors of 16 MiB of 96 MiB measured");
    }
}
