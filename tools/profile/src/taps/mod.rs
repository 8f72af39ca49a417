//! Instruments a model: writes a copy of its graph, over the same weights, whose outputs include intermediate tensors ("taps").
//!
//! The graph's structure determines the taps. If it is ambiguous, nothing is tapped and the reason is reported.

mod attention;
mod find;
mod hidden;
mod inside;
pub(crate) mod plan_dir;

pub(crate) use attention::int;
pub use plan_dir::PlanDirError;

use attention::{Asked, Seen};
use find::GraphView;
use hpp_graph::{BlockKind, ValueId};
use hpp_model::Analysis;
use hpp_onnx::proto::ModelProto;
use hpp_schema::probe::{Tap, TapKind};
use hpp_schema::{Dim, InputRole, ModelKind, OutputUse, PartitionOutput, Plan};
use plan_dir::{Draft, PartitionFile, ReferencedModel};
use std::path::{Path, PathBuf};

/// What to tap in addition to boundaries, routers and ReLUs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wanted {
    /// Attention weights: `heads * tokens * context` numbers for each layer and pass.
    pub attention: bool,
}

/// An instrumented model on disk.
#[derive(Debug)]
pub struct Tapped {
    /// Its plan.
    pub plan: PathBuf,
    /// Its taps, in execution order.
    pub taps: Vec<Tap>,
    /// Messages for the user: what cannot be observed in this model, or only slowly.
    pub not_observed: Vec<String>,
}

/// Why a corpus cannot be run through a model.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum TapError {
    #[error("a corpus cannot be run through {0}: it generates no text")]
    NotALanguageModel(String),
    #[error("a corpus cannot be run through {0}: it takes embeddings, not token ids")]
    TakesEmbeddings(String),
    #[error(transparent)]
    PlanDir(#[from] PlanDirError),
}

impl TapError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            TapError::NotALanguageModel(_) => Some("leave --prompts out: its blocks can be measured without"),
            TapError::TakesEmbeddings(_) => Some(
                "leave --prompts out, or export the model with its embedding table: its blocks can be measured without",
            ),
            TapError::PlanDir(error) => error.hint(),
        }
    }
}

/// Checks that a model can run a corpus.
pub fn check(analysis: &Analysis) -> Result<(), TapError> {
    let takes = |role| analysis.inputs.iter().any(|input| input.role == role);
    match () {
        () if analysis.kind == ModelKind::SingleRun => Err(TapError::NotALanguageModel(analysis.name.clone())),
        () if !takes(InputRole::TokenIds) => Err(TapError::TakesEmbeddings(analysis.name.clone())),
        () => Ok(()),
    }
}

/// Writes the instrumented model and its plan into the empty directory `dir`, which must exist as long as the plan is used.
///
/// External weights stay in their files; embedded weights are copied into `dir`.
pub fn write(analysis: &Analysis, wanted: Wanted, dir: &Path) -> Result<Tapped, TapError> {
    check(analysis)?;
    let found = TapsFound::in_model(analysis, wanted);
    let weights = ReferencedModel::reach(&analysis.model, dir)?;
    let blocks = 0..analysis.segmentation.blocks.len();
    let values = found.values();
    let mut draft = Draft::new(analysis, &[blocks], |parts| {
        for part in parts {
            part.outputs.extend(values.iter().filter(|value| !part.outputs.contains(value)).collect::<Vec<_>>());
        }
    })?;
    let mut protos = draft.protos(analysis, &weights.model)?;
    let taps = found.taps(analysis, &mut protos[0], &mut draft.plan);
    let file = PartitionFile { proto: &protos[0], weights: &weights.dir };
    let plan = plan_dir::write(dir, analysis, draft.plan, &[file])?;
    Ok(Tapped { plan, taps, not_observed: found.not_observed })
}

/// The taps of a model.
#[derive(Default)]
struct TapsFound {
    seen: Vec<(String, Watched)>,
    not_observed: Vec<String>,
}

/// A value of the graph, or an optional output that a fused operator must be configured to write.
enum Watched {
    Value(ValueId, TapKind),
    Asked(Asked),
}

