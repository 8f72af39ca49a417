//! Quantization by measurement: how much each matrix matters for the answers, from the divergence (KL) that rounding
//! it alone causes; and which of several proposals is best, from the divergence of the whole model.
//!
//! With a corpus (`--calibration`) hpp-exec measures both, on different prompts. Without one, a profile that measured the
//! sensitivity of blocks (`hpp-profile --sensitivity`) gives the first. With a corpus the inputs of the matrices are observed too, so
//! that errors of 4-bit weights compensate each other where the divergence is smaller for it.

pub(crate) mod corpus;
pub(crate) mod divergence;
mod free_memory;
mod inputs;
mod trial;

use crate::amount::digits;
use crate::bits_budget::{self, Budget};
use crate::cli::{DraftArg, SplitArgs};
use crate::costs::Costs;
use crate::error::SplitError;
use crate::lines::Lines;
use crate::quantize;
use corpus::Corpus;
use hpp_model::{Analysis, LogitsMode, analyse};
use hpp_onnx::{Bits, BlockFormat, Candidate, Candidates, QuantizeOptions};
use hpp_schema::ByteSize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use trial::Trials;

/// Most groups of matrices whose rounding is measured. Models with more matrices are measured block by block, and those with more
/// blocks several blocks at a time.
const MOST_GROUPS: usize = 64;
/// Steps of the search for the smallest size with `--max-kl`: the range of sizes is halved in each.
const STEPS: usize = 7;

/// The formats of weights by name; `None`: floats.
pub type Formats = BTreeMap<String, Option<BlockFormat>>;

/// The quantization options with what was measured, if the arguments ask for it.
pub fn options(args: &SplitArgs, path: &Path, costs: &Costs) -> Result<Option<QuantizeOptions>, SplitError> {
    let Some(mut options) = args.quantize.options() else { return Ok(None) };
    let chooses_formats = args.quantize.is_auto();
    // Read the corpus even if memory turns out to hold the model as it is, so that a wrong path is always reported.
    let corpus = args.quantize.calibration.as_ref().filter(|_| options.format.bits == Bits::Four);
    let corpus = corpus.map(|path| Corpus::read(path)).transpose()?;
    let mut within_memory = None;
    if args.quantize.needs_budget() {
        let Some(Budget { bytes, formats }) = bits_budget::find(args, path, costs, &options)? else { return Ok(None) };
        options.budget = Some(bytes);
        within_memory = Some(formats);
    }
    if let Some(corpus) = corpus {
        warn_of_one_prompt(&corpus);
        let analysis = analyse(path, args.context, LogitsMode::Requested)?;
        costs.check_origin(&analysis, true)?;
        let trials = Trials::begin(args, &analysis, options, costs, corpus)?;
        let calibrated = if chooses_formats {
            if !block_sensitivities(costs).is_empty() {
                tell!(
                    "note: --calibration measures how much each matrix matters; the sensitivity of blocks in --profile is not used"
                );
            }
            choose_formats(args, &analysis, trials)?
        } else {
            trials.options_with_compensation()?
        };
        return Ok(Some(calibrated));
    }
    if !chooses_formats {
        return Ok(Some(options));
    }
    if costs.profile().is_none() {
        tell!(
            "quantization: bits by the squared errors of weights, all of the same importance; --calibration, or --profile with the sensitivity of \
             blocks, weights them"
        );
        // Chosen once: the model is analysed several times.
        let formats = match within_memory {
            Some(formats) => formats,
            None => quantize::formats(&analyse(path, args.context, LogitsMode::All)?, &options)?,
        };
        return Ok(Some(QuantizeOptions { budget: None, formats: Some(formats), ..options }));
    }
    let analysis = analyse(path, args.context, LogitsMode::Requested)?;
    // Sensitivity does not depend on the machine.
    costs.check_origin(&analysis, true)?;
    let candidates = quantize::candidates(&analysis, &options)?;
    let sensitivities = block_sensitivities(costs);
    if sensitivities.is_empty() {
        return Err(SplitError::setting(
            "the profile does not say how sensitive blocks are to rounding",
            "profile with hpp-profile --sensitivity, or give --calibration or neither",
        ));
    }
    tell!(
        "quantization: bits by the squared errors of weights, weighted with the sensitivity of blocks in the profile"
    );
    let groups = readers(&analysis, &candidates);
    let divergences: Vec<f64> =
        groups.iter().map(|group| sensitivities.get(&group.label).copied().unwrap_or(0.0)).collect();
    let importance = importance(&candidates, &groups, &divergences);
    let budget = options.budget.unwrap_or(u64::MAX);
    let formats = candidates.choose(budget, importance_of(&importance)).map_err(unquantizable)?;
    Ok(Some(QuantizeOptions { budget: None, formats: Some(formats), ..options }))
}

