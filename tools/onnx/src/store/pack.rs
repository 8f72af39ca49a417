//! Copies exactly the weight bytes that some models need into one file, and verifies every range by hash.
//!
//! The layout depends on the models alone, so a killed pack resumes: ranges of the `.partial` file that already hash like
//! their source are kept. The file gets its name when every range is right.

use super::contents::{Contents, Made};
use super::layout::{Layout, refer};
use super::source::{Files, SourceError, files};
use crate::hash;
use crate::proto::{ModelProto, TensorProto};
use crate::tensor::{self, TensorError};
use crate::walk;
use crate::weights::{Span, WeightError, WeightFile, Weights, span_of};
use crate::write::{WriteError, partial_of};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Why weights could not be packed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PackError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Read(#[from] SourceError),
    #[error("{path} does not hold at offset {offset} what was just copied there: the disk or its driver is at fault")]
    Corrupt { path: PathBuf, offset: u64 },
}

/// What packing did.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Packed {
    /// Length of the packed file.
    pub bytes: u64,
    /// Bytes copied now.
    pub copied: u64,
    /// Bytes an earlier, interrupted pack had copied already.
    pub resumed: u64,
}

/// How far a pack is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackProgress {
    /// Bytes in place and verified.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// A range to copy and where it goes.
struct Move {
    from: Span,
    to: u64,
}

/// Packs the external weights of `models` into `dir/location` and makes the models refer to it.
///
/// `weights` says where the models' locations lie. The models change only when everything is written.
pub fn pack(
    models: &mut [ModelProto],
    weights: &Weights,
    dir: &Path,
    location: &str,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<Packed, PackError> {
    let mut layout = Layout::default();
    let files = files(weights);
    let moves = plan(models, &files, &mut layout)?;
    let path = dir.join(location);
    let packed = write(&moves, &weights.files, &path, layout.end(), progress)?;
    relink(models, &files, location, &moves)?;
    Ok(packed)
}

/// The same without writing: what the file holds. `made` are source files that are not written either.
pub fn packed(
    models: &mut [ModelProto],
    weights: &Weights,
    made: &Made,
    location: &str,
) -> Result<Contents, PackError> {
    let files = files(weights);
    let moves = plan(models, &files, &mut Layout::default())?;
    let mut contents = Contents::default();
    for Move { from: Span { file, offset, length }, to } in &moves {
        let file = &weights.files[*file];
        match made.get(&file.location) {
            Some(source) => contents.put_part(*to, source, *offset, *length),
            None => contents.put_file(*to, &file.path, *offset, *length),
        }
    }
    relink(models, &files, location, &moves)?;
    Ok(contents)
}

/// Each range once, in the order the models name them.
fn plan(models: &[ModelProto], files: &Files, layout: &mut Layout) -> Result<Vec<Move>, PackError> {
    let mut seen = HashMap::new();
    let mut moves = vec![];
    for model in models {
        walk::tensors(model, &mut |tensor| {
            if let Some(from) = external(tensor, files)? {
                seen.entry(from).or_insert_with(|| moves.push(Move { from, to: layout.place(from.length) }));
            }
            Ok::<(), PackError>(())
        })?;
    }
    Ok(moves)
}

fn external(tensor: &TensorProto, files: &Files) -> Result<Option<Span>, PackError> {
    let external = tensor::is_external(tensor).map_err(WeightError::from)?;
    Ok(if external { Some(span_of(tensor, files)?) } else { None })
}

fn write(
    moves: &[Move],
    files: &[WeightFile],
    path: &Path,
    length: u64,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<Packed, PackError> {
    let partial = partial_of(path);
    let failed = |source| PackError::Write(WriteError::new(path, source));
    let mut target = Target::open(path, &partial, length).map_err(failed)?;
    let total = moves.iter().map(|m| m.from.length).sum();
    let mut packed = Packed { bytes: length, ..Packed::default() };
    let mut sources = Sources { files, open: None };
    for Move { from, to } in moves {
        let resumed = target.bring(&mut sources, *from, *to)?;
        *(if resumed { &mut packed.resumed } else { &mut packed.copied }) += from.length;
        progress(PackProgress { done: packed.resumed + packed.copied, total });
    }
    target.file.sync_all().map_err(failed)?;
    fs::rename(&partial, path).map_err(failed)?;
    Ok(packed)
}

/// The last source file used stays open: there may be thousands.
struct Sources<'a> {
    files: &'a [WeightFile],
    open: Option<(usize, File)>,
}

impl Sources<'_> {
    fn file(&mut self, span: Span) -> Result<&mut File, PackError> {
        let from = &self.files[span.file];
        let file = match self.open.take() {
            Some((index, file)) if index == span.file => file,
            _ => File::open(&from.path).map_err(|source| SourceError::new(from, span, source))?,
        };
        Ok(&mut self.open.insert((span.file, file)).1)
    }

    fn hash(&mut self, span: Span) -> Result<blake3::Hash, PackError> {
        let files = self.files;
        let hash = hash::range_of(self.file(span)?, span.offset..span.offset + span.length);
        Ok(hash.map_err(|source| SourceError::new(&files[span.file], span, source))?)
    }
}

