//! HPP's own operators, which compute only the active neurons of an MLP: those whose ReLU gives another number than 0. hpp-split writes them
//! into partitions that compute on the host.
//!
//! `T` is float32 or float16; sums are in float32. Both operators read their weights as stored and never pack them.
//!
//! | operator (domain `hpp`, version 1) | inputs | output |
//! |---|---|---|
//! | `ActiveRowsMatMul` | activations `[..., neurons]` and weights `[neurons, width]` of T | their product, `[..., width]` |
//! | `ActiveGateMatMul` | gate `[..., neurons]`, tokens `[..., width]` and weights `[neurons, width]` of T | gate * (tokens x transposed weights), `[..., neurons]` |
//!
//! A row of the weights is read only if at least one token has another activation (gate) than 0 for it. So numbers in the rows of neurons that
//! are inactive for all tokens never count, not even infinities.

mod element;
mod gate;
mod prefetch;
mod rows;
#[cfg(test)]
mod tests;

use element::Element;
use gate::GateProduct;
use half::f16;
use ort::operator::{
    BoxedKernel, ComputeContext, KernelContext, Operator, OperatorDomain, OperatorInput, OperatorOutput,
};
use ort::value::{ValueRef, ValueRefMut};
use rows::RowsProduct;
use std::marker::PhantomData;
use std::ops::RangeInclusive;
use std::sync::Mutex;

const DOMAIN: &str = "hpp";

/// Tokens of a pass up to which a row of weights is multiplied with each token in turn; more tokens are one matrix product with the rows of active
/// neurons. The planner predicts times accordingly (`hpp-model: problem/neurons.rs`).
const FEW_TOKENS: usize = 8;

/// Runs a number of tasks, each with its number.
type Parallel<'a> = &'a dyn Fn(usize, &(dyn Fn(usize) + Send + Sync)) -> ort::Result<()>;

/// The parts of a matrix with rows of this width that tasks write, `size` columns each: a slice for each row.
fn parts_of_tasks<T>(matrix: &mut [T], width: usize, size: usize) -> Vec<Mutex<Vec<&mut [T]>>> {
    let mut tasks: Vec<Vec<&mut [T]>> = vec![];
    tasks.resize_with(width.div_ceil(size), Vec::new);
    for row in matrix.chunks_mut(width) {
        tasks.iter_mut().zip(row.chunks_mut(size)).for_each(|(task, part)| task.push(part));
    }
    tasks.into_iter().map(Mutex::new).collect()
}

/// All operators.
pub(crate) fn domain() -> ort::Result<OperatorDomain> {
    OperatorDomain::new(DOMAIN)?
        .add(ActiveRowsMatMul::<f32>(PhantomData))?
        .add(ActiveRowsMatMul::<f16>(PhantomData))?
        .add(ActiveGateMatMul::<f32>(PhantomData))?
        .add(ActiveGateMatMul::<f16>(PhantomData))
}

struct ActiveRowsMatMul<T>(PhantomData<T>);

impl<T: Element> Operator for ActiveRowsMatMul<T> {
    type Kernel<'attr> = BoxedKernel<'attr>;

    fn name(&self) -> &'static str {
        "ActiveRowsMatMul"
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        [OperatorInput::required(T::TYPE), OperatorInput::required(T::TYPE)]
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        [OperatorOutput::required(T::TYPE)]
    }

    fn create_kernel<'attr>(&self, _: &KernelContext<'attr>) -> ort::Result<Self::Kernel<'attr>> {
        Ok(Box::new(|context: &ComputeContext| {
            let [activations, weights] = [input(context, 0)?, input(context, 1)?];
            let (activations, weights) = (tensor::<T>(&activations)?, tensor::<T>(&weights)?);
            let [neurons, width] = activations.matrix_of(&weights)?;
            let mut output = output(context, activations.with_last(width))?;
            let sums = output.try_extract_tensor_mut::<T>()?.1;
            let product = RowsProduct { activations: activations.data, weights: weights.data, neurons, width };
            product.compute(sums, &|tasks, task| context.par_for(tasks, 0, task))
        }))
    }
}