/// The quantization options of the model's own draft, with compensation of errors if the arguments ask for it and it measures better.
pub fn draft_options(
    args: &SplitArgs,
    analysis: &Analysis,
    costs: &Costs,
    draft: DraftArg,
) -> Result<QuantizeOptions, SplitError> {
    let options = draft.options(args.quantize.draft_block);
    match &args.quantize.calibration {
        Some(corpus) if draft == DraftArg::Int4 => {
            let corpus = Corpus::read(corpus)?;
            warn_of_one_prompt(&corpus);
            Trials::begin(args, analysis, options, costs, corpus)?.options_with_compensation()
        }
        _ => Ok(options),
    }
}

fn warn_of_one_prompt(corpus: &Corpus) {
    if corpus.is_one_prompt() {
        tell!(
            "warning: --calibration has one prompt: what is chosen with it is judged by it too; give two prompts or more"
        );
    }
}

/// Chooses a format for each matrix, as `--quantize auto` asks; errors are compensated if that diverges less in 4 bits.
fn choose_formats(args: &SplitArgs, analysis: &Analysis, mut trials: Trials) -> Result<QuantizeOptions, SplitError> {
    let options = trials.options().clone();
    let candidates = quantize::candidates(analysis, &options)?;
    // Before anything is measured: whether there is a choice at all.
    let most = args.quantize.max_kl.map_or(u64::MAX, |_| candidates.all.saturating_sub(1));
    candidates.choose(options.budget.unwrap_or(u64::MAX).min(most), |_| 1.0).map_err(unquantizable)?;
    let importance = measure_importance(&mut trials, analysis, &candidates)?;
    let in_four_bits =
        candidates.matrices.iter().map(|matrix| (matrix.name.clone(), four_bits(matrix).and_then(|form| form.format)));
    trials.choose_compensation(Some(&in_four_bits.collect()))?;
    let measure = &mut |formats: &Formats| trials.divergence(Some(formats), Purpose::Choice);
    let mut search = Search { candidates: &candidates, importance, measure, lines: Lines::default() };
    let best = match args.quantize.max_kl {
        Some(most) => search.smallest_within(most, options.budget)?,
        None => search.best_within(options.budget.unwrap_or(u64::MAX))?,
    };
    tell!("calibration: chosen are {}", best.text(&candidates));
    Ok(QuantizeOptions { budget: None, formats: Some(best.formats), ..trials.options().clone() })
}

fn unquantizable(error: hpp_onnx::QuantizeError) -> SplitError {
    SplitError::Model(error.into())
}

/// The divergence that rounding a block to 4 bits causes, by label, as the profile measured it.
fn block_sensitivities(costs: &Costs) -> BTreeMap<String, f64> {
    let Some(profile) = costs.profile() else { return BTreeMap::new() };
    let of_four = profile.sensitivity.iter().filter(|sensitivity| sensitivity.bits == 4);
    of_four.filter_map(|sensitivity| Some((sensitivity.block.clone(), sensitivity.kl?))).collect()
}

/// Matrices that are rounded together to measure how much they matter.
struct Group {
    label: String,
    /// Names of the matrices.
    matrices: BTreeSet<String>,
}

/// The label of the block that reads a matrix first.
fn by_block(analysis: &Analysis) -> impl Fn(&Candidate) -> String + '_ {
    |matrix| {
        let blocks = &analysis.segmentation.blocks;
        let reads = |block: &&hpp_graph::Block| matrix.nodes.iter().any(|node| block.nodes.contains(node));
        blocks.iter().find(reads).map(|block| block.label.clone()).unwrap_or_default()
    }
}

