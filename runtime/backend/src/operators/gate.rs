//! `ActiveGateMatMul`: a product that is computed where its gate is not 0.

use super::element::Element;
use super::{FEW_TOKENS, Parallel, parts_of_tasks};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2};
use std::sync::PoisonError;

/// Neurons that one task computes, for few and for many tokens: a matrix product packs the tokens anew for each task.
const NEURONS: [usize; 2] = [64, 512];
/// Sums that are added at the same time in a scalar product.
const LANES: usize = 16;

/// The product of tokens `[tokens, width]` with the rows of weights `[neurons, width]`, times a gate `[tokens, neurons]`.
pub(super) struct GateProduct<'a, T> {
    pub gate: &'a [T],
    pub tokens: &'a [T],
    pub weights: &'a [T],
    pub neurons: usize,
    pub width: usize,
}

impl<T: Element> GateProduct<'_, T> {
    /// Writes the product to `output`, `[tokens, neurons]`. `parallel` runs a number of tasks.
    pub fn compute(&self, output: &mut [T], parallel: Parallel<'_>) -> ort::Result<()> {
        if output.is_empty() || self.width == 0 {
            output.fill(T::narrow(0.0));
            return Ok(());
        }
        let (gate, tokens) = (T::wide(self.gate), T::wide(self.tokens));
        let size = NEURONS[usize::from(output.len() / self.neurons > FEW_TOKENS)];
        let neurons = parts_of_tasks(output, self.neurons, size);
        parallel(neurons.len(), &|task| {
            let mut parts = neurons[task].lock().unwrap_or_else(PoisonError::into_inner);
            self.neurons(&gate, &tokens, task * size, &mut parts);
        })
    }

    /// Computes the neurons from `first` on for all tokens.
    fn neurons(&self, gate: &[f32], tokens: &[f32], first: usize, parts: &mut [&mut [T]]) {
        let count = parts.first().map_or(0, |part| part.len());
        let is_active = |neuron: &usize| gate[*neuron..].iter().step_by(self.neurons).any(|number| *number != 0.0);
        let active: Vec<usize> = (first..first + count).filter(is_active).collect();
        parts.iter_mut().for_each(|part| part.fill(T::narrow(0.0)));
        if parts.len() <= FEW_TOKENS {
            self.token_by_token(gate, tokens, &active, first, parts);
        } else {
            self.together(gate, tokens, &active, first, parts);
        }
    }

    fn token_by_token(&self, gate: &[f32], tokens: &[f32], active: &[usize], first: usize, parts: &mut [&mut [T]]) {
        let mut scratch = Vec::new();
        for (index, neuron) in active.iter().enumerate() {
            let row = match active.get(index + 1) {
                Some(next) => T::wide_prefetching(self.row(*neuron), self.row(*next), &mut scratch),
                None => T::wide_in(self.row(*neuron), &mut scratch),
            };
            let tokens = gate.chunks(self.neurons).zip(tokens.chunks(self.width));
            for (part, (gate, token)) in parts.iter_mut().zip(tokens) {
                if gate[*neuron] != 0.0 {
                    part[neuron - first] = T::narrow(gate[*neuron] * scalar_product(row, token));
                }
            }
        }
    }

    fn together(&self, gate: &[f32], tokens: &[f32], active: &[usize], first: usize, parts: &mut [&mut [T]]) {
        let (mut rows, mut scratch) = (Vec::new(), Vec::new());
        active.iter().for_each(|neuron| rows.extend_from_slice(T::wide_in(self.row(*neuron), &mut scratch)));
        let shapes = "the vectors have these sizes";
        let rows = ArrayView2::from_shape((active.len(), self.width), &rows).expect(shapes);
        let tokens = ArrayView2::from_shape((parts.len(), self.width), tokens).expect(shapes);
        let mut products = Array2::zeros((parts.len(), active.len()));
        general_mat_mul(1.0, &tokens, &rows.t(), 0.0, &mut products);
        for ((part, gate), products) in parts.iter_mut().zip(gate.chunks(self.neurons)).zip(products.rows()) {
            for (neuron, product) in active.iter().zip(products) {
                if gate[*neuron] != 0.0 {
                    part[neuron - first] = T::narrow(gate[*neuron] * product);
                }
            }
        }
    }

    fn row(&self, neuron: usize) -> &[T] {
        &self.weights[neuron * self.width..][..self.width]
    }
}

/// The sum of products of two rows, of which [`LANES`] are added at the same time.
fn scalar_product(a: &[f32], b: &[f32]) -> f32 {
    let ((whole_a, rest_a), (whole_b, rest_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0f32; LANES];
    for (a, b) in whole_a.iter().zip(whole_b) {
        for lane in 0..LANES {
            sums[lane] += a[lane] * b[lane];
        }
    }
    let rest: f32 = rest_a.iter().zip(rest_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}
