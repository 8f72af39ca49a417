//! A model in hand: the flattened protobuf over its mapped file, where its weights lie, and what reading did to it.

use crate::flatten::BranchChoice;
use crate::proto::{GraphProto, ModelProto};
use crate::weights::{Weights, directory_of};
use bytes::Bytes;
use std::fmt;
use std::path::{Path, PathBuf};

/// A model that was read, checked and flattened. Weights are not in memory.
#[derive(Clone, Debug)]
pub struct Model {
    pub(crate) path: PathBuf,
    pub(crate) file: Bytes,
    pub(crate) proto: ModelProto,
    pub(crate) weights: Weights,
    pub(crate) notes: Vec<Note>,
}

/// Something reading changed, for people to know.
#[derive(Clone, Debug, PartialEq)]
pub enum Note {
    /// Nodes were not in an order in which they could run; they were sorted.
    Sorted,
    /// Functions of the model's own were inlined.
    InlinedFunctions {
        /// Different functions.
        functions: usize,
        /// Calls.
        calls: usize,
    },
    /// A function could not be inlined, for it uses another operator set version; it is carried along.
    KeptFunction {
        /// Domain and name.
        function: String,
    },
    /// Large `Constant` nodes became weights.
    LiftedConstants {
        /// How many.
        constants: usize,
    },
    /// A merged decoder: one of two branches was taken.
    Branch(BranchChoice),
}

impl Model {
    /// The ONNX file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory that external locations are relative to.
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

    /// Where the weights lie.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// The branch of a merged decoder that became the graph, if this is one.
    pub fn branch(&self) -> Option<&BranchChoice> {
        self.notes.iter().find_map(|note| match note {
            Note::Branch(choice) => Some(choice),
            _ => None,
        })
    }

    /// What reading changed.
    pub fn notes(&self) -> &[Note] {
        &self.notes
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Note::InlinedFunctions { functions, calls } => {
                write!(f, "inlined {calls} calls of {functions} functions the model defines")
            }
            Note::KeptFunction { function } => {
                write!(f, "kept the function {function}: it uses another operator set version than the model")
            }
            Note::LiftedConstants { constants } => write!(f, "made weights of {constants} large Constant nodes"),
            Note::Branch(choice) => choice.fmt(f),
            Note::Sorted => f.write_str("nodes were not in a topological order; sorted them"),
        }
    }
}
