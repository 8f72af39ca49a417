//! The contents of synthetic inputs: the same numbers for the same request, in any element type.

use crate::error::EngineError;
use crate::tensor::{byte_len, elements};
use half::{bf16, f16};
use hpp_schema::DType;
use hpp_schema::probe::{Feed, Fill};
use std::ops::Range;

/// Elements written at once, so that a large cache needs no second copy in memory.
const PIECE: u64 = 1 << 18;

/// Hands the bytes of an input to `write`, piece by piece, each with its offset. Zeros are not written: buffers begin as zeros.
pub(super) fn fill(
    feed: &Feed,
    mut write: impl FnMut(u64, &[u8]) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    let wrong = |why: String| EngineError::WrongInput { name: feed.name.clone(), why };
    let count = elements(&feed.shape).ok_or_else(|| wrong(format!("{:?} has no size", feed.shape)))?;
    if let Fill::Values { values } = &feed.fill
        && values.len() as u64 != count
    {
        return Err(wrong(format!("{} numbers for {:?}", values.len(), feed.shape)));
    }
    if matches!(feed.fill, Fill::Integers { below: 0, .. }) {
        return Err(wrong("no whole number is below 0".into()));
    }
    if matches!(feed.fill, Fill::Zeros) {
        return Ok(());
    }
    let last = feed.shape.last().copied().unwrap_or(1).max(1);
    let mut piece = Vec::new();
    for span in spans(feed, count) {
        for start in span.clone().step_by(PIECE as usize) {
            piece.clear();
            for index in start..span.end.min(start + PIECE) {
                if !encode(feed.dtype, number(&feed.fill, index, last), &mut piece) {
                    return Err(wrong(format!("{} can only be filled with zeros", feed.dtype)));
                }
            }
            write(byte_len(feed.dtype, &[start]).unwrap_or(0), &piece)?;
        }
    }
    Ok(())
}

/// Ranges of elements that are not all zero, by flat index. A missing axis counts as filled.
fn spans(feed: &Feed, count: u64) -> Vec<Range<u64>> {
    let (step, filled) = match feed.fill {
        Fill::PartlyNormal { axis, filled, .. } if axis < feed.shape.len() => {
            let row: u64 = feed.shape[axis + 1..].iter().product();
            (feed.shape[axis] * row, filled.min(feed.shape[axis]) * row)
        }
        _ => (count, count),
    };
    (0..count).step_by(step.max(1) as usize).map(|start| start..start + filled).collect()
}

/// An element before it has a type.
#[derive(Clone, Copy)]
enum Number {
    Whole(i64),
    Real(f32),
}

/// The element at a flat index of a tensor whose last axis has `last` elements.
fn number(fill: &Fill, index: u64, last: u64) -> Number {
    match fill {
        Fill::Zeros => Number::Whole(0),
        Fill::Ones => Number::Whole(1),
        Fill::Positions { start } => Number::Whole(start.wrapping_add((index % last) as i64)),
        Fill::Integers { below, seed } => Number::Whole((chance(*seed, index) % below) as i64),
        Fill::Normal { seed } | Fill::PartlyNormal { seed, .. } => Number::Real(normal(*seed, index)),
        Fill::Values { values } => Number::Whole(values[index as usize]),
    }
}

/// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), entered at any index.
fn chance(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Box and Muller's transform of two uniform numbers.
fn normal(seed: u64, index: u64) -> f32 {
    let uniform = |bits: u64| ((bits >> 40) as f32 + 0.5) / (1u64 << 24) as f32;
    let bits = chance(seed, index);
    let (radius, angle) = (uniform(bits), uniform(bits << 24));
    (-2.0 * radius.ln()).sqrt() * (std::f32::consts::TAU * angle).cos()
}

/// Appends an element; false for types that are not made of whole bytes.
fn encode(dtype: DType, number: Number, out: &mut Vec<u8>) -> bool {
    let (whole, real) = match number {
        Number::Whole(n) => (n, n as f32),
        Number::Real(x) => (x as i64, x),
    };
    match dtype {
        DType::Float32 => out.extend(real.to_le_bytes()),
        DType::Float16 => out.extend(f16::from_f32(real).to_le_bytes()),
        DType::Bfloat16 => out.extend(bf16::from_f32(real).to_le_bytes()),
        DType::Float64 => out.extend(f64::from(real).to_le_bytes()),
        DType::Int64 | DType::Uint64 => out.extend(whole.to_le_bytes()),
        DType::Int32 | DType::Uint32 => out.extend((whole as i32).to_le_bytes()),
        DType::Int16 | DType::Uint16 => out.extend((whole as i16).to_le_bytes()),
        DType::Int8 | DType::Uint8 => out.push(whole as u8),
        DType::Bool => out.push(u8::from(whole != 0)),
        _ => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(dtype: DType, shape: &[u64], fill_with: Fill) -> Result<Vec<u8>, String> {
        let feed = Feed { name: "x".into(), dtype, shape: shape.to_vec(), fill: fill_with };
        let mut all = Vec::new();
        let write = |offset, piece: &[u8]| {
            assert_eq!(offset, all.len() as u64, "pieces follow each other");
            all.extend_from_slice(piece);
            Ok(())
        };
        fill(&feed, write).map_err(|error| error.to_string())?;
        Ok(all)
    }

    fn longs(shape: &[u64], fill: Fill) -> Vec<i64> {
        let bytes = bytes(DType::Int64, shape, fill).unwrap();
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    #[test]
    fn positions_count_along_the_last_axis() {
        assert_eq!(longs(&[2, 3], Fill::Positions { start: 7 }), [7, 8, 9, 7, 8, 9]);
        assert_eq!(longs(&[], Fill::Ones), [1]);
        assert_eq!(longs(&[0, 3], Fill::Ones), [0i64; 0]);
        assert_eq!(longs(&[2], Fill::Values { values: vec![-3, 5] }), [-3, 5]);
    }

    #[test]
    fn chance_is_the_same_each_time_and_spread() {
        let numbers = longs(&[3, 1000], Fill::Integers { below: 10, seed: 4 });
        assert_eq!(numbers, longs(&[3, 1000], Fill::Integers { below: 10, seed: 4 }));
        assert_ne!(numbers, longs(&[3, 1000], Fill::Integers { below: 10, seed: 5 }));
        for digit in 0..10 {
            let count = numbers.iter().filter(|n| **n == digit).count();
            assert!((200..400).contains(&count), "{digit}: {count}");
        }
    }

    #[test]
    fn normal_numbers_have_mean_0_and_deviation_1() {
        let bytes = bytes(DType::Float32, &[300_000], Fill::Normal { seed: 1 }).unwrap();
        let x: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        let mean = x.iter().sum::<f32>() / x.len() as f32;
        let deviation = (x.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / x.len() as f32).sqrt();
        assert!(x.len() == 300_000 && x.iter().all(|x| x.is_finite()));
        assert!(mean.abs() < 0.01 && (deviation - 1.0).abs() < 0.01, "{mean} {deviation}");
    }

    #[test]
    fn only_what_is_filled_is_written() {
        let write = |shape: &[u64], axis, filled| {
            let fill_with = Fill::PartlyNormal { seed: 1, axis, filled };
            let feed = Feed { name: "x".into(), dtype: DType::Float32, shape: shape.to_vec(), fill: fill_with };
            let mut written = Vec::new();
            let write = |offset, piece: &[u8]| {
                written.push((offset / 4, piece.len() / 4));
                Ok(())
            };
            fill(&feed, write).map(|()| written).map_err(|error| error.to_string())
        };
        assert_eq!(write(&[2, 8, 3], 1, 5).unwrap(), [(0, 15), (24, 15)]);
        assert_eq!(write(&[2, 8, 3], 1, 9).unwrap(), [(0, 24), (24, 24)], "no more than there is");
        assert_eq!(write(&[2, 8, 3], 1, 0).unwrap(), []);
        assert_eq!(write(&[2, 0, 3], 1, 4).unwrap(), []);
        assert_eq!(write(&[2, 3], 2, 1).unwrap(), [(0, 6)], "an axis that is not there");
        let whole = bytes(DType::Float32, &[1, 4], Fill::Normal { seed: 1 }).unwrap();
        let part = bytes(DType::Float32, &[1, 4], Fill::PartlyNormal { seed: 1, axis: 1, filled: 2 }).unwrap();
        assert_eq!(part, whole[..8], "the same numbers in the same places");
    }

    #[test]
    fn every_whole_byte_type_is_filled_and_others_are_refused() {
        for (dtype, one) in [
            (DType::Float16, vec![0x00, 0x3c]),
            (DType::Bfloat16, vec![0x80, 0x3f]),
            (DType::Float64, 1f64.to_le_bytes().to_vec()),
            (DType::Int32, vec![1, 0, 0, 0]),
            (DType::Uint8, vec![1]),
            (DType::Bool, vec![1]),
        ] {
            assert_eq!(bytes(dtype, &[1], Fill::Ones).unwrap(), one, "{dtype}");
        }
        assert!(bytes(DType::Int4, &[2], Fill::Ones).unwrap_err().contains("only be filled with zeros"));
        assert!(bytes(DType::Int4, &[2], Fill::Zeros).unwrap().is_empty());
    }

    #[test]
    fn contents_that_do_not_fit_are_refused() {
        assert!(bytes(DType::Int64, &[3], Fill::Values { values: vec![1] }).unwrap_err().contains("1 numbers for [3]"));
        assert!(bytes(DType::Int64, &[3], Fill::Integers { below: 0, seed: 0 }).is_err());
        assert!(bytes(DType::Int64, &[u64::MAX, 2], Fill::Ones).unwrap_err().contains("no size"));
    }
}
