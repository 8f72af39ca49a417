//! Hostile files: every error names the problem.

use crate::build::{self, external, holding, refusal, save};
use hpp_onnx::{Model, proto::*};
use hpp_schema::DType;
use prost::Message;
use std::fs;

/// A directory with `model.data` (64 bytes), a sub-directory, and a model in it.
fn model_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("m/sub")).unwrap();
    for name in ["m/model.data", "m/sub/more.data", "outside.data"] {
        fs::write(dir.path().join(name), [7u8; 64]).unwrap();
    }
    dir
}

/// Opens a model in the directory with one external weight of 16 floats.
fn opened(dir: &tempfile::TempDir, entries: &[(&str, &str)]) -> Result<Model, String> {
    let model = holding(vec![external("w", DType::Float32, &[16], entries)]);
    Model::open(&save(&dir.path().join("m"), &model)).map_err(|e| build::chain(&e))
}

#[test]
fn valid_locations() {
    let dir = model_dir();
    let fine: &[&[(&str, &str)]] = &[
        &[("location", "model.data")],
        &[("location", "model.data"), ("offset", "0"), ("length", "64")],
        &[("location", "sub/more.data"), ("length", "64")],
        &[("location", "./sub/./more.data"), ("checksum", "c0ffee")],
    ];
    for entries in fine {
        let model = opened(&dir, entries).unwrap_or_else(|e| panic!("{entries:?}: {e}"));
        assert_eq!(model.weights().files.len(), 1);
    }
}

#[test]
fn invalid_locations() {
    let dir = model_dir();
    let hostile: &[(&[(&str, &str)], &str)] = &[
        (&[("location", "../outside.data")], "contains \"..\""),
        (&[("location", "sub/../../outside.data")], "contains \"..\""),
        (&[("location", "sub\\..\\..\\outside.data")], "contains \"..\""),
        (&[("location", "/etc/passwd")], "is absolute"),
        (&[("location", "C:\\secret")], "is absolute"),
        (&[("location", "\\\\server\\share")], "is absolute"),
        (&[("location", "a\0b")], "zero byte"),
        (&[("location", ".")], "names no file"),
        (&[("location", "sub")], "not a regular file"),
        (&[("location", "absent.data")], "is missing"),
        (&[("location", "*/_ORT_MEM_ADDR_/*"), ("offset", "4096")], "is missing"),
        (&[], "names no location"),
        (&[("location", "model.data"), ("offset", "1")], "at offset 1"),
        (&[("location", "model.data"), ("offset", "64")], "has 64 bytes at offset 64"),
        (&[("location", "model.data"), ("offset", "18446744073709551615")], "has 64 bytes"),
        (&[("location", "model.data"), ("offset", "18446744073709551616")], "not a number of bytes"),
        (&[("location", "model.data"), ("offset", "-1")], "not a number of bytes"),
        (&[("location", "model.data"), ("length", "63")], "63 external bytes"),
        (&[("location", "model.data"), ("length", "128")], "128 external bytes"),
        (&[("location", "model.data"), ("key", "value")], "key \"key\""),
    ];
    for (entries, expected) in hostile {
        let error = opened(&dir, entries).expect_err(&format!("{entries:?}"));
        assert!(error.contains(expected) && error.contains("\"w\""), "{entries:?}: {error}");
    }
}

#[cfg(unix)]
#[test]
fn links_may_not_lead_outside_but_a_linked_model_may_live_elsewhere() {
    use std::os::unix::fs::symlink;
    let dir = model_dir();
    symlink(dir.path().join("outside.data"), dir.path().join("m/link.data")).unwrap();
    let error = opened(&dir, &[("location", "link.data")]).unwrap_err();
    assert!(error.contains("symbolic link"), "{error}");
    symlink(dir.path(), dir.path().join("m/up")).unwrap();
    let error = opened(&dir, &[("location", "up/outside.data")]).unwrap_err();
    assert!(error.contains("symbolic link"), "{error}");

    // A download cache: links in one directory, files in another.
    let cache = tempfile::tempdir().unwrap();
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshot"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(blobs.join("data-blob"), [0u8; 64]).unwrap();
    let model = holding(vec![external("w", DType::Float32, &[16], &[("location", "model.data")])]);
    fs::rename(save(&blobs, &model), blobs.join("model-blob")).unwrap();
    symlink("../blobs/model-blob", snapshot.join("model.onnx")).unwrap();
    symlink("../blobs/data-blob", snapshot.join("model.data")).unwrap();
    let model = Model::open(&snapshot).unwrap();
    assert_eq!(model.weights().files[0].location, "model.data");
    assert!(model.weights().files[0].path.ends_with("data-blob"));
}

