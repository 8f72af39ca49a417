//! The bytes that `--quantize auto` may use if no option limits them: as many as the plan's memory holds without reading weights from disk or
//! streaming them to a GPU, because only bytes that are moved for each pass cost time.

use crate::analysis::analyse;
use crate::choose::{Chosen, PlanInputs};
use crate::cli::SplitArgs;
use crate::costs::Costs;
use crate::error::SplitError;
use crate::local_machine::LocalMachine;
use crate::quantize;
use crate::request::{computation, local_machine};
use hpp_model::{Analysis, LogitsMode, check_quantizable};
use hpp_onnx::{BlockFormat, Choice, QuantizeOptions};
use hpp_schema::ByteSize;
use std::collections::BTreeMap;
use std::path::Path;

/// The search ends where the range of sizes is at most this part of all weights.
const PRECISION: u64 = 128;

/// The bytes that all weights may have, and formats within them.
pub struct Budget {
    /// Bytes.
    pub bytes: u64,
    /// The format of each weight, chosen by squared errors that all count alike.
    pub formats: BTreeMap<String, Option<BlockFormat>>,
}

/// Finds the budget and says on stderr what it is; `None` if a plan of the model as it is streams nothing.
pub fn find(
    args: &SplitArgs,
    path: &Path,
    costs: &Costs,
    options: &QuantizeOptions,
) -> Result<Option<Budget>, SplitError> {
    // A profile has the times of other weights.
    let costs = costs.clone().without_profile();
    let planner = TrialPlanner { args, path, local: local_machine(args, &costs), costs };
    let is_held = planner.plans(None)? == Trial::Held;
    let whole = hpp_model::analyse(path, args.context, LogitsMode::All)?;
    if is_held {
        tell!("note: memory holds all weights as they are, {}", advice_if_held(args, &whole, options));
        return Ok(None);
    }
    let candidates = quantize::candidates(&whole, options)?;
    let formats_of = |bytes| candidates.choose(bytes, |_| 1.0).map_err(|error| SplitError::Model(error.into()));
    let plans = &mut |bytes: u64| {
        let formats = formats_of(bytes)?;
        planner.plans(Some(&QuantizeOptions { budget: None, formats: Some(formats), ..options.clone() }))
    };
    let found = largest_without_streaming(candidates.smallest(), candidates.all, plans)?;
    let bytes = ByteSize(found.bytes()).human();
    match found {
        Found::HeldInMemory(_) => {
            tell!(
                "quantization: weights of {bytes} at most, of which memory holds all; --bits-budget for another size"
            );
        }
        // Planning refuses this size later, with an error that says what it needs.
        Found::Refused(_) => {}
        Found::Smallest(_) => tell!(
            "note: memory does not even hold all of the smallest weights, {bytes}: the rest is streamed; more --ram or --vram, or another \
             --bits-budget, changes that"
        ),
    }
    Ok(Some(Budget { bytes: found.bytes(), formats: formats_of(found.bytes())? }))
}

/// The end of the note on a model that memory holds: the options with which its weights can be quantized all the same.
fn advice_if_held(args: &SplitArgs, whole: &Analysis, options: &QuantizeOptions) -> String {
    if let Err(error) = check_quantizable(whole, options) {
        return format!("and for --quantize auto there is {error}");
    }
    // With int4 and int8 the embedding stays as it is, unless an option says otherwise.
    let embedding = if args.quantize.quantize_embedding.is_none() { Choice::None } else { options.embedding };
    let with = match check_quantizable(whole, &QuantizeOptions { embedding, ..options.clone() }) {
        Ok(()) => "",
        Err(_) => " with --quantize-embedding same",
    };
    format!(
        "so --quantize auto leaves them: give --bits-budget, or --quantize int8 or int4{with}, for fewer bytes all the same"
    )
}

/// Plans a model to see whether its weights are streamed.
struct TrialPlanner<'a> {
    args: &'a SplitArgs,
    path: &'a Path,
    costs: Costs,
    local: LocalMachine,
}

impl TrialPlanner<'_> {
    /// Plans the model with these options, or as it is.
    fn plans(&self, options: Option<&QuantizeOptions>) -> Result<Trial, SplitError> {
        let computation = computation(self.args, &self.costs, &self.local);
        let analysis = analyse(self.path, self.args.context, self.args, options, computation)?;
        let inputs = PlanInputs {
            args: self.args,
            analysis: &analysis,
            costs: &self.costs,
            local: &self.local,
            reserved: 0,
            alternative: None,
        };
        match inputs.choose() {
            Ok(Chosen { request, partitioning, .. }) => {
                let kv_gives_way = request.limits.kv_on_disk.is_some();
                Ok(if kv_gives_way || partitioning.streams_weights(&request) { Trial::Streamed } else { Trial::Held })
            }
            Err(SplitError::OverBudget { .. }) => Ok(Trial::Refused),
            Err(error) => Err(error),
        }
    }
}

/// How a plan holds weights of some size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trial {
    /// Memory holds all weights.
    Held,
    /// Reads weights or KV caches from disk in each pass because memory does not hold both, or streams weights to a GPU.
    Streamed,
    /// There is no plan: memory is too small.
    Refused,
}

/// A size of all weights, and how a plan holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    /// The largest size that memory holds.
    HeldInMemory(u64),
    /// The smallest size there is; memory holds a part of it.
    Smallest(u64),
    /// The smallest size there is; even it has no plan.
    Refused(u64),
}

impl Found {
    fn bytes(self) -> u64 {
        match self {
            Found::HeldInMemory(bytes) | Found::Smallest(bytes) | Found::Refused(bytes) => bytes,
        }
    }
}

/// The largest size below `all` at which nothing is streamed, found by halving the range.
fn largest_without_streaming(
    smallest: u64,
    all: u64,
    plans: &mut dyn FnMut(u64) -> Result<Trial, SplitError>,
) -> Result<Found, SplitError> {
    match plans(smallest)? {
        Trial::Held => {}
        Trial::Streamed => return Ok(Found::Smallest(smallest)),
        Trial::Refused => return Ok(Found::Refused(smallest)),
    }
    let (mut held, mut too_large) = (smallest, all);
    while too_large.saturating_sub(held) > all / PRECISION + 1 {
        let middle = held + (too_large - held) / 2;
        match plans(middle)? {
            Trial::Held => held = middle,
            Trial::Streamed | Trial::Refused => too_large = middle,
        }
    }
    Ok(Found::HeldInMemory(held))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_size_that_memory_holds_is_found() {
        let find = |memory: u64| {
            let mut tried = 0;
            let plans = &mut |bytes: u64| {
                tried += 1;
                assert!((100..1000).contains(&bytes));
                Ok(match bytes {
                    _ if memory < 50 => Trial::Refused,
                    bytes if bytes > memory => Trial::Streamed,
                    _ => Trial::Held,
                })
            };
            let found = largest_without_streaming(100, 1000, plans).unwrap();
            assert!(tried <= 9);
            found
        };
        assert_eq!(find(99), Found::Smallest(100));
        assert_eq!(find(9), Found::Refused(100));
        for memory in [100, 107, 523, 990] {
            let Found::HeldInMemory(bytes) = find(memory) else { panic!("{memory} bytes hold some sizes") };
            assert!(bytes <= memory && memory - bytes <= 8, "{bytes} of {memory}");
        }
    }
}
