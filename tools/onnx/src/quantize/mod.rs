//! Quantizes the weight matrices of a model: `MatMul` and `Gemm` become `MatMulNBits`, lookups of embeddings
//! `GatherBlockQuantized`, both operators of ONNX Runtime.
//!
//! Quantizing rewrites only the graph. The new weights are a virtual file: their bytes are computed from the model's own weights when they are
//! copied, so the planner sees the quantized graph before any weight is read. Weights are rounded to the nearest level, or, if second moments of
//! their inputs are given, so that errors compensate each other. Does not run models.

mod block_quantizer;
mod budget;
mod compensate;
mod contents;
mod matrix;
mod moments;
mod rewrite;
mod select;
#[cfg(test)]
mod tests;
mod tile;

pub use block_quantizer::{Bits, BlockFormat, ScaleRule};
pub use budget::{Candidate, Candidates, Form, MeasureProgress};
pub use matrix::NotFiniteError;
pub use moments::{InputMoments, moment_bytes};
pub use select::{LeftReason, MIN_ELEMENTS, Roles};

use crate::model::Model;
use crate::tensor::TensorError;
use crate::virtual_file::VirtualFile;
use crate::weights::QUANTIZED_FILE;
use hpp_graph::{Graph, ValueId};
use hpp_schema::ByteSize;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How a model is quantized.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuantizeOptions {
    /// The format of all matrices that nothing below chooses otherwise.
    pub format: BlockFormat,
    /// Maximum bytes of all weights of the model. A format is chosen for each matrix to fit them, and `format` is not used.
    pub budget: Option<u64>,
    /// The format of each weight by name, used instead of `format`. Weights that are not named here, or have `None`, stay in floats.
    pub formats: Option<BTreeMap<String, Option<BlockFormat>>>,
    /// What to do with the matrices of the head.
    pub head: Choice,
    /// What to do with the tables that token ids index.
    pub embedding: Choice,
    /// Second moments of observed inputs, with which the errors of 4-bit weights are compensated.
    pub moments: Option<Arc<InputMoments>>,
}

/// Whether a part of the model is quantized, and to how many bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// To the bits of all other matrices.
    Same,
    /// To these bits.
    Bits(Bits),
    /// Not quantized.
    None,
}

/// The reason why a model cannot be quantized.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum QuantizeError {
    #[error("nothing to quantize: {reason}")]
    Nothing {
        reason: NothingReason,
        /// Whether a table that token ids index could be quantized, and is left because nobody asked for it.
        embedding_is_left: bool,
    },
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("the model has a weight file named {QUANTIZED_FILE:?}, a name that quantizing uses itself")]
    NameTaken,
    #[error(
        "all weights take {} in the smallest formats, and --bits-budget is {}",
        ByteSize(*smallest).human_rounded_up(), ByteSize(*budget).human_rounded_down()
    )]
    Budget { budget: u64, smallest: u64 },
    #[error(transparent)]
    NotFinite(#[from] NotFiniteError),
    #[error("cannot read the weight {name:?}")]
    Read { name: String, source: std::io::Error },
    #[error("the weight {name:?} has {elements} elements, more than this machine can address")]
    TooLarge { name: String, elements: u64 },
}

impl QuantizeError {
    /// An error of computing quantized weights.
    fn reading(name: &str, source: std::io::Error) -> Self {
        match source.get_ref().and_then(|cause| cause.downcast_ref::<NotFiniteError>()) {
            Some(cause) => QuantizeError::NotFinite(cause.clone()),
            None => QuantizeError::Read { name: name.to_owned(), source },
        }
    }
}

/// Why no matrix was quantized.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum NothingReason {
    #[error("no MatMul or Gemm of the model has a weight matrix of floats")]
    NoMatrices,
    #[error("the model is quantized already (operators that read quantized weights: {0})")]
    QuantizedAlready(usize),
    #[error(
        "all weights take {} as they are, and --bits-budget allows {}",
        ByteSize(*bytes).human(), ByteSize(*budget).human()
    )]
    Fits { bytes: u64, budget: u64 },
    #[error("the model has no matrix to quantize, only {}", left_text(.0))]
    AllLeft(BTreeMap<LeftReason, usize>),
}

/// A quantized model.
#[derive(Clone, Debug)]
pub struct Quantized {
    /// The model. Its quantized weights are in [`QUANTIZED_FILE`], which does not exist on disk.
    pub model: Model,
    /// The contents of that file.
    pub contents: VirtualFile,
    /// What was quantized and what was left.
    pub summary: QuantizeSummary,
}

