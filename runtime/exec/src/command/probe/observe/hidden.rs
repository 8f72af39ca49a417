//! Statistics of the hidden state at a boundary: moments of its elements, and its cosine distance from the previous boundary.

use hpp_schema::{BlockInfluence, BoundaryStatistics};

/// Independent sums, so that the compiler uses vector registers and rounding errors stay small.
const LANES: usize = 8;

/// Elements in one piece of the update.
const PIECE: usize = 4096;

/// Moments of all elements, updated piece by piece (Welford's method as generalised by Chan, Golub and LeVeque, 1979).
#[derive(Clone, Debug, Default)]
pub(super) struct Moments {
    elements: u64,
    not_finite: u64,
    sum_abs: f64,
    mean: f64,
    squares: f64,
    max_abs: f32,
}

impl Moments {
    /// Adds elements.
    pub fn add(&mut self, values: &[f32]) {
        for piece in values.chunks(PIECE) {
            if not_finite(piece) == 0 {
                self.add_finite(piece);
            } else {
                let finite: Vec<f32> = piece.iter().copied().filter(|v| v.is_finite()).collect();
                self.not_finite += (piece.len() - finite.len()) as u64;
                self.add_finite(&finite);
            }
        }
    }

    fn add_finite(&mut self, piece: &[f32]) {
        if piece.is_empty() {
            return;
        }
        let n = piece.len() as f64;
        let mean = sum(piece, f64::from) / n;
        let squares = sum(piece, |v| (f64::from(v) - mean) * (f64::from(v) - mean));
        let share = n / (self.elements as f64 + n);
        let delta = mean - self.mean;
        self.squares += squares + delta * delta * share * self.elements as f64;
        self.mean += delta * share;
        self.sum_abs += sum(piece, |v| f64::from(v.abs()));
        self.max_abs = piece.iter().fold(self.max_abs, |most, v| most.max(v.abs()));
        self.elements += piece.len() as u64;
    }

    /// The record for a profile.
    pub fn statistics(&self, block: &str) -> BoundaryStatistics {
        let mean_abs = if self.elements == 0 { 0.0 } else { self.sum_abs / self.elements as f64 };
        BoundaryStatistics {
            block: block.to_owned(),
            elements: self.elements,
            not_finite: self.not_finite,
            mean_abs,
            mean: self.mean,
            squares: self.squares,
            max_abs: f64::from(self.max_abs),
        }
    }
}

/// Number of elements that are infinite or NaN: those with all exponent bits set.
fn not_finite(values: &[f32]) -> usize {
    values.iter().map(|v| usize::from(v.to_bits() & 0x7f80_0000 == 0x7f80_0000)).sum()
}

fn sum(values: &[f32], term: impl Fn(f32) -> f64) -> f64 {
    let (chunks, rest) = values.as_chunks::<LANES>();
    let mut lanes = [0.0f64; LANES];
    for chunk in chunks {
        for (lane, value) in lanes.iter_mut().zip(chunk) {
            *lane += term(*value);
        }
    }
    lanes.iter().sum::<f64>() + rest.iter().map(|v| term(*v)).sum::<f64>()
}

/// `1 - cosine(input, output)` of one block, summed over tokens.
#[derive(Clone, Debug, Default)]
pub(super) struct Influence {
    tokens: u64,
    sum: f64,
}

impl Influence {
    /// Adds a token: the block's input and output hidden state.
    pub fn add(&mut self, input: &[f32], output: &[f32]) {
        let cosine = dot(input, output) / (dot(input, input) * dot(output, output)).sqrt();
        // A zero vector and a vector with an infinite element have no direction.
        if cosine.is_finite() {
            self.tokens += 1;
            self.sum += 1.0 - cosine.clamp(-1.0, 1.0);
        }
    }

    /// The record for a profile.
    pub fn statistics(&self, block: &str) -> BlockInfluence {
        let mean = if self.tokens == 0 { 0.0 } else { self.sum / self.tokens as f64 };
        BlockInfluence { block: block.to_owned(), tokens: self.tokens, mean }
    }
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0f64; LANES];
    for (a, b) in a.iter().zip(b) {
        for i in 0..LANES {
            lanes[i] += f64::from(a[i]) * f64::from(b[i]);
        }
    }
    let rest = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() <= 1e-9 * (1.0 + b.abs())
    }

    proptest! {
        #[test]
        fn moments_are_those_of_all_elements(passes in proptest::collection::vec(proptest::collection::vec(-1e4..1e4f32, 0..40), 0..6)) {
            let mut moments = Moments::default();
            passes.iter().for_each(|pass| moments.add(pass));
            let all: Vec<f64> = passes.iter().flatten().map(|v| f64::from(*v)).collect();
            let n = all.len().max(1) as f64;
            let mean = all.iter().sum::<f64>() / n;
            let s = moments.statistics("b");
            prop_assert_eq!((s.elements, s.not_finite), (all.len() as u64, 0));
            prop_assert!(close(s.mean, mean));
            prop_assert!(close(s.mean_abs, all.iter().map(|v| v.abs()).sum::<f64>() / n));
            prop_assert!(close(s.squares, all.iter().map(|v| (v - mean).powi(2)).sum()));
            prop_assert_eq!(s.max_abs, all.iter().fold(0.0, |most: f64, v| most.max(v.abs())));
        }

        #[test]
        fn influence_is_one_minus_the_cosine(a in proptest::collection::vec(0.1..9.0f32, 19), b in proptest::collection::vec(-9.0..9.0f32, 19)) {
            let mut influence = Influence::default();
            influence.add(&a, &b);
            let product = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| f64::from(x * y)).sum::<f64>();
            let cosine = product(&a, &b) / (product(&a, &a).sqrt() * product(&b, &b).sqrt());
            prop_assert!((influence.statistics("b").mean - (1.0 - cosine)).abs() < 1e-5);
        }
    }

    #[test]
    fn long_rows_are_processed_in_pieces() {
        let values: Vec<f32> = (0..3 * PIECE + 5).map(|i| (i % 97) as f32 + 1e4).collect();
        let mut moments = Moments::default();
        moments.add(&values);
        let mean = values.iter().map(|v| f64::from(*v)).sum::<f64>() / values.len() as f64;
        let squares: f64 = values.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum();
        let s = moments.statistics("b");
        assert!(close(s.mean, mean) && close(s.squares, squares), "{s:?}, not {mean} {squares}");
    }

    #[test]
    fn elements_that_are_not_finite_are_counted_separately() {
        let mut moments = Moments::default();
        moments.add(&[1.0, f32::NAN, -3.0, f32::NEG_INFINITY]);
        let s = moments.statistics("b");
        assert_eq!((s.elements, s.not_finite, s.mean, s.mean_abs, s.max_abs, s.squares), (2, 2, -1.0, 2.0, 3.0, 8.0));
        let mut influence = Influence::default();
        influence.add(&[0.0; 3], &[1.0; 3]);
        influence.add(&[f32::NAN; 3], &[1.0; 3]);
        influence.add(&[1.0, 0.0, 0.0], &[-2.0, 0.0, 0.0]);
        assert_eq!((influence.statistics("b").tokens, influence.statistics("b").mean), (1, 2.0));
    }
}
