//! Finds the matrices of a graph that can be quantized, and says why others are left.

use super::block_quantizer::BlockFormat;
use super::{Choice, NothingReason, QuantizeError, QuantizeOptions};
use hpp_graph::{Attribute, Graph, Node, NodeId, ValueId};
use hpp_schema::{DType, Dim};
use std::collections::{BTreeMap, BTreeSet};

/// Matrices of fewer elements are left: they save nothing and lose accuracy.
pub const MIN_ELEMENTS: u64 = 4096;
/// Nodes followed from an operand back to its weight.
const MAX_LINKS: usize = 8;

/// A node whose weight is quantized.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Chosen {
    pub node: NodeId,
    pub operator: Operator,
    pub weight: ValueId,
    pub dtype: DType,
    /// Whether the weight is stored as `[columns, depth]`.
    pub transposed: bool,
    /// K: for a lookup table, the length of a row.
    pub depth: u64,
    /// N: for a lookup table, the number of rows.
    pub columns: u64,
    pub format: BlockFormat,
    /// Whether the user gave the format for this part of the model.
    pub fixed: bool,
}

impl Chosen {
    /// Whether the operator looks up rows.
    pub fn is_table(&self) -> bool {
        self.operator == Operator::Gather
    }
}

/// An operator that reads a quantized weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    MatMul,
    Gemm,
    Gather,
}

/// Why a matrix is left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LeftReason {
    /// Fewer than [`MIN_ELEMENTS`] elements.
    Small,
    /// The depth is less than a block.
    Short,
    /// More than two dimensions.
    ThreeDimensional,
    /// The matrix is the left operand, or both are constant.
    LeftOperand,
    /// A Gemm with `alpha`, `beta` or `transA`.
    ScaledGemm,
    /// A lookup table whose rows are not whole blocks, or of bfloat16.
    Table,
    /// The user's choice for head or embedding.
    Asked,
    /// The budget has room for the floats.
    Budget,
}

impl LeftReason {
    /// Words for the summary, behind a number of matrices.
    pub fn text(self) -> &'static str {
        match self {
            LeftReason::Small => "of fewer than 4096 elements",
            LeftReason::Short => "with sums shorter than a block",
            LeftReason::ThreeDimensional => "with more than two dimensions",
            LeftReason::LeftOperand => "that are the left operand",
            LeftReason::ScaledGemm => "of a Gemm with alpha, beta or transA",
            LeftReason::Table => "whose rows ONNX Runtime's CPU kernel cannot look up in blocks",
            LeftReason::Asked => "as asked (head or embedding)",
            LeftReason::Budget => "that fit the budget as floats",
        }
    }
}

/// The parts of a graph that have options of their own.
#[derive(Clone, Debug, Default)]
pub struct Roles {
    /// Nodes of the head.
    pub head: BTreeSet<NodeId>,
    /// Inputs that hold token ids: only tables that they index are embeddings.
    pub tokens: BTreeSet<ValueId>,
}

/// The result of the selection.
#[derive(Debug, Default)]
pub(super) struct Selection {
    pub chosen: Vec<Chosen>,
    /// Weights that are left, by name.
    pub left: BTreeMap<String, LeftReason>,
    /// Weights, by name, that the user's options leave for one of the operators that read them.
    pub asked: BTreeSet<String>,
    /// Number of operators whose weights are quantized already.
    pub quantized_already: usize,
    /// Whether a table that token ids index could be quantized, but the user's options leave it.
    pub embedding_is_left: bool,
}

