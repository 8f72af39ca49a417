//! Records size and hashes of every file that a plan depends on.

use crate::destination::Destination;
use crate::error::SplitError;
use hpp_onnx::{VirtualFile, hash};
use hpp_schema::{ByteSize, FileIdentity, FileRecord, FileRole, Known, Plan, VERIFIED_FILE, Verified};
use std::fs;
use std::path::Path;

/// By default files get full hashes until this many bytes are hashed, which takes less than a second.
const FULL_HASH_BYTES: u64 = 1 << 30;

/// Records in the order they were added.
pub struct Records<'a> {
    destination: &'a Destination,
    hash_everything: bool,
    /// Bytes that may still be hashed by default.
    remaining: u64,
    records: Vec<FileRecord>,
}

impl<'a> Records<'a> {
    /// For files in `destination`; paths are relative to the plan.
    pub fn new(destination: &'a Destination, hash_everything: bool) -> Self {
        Records { destination, hash_everything, remaining: FULL_HASH_BYTES, records: Vec::new() }
    }

    /// Records one file.
    pub fn add(&mut self, path: &str, role: FileRole) -> Result<(), SplitError> {
        self.record(path, role, self.hash_everything)
    }

    /// Records a file that this command wrote, always with a full hash: hashing takes less time than writing did.
    pub fn add_written(&mut self, path: &str, role: FileRole) -> Result<(), SplitError> {
        self.record(path, role, true)
    }

    fn record(&mut self, path: &str, role: FileRole, must_hash: bool) -> Result<(), SplitError> {
        let file = self.destination.resolve(path);
        let io_of = |path, source| SplitError::Io { action: "read", path, source };
        let io = |source| io_of(file.clone(), source);
        let contents = self.destination.dry_files().get(path).cloned();
        let contents = contents.map_or_else(|| VirtualFile::of_file(&file).map_err(io), Ok)?;
        let bytes = contents.bytes();
        let failed = |error: hash::HashError| match error.not_finite() {
            Some(number) => SplitError::Weights(Box::new(number)),
            // While the plan is written, the path leads through a directory that is gone when the user reads the error.
            None => io_of(fs::canonicalize(&file).unwrap_or_else(|_| file.clone()), error.source),
        };
        let sampled = hash::sampled_virtual(&contents, &file).map_err(failed)?;
        let is_within = bytes <= self.remaining;
        self.remaining -= if is_within { bytes } else { 0 };
        let whole = must_hash || is_within;
        let blake3 = whole.then(|| hash::full_virtual(&contents, &file)).transpose().map_err(failed)?;
        self.records.push(FileRecord { path: path.to_owned(), role, bytes: ByteSize(bytes), sampled, blake3 });
        Ok(())
    }

    /// The records.
    pub fn done(self) -> Vec<FileRecord> {
        self.records
    }
}

/// Writes the identity of weight files without a full hash beside the plan, so that `hpp-exec` can warn if one changes.
/// Ignores errors: the plan works without this file.
pub fn record_unhashed(plan: &Plan, dir: &Path) {
    let mut verified = Verified::default();
    let unhashed = plan.files.iter().filter(|file| file.blake3.is_none() && file.role == FileRole::Weights);
    for record in unhashed.clone() {
        if let Ok(about) = fs::metadata(dir.join(&record.path)) {
            verified.note(record, FileIdentity::of(&about), Known::AsSplit);
        }
    }
    if unhashed.count() > 0 {
        drop(fs::write(dir.join(VERIFIED_FILE), verified.to_string()));
    }
}
