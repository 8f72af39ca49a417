//! `hpp._native`: what the Python package `hpp` needs of the runtime.
//!
//! [`engine`] and [`generation`] are the classes that Python sees; `thread` runs an engine, which belongs to one thread, and takes jobs through
//! a channel; `load` loads a plan there. Arguments, defaults, NumPy and documentation are the package's (`runtime/python/hpp`); the tools are
//! commands that it runs. Knows no command line and no terminal.

mod engine;
mod failure;
mod generation;
mod job;
mod load;
mod plan;
mod thread;
mod wait;
mod warnings;

/// The module that `hpp` imports.
#[pyo3::pymodule]
mod _native {
    #[pymodule_export]
    use crate::engine::Engine;
    #[pymodule_export]
    use crate::generation::Generation;
    #[pymodule_export]
    use crate::plan::{onnxruntime_library, read_plan};

    /// The version of the runtime.
    #[pymodule_export]
    const VERSION: &str = env!("CARGO_PKG_VERSION");
}
