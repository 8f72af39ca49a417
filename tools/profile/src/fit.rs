//! Fits curves to measured times: least squares of the relative error with non-negative coefficients.
//!
//! With at most three coefficients, the non-negative solution is found by trying every set of coefficients that may be positive. It is the best of
//! the plain least-squares solutions without a negative coefficient: the Karush-Kuhn-Tucker conditions leave no other candidates (Lawson and
//! Hanson, "Solving Least Squares Problems", 1974, chapter 23).

use hpp_schema::Fit;

/// A time at a token count.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub tokens: u64,
    pub ms: f64,
}

/// Which powers of the token count a phase's time may grow with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CurveTerms {
    /// `{1, t}`: a token reads the weights and the context.
    Decode,
    /// `{1, t, t^2}`: a pass computes each token and attends from each token to each other.
    Prefill,
}

impl CurveTerms {
    /// The powers that this many samples determine. One sample determines a constant for decoding, a line through zero for prefill.
    fn powers(self, samples: usize) -> &'static [i32] {
        match (self, samples) {
            (CurveTerms::Decode, 1) => &[0],
            (CurveTerms::Prefill, 1) => &[1],
            (CurveTerms::Decode, _) | (CurveTerms::Prefill, 2) => &[0, 1],
            (CurveTerms::Prefill, _) => &[0, 1, 2],
        }
    }
}

/// The curve with the least sum of squared relative errors; `None` without samples. Times of zero or less (blocks below the noise
/// of the launch cost) count as one nanosecond.
pub fn fit(shape: CurveTerms, samples: &[Sample]) -> Option<Fit> {
    const SMALLEST_MS: f64 = 1e-6;
    let mut samples: Vec<Sample> = samples.iter().copied().filter(|s| s.ms.is_finite()).collect();
    samples.iter_mut().for_each(|sample| sample.ms = sample.ms.max(SMALLEST_MS));
    let scale = samples.iter().map(|sample| sample.tokens.max(1)).max()? as f64;
    let distinct = samples.iter().map(|sample| sample.tokens).collect::<std::collections::BTreeSet<_>>().len();
    let powers = shape.powers(distinct);
    // Tokens are scaled to at most 1, which keeps the equations well conditioned.
    let rows: Vec<Vec<f64>> = samples
        .iter()
        .map(|s| powers.iter().map(|power| (s.tokens as f64 / scale).powi(*power) / s.ms).collect())
        .collect();
    let scaled = non_negative(&rows, powers.len());
    let coefficient = |power: i32| {
        let at = powers.iter().position(|other| *other == power);
        at.map_or(0.0, |at| scaled[at] / scale.powi(power))
    };
    let curve = Fit {
        constant_ms: coefficient(0),
        linear_ms: coefficient(1),
        quadratic_ms: coefficient(2),
        worst_relative_error: 0.0,
        r2: 1.0,
    };
    Some(with_quality(curve, &samples))
}

/// Minimises `|rows * x - 1|` over `x >= 0`.
fn non_negative(rows: &[Vec<f64>], columns: usize) -> Vec<f64> {
    let residual = |x: &[f64]| -> f64 {
        rows.iter().map(|row| (row.iter().zip(x).map(|(a, x)| a * x).sum::<f64>() - 1.0).powi(2)).sum()
    };
    let mut best = (rows.len() as f64, vec![0.0; columns]);
    for set in 1..1usize << columns {
        let free: Vec<usize> = (0..columns).filter(|column| set >> column & 1 == 1).collect();
        let Some(solution) = least_squares(rows, &free) else { continue };
        if solution.iter().all(|x| *x >= 0.0) {
            let mut x = vec![0.0; columns];
            free.iter().zip(solution).for_each(|(column, value)| x[*column] = value);
            let residual = residual(&x);
            if residual < best.0 {
                best = (residual, x);
            }
        }
    }
    best.1
}

/// Minimises `|rows[.., free] * x - 1|` through the normal equations; `None` if they are singular.
fn least_squares(rows: &[Vec<f64>], free: &[usize]) -> Option<Vec<f64>> {
    let n = free.len();
    let mut system = vec![vec![0.0; n + 1]; n];
    for row in rows {
        for (i, a) in free.iter().enumerate() {
            free.iter().enumerate().for_each(|(j, b)| system[i][j] += row[*a] * row[*b]);
            system[i][n] += row[*a];
        }
    }
    solve(system)
}

