//! The computation of a chain: one number from the last token of a pass, `0.5 x + c + 0.25 s`, where `c` is the sum of the part's
//! weights and the state `s` is the sum of all earlier `x`.

use crate::error::BackendError;
use crate::mock::session::Kernel;
use crate::mock::tensor::misfit;
use crate::mock::{Frame, MockTensor};
use crate::port::Tensor;
use std::ops::Range;
use std::rc::Rc;

/// Every number in a weight of a part.
pub(super) fn weight(part: usize, at: usize) -> f32 {
    (part * 10 + at + 1) as f32 / 8.0
}

/// The sum of a part's weights.
pub(super) fn constant(part: usize, weights: usize) -> f32 {
    (0..weights).map(|at| weight(part, at)).sum()
}

/// One part's step.
pub(super) fn step(value: f32, constant: f32, state: Option<&mut f32>) -> f32 {
    let made = 0.5 * value + constant;
    match state {
        None => made,
        Some(state) => {
            *state += value;
            made + 0.25 * *state
        }
    }
}

/// Reads its value and position from its first input, its weights and states from the inputs at these positions, and writes what
/// it makes to its first `returned` outputs. Without weights among its inputs, `constant` is their sum. Of a state, as of any cache, it reads only
/// what a pass of the sequence has written.
pub(super) fn kernel(weights: Option<Range<usize>>, states: Range<usize>, returned: usize, constant: f32) -> Kernel {
    Rc::new(move |frame: &mut Frame<'_>| {
        let entering = frame.input(0)?;
        let tokens = entering.shape()[1];
        let (value, position) = match entering.shape().get(2) {
            Some(width) => (entering.f32((tokens - 1) * width), entering.f32((tokens - 1) * width + 1) as u64),
            None => (entering.i64(tokens - 1) as f32, frame.input(1)?.i64(tokens - 1) as u64),
        };
        let mut sum = constant;
        if let Some(weights) = weights.clone() {
            sum = 0.0;
            for at in weights {
                sum += even(&frame.input(at)?)?;
            }
        }
        let mut made = step(value, sum, None);
        for at in states.clone() {
            made = step(value, sum, Some(&mut remembered(&frame.input(at)?, tokens, position, value)));
        }
        for at in 0..returned {
            let width = frame.width(at);
            if let Some(tensor) = frame.output(at, &[1, tokens, width])? {
                tensor.set_f32((tokens - 1) * width, made);
                tensor.set_f32((tokens - 1) * width + 1, position as f32);
            }
        }
        Ok(())
    })
}

/// Writes a pass into a cache, its value at its last token, and adds up what passes before it have written.
fn remembered(cache: &MockTensor, tokens: u64, position: u64, value: f32) -> f32 {
    let width = cache.shape()[2];
    (position + 1 - tokens..position).for_each(|token| cache.set_f32(token * width, 0.0));
    let before = (0..position).map(|token| cache.f32(token * width)).sum();
    cache.set_f32(position * width, value);
    before
}

/// The number that fills a weight.
fn even(weight: &MockTensor) -> Result<f32, BackendError> {
    let first = weight.f32(0);
    let same = (1..weight.shape()[0]).all(|at| weight.f32(at) == first);
    if same && first.is_finite() { Ok(first) } else { Err(misfit("a weight", "it is not what its file holds".into())) }
}
