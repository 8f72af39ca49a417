//! Rounded weights: every group equals a direct computation, other weights are unchanged, and files are complete.

use crate::build::{external, header, holding, save};
use half::{bf16, f16};
use hpp_onnx::{Model, RoundError, Rounding, proto::*, round};
use hpp_schema::DType;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
    match dtype {
        DType::Float32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        DType::Float16 => values.iter().flat_map(|v| f16::from_f32(*v).to_le_bytes()).collect(),
        _ => values.iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect(),
    }
}

fn decode(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        DType::Float32 => bytes.chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect(),
        DType::Float16 => bytes.chunks(2).map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
        _ => bytes.chunks(2).map(|b| bf16::from_le_bytes(b.try_into().unwrap()).to_f32()).collect(),
    }
}

/// `[outer, axis, inner]`, element by element: each value rounded, and how far the other level may be where it lies
/// between two.
fn expected(values: &[f32], [outer, axis, inner]: [usize; 3], rounding: Rounding) -> Vec<(f32, f32)> {
    let levels = f64::from((1 << (rounding.bits - 1)) - 1);
    let mut rounded: Vec<(f32, f32)> = values.iter().map(|value| (*value, 0.0)).collect();
    for o in 0..outer {
        for i in 0..inner {
            for group in (0..axis).collect::<Vec<_>>().chunks(rounding.group) {
                let index_of = |a: &usize| (o * axis + a) * inner + i;
                let largest = group.iter().map(|a| f64::from(values[index_of(a)].abs())).fold(0.0, f64::max);
                for a in group.iter().filter(|_| largest > 0.0) {
                    let scale = largest / levels;
                    let exact = f64::from(values[index_of(a)]) / scale;
                    let tie = ((exact - exact.floor()) - 0.5).abs() < 1e-4;
                    rounded[index_of(a)] =
                        ((exact.round_ties_even() * scale) as f32, if tie { scale as f32 } else { 0.0 });
                }
            }
        }
    }
    rounded
}

/// A model over one weight file with these tensors, all external.
fn model(dir: &Path, tensors: &[(&str, DType, &[i64], Vec<u8>)]) -> Model {
    let mut file = Vec::new();
    let mut initializers = Vec::new();
    for (name, dtype, dims, bytes) in tensors {
        let (offset, length) = (file.len().to_string(), bytes.len().to_string());
        let entries = [("location", "w.data"), ("offset", offset.as_str()), ("length", length.as_str())];
        initializers.push(external(name, *dtype, dims, &entries));
        file.extend_from_slice(bytes);
    }
    fs::write(dir.join("w.data"), file).unwrap();
    Model::open(&save(dir, &holding(initializers))).unwrap()
}

fn bytes_of(tensor: &TensorProto, dir: &Path) -> Vec<u8> {
    let entry = |key: &str| tensor.external_data.iter().find(|e| e.key() == key).unwrap().value();
    let (offset, length): (usize, usize) = (entry("offset").parse().unwrap(), entry("length").parse().unwrap());
    fs::read(dir.join(entry("location"))).unwrap()[offset..offset + length].to_vec()
}

fn axes(named: &[(&str, usize)]) -> BTreeMap<String, usize> {
    named.iter().map(|(name, axis)| ((*name).to_owned(), *axis)).collect()
}

/// Whether these are the expected values but for rounding in another order of operations: `slack`, and at a tie a whole
/// step.
fn close(have: &[f32], want: &[(f32, f32)], slack: f32) -> bool {
    have.len() == want.len() && have.iter().zip(want).all(|(have, (value, step))| (have - value).abs() <= step + slack)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn every_group_is_rounded_to_its_own_scale(
        values in proptest::collection::vec(-8.0..8.0f32, 2 * 9 * 5),
        axis in 0usize..3,
        bits in 2u32..9,
        group in 1usize..12,
    ) {
        let dims = [2usize, 9, 5];
        let split = [dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product()];
        let rounding = Rounding { bits, group };
        for (dtype, slack) in [(DType::Float32, 1e-5), (DType::Float16, 8.0 / 1024.0), (DType::Bfloat16, 8.0 / 128.0)] {
            let values = decode(dtype, &encode(dtype, &values));
            let home = tempfile::tempdir().unwrap();
            let model = model(home.path(), &[("w", dtype, &[2, 9, 5], encode(dtype, &values))]);
            let mut proto = model.proto().clone();
            let out = tempfile::tempdir().unwrap();
            round(&mut proto, model.weights(), &axes(&[("w", axis)]), rounding, out.path(), "r.bin").unwrap();
            let have = decode(dtype, &bytes_of(&proto.graph.as_ref().unwrap().initializer[0], out.path()));
            let want = expected(&values, split, rounding);
            prop_assert!(close(&have, &want, slack), "{have:?}\n{want:?}");
        }
    }
}

