//! Externalising, packing and resuming: bytes stay equal, and a name never holds half a file.

use crate::build::{self, external, header, holding, open, save, tensor};
use hpp_onnx::{
    Model, PackError, PackProgress, PackStats, RangeReadError, Storage, VirtualFiles, Weights, externalise,
    needs_externalising, pack, proto::*,
};
use hpp_schema::DType;
use std::fs;
use std::path::Path;

/// The bytes of an external tensor.
fn bytes_of(tensor: &TensorProto, dir: &Path) -> Vec<u8> {
    let entry = |key: &str| tensor.external_data.iter().find(|e| e.key() == key).unwrap().value();
    let (offset, length): (usize, usize) = (entry("offset").parse().unwrap(), entry("length").parse().unwrap());
    fs::read(dir.join(entry("location"))).unwrap()[offset..offset + length].to_vec()
}

#[test]
fn embedded_weights_are_moved_once() {
    let raw = tensor("raw", DType::Float32, &[1000]);
    let typed = TensorProto { int32_data: (0..2000).collect(), ..header("typed", DType::Int8, &[2000]) };
    let large = tensor("large", DType::Uint8, &[100_000]);
    let small = tensor("small", DType::Int64, &[2]);
    let source = holding(vec![raw.clone(), small.clone(), typed, large.clone()]);
    let home = tempfile::tempdir().unwrap();
    let model = Model::open(&save(home.path(), &source)).unwrap();
    assert!(needs_externalising(&model));
    let out = tempfile::tempdir().unwrap();
    let moved = externalise(&model, out.path(), "weights.bin").unwrap();
    assert!(!needs_externalising(&moved));
    let tensors = &moved.proto().graph.as_ref().unwrap().initializer;
    assert_eq!(bytes_of(&tensors[0], out.path()), raw.raw_data());
    assert_eq!(tensors[1], small);
    assert_eq!(bytes_of(&tensors[2], out.path()), (0..2000).map(|i| i as u8).collect::<Vec<_>>());
    assert_eq!(bytes_of(&tensors[3], out.path()), large.raw_data());
    assert!(matches!(moved.weights().storage[3], Storage::External(span) if span.offset % 4096 == 0));
    assert_eq!(moved.weights().files[0].bytes, fs::metadata(out.path().join("weights.bin")).unwrap().len());
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1, "no .partial is left");

    let again = tempfile::tempdir().unwrap();
    externalise(&model, again.path(), "weights.bin").unwrap();
    assert_eq!(fs::read(again.path().join("weights.bin")).unwrap(), fs::read(out.path().join("weights.bin")).unwrap());
    let graph = moved.graph().unwrap();
    assert_eq!(graph.weight(graph.find("raw").unwrap()).unwrap().bytes, 4000);
}

#[test]
fn a_large_weight_is_moved_by_range() {
    let bytes = 1u64 << 27;
    let home = tempfile::tempdir().unwrap();
    let path = save(home.path(), &holding(vec![]));
    build::append_huge_initializer(&path, &header("w", DType::Uint8, &[bytes as i64]), bytes);
    let model = Model::open(&path).unwrap();
    let moved = externalise(&model, home.path(), "weights.bin").unwrap();
    assert_eq!(moved.weights().files[0].bytes, bytes);
    assert_eq!(fs::metadata(home.path().join("weights.bin")).unwrap().len(), bytes);
}

#[test]
fn a_failed_move_leaves_nothing() {
    let model = open_here(&holding(vec![tensor("w", DType::Float32, &[1000])]));
    let absent = model.0.path().join("absent");
    let error = build::chain(&externalise(&model.1, &absent, "weights.bin").unwrap_err());
    assert!(error.contains("cannot write") && error.contains("weights.bin"), "{error}");
    assert!(!absent.exists());
}

fn open_here(model: &ModelProto) -> (tempfile::TempDir, Model) {
    let dir = tempfile::tempdir().unwrap();
    let path = save(dir.path(), model);
    (dir, Model::open(&path).unwrap())
}

