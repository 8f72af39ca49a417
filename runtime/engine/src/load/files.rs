//! Verifies a plan's files against its hashes, before a session opens them.
//!
//! It hashes a whole file if all files together are small, or if the file's identity (inode, length, times) differs from that of
//! the last full verification, which [`Verified`] records beside the plan. Otherwise it hashes samples.

use crate::error::EngineError;
use crate::file_watch::FileWatch;
use crate::options::Verify;
use crate::reporter::Reporter;
use hpp_schema::{FileIdentity, FileRecord, FileRole, Known, Plan, VERIFIED_FILE, Verified, sample_ranges};
use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::time::SystemTime;

/// Plans with at most this many bytes of files are hashed whole at every start, in about 0.1 s.
const ALWAYS: u64 = 256 << 20;
/// Bytes read at a time: enough for several threads to hash.
const PIECE: usize = 4 << 20;

/// Verifies all files and returns a watch over them, or an error that lists every missing or changed file. A missing tokenizer,
/// chat template or draft is no error here, because the engine reads none of them.
pub(super) fn check(
    plan: &Plan,
    dir: &Path,
    verify: Verify,
    reporter: &dyn Reporter,
) -> Result<FileWatch, EngineError> {
    let all = plan.files.iter().map(|file| file.bytes.0).fold(0, u64::saturating_add);
    check_knowing(plan, dir, verify, all <= ALWAYS, reporter)
}

/// [`check`] with the choice whether to hash every file whole.
fn check_knowing(
    plan: &Plan,
    dir: &Path,
    verify: Verify,
    always: bool,
    reporter: &dyn Reporter,
) -> Result<FileWatch, EngineError> {
    reporter.checking_files(plan.files.len());
    let known = fs::read_to_string(dir.join(VERIFIED_FILE)).map(|text| Verified::from_text(&text)).unwrap_or_default();
    let mut checking = Checking {
        dir,
        verify,
        reporter,
        always,
        drop_cached: plan.devices.iter().any(|device| device.window.is_some()),
        known,
        has_news: false,
        unreadable: None,
        watch: FileWatch::default(),
    };
    let problems: Vec<String> = plan.files.iter().filter_map(|record| checking.problem(record)).collect();
    if !problems.is_empty() {
        return Err(EngineError::Files { problems, unreadable: checking.unreadable });
    }
    tracing::info!(files = plan.files.len(), hash_all = always || verify == Verify::Full, "files of the plan verified");
    if checking.has_news {
        checking.remember();
    }
    Ok(checking.watch)
}

/// A verification in progress.
struct Checking<'a> {
    dir: &'a Path,
    verify: Verify,
    reporter: &'a dyn Reporter,
    /// Hash every file whole, whatever was verified before.
    always: bool,
    /// Drop files from the page cache after hashing them: the plan streams from disk and has no memory for them.
    drop_cached: bool,
    known: Verified,
    /// `known` differs from the record on disk.
    has_news: bool,
    /// The error of the first file that cannot be read.
    unreadable: Option<io::ErrorKind>,
    watch: FileWatch,
}

