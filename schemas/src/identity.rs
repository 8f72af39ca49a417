//! File identities, and the record of files whose contents were verified in full.
//!
//! The record lies beside the plan; deleting it only means that files are hashed again. It is text with one line per file.

use crate::FileRecord;
use std::fmt;
use std::fs::Metadata;
use std::str::FromStr;
use std::time::UNIX_EPOCH;

/// Name of the record, beside the plan.
pub const VERIFIED_FILE: &str = "verified.txt";
/// Directory beside a plan in which hpp-exec keeps weights in the layout that kernels want.
pub const PREPARED_DIR: &str = "prepared";
/// First line of the record. It changes when the format of the lines does.
const FORMAT: &str = "hpp-verified-1";

/// Which file this is, and when it last changed. A write changes the times. On systems without inodes, only length and modification time are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    /// Device number.
    pub device: u64,
    /// Inode number.
    pub inode: u64,
    /// Length.
    pub bytes: u64,
    /// Time of the last write to its contents (mtime), nanoseconds since 1970.
    pub modified: i128,
    /// Time of the last change of contents or metadata (ctime), nanoseconds since 1970.
    pub changed: i128,
}

impl FileIdentity {
    /// The identity of a file whose metadata this is.
    #[cfg(unix)]
    pub fn of(about: &Metadata) -> FileIdentity {
        use std::os::unix::fs::MetadataExt;
        let time = |seconds: i64, nanoseconds: i64| i128::from(seconds) * 1_000_000_000 + i128::from(nanoseconds);
        FileIdentity {
            device: about.dev(),
            inode: about.ino(),
            bytes: about.len(),
            modified: time(about.mtime(), about.mtime_nsec()),
            changed: time(about.ctime(), about.ctime_nsec()),
        }
    }

    /// The identity of a file whose metadata this is.
    #[cfg(not(unix))]
    pub fn of(about: &Metadata) -> FileIdentity {
        let modified = about.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        let modified = modified.map_or(0, |time| time.as_nanos() as i128);
        FileIdentity { device: 0, inode: 0, bytes: about.len(), modified, changed: modified }
    }

    /// Whether device, inode, length and mtime are the same.
    fn has_same_contents(&self, other: &FileIdentity) -> bool {
        FileIdentity { changed: other.changed, ..*self } == *other
    }

    /// Whether a write from `now` on would change the times. A write within the same step of the clock would not: the kernel's clock for file times
    /// advances every 10 ms or faster, and some file systems store only whole seconds, the coarsest only even ones.
    pub fn is_settled(&self, now: std::time::SystemTime) -> bool {
        const SECOND: i128 = 1_000_000_000;
        const TICK: i128 = 20_000_000;
        let is_coarse = self.modified % SECOND == 0 && self.changed % SECOND == 0;
        let step = if is_coarse { 2 * SECOND } else { TICK };
        let now = now.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as i128);
        self.modified.max(self.changed) + step <= now
    }
}

impl fmt::Display for FileIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {} {} {}", self.device, self.inode, self.bytes, self.modified, self.changed)
    }
}

impl FromStr for FileIdentity {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut fields = text.split(' ');
        let mut next = || fields.next().unwrap_or_default();
        Ok(FileIdentity {
            device: next().parse()?,
            inode: next().parse()?,
            bytes: next().parse()?,
            modified: next().parse()?,
            changed: next().parse()?,
        })
    }
}

/// How a file was verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Known {
    /// Its full hash equals the plan's.
    Whole,
    /// `hpp-split` saw this identity; the plan has no full hash.
    AsSplit,
}

/// The files that were verified. An entry is valid as long as the file's identity stays the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    lines: Vec<Line>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    identity: FileIdentity,
    known: Known,
    /// The hash in the plan against which the file was verified: the full hash, or the hash of samples.
    hash: String,
    path: String,
}

impl Verified {
    /// Parses a record; ignores what it cannot parse.
    pub fn from_text(text: &str) -> Verified {
        let mut lines = text.lines();
        if lines.next() != Some(FORMAT) {
            return Verified::default();
        }
        Verified { lines: lines.filter_map(Line::parse).collect() }
    }

