//! `ActiveRowsMatMul`: a product that reads the rows of active neurons only.

use super::element::Element;
use super::prefetch::prefetch;
use super::{FEW_TOKENS, Parallel, parts_of_tasks};
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};
use std::sync::{Mutex, PoisonError};

/// Parts of the active neurons, each of which one task adds up where a pass has few tokens: a task reads whole rows, which is faster than pieces of
/// them. The result does not depend on the number of threads.
const PARTS: usize = 8;
/// Columns of four rows that are added up while those of the next four rows are prefetched.
const BLOCK: usize = 64;
/// Columns that one task computes where a pass has many tokens.
const COLUMNS: usize = 512;
/// Rows of weights that are multiplied at once where a pass has many tokens. With more, matrixmultiply would add up a sum in several parts.
const ROWS: usize = 256;

/// A product of activations `[tokens, neurons]` with weights `[neurons, width]`.
pub(super) struct RowsProduct<'a, T> {
    pub activations: &'a [T],
    pub weights: &'a [T],
    pub neurons: usize,
    pub width: usize,
}

impl<T: Element> RowsProduct<'_, T> {
    /// Writes the product to `output`, `[tokens, width]`. `parallel` runs a number of tasks.
    pub fn compute(&self, output: &mut [T], parallel: Parallel<'_>) -> ort::Result<()> {
        if output.is_empty() {
            return Ok(());
        }
        let activations = T::wide(self.activations);
        match output.len() / self.width <= FEW_TOKENS {
            true => self.by_neurons(&activations, output, parallel),
            false => self.by_columns(&activations, output, parallel),
        }
    }

    /// Each task adds up some of the active neurons of one token. So the sums of a token do not depend on other tokens of its pass.
    fn by_neurons(&self, activations: &[f32], output: &mut [T], parallel: Parallel<'_>) -> ort::Result<()> {
        let active: Vec<Vec<(usize, f32)>> = activations.chunks(self.neurons).map(active_of).collect();
        let sums: Vec<Mutex<Vec<f32>>> = (0..active.len() * PARTS).map(|_| Mutex::default()).collect();
        parallel(sums.len(), &|task| {
            let active = &active[task / PARTS];
            let part = active.chunks(active.len().div_ceil(PARTS).max(1)).nth(task % PARTS);
            *sums[task].lock().unwrap_or_else(PoisonError::into_inner) = self.sums(part.unwrap_or_default());
        })?;
        for (token, parts) in output.chunks_mut(self.width).zip(sums.chunks(PARTS)) {
            let mut all = vec![0.0f32; self.width];
            for part in parts {
                let part = part.lock().unwrap_or_else(PoisonError::into_inner);
                all.iter_mut().zip(&*part).for_each(|(sum, more)| *sum += more);
            }
            token.iter_mut().zip(all).for_each(|(to, from)| *to = T::narrow(from));
        }
        Ok(())
    }

    /// The sum of rows, each times its activation.
    fn sums(&self, active: &[(usize, f32)]) -> Vec<f32> {
        let mut sums = vec![0.0f32; self.width];
        let (fours, rest) = active.as_chunks::<4>();
        let mut scratch = [const { Vec::new() }; 4];
        for (index, four) in fours.iter().enumerate() {
            let next = fours.get(index + 1).map_or(rest, |next| next);
            for (block, sums) in sums.chunks_mut(BLOCK).enumerate() {
                let part = |neuron: usize| self.part(neuron, block * BLOCK, sums.len());
                next.iter().for_each(|(neuron, _)| prefetch(part(*neuron)));
                let [a, b, c, d] = &mut scratch;
                let [i, j, k, l] = four.map(|(neuron, _)| part(neuron));
                let rows = [T::wide_in(i, a), T::wide_in(j, b), T::wide_in(k, c), T::wide_in(l, d)];
                add_four(sums, four.map(|(_, factor)| factor), rows);
            }
        }
        for (neuron, factor) in rest {
            let row = T::wide_in(self.part(*neuron, 0, self.width), &mut scratch[0]);
            sums.iter_mut().zip(row).for_each(|(sum, number)| *sum += factor * number);
        }
        sums
    }

    /// Each task computes some columns of all tokens.
    fn by_columns(&self, activations: &[f32], output: &mut [T], parallel: Parallel<'_>) -> ort::Result<()> {
        let is_active =
            |neuron: &usize| activations[*neuron..].iter().step_by(self.neurons).any(|number| *number != 0.0);
        let active: Vec<usize> = (0..self.neurons).filter(is_active).collect();
        let columns = parts_of_tasks(output, self.width, COLUMNS);
        parallel(columns.len(), &|task| {
            let mut parts = columns[task].lock().unwrap_or_else(PoisonError::into_inner);
            let width = parts.first().map_or(0, |part| part.len());
            let mut sums = vec![0.0f32; parts.len() * width];
            self.together(activations, &active, task * COLUMNS, width, &mut sums);
            for (part, sums) in parts.iter_mut().zip(sums.chunks(width)) {
                part.iter_mut().zip(sums).for_each(|(to, from)| *to = T::narrow(*from));
            }
        })
    }

    fn together(&self, activations: &[f32], active: &[usize], first: usize, width: usize, sums: &mut [f32]) {
        let tokens = sums.len() / width;
        let (mut rows, mut factors, mut scratch) = (Vec::new(), Vec::new(), Vec::new());
        // Chunks end at fixed neurons, so that the sums of a token do not depend on what other tokens activate.
        for some in active.chunk_by(|a, b| a / ROWS == b / ROWS) {
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

/// The active neurons of a token, with their activations.
fn active_of(activations: &[f32]) -> Vec<(usize, f32)> {
    activations.iter().copied().enumerate().filter(|(_, activation)| *activation != 0.0).collect()
}

/// Adds four rows to sums. One row at a time would load and store each sum four times as often.
fn add_four(sums: &mut [f32], [a, b, c, d]: [f32; 4], [i, j, k, l]: [&[f32]; 4]) {
    let rows = i.iter().zip(j).zip(k.iter().zip(l));
    for (sum, ((i, j), (k, l))) in sums.iter_mut().zip(rows) {
        *sum += (a * i + b * j) + (c * k + d * l);
    }
}
