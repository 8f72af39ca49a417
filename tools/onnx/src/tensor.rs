//! Reads a `TensorProto`: element type, dimensions, expected size, and the bytes of embedded tensors.
//!
//! Does not know files: [`crate::weights`] locates external bytes.

use crate::proto::{TensorProto, tensor_proto::DataLocation};
use hpp_schema::DType;
use std::borrow::Cow;

/// Element type, dimensions and packed size of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorShape {
    /// Element type.
    pub dtype: DType,
    /// Dimensions; none for a scalar.
    pub dims: Vec<u64>,
    /// Number of elements.
    pub elements: u64,
    /// Bytes of all elements, packed; `None` for strings.
    pub bytes: Option<u64>,
}

/// An invalid tensor.
#[derive(Debug, thiserror::Error)]
#[error("weight {name:?} {problem}")]
pub struct TensorError {
    /// The tensor's name.
    pub name: String,
    /// The problem.
    pub problem: TensorProblem,
}

/// A problem with a tensor.
#[derive(Debug, thiserror::Error, PartialEq)]
#[allow(missing_docs)]
pub enum TensorProblem {
    #[error("has element type {0}, which this build does not know")]
    UnknownType(i32),
    #[error("has a negative dimension {0}")]
    NegativeDim(i64),
    #[error("has dimensions {0:?}, whose size exceeds 64 bits")]
    TooLarge(Vec<i64>),
    #[error("is stored in segments, which no exporter writes and this build does not read")]
    Segmented,
    #[error("has data location {0}, which this build does not know")]
    UnknownLocation(i32),
    #[error("has {found} {unit}, but its type and dimensions require {wanted}")]
    WrongSize { found: u64, wanted: u64, unit: &'static str },
    #[error("stores its data in more than one field")]
    TwoFields,
    #[error("stores its data in {0}, which does not match its element type")]
    WrongField(&'static str),
    #[error("is external and of type string, which ONNX does not allow")]
    ExternalStrings,
}

/// Reads and checks type and dimensions.
pub fn shape_of(tensor: &TensorProto) -> Result<TensorShape, TensorError> {
    let fail = |problem| TensorError { name: tensor.name().to_owned(), problem };
    let dtype =
        DType::from_onnx(tensor.data_type()).ok_or_else(|| fail(TensorProblem::UnknownType(tensor.data_type())))?;
    if tensor.segment.is_some() {
        return Err(fail(TensorProblem::Segmented));
    }
    let (dims, elements) = dims_of(&tensor.dims).map_err(fail)?;
    let bytes = match dtype {
        DType::String => None,
        _ => Some(dtype.bytes_for(elements).ok_or_else(|| fail(TensorProblem::TooLarge(tensor.dims.clone())))?),
    };
    Ok(TensorShape { dtype, dims, elements, bytes })
}

/// The dimensions and their product, checked.
pub fn dims_of(dims: &[i64]) -> Result<(Vec<u64>, u64), TensorProblem> {
    let sizes: Vec<u64> =
        dims.iter().map(|d| u64::try_from(*d).map_err(|_| TensorProblem::NegativeDim(*d))).collect::<Result<_, _>>()?;
    let elements = match sizes.contains(&0) {
        true => Some(0),
        false => sizes.iter().try_fold(1u64, |product, d| product.checked_mul(*d)),
    };
    let elements = elements.ok_or_else(|| TensorProblem::TooLarge(dims.to_vec()))?;
    Ok((sizes, elements))
}

/// Whether the bytes are in another file.
pub fn is_external(tensor: &TensorProto) -> Result<bool, TensorError> {
    match tensor.data_location.unwrap_or_default() {
        location if location == DataLocation::Default as i32 => Ok(false),
        location if location == DataLocation::External as i32 => Ok(true),
        unknown => {
            Err(TensorError { name: tensor.name().to_owned(), problem: TensorProblem::UnknownLocation(unknown) })
        }
    }
}

/// The little-endian bytes of an embedded tensor, borrowed if the file stores them raw. `Ok(None)` for strings.
pub fn embedded_bytes<'a>(tensor: &'a TensorProto, shape: &TensorShape) -> Result<Option<Cow<'a, [u8]>>, TensorError> {
    let fail = |problem| TensorError { name: tensor.name().to_owned(), problem };
    check_fields(tensor, shape).map_err(fail)?;
    let Some(bytes) = shape.bytes else { return Ok(None) };
    let raw = match &tensor.raw_data {
        Some(raw) if bytes > 0 => Cow::Borrowed(raw.as_ref()),
        _ => Cow::Owned(typed_bytes(tensor, shape.dtype)),
    };
    if raw.len() as u64 != bytes {
        return Err(fail(TensorProblem::WrongSize { found: raw.len() as u64, wanted: bytes, unit: "bytes" }));
    }
    Ok(Some(raw))
}

/// Checks sizes without touching the data.
pub fn check_embedded(tensor: &TensorProto, shape: &TensorShape) -> Result<(), TensorError> {
    check_fields(tensor, shape).map_err(|problem| TensorError { name: tensor.name().to_owned(), problem })
}

