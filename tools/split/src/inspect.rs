//! `hpp-split inspect`: prints the blocks, boundaries, classes and states of a model, without planning.

use crate::cli::InspectArgs;
use crate::error::SplitError;
use crate::experts::notes_of_unknown_forms;
use crate::operators;
use crate::print::print_json;
use crate::table::{blocks as blocks_of, table};
use hpp_graph::{ExpertCounts, Fold, ValueId};
use hpp_io::print_line;
use hpp_model::{Analysis, AnalysisOptions, ExpertComputation, LogitsMode, PlannedState, analyse_with, model_hash};
use hpp_schema::{ByteSize, Shape, StateUpdate};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Inspection {
    model: String,
    /// The hash that profiles record too; it differs for other graphs or weights.
    hash: String,
    kind: hpp_schema::ModelKind,
    layers: usize,
    classes: usize,
    weight_bytes: u64,
    /// Weights that several blocks read; each of these blocks counts them, and `weight_bytes` counts them once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shared: Vec<SharedWeights>,
    kv_bytes_per_token: u64,
    blocks: Vec<BlockInfo>,
    boundaries: Vec<BoundaryInfo>,
    states: Vec<StateInfo>,
    notes: Vec<String>,
}

/// Weights that the same blocks read.
#[derive(Debug, Serialize)]
struct SharedWeights {
    blocks: Vec<String>,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct BlockInfo {
    label: String,
    class: usize,
    nodes: usize,
    weights: usize,
    weight_bytes: u64,
    states: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertInfo>,
}

/// The experts of a block.
#[derive(Debug, Serialize)]
struct ExpertInfo {
    count: u64,
    active: u64,
    bytes: u64,
}

impl BlockInfo {
    /// Equal for adjacent blocks that share a row.
    fn key(&self) -> (usize, usize, usize, u64, usize) {
        (self.class, self.nodes, self.weights, self.weight_bytes, self.states)
    }
}

impl BoundaryInfo {
    /// Whether the tensors have the same types and shapes; names may differ.
    fn is_like(&self, other: &BoundaryInfo) -> bool {
        let kinds =
            |boundary: &BoundaryInfo| boundary.values.iter().map(|v| (v.dtype, v.shape.clone())).collect::<Vec<_>>();
        kinds(self) == kinds(other)
    }
}

#[derive(Debug, Serialize)]
struct BoundaryInfo {
    after: String,
    values: Vec<ValueInfo>,
}

#[derive(Debug, Serialize)]
struct ValueInfo {
    name: String,
    dtype: Option<hpp_schema::DType>,
    shape: Option<Shape>,
}

#[derive(Debug, Serialize)]
struct StateInfo {
    past: String,
    present: String,
    layer: u32,
    dtype: hpp_schema::DType,
    shape: Shape,
    update: StateUpdate,
    bytes: u64,
}

/// Prints the inspection as text or JSON, and writes the Graphviz file.
pub fn run(args: &InspectArgs) -> Result<(), SplitError> {
    let options = AnalysisOptions::as_exported(None, LogitsMode::All);
    let analysis = analyse_with(&args.model, AnalysisOptions { experts: ExpertComputation::Selected, ..options })?;
    let inspection = inspect(&analysis)?;
    if let Some(path) = &args.dot {
        let dot = hpp_graph::to_dot(&analysis.graph, &analysis.segmentation, fold(args));
        hpp_io::write_file_as(path, dot.as_bytes(), b"digraph ")?;
    }
    if args.json {
        print_json(&inspection)?;
    } else {
        print_line(&text(&inspection, fold(args)))?;
    }
    Ok(())
}

fn fold(args: &InspectArgs) -> Fold {
    if args.all { Fold::None } else { Fold::Equal }
}

fn inspect(a: &Analysis) -> Result<Inspection, SplitError> {
    let bytes = |weights: &[ValueId]| weights.iter().filter_map(|id| a.graph.weight(*id)).map(|w| w.bytes).sum();
    // Number classes in order of first appearance.
    let mut classes = Vec::new();
    for block in &a.segmentation.blocks {
        if !classes.contains(&block.class) {
            classes.push(block.class);
        }
    }
    let blocks = a.segmentation.blocks.iter().map(|block| BlockInfo {
        label: block.label.clone(),
        class: classes.iter().position(|class| *class == block.class).unwrap_or_default(),
        nodes: block.nodes.len(),
        weights: block.weights.len(),
        weight_bytes: bytes(&block.weights),
        states: block.states.len(),
        experts: ExpertCounts::of(&a.graph, block).map(|ExpertCounts { count, active, bytes }| ExpertInfo {
            count,
            active,
            bytes,
        }),
    });
    let blocks: Vec<BlockInfo> = blocks.collect();
    Ok(Inspection {
        model: a.name.clone(),
        hash: model_hash(&a.model).map_err(|error| SplitError::Weights(Box::new(error)))?,
        kind: a.kind,
        layers: a.segmentation.layer_count(),
        classes: classes.len(),
        weight_bytes: bytes(&read_weights(a)),
        shared: shared_weights(a),
        kv_bytes_per_token: kv_bytes_per_token(a),
        boundaries: boundaries(a),
        blocks,
        states: a.states.iter().map(|s| state(&s.state)).collect(),
        notes: a.notes.iter().cloned().chain(notes_of_unknown_forms(a)).chain(operators::notes(a)).collect(),
    })
}

/// The weights of more than one block, by the blocks that read them. Small constants are left out, as all layers may share some.
fn shared_weights(a: &Analysis) -> Vec<SharedWeights> {
    let mut readers: BTreeMap<ValueId, Vec<String>> = BTreeMap::new();
    for block in &a.segmentation.blocks {
        for weight in &block.weights {
            readers.entry(*weight).or_default().push(block.label.clone());
        }
    }
    let mut shared: BTreeMap<Vec<String>, u64> = BTreeMap::new();
    for (id, blocks) in readers.into_iter().filter(|(_, blocks)| blocks.len() > 1) {
        *shared.entry(blocks).or_default() += a.graph.weight(id).map_or(0, |weight| weight.bytes);
    }
    let shared = shared.into_iter().filter(|(_, bytes)| *bytes >= LEAST_SHARED);
    shared.map(|(blocks, bytes)| SharedWeights { blocks, bytes }).collect()
}

/// Shared weights of fewer bytes are not reported.
const LEAST_SHARED: u64 = 1024;

/// The weights that blocks read, each once. A file may have others: those of a branch that is never taken.
fn read_weights(a: &Analysis) -> Vec<ValueId> {
    let all: BTreeSet<ValueId> = a.segmentation.blocks.iter().flat_map(|block| &block.weights).copied().collect();
    all.into_iter().collect()
}

fn boundaries(a: &Analysis) -> Vec<BoundaryInfo> {
    let value = |id: &ValueId| {
        let value = a.graph.value(*id);
        ValueInfo { name: value.name.clone(), dtype: value.dtype, shape: value.shape.clone() }
    };
    let pairs = a.segmentation.boundaries.iter().zip(&a.segmentation.blocks);
    pairs
        .map(|(boundary, block)| BoundaryInfo {
            after: block.label.clone(),
            values: boundary.values.iter().map(value).collect(),
        })
        .collect()
}

fn state(state: &hpp_schema::State) -> StateInfo {
    StateInfo {
        past: state.past.clone(),
        present: state.present.clone(),
        layer: state.layer,
        dtype: state.dtype,
        shape: state.shape.clone(),
        update: state.update,
        bytes: state.bytes.0,
    }
}

/// Bytes that one more token adds to the states of one sequence. Sliding windows do not grow once they are full, so
/// they are left out.
fn kv_bytes_per_token(a: &Analysis) -> u64 {
    let per_token = |s: &PlannedState| match s.state.update {
        StateUpdate::InPlace { capacity, .. } | StateUpdate::Append { capacity, .. } if capacity == a.context => {
            s.state.bytes.0.checked_div(capacity).unwrap_or(0)
        }
        _ => 0,
    };
    a.states.iter().map(per_token).sum()
}

/// A line for each kind of mixture: blocks, experts, how many each token selects, and the bytes it then needs.
fn experts(blocks: &[BlockInfo]) -> String {
    let mixtures = blocks.iter().filter_map(|block| Some((block, block.experts.as_ref()?))).collect::<Vec<_>>();
    let is_alike = |a: &(&BlockInfo, &ExpertInfo), b: &(&BlockInfo, &ExpertInfo)| {
        (a.1.count, a.1.active, a.1.bytes) == (b.1.count, b.1.active, b.1.bytes)
    };
    let line = |group: &[(&BlockInfo, &ExpertInfo)]| {
        let labels: Vec<String> = group.iter().map(|(block, _)| block.label.clone()).collect();
        let ExpertInfo { count, active, bytes } = *group[0].1;
        let each = if group.len() > 1 { " in each block" } else { "" };
        let one = bytes / count.max(1);
        let (of, all) = (blocks_of(&labels), ByteSize(bytes).human());
        let (one, selected) = (ByteSize(one).human(), ByteSize(one * active).human());
        format!(
            "\nexperts of {of}: {count} of {one}, {active} active per token; {all} of weights{each}, {selected} of them active"
        )
    };
    let lines: String = mixtures.chunk_by(is_alike).map(line).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

fn text(i: &Inspection, fold: Fold) -> String {
    let folds = fold == Fold::Equal;
    let alike = |a: &BlockInfo, b: &BlockInfo| folds && a.key() == b.key();
    let rows = i.blocks.chunk_by(alike).map(|blocks| {
        let (first, labels) = (&blocks[0], blocks.iter().map(|block| block.label.clone()).collect::<Vec<_>>());
        let each = if blocks.len() > 1 { " each" } else { "" };
        vec![
            blocks_of(&labels),
            first.class.to_string(),
            first.nodes.to_string(),
            first.weights.to_string(),
            format!("{}{each}", ByteSize(first.weight_bytes).human()),
            first.states.to_string(),
        ]
    });
    let blocks = table(&["block", "class", "nodes", "weights", "bytes", "states"], &[1, 2, 3, 4, 5], rows);
    let alike = |a: &BoundaryInfo, b: &BoundaryInfo| folds && a.is_like(b);
    let crossings = i.boundaries.chunk_by(alike).flat_map(|boundaries| {
        let labels: Vec<String> = boundaries.iter().map(|boundary| boundary.after.clone()).collect();
        let more = if boundaries.len() > 1 { format!(" and {} more", boundaries.len() - 1) } else { String::new() };
        let row = move |value: &ValueInfo| {
            let dtype = value.dtype.map_or("?".to_owned(), |t| t.to_string());
            let shape = value.shape.as_ref().map_or("?".to_owned(), |s| format!("{s:?}"));
            vec![blocks_of(&labels), format!("{}{more}", value.name), dtype, shape]
        };
        boundaries[0].values.iter().map(row).collect::<Vec<_>>()
    });
    let boundaries = table(&["after", "tensor", "type", "shape"], &[], crossings);
    let mut text = format!(
        "{}: {} layers in {} block classes, {} of weights, {} of KV cache per token\n\n{blocks}\n\n{boundaries}",
        i.model,
        i.layers,
        i.classes,
        ByteSize(i.weight_bytes).human(),
        ByteSize(i.kv_bytes_per_token).human()
    );
    for SharedWeights { blocks, bytes } in &i.shared {
        let (bytes, blocks) = (ByteSize(*bytes).human(), blocks_of(blocks));
        text.push_str(&format!(
            "\n{bytes} of weights are shared: {blocks}; each row counts them, the total counts them once"
        ));
    }
    text.push_str(&experts(&i.blocks));
    for note in &i.notes {
        text.push_str(&format!("\nnote: {note}"));
    }
    text
}