    /// How the file of a plan's `record` was verified, if it still has this identity.
    ///
    /// An entry for a full hash is valid only while ctime is the same, too. ctime reveals a write after which mtime was set back. A new hard link
    /// changes ctime as well, but only costs another hash. Without a full hash there is nothing to compare again, so a new hard link (every plan of
    /// the same model makes one) must not look like a write; there, ctime may differ.
    pub fn known(&self, record: &FileRecord, identity: &FileIdentity) -> Option<Known> {
        let line = self.lines.iter().find(|line| line.path == record.path)?;
        let (same, hash) = match line.known {
            Known::Whole => (line.identity == *identity, record.blake3.as_ref()),
            Known::AsSplit => (line.identity.has_same_contents(identity), Some(&record.sampled)),
        };
        hash.filter(|hash| same && **hash == line.hash).map(|_| line.known)
    }

    /// Whether there is a line for this file, whatever its identity.
    pub fn lists(&self, record: &FileRecord) -> bool {
        self.lines.iter().any(|line| line.path == record.path)
    }

    /// Records a file, unless its path has a line break.
    pub fn note(&mut self, record: &FileRecord, identity: FileIdentity, known: Known) {
        self.lines.retain(|line| line.path != record.path);
        let hash = match known {
            Known::Whole => record.blake3.clone(),
            Known::AsSplit => Some(record.sampled.clone()),
        };
        let (Some(hash), false) = (hash, record.path.contains(['\n', '\r'])) else { return };
        self.lines.push(Line { identity, known, hash, path: record.path.clone() });
    }
}

impl fmt::Display for Verified {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{FORMAT}")?;
        for Line { identity, known, hash, path } in &self.lines {
            let known = match known {
                Known::Whole => "whole",
                Known::AsSplit => "as-split",
            };
            writeln!(f, "{identity} {known} {hash} {path}")?;
        }
        Ok(())
    }
}

impl Line {
    fn parse(line: &str) -> Option<Line> {
        let fields: Vec<&str> = line.splitn(8, ' ').collect();
        let [.., known, hash, path] = fields.as_slice() else { return None };
        let known = match *known {
            "whole" => Known::Whole,
            "as-split" => Known::AsSplit,
            _ => return None,
        };
        let identity = line.parse().ok()?;
        Some(Line { identity, known, hash: (*hash).to_owned(), path: (*path).to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ByteSize, FileRole};

    fn record(path: &str) -> FileRecord {
        let hash = |digit: &str| digit.repeat(64);
        let (role, bytes) = (FileRole::Weights, ByteSize(7));
        FileRecord { path: path.into(), role, bytes, sampled: hash("a"), blake3: Some(hash("b")) }
    }

    fn identity(changed: i128) -> FileIdentity {
        FileIdentity { device: 1, inode: 2, bytes: 7, modified: -5, changed }
    }

    #[test]
    fn a_record_reads_back_and_holds_for_that_file_only() {
        let mut verified = Verified::default();
        let (one, two) = (record("../a model/x.data"), record("y"));
        verified.note(&one, identity(3), Known::Whole);
        verified.note(&two, identity(4), Known::AsSplit);
        let read = Verified::from_text(&verified.to_string());
        assert_eq!(read, verified);
        assert_eq!(read.known(&one, &identity(3)), Some(Known::Whole));
        assert_eq!(read.known(&two, &identity(4)), Some(Known::AsSplit));
        assert_eq!(read.known(&one, &identity(4)), None);
        assert_eq!(read.known(&two, &identity(5)), Some(Known::AsSplit), "a hard link changes ctime");
        assert_eq!(read.known(&two, &FileIdentity { modified: -4, ..identity(4) }), None);
        assert_eq!(read.known(&FileRecord { blake3: None, ..one.clone() }, &identity(3)), None);
        assert_eq!(read.known(&FileRecord { blake3: Some("c".repeat(64)), ..one }, &identity(3)), None);
    }

    #[test]
    fn damage_makes_nothing_known() {
        let mut verified = Verified::default();
        verified.note(&record("y"), identity(4), Known::Whole);
        let text = verified.to_string();
        for other in ["", "nonsense", "hpp-verified-2\n", &text[..text.len() - 70], &text.replace("whole", "half")] {
            assert_eq!(Verified::from_text(other), Verified::default(), "{other}");
        }
    }

    #[test]
    fn a_file_written_a_moment_ago_is_not_settled() {
        let now = UNIX_EPOCH + std::time::Duration::from_secs(10);
        assert!(identity(9_980_000_000).is_settled(now));
        assert!(!identity(9_980_000_001).is_settled(now) && !identity(20_000_000_001).is_settled(now));
        let whole_seconds = |changed| FileIdentity { modified: 0, ..identity(changed) };
        assert!(whole_seconds(8_000_000_000).is_settled(now) && !whole_seconds(9_000_000_000).is_settled(now));
    }
}
