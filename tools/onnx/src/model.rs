//! A model that was read: the flattened protobuf over the mapped file, the location of each weight, and notes.

use crate::note::{BranchChoice, Note};
use crate::proto::{GraphProto, ModelProto};
use crate::weights::{Weights, directory_of};
use bytes::Bytes;
use std::path::{Path, PathBuf};

/// A checked and flattened model. Its weights stay in files.
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) path: PathBuf,
    pub(crate) file: Bytes,
    pub(crate) proto: ModelProto,
    pub(crate) weights: Weights,
    pub(crate) notes: Vec<Note>,
}

impl Model {
    /// The ONNX file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory to which external locations are relative.
    pub fn dir(&self) -> &Path {
        directory_of(&self.path)
    }

    /// The flattened model.
    pub fn proto(&self) -> &ModelProto {
        &self.proto
    }

    /// The flattened model's graph.
    pub fn graph_proto(&self) -> &GraphProto {
        self.proto.graph.as_ref().expect("a model without a graph is refused when it is read")
    }

    /// The locations of the weights.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The branch that became the graph, if the model is a merged decoder.
    pub fn branch(&self) -> Option<&BranchChoice> {
        self.notes.iter().find_map(|note| match note {
            Note::Branch(choice) => Some(choice),
            _ => None,
        })
    }

    /// The changes that reading made.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }
}
