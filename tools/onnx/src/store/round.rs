//! Writes the weights of a model to one file and rounds some of them to fewer bits. This simulates quantization without
//! changing element types.
//!
//! Rounding is symmetric with one scale per group of neighbours along an axis: `scale = max |w| / (2^(bits-1) - 1)`,
//! `w' = round(w / scale) * scale`. Reads one group of rows at a time.

mod slabs;

use super::layout::{Layout, refer};
use super::source::{FileIndex, RangeReadError, index_files};
use crate::proto::{ModelProto, TensorProto};
use crate::tensor::{self, TensorError};
use crate::walk;
use crate::weights::{FileRange, WeightError, WeightFile, Weights, file_range};
use crate::write::{WriteError, partial_of};
use slabs::Slabs;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// How weights are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounding {
    /// Bits of a rounded number, 2 to 16.
    pub bits: u32,
    /// Number of neighbours along the axis that share a scale.
    pub group: usize,
}

/// The reason why weights could not be rounded.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum RoundError {
    #[error(transparent)]
    Weight(#[from] WeightError),
    #[error(transparent)]
    Write(#[from] WriteError),
    #[error(transparent)]
    Read(#[from] RangeReadError),
    #[error("weight {name:?} cannot be rounded: {why}")]
    Unsuitable { name: String, why: String },
    #[error("numbers cannot be rounded to {0} bits: 2 to 16 are possible")]
    Bits(u32),
    #[error("a group of numbers that share a scale must have at least one number")]
    Group,
}

impl From<TensorError> for RoundError {
    fn from(error: TensorError) -> Self {
        RoundError::Weight(error.into())
    }
}

/// Copies every external weight of `model` to `dir/location`, and updates the references. `axes` names the weights to
/// round and the axis of their groups. Embedded weights are rounded in place.
///
/// `weights` resolves the locations of the model. The file gets its name when it is complete; the model changes only
/// then.
pub fn round(
    model: &mut ModelProto,
    weights: &Weights,
    axes: &BTreeMap<String, usize>,
    rounding: Rounding,
    dir: &Path,
    location: &str,
) -> Result<(), RoundError> {
    if !(2..=16).contains(&rounding.bits) {
        return Err(RoundError::Bits(rounding.bits));
    }
    if rounding.group == 0 {
        return Err(RoundError::Group);
    }
    let path = dir.join(location);
    let mut writer = Writer { weights, axes, rounding, path: &path, layout: Layout::default(), moved: HashMap::new() };
    let done = writer.write(model).and_then(|file| {
        let mut changed = model.clone();
        relink(&mut changed, &writer, location)?;
        let failed = |source| RoundError::Write(WriteError::new(&path, source));
        file.sync_all().and_then(|()| fs::rename(partial_of(&path), &path)).map_err(failed)?;
        Ok(changed)
    });
    match done {
        Ok(changed) => *model = changed,
        Err(error) => {
            let _ = fs::remove_file(partial_of(&path));
            return Err(error);
        }
    }
    Ok(())
}

/// A source range, and the axis along which it is rounded. Two names may share a range and differ in the axis.
type RoundedRange = (FileRange, Option<usize>);

struct Writer<'a> {
    weights: &'a Weights,
    axes: &'a BTreeMap<String, usize>,
    rounding: Rounding,
    path: &'a Path,
    layout: Layout,
    moved: HashMap<RoundedRange, u64>,
}

impl Writer<'_> {
    fn write(&mut self, model: &ModelProto) -> Result<File, RoundError> {
        let failed = |source| RoundError::Write(WriteError::new(self.path, source));
        let mut out = BufWriter::with_capacity(1 << 20, File::create(partial_of(self.path)).map_err(failed)?);
        let files = index_files(self.weights);
        walk::tensors(model, &mut |tensor| {
            if tensor::is_external(tensor)? { self.copy(tensor, &files, &mut out) } else { Ok(()) }
        })?;
        let file =
            out.into_inner().map_err(|error| RoundError::Write(WriteError::new(self.path, error.into_error())))?;
        file.set_len(self.layout.end()).map_err(|source| RoundError::Write(WriteError::new(self.path, source)))?;
        Ok(file)
    }

    fn copy(&mut self, tensor: &TensorProto, files: &FileIndex, out: &mut BufWriter<File>) -> Result<(), RoundError> {
        let range = file_range(tensor, files)?;
        let axis = self.axes.get(tensor.name()).copied();
        if self.moved.contains_key(&(range, axis)) {
            return Ok(());
        }
        let offset = self.layout.place(range.length);
        self.moved.insert((range, axis), offset);
        let failed = |source| RoundError::Write(WriteError::new(self.path, source));
        out.seek(SeekFrom::Start(offset)).map_err(failed)?;
        let mut source = WeightReader::open(&self.weights.files[range.file], range)?;
        match axis {
            Some(axis) => {
                let slabs = Slabs::of(tensor, axis, self.rounding)?;
                slabs.each(|bytes| source.fill(bytes), |bytes| out.write_all(bytes).map_err(failed))
            }
            None => source.copy(out).map_err(failed)?,
        }
    }
}

/// Reads a range of a weight file sequentially.
struct WeightReader<'a> {
    from: &'a WeightFile,
    range: FileRange,
    file: BufReader<File>,
}

impl<'a> WeightReader<'a> {
    fn open(from: &'a WeightFile, range: FileRange) -> Result<Self, RangeReadError> {
        let opened = File::open(&from.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(range.offset))?;
            Ok(BufReader::with_capacity(1 << 20, file))
        });
        let file = opened.map_err(|source| RangeReadError::new(from, range, source))?;
        Ok(WeightReader { from, range, file })
    }

    fn fill(&mut self, bytes: &mut [u8]) -> Result<(), RoundError> {
        Ok(self.file.read_exact(bytes).map_err(|source| RangeReadError::new(self.from, self.range, source))?)
    }

    /// Copies the range. The outer error is one of writing, the inner one of reading.
    fn copy(&mut self, out: &mut impl Write) -> io::Result<Result<(), RoundError>> {
        let copied = io::copy(&mut (&mut self.file).take(self.range.length), out)?;
        let short = || RangeReadError::short(self.from, self.range).into();
        Ok(if copied == self.range.length { Ok(()) } else { Err(short()) })
    }
}

fn relink(model: &mut ModelProto, writer: &Writer, location: &str) -> Result<(), RoundError> {
    let files = index_files(writer.weights);
    let mut relink = |tensor: &mut TensorProto| {
        let axis = writer.axes.get(tensor.name()).copied();
        if tensor::is_external(tensor)? {
            let range = file_range(tensor, &files)?;
            refer(tensor, location, writer.moved[&(range, axis)], range.length);
        } else if let Some(axis) = axis {
            let shape = tensor::shape_of(tensor)?;
            let slabs = Slabs::of(tensor, axis, writer.rounding)?;
            let rounded = tensor::embedded_bytes(tensor, &shape)?.map(|raw| slabs.all(&raw));
            *tensor = TensorProto {
                name: tensor.name.take(),
                dims: std::mem::take(&mut tensor.dims),
                data_type: tensor.data_type,
                raw_data: rounded.map(Into::into),
                ..TensorProto::default()
            };
        }
        Ok::<(), RoundError>(())
    };
    walk::tensors_mut(model, &mut relink)
}