/// The file being written.
struct Target<'a> {
    path: &'a Path,
    file: File,
    /// How much of it an earlier pack left.
    found: u64,
}

impl<'a> Target<'a> {
    fn open(path: &'a Path, partial: &Path, length: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(partial)?;
        let found = file.metadata()?.len();
        file.set_len(length)?;
        Ok(Target { path, file, found })
    }

    /// Makes the range right; whether it was already.
    fn bring(&mut self, sources: &mut Sources, from: Span, to: u64) -> Result<bool, PackError> {
        let wanted = sources.hash(from)?;
        if to + from.length <= self.found && self.hash(from, to)? == wanted {
            return Ok(true);
        }
        self.copy(sources, from, to)?;
        match self.hash(from, to)? == wanted {
            true => Ok(false),
            false => Err(PackError::Corrupt { path: self.path.to_owned(), offset: to }),
        }
    }

    fn hash(&mut self, from: Span, to: u64) -> Result<blake3::Hash, PackError> {
        let hash = hash::range_of(&mut self.file, to..to + from.length);
        hash.map_err(|source| PackError::Write(WriteError::new(self.path, source)))
    }

    /// From file to file in the kernel, sharing blocks where the file system can.
    fn copy(&mut self, sources: &mut Sources, from: Span, to: u64) -> Result<(), PackError> {
        let source = sources.file(from)?;
        let copied = source.seek(SeekFrom::Start(from.offset)).and_then(|_| {
            self.file.seek(SeekFrom::Start(to))?;
            io::copy(&mut (&*source).take(from.length), &mut self.file)
        });
        match copied {
            Ok(n) if n == from.length => Ok(()),
            Ok(_) => Err(SourceError::short(&sources.files[from.file], from).into()),
            Err(error) => Err(PackError::Write(WriteError::new(self.path, error))),
        }
    }
}

fn relink(models: &mut [ModelProto], files: &Files, location: &str, moves: &[Move]) -> Result<(), PackError> {
    let places: HashMap<Span, u64> = moves.iter().map(|m| (m.from, m.to)).collect();
    for model in models {
        let mut visit = |tensor: &mut TensorProto| {
            let found = external(tensor, files)?;
            if let Some((to, length)) = found.and_then(|from| Some((*places.get(&from)?, from.length))) {
                refer(tensor, location, to, length);
            }
            Ok::<(), PackError>(())
        };
        walk::tensors_mut(model, &mut visit)?;
    }
    Ok(())
}

impl From<TensorError> for PackError {
    fn from(error: TensorError) -> Self {
        PackError::Weight(error.into())
    }
}
