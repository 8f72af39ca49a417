//! The unsplit model as a plan of one partition. It is loaded whole, so where its weights cannot fit that is said before, because
//! the system would end the process without a word.

use crate::error::ExecError;
use crate::machine::{memory_limit, needs_packing};
use crate::plan_file::PlanFile;
use hpp_schema::{FileRole, Plan, Whole};

/// The unsplit model; `None` where the plan has no such file. Refuses one with more weights than this process may hold.
pub(super) fn unsplit(plan: &PlanFile, whole: Whole) -> Result<Option<Plan>, ExecError> {
    let Some(unsplit) = plan.plan.unsplit(whole) else { return Ok(None) };
    let packed = needs_packing(&plan.resolve(&unsplit.model.source));
    check(held(&unsplit, packed), memory_limit())?;
    Ok(Some(unsplit))
}

/// Bytes of weights that are in memory at the least once an unsplit model is loaded: all where kernels want them `packed`, else
/// those inside its own file. Others are mapped from theirs and may leave memory again.
fn held(unsplit: &Plan, packed: bool) -> u64 {
    let sum = |bytes: &mut dyn Iterator<Item = u64>| bytes.fold(0, u64::saturating_add);
    let partitions = &unsplit.partitions;
    if !packed {
        let own = unsplit.files.iter().filter(|file| partitions.iter().any(|partition| partition.file == file.path));
        return sum(&mut own.map(|file| file.bytes.0));
    }
    // Partitions count a table twice that they share, and there may be copies among the files.
    let files = unsplit.files.iter().filter(|file| matches!(file.role, FileRole::Source | FileRole::Weights));
    sum(&mut partitions.iter().map(|partition| partition.bytes.weights.0)).min(sum(&mut files.map(|file| file.bytes.0)))
}

fn check(held: u64, limit: Option<u64>) -> Result<(), ExecError> {
    match limit {
        Some(limit) if held > limit => Err(ExecError::UnsplitTooLarge { held, limit }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A model with embedded weights: 866 KiB in its file, of which partitions have two times 256.
    #[test]
    fn packed_weights_are_held_and_mapped_ones_are_not() {
        let plan = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../schemas/tests/plan.yaml"));
        let mut plan = Plan::from_yaml(plan).unwrap();
        let unsplit = plan.unsplit(Whole::Source).unwrap();
        assert_eq!((held(&unsplit, true), held(&unsplit, false)), (512 << 10, 887_040));
        let source = plan.files.iter_mut().find(|file| file.role == FileRole::Source).unwrap();
        source.bytes.0 = 1000;
        let unsplit = plan.unsplit(Whole::Source).unwrap();
        assert_eq!((held(&unsplit, true), held(&unsplit, false)), (1000, 1000), "no more than its files have");
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let error = check(3 << 30, Some(2 << 30)).unwrap_err();
        assert_eq!(error.code(), 1);
        let said = error.report();
        for text in ["the unsplit model", "3 GiB", "2 GiB", "hint: raise the limit"] {
            assert!(said.contains(text), "{text:?} is not in {said}");
        }
        assert!(check(2 << 30, Some(2 << 30)).is_ok() && check(3 << 30, None).is_ok());
    }
}