/// A model with four weights in two files, two of them the same range.
fn scattered(dir: &Path) -> Model {
    let data: Vec<u8> = (0..400_000u32).map(|i| (i * 7 + i / 251) as u8).collect();
    fs::write(dir.join("a.data"), &data).unwrap();
    fs::create_dir_all(dir.join("more")).unwrap();
    fs::write(dir.join("more/b.data"), &data[1000..]).unwrap();
    let external = |name: &str, file: &str, offset: &str, bytes: i64| {
        external(name, DType::Uint8, &[bytes], &[("location", file), ("offset", offset)])
    };
    let weights = vec![
        external("w0", "a.data", "16", 100_000),
        external("w1", "more/b.data", "0", 5_000),
        external("w0 again", "a.data", "16", 100_000),
        external("w2", "a.data", "200000", 200_000),
    ];
    Model::open(&save(dir, &holding(weights))).unwrap()
}

fn packed(model: &Model, out: &Path) -> Result<(Vec<ModelProto>, PackStats, Vec<PackProgress>), PackError> {
    let mut protos = vec![model.proto().clone()];
    let mut seen = vec![];
    let packed = pack(&mut protos, model.weights(), &VirtualFiles::new(), out, "packed.bin", &mut |p| seen.push(p))?;
    Ok((protos, packed, seen))
}

#[test]
fn a_pack_contains_each_needed_range_once() {
    let (home, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = scattered(home.path());
    let (protos, packed, progress) = packed(&model, out.path()).unwrap();
    assert_eq!((packed.copied, packed.resumed), (305_000, 0));
    assert!(packed.bytes < 305_000 + 3 * 4096);
    assert_eq!(progress.last(), Some(&PackProgress { done: 305_000, total: 305_000 }));
    let source = fs::read(home.path().join("a.data")).unwrap();
    let tensors = &protos[0].graph.as_ref().unwrap().initializer;
    assert_eq!(bytes_of(&tensors[0], out.path()), source[16..100_016]);
    assert_eq!(bytes_of(&tensors[1], out.path()), source[1000..6000]);
    assert_eq!(tensors[0].external_data, tensors[2].external_data);
    assert_eq!(bytes_of(&tensors[3], out.path()), source[200_000..400_000]);
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 1);
    let reread = Model::open(&save(out.path(), &protos[0])).unwrap();
    assert_eq!(reread.weights().files.len(), 1);
}

#[test]
fn an_interrupted_pack_resumes_and_repairs_torn_ranges() {
    let (home, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = scattered(home.path());
    packed(&model, out.path()).unwrap();
    let whole = fs::read(out.path().join("packed.bin")).unwrap();

    // The state after a kill: the first weight complete, the second torn, the rest missing.
    let mut torn = whole.clone();
    torn.truncate(102_400 + 3_000);
    torn[102_401] ^= 1;
    fs::remove_file(out.path().join("packed.bin")).unwrap();
    fs::write(out.path().join("packed.bin.partial"), &torn).unwrap();
    let (_, packed, _) = packed(&model, out.path()).unwrap();
    assert_eq!((packed.resumed, packed.copied), (100_000, 205_000));
    assert_eq!(fs::read(out.path().join("packed.bin")).unwrap(), whole);
    assert!(!out.path().join("packed.bin.partial").exists());
}

#[test]
fn an_incomplete_pack_has_no_final_name() {
    let (home, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let model = scattered(home.path());
    let data = home.path().join("a.data");
    fs::File::options().write(true).open(&data).unwrap().set_len(250_000).unwrap();
    let before = model.proto().clone();
    let error = packed(&model, out.path()).unwrap_err();
    assert!(matches!(&error, PackError::Read(RangeReadError { offset: 200_000, length: 200_000, .. })), "{error}");
    assert!(!out.path().join("packed.bin").exists());
    assert_eq!(model.proto(), &before);
}

#[test]
fn only_files_of_the_model_are_packed() {
    let mut protos = vec![holding(vec![external("w", DType::Uint8, &[1], &[("location", "/etc/passwd")])])];
    let out = tempfile::tempdir().unwrap();
    let error = pack(&mut protos, &Weights::default(), &VirtualFiles::new(), out.path(), "p", &mut |_| {}).unwrap_err();
    assert!(error.to_string().contains("not one of the model's weight files"), "{error}");
    assert!(open(&holding(vec![])).is_ok());
}
