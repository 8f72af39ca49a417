//! The directory of OpenVINO's compiled models, in the plan cache. OpenVINO names each file after what it was compiled from, and finds it there at
//! the next load. A file is as large as the weights. Before a load, the oldest files beyond the cache's limit are removed.

use super::cache::location;
use super::error::PlanningError;
use crate::cli::AutoPlanArgs;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The directory for compiled models, after files beyond the limit are removed. `None` if there is no cache directory or it cannot be made: then
/// every load compiles.
pub fn compiled_models(args: &AutoPlanArgs) -> Result<Option<PathBuf>, PlanningError> {
    let (cache, limit) = match location(args) {
        Err(PlanningError::NoCacheDirectory) => return Ok(None),
        found => found?,
    };
    let dir = cache.join("openvino");
    if let Err(error) = fs::create_dir_all(&dir) {
        tracing::warn!(dir = %dir.display(), %error, "compiled models are not kept");
        return Ok(None);
    }
    remove_oldest(&dir, limit);
    Ok(Some(dir))
}

/// Removes the oldest files of a directory until the rest is within the limit. A process that has a removed file open can still read it. A process
/// that looks for it later compiles the model again.
fn remove_oldest(dir: &Path, limit: u64) {
    let file = |entry: fs::DirEntry| {
        let metadata = entry.metadata().ok().filter(fs::Metadata::is_file)?;
        Some((metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH), entry.path(), metadata.len()))
    };
    let mut files: Vec<_> = fs::read_dir(dir).into_iter().flatten().flatten().filter_map(file).collect();
    files.sort();
    let mut total: u64 = files.iter().map(|(_, _, bytes)| bytes).sum();
    for (_, path, bytes) in files {
        if total > limit && fs::remove_file(&path).is_ok() {
            tracing::info!(file = %path.display(), bytes, limit, "compiled model removed");
            total -= bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::ByteSize;
    use std::fs::File;
    use std::time::Duration;

    #[test]
    fn the_oldest_are_removed_until_the_rest_is_within_the_limit() {
        let dir = tempfile::tempdir().unwrap();
        let args = |limit: u64| AutoPlanArgs {
            cache: Some(dir.path().to_owned()),
            cache_limit: Some(ByteSize(limit)),
            ..AutoPlanArgs::default()
        };
        let compiled = compiled_models(&args(100)).unwrap().unwrap();
        for (age, name) in [(3, "b"), (2, "c"), (1, "a")] {
            fs::write(compiled.join(name), [0; 40]).unwrap();
            let file = File::options().write(true).open(compiled.join(name)).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(60 * age)).unwrap();
        }
        let left = |limit: u64| {
            compiled_models(&args(limit)).unwrap();
            ["a", "b", "c"].map(|name| compiled.join(name).exists())
        };
        assert_eq!(left(120), [true, true, true]);
        assert_eq!(left(119), [true, false, true]);
        assert_eq!(left(40), [true, false, false]);
        assert_eq!(left(0), [false, false, false]);
    }
}
