//! The prost types of `schemas/onnx.proto`. Raw tensor data is `Bytes`, so that decoding borrows it from the mapped
//! file.
#![allow(missing_docs)]

include!(concat!(env!("OUT_DIR"), "/onnx.rs"));

/// The encoded descriptor set of the schema that these types are generated from.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/onnx.descriptors"));
