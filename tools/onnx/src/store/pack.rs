//! Copies the weights that some models need into one file, and verifies every range by hash. Sources may be virtual files,
//! such as weights that are quantized while they are copied.
//!
//! The layout depends on the models only, so an interrupted pack resumes: ranges of the `.partial` file whose hash
//! equals that of their source are kept. The file gets its name when every range is correct.

use super::layout::{Layout, refer};
use super::source::{FileIndex, RangeReadError, index_files};
use crate::hash;
use crate::proto::{ModelProto, TensorProto};
use crate::quantize::NotFiniteError;
use crate::tensor::{self, TensorError};
use crate::virtual_file::{VirtualFile, VirtualFileReader, VirtualFiles};
use crate::walk;
use crate::weights::{FileRange, WeightError, WeightFile, Weights, file_range};
use crate::write::{WriteError, partial_of};
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

/// Bytes of a virtual file that are copied at once.
const COPY_BUFFER: usize = 1 << 20;

/// The reason why weights could not be packed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum PackError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Read(RangeReadError),
    #[error(transparent)]
    NotFinite(#[from] NotFiniteError),
    #[error("{path} differs at offset {offset} from what was just copied there: the disk or its driver is faulty")]
    Corrupt { path: PathBuf, offset: u64 },
}

/// Statistics of a pack.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PackStats {
    /// Length of the packed file in bytes.
    pub bytes: u64,
    /// Bytes copied by this run.
    pub copied: u64,
    /// Bytes kept from an earlier, interrupted run.
    pub resumed: u64,
}

/// Progress of a pack.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PackProgress {
    /// Verified bytes.
    pub done: u64,
    /// Total bytes.
    pub total: u64,
}

/// A range to copy, and its offset in the packed file.
struct RangeCopy {
    from: FileRange,
    to: u64,
}

/// Packs the external weights of `models` into `dir/location`, and updates their references.
///
/// `weights` resolves the locations of the models. Locations in `virtual_files` are read from there. The models change only after the file is
/// complete.
pub fn pack(
    models: &mut [ModelProto],
    weights: &Weights,
    virtual_files: &VirtualFiles,
    dir: &Path,
    location: &str,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<PackStats, PackError> {
    let mut layout = Layout::default();
    let files = index_files(weights);
    let copies = plan(models, &files, &mut layout)?;
    let path = dir.join(location);
    let sources = SourceFiles { files: &weights.files, virtual_files, open: None };
    let stats = write(&copies, sources, &path, layout.end(), progress)?;
    relink(models, &files, location, &copies)?;
    Ok(stats)
}

/// Same as [`pack`], but returns the contents of the file instead of writing it. Source files may be virtual as well.
pub fn pack_virtually(
    models: &mut [ModelProto],
    weights: &Weights,
    virtual_files: &VirtualFiles,
    location: &str,
) -> Result<VirtualFile, PackError> {
    let files = index_files(weights);
    let copies = plan(models, &files, &mut Layout::default())?;
    let mut contents = VirtualFile::default();
    for RangeCopy { from: FileRange { file, offset, length }, to } in &copies {
        let file = &weights.files[*file];
        match virtual_files.get(&file.location) {
            Some(source) => contents.put_part(*to, source, *offset, *length),
            None => contents.put_file(*to, &file.path, *offset, *length),
        }
    }
    relink(models, &files, location, &copies)?;
    Ok(contents)
}

/// The ranges to copy, each once, in the order of the models.
fn plan(models: &[ModelProto], files: &FileIndex, layout: &mut Layout) -> Result<Vec<RangeCopy>, PackError> {
    let mut seen = HashMap::new();
    let mut copies = vec![];
    for model in models {
        walk::tensors(model, &mut |tensor| {
            if let Some(from) = external(tensor, files)? {
                seen.entry(from).or_insert_with(|| copies.push(RangeCopy { from, to: layout.place(from.length) }));
            }
            Ok::<(), PackError>(())
        })?;
    }
    Ok(copies)
}

fn external(tensor: &TensorProto, files: &FileIndex) -> Result<Option<FileRange>, PackError> {
    let external = tensor::is_external(tensor).map_err(WeightError::from)?;
    Ok(if external { Some(file_range(tensor, files)?) } else { None })
}

fn write(
    copies: &[RangeCopy],
    mut sources: SourceFiles,
    path: &Path,
    length: u64,
    progress: &mut dyn FnMut(PackProgress),
) -> Result<PackStats, PackError> {
    let partial = partial_of(path);
    let failed = |source| PackError::Write(WriteError::new(path, source));
    let mut target = Target::open(path, &partial, length).map_err(failed)?;
    let total = copies.iter().map(|copy| copy.from.length).sum();
    let mut stats = PackStats { bytes: length, ..PackStats::default() };
    for RangeCopy { from, to } in copies {
        let resumed = target.ensure_range(&mut sources, *from, *to)?;
        *(if resumed { &mut stats.resumed } else { &mut stats.copied }) += from.length;
        progress(PackProgress { done: stats.resumed + stats.copied, total });
    }
    target.file.sync_all().map_err(failed)?;
    fs::rename(&partial, path).map_err(failed)?;
    Ok(stats)
}

/// The source files. Only the one used last stays open, because there may be thousands.
struct SourceFiles<'a> {
    files: &'a [WeightFile],
    virtual_files: &'a VirtualFiles,
    open: Option<(usize, SourceFile<'a>)>,
}

/// A source file being read.
enum SourceFile<'a> {
    Real(File),
    Virtual(VirtualFileReader<'a>),
}

impl<'a> SourceFiles<'a> {
    fn file(&mut self, range: FileRange) -> Result<&mut SourceFile<'a>, PackError> {
        let from = &self.files[range.file];
        let file = match self.open.take() {
            Some((index, file)) if index == range.file => file,
            _ => match self.virtual_files.get(&from.location) {
                Some(file) => SourceFile::Virtual(file.reader()),
                None => SourceFile::Real(File::open(&from.path).map_err(|source| read_error(from, range, source))?),
            },
        };
        Ok(&mut self.open.insert((range.file, file)).1)
    }

    fn hash(&mut self, range: FileRange) -> Result<blake3::Hash, PackError> {
        let files = self.files;
        let bytes = range.offset..range.offset + range.length;
        let hash = match self.file(range)? {
            SourceFile::Real(file) => hash::range_of(file, bytes.clone()),
            SourceFile::Virtual(file) => hash::range_of(file, bytes.clone()),
        };
        hash.map_err(|source| read_error(&files[range.file], range, source))
    }
}

