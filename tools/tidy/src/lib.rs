//! Reads the workspace for the tests that keep its rules. The rules themselves are in `tests/`; it knows nothing of ONNX.

mod metadata;
mod tree;

pub use metadata::{Dependency, Package, packages};
pub use tree::{SourceFile, root, source_files};
