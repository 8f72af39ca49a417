//! Reads a model: locate the file, map it, check the wire format, decode, flatten, sort, locate weights.

pub(crate) mod body;
pub(crate) mod formats;
pub(crate) mod graph;
mod locate;
mod map;
mod order;
mod small;
mod wire;

pub use graph::GraphError;
pub use locate::{LocateError, locate, passed_over};
pub use map::{map_file, position_in};
pub use order::{OrderError, sort};
pub use wire::{WireError, check_model};

use crate::flatten::{FunctionError, flatten};
use crate::model::Model;
use crate::names::default_domain;
use crate::note::Note;
use crate::proto::{ModelProto, Version};
use crate::weights::{self, WeightError};
use bytes::Bytes;
use hpp_graph::Graph;
use prost::Message;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

/// Newest IR version that this build reads.
pub const NEWEST_IR: i64 = Version::IrVersion as i64;

/// The reason why a model cannot be read.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ReadError {
    #[error(transparent)]
    Locate(#[from] LocateError),
    #[error("cannot open the model {path}")]
    Open { path: PathBuf, source: io::Error },
    #[error("the model {path} is empty")]
    Empty { path: PathBuf },
    #[error("cannot read {path} as an ONNX model")]
    Wire { path: PathBuf, source: WireError },
    #[error("cannot read {path} as an ONNX model")]
    Decode { path: PathBuf, source: prost::DecodeError },
    #[error("{path} holds no graph: it is not an ONNX model, or it is truncated")]
    NoGraph { path: PathBuf },
    #[error("{path} names no operator set: it is truncated, or older than ONNX 1.0")]
    NoOpset { path: PathBuf },
    #[error("{path} has no IR version or an impossible one ({found}): it is not an ONNX model, or it is damaged")]
    ImpossibleIr { path: PathBuf, found: i64 },
    #[error(
        "{path} is written in ONNX IR version {found}; this build reads up to {NEWEST_IR}. Update HPP, or export with an older onnx package"
    )]
    NewerIr { path: PathBuf, found: i64 },
    #[error("cannot use {path}")]
    Graph { path: PathBuf, source: GraphError },
    #[error("cannot inline the functions of {path}")]
    Function { path: PathBuf, source: FunctionError },
    #[error("cannot order the graph of {path}")]
    Order { path: PathBuf, source: OrderError },
    #[error("cannot find the weights of {path}")]
    Weight { path: PathBuf, source: WeightError },
}

impl ReadError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        match self {
            ReadError::Locate(error) => error.hint(),
            ReadError::Weight { source, .. } => source.hint(),
            _ => None,
        }
    }
}

impl Model {
    /// Reads a model from an ONNX file, or from a directory in the layout of an exporter. Weights stay in their files.
    pub fn open(path: &Path) -> Result<Model, ReadError> {
        Model::open_for(path, &|_, _| false)
    }

    /// Same as [`open`](Self::open), for a runtime that has these operators, by domain and name: functions of the model with their names are not
    /// inlined.
    pub fn open_for(path: &Path, has_operator: &dyn Fn(&str, &str) -> bool) -> Result<Model, ReadError> {
        let path = locate(path)?;
        let file = map_file(&path).map_err(|source| ReadError::Open { path: path.clone(), source })?;
        let mut proto = decode(&path, &file)?;
        let at = || path.clone();
        let mut notes =
            flatten(&mut proto, has_operator).map_err(|source| ReadError::Function { path: at(), source })?;
        if sort(proto.graph.get_or_insert_default()).map_err(|source| ReadError::Order { path: at(), source })? {
            notes.push(Note::Sorted);
        }
        let weights = weights::resolve(&proto, &path).map_err(|source| ReadError::Weight { path: at(), source })?;
        Ok(Model { path, file, proto, weights, notes })
    }

    /// The graph in arena form. Node ids are positions in the flattened model.
    pub fn graph(&self) -> Result<Graph, ReadError> {
        graph::build(self.graph_proto(), self.opsets(), &self.weights)
            .map_err(|source| ReadError::Graph { path: self.path.clone(), source })
    }

    fn opsets(&self) -> BTreeMap<String, i64> {
        let imports = self.proto.opset_import.iter();
        imports.map(|o| (default_domain(o.domain()).to_owned(), o.version())).collect()
    }
}

/// Checks and decodes the bytes of a model. Raw tensor data is borrowed from them.
fn decode(path: &Path, file: &Bytes) -> Result<ModelProto, ReadError> {
    let path = || path.to_owned();
    if file.is_empty() {
        return Err(ReadError::Empty { path: path() });
    }
    // A newer IR version explains unknown fields, so report it first.
    let checked = check_model(file);
    if let Some(found) = early_ir(file).filter(|found| *found > NEWEST_IR && *found < 1000) {
        return Err(ReadError::NewerIr { path: path(), found });
    }
    checked.map_err(|source| ReadError::Wire { path: path(), source })?;
    let proto = ModelProto::decode(file.clone()).map_err(|source| ReadError::Decode { path: path(), source })?;
    if proto.graph.is_none() {
        return Err(ReadError::NoGraph { path: path() });
    }
    match proto.ir_version() {
        found if found > NEWEST_IR => Err(ReadError::NewerIr { path: path(), found }),
        found if found < 1 => Err(ReadError::ImpossibleIr { path: path(), found }),
        _ if proto.opset_import.is_empty() => Err(ReadError::NoOpset { path: path() }),
        _ => Ok(proto),
    }
}

/// The IR version, read without decoding. Every serializer writes it as the first field.
fn early_ir(file: &[u8]) -> Option<i64> {
    match file {
        [0x08, low @ 0..0x80, ..] => Some(i64::from(*low)),
        [0x08, low, high @ 0..0x80, ..] => Some(i64::from(*low & 0x7f) | i64::from(*high) << 7),
        _ => None,
    }
}
