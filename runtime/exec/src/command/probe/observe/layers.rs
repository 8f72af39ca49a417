//! Statistics inside layers: active neurons of a ReLU, entropy of attention.

use super::rows::wrong;
use hpp_engine::{EngineError, HostTensor};
use hpp_schema::{AttentionEntropy, NeuronStatistics};

/// Activation counts of one ReLU's neurons.
#[derive(Clone, Debug, Default)]
pub(super) struct Neurons {
    tokens: u64,
    active: Vec<u64>,
}

impl Neurons {
    /// Adds a token: the output of the ReLU for each neuron.
    pub fn add(&mut self, row: &[f32]) {
        self.tokens += 1;
        self.active.resize(row.len(), 0);
        self.active.iter_mut().zip(row).for_each(|(count, value)| *count += u64::from(*value > 0.0));
    }

    /// The record for a profile.
    pub fn statistics(self, block: &str) -> NeuronStatistics {
        NeuronStatistics { block: block.to_owned(), tokens: self.tokens, active: self.active }
    }
}

/// Entropy of one layer's attention, summed over rows, one per head and token.
#[derive(Clone, Debug, Default)]
pub(super) struct Entropy {
    rows: u64,
    sum: f64,
}

impl Entropy {
    /// Adds attention weights `[..., all tokens, context]`. The last `tokens` rows of each head are new. Masked weights are zero
    /// and add nothing.
    pub fn add(&mut self, name: &str, tensor: &HostTensor, weights: &[f32], tokens: usize) -> Result<(), EngineError> {
        let size = |from_end: usize| {
            let axis = tensor.shape.len().checked_sub(from_end)?;
            usize::try_from(tensor.shape[axis]).ok().filter(|size| *size > 0)
        };
        let (Some(context), Some(rows)) = (size(1), size(2).filter(|rows| *rows >= tokens)) else {
            return Err(wrong(name, format!("its shape {:?} has fewer than {tokens} rows", tensor.shape)));
        };
        for head in weights.chunks_exact(rows * context) {
            head[(rows - tokens) * context..].chunks_exact(context).for_each(|row| self.add_row(row));
        }
        Ok(())
    }

    /// `ln S - sum(w ln w) / S`, where `S` is the sum of the weights `w`: the entropy of `w / S`.
    fn add_row(&mut self, row: &[f32]) {
        let (mut sum, mut weighted) = (0.0f64, 0.0f64);
        for weight in row.iter().map(|w| f64::from(*w)).filter(|w| *w > 0.0) {
            sum += weight;
            weighted += weight * weight.ln();
        }
        let entropy = sum.ln() - weighted / sum;
        if entropy.is_finite() {
            self.rows += 1;
            // Rounding can make the entropy of a single weight slightly negative.
            self.sum += entropy.max(0.0);
        }
    }

    /// The record for a profile.
    pub fn statistics(&self, block: &str) -> AttentionEntropy {
        let mean = if self.rows == 0 { 0.0 } else { self.sum / self.rows as f64 };
        AttentionEntropy { block: block.to_owned(), rows: self.rows, mean }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entropy(shape: &[u64], weights: &[f32], tokens: usize) -> AttentionEntropy {
        let mut entropy = Entropy::default();
        entropy.add("a", &HostTensor::from_f32(shape, weights), weights, tokens).unwrap();
        entropy.statistics("b")
    }

    #[test]
    fn entropy_is_that_of_the_weights_that_are_not_masked() {
        let (half, third) = (2f64.ln(), 3f64.ln());
        // Two heads, two tokens, a context of three: the first row of each head has a masked weight.
        let weights = [0.5, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0];
        let all = entropy(&[1, 2, 2, 3], &weights, 2);
        assert_eq!(all.rows, 4);
        assert!((all.mean - (half + third) / 4.0).abs() < 1e-7, "{all:?}");
        let new = entropy(&[1, 2, 2, 3], &weights, 1);
        assert!(new.rows == 2 && (new.mean - third / 2.0).abs() < 1e-7, "{new:?}");
        // An attention sink takes half of the weight.
        assert!((entropy(&[1, 2], &[0.25, 0.25], 1).mean - half).abs() < 1e-7);
        assert_eq!(entropy(&[1, 2], &[0.0, 0.0], 1).rows, 0);
    }

    #[test]
    fn other_shapes_are_refused() {
        let mut entropy = Entropy::default();
        assert!(entropy.add("a", &HostTensor::from_f32(&[2], &[1.0, 0.0]), &[1.0, 0.0], 1).is_err());
        assert!(entropy.add("a", &HostTensor::from_f32(&[1, 2], &[1.0, 0.0]), &[1.0, 0.0], 2).is_err());
    }

    #[test]
    fn neurons_above_zero_are_counted() {
        let mut neurons = Neurons::default();
        neurons.add(&[0.0, 1.0, -0.0, f32::NAN]);
        neurons.add(&[2.0, 1e-30, 0.0, 0.0]);
        let s = neurons.statistics("b");
        assert_eq!((s.tokens, s.active), (2, vec![1, 2, 0, 0]));
    }
}
