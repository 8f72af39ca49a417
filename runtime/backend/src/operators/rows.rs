//! `ActiveRowsMatMul`: a product that reads the rows of active neurons only.

use super::FEW_TOKENS;
use super::element::Element;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};
use std::sync::Mutex;

/// Columns that one task computes. The result does not depend on the number of threads.
const COLUMNS: usize = 512;
/// Rows of weights that are multiplied at once where a pass has many tokens.
const ROWS: usize = 128;

/// A product of activations `[tokens, neurons]` with weights `[neurons, width]`.
pub(super) struct RowsProduct<'a, T> {
    pub activations: &'a [T],
    pub weights: &'a [T],
    pub neurons: usize,
    pub width: usize,
}

impl<T: Element> RowsProduct<'_, T> {
    /// Writes the product to `output`, `[tokens, width]`. `parallel` runs a number of tasks.
    pub fn compute(
        &self,
        output: &mut [T],
        parallel: impl FnOnce(usize, &(dyn Fn(usize) + Send + Sync)) -> ort::Result<()>,
    ) -> ort::Result<()> {
        if output.is_empty() {
            return Ok(());
        }
        let activations = T::wide(self.activations);
        let is_active =
            |neuron: &usize| activations[*neuron..].iter().step_by(self.neurons).any(|number| *number != 0.0);
        let active: Vec<usize> = (0..self.neurons).filter(is_active).collect();
        // The columns of each task, a slice for each token.
        let mut columns: Vec<Vec<&mut [T]>> = vec![];
        columns.resize_with(self.width.div_ceil(COLUMNS), Vec::new);
        for token in output.chunks_mut(self.width) {
            columns.iter_mut().zip(token.chunks_mut(COLUMNS)).for_each(|(task, part)| task.push(part));
        }
        let columns: Vec<Mutex<Vec<&mut [T]>>> = columns.into_iter().map(Mutex::new).collect();
        parallel(columns.len(), &|task| {
            let mut parts = columns[task].lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            self.columns(&activations, &active, task * COLUMNS, &mut parts);
        })
    }

    /// Computes the columns from `first` on for all tokens.
    fn columns(&self, activations: &[f32], active: &[usize], first: usize, parts: &mut [&mut [T]]) {
        let width = parts.first().map_or(0, |part| part.len());
        let mut sums = vec![0.0f32; parts.len() * width];
        if parts.len() <= FEW_TOKENS {
            self.token_by_token(activations, active, first, width, &mut sums);
        } else {
            self.together(activations, active, first, width, &mut sums);
        }
        for (part, sums) in parts.iter_mut().zip(sums.chunks(width)) {
            part.iter_mut().zip(sums).for_each(|(to, from)| *to = T::narrow(*from));
        }
    }

    fn token_by_token(&self, activations: &[f32], active: &[usize], first: usize, width: usize, sums: &mut [f32]) {
        let mut scratch = [const { Vec::new() }; 4];
        let [a, b, c, d] = &mut scratch;
        let (fours, rest) = active.as_chunks::<4>();
        for four in fours {
            let [i, j, k, l] = four.map(|neuron| self.part(neuron, first, width));
            let rows = [T::wide_in(i, a), T::wide_in(j, b), T::wide_in(k, c), T::wide_in(l, d)];
            for (sums, activations) in sums.chunks_mut(width).zip(activations.chunks(self.neurons)) {
                let factors = four.map(|neuron| activations[neuron]);
                if factors != [0.0; 4] {
                    add_four(sums, factors, rows);
                }
            }
        }
        for neuron in rest {
            let row = T::wide_in(self.part(*neuron, first, width), a);
            for (sums, activations) in sums.chunks_mut(width).zip(activations.chunks(self.neurons)) {
                let factor = activations[*neuron];
                if factor != 0.0 {
                    sums.iter_mut().zip(row).for_each(|(sum, number)| *sum += factor * number);
                }
            }
        }
    }

    fn together(&self, activations: &[f32], active: &[usize], first: usize, width: usize, sums: &mut [f32]) {
        let tokens = sums.len() / width;
        let (mut rows, mut factors, mut scratch) = (Vec::new(), Vec::new(), Vec::new());
        for some in active.chunks(ROWS) {
            rows.clear();
            factors.clear();
            some.iter()
                .for_each(|neuron| rows.extend_from_slice(T::wide_in(self.part(*neuron, first, width), &mut scratch)));
            for activations in activations.chunks(self.neurons) {
                factors.extend(some.iter().map(|neuron| activations[*neuron]));
            }
            let shapes = "the vectors have these sizes";
            let factors = ArrayView2::from_shape((tokens, some.len()), &factors).expect(shapes);
            let rows = ArrayView2::from_shape((some.len(), width), &rows).expect(shapes);
            let mut sums = ArrayViewMut2::from_shape((tokens, width), &mut *sums).expect(shapes);
            general_mat_mul(1.0, &factors, &rows, 1.0, &mut sums);
        }
    }

    fn part(&self, neuron: usize, first: usize, width: usize) -> &[T] {
        &self.weights[neuron * self.width + first..][..width]
    }
}

/// Adds four rows to sums. One row at a time would load and store each sum four times as often.
fn add_four(sums: &mut [f32], [a, b, c, d]: [f32; 4], [i, j, k, l]: [&[f32]; 4]) {
    let rows = i.iter().zip(j).zip(k.iter().zip(l));
    for (sum, ((i, j), (k, l))) in sums.iter_mut().zip(rows) {
        *sum += (a * i + b * j) + (c * k + d * l);
    }
}
