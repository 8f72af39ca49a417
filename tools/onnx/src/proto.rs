//! The prost types of `schemas/onnx.proto`. Raw tensor data is `Bytes`, so that decoding borrows it from the mapped
//! file.
#![allow(missing_docs)]

include!("generated/onnx.rs");
