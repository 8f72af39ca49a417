//! A matrix product as an ONNX file: `c = a b`, float32, of any sizes. It measures arithmetic and flushes caches between runs.
//!
//! Python's `onnx` wrote `product.onnx` from `make_node("MatMul", ["a", "b"], ["c"])` with shapes `[m, k]`, `[k, n]`, `[m, n]`,
//! opset 17, IR version 8.

use std::io;
use std::path::PathBuf;
use tempfile::TempDir;

/// The file in its own directory, which is removed on drop.
pub(crate) struct ProductFile {
    dir: TempDir,
}

impl ProductFile {
    /// Writes the file.
    pub fn write() -> io::Result<Self> {
        let file = Self { dir: TempDir::with_prefix("hpp-probe-")? };
        std::fs::write(file.path(), include_bytes!("product.onnx"))?;
        Ok(file)
    }

    /// Its directory.
    pub fn dir(&self) -> PathBuf {
        self.dir.path().to_owned()
    }

    /// Its path.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("product.onnx")
    }
}
