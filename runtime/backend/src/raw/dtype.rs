//! ONNX Runtime's numbers for element types, which differ from those of ONNX.

use hpp_schema::DType;
use ort::sys::ONNXTensorElementDataType as Ort;

/// ONNX Runtime's number for a type; `UNDEFINED`, which it refuses, for types that it lacks.
pub(crate) fn to_ort(dtype: DType) -> Ort {
    match dtype {
        DType::Float32 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT,
        DType::Uint8 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8,
        DType::Int8 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
        DType::Uint16 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16,
        DType::Int16 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16,
        DType::Int32 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32,
        DType::Int64 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64,
        DType::String => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_STRING,
        DType::Bool => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL,
        DType::Float16 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16,
        DType::Float64 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE,
        DType::Uint32 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32,
        DType::Uint64 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64,
        DType::Complex64 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_COMPLEX64,
        DType::Complex128 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_COMPLEX128,
        DType::Bfloat16 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16,
        DType::Float8E4m3fn => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FN,
        DType::Float8E4m3fnuz => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E4M3FNUZ,
        DType::Float8E5m2 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2,
        DType::Float8E5m2fnuz => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E5M2FNUZ,
        DType::Uint4 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT4,
        DType::Int4 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT4,
        DType::Float4E2m1 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT4E2M1,
        DType::Float8E8m0 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT8E8M0,
        DType::Uint2 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT2,
        DType::Int2 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_INT2,
        DType::Float6E2m3 | DType::Float6E3m2 => Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED,
    }
}

/// The type for a number of ONNX Runtime.
pub(crate) fn from_ort(ort: Ort) -> Option<DType> {
    if ort == Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED {
        return None;
    }
    DType::ALL.into_iter().find(|dtype| to_ort(*dtype) == ort)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_survives_the_round_trip() {
        let new = [DType::Float6E2m3, DType::Float6E3m2];
        for dtype in DType::ALL.into_iter().filter(|dtype| !new.contains(dtype)) {
            assert_eq!(from_ort(to_ort(dtype)), Some(dtype));
        }
        assert_eq!(from_ort(Ort::ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED), None);
    }
}
