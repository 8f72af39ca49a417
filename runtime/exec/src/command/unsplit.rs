//! The unsplit model as a plan of one partition. It is loaded whole, so a model whose weights exceed the memory limit is refused here:
//! the system would kill the process without a message.

use crate::error::ExecError;
use crate::runtime::memory_limit;
use hpp_generate::PlanFile;
use hpp_schema::{FileRole, Plan, Whole};

/// The unsplit model; `None` if the plan has no such file. Refuses one with more weights than this process may hold in memory.
pub(super) fn unsplit(plan: &PlanFile, whole: Whole) -> Result<Option<Plan>, ExecError> {
    let Some(unsplit) = plan.plan.unsplit(whole) else { return Ok(None) };
    check_memory(required_bytes(&unsplit), memory_limit())?;
    Ok(Some(unsplit))
}

/// Lower bound of the bytes of weights in memory once an unsplit model is loaded. If kernels pack weights, all weights count. Otherwise only those
/// inside the model file count: the others are mapped from their files, and the system may evict them.
fn required_bytes(unsplit: &Plan) -> u64 {
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let partitions = &unsplit.partitions;
    if !unsplit.model.host_kernels.packed {
        let model_files =
            unsplit.files.iter().filter(|file| partitions.iter().any(|partition| partition.file == file.path));
        return sum(&mut model_files.map(|file| file.bytes.0));
    }
    // Both sums are upper bounds: partitions count a shared table twice, and several files may hold the same weights.
    let files = unsplit.files.iter().filter(|file| matches!(file.role, FileRole::Source | FileRole::Weights));
    sum(&mut partitions.iter().map(|partition| partition.bytes.weights.0)).min(sum(&mut files.map(|file| file.bytes.0)))
}

fn check_memory(required: u64, limit: Option<u64>) -> Result<(), ExecError> {
    match limit {
        Some(limit) if required > limit => Err(ExecError::UnsplitTooLarge { required, limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model with embedded weights: 866 KiB in its file, of which two partitions use 256 KiB each.
    #[test]
    fn packed_weights_are_required_and_mapped_ones_are_not() {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        let mut plan = Plan::from_yaml(plan).unwrap();
        let required = |plan: &Plan, packed: bool| {
            let mut unsplit = plan.unsplit(Whole::Source).unwrap();
            unsplit.model.host_kernels.packed = packed;
            required_bytes(&unsplit)
        };
        assert_eq!((required(&plan, true), required(&plan, false)), (512 << 10, 887_040));
        let source = plan.files.iter_mut().find(|file| file.role == FileRole::Source).unwrap();
        source.bytes.0 = 1000;
        assert_eq!(
            (required(&plan, true), required(&plan, false)),
            (1000, 1000),
            "no more than the bytes of its files"
        );
    }

    #[test]
    fn a_model_above_the_limit_is_refused_with_both_numbers() {
        let error = check_memory(3 << 30, Some(2 << 30)).unwrap_err();
        assert_eq!(error.code(), 1);
        let report = error.report();
        for text in ["the unsplit model", "3 GiB", "2 GiB", "hint: raise the limit"] {
            assert!(report.contains(text), "{text:?} is not in {report}");
        }
        assert!(check_memory(2 << 30, Some(2 << 30)).is_ok() && check_memory(3 << 30, None).is_ok());
    }
}