impl Checking<'_> {
    fn problem(&mut self, record: &FileRecord) -> Option<String> {
        let path = self.dir.join(&record.path);
        let differs = match self.compare(record, &path) {
            Ok(None) => return None,
            Err(error) if !is_read(record.role) && error.kind() == io::ErrorKind::NotFound => return None,
            Ok(Some(differs)) => differs,
            Err(error) => {
                self.unreadable.get_or_insert(error.kind());
                format!("cannot be read: {error}")
            }
        };
        Some(format!("{}: {differs}", path.display()))
    }

    fn compare(&mut self, record: &FileRecord, path: &Path) -> io::Result<Option<String>> {
        let mut file = File::open(path)?;
        // Metadata first: a write during or after hashing then shows as a change.
        let about = file.metadata()?;
        let identity = FileIdentity::of(&about);
        if identity.bytes != record.bytes.0 {
            return Ok(Some(format!("it has {} bytes, the plan says {}", identity.bytes, record.bytes.0)));
        }
        let known = self.known.known(record, &identity);
        let whole = record.blake3.as_ref().filter(|_| match self.verify {
            Verify::Full => true,
            Verify::Default => self.always || known != Some(Known::Whole),
        });
        let same = match whole {
            Some(hash) => {
                tracing::debug!(file = record.path, bytes = identity.bytes, ?known, "whole file hashed");
                self.reporter.comparing(&record.path, identity.bytes);
                *hash == hash_of(&mut file, &[(0, identity.bytes)], blake3::Hasher::new())?
            }
            None => sampled(&mut file, identity.bytes)? == record.sampled,
        };
        if self.drop_cached && whole.is_some() {
            drop_from_page_cache(&file);
        }
        if !same {
            return Ok(Some("its contents have changed".into()));
        }
        self.learn(record, identity, whole.is_some(), known);
        if is_read(record.role) {
            self.watch.add(path, file, &about, record.role == FileRole::Weights);
        }
        Ok(None)
    }

    /// Records a full verification. Warns if a file without a full hash changed since `hpp-split` read it.
    fn learn(&mut self, record: &FileRecord, identity: FileIdentity, whole: bool, known: Option<Known>) {
        if whole && !self.always && known != Some(Known::Whole) && identity.is_settled(SystemTime::now()) {
            self.known.note(record, identity, Known::Whole);
            self.has_news = true;
        }
        if record.blake3.is_none() && known.is_none() && self.known.lists(record) {
            self.reporter.warning(&format!(
                "{} was written to, replaced or copied since hpp-split read it, and the plan has no hash of all of it: only samples \
                 were compared, which misses small damage. hpp-split --hash-weights records such a hash",
                record.path
            ));
        }
    }

    /// Writes the record atomically. If the plan's directory is read-only, the next start hashes again.
    fn remember(&self) {
        let partial = self.dir.join(format!(".{VERIFIED_FILE}.{}", std::process::id()));
        let written = fs::write(&partial, self.known.to_string());
        if written.and_then(|()| fs::rename(&partial, self.dir.join(VERIFIED_FILE))).is_err() {
            drop(fs::remove_file(&partial));
        }
    }
}

/// Whether the engine reads files of this role, not only its caller.
fn is_read(role: FileRole) -> bool {
    !matches!(role, FileRole::Text | FileRole::Draft)
}

/// Hashes of a partition's file and of all weights, in one line: the key of what is prepared from them.
pub(super) fn contents(plan: &Plan, file: &str) -> String {
    let concerns = |record: &&FileRecord| match record.role {
        FileRole::Partition => record.path == file,
        FileRole::Weights | FileRole::Source => true,
        FileRole::Tapped | FileRole::Text | FileRole::Draft => false,
    };
    let hash = |record: &FileRecord| match &record.blake3 {
        Some(whole) => whole.clone(),
        None => record.sampled.clone(),
    };
    plan.files.iter().filter(concerns).map(hash).collect::<Vec<_>>().join(" ")
}

/// The hash [`FileRecord::sampled`] holds.
fn sampled(file: &mut File, length: u64) -> io::Result<String> {
    let mut hasher = blake3::Hasher::new();
    hasher.update(&length.to_le_bytes());
    hash_of(file, &sample_ranges(length), hasher)
}

/// Feeds ranges of a file to a hasher and finishes it.
fn hash_of(file: &mut File, ranges: &[(u64, u64)], mut hasher: blake3::Hasher) -> io::Result<String> {
    let largest = ranges.iter().map(|(_, length)| *length).max().unwrap_or(0);
    let mut buffer = vec![0; PIECE.min(usize::try_from(largest).unwrap_or(PIECE))];
    for (offset, length) in ranges {
        file.seek(SeekFrom::Start(*offset))?;
        let mut left = *length;
        while left > 0 {
            let piece = PIECE.min(usize::try_from(left).unwrap_or(PIECE));
            file.read_exact(&mut buffer[..piece])?;
            left -= piece as u64;
            // For small pieces, waking threads costs more than hashing.
            match piece >= 256 << 10 {
                true => hasher.update_rayon(&buffer[..piece]),
                false => hasher.update(&buffer[..piece]),
            };
        }
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Drops a file from the page cache.
fn drop_from_page_cache(file: &File) {
    #[cfg(target_os = "linux")]
    // Advice: if the kernel ignores it, the file stays cached.
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(target_os = "linux"))]
    let _ = file;
}

