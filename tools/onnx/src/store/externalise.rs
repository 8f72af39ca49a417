//! Moves weights embedded in a model file into one weight file, range by range: nothing is loaded whole.

use super::contents::Contents;
use super::layout::{Layout, refer};
use crate::model::Model;
use crate::read::position_in;
use crate::tensor::{self, TensorError, TensorShape};
use crate::weights::{Span, Storage, WeightFile};
use crate::write::{WriteError, partial_of};
use std::borrow::Cow;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Weights below this stay in the model: they are small, and some are shapes ONNX Runtime wants to see while loading.
const MIN_BYTES: u64 = 1024;

/// Why weights could not be moved out.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExternaliseError {
    #[error(transparent)]
    Tensor(#[from] TensorError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error("cannot read weights from {path}")]
    Read { path: PathBuf, source: io::Error },
    #[error("cannot name the new weight file {location:?}: the model has weights in a file of that name")]
    NameTaken { location: String },
}

/// Whether a model has weights inside that [`externalise`] would move out.
pub fn needs_externalising(model: &Model) -> bool {
    moves(model).any(|moved| moved.is_some())
}

/// Writes the embedded weights of `model` to `dir/location` and gives the model that refers to them there.
///
/// The file appears under its name when it is complete. Weights that are external already stay where they are.
pub fn externalise(model: &Model, dir: &Path, location: &str) -> Result<Model, ExternaliseError> {
    refuse_taken(model, location)?;
    let path = dir.join(location);
    let spans = match write(model, &path) {
        Ok(spans) => spans,
        Err(error) => {
            let _ = fs::remove_file(partial_of(&path));
            return Err(error);
        }
    };
    Ok(relink(model, location, path, &spans))
}

/// The same without writing: the model, and what the file holds.
pub fn externalised(model: &Model, dir: &Path, location: &str) -> Result<(Model, Contents), ExternaliseError> {
    refuse_taken(model, location)?;
    let mut contents = Contents::default();
    let (spans, _) = lay_out(model, |offset, raw| {
        match position_in(&model.file, &raw) {
            Some(position) => contents.put_file(offset, &model.path, position, raw.len() as u64),
            None => contents.put_bytes(offset, raw.into_owned().into()),
        }
        Ok(())
    })?;
    Ok((relink(model, location, dir.join(location), &spans), contents))
}

fn refuse_taken(model: &Model, location: &str) -> Result<(), ExternaliseError> {
    match model.weights.files.iter().any(|file| file.location == location) {
        true => Err(ExternaliseError::NameTaken { location: location.to_owned() }),
        false => Ok(()),
    }
}

/// For each initializer its shape, if it moves.
fn moves(model: &Model) -> impl Iterator<Item = Option<TensorShape>> + '_ {
    let tensors = model.graph_proto().initializer.iter().zip(&model.weights.storage);
    tensors.map(|(tensor, storage)| {
        let shape = tensor::shape_of(tensor).ok().filter(|_| *storage == Storage::Embedded)?;
        shape.bytes.is_some_and(|bytes| bytes >= MIN_BYTES).then_some(shape)
    })
}

/// Writes the file; offset and length for each initializer that moved.
fn write(model: &Model, path: &Path) -> Result<Spans, ExternaliseError> {
    let failed = |source| ExternaliseError::Write(WriteError::new(path, source));
    let partial = partial_of(path);
    let mut source = Source::open(model)?;
    let mut file = File::create(&partial).map_err(failed)?;
    let (spans, end) = lay_out(model, |offset, raw| {
        file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        source.copy(&raw, &mut file).map_err(failed)
    })?;
    file.set_len(end).and_then(|()| file.sync_all()).map_err(failed)?;
    fs::rename(&partial, path).map_err(failed)?;
    Ok(spans)
}

/// Offset and length for each initializer that moves.
type Spans = Vec<Option<(u64, u64)>>;

/// Gives each initializer that moves its place, and its bytes to `put` there; the length of the file.
fn lay_out<'a>(
    model: &'a Model,
    mut put: impl FnMut(u64, Cow<'a, [u8]>) -> Result<(), ExternaliseError>,
) -> Result<(Spans, u64), ExternaliseError> {
    let mut layout = Layout::default();
    let mut spans = vec![];
    for (shape, tensor) in moves(model).zip(&model.graph_proto().initializer) {
        let raw = shape.map(|shape| tensor::embedded_bytes(tensor, &shape)).transpose()?.flatten();
        let span = raw.as_ref().map(|raw| (layout.place(raw.len() as u64), raw.len() as u64));
        if let (Some(raw), Some((offset, _))) = (raw, span) {
            put(offset, raw)?;
        }
        spans.push(span);
    }
    Ok((spans, layout.end()))
}

/// The model file, to copy ranges of it without touching its mapped pages.
struct Source<'a> {
    model: &'a Model,
    file: File,
}

impl<'a> Source<'a> {
    fn open(model: &'a Model) -> Result<Self, ExternaliseError> {
        let failed = |source| ExternaliseError::Read { path: model.path.clone(), source };
        Ok(Source { model, file: File::open(&model.path).map_err(failed)? })
    }

    /// From file to file in the kernel where the bytes lie in the model file as such.
    fn copy(&mut self, raw: &[u8], to: &mut File) -> io::Result<()> {
        let Some(position) = position_in(&self.model.file, raw) else { return to.write_all(raw) };
        self.file.seek(SeekFrom::Start(position))?;
        let copied = io::copy(&mut (&self.file).take(raw.len() as u64), to)?;
        if copied == raw.len() as u64 { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

fn relink(model: &Model, location: &str, path: PathBuf, spans: &[Option<(u64, u64)>]) -> Model {
    let mut model = model.clone();
    let bytes = spans.iter().flatten().map(|(offset, length)| offset + length).max().unwrap_or_default();
    let index = model.weights.files.len();
    model.weights.files.push(WeightFile { location: location.to_owned(), path, bytes });
    let graph = model.proto.graph.get_or_insert_default();
    for ((tensor, storage), span) in graph.initializer.iter_mut().zip(&mut model.weights.storage).zip(spans) {
        if let Some((offset, length)) = *span {
            refer(tensor, location, offset, length);
            *storage = Storage::External(Span { file: index, offset, length });
        }
    }
    model
}
