//! Truncated and bit-flipped models: reading returns an error or a model, and never panics, hangs or exhausts memory.

use crate::models;
use hpp_onnx::Model;
use hpp_onnx::proto::ModelProto;
use proptest::prelude::*;
use prost::Message;
use std::fs;
use std::path::{Path, PathBuf};

/// Models with small or external weights, so that most bytes of the file are structure.
fn structural() -> Vec<(PathBuf, Vec<u8>)> {
    let read = models::all().into_iter().map(|path| (fs::read(&path).unwrap(), path));
    let small: Vec<_> = read.filter(|(bytes, _)| bytes.len() < 400_000).map(|(bytes, path)| (path, bytes)).collect();
    assert!(small.len() > 3);
    small
}

/// Opens damaged bytes in the directory of the original model, next to its weights.
fn survives(original: &Path, bytes: &[u8]) -> bool {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(original.parent().unwrap()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e != "onnx") && path.to_string_lossy().contains(".onnx") {
            let beside = dir.path().join(path.file_name().unwrap());
            fs::hard_link(&path, &beside).or_else(|_| fs::copy(&path, &beside).map(drop)).unwrap();
        }
    }
    let path = dir.path().join("model.onnx");
    fs::write(&path, bytes).unwrap();
    Model::open(&path).and_then(|model| model.graph()).is_ok()
}

/// The end of the required part of a file. Optional parts follow: all operator sets but one, metadata, functions.
fn needed(bytes: &[u8]) -> usize {
    let whole = ModelProto::decode(bytes).unwrap();
    let rest = ModelProto {
        opset_import: whole.opset_import,
        metadata_props: whole.metadata_props,
        functions: whole.functions,
        configuration: whole.configuration,
        ..ModelProto::default()
    };
    bytes.len() - rest.encoded_len()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn truncated(which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>()) {
        let models = structural();
        let (path, bytes) = which.get(&models);
        let at = at.index(bytes.len());
        let read = survives(path, &bytes[..at]);
        prop_assert!(!read || at >= needed(bytes), "{} bytes of {} were read as a model", at, path.display());
    }

    #[test]
    fn bits_flipped(
        which in any::<prop::sample::Index>(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8u8), 1..12),
    ) {
        let models = structural();
        let (path, bytes) = which.get(&models);
        let mut bytes = bytes.clone();
        for (at, bit) in &flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        survives(path, &bytes);
    }

    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.onnx");
        fs::write(&path, &bytes).unwrap();
        let _ = Model::open(&path).and_then(|model| model.graph());
    }
}

#[test]
fn undamaged_models_open() {
    for (path, bytes) in structural() {
        assert!(survives(&path, &bytes), "{}", path.display());
        assert!(!survives(&path, &bytes[..bytes.len() / 2]), "{}", path.display());
    }
}

#[test]
fn decoding_and_encoding_preserve_a_model() {
    for path in models::all() {
        let bytes = fs::read(&path).unwrap();
        let decoded = ModelProto::decode(bytes.as_slice()).unwrap();
        let again = ModelProto::decode(decoded.encode_to_vec().as_slice()).unwrap();
        assert!(decoded == again, "{}", path.display());
        assert_eq!(decoded.encoded_len(), bytes.len(), "{}", path.display());
    }
}
