//! Arithmetic of the host: a float32 matrix product by ONNX Runtime, with the threads that run partitions.

use super::product::ProductFile;
use super::{MeasureError, median};
use crate::console::Console;
use crate::runtime::OrtBackend;
use hpp_engine::PartitionBench;
use hpp_schema::probe::{Case, Feed, Fill, OutputSpec, PartitionProbe};
use hpp_schema::{DType, HostKernels, Provider};

/// Rows and columns of each matrix: large enough that the product takes long, while the matrices take little memory.
const SIZE: u64 = 2048;

/// 1e12 operations per second: `2 n^3` operations (a multiply-add counts two) over the median time.
///
/// The time includes packing the second matrix, about 1 % at this size. A model's weights are packed when it is loaded.
pub(crate) fn matrix_product_tflops(backend: &OrtBackend, console: &Console) -> Result<f64, MeasureError> {
    let file = ProductFile::write().map_err(MeasureError::TemporaryFile)?;
    let probe = PartitionProbe {
        weights_dir: file.dir(),
        host_kernels: HostKernels::default(),
        file: file.path(),
        weight_bytes: 0,
        provider: Provider::CPU,
        cases: vec![],
    };
    let mut product = PartitionBench::load(backend, &probe, console)?;
    let runs = product.case(&case(), None)?;
    let seconds = median(runs.times.iter().map(|time| time.as_secs_f64()).collect());
    Ok(2.0 * (SIZE as f64).powi(3) / seconds / 1e12)
}

fn case() -> Case {
    let shape = vec![SIZE, SIZE];
    let feed = |name: &str, seed| Feed {
        name: name.into(),
        dtype: DType::Float32,
        shape: shape.clone(),
        fill: Fill::Normal { seed },
    };
    Case {
        name: "product".into(),
        inputs: vec![feed("a", 1), feed("b", 2)],
        outputs: vec![OutputSpec { name: "c".into(), dtype: DType::Float32, shape: shape.clone() }],
        carried: vec![],
        evict_bytes: 0,
        warmup: 1,
        min_runs: 3,
        max_runs: 15,
        budget_ms: 1000.0,
    }
}