fn read_error(file: &WeightFile, range: FileRange, source: io::Error) -> PackError {
    let error = RangeReadError::new(file, range, source);
    error.not_finite().map_or(PackError::Read(error), PackError::NotFinite)
}

/// The file being written.
struct Target<'a> {
    path: &'a Path,
    file: File,
    /// Bytes that an interrupted run left.
    found: u64,
}

impl<'a> Target<'a> {
    fn open(path: &'a Path, partial: &Path, length: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).create(true).truncate(false).open(partial)?;
        let found = file.metadata()?.len();
        file.set_len(length)?;
        Ok(Target { path, file, found })
    }

    /// Copies the range unless its hash is already correct. Returns whether it was.
    fn ensure_range(&mut self, sources: &mut SourceFiles, from: FileRange, to: u64) -> Result<bool, PackError> {
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

    fn hash(&mut self, from: FileRange, to: u64) -> Result<blake3::Hash, PackError> {
        let hash = hash::range_of(&mut self.file, to..to + from.length);
        hash.map_err(|source| PackError::Write(WriteError::new(self.path, source)))
    }

    /// Copies a range. From a real file, the kernel copies, which shares blocks if the file system supports it.
    fn copy(&mut self, sources: &mut SourceFiles, from: FileRange, to: u64) -> Result<(), PackError> {
        let start = SeekFrom::Start(from.offset);
        let mut copy = || {
            self.file.seek(SeekFrom::Start(to))?;
            match sources.file(from)? {
                SourceFile::Real(file) => {
                    file.seek(start)?;
                    Ok(io::copy(&mut (&*file).take(from.length), &mut self.file)?)
                }
                SourceFile::Virtual(file) => {
                    file.seek(start)?;
                    let mut file = BufReader::with_capacity(COPY_BUFFER, file.take(from.length));
                    Ok(io::copy(&mut file, &mut self.file)?)
                }
            }
        };
        match copy() {
            Ok(n) if n == from.length => Ok(()),
            Ok(_) => Err(PackError::Read(RangeReadError::short(&sources.files[from.file], from))),
            Err(CopyError::Pack(error)) => Err(error),
            Err(CopyError::Io(error)) => Err(PackError::Write(WriteError::new(self.path, error))),
        }
    }
}

/// Why a range was not copied.
enum CopyError {
    Pack(PackError),
    Io(io::Error),
}

impl From<PackError> for CopyError {
    fn from(error: PackError) -> Self {
        CopyError::Pack(error)
    }
}

impl From<io::Error> for CopyError {
    fn from(error: io::Error) -> Self {
        CopyError::Io(error)
    }
}

fn relink(models: &mut [ModelProto], files: &FileIndex, location: &str, copies: &[RangeCopy]) -> Result<(), PackError> {
    let offsets: HashMap<FileRange, u64> = copies.iter().map(|copy| (copy.from, copy.to)).collect();
    for model in models {
        let mut visit = |tensor: &mut TensorProto| {
            let found = external(tensor, files)?;
            if let Some((to, length)) = found.and_then(|from| Some((*offsets.get(&from)?, from.length))) {
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
