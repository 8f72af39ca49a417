//! A context that fits, where memory is too small for the one that was planned for.

use crate::analysis::analyse;
use crate::choose::{Chosen, PlanInputs};
use crate::error::SplitError;
use crate::request::computation;
use hpp_onnx::QuantizeOptions;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// The context is divided by each of these in turn. Each try takes about as long as the plan that was refused.
const DIVISORS: [u64; 3] = [2, 8, 32];
/// No shorter context is tried if the refused plan took longer than this.
const LONGEST: Duration = Duration::from_secs(2);
/// A shorter context, tokens, is of no use.
const SHORTEST: u64 = 16;

/// The fastest plan. A refusal for lack of memory has the longest of a few shorter contexts that fits.
pub fn choose(inputs: &PlanInputs, quantize: Option<&QuantizeOptions>) -> Result<Chosen, SplitError> {
    let started = Instant::now();
    inputs.choose().map_err(|mut refusal| {
        if let SplitError::OverBudget { source, fitting_context, .. } = &mut refusal
            && source.missing() < source.demand.of_context()
            && started.elapsed() < LONGEST
        {
            let contexts = DIVISORS.iter().map(|divisor| inputs.analysis.context / divisor);
            let fits = |context: &u64| *context >= SHORTEST && fits(inputs, *context, quantize);
            *fitting_context = contexts.filter(fits).find_map(NonZeroU64::new);
        }
        refusal
    })
}

fn fits(inputs: &PlanInputs, context: u64, quantize: Option<&QuantizeOptions>) -> bool {
    let PlanInputs { args, costs, local, .. } = inputs;
    let path = inputs.analysis.model.path();
    let shorter = analyse(path, Some(context), args, quantize, computation(args, costs, local));
    shorter.is_ok_and(|analysis| PlanInputs { analysis: &analysis, alternative: None, ..*inputs }.choose().is_ok())
}
