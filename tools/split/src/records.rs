//! Size and hashes of every file a plan depends on.

use crate::destination::Destination;
use crate::error::SplitError;
use hpp_onnx::{VirtualFile, hash};
use hpp_schema::{ByteSize, FileIdentity, FileRecord, FileRole, Known, Plan, VERIFIED_FILE, Verified};
use std::fs;
use std::path::Path;

/// Full hashes are recorded by default for files until this many bytes are hashed: less than a second.
const HASH_WHOLE: u64 = 1 << 30;

/// Records in the order they were added.
pub struct Records<'a> {
    to: &'a Destination,
    hash_everything: bool,
    /// Bytes that may still be hashed by default.
    left: u64,
    records: Vec<FileRecord>,
}

impl<'a> Records<'a> {
    /// Over the directory being written; paths lead from there.
    pub fn new(to: &'a Destination, hash_everything: bool) -> Self {
        Records { to, hash_everything, left: HASH_WHOLE, records: Vec::new() }
    }

    /// Measures one file.
    pub fn add(&mut self, path: &str, role: FileRole) -> Result<(), SplitError> {
        self.measure(path, role, self.hash_everything)
    }

    /// Measures a file that this command wrote, always with a full hash: hashing takes less time than writing did.
    pub fn add_own(&mut self, path: &str, role: FileRole) -> Result<(), SplitError> {
        self.measure(path, role, true)
    }

    fn measure(&mut self, path: &str, role: FileRole, must_hash: bool) -> Result<(), SplitError> {
        let file = self.to.find(path);
        let io = |source| SplitError::Io { action: "read", path: file.clone(), source };
        let contents = self.to.made().get(path).cloned();
        let contents = contents.map_or_else(|| VirtualFile::of_file(&file).map_err(io), Ok)?;
        let bytes = contents.bytes();
        let weights = |e: hash::HashError| SplitError::Weights(Box::new(e));
        let sampled = hash::sampled_virtual(&contents, &file).map_err(weights)?;
        let is_within = bytes <= self.left;
        self.left -= if is_within { bytes } else { 0 };
        let whole = must_hash || is_within;
        let blake3 = whole.then(|| hash::full_virtual(&contents, &file)).transpose().map_err(weights)?;
        self.records.push(FileRecord { path: path.to_owned(), role, bytes: ByteSize(bytes), sampled, blake3 });
        Ok(())
    }

    /// All of them.
    pub fn done(self) -> Vec<FileRecord> {
        self.records
    }
}

/// Records beside the plan the identity of weight files without a full hash, so that `hpp-exec` can warn if one changes. The plan
/// works without this record.
pub fn note_unhashed(plan: &Plan, dir: &Path) {
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
