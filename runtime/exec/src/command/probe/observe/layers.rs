//! What else layers show: which neurons of a ReLU are above zero, and how spread attention is.

use super::rows::wrong;
use hpp_engine::{EngineError, HostTensor};
use hpp_schema::{AttentionEntropy, NeuronStatistics};

/// Counts of one ReLU's neurons.
#[derive(Clone, Debug, Default)]
pub(super) struct Neurons {
    tokens: u64,
    active: Vec<u64>,
}

impl Neurons {
    /// Adds a token: what the ReLU left of each neuron.
    pub fn add(&mut self, row: &[f32]) {
        self.tokens += 1;
        self.active.resize(row.len(), 0);
        self.active.iter_mut().zip(row).for_each(|(count, value)| *count += u64::from(*value > 0.0));
    }

    /// As a profile records them.
    pub fn statistics(self, block: &str) -> NeuronStatistics {
        NeuronStatistics { block: block.to_owned(), tokens: self.tokens, active: self.active }
    }
}

/// Entropy of one layer's attention, summed over rows: one for each head and token.
#[derive(Clone, Debug, Default)]
pub(super) struct Entropy {
    rows: u64,
    sum: f64,
}

impl Entropy {
    /// Adds weights `[..., tokens, context]`, of which the last `tokens` tokens of each head are new. Weights of tokens that a
    /// row may not see are zero and add nothing.
    pub fn add(&mut self, name: &str, tensor: &HostTensor, weights: &[f32], tokens: usize) -> Result<(), EngineError> {
        let size = |from_end: usize| {
            let at = tensor.shape.len().checked_sub(from_end)?;
            usize::try_from(tensor.shape[at]).ok().filter(|size| *size > 0)
        };
        let (Some(context), Some(there)) = (size(1), size(2).filter(|there| *there >= tokens)) else {
            return Err(wrong(name, format!("its shape {:?} holds no {tokens} rows", tensor.shape)));
        };
        for head in weights.chunks_exact(there * context) {
            head[(there - tokens) * context..].chunks_exact(context).for_each(|row| self.add_row(row));
        }
        Ok(())
    }

    /// `ln S - sum(w ln w) / S` of weights that sum to `S`: the entropy of the weights over `S`.
    fn add_row(&mut self, row: &[f32]) {
        let (mut sum, mut weighted) = (0.0f64, 0.0f64);
        for weight in row.iter().map(|w| f64::from(*w)).filter(|w| *w > 0.0) {
            sum += weight;
            weighted += weight * weight.ln();
        }
        let entropy = sum.ln() - weighted / sum;
        if entropy.is_finite() {
            self.rows += 1;
            // A row of one weight rounds to a hair below zero.
            self.sum += entropy.max(0.0);
        }
    }

    /// As a profile records it.
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
    fn entropy_is_that_of_what_a_row_sees() {
        let (half, third) = (2f64.ln(), 3f64.ln());
        // Two heads, two tokens, three to look at: the first row of each head sees two.
        let weights = [0.5, 0.5, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 3.0];
        let all = entropy(&[1, 2, 2, 3], &weights, 2);
        assert_eq!(all.rows, 4);
        assert!((all.mean - (half + third) / 4.0).abs() < 1e-7, "{all:?}");
        let new = entropy(&[1, 2, 2, 3], &weights, 1);
        assert!(new.rows == 2 && (new.mean - third / 2.0).abs() < 1e-7, "{new:?}");
        // A sink took half of the attention.
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
