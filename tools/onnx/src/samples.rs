//! Samples weights to find out whether they hold widened 16-bit numbers, without reading all of them.

use crate::model::Model;
use crate::proto::TensorProto;
use crate::tensor;
use crate::weights::file_range;
use half::f16;
use hpp_schema::DType;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};

/// Bytes of one sample.
const PIECE: u64 = 4096;
/// Maximum number of samples of one weight.
const PIECES: u64 = 16;

/// Whether a float32 weight seems to hold widened 16-bit numbers: all sampled numbers are exact in bfloat16, or all are
/// exact in float16, and not all are 0. Samples of only zeros are not evidence, because a hole in a sparse file reads
/// as zeros. False for a weight that cannot be read.
pub fn looks_widened(model: &Model, name: &str) -> bool {
    let tensor = model.graph_proto().initializer.iter().find(|tensor| tensor.name() == name);
    let float32 = tensor.filter(|tensor| tensor.data_type() == DType::Float32.to_onnx());
    float32.and_then(|tensor| samples(model, tensor)).is_some_and(|bytes| are_widened(&bytes))
}

fn are_widened(bytes: &[u8]) -> bool {
    let numbers = || bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let is_bfloat16 = |bits: u32| bits & 0xffff == 0;
    let is_float16 = |bits: u32| f16::from_f32(f32::from_bits(bits)).to_f32().to_bits() == bits;
    numbers().any(|bits| bits != 0) && (numbers().all(is_bfloat16) || numbers().all(is_float16))
}

/// Samples of a tensor with elements of 4 bytes, from its first to its last element; `None` if they cannot be read.
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

/// Evenly spaced samples of `bytes` bytes, as `(offset, length)`; one sample of everything if that is not more.
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
        let looks = |numbers: &[f32]| are_widened(&numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
        // The first is bfloat16 and not float16, the second float16 and not bfloat16.
        let (wide, fine) = (1e30f32.to_bits() & 0xffff_0000, 1.0 + 1.0 / 1024.0);
        assert!(looks(&[f32::from_bits(wide), 1.0, 0.0]) && looks(&[fine, -1.0, 0.0]));
        assert!(!looks(&[f32::from_bits(wide), fine]));
        assert!(!looks(&[1.0, 0.1]));
        assert!(!looks(&[0.0, 0.0]) && !looks(&[]));
    }
}
