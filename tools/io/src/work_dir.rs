//! Temporary directories. The owner removes its directory when it finishes. If the owner was killed, the next process
//! that creates one removes it.
//!
//! The owner locks a file in the directory. The operating system releases the lock when the process ends for any
//! reason, so a directory whose lock is free is abandoned.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use tempfile::TempDir;

/// The lock file in each directory.
const LOCK: &str = "lock";
/// Number of letters and digits after the prefix.
const SUFFIX: usize = 6;

/// A temporary directory, removed when dropped.
#[derive(Debug)]
pub struct WorkDir {
    dir: TempDir,
    /// `None` on a file system without locks, where no process removes abandoned directories.
    _lock: Option<File>,
}

impl WorkDir {
    /// Creates a directory in `parent` whose name begins with `prefix`, and removes abandoned ones.
    pub fn new(parent: &Path, prefix: &str) -> io::Result<Self> {
        loop {
            let dir = tempfile::Builder::new().prefix(prefix).rand_bytes(SUFFIX).tempdir_in(parent)?;
            // Another process may remove the directory before it is locked; then create a new one.
            match File::create(dir.path().join(LOCK)) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
                Ok(lock) => {
                    let locked = lock.lock().is_ok();
                    if dir.path().join(LOCK).exists() {
                        remove_abandoned(parent, prefix, dir.path());
                        return Ok(WorkDir { dir, _lock: locked.then_some(lock) });
                    }
                }
            }
        }
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }
}

/// Removes abandoned directories of this prefix that belong to the owner of `own`, a directory in use. Ignores errors: the next call tries again.
fn remove_abandoned(parent: &Path, prefix: &str, own: &Path) {
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let suffix = name.to_str().and_then(|name| name.strip_prefix(prefix));
        let is_ours =
            suffix.is_some_and(|suffix| suffix.len() == SUFFIX && suffix.bytes().all(|b| b.is_ascii_alphanumeric()));
        if !is_ours
            || entry.path() == own
            || !have_one_owner(&entry.path(), own)
            || !entry.file_type().is_ok_and(|kind| kind.is_dir())
        {
            continue;
        }
        let lock = File::options().write(true).create(true).truncate(false).open(entry.path().join(LOCK));
        if let Ok(lock) = lock
            && lock.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

/// Whether two directories belong to the same user. In a shared directory others may place files that block or redirect who opens them.
#[cfg(unix)]
fn have_one_owner(a: &Path, b: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let owner = |path: &Path| fs::symlink_metadata(path).map(|found| found.uid()).ok();
    owner(a).is_some() && owner(a) == owner(b)
}

/// Whether two directories belong to the same user: temporary directories do here.
#[cfg(not(unix))]
fn have_one_owner(_: &Path, _: &Path) -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn directories_of_killed_processes_are_removed_at_the_next_start() {
        let parent = tempfile::tempdir().unwrap();
        // One whose owner was killed while it worked, and one whose owner was killed between creating and locking it.
        fs::create_dir_all(parent.path().join(".work-abc123/stage-1")).unwrap();
        fs::write(parent.path().join(".work-abc123/lock"), "").unwrap();
        fs::create_dir(parent.path().join(".work-ABCDEF")).unwrap();
        let alive = WorkDir::new(parent.path(), ".work-").unwrap();
        let name = |dir: &WorkDir| dir.path().file_name().unwrap().to_str().unwrap().to_owned();
        assert_eq!(names(parent.path()), [name(&alive)]);
        fs::write(alive.path().join("half"), "x").unwrap();
        let other = WorkDir::new(parent.path(), ".work-").unwrap();
        assert!(alive.path().join("half").is_file(), "a directory in use stays");
        drop((alive, other));
        assert_eq!(names(parent.path()), [""; 0]);
    }

    #[test]
    fn other_directories_stay() {
        let parent = tempfile::tempdir().unwrap();
        for name in [".work-", ".work-mine", ".work-a/b123", ".work-a.b123", "x.work-abc123"] {
            fs::create_dir_all(parent.path().join(name)).unwrap();
        }
        fs::write(parent.path().join(".work-file12"), "").unwrap();
        let before = names(parent.path());
        drop(WorkDir::new(parent.path(), ".work-").unwrap());
        assert_eq!(names(parent.path()), before);
    }

    #[test]
    fn many_at_once_each_have_their_own() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..20 {
                        let dir = WorkDir::new(parent.path(), ".work-").unwrap();
                        fs::write(dir.path().join("x"), "x").unwrap();
                        assert_eq!(fs::read_to_string(dir.path().join("x")).unwrap(), "x");
                    }
                });
            }
        });
        assert_eq!(names(parent.path()), [""; 0]);
    }
}
