//! Locates the bytes of each weight. Treats every external location as hostile.
//!
//! Invariants: a location stays inside the model's directory (or the real directory of a symlinked model), a range ends
//! inside its file, and a length matches type and dimensions. Each file is checked once for all weights in it, and is
//! not read.

use crate::proto::{ModelProto, TensorProto};
use crate::read::formats::is_lfs_pointer;
use crate::tensor::{self, TensorError, TensorProblem, TensorShape};
use crate::walk;
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};
use std::{fs, io};

/// Location of the quantized weights in a rewritten model. No file of this name is written: `pack` copies its contents
/// into another file.
pub const QUANTIZED_FILE: &str = "hpp.quantized.bin";

/// Location of the parts of weights in a model whose layers are divided by rows. No file of this name is written
/// either.
pub const ROWS_FILE: &str = "hpp.rows.bin";

/// Location of the weights of divided mixtures of experts. No file of this name is written either.
pub const EXPERTS_FILE: &str = "hpp.experts.bin";

/// Location of transposed weights, which have a row for each neuron. No file of this name is written either.
pub const NEURONS_FILE: &str = "hpp.neurons.bin";

/// A file that holds weights.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightFile {
    /// The location as the model writes it, relative to the model's directory.
    pub location: String,
    /// The real file, symbolic links resolved.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
}

/// A range of a weight file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileRange {
    /// Index into [`Weights::files`].
    pub file: usize,
    /// First byte.
    pub offset: u64,
    /// Number of bytes.
    pub length: u64,
}

/// The location of one initializer's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Storage {
    /// In the model file.
    Embedded,
    /// In a weight file.
    External(FileRange),
}

/// The weight files of a model, and the location of each initializer of its graph.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    /// Weight files, in the order in which the model first names them.
    pub files: Vec<WeightFile>,
    /// One location per initializer of the graph, in order.
    pub storage: Vec<Storage>,
}

/// The reason why a weight cannot be located.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum WeightError {
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error("cannot find the directory of the model {path}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("weight {name:?} is external but names no location")]
    NoLocation { name: String },
    #[error(
        "weight {name:?} has the location {location:?}, which {why}; weight files must be in or below the model's directory"
    )]
    Escapes { name: String, location: String, why: &'static str },
    #[error("weight {name:?} is in {path}, which is missing; copy that file to the model's directory")]
    Missing { name: String, path: PathBuf },
    #[error("weight {name:?} is in {path}, which is not a regular file")]
    NotAFile { name: String, path: PathBuf },
    #[error("cannot access {path}, which contains weight {name:?}")]
    Io { name: String, path: PathBuf, source: io::Error },
    #[error("weight {name:?} has {key} {value:?} in its external data, which is not a number of bytes")]
    NotANumber { name: String, key: String, value: String },
    #[error("weight {name:?} has the external data key {key:?}, which this build does not know")]
    UnknownKey { name: String, key: String },
    #[error("weight {name:?} declares {found} external bytes, but its type and dimensions require {wanted}")]
    WrongLength { name: String, found: u64, wanted: u64 },
    #[error("weight {name:?} is in {location:?}, which is not one of the model's weight files")]
    UnknownFile { name: String, location: String },
    #[error(
        "{path} has {found} bytes, but the weights in it take {expected}: weight {name:?} has {wanted} bytes at offset {offset}"
    )]
    PastTheEnd {
        name: String,
        path: PathBuf,
        offset: u64,
        wanted: u64,
        /// Bytes of the file.
        found: u64,
        /// Bytes up to the end of the last weight in the file.
        expected: u64,
    },
}

impl WeightError {
    /// A hint for the user.
    pub fn hint(&self) -> Option<String> {
        let WeightError::PastTheEnd { path, .. } = self else { return None };
        Some(match is_lfs_pointer(path) {
            true => format!("{} is a Git LFS pointer: git lfs install, then git lfs pull", path.display()),
            false => "the file was not copied or downloaded to its end, or belongs to another model: download or copy it again, \
                      or export the model again"
                .to_owned(),
        })
    }
}

/// The parsed `external_data` of a tensor.
pub(crate) struct ExternalLocation<'a> {
    /// The file, as the model writes it.
    pub location: &'a str,
    /// First byte.
    pub offset: u64,
    length: Option<u64>,
}

