//! Writes variants of a model with the weight matrices of one block rounded, to measure how much the logits change.
//!
//! A variant is a plan of up to three partitions: the blocks before, the rounded block, the blocks after. Only the weights of the
//! rounded block are written (with their element type); the others stay in the model's files.

mod matrices;

use crate::taps::plan_dir::{self, Draft, PartitionFile, PlanDirError, ReferencedModel};
use hpp_graph::PartitionGraph;
use hpp_model::Analysis;
use hpp_onnx::{RoundError, Rounding, round};
use matrices::Matrices;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::{fs, io};
use tempfile::TempDir;

/// Number of consecutive weights along the reduction axis that share a scale.
pub const GROUP: usize = 32;

/// The rounded block's weights.
const WEIGHTS_FILE: &str = "rounded.bin";

/// Why a variant could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SensitivityError {
    #[error(transparent)]
    Taps(#[from] crate::taps::TapError),
    #[error(transparent)]
    PlanDir(#[from] PlanDirError),
    #[error("cannot round the weights of {block}")]
    Round { block: String, source: Box<RoundError> },
    #[error("cannot make a directory in {}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

impl SensitivityError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            SensitivityError::Taps(error) => error.hint(),
            SensitivityError::PlanDir(error) => error.hint(),
            _ => None,
        }
    }
}

/// A model and the directory its variants are written to.
pub struct Variants<'a> {
    analysis: &'a Analysis,
    weights: ReferencedModel,
    dir: PathBuf,
    reference: PathBuf,
}

/// A block, rounded or not.
#[derive(Debug)]
pub enum Rounded {
    /// The variant.
    Plan(VariantDir),
    /// The block cannot be rounded, for this reason.
    Refused(String),
}

/// A variant's files; dropping it removes them.
#[derive(Debug)]
pub struct VariantDir {
    _dir: TempDir,
    plan: PathBuf,
}

impl VariantDir {
    /// Its plan.
    pub fn plan(&self) -> &Path {
        &self.plan
    }
}

impl<'a> Variants<'a> {
    /// Writes the plan of the unchanged model into the empty directory `dir`. Refuses models that cannot run a corpus.
    pub fn begin(analysis: &'a Analysis, dir: &Path) -> Result<Self, SensitivityError> {
        crate::taps::check(analysis)?;
        let weights = ReferencedModel::reach(&analysis.model, dir)?;
        let place = dir.join("reference");
        fs::create_dir_all(&place).map_err(|source| SensitivityError::Io { path: place.clone(), source })?;
        let blocks = 0..analysis.segmentation.blocks.len();
        let draft = Draft::new(analysis, &[blocks], |_| {})?;
        let protos = draft.protos(analysis, &weights.model)?;
        let file = PartitionFile { proto: &protos[0], weights: &weights.dir };
        let reference = plan_dir::write(&place, analysis, draft.plan, &[file])?;
        Ok(Variants { analysis, weights, dir: dir.to_owned(), reference })
    }

    /// The plan of the unchanged model.
    pub fn reference(&self) -> &Path {
        &self.reference
    }

    /// Labels of the blocks, in execution order.
    pub fn blocks(&self) -> Vec<&str> {
        self.analysis.segmentation.blocks.iter().map(|block| block.label.as_str()).collect()
    }

    /// The model with one block's matrices rounded to `bits` in groups of [`GROUP`] with one scale each.
    pub fn round(&self, block: usize, bits: u32) -> Result<Rounded, SensitivityError> {
        let found = &self.analysis.segmentation.blocks[block];
        let matrices = Matrices::of(&self.analysis.graph, &found.nodes);
        if let Some(why) = matrices.refusal() {
            return Ok(Rounded::Refused(why));
        }
        let failed = |source| SensitivityError::Io { path: self.dir.clone(), source };
        let dir = tempfile::Builder::new().prefix("variant-").tempdir_in(&self.dir).map_err(failed)?;
        let plan = self.write(block, bits, &matrices.floats, dir.path())?;
        Ok(Rounded::Plan(VariantDir { _dir: dir, plan }))
    }

    fn write(
        &self,
        block: usize,
        bits: u32,
        axes: &BTreeMap<String, usize>,
        dir: &Path,
    ) -> Result<PathBuf, SensitivityError> {
        let draft = self.cut_around(block)?;
        let mut protos = draft.protos(self.analysis, &self.weights.model)?;
        let rounded = draft.parts.iter().position(|part| part.blocks.contains(&block)).unwrap_or_default();
        let label = &self.analysis.segmentation.blocks[block].label;
        let rounding = Rounding { bits, group: GROUP };
        round(&mut protos[rounded], self.weights.model.weights(), axes, rounding, dir, WEIGHTS_FILE)
            .map_err(|source| SensitivityError::Round { block: label.clone(), source: Box::new(source) })?;
        let dir = fs::canonicalize(dir).map_err(|source| SensitivityError::Io { path: dir.to_owned(), source })?;
        let weights = |index| if index == rounded { dir.as_path() } else { self.weights.dir.as_path() };
        let files: Vec<PartitionFile> =
            protos.iter().enumerate().map(|(index, proto)| PartitionFile { proto, weights: weights(index) }).collect();
        Ok(plan_dir::write(&dir, self.analysis, draft.plan, &files)?)
    }

    /// Cuts the block out, together with a neighbour if one reads a state of the other.
    fn cut_around(&self, block: usize) -> Result<Draft, PlanDirError> {
        let count = self.analysis.segmentation.blocks.len();
        let ranges = [0..block, block..block + 1, block + 1..count];
        let mut groups: Vec<Range<usize>> = ranges.into_iter().filter(|range| !range.is_empty()).collect();
        loop {
            let draft = Draft::new(self.analysis, &groups, |_| {})?;
            let foreign = |part: &PartitionGraph| !part.foreign_states(&self.analysis.segmentation).is_empty();
            match draft.parts.iter().position(foreign) {
                Some(index) if index + 1 < groups.len() => {
                    groups[index + 1].start = groups[index].start;
                    groups.remove(index);
                }
                _ => return Ok(draft),
            }
        }
    }
}
