//! Limits the tokens of a pass so that the tapped tensors stay small compared with the model.

use hpp_schema::probe::{Tap, TapKind};
use hpp_schema::{Dim, OutputRole, PartitionOutput, Plan};

/// Smallest and largest budget for the tapped tensors of one pass, bytes. Between the two the budget is a sixteenth of the weights.
const MIN_BUDGET: u64 = 16 << 20;
const MAX_BUDGET: u64 = 256 << 20;

/// Width assumed for a tensor without a fixed width.
const ASSUMED_WIDTH: u64 = 4096;

/// Most tokens of a pass. `total`: tokens of the whole text, prompt and answer, which set the width of attention weights.
pub(super) fn tokens_per_pass(plan: &Plan, taps: &[Tap], total: u64) -> u64 {
    let width = |tap: &Tap, output: &PartitionOutput| match tap.kind {
        TapKind::Attention => output.shape.get(1).and_then(Dim::as_fixed).unwrap_or(64).saturating_mul(total),
        _ => row_of(output),
    };
    within_budget(plan, taps.iter().map(|tap| bytes(plan, &tap.name, |output| width(tap, output))))
}

/// Most positions of a pass if taps have one row for each position and the logits of every position are computed.
pub(super) fn positions_per_pass<'a>(plan: &'a Plan, taps: impl Iterator<Item = &'a str>) -> u64 {
    let logits = plan.model.outputs.iter().filter(|output| output.role == OutputRole::Logits);
    let logits = logits.map(|output| output.name.as_str());
    within_budget(plan, taps.chain(logits).map(|name| bytes(plan, name, row_of)))
}

/// Most tokens of a pass, with the bytes of each tensor per token.
fn within_budget(plan: &Plan, bytes: impl Iterator<Item = u64>) -> u64 {
    let weights = plan.partitions.iter().map(|p| p.bytes.weights.0).fold(0, u64::saturating_add);
    let budget = (weights / 16).clamp(MIN_BUDGET, MAX_BUDGET);
    let fits = (budget / bytes.fold(0, u64::saturating_add).max(1)).max(1);
    plan.schedule.prefill_chunk.map_or(fits, |chunk| fits.min(chunk.max(1)))
}

fn row_of(output: &PartitionOutput) -> u64 {
    output.shape.last().and_then(Dim::as_fixed).unwrap_or(ASSUMED_WIDTH)
}

/// Bytes of one token's row of an output. `width`: numbers in the row.
fn bytes(plan: &Plan, name: &str, width: impl Fn(&PartitionOutput) -> u64) -> u64 {
    let mut outputs = plan.partitions.iter().flat_map(|partition| &partition.outputs);
    let output = outputs.find(|output| output.name == name);
    output.map_or(0, |output| output.dtype.bytes_for(width(output)).unwrap_or(u64::MAX))
}
