//! Writes consecutive blocks as a partition that the child process can load, with inputs for it.

mod case;

pub use case::Repeats;

use hpp_graph::{PartitionGraph, cut, infer};
use hpp_model::{Analysis, host_kernels};
use hpp_onnx::{Extractor, LinkOutcome, Model, externalise, link, needs_externalising, write_model};
use hpp_schema::{Dim, HostKernels};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// File for weights that were embedded in the model file.
const WEIGHTS_FILE: &str = "weights.bin";

/// Why a piece cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum PieceError {
    #[error("cannot cut the model")]
    Cut(#[from] hpp_graph::CutError),
    #[error(transparent)]
    Extract(#[from] hpp_onnx::ExtractError),
    #[error("cannot provide the weights")]
    Externalise(#[from] hpp_onnx::ExternaliseError),
    #[error("cannot provide the weights")]
    Place(#[from] hpp_onnx::LinkError),
    #[error("{location} cannot be linked into {} ({why}), and the model has embedded weights too", dir.display())]
    NotLinkable { location: String, dir: PathBuf, why: String },
    #[error(transparent)]
    Write(#[from] hpp_onnx::WriteError),
}

impl PieceError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            PieceError::NotLinkable { .. } => Some("choose --out on the model's file system"),
            _ => None,
        }
    }
}

/// Makes pieces of one model.
pub struct Pieces<'a> {
    analysis: &'a Analysis,
    /// The model without large weights in its file.
    model: Model,
    model_kernels: HostKernels,
    dir: &'a Path,
    weights_dir: PathBuf,
    /// Known contents of small integer tensors (shapes, indices), by value.
    contents: Vec<Option<Vec<Dim>>>,
    /// Tokens that state buffers of fixed size hold: as many as the longest case needs.
    capacity: u64,
}

/// A partition on disk.
pub struct Piece {
    pub file: PathBuf,
    /// What its operators and the whole model's weights demand of CPU kernels.
    pub host_kernels: HostKernels,
    part: PartitionGraph,
}

impl<'a> Pieces<'a> {
    /// Writes weights that are embedded in the model file into `dir`, in a stream.
    pub fn open(analysis: &'a Analysis, dir: &'a Path, capacity: u64) -> Result<Self, PieceError> {
        let embedded = needs_externalising(&analysis.model);
        let model = if embedded { externalise(&analysis.model, dir, WEIGHTS_FILE)? } else { analysis.model.clone() };
        if embedded {
            for file in &analysis.model.weights().files {
                if let LinkOutcome::NotLinkable { why } = link(file, dir)? {
                    let location = file.location.clone();
                    return Err(PieceError::NotLinkable { location, dir: dir.to_owned(), why });
                }
            }
        }
        let weights_dir = if embedded { dir.to_owned() } else { absolute(analysis.model.dir()) };
        let contents = infer::contents(&analysis.graph);
        let model_kernels = host_kernels(model.proto());
        Ok(Pieces { analysis, model, model_kernels, dir, weights_dir, contents, capacity })
    }

    /// Writes consecutive blocks as a partition.
    pub fn piece(&self, blocks: Range<usize>) -> Result<Piece, PieceError> {
        let count = self.analysis.segmentation.blocks.len();
        let groups = [0..blocks.start, blocks.clone(), blocks.end..count];
        let groups: Vec<Range<usize>> = groups.into_iter().filter(|group| !group.is_empty()).collect();
        let parts = cut(&self.analysis.graph, &self.analysis.segmentation, &groups)?;
        let part = parts.into_iter().find(|part| part.blocks == blocks).unwrap_or_default();
        let name = format!("blocks_{}_{}", blocks.start, blocks.end - 1);
        let proto = Extractor::new(&self.model, &self.analysis.graph).part(&name, &part)?;
        let file = self.dir.join(format!("{name}.onnx"));
        write_model(&file, &proto)?;
        let packed = self.model_kernels.packed;
        Ok(Piece { file, host_kernels: HostKernels { packed, ..host_kernels(&proto) }, part })
    }

    pub fn weights_dir(&self) -> &Path {
        &self.weights_dir
    }
}

/// The absolute path, which is valid in the child too.
pub fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

#[cfg(test)]
mod tests;