fn check_fields(tensor: &TensorProto, shape: &TensorShape) -> Result<(), TensorProblem> {
    let filled: Vec<(&str, u64)> = [
        ("raw_data", tensor.raw_data.as_ref().map_or(0, |raw| raw.len())),
        ("float_data", tensor.float_data.len()),
        ("int32_data", tensor.int32_data.len()),
        ("string_data", tensor.string_data.len()),
        ("int64_data", tensor.int64_data.len()),
        ("double_data", tensor.double_data.len()),
        ("uint64_data", tensor.uint64_data.len()),
    ]
    .into_iter()
    .filter(|(_, len)| *len > 0)
    .map(|(field, len)| (field, len as u64))
    .collect();
    let (field, found) = match filled.as_slice() {
        [] if shape.elements == 0 => return Ok(()),
        [] => ("raw_data", 0),
        [one] => *one,
        _ => return Err(TensorProblem::TwoFields),
    };
    let (expected_field, entries) = typed_entries(shape);
    let (wanted, unit) = match field {
        "raw_data" => (shape.bytes.ok_or(TensorProblem::WrongField("raw_data"))?, "bytes"),
        field if field == expected_field => (entries, "elements"),
        field => return Err(TensorProblem::WrongField(field)),
    };
    match found == wanted {
        true => Ok(()),
        false => Err(TensorProblem::WrongSize { found, wanted, unit }),
    }
}

/// The typed field for elements of this type, and the number of entries it needs.
fn typed_entries(shape: &TensorShape) -> (&'static str, u64) {
    let n = shape.elements;
    match shape.dtype {
        DType::Float32 => ("float_data", n),
        DType::Complex64 => ("float_data", n.saturating_mul(2)),
        DType::Float64 => ("double_data", n),
        DType::Complex128 => ("double_data", n.saturating_mul(2)),
        DType::Int64 => ("int64_data", n),
        DType::Uint32 | DType::Uint64 => ("uint64_data", n),
        DType::String => ("string_data", n),
        DType::Float6E2m3 | DType::Float6E3m2 => ("int32_data", n),
        // Two- and four-bit elements are packed into bytes, and each entry holds one byte.
        _ => ("int32_data", shape.bytes.unwrap_or(n).min(n)),
    }
}

/// The typed field of a tensor, converted to raw bytes.
fn typed_bytes(tensor: &TensorProto, dtype: DType) -> Vec<u8> {
    let low_bytes = |width: usize| tensor.int32_data.iter().flat_map(move |v| v.to_le_bytes().into_iter().take(width));
    match dtype {
        DType::Float32 | DType::Complex64 => tensor.float_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Float64 | DType::Complex128 => tensor.double_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Int64 => tensor.int64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Uint64 => tensor.uint64_data.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Uint32 => tensor.uint64_data.iter().flat_map(|v| (*v as u32).to_le_bytes()).collect(),
        DType::Float6E2m3 | DType::Float6E3m2 => pack_six_bits(&tensor.int32_data),
        DType::String => vec![],
        _ => match dtype.bits() {
            Some(32) => low_bytes(4).collect(),
            Some(16) => low_bytes(2).collect(),
            _ => low_bytes(1).collect(),
        },
    }
}

/// Packs four six-bit elements into three bytes, low bits first.
fn pack_six_bits(elements: &[i32]) -> Vec<u8> {
    let mut out = vec![0u8; (elements.len() * 6).div_ceil(8)];
    for (i, element) in elements.iter().enumerate() {
        let (at, shift) = (i * 6 / 8, i * 6 % 8);
        let bits = ((*element as u16) & 0x3f) << shift;
        out[at] |= bits as u8;
        if let Some(next) = out.get_mut(at + 1) {
            *next |= (bits >> 8) as u8;
        }
    }
    out
}

/// Maximum number of elements of a tensor whose elements the graph keeps.
pub const MAX_INTS: u64 = 64;

/// Whether the elements of such a tensor may be sizes, axes or indices.
pub fn holds_small_ints(shape: &TensorShape) -> bool {
    let integer = matches!(shape.dtype, DType::Int64 | DType::Int32 | DType::Bool | DType::Uint8 | DType::Int8);
    integer && shape.elements <= MAX_INTS
}

