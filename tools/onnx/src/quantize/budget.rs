//! Chooses a format for each matrix so that all weights of a model fit a number of bytes: `--quantize auto`.
//!
//! The choice is a knapsack over an estimate of the loss: the relative squared error of a matrix times its energy (the sum of its squares), which
//! is the sum of the squared errors of its weights. The estimate does not know how much a matrix matters to the answers. Upgrades are taken in the
//! order of error removed per byte, along the lower convex hull of each matrix's choices, as long as they fit. The result is at most one upgrade
//! away from the best choice.

use super::block_quantizer::{Bits, BlockFormat, ScaleRule};
use super::rewrite::make_job;
use super::select::{Chosen, LeftReason, Selection, select};
use super::{NothingReason, QuantizeError, QuantizeOptions, Roles, matrix::Job};
use crate::model::Model;
use hpp_graph::{Graph, NodeId, ValueId};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The formats to choose from, beside not quantizing.
pub(super) const FORMATS: [BlockFormat; 5] = [
    BlockFormat { bits: Bits::Four, block_size: 128, asymmetric: false, scale: ScaleRule::Fitted },
    BlockFormat { bits: Bits::Four, block_size: 64, asymmetric: false, scale: ScaleRule::Fitted },
    BlockFormat { bits: Bits::Four, block_size: 32, asymmetric: false, scale: ScaleRule::Fitted },
    BlockFormat { bits: Bits::Four, block_size: 16, asymmetric: false, scale: ScaleRule::Fitted },
    BlockFormat { bits: Bits::Eight, block_size: 32, asymmetric: false, scale: ScaleRule::Extremes },
];

/// Called with the bytes of weights measured so far, and the bytes of all weights to measure.
pub type MeasureProgress<'a> = &'a mut dyn FnMut(u64, u64);

/// One way to store a matrix.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Form {
    /// `None` for a matrix that stays in floats.
    pub format: Option<BlockFormat>,
    /// Bytes.
    pub bytes: u64,
    /// The sum of the squared errors of its weights.
    pub error: f64,
}

/// A matrix whose format may be chosen.
#[derive(Clone, Debug)]
pub struct Candidate {
    /// The weight's name.
    pub name: String,
    /// The operators that will read the quantized matrix.
    pub nodes: Vec<NodeId>,
    /// The ways to store it, the smallest first.
    pub forms: Vec<Form>,
}

/// The matrices of a model whose formats may be chosen, and the bytes of everything else.
#[derive(Clone, Debug)]
pub struct Candidates {
    /// The matrices.
    pub matrices: Vec<Candidate>,
    /// Bytes of all weights before quantizing.
    pub all: u64,
    /// Bytes of the weights that are not among the matrices.
    pub others: u64,
}

impl Candidates {
    /// Measures the errors of all formats. Reads each weight once. `graph` must be the model's graph with inferred shapes. Calls `progress` first
    /// with 0 bytes measured, then after each part of a weight.
    pub fn measure(
        model: &Model,
        graph: &Graph,
        roles: &Roles,
        options: &QuantizeOptions,
        progress: MeasureProgress<'_>,
    ) -> Result<Self, QuantizeError> {
        let selection = select(graph, roles, options);
        selection.check_any()?;
        Self::find(model, graph, &selection, options.budget, progress)
    }

