//! Tensor element types, named as ONNX names them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;

/// An ONNX tensor element type. The discriminant is the IR's `TensorProto.DataType` number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[repr(i32)]
#[allow(missing_docs)]
pub enum DType {
    Float32 = 1,
    Uint8 = 2,
    Int8 = 3,
    Uint16 = 4,
    Int16 = 5,
    Int32 = 6,
    Int64 = 7,
    String = 8,
    Bool = 9,
    Float16 = 10,
    Float64 = 11,
    Uint32 = 12,
    Uint64 = 13,
    Complex64 = 14,
    Complex128 = 15,
    Bfloat16 = 16,
    Float8E4m3fn = 17,
    Float8E4m3fnuz = 18,
    Float8E5m2 = 19,
    Float8E5m2fnuz = 20,
    Uint4 = 21,
    Int4 = 22,
    Float4E2m1 = 23,
    Float8E8m0 = 24,
    Uint2 = 25,
    Int2 = 26,
    Float6E2m3 = 27,
    Float6E3m2 = 28,
}

impl DType {
    /// All element types that this build supports, in the IR's order.
    pub const ALL: [DType; 28] = {
        use DType::*;
        [
            Float32,
            Uint8,
            Int8,
            Uint16,
            Int16,
            Int32,
            Int64,
            String,
            Bool,
            Float16,
            Float64,
            Uint32,
            Uint64,
            Complex64,
            Complex128,
            Bfloat16,
            Float8E4m3fn,
            Float8E4m3fnuz,
            Float8E5m2,
            Float8E5m2fnuz,
            Uint4,
            Int4,
            Float4E2m1,
            Float8E8m0,
            Uint2,
            Int2,
            Float6E2m3,
            Float6E3m2,
        ]
    };

    /// The type with this `TensorProto.DataType` number, if there is one.
    pub fn from_onnx(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|t| *t as i32 == number)
    }

    /// The `TensorProto.DataType` number.
    pub fn to_onnx(self) -> i32 {
        self as i32
    }

    /// Bits of one element when packed; `None` for strings, whose length varies.
    pub fn bits(self) -> Option<u64> {
        use DType::*;
        Some(match self {
            String => return None,
            Uint2 | Int2 => 2,
            Uint4 | Int4 | Float4E2m1 => 4,
            Float6E2m3 | Float6E3m2 => 6,
            Uint8 | Int8 | Bool | Float8E4m3fn | Float8E4m3fnuz | Float8E5m2 | Float8E5m2fnuz | Float8E8m0 => 8,
            Uint16 | Int16 | Float16 | Bfloat16 => 16,
            Float32 | Uint32 | Int32 => 32,
            Float64 | Uint64 | Int64 | Complex64 => 64,
            Complex128 => 128,
        })
    }

    /// Bytes of `elements` values; sub-byte types are packed and rounded up to a whole byte. `None` for strings and on
    /// overflow of 64 bits.
    pub fn bytes_for(self, elements: u64) -> Option<u64> {
        Some(self.bits()?.checked_mul(elements)?.div_ceil(8))
    }

    /// Whether this is a floating-point type.
    pub fn is_float(self) -> bool {
        use DType::*;
        matches!(
            self,
            Float32
                | Float16
                | Float64
                | Bfloat16
                | Float8E4m3fn
                | Float8E4m3fnuz
                | Float8E5m2
                | Float8E5m2fnuz
                | Float4E2m1
                | Float8E8m0
                | Float6E2m3
                | Float6E3m2
        )
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_round_trip() {
        for t in DType::ALL {
            assert_eq!(DType::from_onnx(t.to_onnx()), Some(t));
        }
        assert_eq!(DType::from_onnx(0), None);
        assert_eq!(DType::from_onnx(99), None);
    }

    #[test]
    fn sub_byte_types_round_up() {
        assert_eq!(DType::Int4.bytes_for(3), Some(2));
        assert_eq!(DType::Uint2.bytes_for(5), Some(2));
        assert_eq!(DType::Float32.bytes_for(u64::MAX), None);
        assert_eq!(DType::String.bytes_for(1), None);
    }

    #[test]
    fn display_equals_the_serialised_name() {
        for t in DType::ALL {
            assert_eq!(serde_json::to_value(t).unwrap(), serde_json::json!(t.to_string()));
        }
    }
}
