//! What quantizing does, in words.

use hpp_onnx::{BlockFormat, QuantizeSummary, ScaleRule};
use hpp_schema::ByteSize;

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

/// What takes long before formats are chosen.
pub const MEASURING: &str = "quantization: to choose formats, the errors of each are measured, which reads all weights";

/// How to measure what quantizing changes.
pub const MEASURE: &str = "what that changes: hpp-exec verify PLAN --kl PROMPTS.jsonl --against MODEL";

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
