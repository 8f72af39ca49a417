//! Chooses a format for each matrix so that all weights of a model fit a number of bytes: `--quantize auto`.
//!
//! The choice is a knapsack over a proxy of the damage: the relative squared error of a matrix times its energy (the sum of
//! its squares), which is the sum of the squared errors of its weights. It knows nothing of how much a matrix matters to the
//! answers. Upgrades are taken in the order of error removed per byte, along the lower convex hull of each matrix's choices,
//! as long as they fit: the result is at most one upgrade away from the best choice.

use super::block_quantizer::{Bits, BlockFormat};
use super::select::{Chosen, LeftReason, Selection};
use super::{NothingReason, QuantizeError, matrix::Job};
use hpp_graph::{Graph, ValueId};
use std::collections::BTreeMap;

/// The formats to choose from, beside not quantizing.
pub(super) const FORMATS: [BlockFormat; 3] = [
    BlockFormat { bits: Bits::Four, block_size: 128, asymmetric: false },
    BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: false },
    BlockFormat { bits: Bits::Eight, block_size: 32, asymmetric: false },
];

/// One way to store a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Form {
    /// `None`: as floats.
    format: Option<BlockFormat>,
    bytes: u64,
    error: f64,
}

/// Sets the formats of a selection, and drops what stays in floats, so that all weights of the graph have at most `budget` bytes.
/// `job` makes the job of a chosen matrix.
pub(super) fn assign(
    graph: &Graph,
    selection: &mut Selection,
    budget: u64,
    mut job: impl FnMut(&Chosen) -> Result<Option<Job>, QuantizeError>,
) -> Result<(), QuantizeError> {
    let all: u64 = graph.value_ids().filter_map(|id| graph.weight(id)).map(|weight| weight.bytes).sum();
    if all <= budget {
        return Err(QuantizeError::Nothing(NothingReason::Fits { bytes: all, budget }));
    }
    let mut matrices: BTreeMap<ValueId, Vec<Form>> = BTreeMap::new();
    let mut fixed_bytes = 0;
    for chosen in &selection.chosen {
        if matrices.contains_key(&chosen.weight) {
            continue;
        }
        let Some(job) = job(chosen)? else { continue };
        if chosen.fixed {
            fixed_bytes += bytes_of(&job, chosen.format);
            continue;
        }
        let readers: Vec<&Chosen> = selection.chosen.iter().filter(|other| other.weight == chosen.weight).collect();
        let is_kept = keeps_floats(graph, chosen.weight, &readers);
        matrices.insert(chosen.weight, forms(&job, &readers, is_kept)?);
    }
    let is_replaced = |id: &ValueId| {
        let readers: Vec<&Chosen> = selection.chosen.iter().filter(|other| other.weight == *id).collect();
        !readers.is_empty() && !keeps_floats(graph, *id, &readers)
    };
    let replaced: u64 =
        graph.value_ids().filter(is_replaced).filter_map(|id| graph.weight(id)).map(|weight| weight.bytes).sum();
    let others = all - replaced + fixed_bytes;
    let forms: Vec<Vec<Form>> = matrices.values().cloned().collect();
    let picks = pick(&forms, budget.saturating_sub(others));
    let smallest = others + forms.iter().map(|forms| forms[0].bytes).sum::<u64>();
    if smallest > budget {
        return Err(QuantizeError::Budget { budget, smallest });
    }
    let formats: BTreeMap<ValueId, Option<BlockFormat>> =
        matrices.keys().copied().zip(picks.iter().zip(&forms).map(|(pick, forms)| forms[*pick].format)).collect();
    apply(graph, selection, &formats);
    Ok(())
}

fn apply(graph: &Graph, selection: &mut Selection, formats: &BTreeMap<ValueId, Option<BlockFormat>>) {
    for chosen in std::mem::take(&mut selection.chosen) {
        match formats.get(&chosen.weight) {
            _ if chosen.fixed => selection.chosen.push(chosen),
            Some(Some(format)) => selection.chosen.push(Chosen { format: *format, ..chosen }),
            Some(None) => {
                let name = graph.value(chosen.weight).name.clone();
                selection.left.insert(name, LeftReason::Budget);
            }
            None => selection.chosen.push(chosen),
        }
    }
}

/// The ways to store a matrix, the smallest first. With `is_kept`, its floats stay whatever is chosen.
fn forms(job: &Job, readers: &[&Chosen], is_kept: bool) -> Result<Vec<Form>, QuantizeError> {
    let fits = |format: &BlockFormat| {
        let is_whole = job.matrix.depth.is_multiple_of(format.block_size);
        format.block_size <= job.matrix.depth && (is_whole || !readers.iter().any(|reader| reader.is_table()))
    };
    let formats: Vec<BlockFormat> = FORMATS.into_iter().filter(fits).collect();
    let largest = formats.iter().map(|format| format.block_size).max().unwrap_or(FORMATS[0].block_size);
    let job = Job { format: BlockFormat { block_size: largest, ..FORMATS[0] }, ..job.clone() };
    let errors = job.squared_errors(&formats).map_err(|error| QuantizeError::reading(&job.matrix.name, error))?;
    let quantized = formats.into_iter().zip(errors);
    let mut forms: Vec<Form> =
        quantized.map(|(format, error)| Form { format: Some(format), bytes: bytes_of(&job, format), error }).collect();
    let floats = (job.matrix.depth * job.matrix.columns * super::matrix::element_bytes(job.matrix.dtype)) as u64;
    // Floats that stay for another operator need no bytes of their own.
    forms.push(Form { format: None, bytes: if is_kept { 0 } else { floats }, error: 0.0 });
    forms.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error)));
    Ok(forms)
}