/// Selects the matrices of a graph with inferred shapes.
pub(super) fn select(graph: &Graph, roles: &Roles, options: &QuantizeOptions) -> Selection {
    let mut selection = Selection::default();
    for id in graph.node_ids() {
        let node = graph.node(id);
        if is_quantized(node) {
            selection.quantized_already += 1;
        }
        let Some((operator, weight, flipped)) = operand(graph, node, roles) else { continue };
        let choice = match operator {
            Operator::Gather => options.embedding,
            _ if roles.head.contains(&id) => options.head,
            _ => Choice::Same,
        };
        match candidate(graph, id, operator, weight, flipped, choice, options) {
            Ok(Some(chosen)) => selection.chosen.push(chosen),
            Ok(None) => {}
            Err(reason) => {
                let name = &graph.value(weight).name;
                if reason == LeftReason::Asked {
                    let in_same_bits = candidate(graph, id, operator, weight, flipped, Choice::Same, options);
                    selection.embedding_is_left |= operator == Operator::Gather && matches!(in_same_bits, Ok(Some(_)));
                    selection.asked.insert(name.clone());
                }
                selection.left.insert(name.clone(), reason);
            }
        }
    }
    // A weight that is quantized for one operator and left for another counts as quantized.
    let taken: BTreeSet<&str> = selection.chosen.iter().map(|c| graph.value(c.weight).name.as_str()).collect();
    selection.left.retain(|name, _| !taken.contains(name.as_str()));
    selection
}

impl Selection {
    /// Returns the reason as an error if nothing was chosen.
    pub fn check_any(&self) -> Result<(), QuantizeError> {
        if !self.chosen.is_empty() {
            return Ok(());
        }
        let reason = match (self.quantized_already, self.left.len()) {
            (0, 0) => NothingReason::NoMatrices,
            (0, _) => NothingReason::AllLeft(self.left_counts()),
            (operators, _) => NothingReason::QuantizedAlready(operators),
        };
        Err(QuantizeError::Nothing { reason, embedding_is_left: self.embedding_is_left })
    }

    /// Number of weights left for each reason.
    pub fn left_counts(&self) -> BTreeMap<LeftReason, usize> {
        let mut counts = BTreeMap::new();
        self.left.values().for_each(|reason| *counts.entry(*reason).or_default() += 1);
        counts
    }
}

/// If the node multiplies by a weight or looks up its rows: the operator, the weight, and whether the weight is transposed.
fn operand(graph: &Graph, node: &Node, roles: &Roles) -> Option<(Operator, ValueId, bool)> {
    let input = |slot: usize| node.inputs.get(slot).copied().flatten();
    let found = |operator, slot| {
        let (weight, flipped) = trace(graph, input(slot)?)?;
        Some((operator, weight, flipped))
    };
    match (node.domain.as_str(), node.op_type.as_str()) {
        ("", "MatMul") => found(Operator::MatMul, 1).or_else(|| found(Operator::MatMul, 0)),
        ("", "Gemm") => found(Operator::Gemm, 1).or_else(|| found(Operator::Gemm, 0)),
        ("com.microsoft", "MoE") => found(Operator::MatMul, 2),
        ("", "Gather") if matches!(node.int("axis").unwrap_or(0), 0 | -2) => {
            let indices = unwrapped(graph, input(1)?);
            found(Operator::Gather, 0).filter(|_| roles.tokens.contains(&indices))
        }
        _ => None,
    }
}

/// The float weight behind an operand, and whether it is transposed on the way.
fn trace(graph: &Graph, mut value: ValueId) -> Option<(ValueId, bool)> {
    let mut flipped = false;
    for _ in 0..MAX_LINKS {
        if graph.weight(value).is_some() {
            let is_float = matches!(graph.value(value).dtype, Some(DType::Float32 | DType::Float16 | DType::Bfloat16));
            return is_float.then_some((value, flipped));
        }
        let node = graph.node(graph.producer(value)?);
        match node.op_type.as_str() {
            "Identity" => {}
            "Transpose" if swaps_two_axes(node) => flipped = !flipped,
            _ => return None,
        }
        value = node.inputs.first().copied().flatten()?;
    }
    None
}

fn swaps_two_axes(node: &Node) -> bool {
    match node.attributes.get("perm") {
        Some(Attribute::Ints(perm)) => perm == &[1, 0],
        // Without `perm` the axes are reversed; the weight's rank is checked later.
        _ => true,
    }
}