    /// Measures the matrices of a selection. Refuses a `budget` below the smallest formats before it reads any weight.
    pub(super) fn find(
        model: &Model,
        graph: &Graph,
        selection: &Selection,
        budget: Option<u64>,
        progress: MeasureProgress<'_>,
    ) -> Result<Self, QuantizeError> {
        let initializers = model.graph_proto().initializer.iter().enumerate();
        let sources: HashMap<&str, usize> = initializers.map(|(index, tensor)| (tensor.name(), index)).collect();
        let mut matrices: BTreeMap<ValueId, Matrix> = BTreeMap::new();
        // Operators that read the same weight with the same orientation and format share its quantized bytes.
        let (mut fixed, mut fixed_bytes) = (HashSet::new(), 0);
        for chosen in &selection.chosen {
            let name = graph.value(chosen.weight).name.as_str();
            let Some(source) = sources.get(name) else { continue };
            let is_counted = match chosen.fixed {
                true => !fixed.insert((chosen.weight, chosen.transposed, chosen.format)),
                false => matrices.contains_key(&chosen.weight),
            };
            if is_counted {
                continue;
            }
            let job = make_job(model, name, *source, chosen)?;
            if chosen.fixed {
                fixed_bytes += bytes_of(&job, chosen.format);
                continue;
            }
            let readers: Vec<&Chosen> = selection.chosen.iter().filter(|other| other.weight == chosen.weight).collect();
            let matrix = Matrix::new(job, &readers, keeps_floats(graph, chosen.weight, &readers));
            matrices.insert(chosen.weight, matrix);
        }
        let is_replaced = |id: &ValueId| {
            let readers: Vec<&Chosen> = selection.chosen.iter().filter(|other| other.weight == *id).collect();
            !readers.is_empty() && !keeps_floats(graph, *id, &readers)
        };
        let all = weight_bytes(graph, graph.value_ids());
        let replaced = weight_bytes(graph, graph.value_ids().filter(is_replaced));
        let others = all - replaced + fixed_bytes;
        let smallest = others + matrices.values().map(Matrix::smallest).sum::<u64>();
        if let Some(budget) = budget.filter(|budget| smallest > *budget) {
            return Err(QuantizeError::Budget { budget, smallest });
        }
        let (mut done, total) = (0, matrices.values().map(|matrix| matrix.job.matrix.bytes()).sum::<u64>());
        progress(done, total);
        let mut report = |bytes: u64| {
            done += bytes;
            progress(done, total);
        };
        let measured: Result<Vec<Candidate>, QuantizeError> =
            matrices.into_values().map(|matrix| matrix.measured(&mut report)).collect();
        Ok(Candidates { matrices: measured?, all, others })
    }

    /// Bytes of all weights with the smallest form of each matrix.
    pub fn smallest(&self) -> u64 {
        self.others + self.matrices.iter().map(|matrix| matrix.forms[0].bytes).sum::<u64>()
    }

    /// Formats with which all weights have at most `budget` bytes, chosen for little loss. The loss of a matrix is its squared error times
    /// `importance`.
    pub fn choose(
        &self,
        budget: u64,
        importance: impl Fn(&Candidate) -> f64,
    ) -> Result<BTreeMap<String, Option<BlockFormat>>, QuantizeError> {
        check_choice(self.all, budget)?;
        let smallest = self.smallest();
        if smallest > budget {
            return Err(QuantizeError::Budget { budget, smallest });
        }
        let loss = |matrix: &Candidate| -> Vec<Form> {
            let importance = importance(matrix);
            matrix.forms.iter().map(|form| Form { error: form.error * importance, ..*form }).collect()
        };
        let forms: Vec<Vec<Form>> = self.matrices.iter().map(loss).collect();
        let picks = pick(&forms, budget - self.others);
        let formats = self.matrices.iter().zip(picks);
        Ok(formats.map(|(matrix, pick)| (matrix.name.clone(), matrix.forms[pick].format)).collect())
    }

    /// Bytes of all weights in these formats.
    pub fn bytes(&self, formats: &BTreeMap<String, Option<BlockFormat>>) -> u64 {
        let of = |matrix: &Candidate| {
            let format = formats.get(&matrix.name).copied().flatten();
            matrix.forms.iter().find(|form| form.format == format).map_or(0, |form| form.bytes)
        };
        self.others + self.matrices.iter().map(of).sum::<u64>()
    }
}

/// Bytes of the weights among these values.
pub(super) fn weight_bytes(graph: &Graph, ids: impl Iterator<Item = ValueId>) -> u64 {
    ids.filter_map(|id| graph.weight(id)).map(|weight| weight.bytes).sum()
}

