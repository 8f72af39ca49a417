//! One array in NumPy's `.npy` format.

use super::npy_header::NpyHeader;
use crate::runtime::memory_limit;
use hpp_engine::HostTensor;
use hpp_schema::{ByteSize, DType};
use std::fs::File;
use std::io::{self, BufReader, Read, Write};
use std::path::{Path, PathBuf};

/// Limit of the bytes of tensors from one file if the system does not report its memory.
const DEFAULT_LIMIT: u64 = 4 << 30;

/// Why an array cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum NpyError {
    /// The file cannot be read.
    #[error("cannot read {} as a NumPy array", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the reader reported.
        source: io::Error,
    },
}

/// Reads a `.npy` file.
pub fn read_npy(path: &Path) -> Result<HostTensor, NpyError> {
    let error = |source| NpyError::Read { path: path.to_owned(), source };
    read(BufReader::new(File::open(path).map_err(error)?), &mut MemoryBudget::of_this_process()).map_err(error)
}

/// The memory budget for the tensors of one file.
pub(super) struct MemoryBudget {
    left: u64,
    total: u64,
}

impl MemoryBudget {
    /// A quarter of the memory that this process may use, because the engine and a device hold copies.
    pub fn of_this_process() -> Self {
        Self::new(memory_limit().map_or(DEFAULT_LIMIT, |limit| limit / 4))
    }

    /// A budget of this many bytes.
    pub fn new(total: u64) -> Self {
        Self { left: total, total }
    }

    fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| {
            let (bytes, total) = (ByteSize(bytes).human(), ByteSize(self.total).human());
            invalid(format!(
                "it declares {bytes}, and the tensors of a file may take {total} here, a quarter of the memory"
            ))
        })?;
        Ok(())
    }
}

/// Reads one array. Elements become little-endian and row-major.
pub(super) fn read(mut reader: impl Read, budget: &mut MemoryBudget) -> io::Result<HostTensor> {
    let NpyHeader { descr, fortran_order, shape } = NpyHeader::read(&mut reader)?;
    let (dtype, order) = element(&descr)
        .ok_or_else(|| invalid(format!("its elements are `{descr}`, which is not a tensor's element type")))?;
    let length = shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size)).and_then(|n| dtype.bytes_for(n));
    let length = length.ok_or_else(|| invalid(format!("its shape {shape:?} is too large")))?;

    // A compressed array may declare any size. The buffer's pages are only allocated as bytes arrive.
    budget.take(length)?;
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(length as usize).map_err(io::Error::other)?;
    reader.take(length).read_to_end(&mut bytes)?;
    if bytes.len() as u64 != length {
        return Err(invalid(format!("it ends early: {} of {length} bytes", bytes.len())));
    }
    let width = dtype.bytes_for(1).and_then(|n| usize::try_from(n).ok()).unwrap_or(1);
    if order == ByteOrder::Big {
        let complex = matches!(dtype, DType::Complex64 | DType::Complex128);
        bytes.chunks_exact_mut(if complex { width / 2 } else { width }).for_each(<[u8]>::reverse);
    }
    if fortran_order && !bytes.is_empty() {
        bytes = row_major(&bytes, &shape, width);
    }
    Ok(HostTensor { dtype, shape, bytes })
}

/// Writes one array.
pub(super) fn write(tensor: &HostTensor, mut writer: impl Write) -> io::Result<()> {
    let descr = numpy_name(tensor.dtype).ok_or_else(|| invalid(format!("NumPy has no array of {}", tensor.dtype)))?;
    let header = NpyHeader { descr: descr.to_owned(), fortran_order: false, shape: tensor.shape.clone() };
    writer.write_all(&header.to_bytes(0))?;
    writer.write_all(&tensor.bytes)
}

fn invalid(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ByteOrder {
    Little,
    Big,
}

/// The element type and byte order that a NumPy type string stands for.
fn element(descr: &str) -> Option<(DType, ByteOrder)> {
    let (order, kind) = match descr.split_at_checked(1)? {
        ("<" | "|", kind) => (ByteOrder::Little, kind),
        (">", kind) => (ByteOrder::Big, kind),
        _ => return None,
    };
    let dtype = match kind {
        "b1" => DType::Bool,
        "i1" => DType::Int8,
        "i2" => DType::Int16,
        "i4" => DType::Int32,
        "i8" => DType::Int64,
        "u1" => DType::Uint8,
        "u2" => DType::Uint16,
        "u4" => DType::Uint32,
        "u8" => DType::Uint64,
        "f2" => DType::Float16,
        "f4" => DType::Float32,
        "f8" => DType::Float64,
        "c8" => DType::Complex64,
        "c16" => DType::Complex128,
        "V2" => DType::Bfloat16,
        _ => return None,
    };
    Some((dtype, order))
}

fn numpy_name(dtype: DType) -> Option<&'static str> {
    use DType::*;
    Some(match dtype {
        Bool => "|b1",
        Int8 => "|i1",
        Int16 => "<i2",
        Int32 => "<i4",
        Int64 => "<i8",
        Uint8 | Float8E4m3fn | Float8E4m3fnuz | Float8E5m2 | Float8E5m2fnuz | Float8E8m0 => "|u1",
        Uint16 | Bfloat16 => "<u2",
        Uint32 => "<u4",
        Uint64 => "<u8",
        Float16 => "<f2",
        Float32 => "<f4",
        Float64 => "<f8",
        Complex64 => "<c8",
        Complex128 => "<c16",
        String | Uint4 | Int4 | Float4E2m1 | Uint2 | Int2 | Float6E2m3 | Float6E3m2 => return None,
    })
}