/// A value without the casts around it.
fn unwrapped(graph: &Graph, mut value: ValueId) -> ValueId {
    for _ in 0..MAX_LINKS {
        let Some(node) = graph.producer(value).map(|id| graph.node(id)) else { break };
        match (node.op_type.as_str(), node.inputs.first().copied().flatten()) {
            ("Cast" | "Identity" | "Reshape" | "Unsqueeze" | "Squeeze", Some(input)) => value = input,
            _ => break,
        }
    }
    value
}

/// The matrix, if it can be quantized; `None` if it is no matrix.
fn candidate(
    graph: &Graph,
    id: NodeId,
    operator: Operator,
    weight: ValueId,
    flipped: bool,
    choice: Choice,
    options: &QuantizeOptions,
) -> Result<Option<Chosen>, LeftReason> {
    let node = graph.node(id);
    let about = graph.value(weight);
    let sizes: Option<Vec<u64>> = about.shape.iter().flatten().map(Dim::as_fixed).collect();
    let (Some(dtype), Some(sizes)) = (about.dtype, sizes) else { return Ok(None) };
    let elements = sizes.iter().fold(1, |product: u64, size| product.saturating_mul(*size));
    let [rows, width] = sizes[..] else {
        let is_large = sizes.len() > 2 && elements >= MIN_ELEMENTS;
        return if is_large { Err(LeftReason::ThreeDimensional) } else { Ok(None) };
    };
    let format = match choice {
        Choice::None => return Err(LeftReason::Asked),
        Choice::Same => options.format,
        Choice::Bits(bits) => BlockFormat { bits, ..options.format },
    };
    let transposed = match operator {
        Operator::MatMul => flipped,
        Operator::Gemm => flipped != (node.int("transB").unwrap_or(0) != 0),
        Operator::Gather => !flipped,
    };
    let (depth, columns) = if transposed { (width, rows) } else { (rows, width) };
    if elements < MIN_ELEMENTS {
        return Err(LeftReason::Small);
    }
    if depth < format.block_size as u64 {
        return Err(LeftReason::Short);
    }
    if operator == Operator::Gather && (!depth.is_multiple_of(format.block_size as u64) || dtype == DType::Bfloat16) {
        return Err(LeftReason::Table);
    }
    if operator != Operator::Gather {
        check_product(graph, node, operator)?;
    }
    let fixed = matches!(choice, Choice::Bits(_));
    Ok(Some(Chosen { node: id, operator, weight, dtype, transposed, depth, columns, format, fixed }))
}

/// Refuses products that MatMulNBits does not compute.
fn check_product(graph: &Graph, node: &Node, operator: Operator) -> Result<(), LeftReason> {
    let input = |slot: usize| node.inputs.get(slot).copied().flatten();
    let is_weight = |slot: usize| input(slot).is_some_and(|value| trace(graph, value).is_some());
    let rank = input(0).and_then(|value| graph.value(value).shape.as_ref()).map(Vec::len);
    if is_weight(0) || !is_weight(1) || rank.is_some_and(|rank| rank < 2) {
        return Err(LeftReason::LeftOperand);
    }
    let is_one = |name: &str| match node.attributes.get(name) {
        Some(Attribute::Float(value)) => *value == 1.0,
        _ => true,
    };
    let is_plain = node.int("transA").unwrap_or(0) == 0 && is_one("alpha") && (is_one("beta") || input(2).is_none());
    match operator != Operator::Gemm || is_plain {
        true => Ok(()),
        false => Err(LeftReason::ScaledGemm),
    }
}

/// Whether the operator reads quantized weights.
fn is_quantized(node: &Node) -> bool {
    matches!(
        node.op_type.as_str(),
        "MatMulNBits"
            | "GatherBlockQuantized"
            | "QMoE"
            | "MatMulBnb4"
            | "MatMulFpQ4"
            | "MatMulInteger"
            | "QLinearMatMul"
            | "DynamicQuantizeMatMul"
            | "DequantizeLinear"
    )
}
