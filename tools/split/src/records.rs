//! Size and hashes of every file a plan depends on.

use crate::destination::Destination;
use crate::error::SplitError;
use hpp_onnx::{Contents, hash};
use hpp_schema::{ByteSize, FileRecord, FileRole};

/// Files up to this size are hashed whole without being asked: it takes a fraction of a second.
const HASH_WHOLE: u64 = 64 << 20;

/// Records in the order they were added.
pub struct Records<'a> {
    to: &'a Destination,
    hash_everything: bool,
    records: Vec<FileRecord>,
}

impl<'a> Records<'a> {
    /// Over the directory being written; paths lead from there.
    pub fn new(to: &'a Destination, hash_everything: bool) -> Self {
        Records { to, hash_everything, records: Vec::new() }
    }

    /// Measures one file.
    pub fn add(&mut self, path: &str, role: FileRole) -> Result<(), SplitError> {
        let file = self.to.find(path);
        let io = |source| SplitError::Io { action: "read", path: file.clone(), source };
        let contents = self.to.made().get(path).cloned();
        let contents = contents.map_or_else(|| Contents::of_file(&file).map_err(io), Ok)?;
        let bytes = contents.bytes();
        let weights = |e: hash::HashError| SplitError::Weights(Box::new(e));
        let sampled = hash::sampled_of(&contents, &file).map_err(weights)?;
        let whole = self.hash_everything || bytes <= HASH_WHOLE;
        let blake3 = whole.then(|| hash::full_of(&contents, &file)).transpose().map_err(weights)?;
        self.records.push(FileRecord { path: path.to_owned(), role, bytes: ByteSize(bytes), sampled, blake3 });
        Ok(())
    }

    /// All of them.
    pub fn done(self) -> Vec<FileRecord> {
        self.records
    }
}
