//! `schemas/onnx.proto` equals the schema of PyPI's `onnx` package.

use prost::Message;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
fn the_schema_is_the_one_in_pypis_onnx() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let descriptors = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(descriptors.path(), super::generated::descriptors().encode_to_vec()).unwrap();
    for python in pythons(&root) {
        let script = root.join("schemas/check_onnx_proto.py");
        let Ok(run) = Command::new(&python).arg(script).arg(descriptors.path()).output() else { continue };
        let said = String::from_utf8_lossy(&run.stdout);
        match run.status.code() {
            Some(0) => return assert!(said.contains("facts agree"), "{said}"),
            Some(3) => continue,
            _ => panic!("{}: {said}{}", python.display(), String::from_utf8_lossy(&run.stderr)),
        }
    }
    assert!(std::env::var_os("CI").is_none(), "CI needs a Python with the onnx package");
    eprintln!("SKIPPED: no Python with the onnx package (set HPP_PYTHON, or run `make test`, which fetches one)");
}

fn pythons(root: &Path) -> Vec<PathBuf> {
    let named = std::env::var_os("HPP_PYTHON").map(PathBuf::from);
    named.into_iter().chain([root.join(".deps/venv/bin/python"), "python3".into()]).collect()
}
