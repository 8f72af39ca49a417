//! A matrix product as an ONNX file: `c = a b`, float32, of any sizes. It measures arithmetic and flushes caches between runs.
//!
//! Python's `onnx` wrote `product.onnx` from `make_node("MatMul", ["a", "b"], ["c"])` with shapes `[m, k]`, `[k, n]`, `[m, n]`,
//! opset 17, IR version 8.

use hpp_io::WorkDir;
use std::io;
use std::path::{Path, PathBuf};

/// The file in its own temporary directory.
pub(crate) struct ProductFile {
    dir: WorkDir,
}

impl ProductFile {
    /// Writes the file; removes those that killed processes left.
    pub fn write() -> io::Result<Self> {
        Self::write_in(&std::env::temp_dir())
    }

    fn write_in(parent: &Path) -> io::Result<Self> {
        let file = Self { dir: WorkDir::new(parent, "hpp-probe-")? };
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_killed_processes_are_removed() {
        let parent = tempfile::tempdir().unwrap();
        let left = parent.path().join("hpp-probe-Ab12Cd");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("product.onnx"), "x").unwrap();
        let file = ProductFile::write_in(parent.path()).unwrap();
        assert!(file.path().is_file() && !left.exists());
        drop(file);
        assert_eq!(std::fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
