//! Quantizes a weight matrix window by window: reads slabs of it, transposes where needed, and rounds blocks on all cores.
//!
//! Memory is bounded by one window of results and two slabs of input. The bytes do not depend on the number of threads.

use super::block_quantizer::{Bits, BlockFormat, BlockScale, ScaleType, dequantize, quantize_block};
use super::compensate::{Factor, quantize_span};
use super::moments::WeightMoments;
use super::tile::{Tile, WIDTH};
use bytes::Bytes;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use hpp_schema::DType;
use rayon::prelude::*;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::PathBuf;

/// Maximum bytes of a slab. A single block of rows may be larger.
const SLAB_BYTES: usize = 16 << 20;
/// Columns that one task quantizes at a time.
const GROUP: usize = WIDTH;
/// Numbers that are converted together.
const AT_ONCE: usize = 64;

/// Where the bytes of a matrix are.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// In a file, from this offset on.
    File(PathBuf, u64),
    /// In memory. For small matrices that a model file stores as typed fields.
    Memory(Bytes),
}

/// A matrix of floats by which inputs are multiplied from the right: each of `columns` results is a sum over `depth` numbers.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub name: String,
    pub dtype: DType,
    pub place: Place,
    /// K.
    pub depth: usize,
    /// N.
    pub columns: usize,
    /// Whether the matrix is stored as `[columns, depth]`.
    pub transposed: bool,
}

/// A number of a weight is infinite or NaN, or too large for a scale.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error(
    "weight {name:?} cannot be quantized: the number at row {row}, column {column} (byte {offset} of the weight) is infinite, \
     NaN or too large for a scale"
)]
pub struct NotFiniteError {
    /// The weight.
    pub name: String,
    /// Row of the stored matrix, from 0.
    pub row: usize,
    /// Column of the stored matrix, from 0.
    pub column: usize,
    /// Byte offset in the weight.
    pub offset: u64,
}

/// The results of a range of columns, column by column.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Window {
    pub columns: Range<usize>,
    pub numbers: Vec<u8>,
    pub scales: Vec<u8>,
    /// Empty for symmetric formats.
    pub zero_points: Vec<u8>,
}

/// A matrix and its format.
#[derive(Clone, Debug)]
pub(super) struct Job {
    pub matrix: Matrix,
    pub format: BlockFormat,
    pub scales: ScaleType,
    /// Second moments of the inputs that the matrix multiplies. With them, errors are compensated ([`super::compensate`]).
    pub moments: Option<WeightMoments>,
}

impl Job {
    /// How many numbers of a column are rounded together: a block, or a span of inputs if errors are compensated.
    fn unit(&self) -> usize {
        self.moments.as_ref().map_or(self.format.block_size, WeightMoments::span)
    }

    /// Blocks of a column.
    pub fn blocks(&self) -> usize {
        self.matrix.depth.div_ceil(self.format.block_size)
    }

    /// Bytes of the numbers of a column.
    pub fn number_bytes(&self) -> usize {
        self.blocks() * self.format.block_bytes()
    }

    /// Bytes of the scales of a column.
    pub fn scale_bytes(&self) -> usize {
        self.blocks() * self.scales.bytes()
    }

    /// Bytes of the zero points of a column.
    pub fn zero_point_bytes(&self) -> usize {
        if self.format.asymmetric { (self.blocks() * self.format.bits.count()).div_ceil(8) } else { 0 }
    }

    /// Bytes of numbers, scales and zero points of all columns.
    pub fn bytes(&self) -> u64 {
        (self.matrix.columns * (self.number_bytes() + self.scale_bytes() + self.zero_point_bytes())) as u64
    }

