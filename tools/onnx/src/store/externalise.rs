//! Moves embedded weights from a model file to a weight file, range by range, without loading them.

use super::layout::{Layout, refer};
use crate::model::Model;
use crate::read::position_in;
use crate::tensor::{self, TensorError, TensorShape};
use crate::virtual_file::VirtualFile;
use crate::weights::{FileRange, Storage, WeightFile};
use crate::write::{WriteError, partial_of};
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Smaller weights stay in the model: some are shapes that ONNX Runtime reads while it loads.
const MIN_BYTES: u64 = 1024;

/// The reason why weights could not be moved.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExternaliseError {
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("cannot read weights from {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot create the weight file {location:?}: the model already has a weight file of that name")]
    NameTaken { location: String },
}

/// Whether a model has embedded weights that [`externalise`] would move.
pub fn needs_externalising(model: &Model) -> bool {
    moves(model).any(|moved| moved.is_some())
}

/// Writes the embedded weights of `model` to `dir/location`. Returns the model with references to them.
///
/// The file gets its name when it is complete. External weights are not touched.
pub fn externalise(model: &Model, dir: &Path, location: &str) -> Result<Model, ExternaliseError> {
    refuse_taken(model, location)?;
    let path = dir.join(location);
    let ranges = match write(model, &path) {
        Ok(ranges) => ranges,
        Err(error) => {
            let _ = fs::remove_file(partial_of(&path));
            return Err(error);
        }
    };
    Ok(relink(model, location, path, &ranges))
}

/// Same as [`externalise`], but returns the contents of the weight file instead of writing it.
pub fn externalise_virtually(
    model: &Model,
    dir: &Path,
    location: &str,
) -> Result<(Model, VirtualFile), ExternaliseError> {
    refuse_taken(model, location)?;
    let mut contents = VirtualFile::default();
    let (ranges, _) = lay_out(model, |offset, raw| {
        match position_in(&model.file, &raw) {
            Some(position) => contents.put_file(offset, &model.path, position, raw.len() as u64),
            None => contents.put_bytes(offset, raw.into_owned().into()),
        }
        Ok(())
    })?;
    Ok((relink(model, location, dir.join(location), &ranges), contents))
}

fn refuse_taken(model: &Model, location: &str) -> Result<(), ExternaliseError> {
    match model.weights.files.iter().any(|file| file.location == location) {
        true => Err(ExternaliseError::NameTaken { location: location.to_owned() }),
        false => Ok(()),
    }
}

/// For each initializer, its shape if it moves.
fn moves(model: &Model) -> impl Iterator<Item = Option<TensorShape>> + '_ {
    let tensors = model.graph_proto().initializer.iter().zip(&model.weights.storage);
    tensors.map(|(tensor, storage)| {
        let shape = tensor::shape_of(tensor).ok().filter(|_| *storage == Storage::Embedded)?;
        shape.bytes.is_some_and(|bytes| bytes >= MIN_BYTES).then_some(shape)
    })
}

/// Writes the file. Returns offset and length of each initializer that moved.
fn write(model: &Model, path: &Path) -> Result<Ranges, ExternaliseError> {
    let failed = |source| ExternaliseError::Write(WriteError::new(path, source));
    let partial = partial_of(path);
    let mut source = ModelFile::open(model)?;
    let mut file = File::create(&partial).map_err(failed)?;
    let (ranges, end) = lay_out(model, |offset, raw| {
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        source.copy(&raw, &mut file).map_err(failed)
    })?;
    file.set_len(end).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&partial, path).map_err(failed)?;
    Ok(ranges)
}

/// Offset and length of each initializer that moves.
type Ranges = Vec<Option<(u64, u64)>>;

/// Assigns an offset to each initializer that moves, and calls `put` with the offset and the bytes. Also returns the
/// length of the file.
fn lay_out<'a>(
    model: &'a Model,
    mut put: impl FnMut(u64, Cow<'a, [u8]>) -> Result<(), ExternaliseError>,
) -> Result<(Ranges, u64), ExternaliseError> {
    let mut layout = Layout::default();
    let mut ranges = vec![];
    for (shape, tensor) in moves(model).zip(&model.graph_proto().initializer) {
        let raw = shape.map(|shape| tensor::embedded_bytes(tensor, &shape)).transpose()?.flatten();
        let range = raw.as_ref().map(|raw| (layout.place(raw.len() as u64), raw.len() as u64));
        if let (Some(raw), Some((offset, _))) = (raw, range) {
            put(offset, raw)?;
        }
        ranges.push(range);
    }
    Ok((ranges, layout.end()))
}

/// The model file. Copies ranges without reading its mapped pages.
struct ModelFile<'a> {
    model: &'a Model,
    file: File,
}

impl<'a> ModelFile<'a> {
    fn open(model: &'a Model) -> Result<Self, ExternaliseError> {
        let failed = |source| ExternaliseError::Read { path: model.path.clone(), source };
        Ok(ModelFile { model, file: File::open(&model.path).map_err(failed)? })
    }

    /// Writes bytes to a file: by a copy in the kernel if they are a range of the model file.
    fn copy(&mut self, raw: &[u8], to: &mut File) -> io::Result<()> {
        let Some(position) = position_in(&self.model.file, raw) else { return to.write_all(raw) };
        self.file.seek(SeekFrom::Start(position))?;
        let copied = io::copy(&mut (&self.file).take(raw.len() as u64), to)?;
        if copied == raw.len() as u64 { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

fn relink(model: &Model, location: &str, path: PathBuf, ranges: &[Option<(u64, u64)>]) -> Model {
    let mut model = model.clone();
    let bytes = ranges.iter().flatten().map(|(offset, length)| offset + length).max().unwrap_or_default();
    let index = model.weights.files.len();
    model.weights.files.push(WeightFile { location: location.to_owned(), path, bytes });
    let graph = model.proto.graph.get_or_insert_default();
    for ((tensor, storage), range) in graph.initializer.iter_mut().zip(&mut model.weights.storage).zip(ranges) {
        if let Some((offset, length)) = *range {
            refer(tensor, location, offset, length);
            *storage = Storage::External(FileRange { file: index, offset, length });
        }
    }
    model
}