/// Counts of what quantizing changed in a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QuantizeSummary {
    /// Number of quantized weights of each format, each counted once however many operators read it.
    pub formats: BTreeMap<BlockFormat, usize>,
    /// Number of quantized weights whose errors are compensated.
    pub compensated: usize,
    /// Number of positions of the observed inputs that were used for compensation.
    pub positions: u64,
    /// Bytes of the quantized weights before.
    pub bytes_before: u64,
    /// Bytes of numbers, scales and zero points after.
    pub bytes_after: u64,
    /// Bytes of quantized weights whose floats stay for other operators.
    pub bytes_kept: u64,
    /// Bytes of quantized weights that both a lookup and a matrix product read, as in models whose embedding and head are tied. A file
    /// has them once. Memory has them twice, because the kernel of the product packs a copy for itself.
    pub bytes_tied: u64,
    /// Number of matrices left for each reason.
    pub left: BTreeMap<LeftReason, usize>,
}

impl QuantizeSummary {
    /// Describes which matrices were left and why; empty if none was.
    pub fn left_text(&self) -> String {
        left_text(&self.left)
    }
}

fn left_text(left: &BTreeMap<LeftReason, usize>) -> String {
    let text = |(reason, count): (&LeftReason, &usize)| format!("{count} {}", reason.text());
    left.iter().map(text).collect::<Vec<_>>().join(", ")
}

/// The input that each weight to quantize multiplies, by the weight's name. Weights that a lookup reads too or that multiply several inputs are
/// left out: no single input determines the cost of their errors. `graph` must be the model's graph with inferred shapes.
pub fn product_inputs(graph: &Graph, roles: &Roles, options: &QuantizeOptions) -> BTreeMap<String, ValueId> {
    let mut inputs: BTreeMap<ValueId, Option<ValueId>> = BTreeMap::new();
    for chosen in select::select(graph, roles, options).chosen {
        let input = graph.node(chosen.node).inputs.first().copied().flatten().filter(|_| !chosen.is_table());
        inputs
            .entry(chosen.weight)
            .and_modify(|known| *known = known.filter(|known| Some(*known) == input))
            .or_insert(input);
    }
    inputs.into_iter().filter_map(|(weight, input)| Some((graph.value(weight).name.clone(), input?))).collect()
}

/// Refuses a model in which these options quantize no weight, whatever the budget is. Reads no weight. `graph` must be the model's graph with
/// inferred shapes.
///
/// # Errors
/// [`QuantizeError::Nothing`].
pub fn check_quantizable(graph: &Graph, roles: &Roles, options: &QuantizeOptions) -> Result<(), QuantizeError> {
    select::select(graph, roles, options).check_any()
}

/// Chooses the format of each matrix within `options.budget`, as [`quantize`] does with the same options. The result serves several calls of
/// [`quantize`] (as `formats`). `progress` is called as in [`Candidates::measure`]. `graph` must be the model's graph with inferred shapes.
///
/// # Errors
/// The errors of [`quantize`]. A budget into which all weights fit without quantizing, or which is below the smallest formats, is refused before
/// any weight is read.
pub fn choose_formats(
    model: &Model,
    graph: &Graph,
    roles: &Roles,
    options: &QuantizeOptions,
    progress: MeasureProgress<'_>,
) -> Result<BTreeMap<String, Option<BlockFormat>>, QuantizeError> {
    let selection = select::select(graph, roles, options);
    selection.check_any()?;
    formats_within(options.budget.unwrap_or(u64::MAX), model, graph, &selection, progress)
}

fn formats_within(
    budget: u64,
    model: &Model,
    graph: &Graph,
    selection: &select::Selection,
    progress: MeasureProgress<'_>,
) -> Result<BTreeMap<String, Option<BlockFormat>>, QuantizeError> {
    budget::check_choice(budget::weight_bytes(graph, graph.value_ids()), budget)?;
    Candidates::find(model, graph, selection, Some(budget), progress)?.choose(budget, |_| 1.0)
}

/// Quantizes a model. `graph` must be the model's graph with inferred shapes.
pub fn quantize(
    model: &Model,
    graph: &Graph,
    roles: &Roles,
    options: &QuantizeOptions,
) -> Result<Quantized, QuantizeError> {
    let mut selection = select::select(graph, roles, options);
    selection.check_any()?;
    let chosen = match (options.budget, &options.formats) {
        (Some(budget), None) => Some(formats_within(budget, model, graph, &selection, &mut |_, _| {})?),
        (_, formats) => formats.clone(),
    };
    if let Some(formats) = chosen {
        budget::apply(graph, &mut selection, &formats);
    }
    selection.check_any()?;
    rewrite::rewrite(model, graph, &selection, options.moments.as_ref())
}
