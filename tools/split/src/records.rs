//! Size and hashes of every file a plan depends on.

use crate::error::SplitError;
use hpp_onnx::hash;
use hpp_schema::{ByteSize, FileRecord, FileRole};
use std::fs;
use std::path::Path;

/// Files up to this size are hashed whole without being asked: it takes a fraction of a second.
const HASH_WHOLE: u64 = 64 << 20;

/// Records in the order they were added.
pub struct Records<'a> {
    staging: &'a Path,
    hash_everything: bool,
    records: Vec<FileRecord>,
}

impl<'a> Records<'a> {
    /// Over the directory being written; paths lead from there.
    pub fn new(staging: &'a Path, hash_everything: bool) -> Self {
        Records { staging, hash_everything, records: Vec::new() }
    }

    /// Measures one file.
    pub fn add(&mut self, path: &str, role: FileRole) -> Result<(), SplitError> {
        // The directory being written lies beside the one it becomes, so the same relative paths lead out of it.
        let file = self.staging.join(path);
        let io = |source| SplitError::Io { action: "read", path: file.clone(), source };
        let bytes = fs::metadata(&file).map_err(io)?.len();
        let weights = |e: hash::HashError| SplitError::Weights(Box::new(e));
        let sampled = hash::sampled(&file).map_err(weights)?;
        let whole = self.hash_everything || bytes <= HASH_WHOLE;
        let blake3 = whole.then(|| hash::full(&file)).transpose().map_err(weights)?;
        self.records.push(FileRecord { path: path.to_owned(), role, bytes: ByteSize(bytes), sampled, blake3 });
        Ok(())
    }

    /// All of them.
    pub fn done(self) -> Vec<FileRecord> {
        self.records
    }
}