/// Refuses a budget into which all weights fit without quantizing.
pub(super) fn check_choice(all: u64, budget: u64) -> Result<(), QuantizeError> {
    match all <= budget {
        true => {
            let reason = NothingReason::Fits { bytes: all, budget };
            Err(QuantizeError::Nothing { reason, embedding_is_left: false })
        }
        false => Ok(()),
    }
}

/// Sets the formats of a selection. Removes the matrices that stay in floats.
pub(super) fn apply(graph: &Graph, selection: &mut Selection, formats: &BTreeMap<String, Option<BlockFormat>>) {
    for chosen in std::mem::take(&mut selection.chosen) {
        let name = &graph.value(chosen.weight).name;
        match formats.get(name).copied().flatten() {
            _ if chosen.fixed => selection.chosen.push(chosen),
            Some(format) => selection.chosen.push(Chosen { format, ..chosen }),
            None => {
                let is_asked = selection.asked.contains(name);
                selection.left.insert(name.clone(), if is_asked { LeftReason::Asked } else { LeftReason::Budget });
            }
        }
    }
}

/// A matrix whose errors are not measured yet.
struct Matrix {
    job: Job,
    nodes: Vec<NodeId>,
    formats: Vec<BlockFormat>,
    /// Bytes of the matrix in floats.
    floats: u64,
}

impl Matrix {
    /// The matrix of a job. `is_kept`: its floats stay in the file, whatever format is chosen.
    fn new(job: Job, readers: &[&Chosen], is_kept: bool) -> Self {
        let fits = |format: &BlockFormat| {
            let is_whole = job.matrix.depth.is_multiple_of(format.block_size);
            format.block_size <= job.matrix.depth && (is_whole || !readers.iter().any(|reader| reader.is_table()))
        };
        let formats: Vec<BlockFormat> = FORMATS.into_iter().filter(fits).collect();
        let floats = job.matrix.bytes();
        let nodes = readers.iter().map(|reader| reader.node).collect();
        // Floats that another operator needs anyway do not count as bytes of this matrix.
        Matrix { job, nodes, formats, floats: if is_kept { 0 } else { floats } }
    }

    /// Bytes of the smallest form.
    fn smallest(&self) -> u64 {
        let quantized = self.formats.iter().map(|format| bytes_of(&self.job, *format));
        quantized.chain([self.floats]).min().unwrap_or(self.floats)
    }

    /// Reads the weight and measures the errors of all formats. Calls `report` with the bytes of each part that was read.
    fn measured(self, report: &mut dyn FnMut(u64)) -> Result<Candidate, QuantizeError> {
        let Matrix { job, nodes, formats, floats } = self;
        let largest = formats.iter().map(|format| format.block_size).max().unwrap_or(FORMATS[0].block_size);
        let job = Job { format: BlockFormat { block_size: largest, ..FORMATS[0] }, ..job };
        let errors = job.squared_errors(&formats, report);
        let errors = errors.map_err(|error| QuantizeError::reading(&job.matrix.name, error))?;
        let form = |(format, error)| Form { format: Some(format), bytes: bytes_of(&job, format), error };
        let mut forms: Vec<Form> = formats.into_iter().zip(errors).map(form).collect();
        forms.push(Form { format: None, bytes: floats, error: 0.0 });
        forms.sort_by(|a, b| a.bytes.cmp(&b.bytes).then(a.error.total_cmp(&b.error)));
        Ok(Candidate { name: job.matrix.name, nodes, forms })
    }
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

/// The index of the form of each matrix. The smallest forms if no upgrade fits.
fn pick(matrices: &[Vec<Form>], budget: u64) -> Vec<usize> {
    let mut picks = vec![0; matrices.len()];
    let mut left = budget.saturating_sub(matrices.iter().map(|forms| forms[0].bytes).sum());
    let mut upgrades: Vec<Upgrade> = matrices.iter().enumerate().flat_map(|(at, forms)| hull(at, forms)).collect();
    // Along a hull, rates fall, so the upgrades of one matrix stay in order.
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
