//! Sums over a whole vocabulary, written so that the compiler computes many scores at a time.

/// Numbers computed side by side.
const LANES: usize = 16;
/// Lanes are added up in `f64` after so many scores: a long sum of `f32` loses digits.
const BLOCK: usize = 1024;

/// The highest score; minus infinity where there is none.
pub fn highest(scores: &[f32]) -> f32 {
    let higher = |a: f32, b: f32| if b > a { b } else { a };
    let (blocks, rest) = scores.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for block in blocks {
        for (lane, score) in lanes.iter_mut().zip(block) {
            *lane = higher(*lane, *score);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| higher(a, *b))
}

/// Whether all scores are numbers.
pub fn all_numbers(scores: &[f32]) -> bool {
    !scores.iter().fold(false, |any, s| any | s.is_nan())
}

/// The sum of `exp((score - best) / temperature)` over all scores, to about one part in a million, the same on every machine.
pub fn mass(scores: &[f32], best: f32, temperature: f64) -> f64 {
    // Not zero: zero times the minus infinity of an impossible token is no number.
    let scale = ((1.0 / temperature) as f32).max(f32::MIN_POSITIVE);
    scores.chunks(BLOCK).map(|block| block_mass(block, best, scale)).sum()
}

fn block_mass(scores: &[f32], best: f32, scale: f32) -> f64 {
    let (blocks, rest) = scores.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for block in blocks {
        for (lane, score) in lanes.iter_mut().zip(block) {
            *lane += exp((*score - best) * scale);
        }
    }
    lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>()
        + rest.iter().map(|score| f64::from(exp((*score - best) * scale))).sum::<f64>()
}

/// `e^x` for `x` from minus infinity to 0, to a few units of the last place; below -87 it is nothing.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2: f32 = std::f32::consts::LN_2;
    // Adding it leaves no room for digits after the point: the whole number is in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let inside = if x > -87.0 { x } else { -87.0 };
    let rounded = inside * LOG2_E + ROUND;
    let rest = (inside * LOG2_E - (rounded - ROUND)) * LN_2;
    let series = 1.0
        + rest * (1.0 + rest * (0.5 + rest * (1.0 / 6.0 + rest * (1.0 / 24.0 + rest * (1.0 / 120.0 + rest / 720.0)))));
    let exponent = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = f32::from_bits((exponent.wrapping_add(127) << 23) as u32);
    // Scores equal to an infinite best give NaN above; they weigh as much as the best.
    if x > -87.0 {
        series * power
    } else if x <= -87.0 {
        0.0
    } else {
        1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn infinite_scores_weigh_all_or_nothing() {
        assert_eq!(mass(&[f32::INFINITY, 1.0, f32::INFINITY, f32::NEG_INFINITY], f32::INFINITY, 1.0), 2.0);
        assert_eq!(mass(&[f32::NEG_INFINITY, 0.0], 0.0, 1e-6), 1.0);
        assert_eq!((highest(&[]), highest(&[-1.0, 2.0])), (f32::NEG_INFINITY, 2.0));
        assert!(all_numbers(&[1.0, f32::INFINITY]) && !all_numbers(&[1.0, f32::NAN]));
    }

    proptest! {
        #[test]
        fn the_mass_is_the_sum_of_exponentials(scores in prop::collection::vec(-80.0f32..30.0, 1..3000), t in 0.05f64..5.0) {
            let best = highest(&scores);
            prop_assert_eq!(best, scores.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let exact: f64 = scores.iter().map(|s| (f64::from(s - best) / t).exp()).sum();
            let error = (mass(&scores, best, t) / exact - 1.0).abs();
            prop_assert!(error < 2e-6, "{error}");
        }
    }
}