struct ActiveGateMatMul<T>(PhantomData<T>);

impl<T: Element> Operator for ActiveGateMatMul<T> {
    type Kernel<'attr> = BoxedKernel<'attr>;

    fn name(&self) -> &'static str {
        "ActiveGateMatMul"
    }

    fn versions(&self) -> RangeInclusive<u32> {
        1..=1
    }

    fn inputs(&self) -> impl IntoIterator<Item = OperatorInput> {
        [OperatorInput::required(T::TYPE), OperatorInput::required(T::TYPE), OperatorInput::required(T::TYPE)]
    }

    fn outputs(&self) -> impl IntoIterator<Item = OperatorOutput> {
        [OperatorOutput::required(T::TYPE)]
    }

    fn create_kernel<'attr>(&self, _: &KernelContext<'attr>) -> ort::Result<Self::Kernel<'attr>> {
        Ok(Box::new(|context: &ComputeContext| {
            let [gate, tokens, weights] = [input(context, 0)?, input(context, 1)?, input(context, 2)?];
            let (gate, tokens, weights) = (tensor::<T>(&gate)?, tensor::<T>(&tokens)?, tensor::<T>(&weights)?);
            let [neurons, _] = gate.matrix_of(&weights)?;
            let width = tokens.last();
            if tokens.with_last(neurons) != gate.shape || weights.last() != width {
                return Err(ort::Error::new(format!(
                    "ActiveGateMatMul: a gate of {:?}, tokens of {:?} and weights of {:?} do not fit together",
                    gate.shape, tokens.shape, weights.shape
                )));
            }
            let mut output = output(context, gate.shape.clone())?;
            let gated = output.try_extract_tensor_mut::<T>()?.1;
            let product = GateProduct { gate: gate.data, tokens: tokens.data, weights: weights.data, neurons, width };
            product.compute(gated, &|tasks, task| context.par_for(tasks, 0, task))
        }))
    }
}

/// A tensor on the host.
struct Tensor<'a, T> {
    shape: Vec<i64>,
    data: &'a [T],
}

impl<T> Tensor<'_, T> {
    /// The last dimension.
    fn last(&self) -> usize {
        self.shape.last().and_then(|size| usize::try_from(*size).ok()).unwrap_or(0)
    }

    /// The shape with another last dimension.
    fn with_last(&self, size: usize) -> Vec<i64> {
        let mut shape = self.shape.clone();
        if let Some(last) = shape.last_mut() {
            *last = size as i64;
        }
        shape
    }

    /// The dimensions of a matrix with a row for each number of this tensor's last axis.
    fn matrix_of(&self, matrix: &Self) -> ort::Result<[usize; 2]> {
        match (self.last(), &*matrix.shape) {
            (neurons, [rows, _]) if *rows == neurons as i64 && neurons > 0 => Ok([neurons, matrix.last()]),
            _ => Err(ort::Error::new(format!(
                "{:?} has no row for each of the last axis of {:?}",
                matrix.shape, self.shape
            ))),
        }
    }
}

fn input(context: &ComputeContext, index: usize) -> ort::Result<ValueRef<'_>> {
    context.input(index)?.ok_or_else(|| ort::Error::new(format!("input {index} is missing")))
}

fn tensor<'a, T: Element>(value: &'a ValueRef<'_>) -> ort::Result<Tensor<'a, T>> {
    let (shape, data) = value.try_extract_tensor::<T>()?;
    Ok(Tensor { shape: shape.to_vec(), data })
}

fn output(context: &ComputeContext, shape: Vec<i64>) -> ort::Result<ValueRefMut<'_>> {
    context.output(0, shape)?.ok_or_else(|| ort::Error::new("the output is missing"))
}
