//! One matrix product as an ONNX file: `c = a b`, float32, of any sizes. It reads memory between runs and measures arithmetic.
//!
//! `product.onnx` is what onnx writes for
//! `make_node("MatMul", ["a", "b"], ["c"])` with shapes `[m, k]`, `[k, n]`, `[m, n]`, opset 17, IR version 8.

use std::io;
use std::path::PathBuf;
use tempfile::TempDir;

/// The file, in a directory of its own that goes when this is dropped.
pub(super) struct ProductFile {
    dir: TempDir,
}

impl ProductFile {
    /// Writes the file.
    pub fn write() -> io::Result<Self> {
        let file = Self { dir: TempDir::with_prefix("hpp-probe-")? };
        std::fs::write(file.path(), include_bytes!("product.onnx"))?;
        Ok(file)
    }

    /// The directory.
    pub fn folder(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Where it is.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("product.onnx")
    }
}