fn bytes_of(job: &Job, format: BlockFormat) -> u64 {
    Job { format, ..job.clone() }.bytes()
}

/// Whether an operator other than these reads the floats of a weight, directly or transposed.
fn keeps_floats(graph: &Graph, weight: ValueId, readers: &[&Chosen]) -> bool {
    let mut todo = vec![weight];
    while let Some(value) = todo.pop() {
        if graph.outputs.contains(&value) {
            return true;
        }
        for id in &graph.value(value).consumers {
            let node = graph.node(*id);
            match node.op_type.as_str() {
                _ if readers.iter().any(|reader| reader.node == *id) => {}
                "Transpose" | "Identity" => todo.extend(node.writes()),
                _ => return true,
            }
        }
    }
    false
}

/// The index of the form of each matrix; the first ones if nothing fits.
fn pick(matrices: &[Vec<Form>], budget: u64) -> Vec<usize> {
    let mut picks = vec![0; matrices.len()];
    let mut left = budget.saturating_sub(matrices.iter().map(|forms| forms[0].bytes).sum());
    let mut upgrades: Vec<Upgrade> = matrices.iter().enumerate().flat_map(|(at, forms)| hull(at, forms)).collect();
    // Along a hull the rates fall, so the upgrades of a matrix stay in order.
    upgrades.sort_by(|a, b| b.rate.total_cmp(&a.rate).then(a.matrix.cmp(&b.matrix)).then(a.to.cmp(&b.to)));
    let mut is_stuck = vec![false; matrices.len()];
    for Upgrade { matrix, to, bytes, .. } in upgrades {
        if is_stuck[matrix] || bytes > left {
            is_stuck[matrix] = true;
            continue;
        }
        left -= bytes;
        picks[matrix] = to;
    }
    picks
}

/// A step to the next larger form on the hull of a matrix.
#[derive(Clone, Copy, Debug)]
struct Upgrade {
    matrix: usize,
    to: usize,
    bytes: u64,
    /// Error removed per byte.
    rate: f64,
}

fn hull(matrix: usize, forms: &[Form]) -> Vec<Upgrade> {
    let mut upgrades = vec![];
    let mut from = 0;
    while from + 1 < forms.len() {
        let rate = |to: &usize| {
            let bytes = forms[*to].bytes - forms[from].bytes;
            (forms[from].error - forms[*to].error) / (bytes.max(1) as f64)
        };
        let best = (from + 1..forms.len()).max_by(|a, b| rate(a).total_cmp(&rate(b)).then(b.cmp(a)));
        let Some(to) = best.filter(|to| rate(to) > 0.0) else { break };
        upgrades.push(Upgrade { matrix, to, bytes: forms[to].bytes - forms[from].bytes, rate: rate(&to) });
        from = to;
    }
    upgrades
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn forms_of(matrix: &[(u64, f64)]) -> Vec<Form> {
        let mut forms: Vec<Form> =
            matrix.iter().map(|(bytes, error)| Form { format: None, bytes: *bytes, error: *error }).collect();
        forms.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error)));
        forms
    }

    fn total(matrices: &[Vec<Form>], picks: &[usize]) -> (u64, f64) {
        let picked = || matrices.iter().zip(picks).map(|(forms, pick)| forms[*pick]);
        (picked().map(|form| form.bytes).sum(), picked().map(|form| form.error).sum())
    }

    /// The least error within the budget, over all combinations.
    fn best(matrices: &[Vec<Form>], budget: u64) -> Option<f64> {
        let mut combinations = vec![vec![]];
        for forms in matrices {
            let with =
                |picks: &Vec<usize>| (0..forms.len()).map(|pick| [&picks[..], &[pick]].concat()).collect::<Vec<_>>();
            combinations = combinations.iter().flat_map(with).collect();
        }
        let totals = combinations.iter().map(|picks| total(matrices, picks)).filter(|(bytes, _)| *bytes <= budget);
        totals.map(|(_, error)| error).min_by(f64::total_cmp)
    }

    #[test]
    fn bytes_go_where_they_remove_most_error() {
        let matrices = [forms_of(&[(10, 5.0), (20, 1.0)]), forms_of(&[(10, 50.0), (20, 1.0)])];
        assert_eq!(pick(&matrices, 30), [0, 1]);
        assert_eq!(pick(&matrices, 40), [1, 1]);
        assert_eq!((pick(&matrices, 20), pick(&matrices, 3)), (vec![0, 0], vec![0, 0]));
    }

    #[test]
    fn a_larger_form_with_more_error_is_never_taken() {
        assert_eq!(pick(&[forms_of(&[(10, 1.0), (20, 2.0), (30, 0.5)])], 25), [0]);
        assert_eq!(pick(&[forms_of(&[(10, 1.0), (20, 2.0), (30, 0.5)])], 30), [2]);
    }

    proptest! {
        #[test]
        fn the_choice_fits_and_is_at_most_one_upgrade_from_the_best(
            matrices in proptest::collection::vec(proptest::collection::vec((1u64..30, 0.0..10.0f64), 1..4), 1..5),
            budget in 1u64..120,
        ) {
            let matrices: Vec<Vec<Form>> = matrices.iter().map(|matrix| forms_of(matrix)).collect();
            let Some(best) = best(&matrices, budget) else { return Ok(()) };
            let (bytes, error) = total(&matrices, &pick(&matrices, budget));
            let largest = matrices.iter().map(|forms| forms[0].error).fold(0.0, f64::max);
            prop_assert!(bytes <= budget);
            prop_assert!(error <= best + largest + 1e-9, "{} against {}", error, best);
        }
    }
}
