//! Whether this machine has the memory that measuring a model takes.

use crate::error::SplitError;
use hpp_schema::ByteSize;

/// Refuses a model that this machine's memory does not hold: it would be read from disk once for each of many measurements.
pub fn check_memory(needed: u64, free: Option<u64>) -> Result<(), SplitError> {
    match free {
        Some(free) if free < needed => {
            let [needed, free] = [needed, free].map(|bytes| ByteSize(bytes).human());
            Err(SplitError::setting(
                format!("--calibration runs the whole model in memory, which takes {needed}, and {free} are free"),
                "profile the model with hpp-profile --sensitivity and give --profile instead, or omit --calibration",
            ))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_memory_does_not_hold_is_refused_with_both_numbers() {
        let error = check_memory(3 << 30, Some(2 << 30)).unwrap_err().to_string();
        assert!(error.contains("3 GiB") && error.contains("2 GiB are free"), "{error}");
        assert!(check_memory(3 << 30, Some(3 << 30)).is_ok() && check_memory(3 << 30, None).is_ok());
    }
}
