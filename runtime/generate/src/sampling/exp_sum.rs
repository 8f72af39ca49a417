//! Reductions over the logits of a whole vocabulary (maximum, sum of exponentials), written so that the compiler vectorises them.

/// Independent accumulators, so that a loop fills vector registers.
const LANES: usize = 16;
/// Logits after which lanes are added up in `f64`: a long sum in `f32` loses digits.
const BLOCK: usize = 1024;

/// The largest logit; minus infinity for an empty row.
pub fn max_logit(logits: &[f32]) -> f32 {
    // A single instruction, unlike `f32::max`. NaN is never larger.
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let (blocks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for block in blocks {
        for (lane, logit) in lanes.iter_mut().zip(block) {
            *lane = larger(*lane, *logit);
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |a, b| larger(a, *b))
}

/// Whether any logit is NaN.
pub fn has_nan(logits: &[f32]) -> bool {
    logits.iter().fold(false, |any, logit| any | logit.is_nan())
}

/// The sum of `exp((logit - max) / temperature)` over all logits: the denominator of softmax relative to its largest numerator.
/// Relative error about 1e-6, with the same result on every machine.
pub fn exp_sum(logits: &[f32], max: f32, temperature: f64) -> f64 {
    // Not zero: zero times minus infinity, the logit of an impossible token, is NaN.
    let scale = ((1.0 / temperature) as f32).max(f32::MIN_POSITIVE);
    logits.chunks(BLOCK).map(|block| block_exp_sum(block, max, scale)).sum()
}

fn block_exp_sum(logits: &[f32], max: f32, scale: f32) -> f64 {
    let (blocks, rest) = logits.as_chunks::<LANES>();
    let mut lanes = [0.0f32; LANES];
    for block in blocks {
        for (lane, logit) in lanes.iter_mut().zip(block) {
            *lane += exp((*logit - max) * scale);
        }
    }
    lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>()
        + rest.iter().map(|logit| f64::from(exp((*logit - max) * scale))).sum::<f64>()
}

/// `e^x` for `x` from minus infinity to 0, to a few units in the last place; 0 below -87, where `f32` underflows.
///
/// Splits `x` into `n ln 2 + r`, computes `e^r` by its Taylor series and multiplies by `2^n` through the exponent bits.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN_2: f32 = std::f32::consts::LN_2;
    // 1.5 * 2^23: adding it rounds to a whole number, which is then in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let inside = if x > -87.0 { x } else { -87.0 };
    let rounded = inside * LOG2_E + ROUND;
    let rest = (inside * LOG2_E - (rounded - ROUND)) * LN_2;
    let series = 1.0
        + rest * (1.0 + rest * (0.5 + rest * (1.0 / 6.0 + rest * (1.0 / 24.0 + rest * (1.0 / 120.0 + rest / 720.0)))));
    let exponent = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let power = f32::from_bits((exponent.wrapping_add(127) << 23) as u32);
    // A logit equal to an infinite maximum gives NaN above; its weight is 1, like the maximum's.
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
    fn infinite_logits_weigh_one_or_zero() {
        assert_eq!(exp_sum(&[f32::INFINITY, 1.0, f32::INFINITY, f32::NEG_INFINITY], f32::INFINITY, 1.0), 2.0);
        assert_eq!(exp_sum(&[f32::NEG_INFINITY, 0.0], 0.0, 1e-6), 1.0);
        assert_eq!((max_logit(&[]), max_logit(&[-1.0, 2.0])), (f32::NEG_INFINITY, 2.0));
        assert!(!has_nan(&[1.0, f32::INFINITY]) && has_nan(&[1.0, f32::NAN]));
    }

    proptest! {
        #[test]
        fn it_is_the_sum_of_exponentials(logits in prop::collection::vec(-80.0f32..30.0, 1..3000), t in 0.05f64..5.0) {
            let max = max_logit(&logits);
            prop_assert_eq!(max, logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
            let exact: f64 = logits.iter().map(|s| (f64::from(s - max) / t).exp()).sum();
            let error = (exp_sum(&logits, max, t) / exact - 1.0).abs();
            prop_assert!(error < 2e-6, "{error}");
        }
    }
}
