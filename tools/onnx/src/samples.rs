//! Samples weights to find out in how few bits they can be stored, without reading all of them.

use crate::model::Model;
use crate::proto::TensorProto;
use crate::tensor;
use crate::weights::file_range;
use half::{bf16, f16};
use hpp_schema::DType;
use hpp_schema::compression::{Precision, SHORT_EXPONENTS};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Bytes of one sample.
const PIECE: u64 = 4096;
/// Maximum number of samples of one weight.
const PIECES: u64 = 16;

/// What the samples of a floating-point weight, as float32, suggest about all of its numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SampledNumbers {
    /// The precision that represents all of them.
    pub precision: Precision,
    /// The share of numbers whose exponents are not among the most common consecutive ones ([`SHORT_EXPONENTS`]).
    pub exceptions: f64,
}

/// Samples a float32, float16 or bfloat16 weight. `None` for other weights and for a weight that cannot be read. Also `None` if all samples are 0,
/// because a hole in a sparse file reads as zeros too.
pub fn sample_numbers(model: &Model, name: &str) -> Option<SampledNumbers> {
    let tensor = model.graph_proto().initializer.iter().find(|tensor| tensor.name() == name)?;
    let dtype = DType::from_onnx(tensor.data_type())?;
    let widened = |bytes: &[u8]| match (dtype, bytes) {
        (DType::Float32, &[a, b, c, d]) => Some(u32::from_le_bytes([a, b, c, d])),
        (DType::Float16, &[a, b]) => Some(f16::from_le_bytes([a, b]).to_f32().to_bits()),
        (DType::Bfloat16, &[a, b]) => Some(bf16::from_le_bytes([a, b]).to_f32().to_bits()),
        _ => None,
    };
    let size = if dtype == DType::Float32 { 4 } else { 2 };
    let numbers = samples(model, tensor)?.chunks_exact(size).map(widened).collect::<Option<Vec<u32>>>()?;
    describe(&numbers)
}

/// Whether a float32 weight seems to hold widened 16-bit numbers: all sampled numbers are exact in bfloat16, or all are
/// exact in float16. False for a weight that cannot be sampled.
pub fn looks_widened(model: &Model, name: &str) -> bool {
    let tensor = model.graph_proto().initializer.iter().find(|tensor| tensor.name() == name);
    let is_float32 = tensor.is_some_and(|tensor| tensor.data_type() == DType::Float32.to_onnx());
    is_float32 && sample_numbers(model, name).is_some_and(|numbers| numbers.precision != Precision::Float32)
}

fn describe(numbers: &[u32]) -> Option<SampledNumbers> {
    let is_float16 = |bits: &u32| f16::from_f32(f32::from_bits(*bits)).to_f32().to_bits() == *bits;
    let precision = match numbers {
        _ if numbers.iter().all(|bits| *bits == 0) => return None,
        _ if numbers.iter().all(|bits| bits & 0xffff == 0) => Precision::Bfloat16,
        _ if numbers.iter().all(is_float16) => Precision::Float16,
        _ => Precision::Float32,
    };
    let mut counts = [0u64; 256];
    numbers.iter().for_each(|bits| counts[(bits >> 23) as usize & 0xff] += 1);
    let most = counts.windows(SHORT_EXPONENTS).map(|window| window.iter().sum::<u64>()).max()?;
    Some(SampledNumbers { precision, exceptions: 1.0 - most as f64 / numbers.len() as f64 })
}

/// Samples of a tensor with elements of 2 or 4 bytes, from its first to its last element; `None` if they cannot be read.
fn samples(model: &Model, tensor: &TensorProto) -> Option<Vec<u8>> {
    let mut samples = Vec::new();
    if !tensor::is_external(tensor).ok()? {
        let bytes = tensor::embedded_bytes(tensor, &tensor::shape_of(tensor).ok()?).ok()??;
        for (at, length) in pieces(bytes.len() as u64) {
            samples.extend_from_slice(bytes.get(at as usize..(at + length) as usize)?);
        }
        return Some(samples);
    }
    let weights = model.weights();
    let files = weights.files.iter().enumerate().map(|(index, file)| (file.location.as_str(), index)).collect();
    let range = file_range(tensor, &files).ok()?;
    let mut file = File::open(&weights.files[range.file].path).ok()?;
    for (at, length) in pieces(range.length) {
        file.seek(SeekFrom::Start(range.offset.checked_add(at)?)).ok()?;
        let start = samples.len();
        samples.resize(start + length as usize, 0);
        file.read_exact(&mut samples[start..]).ok()?;
    }
    Some(samples)
}

/// Evenly spaced samples of `bytes` bytes, as `(offset, length)`. A single sample of everything if the samples would cover all bytes.
fn pieces(bytes: u64) -> Vec<(u64, u64)> {
    if bytes <= PIECE * PIECES {
        return vec![(0, bytes)];
    }
    let last = u128::from(bytes - PIECE);
    let offset_of = |piece: u64| (u128::from(piece) * last / u128::from(PIECES - 1)) as u64;
    (0..PIECES).map(|piece| (offset_of(piece) / 4 * 4, PIECE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_span_the_whole_weight() {
        assert_eq!(pieces(0), [(0, 0)]);
        assert_eq!(pieces(65536), [(0, 65536)]);
        let many = pieces(1 << 40);
        assert_eq!((many.len(), many[0], many[15]), (16, (0, 4096), ((1 << 40) - 4096, 4096)));
        assert!(many.iter().all(|(at, _)| at % 4 == 0));
        assert!(pieces(65540).windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
    }

    #[test]
    fn all_numbers_are_exact_in_one_16_bit_type_and_some_are_not_zero() {
        let precision = |numbers: &[f32]| {
            describe(&numbers.iter().map(|n| n.to_bits()).collect::<Vec<_>>()).map(|numbers| numbers.precision)
        };
        // The first is bfloat16 and not float16, the second float16 and not bfloat16.
        let (wide, fine) = (1e30f32.to_bits() & 0xffff_0000, 1.0 + 1.0 / 1024.0);
        assert_eq!(precision(&[f32::from_bits(wide), 1.0, 0.0]), Some(Precision::Bfloat16));
        assert_eq!(precision(&[fine, -1.0, 0.0]), Some(Precision::Float16));
        assert_eq!(precision(&[f32::from_bits(wide), fine]), Some(Precision::Float32));
        assert_eq!(precision(&[1.0, 0.1]), Some(Precision::Float32));
        assert_eq!([precision(&[0.0, 0.0]), precision(&[])], [None, None]);
    }

    #[test]
    fn exceptions_are_outside_of_the_best_seven_exponents() {
        // Powers of two from 2^-9 to 1. The smallest occurs once, the largest twice, the others 10 times.
        let numbers = (0..10)
            .flat_map(|power: i32| vec![0.5f32.powi(power); [2, 10, 10, 10, 10, 10, 10, 10, 1, 1][power as usize]]);
        let numbers: Vec<u32> = numbers.map(f32::to_bits).collect();
        let described = describe(&numbers).unwrap();
        assert!((described.exceptions - 4.0 / 74.0).abs() < 1e-9, "{described:?}");
    }
}
