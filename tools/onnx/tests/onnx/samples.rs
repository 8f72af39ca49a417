//! Sampling of weights: embedded and external, large and small, with and without holes.

use crate::build::{external, header, holding, save};
use hpp_onnx::{Model, looks_widened, proto::TensorProto};
use hpp_schema::DType;
use std::fs::{self, File};
use std::path::Path;

/// A model with a weight `w` of `bytes` bytes at offset 4 of `w.data`.
fn model(dir: &Path, bytes: u64) -> Model {
    let (dims, length) = ([bytes as i64 / 4], bytes.to_string());
    let entries = [("location", "w.data"), ("offset", "4"), ("length", length.as_str())];
    Model::open(&save(dir, &holding(vec![external("w", DType::Float32, &dims, &entries)]))).unwrap()
}

#[test]
fn external_weights_are_sampled_in_many_places() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("w.data");
    let mut numbers = vec![1.5f32; 1 << 20];
    let write = |numbers: &[f32]| fs::write(&file, numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>());
    // Bytes before the weight are not sampled.
    numbers[0] = 0.1;
    write(&numbers).unwrap();
    let model = model(dir.path(), (4 << 20) - 4);
    assert!(looks_widened(&model, "w"));
    assert!(!looks_widened(&model, "nothing"));
    for at in [1, (1 << 20) - 1] {
        numbers[at] = 0.1;
        write(&numbers).unwrap();
        assert!(!looks_widened(&model, "w"), "{at}");
        numbers[at] = 1.5;
    }
    // A truncated or missing file.
    write(&numbers[..1 << 19]).unwrap();
    assert!(!looks_widened(&model, "w"));
    fs::remove_file(&file).unwrap();
    assert!(!looks_widened(&model, "w"));
}

#[test]
fn a_hole_is_no_evidence() {
    let dir = tempfile::tempdir().unwrap();
    File::create(dir.path().join("w.data")).unwrap().set_len(1 << 30).unwrap();
    assert!(!looks_widened(&model(dir.path(), (1 << 30) - 4), "w"));
}

#[test]
fn embedded_weights_are_sampled_in_any_encoding() {
    let raw = |number: f32| Some(number.to_le_bytes().repeat(8).into());
    let weights = vec![
        TensorProto { raw_data: raw(1.5), ..header("narrow", DType::Float32, &[8]) },
        TensorProto { raw_data: raw(0.1), ..header("wide", DType::Float32, &[8]) },
        TensorProto { float_data: vec![1.5; 8], ..header("list", DType::Float32, &[8]) },
        TensorProto { raw_data: raw(1.5), ..header("integers", DType::Int32, &[8]) },
    ];
    let dir = tempfile::tempdir().unwrap();
    let model = Model::open(&save(dir.path(), &holding(weights))).unwrap();
    let names = ["narrow", "wide", "list", "integers"];
    assert_eq!(names.map(|name| looks_widened(&model, name)), [true, false, true, false]);
}
