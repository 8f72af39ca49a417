//! Functions of plans and libraries that need no engine.

use crate::failure::Failure;
use hpp_generate::PlanFile;
use pyo3::prelude::*;
use std::path::PathBuf;

/// Reads a plan: its file, what is in it as JSON, and the bytes of each partition's weights, which JSON has for people.
#[pyfunction]
pub fn read_plan(py: Python<'_>, path: PathBuf) -> PyResult<(PathBuf, String, Vec<u64>)> {
    let read = || -> Result<(PathBuf, String, Vec<u64>), Failure> {
        let file = PlanFile::open(&path)?;
        let json = serde_json::to_string(&file.plan).map_err(|error| Failure::new(&error, None))?;
        let weights = file.plan.partitions.iter().map(|partition| partition.bytes.weights.0).collect();
        Ok((file.path, json, weights))
    };
    Ok(py.detach(read)?)
}

/// The ONNX Runtime library in the folder of a package `onnxruntime`; `None` if it holds none.
#[pyfunction]
pub fn onnxruntime_library(package: PathBuf) -> Option<PathBuf> {
    hpp_backend::discover::package_library(&package).ok()
}