#[cfg(test)]
mod tests {
    use super::*;
    use hpp_schema::ByteSize;
    use std::sync::Mutex;
    use std::time::Duration;

    #[derive(Default)]
    struct Heard(Mutex<Vec<String>>);

    impl Reporter for Heard {
        fn comparing(&self, file: &str, _: u64) {
            self.0.lock().unwrap().push(format!("comparing {file}"));
        }

        fn warning(&self, message: &str) {
            self.0.lock().unwrap().push(message.to_owned());
        }
    }

    /// A directory with one file of weights, and a plan for it.
    struct Case {
        dir: tempfile::TempDir,
        plan: Plan,
    }

    impl Case {
        fn new(hashed: bool) -> Case {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            let contents = vec![7; 1 << 20];
            fs::write(&path, &contents).unwrap();
            let mut plan = Plan::from_yaml(include_str!("../../../../schemas/tests/plan.yaml")).unwrap();
            plan.files = vec![FileRecord {
                path: "weights".into(),
                role: FileRole::Weights,
                bytes: ByteSize(1 << 20),
                sampled: sampled(&mut File::open(&path).unwrap(), 1 << 20).unwrap(),
                blake3: hashed.then(|| blake3::hash(&contents).to_hex().to_string()),
            }];
            // Files written less than 20 ms ago are not recorded.
            std::thread::sleep(Duration::from_millis(30));
            Case { dir, plan }
        }

        /// Changes one bit between two samples.
        fn flip(&self) {
            let mut bytes = fs::read(self.dir.path().join("weights")).unwrap();
            bytes[5000] ^= 1;
            fs::write(self.dir.path().join("weights"), bytes).unwrap();
            std::thread::sleep(Duration::from_millis(30));
        }

        /// Whether verification succeeds, and what it reported.
        fn check(&self, always: bool) -> (bool, Vec<String>) {
            let heard = Heard::default();
            let checked = check_knowing(&self.plan, self.dir.path(), Verify::Default, always, &heard);
            (checked.is_ok(), heard.0.into_inner().unwrap())
        }
    }

    #[test]
    fn small_files_are_hashed_whole_at_each_start() {
        let case = Case::new(true);
        for _ in 0..2 {
            assert_eq!(case.check(true), (true, vec!["comparing weights".to_owned()]));
        }
        assert!(!case.dir.path().join(VERIFIED_FILE).exists());
        case.flip();
        assert!(!case.check(true).0);
    }

    #[test]
    fn large_files_are_hashed_whole_when_their_identity_changed() {
        let case = Case::new(true);
        let comparing = || vec!["comparing weights".to_owned()];
        assert_eq!(case.check(false), (true, comparing()));
        assert_eq!(case.check(false), (true, vec![]));
        case.flip();
        assert_eq!(case.check(false), (false, comparing()));
        assert_eq!(case.check(false), (false, comparing()));
        case.flip();
        assert_eq!(case.check(false), (true, comparing()));
        assert_eq!(case.check(false), (true, vec![]));
        fs::remove_file(case.dir.path().join(VERIFIED_FILE)).unwrap();
        assert_eq!(case.check(false), (true, comparing()));
        let left: Vec<_> = fs::read_dir(case.dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(left.len(), 2, "{left:?}");
    }

    #[test]
    fn a_changed_file_without_a_full_hash_causes_a_warning() {
        let case = Case::new(false);
        let path = case.dir.path().join("weights");
        let mut verified = Verified::default();
        verified.note(&case.plan.files[0], FileIdentity::of(&fs::metadata(path).unwrap()), Known::AsSplit);
        fs::write(case.dir.path().join(VERIFIED_FILE), verified.to_string()).unwrap();
        assert_eq!(case.check(false), (true, vec![]));
        case.flip();
        let (good, heard) = case.check(false);
        assert!(
            good && heard[0].contains("weights was written to") && heard[0].contains("--hash-weights"),
            "{heard:?}"
        );
    }

    #[test]
    fn the_key_of_prepared_weights_depends_on_every_byte() {
        let (case, mut other) = (Case::new(true), Case::new(true));
        other.plan.files[0].blake3 = Some("0".repeat(64));
        assert_eq!(case.plan.files[0].sampled, other.plan.files[0].sampled);
        assert_ne!(contents(&case.plan, "a"), contents(&other.plan, "a"));
    }
}