    /// Quantizes a range of columns. If a number is not finite, the [`io::Error`] wraps a [`NotFiniteError`].
    pub fn window(&self, columns: Range<usize>) -> io::Result<Window> {
        let factors = self.moments.as_ref().map(|moments| moments.factors(self.matrix.depth)).transpose()?;
        let mut result = Results::new(self, &columns, factors.as_deref());
        let mut source = Source::open(&self.matrix)?;
        let slabs = self.slabs(&columns);
        let mut current = slabs.first().map(|slab| source.read(slab)).transpose()?;
        for (index, slab) in slabs.iter().enumerate() {
            let bytes = current.take().unwrap_or_default();
            let next = slabs.get(index + 1);
            // The next slab is read while this one is rounded.
            let (read, rounded) =
                rayon::join(|| next.map(|slab| source.read(slab)).transpose(), || result.round(slab, &bytes));
            rounded.map_err(|at| io::Error::other(self.matrix.not_finite(at)))?;
            current = read?;
        }
        Ok(result.into_window(columns))
    }

    /// For each format, the sum of the squared errors of quantizing in it. Its block size must divide the job's. The sums do not depend on the
    /// number of threads. Calls `measured` with the bytes of each part of the weight that is done.
    pub fn squared_errors(&self, formats: &[BlockFormat], measured: &mut dyn FnMut(u64)) -> io::Result<Vec<f64>> {
        let mut source = Source::open(&self.matrix)?;
        let mut sums = vec![0.0; formats.len()];
        for slab in self.slabs(&(0..self.matrix.columns)) {
            let bytes = source.read(&slab)?;
            let groups: Vec<usize> = (0..slab.columns.len()).step_by(GROUP).collect();
            let found: Vec<Result<Vec<f64>, Position>> = groups
                .into_par_iter()
                .map(|first| self.errors_of(&slab, &bytes, first..(first + GROUP).min(slab.columns.len()), formats))
                .collect();
            for group in found {
                let group = group.map_err(|at| io::Error::other(self.matrix.not_finite(at)))?;
                sums.iter_mut().zip(group).for_each(|(sum, error)| *sum += error);
            }
            measured(bytes.len() as u64);
        }
        Ok(sums)
    }

    /// The same for some columns of a slab, counted from the slab's first column.
    fn errors_of(
        &self,
        slab: &Slab,
        bytes: &[u8],
        columns: Range<usize>,
        formats: &[BlockFormat],
    ) -> Result<Vec<f64>, Position> {
        let mut sums = vec![0.0; formats.len()];
        let mut failed = None;
        let mut levels = vec![];
        let first = slab.columns.start + columns.start;
        self.each_unit(slab, bytes, columns, |column, start, block| {
            for (sum, format) in sums.iter_mut().zip(formats) {
                levels.resize(format.block_bytes(), 0);
                for (index, part) in block.chunks(format.block_size).enumerate() {
                    match quantize_block(part, *format, self.scales, &mut levels) {
                        Ok(scale) => *sum += squared_error(part, &levels, *format, scale),
                        Err(error) => {
                            let depth = start + index * format.block_size + error.position(part.len());
                            failed = failed.or(Some(Position { depth, column: first + column }));
                        }
                    }
                }
            }
        });
        failed.map_or(Ok(sums), Err)
    }

    /// The slabs of a range of columns, in the order in which they are stored.
    fn slabs(&self, columns: &Range<usize>) -> Vec<Slab> {
        let Matrix { depth, .. } = self.matrix;
        let width = element_bytes(self.matrix.dtype);
        let slab = |depth, columns| Slab { depth, columns };
        if self.matrix.transposed {
            let step = (SLAB_BYTES / (depth * width).max(1)).max(1);
            let starts = columns.clone().step_by(step);
            return starts.map(|start| slab(0..depth, start..(start + step).min(columns.end))).collect();
        }
        let unit = self.unit();
        let step = (SLAB_BYTES / (columns.len() * width * unit).max(1)).max(1) * unit;
        (0..depth).step_by(step).map(|start| slab(start..(start + step).min(depth), columns.clone())).collect()
    }
}

/// A part of a matrix that is read at once.
#[derive(Clone, Debug)]
struct Slab {
    depth: Range<usize>,
    columns: Range<usize>,
}

/// Position of a number in the matrix: depth and column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Position {
    depth: usize,
    column: usize,
}

impl Matrix {
    /// Bytes of its numbers.
    pub fn bytes(&self) -> u64 {
        (self.depth * self.columns * element_bytes(self.dtype)) as u64
    }

