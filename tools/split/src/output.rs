//! The output directory: written aside, then moved into place in one step, so that a split that dies leaves either
//! what was there before or nothing.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// Name of the plan inside its directory.
pub const PLAN_FILE: &str = "plan.yaml";

/// What can go wrong with the output directory.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// There is a plan already.
    #[error("{} already holds a plan", .0.display())]
    PlanExists(PathBuf),
    /// There is something else.
    #[error("{} exists and holds no plan; it will not be replaced", .0.display())]
    NotAPlan(PathBuf),
    /// Another split writes there now.
    #[error("another hpp-split is writing {}", .0.display())]
    Busy(PathBuf),
    /// The file system refused.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was being done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl OutputError {
    /// What a person can do about it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            OutputError::PlanExists(_) => Some("replace it with --force, or choose another directory with --out"),
            OutputError::NotAPlan(_) => Some("choose another directory with --out"),
            OutputError::Busy(_) => Some("wait for it, or choose another directory with --out"),
            OutputError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
                Some("free space or choose a directory on another disk with --out; nothing was left half-written")
            }
            OutputError::Io { .. } => Some("choose a writable directory with --out"),
        }
    }
}

/// Attaches what was being done to an I/O error.
fn doing<T>(action: &'static str, path: &Path, result: io::Result<T>) -> Result<T, OutputError> {
    result.map_err(|source| OutputError::Io { action, path: path.to_owned(), source })
}

/// A directory being written.
#[derive(Debug)]
pub struct Output {
    target: PathBuf,
    staging: PathBuf,
    _lock: File,
}

impl Output {
    /// Prepares to write `target`. What an earlier, killed run left is kept for `resume`, else cleared.
    pub fn begin(target: &Path, force: bool, resume: bool) -> Result<Self, OutputError> {
        // A link keeps leading where it leads: the directory it names is replaced, not the link.
        let target = doing("resolve", target, hpp_io::resolve_link(target).and_then(std::path::absolute))?;
        refuse_foreign(&target, force)?;
        let parent = target.parent().unwrap_or(&target).to_owned();
        doing("create", &parent, fs::create_dir_all(&parent))?;
        let name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let lock_path = parent.join(format!(".{name}.lock"));
        let lock = doing("create", &lock_path, File::create(&lock_path))?;
        lock.try_lock().map_err(|_| OutputError::Busy(target.clone()))?;
        let staging = parent.join(format!(".{name}.partial"));
        if staging.exists() && !resume {
            doing("clear", &staging, fs::remove_dir_all(&staging))?;
        }
        doing("create", &staging, fs::create_dir_all(&staging))?;
        Ok(Output { target, staging, _lock: lock })
    }

    /// Where files are written until [`Output::commit`].
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// Where they will be.
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Writes one file whole.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), OutputError> {
        let path = self.staging.join(name);
        doing("write", &path, fs::write(&path, bytes).and_then(|()| File::open(&path)?.sync_all()))
    }

    /// Moves everything into place, the old plan (if any) out of the way in the same step.
    pub fn commit(self) -> Result<(), OutputError> {
        let old = self.target.exists();
        if old && !is_empty(&self.target) {
            doing("replace", &self.target, exchange(&self.staging, &self.target))?;
            doing("remove the old plan in", &self.staging, fs::remove_dir_all(&self.staging))?;
        } else {
            doing("create", &self.target, fs::rename(&self.staging, &self.target))?;
        }
        self.unlock();
        Ok(())
    }

    /// Gives up: removes what was written. (What a killed run left can be resumed from; a run that fails tidies up, because
    /// a disk that is full must not stay full.) Gives the directory where that is not possible.
    pub fn abandon(self) -> Option<PathBuf> {
        let left = fs::remove_dir_all(&self.staging).is_err() && self.staging.exists();
        self.unlock();
        left.then_some(self.staging)
    }

    fn unlock(&self) {
        let name = self.target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let _ = fs::remove_file(self.target.with_file_name(format!(".{name}.lock")));
    }
}

