//! Divides layers by rows, as `hpp_graph::divide_rows` decides: copies the nodes of these layers for each shard, gives each copy its part of the
//! weights, and adds the summands of the shards.
//!
//! Only the graph is rewritten. The parts of the weights are a virtual file: its bytes are gathered from the model's own weights when they are
//! copied.

mod interface;
mod rewrite;
#[cfg(test)]
mod tests;
mod weights;

use crate::model::Model;
use crate::tensor::TensorError;
use crate::virtual_file::{VirtualFile, VirtualFiles};
use crate::weights::ROWS_FILE;
use hpp_graph::{Graph, RowDivision, RowNode};

/// A model with layers that are divided by rows.
#[derive(Clone, Debug)]
pub struct RowSplit {
    /// The model. The parts of its weights are in [`ROWS_FILE`], which does not exist on disk.
    pub model: Model,
    /// The contents of that file.
    pub contents: VirtualFile,
    /// For each node of the model, in order, which node of the original it comes from.
    pub nodes: Vec<RowNode>,
}

/// The reason why a model cannot be rewritten.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RowSplitError {
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("the model has a weight file named {ROWS_FILE:?}, a name that dividing by rows uses itself")]
    FileTaken,
    #[error("the model has a value named {name:?}, a name that dividing by rows uses for a part of a state")]
    NameTaken { name: String },
    #[error("the weight {name:?} is sparse, so that no part of it can be copied")]
    Sparse { name: String },
    #[error(
        "the weight {name:?} has elements of less than a byte, or other sizes than expected, so that no part of it can be copied"
    )]
    Uneven { name: String },
}

/// Rewrites a model whose graph is `graph`. `virtual_files` are the contents of weight files that do not exist on disk.
pub fn split_rows(
    model: &Model,
    graph: &Graph,
    division: &RowDivision,
    virtual_files: &VirtualFiles,
) -> Result<RowSplit, RowSplitError> {
    if model.weights.files.iter().any(|file| file.location == ROWS_FILE) {
        return Err(RowSplitError::FileTaken);
    }
    rewrite::rewrite(model, graph, division, virtual_files)
}