/// The elements of a tensor of an integer or boolean type; `None` for other types.
pub fn ints_of(dtype: DType, raw: &[u8]) -> Option<Vec<i64>> {
    Some(match dtype {
        DType::Int64 => raw.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect(),
        DType::Int32 => raw.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b).into()).collect(),
        DType::Bool | DType::Uint8 => raw.iter().map(|b| i64::from(*b)).collect(),
        DType::Int8 => raw.iter().map(|b| i64::from(*b as i8)).collect(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    fn tensor(dtype: DType, dims: &[i64]) -> TensorProto {
        TensorProto {
            name: Some("w".into()),
            data_type: Some(dtype.to_onnx()),
            dims: dims.to_vec(),
            ..TensorProto::default()
        }
    }

    fn bytes_of(tensor: &TensorProto) -> Result<Vec<u8>, TensorProblem> {
        let shape = shape_of(tensor).map_err(|e| e.problem)?;
        let bytes = embedded_bytes(tensor, &shape).map_err(|e| e.problem)?;
        Ok(bytes.expect("not strings").into_owned())
    }

    #[test]
    fn typed_fields_become_raw_bytes() {
        let f = TensorProto { float_data: vec![1.0, -2.0], ..tensor(DType::Float32, &[2]) };
        assert_eq!(bytes_of(&f).unwrap(), [0, 0, 0x80, 0x3f, 0, 0, 0, 0xc0]);
        let bf16 = TensorProto { int32_data: vec![0x3f80, 0xc000], ..tensor(DType::Bfloat16, &[2]) };
        assert_eq!(bytes_of(&bf16).unwrap(), [0x80, 0x3f, 0, 0xc0]);
        let f8 = TensorProto { int32_data: vec![0x38, 0xb8, 0x7f], ..tensor(DType::Float8E4m3fn, &[3]) };
        assert_eq!(bytes_of(&f8).unwrap(), [0x38, 0xb8, 0x7f]);
        let u32s = TensorProto { uint64_data: vec![7, 0xffff_ffff], ..tensor(DType::Uint32, &[2]) };
        assert_eq!(bytes_of(&u32s).unwrap(), [7, 0, 0, 0, 255, 255, 255, 255]);
        let i8s = TensorProto { int32_data: vec![-1, 5], ..tensor(DType::Int8, &[2]) };
        assert_eq!(bytes_of(&i8s).unwrap(), [255, 5]);
    }

    #[test]
    fn sub_byte_types_are_packed() {
        let int4 = TensorProto { int32_data: vec![0x21, 0x03], ..tensor(DType::Int4, &[3]) };
        assert_eq!(bytes_of(&int4).unwrap(), [0x21, 0x03]);
        let uint2 = TensorProto { raw_data: Some(Bytes::from_static(&[0xe4, 0x01])), ..tensor(DType::Uint2, &[5]) };
        assert_eq!(bytes_of(&uint2).unwrap(), [0xe4, 0x01]);
        let f6 = TensorProto { int32_data: vec![0x3f, 0, 0x3f, 0, 1], ..tensor(DType::Float6E2m3, &[5]) };
        assert_eq!(bytes_of(&f6).unwrap(), [0x3f, 0xf0, 0x03, 0x01]);
        let short = TensorProto { raw_data: Some(Bytes::from_static(&[0])), ..tensor(DType::Float4E2m1, &[3]) };
        assert_eq!(bytes_of(&short), Err(TensorProblem::WrongSize { found: 1, wanted: 2, unit: "bytes" }));
    }

    #[test]
    fn empty_tensors_and_scalars() {
        assert!(bytes_of(&tensor(DType::Float32, &[0, 1 << 40])).unwrap().is_empty());
        let scalar = TensorProto { int64_data: vec![9], ..tensor(DType::Int64, &[]) };
        assert_eq!(ints_of(DType::Int64, &bytes_of(&scalar).unwrap()), Some(vec![9]));
        let empty = TensorProto { raw_data: Some(Bytes::new()), ..tensor(DType::Float32, &[2]) };
        assert!(matches!(bytes_of(&empty), Err(TensorProblem::WrongSize { found: 0, wanted: 8, .. })));
    }

    #[test]
    fn strings_have_elements_but_no_bytes() {
        let s = TensorProto { string_data: vec![b"a".to_vec(), vec![]], ..tensor(DType::String, &[2]) };
        let shape = shape_of(&s).unwrap();
        assert_eq!((shape.bytes, shape.elements), (None, 2));
        assert!(embedded_bytes(&s, &shape).unwrap().is_none());
        let wrong = TensorProto { string_data: vec![vec![]], ..tensor(DType::String, &[2]) };
        assert!(check_embedded(&wrong, &shape).is_err());
    }

    #[test]
    fn hostile_headers() {
        assert_eq!(shape_of(&tensor(DType::Int8, &[-1])).unwrap_err().problem, TensorProblem::NegativeDim(-1));
        let huge = tensor(DType::Float64, &[1 << 40, 1 << 40]);
        assert!(matches!(shape_of(&huge).unwrap_err().problem, TensorProblem::TooLarge(_)));
        let eight = tensor(DType::Float64, &[1 << 61]);
        assert!(matches!(shape_of(&eight).unwrap_err().problem, TensorProblem::TooLarge(_)));
        let odd = TensorProto { data_type: Some(77), ..tensor(DType::Int8, &[1]) };
        assert_eq!(shape_of(&odd).unwrap_err().problem, TensorProblem::UnknownType(77));
        let two = TensorProto { float_data: vec![1.0], int32_data: vec![1], ..tensor(DType::Float32, &[1]) };
        assert_eq!(bytes_of(&two), Err(TensorProblem::TwoFields));
        let wrong = TensorProto { int64_data: vec![1], ..tensor(DType::Float32, &[1]) };
        assert_eq!(bytes_of(&wrong), Err(TensorProblem::WrongField("int64_data")));
    }
}
