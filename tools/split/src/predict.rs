//! What the cost model expects of a placement.

use hpp_model::Load;
use hpp_partition::{Block, Place, Rates, decode_ms, prefill_ms};
use hpp_schema::Predictions;

/// Speed of a placement, to four significant digits.
pub fn predictions(blocks: &[Block], places: &[Place], load: Load) -> Predictions {
    let decode = decode_ms(blocks, places, &Rates::ASSUMED);
    Predictions {
        source: "static".to_owned(),
        decode_ms: round(decode),
        time_to_first_token_ms: round(prefill_ms(blocks, places, &Rates::ASSUMED, load.prompt)),
        prompt_tokens: load.prompt,
        decode_tokens_per_second: round(if decode > 0.0 { 1e3 / decode } else { 0.0 }),
    }
}

/// Four significant digits: more would pretend.
fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return 0.0;
    }
    let scale = 10f64.powf(3.0 - value.abs().log10().floor());
    (value * scale).round() / scale
}