    /// Index of a number in the stored matrix.
    fn index(&self, at: Position) -> usize {
        if self.transposed { at.column * self.depth + at.depth } else { at.depth * self.columns + at.column }
    }

    fn not_finite(&self, at: Position) -> NotFiniteError {
        let (row, column) = if self.transposed { (at.column, at.depth) } else { (at.depth, at.column) };
        let offset = (self.index(at) * element_bytes(self.dtype)) as u64;
        NotFiniteError { name: self.name.clone(), row, column, offset }
    }
}

/// Reads slabs.
struct Source<'a> {
    matrix: &'a Matrix,
    file: Option<File>,
}

impl<'a> Source<'a> {
    fn open(matrix: &'a Matrix) -> io::Result<Self> {
        let file = match &matrix.place {
            Place::File(path, _) => Some(File::open(path)?),
            Place::Memory(_) => None,
        };
        Ok(Source { matrix, file })
    }

    /// The bytes of a slab, in the order in which they are stored.
    fn read(&mut self, slab: &Slab) -> io::Result<Vec<u8>> {
        let matrix = self.matrix;
        let width = element_bytes(matrix.dtype);
        let mut bytes = vec![0; slab.depth.len() * slab.columns.len() * width];
        let start = matrix.index(Position { depth: slab.depth.start, column: slab.columns.start }) * width;
        let is_contiguous = matrix.transposed || slab.columns.len() == matrix.columns;
        if is_contiguous {
            self.read_at(start, &mut bytes)?;
            return Ok(bytes);
        }
        let row = slab.columns.len() * width;
        for (index, part) in bytes.chunks_exact_mut(row).enumerate() {
            self.read_at(start + index * matrix.columns * width, part)?;
        }
        Ok(bytes)
    }

