//! Arithmetic of the host: one float32 matrix product by ONNX Runtime, with the threads that run partitions.

use crate::command::probe::ProbeSession;
use crate::command::probe::product::ProductFile;
use crate::error::ExecError;
use hpp_engine::PartitionBench;
use hpp_schema::probe::{Case, Fact, Feed, Fill, PartitionProbe, Reply};
use hpp_schema::{DType, Provider};

/// Rows and columns of each matrix: the product takes long, the matrices little.
const SIZE: u64 = 2048;

/// `2 n^3` operations (a multiply-add counts two) over the median time. Arranging the second matrix for the product is part of
/// the time, as it is not where a model's weights are packed when it is loaded: about one part in a hundred at this size.
pub(super) fn measure(session: &ProbeSession<'_>) -> Result<Reply, ExecError> {
    let file = ProductFile::write().map_err(ExecError::Scratch)?;
    let probe = PartitionProbe {
        weights_dir: file.folder(),
        model: file.path(),
        file: file.path(),
        weight_bytes: 0,
        provider: Provider::Cpu,
        cases: vec![],
    };
    let mut product = PartitionBench::load(session.machine.backend(), &probe, session.console.as_ref())?;
    let mut times: Vec<f64> = product.case(&case(), None)?.times.iter().map(|time| time.as_secs_f64()).collect();
    times.sort_by(f64::total_cmp);
    let seconds = crate::command::probe::partition::quantile(&times, 0.5);
    Ok(Reply::Arithmetic { tflops: 2.0 * (SIZE as f64).powi(3) / seconds / 1e12 })
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
        outputs: vec![Fact { name: "c".into(), dtype: DType::Float32, shape: shape.clone() }],
        carried: vec![],
        evict_bytes: 0,
        warmup: 1,
        min_runs: 3,
        max_runs: 15,
        budget_ms: 1000.0,
    }
}