/// Solves `n` equations, rows of `n + 1` numbers, by Gaussian elimination with partial pivoting.
fn solve(mut system: Vec<Vec<f64>>) -> Option<Vec<f64>> {
    let n = system.len();
    let size = system.iter().flatten().fold(0.0f64, |most, x| most.max(x.abs()));
    for column in 0..n {
        let pivot = (column..n).max_by(|a, b| system[*a][column].abs().total_cmp(&system[*b][column].abs()))?;
        if system[pivot][column].abs() <= size * 1e-14 {
            return None;
        }
        system.swap(column, pivot);
        let pivot = system[column].clone();
        for (_, row) in system.iter_mut().enumerate().filter(|(row, _)| *row != column) {
            let factor = row[column] / pivot[column];
            row.iter_mut().zip(&pivot).skip(column).for_each(|(x, p)| *x -= factor * p);
        }
    }
    Some((0..n).map(|row| system[row][n] / system[row][row]).collect())
}

/// Adds the quality of a fit: the largest relative error and the coefficient of determination.
fn with_quality(curve: Fit, samples: &[Sample]) -> Fit {
    let mean = samples.iter().map(|s| s.ms).sum::<f64>() / samples.len() as f64;
    let total: f64 = samples.iter().map(|s| (s.ms - mean).powi(2)).sum();
    let left: f64 = samples.iter().map(|s| (s.ms - curve.ms(s.tokens)).powi(2)).sum();
    let errors = samples.iter().map(|s| (curve.ms(s.tokens) / s.ms - 1.0).abs());
    // If all times are equal, the total variance is 0 and the fit is exact but for rounding.
    let r2 = if total > 0.0 { 1.0 - left / total } else { 1.0 };
    Fit { worst_relative_error: errors.fold(0.0, f64::max), r2, ..curve }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn samples(points: &[(u64, f64)]) -> Vec<Sample> {
        points.iter().map(|(tokens, ms)| Sample { tokens: *tokens, ms: *ms }).collect()
    }

    fn near(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * a.abs().max(b.abs()).max(1.0)
    }

    #[test]
    fn a_line_is_found_again() {
        let fit = fit(CurveTerms::Decode, &samples(&[(100, 1.2), (200, 1.4), (1000, 3.0)])).unwrap();
        assert!(near(fit.constant_ms, 1.0) && near(fit.linear_ms, 0.002) && fit.quadratic_ms == 0.0, "{fit:?}");
        assert!(fit.worst_relative_error < 1e-9 && near(fit.r2, 1.0));
    }

    #[test]
    fn a_parabola_is_found_again_across_magnitudes() {
        let ms = |t: f64| 0.5 + 0.01 * t + 2e-5 * t * t;
        let points: Vec<(u64, f64)> = [1, 16, 64, 512, 2048, 8192].map(|t| (t, ms(t as f64))).into();
        let fit = fit(CurveTerms::Prefill, &samples(&points)).unwrap();
        assert!((fit.constant_ms - 0.5).abs() < 1e-6 && (fit.linear_ms - 0.01).abs() < 1e-9, "{fit:?}");
        assert!((fit.quadratic_ms - 2e-5).abs() < 1e-12 && (fit.r2 - 1.0).abs() < 1e-9);
    }

    #[test]
    fn what_falls_with_tokens_is_a_constant() {
        let fit = fit(CurveTerms::Decode, &samples(&[(128, 1.1), (2048, 1.0)])).unwrap();
        assert_eq!(fit.linear_ms, 0.0);
        // The constant that is best by relative error: sum(1/y) / sum(1/y^2).
        assert!(near(fit.constant_ms, (1.0 / 1.1 + 1.0) / (1.0 / 1.21 + 1.0)), "{fit:?}");
        assert!(fit.worst_relative_error > 0.03 && fit.worst_relative_error < 0.06);
    }

    #[test]
    fn errors_count_relative_to_the_time() {
        // One point of a straight line is 10 % too slow; a small and a large point pull alike.
        let errors_with_outlier = |wrong: usize| {
            let mut points = [(10, 10.0), (100, 100.0), (1000, 1000.0)];
            points[wrong].1 *= 1.1;
            let fit = fit(CurveTerms::Prefill, &samples(&points[..])).unwrap();
            (fit.ms(10) / 10.0, fit.ms(1000) / 1000.0)
        };
        let (small, large) = (errors_with_outlier(0), errors_with_outlier(2));
        assert!(small.0 > 1.05 && (small.1 - 1.0).abs() < 0.05, "{small:?}");
        assert!(large.1 > 1.05 && (large.0 - 1.0).abs() < 0.05, "{large:?}");
    }

    #[test]
    fn one_point_says_what_it_can() {
        let one = samples(&[(128, 2.0)]);
        assert_eq!(fit(CurveTerms::Decode, &one).unwrap().ms(4096), 2.0);
        assert!(near(fit(CurveTerms::Prefill, &one).unwrap().ms(256), 4.0));
        assert_eq!(fit(CurveTerms::Decode, &[]), None);
        assert_eq!(fit(CurveTerms::Decode, &samples(&[(128, f64::NAN)])), None);
        // The same token count twice is still one point.
        let twice = fit(CurveTerms::Decode, &samples(&[(128, 2.0), (128, 2.0)])).unwrap();
        assert_eq!((twice.constant_ms, twice.linear_ms), (2.0, 0.0));
    }

    #[test]
    fn times_of_zero_are_borne() {
        let fit = fit(CurveTerms::Decode, &samples(&[(128, 0.0), (2048, 0.0)])).unwrap();
        assert!(fit.ms(128) < 1e-5 && fit.r2.is_finite() && fit.worst_relative_error.is_finite());
    }

    /// The sum that the fit minimises.
    fn cost(fit: &Fit, samples: &[Sample]) -> f64 {
        samples.iter().map(|s| (fit.ms(s.tokens) / s.ms - 1.0).powi(2)).sum()
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        /// No coefficient is negative, and no small step that keeps all of them non-negative makes the error smaller.
        #[test]
        fn nothing_nearby_is_better(
            times in proptest::collection::btree_map(1u64..4096, 0.01f64..1000.0, 1..8),
            prefill: bool,
        ) {
            let samples: Vec<Sample> = times.iter().map(|(tokens, ms)| Sample { tokens: *tokens, ms: *ms }).collect();
            let shape = if prefill { CurveTerms::Prefill } else { CurveTerms::Decode };
            let found = fit(shape, &samples).unwrap();
            let coefficients = |fit: &Fit| [fit.constant_ms, fit.linear_ms, fit.quadratic_ms];
            prop_assert!(coefficients(&found).iter().all(|x| *x >= 0.0 && x.is_finite()));
            let best = cost(&found, &samples);
            let powers = shape.powers(samples.len());
            let largest = samples.iter().map(|s| s.ms).fold(0.0, f64::max);
            for power in powers {
                for step in [1e-3, -1e-3, 1e-6, -1e-6] {
                    let mut other = coefficients(&found);
                    let reach = samples.iter().map(|s| s.tokens).max().unwrap() as f64;
                    let at = *power as usize;
                    other[at] = (other[at] + step * largest / reach.powi(*power)).max(0.0);
                    let other = Fit {
                        constant_ms: other[0], linear_ms: other[1], quadratic_ms: other[2], ..found
                    };
                    prop_assert!(cost(&other, &samples) >= best - 1e-7 * best.max(1e-3), "{found:?} {other:?}");
                }
            }
        }

        /// Samples computed from a curve give back that curve.
        #[test]
        fn curves_are_found_again(c in 0.0f64..10.0, l in 0.0f64..0.1, q in 0.0f64..1e-4) {
            prop_assume!(c + l + q > 1e-3);
            let made = Fit { constant_ms: c, linear_ms: l, quadratic_ms: q, worst_relative_error: 0.0, r2: 1.0 };
            let samples: Vec<Sample> =
                [16, 64, 256, 1024, 2048].map(|tokens| Sample { tokens, ms: made.ms(tokens) }).into();
            let found = fit(CurveTerms::Prefill, &samples).unwrap();
            prop_assert!(found.worst_relative_error < 1e-5, "{made:?} {found:?}");
        }
    }
}