#[test]
fn other_weights_are_copied_and_files_are_whole() {
    let home = tempfile::tempdir().unwrap();
    let values: Vec<f32> = (0..64).map(|i| (i as f32 * 1.7).sin()).collect();
    let int8: Vec<u8> = (0..100).collect();
    let w = encode(DType::Float32, &values);
    let model = model(
        home.path(),
        &[
            ("norm", DType::Float32, &[64], w.clone()),
            ("q", DType::Int8, &[100], int8.clone()),
            ("w", DType::Float32, &[2, 32], w.clone()),
        ],
    );
    let out = tempfile::tempdir().unwrap();
    let mut proto = model.proto().clone();
    let rounding = Rounding { bits: 4, group: 32 };
    round(&mut proto, model.weights(), &axes(&[("w", 1), ("absent", 0)]), rounding, out.path(), "r.bin").unwrap();
    let tensors = &proto.graph.as_ref().unwrap().initializer;
    assert_eq!(bytes_of(&tensors[0], out.path()), w);
    assert_eq!(bytes_of(&tensors[1], out.path()), int8);
    let rounded = decode(DType::Float32, &bytes_of(&tensors[2], out.path()));
    assert!(close(&rounded, &expected(&values, [2, 32, 1], rounding), 1e-6));
    let mut levels: Vec<u32> = rounded[..32].iter().map(|v| v.to_bits()).collect();
    levels.sort_unstable();
    levels.dedup();
    assert!(levels.len() <= 15 && levels.len() > 4, "four bits have 15 levels: {}", levels.len());
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "no .partial is left");
    assert_eq!(fs::read(home.path().join("w.data")).unwrap().len(), 2 * 256 + 100, "the original is as it was");
}

#[test]
fn embedded_weights_are_rounded_where_they_are() {
    let values: Vec<f32> = (0..12).map(|i| (i as f32).sin()).collect();
    let typed = TensorProto { float_data: values.clone(), ..header("w", DType::Float32, &[4, 3]) };
    let home = tempfile::tempdir().unwrap();
    let model = Model::open(&save(home.path(), &holding(vec![typed]))).unwrap();
    let mut proto = model.proto().clone();
    let rounding = Rounding { bits: 4, group: 2 };
    round(&mut proto, model.weights(), &axes(&[("w", 0)]), rounding, home.path(), "r.bin").unwrap();
    let tensor = &proto.graph.as_ref().unwrap().initializer[0];
    assert!(tensor.float_data.is_empty());
    let have = decode(DType::Float32, tensor.raw_data());
    assert!(close(&have, &expected(&values, [1, 4, 3], rounding), 1e-6), "{have:?}");
}

#[test]
fn zeros_and_nonfinite_values_stay() {
    let values = [0.0f32, 0.0, f32::INFINITY, 0.7, f32::NAN, 0.7, 1e-42, 0.0];
    let home = tempfile::tempdir().unwrap();
    let model = model(home.path(), &[("w", DType::Float32, &[4, 2], encode(DType::Float32, &values))]);
    let mut proto = model.proto().clone();
    let rounding = Rounding { bits: 8, group: 2 };
    round(&mut proto, model.weights(), &axes(&[("w", 1)]), rounding, home.path(), "r.bin").unwrap();
    let bytes = bytes_of(&proto.graph.as_ref().unwrap().initializer[0], home.path());
    assert_eq!(bytes, encode(DType::Float32, &values));
}

#[test]
fn an_unsuitable_weight_changes_nothing() {
    let home = tempfile::tempdir().unwrap();
    let model = model(home.path(), &[("q", DType::Int8, &[4], vec![1, 2, 3, 4])]);
    let out = tempfile::tempdir().unwrap();
    let refuse = |named: &[(&str, usize)], rounding, location: &str| -> RoundError {
        let mut proto = model.proto().clone();
        let error = round(&mut proto, model.weights(), &axes(named), rounding, out.path(), location).unwrap_err();
        assert_eq!(&proto, model.proto());
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
        error
    };
    let rounding = Rounding { bits: 4, group: 32 };
    assert!(refuse(&[("q", 0)], rounding, "r.bin").to_string().contains("int8"));
    assert!(matches!(refuse(&[], Rounding { bits: 1, group: 32 }, "r.bin"), RoundError::Bits(1)));
    assert!(matches!(refuse(&[], Rounding { bits: 4, group: 0 }, "r.bin"), RoundError::Group));
    assert!(matches!(refuse(&[], rounding, "no/such/r.bin"), RoundError::Write(_)));
    fs::write(home.path().join("w.data"), b"12").unwrap();
    assert!(matches!(refuse(&[], rounding, "r.bin"), RoundError::Read(_)));
}