/// Locates and checks the bytes of every tensor of the model at `path`.
pub fn resolve(model: &ModelProto, path: &Path) -> Result<Weights, WeightError> {
    let mut resolver = Resolver::new(path)?;
    match resolver.storage_of_all(model) {
        Ok(storage) => Ok(Weights { files: resolver.files, storage }),
        Err(WeightError::PastTheEnd { name, path, offset, wanted, found, .. }) => {
            let expected = resolver.end_of_weights(model, &path);
            Err(WeightError::PastTheEnd { name, path, offset, wanted, found, expected })
        }
        Err(error) => Err(error),
    }
}

struct Resolver<'a> {
    dir: &'a Path,
    /// Real directories that may contain weights.
    roots: Vec<PathBuf>,
    files: Vec<WeightFile>,
    by_location: HashMap<String, usize>,
}

impl<'a> Resolver<'a> {
    fn new(model: &'a Path) -> Result<Self, WeightError> {
        let failed = |source| WeightError::Directory { path: model.to_owned(), source };
        let dir = directory_of(model);
        let mut roots = vec![dir.canonicalize().map_err(failed)?];
        let real = directory_of(&model.canonicalize().map_err(failed)?).to_owned();
        if !real.starts_with(&roots[0]) {
            roots.push(real);
        }
        Ok(Resolver { dir, roots, files: vec![], by_location: HashMap::new() })
    }

    /// One location per initializer of the graph. Checks all other tensors too.
    fn storage_of_all(&mut self, model: &ModelProto) -> Result<Vec<Storage>, WeightError> {
        let storage = match &model.graph {
            Some(graph) => graph.initializer.iter().map(|t| self.storage(t)).collect::<Result<Vec<_>, _>>()?,
            None => vec![],
        };
        let known = storage.len();
        let mut seen = 0;
        walk::tensors(model, &mut |tensor| {
            seen += 1;
            // The walk visits the graph's initializers first; they are already located.
            if seen > known { self.storage(tensor).map(drop) } else { Ok(()) }
        })?;
        Ok(storage)
    }

    /// The end of the last weight in a file, in bytes from the beginning of the file.
    fn end_of_weights(&self, model: &ModelProto, file: &Path) -> u64 {
        let mut end = 0;
        let _ = walk::tensors::<WeightError>(model, &mut |tensor| {
            if let Some(tensor_end) = self.end_in(tensor, file) {
                end = end.max(tensor_end);
            }
            Ok(())
        });
        end
    }

    /// The end of a tensor in this file. `None` if the tensor is in another file.
    fn end_in(&self, tensor: &TensorProto, file: &Path) -> Option<u64> {
        let external = tensor::is_external(tensor).ok()?.then(|| parse_external(tensor).ok())??;
        let is_here = self.by_location.get(external.location).is_some_and(|known| self.files[*known].path == file);
        let bytes = tensor::shape_of(tensor).ok()?.bytes.filter(|_| is_here)?;
        Some(external.offset.saturating_add(bytes))
    }

    fn storage(&mut self, tensor: &TensorProto) -> Result<Storage, WeightError> {
        let shape = tensor::shape_of(tensor)?;
        if !tensor::is_external(tensor)? {
            tensor::check_embedded(tensor, &shape)?;
            return Ok(Storage::Embedded);
        }
        let external = parse_external(tensor)?;
        let wanted = shape
            .bytes
            .ok_or_else(|| TensorError { name: tensor.name().to_owned(), problem: TensorProblem::ExternalStrings })?;
        let file = self.file(tensor.name(), external.location)?;
        self.range(tensor, &external, wanted, file).map(Storage::External)
    }

    fn range(
        &self,
        tensor: &TensorProto,
        external: &ExternalLocation,
        wanted: u64,
        file: usize,
    ) -> Result<FileRange, WeightError> {
        let name = || tensor.name().to_owned();
        if let Some(found) = external.length.filter(|length| *length != wanted) {
            return Err(WeightError::WrongLength { name: name(), found, wanted });
        }
        let WeightFile { path, bytes, .. } = &self.files[file];
        match external.offset.checked_add(wanted) {
            Some(end) if end <= *bytes => Ok(FileRange { file, offset: external.offset, length: wanted }),
            _ => Err(WeightError::PastTheEnd {
                name: name(),
                path: path.clone(),
                offset: external.offset,
                wanted,
                found: *bytes,
                // `resolve` sets it from all weights.
                expected: external.offset.saturating_add(wanted),
            }),
        }
    }

