//! Reads the manifests and source files of the workspace for the tests in `tests/`, which enforce the project's rules.

mod metadata;
mod tree;

pub use metadata::{Dependency, Package, packages};
pub use tree::{SourceFile, root, source_files};
