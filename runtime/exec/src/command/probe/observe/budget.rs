//! Limits the tokens of a pass so that the tapped tensors stay small compared with the model.

use hpp_schema::probe::{Tap, TapKind};
use hpp_schema::{Dim, Plan};

/// Limits of the bytes of tapped tensors in one pass; between them, a sixteenth of the weights.
const MIN_BUDGET: u64 = 16 << 20;
const MAX_BUDGET: u64 = 256 << 20;

/// Width assumed for a tensor without a fixed width.
const ASSUMED_WIDTH: u64 = 4096;

/// Most tokens of a pass, for a text of `total` tokens in the end.
pub(super) fn tokens_per_pass(plan: &Plan, taps: &[Tap], total: u64) -> u64 {
    let weights = plan.partitions.iter().map(|p| p.bytes.weights.0).fold(0, u64::saturating_add);
    let budget = (weights / 16).clamp(MIN_BUDGET, MAX_BUDGET);
    let bytes = taps.iter().map(|tap| bytes_per_token(plan, tap, total)).fold(0, u64::saturating_add);
    let fits = (budget / bytes.max(1)).max(1);
    plan.schedule.prefill_chunk.map_or(fits, |chunk| fits.min(chunk.max(1)))
}

fn bytes_per_token(plan: &Plan, tap: &Tap, total: u64) -> u64 {
    let mut outputs = plan.partitions.iter().flat_map(|partition| &partition.outputs);
    let Some(output) = outputs.find(|output| output.name == tap.name) else { return 0 };
    let size = |dim: Option<&Dim>| dim.and_then(Dim::as_fixed);
    let width = match tap.kind {
        TapKind::Attention => size(output.shape.get(1)).unwrap_or(64).saturating_mul(total),
        _ => size(output.shape.last()).unwrap_or(ASSUMED_WIDTH),
    };
    output.dtype.bytes_for(width).unwrap_or(u64::MAX)
}