fn groups_of(analysis: &Analysis, candidates: &Candidates, label: impl Fn(&Candidate) -> String) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let order: BTreeMap<&str, usize> =
        analysis.segmentation.blocks.iter().enumerate().map(|(at, block)| (block.label.as_str(), at)).collect();
    for matrix in &candidates.matrices {
        let label = label(matrix);
        match groups.iter_mut().find(|group| group.label == label) {
            Some(group) => drop(group.matrices.insert(matrix.name.clone())),
            None => groups.push(Group { label, matrices: [matrix.name.clone()].into() }),
        }
    }
    groups.sort_by_key(|group| order.get(group.label.as_str()).copied().unwrap_or(0));
    groups
}

/// The matrices that each block reads. One that two blocks read, like an embedding that is the head too, is in both groups: each block's
/// sensitivity was measured with the other's matrices as they were.
fn readers(analysis: &Analysis, candidates: &Candidates) -> Vec<Group> {
    let group = |block: &hpp_graph::Block| {
        let read =
            candidates.matrices.iter().filter(|matrix| matrix.nodes.iter().any(|node| block.nodes.contains(node)));
        Group { label: block.label.clone(), matrices: read.map(|matrix| matrix.name.clone()).collect() }
    };
    analysis.segmentation.blocks.iter().map(group).collect()
}

/// For each matrix the divergence per unit of squared error: the divergence of its group over the sum of the squared errors of the group's
/// matrices in 4 bits; for a matrix in several groups the sum over these. Divergence grows with the square of small errors.
fn importance(candidates: &Candidates, groups: &[Group], divergences: &[f64]) -> BTreeMap<String, f64> {
    let error = |name: &String| {
        let matrix = candidates.matrices.iter().find(|matrix| matrix.name == *name);
        matrix.and_then(four_bits).map_or(0.0, |form| form.error)
    };
    let mut importance = BTreeMap::new();
    for (group, divergence) in groups.iter().zip(divergences) {
        let errors: f64 = group.matrices.iter().map(error).sum();
        let unit = if errors > 0.0 { divergence / errors } else { 0.0 };
        group.matrices.iter().for_each(|name| *importance.entry(name.clone()).or_insert(0.0) += unit);
    }
    importance
}

/// Looks up a matrix; those that no group has, such as of nodes that belong to no block, do not matter.
fn importance_of(importance: &BTreeMap<String, f64>) -> impl Fn(&Candidate) -> f64 + '_ {
    |matrix| importance.get(&matrix.name).copied().unwrap_or(0.0).max(0.0)
}

/// The form of a matrix in 4 bits that is measured: blocks of 32, else the smallest.
fn four_bits(matrix: &Candidate) -> Option<&hpp_onnx::Form> {
    let is = |form: &&hpp_onnx::Form, block: Option<usize>| {
        form.format
            .is_some_and(|format| format.bits == Bits::Four && block.is_none_or(|size| format.block_size == size))
    };
    matrix.forms.iter().find(|form| is(form, Some(32))).or_else(|| matrix.forms.iter().find(|form| is(form, None)))
}

/// How much each group of matrices matters: rounds one after another.
fn measure_importance(
    trials: &mut Trials,
    analysis: &Analysis,
    candidates: &Candidates,
) -> Result<BTreeMap<String, f64>, SplitError> {
    let groups = match candidates.matrices.len() {
        ..=MOST_GROUPS => groups_of(analysis, candidates, |matrix| matrix.name.clone()),
        _ => merged(groups_of(analysis, candidates, by_block(analysis))),
    };
    let mut divergences = Vec::new();
    let mut lines = Lines::default();
    for (at, group) in groups.iter().enumerate() {
        lines.say(&format!("calibration: {} of {}, {} in 4 bits", at + 1, groups.len(), group.label));
        let in_group = candidates.matrices.iter().filter(|matrix| group.matrices.contains(&matrix.name));
        let formats = in_group.map(|matrix| (matrix.name.clone(), four_bits(matrix).and_then(|form| form.format)));
        let divergence = trials.divergence(Some(&formats.collect()), Purpose::Sensitivity)?;
        tracing::info!(group = group.label, divergence, "group of matrices rounded");
        divergences.push(divergence);
    }
    tell!("calibration: {0} of {0} measured in 4 bits", groups.len());
    Ok(importance(candidates, &groups, &divergences))
}