    fn read_at(&mut self, offset: usize, bytes: &mut [u8]) -> io::Result<()> {
        match (&self.matrix.place, &mut self.file) {
            (Place::File(_, begin), Some(file)) => {
                file.seek(SeekFrom::Start(begin + offset as u64))?;
                file.read_exact(bytes)
            }
            (Place::Memory(memory), _) => {
                let part = memory.get(offset..offset + bytes.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                bytes.copy_from_slice(part);
                Ok(())
            }
            (Place::File(..), None) => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

/// The results of a window that is being computed.
struct Results<'a> {
    job: &'a Job,
    /// One for each span of inputs, if errors are compensated.
    factors: Option<&'a [Factor]>,
    first_column: usize,
    numbers: Vec<u8>,
    scales: Vec<u8>,
    /// One byte for each block.
    zero_points: Vec<u8>,
}

/// The results of some neighbouring columns.
struct Group<'a> {
    job: &'a Job,
    factors: Option<&'a [Factor]>,
    numbers: &'a mut [u8],
    scales: &'a mut [u8],
    zero_points: &'a mut [u8],
}

impl<'a> Results<'a> {
    fn new(job: &'a Job, columns: &Range<usize>, factors: Option<&'a [Factor]>) -> Self {
        let (first_column, columns) = (columns.start, columns.len());
        Results {
            job,
            factors,
            first_column,
            numbers: vec![0; columns * job.number_bytes()],
            scales: vec![0; columns * job.scale_bytes()],
            zero_points: vec![0; columns * job.blocks()],
        }
    }

    /// Rounds a slab. If a number is not finite, returns the first such position in stored order.
    fn round(&mut self, slab: &Slab, bytes: &[u8]) -> Result<(), Position> {
        let (job, factors) = (self.job, self.factors);
        let before = slab.columns.start - self.first_column;
        let columns = |per_column: usize| before * per_column..(before + slab.columns.len()) * per_column;
        let (number, scale, zero) = (job.number_bytes(), job.scale_bytes(), job.blocks());
        let numbers = self.numbers[columns(number)].par_chunks_mut(GROUP * number);
        let scales = self.scales[columns(scale)].par_chunks_mut(GROUP * scale);
        let zero_points = self.zero_points[columns(zero)].par_chunks_mut(GROUP * zero);
        let failed =
            numbers.zip(scales).zip(zero_points).enumerate().filter_map(|(index, ((numbers, scales), zero_points))| {
                let mut group = Group { job, factors, numbers, scales, zero_points };
                group.round(slab, bytes, index * GROUP).err()
            });
        match failed.min_by_key(|at| job.matrix.index(*at)) {
            Some(at) => Err(at),
            None => Ok(()),
        }
    }

    fn into_window(self, columns: Range<usize>) -> Window {
        let zero_points = match (self.job.format.asymmetric, self.job.format.bits) {
            (false, _) => vec![],
            (true, Bits::Eight) => self.zero_points,
            (true, Bits::Four) => {
                let pairs = |column: &[u8]| column.chunks(2).map(|p| p[0] | p.get(1).unwrap_or(&0) << 4).collect();
                self.zero_points.chunks(self.job.blocks()).flat_map::<Vec<u8>, _>(pairs).collect()
            }
        };
        Window { columns, numbers: self.numbers, scales: self.scales, zero_points }
    }
}

impl Group<'_> {
    /// Rounds the columns of a slab from column `first` of the slab on.
    fn round(&mut self, slab: &Slab, bytes: &[u8], first: usize) -> Result<(), Position> {
        let is_simple = self.factors.is_none() && !self.job.matrix.transposed && !self.job.format.fits_scales();
        if is_simple && self.round_rows(slab, bytes, first) {
            return Ok(());
        }
        self.round_columns(slab, bytes, first)
    }

    /// Rounds the columns row by row. Returns `false` if a number or a scale is infinite or NaN; then the results are undefined.
    fn round_rows(&mut self, slab: &Slab, bytes: &[u8], first: usize) -> bool {
        let Group { job, numbers, scales: scale_bytes, zero_points, .. } = self;
        let Job { matrix, format, scales, .. } = job;
        let (columns, width) = (zero_points.len() / job.blocks(), element_bytes(matrix.dtype));
        let mut tile = Tile::new(columns);
        for start in slab.depth.clone().step_by(format.block_size) {
            let depth = start..(start + format.block_size).min(slab.depth.end);
            tile.fill(depth.len(), |row, values| {
                let at = ((depth.start - slab.depth.start + row) * slab.columns.len() + first) * width;
                to_floats(matrix.dtype, &bytes[at..at + columns * width], values);
            });
            let Some(found) = tile.scales(*format, *scales) else { return false };
            let block = start / format.block_size;
            for column in 0..columns {
                let (index, scale) = (column * job.blocks() + block, found.of(column));
                scales.write(scale.scale, &mut scale_bytes[index * scales.bytes()..][..scales.bytes()]);
                zero_points[index] = scale.zero_point;
            }
            let blocks = numbers.chunks_exact_mut(job.number_bytes());
            let blocks = blocks.map(|column| &mut column[block * format.block_bytes()..][..format.block_bytes()]);
            tile.quantize(&found, format.bits, blocks);
        }
        true
    }

    /// Rounds the columns one by one. Finds the first number that is not finite.
    fn round_columns(&mut self, slab: &Slab, bytes: &[u8], first: usize) -> Result<(), Position> {
        let Group { job, factors, numbers, scales: scale_bytes, zero_points } = self;
        let Job { matrix, format, scales, .. } = job;
        let columns = first..first + zero_points.len() / job.blocks();
        let mut failed: Option<Position> = None;
        job.each_unit(slab, bytes, columns, |column, start, values| {
            let index = column * job.blocks() + start / format.block_size;
            let blocks = values.len().div_ceil(format.block_size);
            let out = &mut numbers[index * format.block_bytes()..][..blocks * format.block_bytes()];
            let mut put = |block: usize, BlockScale { scale, zero_point }: BlockScale| {
                scales.write(scale, &mut scale_bytes[(index + block) * scales.bytes()..][..scales.bytes()]);
                zero_points[index + block] = zero_point;
            };
            let rounded = match factors {
                Some(factors) => quantize_span(values, &factors[start / job.unit()], *format, *scales, out, put),
                None => quantize_block(values, *format, *scales, out).map(|scale| put(0, scale)),
            };
            if let Err(error) = rounded {
                let depth = start + error.position(values.len());
                let found = Position { depth, column: slab.columns.start + first + column };
                let earlier = failed.filter(|failed| matrix.index(*failed) < matrix.index(found));
                failed = Some(earlier.unwrap_or(found));
            }
        });
        failed.map_or(Ok(()), Err)
    }
}

impl Job {
    /// Calls `use_unit` with each [unit](Job::unit) of some columns of a slab: the column's index in `columns`, the depth of the unit's first
    /// number, and the unit's numbers. `columns` are counted from the slab's first column.
    fn each_unit(
        &self,
        slab: &Slab,
        bytes: &[u8],
        columns: Range<usize>,
        mut use_unit: impl FnMut(usize, usize, &[f32]),
    ) {
        let unit = self.unit();
        let mut values = vec![0.0; columns.len() * unit];
        for start in slab.depth.clone().step_by(unit) {
            let depth = start..(start + unit).min(slab.depth.end);
            gather(&self.matrix, slab, bytes, &depth, columns.clone(), unit, &mut values);
            for column in 0..columns.len() {
                use_unit(column, start, &values[column * unit..][..depth.len()]);
            }
        }
    }
}

fn squared_error(values: &[f32], levels: &[u8], format: BlockFormat, scale: BlockScale) -> f64 {
    let level = |index: usize| match format.bits {
        Bits::Four => levels[index / 2] >> (4 * (index % 2)) & 15,
        Bits::Eight => levels[index],
    };
    let difference = |(index, value): (usize, &f32)| f64::from(dequantize(level(index), scale) - value);
    values.iter().enumerate().map(difference).map(|difference| difference * difference).sum()
}

/// Copies the range `depth` of each column to `values` as float32. Each column begins at a multiple of `unit`. `columns` are counted from the
/// slab's first column.
fn gather(
    matrix: &Matrix,
    slab: &Slab,
    bytes: &[u8],
    depth: &Range<usize>,
    columns: Range<usize>,
    unit: usize,
    values: &mut [f32],
) {
    let width = element_bytes(matrix.dtype);
    let skipped = depth.start - slab.depth.start;
    if matrix.transposed {
        for (column, values) in columns.zip(values.chunks_exact_mut(unit)) {
            let at = (column * slab.depth.len() + skipped) * width;
            let bytes = &bytes[at..at + depth.len() * width];
            each_number(matrix.dtype, bytes, |index, value| values[index] = value);
        }
        return;
    }
    for row in 0..depth.len() {
        let at = ((skipped + row) * slab.columns.len() + columns.start) * width;
        let bytes = &bytes[at..at + columns.len() * width];
        each_number(matrix.dtype, bytes, |column, value| values[column * unit + row] = value);
    }
}

/// Calls `put` with index and value of each number.
fn each_number(dtype: DType, bytes: &[u8], mut put: impl FnMut(usize, f32)) {
    let mut floats = [0.0; AT_ONCE];
    for (chunk, bytes) in bytes.chunks(AT_ONCE * element_bytes(dtype)).enumerate() {
        let floats = &mut floats[..bytes.len() / element_bytes(dtype)];
        to_floats(dtype, bytes, floats);
        floats.iter().enumerate().for_each(|(index, value)| put(chunk * AT_ONCE + index, *value));
    }
}

/// Converts up to [`AT_ONCE`] numbers together. One by one, each 16-bit number would take a function call.
fn to_floats(dtype: DType, bytes: &[u8], floats: &mut [f32]) {
    match dtype {
        DType::Float32 => floats.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, b)| *to = f32::from_le_bytes(*b)),
        DType::Float16 => {
            let mut halves = [f16::ZERO; AT_ONCE];
            halves.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, b)| *to = f16::from_le_bytes(*b));
            halves[..floats.len()].convert_to_f32_slice(floats);
        }
        _ => floats.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, b)| *to = bf16::from_le_bytes(*b).to_f32()),
    }
}

/// Bytes of an element of a float type.
pub(super) fn element_bytes(dtype: DType) -> usize {
    if dtype == DType::Float32 { 4 } else { 2 }
}