/// Reorders elements from column-major (first index fastest) to row-major.
fn row_major(bytes: &[u8], shape: &[u64], width: usize) -> Vec<u8> {
    let sizes: Vec<usize> = shape.iter().map(|n| *n as usize).collect();
    let mut strides = vec![0; sizes.len()];
    let mut step = width;
    for (stride, size) in strides.iter_mut().zip(&sizes) {
        (*stride, step) = (step, step * size);
    }
    let mut out = Vec::with_capacity(bytes.len());
    let mut index = vec![0usize; sizes.len()];
    while out.len() < bytes.len() {
        let offset: usize = index.iter().zip(&strides).map(|(i, s)| i * s).sum();
        out.extend_from_slice(&bytes[offset..offset + width]);
        for axis in (0..sizes.len()).rev() {
            index[axis] += 1;
            if index[axis] < sizes[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(reader: impl Read) -> io::Result<HostTensor> {
        super::read(reader, &mut MemoryBudget::new(1 << 20))
    }

    fn file(descr: &str, fortran_order: bool, shape: &[u64], data: &[u8]) -> Vec<u8> {
        let header = NpyHeader { descr: descr.to_owned(), fortran_order, shape: shape.to_vec() };
        [&header.to_bytes(0), data].concat()
    }

    #[test]
    fn big_endian_and_column_major_arrays_are_reordered() {
        let data: Vec<u8> = [1i16, 4, 2, 5, 3, 6].iter().flat_map(|v| v.to_be_bytes()).collect();
        let tensor = read(&file(">i2", true, &[2, 3], &data)[..]).unwrap();
        let want: Vec<u8> = [1i16, 2, 3, 4, 5, 6].iter().flat_map(|v| v.to_le_bytes()).collect();
        assert_eq!(tensor, HostTensor { dtype: DType::Int16, shape: vec![2, 3], bytes: want });
    }

    #[test]
    fn scalars_and_empty_arrays_have_their_shapes() {
        assert_eq!(read(&file("|b1", false, &[], &[1])[..]).unwrap().shape, Vec::<u64>::new());
        assert_eq!(read(&file("<f4", true, &[0, 5], &[])[..]).unwrap().shape, [0, 5]);
    }

    #[test]
    fn unsupported_arrays_are_errors_that_name_the_reason() {
        for (descr, why) in [("|O", "`|O`"), ("<U4", "`<U4`"), ("<M8[ns]", "`<M8[ns]`")] {
            let error = read(&file(descr, false, &[1], &[0; 64])[..]).unwrap_err().to_string();
            assert!(error.contains(why), "{descr}: {error}");
        }
        assert!(read(&b"not numpy at all"[..]).is_err());
        assert!(read(&file("<f4", false, &[3], &[0; 8])[..]).unwrap_err().to_string().contains("8 of 12"));
        assert!(read(&file("<f4", false, &[9_999_999_999, 9_999_999_999], &[])[..]).is_err());
    }

    proptest! {
        #[test]
        fn written_arrays_are_read_back(rows in 0u64..5, columns in 0u64..5, which in 0..DType::ALL.len(), fill: u8) {
            let dtype = DType::ALL[which];
            let Some(length) = dtype.bytes_for(rows * columns) else { return Ok(()) };
            let tensor = HostTensor { dtype, shape: vec![rows, columns], bytes: vec![fill; length as usize] };
            let mut out = vec![];
            if write(&tensor, &mut out).is_ok() {
                let back = read(&out[..]).unwrap();
                prop_assert_eq!((back.shape, back.bytes), (tensor.shape, tensor.bytes));
            } else {
                prop_assert!(dtype.bits() < Some(8));
            }
        }

        #[test]
        fn any_bytes_are_an_array_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), cut in 0usize..100) {
            let _ = read(&bytes[..]);
            let mut near = file("<f4", false, &[2, 3], &[7; 24]);
            for (at, byte) in bytes.iter().enumerate().take(cut) {
                let place = (at * 7 + cut) % near.len();
                near[place] ^= byte & 0x11;
            }
            let _ = read(&near[..]);
        }
    }
}
