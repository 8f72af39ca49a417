//! Finds models: the committed fixtures, and those below the directory in `HPP_MODELS`.

use std::path::{Path, PathBuf};

/// All `.onnx` files.
pub fn all() -> Vec<PathBuf> {
    let mut found = vec![];
    below(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/models")), &mut found);
    if let Some(more) = std::env::var_os("HPP_MODELS") {
        below(Path::new(&more), &mut found);
    }
    found.sort();
    assert!(!found.is_empty(), "the fixtures are missing");
    found
}

fn below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            below(&path, found);
        } else if path.extension().is_some_and(|e| e == "onnx") {
            found.push(path);
        }
    }
}