    fn file(&mut self, name: &str, location: &str) -> Result<usize, WeightError> {
        if let Some(known) = self.by_location.get(location) {
            return Ok(*known);
        }
        if let Some(why) = escapes(location) {
            return Err(WeightError::Escapes { name: name.into(), location: location.into(), why });
        }
        let file = self.check_file(name, location)?;
        self.files.push(file);
        self.by_location.insert(location.to_owned(), self.files.len() - 1);
        Ok(self.files.len() - 1)
    }

    fn check_file(&self, name: &str, location: &str) -> Result<WeightFile, WeightError> {
        let path = self.dir.join(location);
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => WeightError::Missing { name: name.into(), path: path.clone() },
            _ => WeightError::Io { name: name.into(), path: path.clone(), source },
        };
        let real = path.canonicalize().map_err(failed)?;
        if !self.roots.iter().any(|root| real.starts_with(root)) {
            let why = "leads outside through a symbolic link";
            return Err(WeightError::Escapes { name: name.into(), location: location.into(), why });
        }
        let metadata = fs::metadata(&real).map_err(failed)?;
        if !metadata.is_file() {
            return Err(WeightError::NotAFile { name: name.into(), path: real });
        }
        Ok(WeightFile { location: location.into(), path: real, bytes: metadata.len() })
    }
}

/// The range of an external tensor of a checked model. `files` maps locations to indices of [`Weights::files`].
pub fn file_range(tensor: &TensorProto, files: &HashMap<&str, usize>) -> Result<FileRange, WeightError> {
    let shape = tensor::shape_of(tensor)?;
    let external = parse_external(tensor)?;
    let unknown = || WeightError::UnknownFile { name: tensor.name().into(), location: external.location.into() };
    let file = files.get(external.location).copied().ok_or_else(unknown)?;
    Ok(FileRange { file, offset: external.offset, length: shape.bytes.unwrap_or_default() })
}

/// The directory to which the locations of a model are relative.
pub fn directory_of(model: &Path) -> &Path {
    match model.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// The reason why a location is refused without looking at the file system; `None` if it is acceptable.
fn escapes(location: &str) -> Option<&'static str> {
    let windows_drive = location.as_bytes().get(1) == Some(&b':');
    if location.is_empty() {
        Some("is empty")
    } else if location.contains('\0') {
        Some("contains a zero byte")
    } else if location.starts_with(['/', '\\']) || windows_drive || Path::new(location).is_absolute() {
        Some("is absolute")
    } else if location.split(['/', '\\']).any(|part| part == "..") {
        Some("contains \"..\"")
    } else if !Path::new(location).components().any(|c| matches!(c, Component::Normal(_))) {
        Some("names no file")
    } else {
        None
    }
}

/// Parses the `external_data` of a tensor.
pub(crate) fn parse_external(tensor: &TensorProto) -> Result<ExternalLocation<'_>, WeightError> {
    let name = || tensor.name().to_owned();
    let mut external = ExternalLocation { location: "", offset: 0, length: None };
    for entry in &tensor.external_data {
        let number = || {
            entry.value().parse::<u64>().map_err(|_| WeightError::NotANumber {
                name: name(),
                key: entry.key().into(),
                value: entry.value().into(),
            })
        };
        match entry.key() {
            "location" => external.location = entry.value(),
            "offset" => external.offset = number()?,
            "length" => external.length = Some(number()?),
            "checksum" => {}
            // ONNX Runtime writes these for prepacked copies of a weight in the same file.
            key if key.starts_with("prepacked_") => {}
            key => return Err(WeightError::UnknownKey { name: name(), key: key.into() }),
        }
    }
    if external.location.is_empty() {
        return Err(WeightError::NoLocation { name: name() });
    }
    Ok(external)
}

/// Stored bytes of an initializer. Strings count the bytes of their contents.
pub fn stored_bytes(tensor: &TensorProto, shape: &TensorShape) -> u64 {
    shape.bytes.unwrap_or_else(|| tensor.string_data.iter().map(|s| s.len() as u64).sum())
}