#[test]
fn offsets_beyond_four_gigabytes() {
    let dir = model_dir();
    let path = dir.path().join("m/model.data");
    fs::File::options().write(true).open(&path).unwrap().set_len((5 << 30) + 64).unwrap();
    let offset = (5u64 << 30).to_string();
    let model = opened(&dir, &[("location", "model.data"), ("offset", &offset)]).unwrap();
    assert_eq!(model.weights().files[0].bytes, (5 << 30) + 64);
    let error = opened(&dir, &[("location", "model.data"), ("offset", &(offset + "0"))]).unwrap_err();
    assert!(error.contains("has 5368709184 bytes, but the weights in it take 53687091264"), "{error}");
}

#[test]
fn many_external_files() {
    let dir = tempfile::tempdir().unwrap();
    let weights = (0..3000).map(|i| {
        fs::write(dir.path().join(format!("{i}.bin")), [1, 0, 0, 0, 0, 0, 0, 0]).unwrap();
        external(&format!("w{i}"), DType::Int64, &[1], &[("location", &format!("{i}.bin"))])
    });
    let model = Model::open(&save(dir.path(), &holding(weights.collect()))).unwrap();
    let graph = model.graph().unwrap();
    assert_eq!(model.weights().files.len(), 3000);
    let ints = graph.value_ids().filter_map(|v| graph.weight(v)?.ints.clone());
    assert!(ints.into_iter().all(|ints| ints == [1]), "small integers are read from their files");
}

#[test]
fn newer_and_unknown() {
    let mut newer = holding(vec![]);
    newer.ir_version = Some(hpp_onnx::NEWEST_IR + 1);
    assert!(refusal(&newer).contains("IR version 15; this build reads up to 14"), "{}", refusal(&newer));
    newer.ir_version = Some(0);
    assert!(refusal(&newer).contains("no IR version or an impossible one"));

    // NodeProto field 77 inside a body: {77: varint 1}.
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = holding(vec![]).encode_to_vec();
    bytes.extend([0x3a, 0x05, 0x0a, 0x03, 0xe8, 0x04, 0x01]);
    fs::write(dir.path().join("model.onnx"), bytes).unwrap();
    let error = build::chain(&Model::open(dir.path()).unwrap_err());
    assert!(error.contains("NodeProto has a field number 77"), "{error}");
}

#[test]
fn a_newer_ir_is_the_reason_given_for_unknown_fields() {
    let dir = tempfile::tempdir().unwrap();
    let mut newer = holding(vec![]);
    newer.ir_version = Some(21);
    let mut bytes = newer.encode_to_vec();
    bytes.extend([0xe8, 0x04, 0x01]);
    fs::write(dir.path().join("model.onnx"), bytes).unwrap();
    let error = build::chain(&Model::open(dir.path()).unwrap_err());
    assert!(error.contains("IR version 21"), "{error}");
}

#[test]
fn what_is_not_a_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.onnx");
    let cases: [(&[u8], &str); 5] = [
        (b"", "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "ONNX model"),
        (b"<!DOCTYPE html>", "ONNX model"),
        (&[0u8; 4096], "malformed"),
        (&[0x08, 0x0a], "holds no graph"),
    ];
    for (bytes, expected) in cases {
        fs::write(&path, bytes).unwrap();
        let error = build::chain(&Model::open(&path).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
    let no_opset = ModelProto { opset_import: vec![], ..holding(vec![]) };
    assert!(refusal(&no_opset).contains("names no operator set"));
    let text = ModelProto { doc_string: Some("x".into()), ..holding(vec![]) }.encode_to_vec();
    let broken: Vec<u8> = text.iter().map(|b| if *b == b'x' { 0xff } else { *b }).collect();
    fs::write(&path, broken).unwrap();
    assert!(build::chain(&Model::open(&path).unwrap_err()).contains("UTF-8"));
}
