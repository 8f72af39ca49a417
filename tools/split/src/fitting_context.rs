//! A context that fits, where memory is too small for the one that was planned for.

use crate::analysis::analyse;
use crate::choose::{Chosen, PlanInputs};
use crate::error::SplitError;
use crate::request::computation;
use hpp_onnx::QuantizeOptions;
use std::num::NonZeroU64;
use std::time::{Duration, Instant};

/// No shorter context is tried if the refused plan took longer than this: each try takes about as long.
const LONGEST: Duration = Duration::from_secs(2);
/// The base-2 logarithm of the shortest context, tokens, that is of use.
const SHORTEST: u32 = 4;

/// The fastest plan. A refusal for lack of memory has the longest power of two of tokens that fits.
pub fn choose(inputs: &PlanInputs, quantize: Option<&QuantizeOptions>) -> Result<Chosen, SplitError> {
    let started = Instant::now();
    inputs.choose().map_err(|mut refusal| {
        if let SplitError::OverBudget { source, fitting_context, .. } = &mut refusal
            && source.missing() < source.demand.of_context()
            && started.elapsed() < LONGEST
        {
            let longest = longest_below(inputs.analysis.context, |context| fits(inputs, context, quantize));
            *fitting_context = longest.and_then(NonZeroU64::new);
        }
        refusal
    })
}

/// The longest power of two of tokens below `context` that fits, by bisection: where a context fits, shorter ones do.
fn longest_below(context: u64, fits: impl Fn(u64) -> bool) -> Option<u64> {
    let tried = SHORTEST..=context.saturating_sub(1).checked_ilog2()?;
    let (mut low, mut end, mut longest) = (*tried.start(), tried.end() + 1, None);
    while low < end {
        let middle = low + (end - low) / 2;
        match fits(1 << middle) {
            true => (low, longest) = (middle + 1, Some(1 << middle)),
            false => end = middle,
        }
    }
    longest
}

fn fits(inputs: &PlanInputs, context: u64, quantize: Option<&QuantizeOptions>) -> bool {
    let PlanInputs { args, costs, local, .. } = inputs;
    let path = inputs.analysis.model.path();
    let shorter = analyse(path, Some(context), args, quantize, computation(args, costs, local));
    shorter.is_ok_and(|analysis| PlanInputs { analysis: &analysis, alternative: None, ..*inputs }.choose().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    #[test]
    fn the_longest_power_of_two_that_fits_is_found_in_few_tries() {
        for (context, most, found) in [
            (4096, 300, Some(256)),
            (1000, 300, Some(256)),
            (256, 300, Some(128)),
            (4096, 4096, Some(2048)),
            (4097, 4096, Some(4096)),
            (4096, 16, Some(16)),
            (4096, 15, None),
            (16, 16, None),
            (17, 16, Some(16)),
            (1, 16, None),
            (0, 16, None),
        ] {
            let tries = Cell::new(0);
            let fits = |tokens: u64| {
                tries.set(tries.get() + 1);
                tokens <= most
            };
            assert_eq!(longest_below(context, fits), found, "{context} {most}");
            assert!(tries.get() <= 4, "{context} {most}: {}", tries.get());
        }
    }
}