impl TapsFound {
    fn in_model(analysis: &Analysis, wanted: Wanted) -> Self {
        let view = GraphView { graph: &analysis.graph, weights: &analysis.segmentation.weights };
        let mut found = TapsFound::default();
        found.slow(analysis);
        for (index, block) in analysis.segmentation.blocks.iter().enumerate() {
            if index + 1 < analysis.segmentation.blocks.len() {
                match hidden::after(view, &analysis.segmentation, index) {
                    Ok(values) => {
                        let tap = |value| (block.label.clone(), Watched::Value(value, TapKind::Boundary));
                        found.seen.extend(values.into_iter().map(tap));
                    }
                    Err(why) => found.not(format!("the hidden state after {}: {why}", block.label)),
                }
            }
            if !matches!(block.kind, BlockKind::Layer(_)) {
                continue;
            }
            found.take("the experts", &block.label, inside::router(view, &block.nodes));
            found.take("the neurons", &block.label, inside::neurons(view, &block.nodes));
            if wanted.attention {
                found.attention(view, &block.label, &block.nodes);
            }
        }
        found
    }

    fn slow(&mut self, analysis: &Analysis) {
        if analysis.kind == ModelKind::DecoderWithoutCache {
            self.not_observed
                .push("slow: the model keeps no cache, so each token computes the whole text again".into());
        }
        if analysis.inputs.iter().any(|input| input.role == InputRole::UseCacheBranch) {
            self.not(
                "this merged decoder's branch without a cache: the corpus goes through the one with a cache".into(),
            );
        }
    }

    fn not(&mut self, what: String) {
        self.not_observed.push(format!("not observed: {what}"));
    }

    fn take(&mut self, what: &str, block: &str, found: Result<Option<inside::TapValue>, String>) {
        match found {
            Ok(None) => {}
            Ok(Some((value, kind))) => self.seen.push((block.to_owned(), Watched::Value(value, kind))),
            Err(why) => self.not(format!("{what} of {block}: {why}")),
        }
    }

    fn attention(&mut self, view: GraphView, block: &str, nodes: &[hpp_graph::NodeId]) {
        match attention::attention(view, nodes) {
            Ok(Some(Seen::Value(value))) => {
                self.seen.push((block.to_owned(), Watched::Value(value, TapKind::Attention)));
            }
            Ok(Some(Seen::Asked(asked))) => self.seen.push((block.to_owned(), Watched::Asked(asked))),
            Ok(None) => self.not(format!("the attention of {block}: it has none that weighs tokens")),
            Err(why) => self.not(format!("the attention of {block}: {why}")),
        }
    }

    /// Values to add to the graph's outputs.
    fn values(&self) -> Vec<ValueId> {
        let values = self.seen.iter().filter_map(|(_, watched)| match watched {
            Watched::Value(value, _) => Some(*value),
            Watched::Asked(_) => None,
        });
        let mut values: Vec<ValueId> = values.collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// Makes the taps. Configures fused operators, and leaves the number of rows of taps inside layers open.
    fn taps(&self, analysis: &Analysis, proto: &mut ModelProto, plan: &mut Plan) -> Vec<Tap> {
        let graph = proto.graph.get_or_insert_default();
        let outputs = &mut plan.partitions[0].outputs;
        let mut taps = Vec::new();
        for (block, watched) in &self.seen {
            let (name, kind) = match watched {
                Watched::Value(value, kind) => (analysis.graph.value(*value).name.clone(), *kind),
                Watched::Asked(asked) => {
                    let name = attention::free_name(&analysis.graph, block);
                    if asked.expose(graph, &name) {
                        let heads = asked.heads.map_or(Dim::Unknown, Dim::fixed);
                        let shape = vec![Dim::Unknown, heads, Dim::Unknown, Dim::Unknown];
                        let dtype = asked.dtype;
                        outputs.push(PartitionOutput { name: name.clone(), dtype, shape, to: OutputUse::Boundary });
                    }
                    (name, TapKind::Attention)
                }
            };
            if let Some(output) = outputs.iter_mut().find(|output| output.name == name && is_inside(kind)) {
                clear_row_counts(output, kind);
            }
            taps.push(Tap { name, block: block.clone(), kind });
        }
        taps
    }
}

fn is_inside(kind: TapKind) -> bool {
    kind != TapKind::Boundary
}

/// Keeps the axis that determines the size of a row. How many rows there are is left to the operator.
fn clear_row_counts(output: &mut PartitionOutput, kind: TapKind) {
    let keep = match kind {
        TapKind::Attention => 1,
        _ => output.shape.len().saturating_sub(1),
    };
    if output.to == OutputUse::Boundary {
        let rows = output.shape.iter_mut().enumerate().filter(|(axis, _)| *axis != keep);
        rows.for_each(|(_, dim)| *dim = Dim::Unknown);
    }
}