/// The divergence that a unit of squared error of a matrix causes.
type Importance<'a> = &'a dyn Fn(&Candidate) -> f64;

/// Proposed formats, and what was measured of them.
struct Proposal {
    /// What decided the formats.
    by: &'static str,
    formats: Formats,
    /// Divergence of the model with these formats, nats.
    divergence: f64,
}

impl Proposal {
    /// `bits by squared errors: 1.2 MiB, KL 0.01 nats`.
    fn text(&self, candidates: &Candidates) -> String {
        let bytes = ByteSize(candidates.bytes(&self.formats)).human();
        format!("bits by {}: {bytes}, KL {} nats", self.by, digits(self.divergence, 3))
    }
}

/// Proposes formats and lets `measure` judge them by their divergence, nats.
struct Search<'a> {
    candidates: &'a Candidates,
    /// Damage of a unit of squared error, by matrix.
    importance: BTreeMap<String, f64>,
    measure: &'a mut dyn FnMut(&Formats) -> Result<f64, SplitError>,
    lines: Lines,
}

impl Search<'_> {
    /// The formats within a budget with the least divergence among some proposals.
    fn best_within(&mut self, budget: u64) -> Result<Proposal, SplitError> {
        let measured = importance_of(&self.importance);
        let mut proposals: Vec<(&'static str, Formats)> = Vec::new();
        let by: [(&'static str, Importance); 3] = [
            ("measured divergence", &measured),
            ("squared errors", &|_| 1.0),
            ("both", &|matrix| measured(matrix).sqrt()),
        ];
        for (name, importance) in by {
            let formats = self.candidates.choose(budget, importance).map_err(unquantizable)?;
            if proposals.iter().all(|(_, earlier)| *earlier != formats) {
                proposals.push((name, formats));
            }
        }
        let mut best: Option<Proposal> = None;
        for (by, formats) in proposals {
            let divergence = (self.measure)(&formats)?;
            let proposal = Proposal { by, formats, divergence };
            self.lines.say(&format!("calibration: {}", proposal.text(self.candidates)));
            if best.as_ref().is_none_or(|best| divergence < best.divergence) {
                best = Some(proposal);
            }
        }
        best.ok_or_else(|| SplitError::setting("no formats fit", "raise --bits-budget"))
    }

    /// The smallest formats whose divergence stays below `most`, within a budget.
    fn smallest_within(&mut self, most: f64, budget: Option<u64>) -> Result<Proposal, SplitError> {
        let largest = budget.unwrap_or(u64::MAX).min(self.candidates.all.saturating_sub(1));
        let (mut too_small, mut enough) = (self.candidates.smallest(), largest);
        let smallest = self.best_within(too_small.min(largest))?;
        if smallest.divergence <= most {
            return Ok(smallest);
        }
        let mut found = self.best_within(largest)?;
        if found.divergence > most {
            let size = ByteSize(self.candidates.bytes(&found.formats)).human();
            let divergence = digits(found.divergence, 3);
            return Err(SplitError::setting(
                format!("with {size} of weights the KL is {divergence} nats, and --max-kl is {most}"),
                "raise --max-kl, or --bits-budget if it was given",
            ));
        }
        for _ in 0..STEPS {
            let middle = too_small + (enough - too_small) / 2;
            let tried = self.best_within(middle)?;
            if tried.divergence <= most {
                (found, enough) = (tried, middle);
            } else {
                too_small = middle;
            }
        }
        Ok(found)
    }
}

/// Joins neighbours until there are few enough groups.
fn merged(groups: Vec<Group>) -> Vec<Group> {
    let together = groups.len().div_ceil(MOST_GROUPS);
    let join = |groups: &[Group]| Group {
        label: match groups {
            [first, .., last] => format!("{} to {}", first.label, last.label),
            [one] => one.label.clone(),
            [] => String::new(),
        },
        matrices: groups.iter().flat_map(|group| group.matrices.iter().cloned()).collect(),
    };
    groups.chunks(together.max(1)).map(join).collect()
}

/// Which prompts of the corpus a divergence is measured with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// To learn how much a group of matrices matters.
    Sensitivity,
    /// To choose among proposals.
    Choice,
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_onnx::{Form, ScaleRule};

    /// Matrices of 1000 numbers in 4, 8 and 32 bits. The errors of "b" are a hundred times those of the others.
    fn candidates(names: &[&str]) -> Candidates {
        let format = |bits| BlockFormat { bits, block_size: 32, asymmetric: false, scale: ScaleRule::Extremes };
        let forms = |scale: f64| {
            let forms =
                [(Some(format(Bits::Four)), 500, 1.0), (Some(format(Bits::Eight)), 1000, 0.01), (None, 4000, 0.0)];
            forms.map(|(format, bytes, error)| Form { format, bytes, error: error * scale }).to_vec()
        };
        let matrix = |name: &&str| {
            let forms = forms(if *name == "b" { 1.0 } else { 0.01 });
            Candidate { name: (*name).to_owned(), nodes: vec![], forms }
        };
        Candidates { matrices: names.iter().map(matrix).collect(), all: 4000 * names.len() as u64 + 100, others: 100 }
    }

    /// The divergence of a model in which all errors matter alike.
    fn divergence(candidates: &Candidates, formats: &Formats) -> f64 {
        let error =
            |matrix: &Candidate| matrix.forms.iter().find(|form| form.format == formats[&matrix.name]).unwrap().error;
        candidates.matrices.iter().map(error).sum()
    }

    fn bits(formats: &Formats) -> String {
        let bits =
            |format: &Option<BlockFormat>| format.map_or("32".to_owned(), |format| format.bits.count().to_string());
        formats.values().map(bits).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn the_matrix_that_matters_gets_the_bits_and_the_divergence_decides() {
        let candidates = candidates(&["a", "b", "c"]);
        let groups = ["a", "b", "c"].map(|name| Group { label: name.into(), matrices: [name.to_owned()].into() });
        let right = importance(&candidates, &groups, &[0.01, 1.0, 0.01]);
        // Wrong measurements lose against squared errors.
        let wrong = importance(&candidates, &groups, &[1.0, 0.0, 0.01]);
        for importance in [right, wrong] {
            let mut tried = 0;
            let measure = &mut |formats: &Formats| {
                tried += 1;
                Ok(divergence(&candidates, formats))
            };
            let mut search = Search { candidates: &candidates, importance, measure, lines: Lines::default() };
            let best = search.best_within(2100).unwrap();
            let expected = divergence(&candidates, &best.formats);
            assert_eq!((bits(&best.formats).as_str(), best.divergence), ("4 8 4", expected));
            assert!((1..=3).contains(&tried));
        }
    }

    #[test]
    fn the_smallest_size_below_a_divergence_is_found() {
        let candidates = candidates(&["a", "b", "c"]);
        let groups = ["a", "b", "c"].map(|name| Group { label: name.into(), matrices: [name.to_owned()].into() });
        let find = |most: f64, budget: Option<u64>| {
            let importance = importance(&candidates, &groups, &[0.01, 1.0, 0.01]);
            let measure = &mut |formats: &Formats| Ok(divergence(&candidates, formats));
            let mut search = Search { candidates: &candidates, importance, measure, lines: Lines::default() };
            search.smallest_within(most, budget).map(|found| found.formats)
        };
        assert_eq!(bits(&find(2.0, None).unwrap()), "4 4 4");
        assert_eq!(bits(&find(0.05, None).unwrap()), "4 8 4");
        assert_eq!(bits(&find(0.0105, None).unwrap()), "8 8 8");
        let error = find(0.0105, Some(2100)).unwrap_err().to_string();
        assert!(error.contains("--max-kl is 0.0105"), "{error}");
    }

    #[test]
    fn neighbours_are_measured_together_where_there_are_many_blocks() {
        let group = |at: usize| Group { label: format!("layers.{at}"), matrices: [at.to_string()].into() };
        let joined = merged((0..130).map(group).collect());
        assert!(joined.len() <= MOST_GROUPS && joined[0].label == "layers.0 to layers.2");
        assert_eq!(joined.iter().map(|group| group.matrices.len()).sum::<usize>(), 130);
        assert_eq!(merged(vec![group(7)])[0].label, "layers.7");
    }
}