fn refuse_foreign(target: &Path, force: bool) -> Result<(), OutputError> {
    if !target.exists() || is_empty(target) {
        return Ok(());
    }
    match (target.join(PLAN_FILE).is_file(), force) {
        (true, true) => Ok(()),
        (true, false) => Err(OutputError::PlanExists(target.to_owned())),
        (false, _) => Err(OutputError::NotAPlan(target.to_owned())),
    }
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// Swaps two directories: in one step where the system can, else by way of a third name.
fn exchange(new: &Path, old: &Path) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        match renameat_with(CWD, new, CWD, old, RenameFlags::EXCHANGE) {
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS) => {}
            done => return done.map_err(Into::into),
        }
    }
    let aside = old.with_extension("replaced");
    fs::rename(old, &aside)?;
    fs::rename(new, old)?;
    fs::rename(aside, new)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan_dir(root: &Path, text: &str) -> PathBuf {
        let dir = root.join("plan");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join(PLAN_FILE), text).unwrap();
        dir
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_and_the_directory_it_leads_to_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let old = plan_dir(root.path(), "old");
        let link = root.path().join("link");
        std::os::unix::fs::symlink(old.file_name().unwrap(), &link).unwrap();
        let output = Output::begin(&link, true, false).unwrap();
        output.write(PLAN_FILE, b"new").unwrap();
        output.commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(old.join(PLAN_FILE)).unwrap(), b"new");
    }

    #[test]
    fn nothing_is_visible_before_the_commit() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("plan");
        let output = Output::begin(&target, false, false).unwrap();
        output.write(PLAN_FILE, b"new").unwrap();
        assert!(!target.exists());
        output.commit().unwrap();
        assert_eq!(fs::read(target.join(PLAN_FILE)).unwrap(), b"new");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "no leftovers");
    }

    #[test]
    fn an_existing_plan_needs_force_and_is_replaced_whole() {
        let root = tempfile::tempdir().unwrap();
        let target = plan_dir(root.path(), "old");
        fs::write(target.join("gpu_9.onnx"), "old").unwrap();
        assert!(matches!(Output::begin(&target, false, false), Err(OutputError::PlanExists(_))));
        let output = Output::begin(&target, true, false).unwrap();
        output.write(PLAN_FILE, b"new").unwrap();
        assert_eq!(fs::read(target.join(PLAN_FILE)).unwrap(), b"old");
        output.commit().unwrap();
        assert_eq!(fs::read(target.join(PLAN_FILE)).unwrap(), b"new");
        assert!(!target.join("gpu_9.onnx").exists());
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "no leftovers");
    }

    #[test]
    fn a_directory_without_a_plan_is_never_replaced() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("home");
        fs::create_dir(&target).unwrap();
        fs::write(target.join("thesis.txt"), "precious").unwrap();
        assert!(matches!(Output::begin(&target, true, false), Err(OutputError::NotAPlan(_))));
        assert!(target.join("thesis.txt").exists());
    }

    #[test]
    fn what_a_killed_run_left_does_not_matter() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("plan");
        let killed = Output::begin(&target, false, false).unwrap();
        killed.write("cpu_0.onnx", b"half").unwrap();
        drop(killed);
        let output = Output::begin(&target, false, false).unwrap();
        output.write(PLAN_FILE, b"new").unwrap();
        output.commit().unwrap();
        assert!(!target.join("cpu_0.onnx").exists());
    }

    #[test]
    fn two_splits_do_not_write_one_directory() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("plan");
        let first = Output::begin(&target, false, false).unwrap();
        assert!(matches!(Output::begin(&target, false, false), Err(OutputError::Busy(_))));
        assert_eq!(first.abandon(), None);
        assert!(Output::begin(&target, false, false).is_ok());
    }

    #[test]
    fn a_split_that_fails_leaves_nothing_even_where_it_could_resume() {
        let root = tempfile::tempdir().unwrap();
        let output = Output::begin(&root.path().join("plan"), false, true).unwrap();
        output.write("weights.bin.partial", b"half").unwrap();
        assert_eq!(output.abandon(), None);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
