//! The output directory. Files go to a staging directory that is renamed into place in one step, so that a killed split
//! leaves the previous contents, or nothing.

use crate::draft_files::DRAFT_DIR;
use hpp_model::CONFIG_FILES;
use hpp_schema::{PREPARED_DIR, Plan, VERIFIED_FILE};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Component, Path, PathBuf};

/// File name of the plan in its directory.
pub const PLAN_FILE: &str = "plan.yaml";
/// What hpp-split and hpp-exec write into a plan directory without a record in the plan.
const OWN_FILES: [&str; 3] = [PLAN_FILE, VERIFIED_FILE, PREPARED_DIR];
/// Names of files that every plan may have, for a plan that cannot be read; so may `gpu_N.onnx` and `cpu_N.onnx`.
const USUAL_FILES: [&str; 4] = ["tapped.onnx", "whole.onnx", "weights.bin", DRAFT_DIR];

/// Why the output directory cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// It already holds a plan.
    #[error("{} already holds a plan", .0.display())]
    PlanExists(PathBuf),
    /// It holds something other than a plan.
    #[error("{} exists and holds no plan; hpp-split does not replace it", .0.display())]
    NotAPlan(PathBuf),
    /// It holds files that do not belong to its plan.
    #[error("{} also holds {}, which hpp-split would delete and its plan does not name", dir.display(), first_names(names))]
    ForeignFiles {
        /// The directory.
        dir: PathBuf,
        /// Names of files and directories in it, sorted.
        names: Vec<String>,
    },
    /// Its plan cannot be read, so that nobody knows which files belong to it.
    #[error("hpp-split would delete {}, and cannot tell whether the plan in {} names them: it cannot be read", first_names(names), dir.display())]
    UnknownFiles {
        /// The directory.
        dir: PathBuf,
        /// Names of files and directories in it, sorted.
        names: Vec<String>,
    },
    /// The model lies in it.
    #[error("the model {} lies in the plan directory that would be replaced", .0.display())]
    ModelInside(PathBuf),
    /// Another hpp-split is writing it.
    #[error("another hpp-split is writing {}", .0.display())]
    Busy(PathBuf),
    /// A file operation failed.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// The operation.
        action: &'static str,
        /// Its path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl OutputError {
    /// What the user can do.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            OutputError::PlanExists(_) => Some("replace it with --force, or choose another directory with --out"),
            OutputError::NotAPlan(_) | OutputError::ModelInside(_) => Some("choose another directory with --out"),
            OutputError::ForeignFiles { .. } => Some("move them elsewhere, or choose another directory with --out"),
            OutputError::UnknownFiles { .. } => Some("remove the directory yourself, or choose another one with --out"),
            OutputError::Busy(_) => Some("wait for it, or choose another directory with --out"),
            OutputError::Io { source, .. } if hpp_io::is_full_disk(source) => Some(
                "free space (or raise `ulimit -f`), or choose a directory on another disk with --out; no partial files were left",
            ),
            OutputError::Io { .. } => Some("choose a writable directory with --out"),
        }
    }
}

/// The first names of a list, for a message.
fn first_names(names: &[String]) -> String {
    match names {
        [one] => one.clone(),
        [one, other] => format!("{one} and {other}"),
        [one, other, rest @ ..] => format!("{one}, {other} and {} more", rest.len()),
        [] => String::new(),
    }
}

/// Adds operation and path to an I/O error.
fn io_context<T>(action: &'static str, path: &Path, result: io::Result<T>) -> Result<T, OutputError> {
    result.map_err(|source| OutputError::Io { action, path: path.to_owned(), source })
}

/// Which files of a killed run the next run keeps and continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resume {
    /// Nothing.
    Nothing,
    /// Files in this directory of the plan.
    Directory(&'static str),
    /// All files.
    Everything,
}

/// What an interrupted run leaves beside the plan's directory.
#[derive(Clone, Debug)]
pub struct Leftovers {
    staging: PathBuf,
    /// The lock file. An interrupted process does not remove it: it may still write into the staging directory, which another
    /// process would clear.
    lock: PathBuf,
}

impl Leftovers {
    /// The message about them; `None` if nothing is left.
    pub fn message(&self) -> Option<String> {
        self.staging.exists().then(|| {
            format!(
                "interrupted: {} keeps what was written, and {} is its lock; the same command continues or replaces it, or remove both",
                self.staging.display(),
                self.lock.display()
            )
        })
    }
}

/// A directory being written, locked against other processes.
#[derive(Debug)]
pub struct OutputDir {
    target: PathBuf,
    staging: PathBuf,
    _lock: File,
}

impl OutputDir {
    /// Prepares to write `target`. Clears the staging directory of a killed run, except for what is to be resumed.
    pub fn begin(target: &Path, force: bool, resume: Resume) -> Result<Self, OutputError> {
        // Replace the directory that a symlink points to, not the symlink.
        let target = io_context("resolve", target, hpp_io::resolve_link(target).and_then(std::path::absolute))?;
        let parent = target.parent().unwrap_or(&target).to_owned();
        // The lock and the staging directory are ours: an error names the directory that the user gave.
        let action = if target.exists() { "replace" } else { "create" };
        // Before the check: in `new/../plan` the plan is found only once `new` exists.
        io_context(action, &target, fs::create_dir_all(&parent))?;
        refuse_existing(&target, force)?;
        let name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let lock = io_context(action, &target, File::create(lock_path(&target)))?;
        lock.try_lock().map_err(|_| OutputError::Busy(target.clone()))?;
        let staging = parent.join(format!(".{name}.partial"));
        if staging.exists() {
            io_context("clear", &staging, clear(&staging, resume))?;
        }
        io_context(action, &target, fs::create_dir_all(&staging))?;
        Ok(OutputDir { target, staging, _lock: lock })
    }

    /// The directory that files are written to until [`OutputDir::commit`].
    pub fn staging(&self) -> &Path {
        &self.staging
    }

    /// The files that stay if this process ends before it commits.
    pub fn leftovers(&self) -> Leftovers {
        Leftovers { staging: self.staging.clone(), lock: lock_path(&self.target) }
    }

    /// The directory that the files are in after [`OutputDir::commit`].
    pub fn target(&self) -> &Path {
        &self.target
    }

    /// Renames the staging directory into place, in exchange for an existing plan, which it then removes.
    ///
    /// # Errors
    /// Meanwhile the directory got files that are not part of its plan; a file operation failed.
    pub fn commit(self) -> Result<(), OutputError> {
        let old = self.target.exists();
        if old && !is_empty(&self.target) {
            // Files may have come since the begin.
            if let Err(error) = refuse_foreign(&self.target) {
                self.abandon();
                return Err(error);
            }
            io_context("replace", &self.target, exchange(&self.staging, &self.target))?;
            io_context("remove the old plan in", &self.staging, fs::remove_dir_all(&self.staging))?;
        } else {
            io_context("create", &self.target, fs::rename(&self.staging, &self.target))?;
        }
        self.unlock();
        Ok(())
    }

    /// Removes the staging directory; returns its path if that fails. A run that fails does not leave files to resume
    /// from, because the disk may be full.
    pub fn abandon(self) -> Option<PathBuf> {
        let left = fs::remove_dir_all(&self.staging).is_err() && self.staging.exists();
        self.unlock();
        left.then_some(self.staging)
    }

    fn unlock(&self) {
        let _ = fs::remove_file(lock_path(&self.target));
    }
}

/// The file that is locked while a target is written.
fn lock_path(target: &Path) -> PathBuf {
    let name = target.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    target.with_file_name(format!(".{name}.lock"))
}

/// Writes and syncs a file.
pub fn write_synced(path: &Path, bytes: &[u8]) -> Result<(), OutputError> {
    // Windows flushes only through a handle that may write.
    let written = File::create(path).and_then(|mut file| file.write_all(bytes).and_then(|()| file.sync_all()));
    io_context("write", path, written)
}

/// Creates a directory unless it exists.
pub fn create_dir(path: &Path) -> Result<(), OutputError> {
    io_context("create", path, fs::create_dir_all(path))
}

/// Refuses a directory that [`OutputDir::begin`] would refuse, before anything that takes long.
pub fn check_target(target: &Path, force: bool) -> Result<(), OutputError> {
    let target = io_context("resolve", target, hpp_io::resolve_link(target).and_then(std::path::absolute))?;
    refuse_existing(&target, force)
}

fn refuse_existing(target: &Path, force: bool) -> Result<(), OutputError> {
    if !target.exists() || is_empty(target) {
        return Ok(());
    }
    match (target.join(PLAN_FILE).is_file(), force) {
        (true, true) => refuse_foreign(target),
        (true, false) => Err(OutputError::PlanExists(target.to_owned())),
        (false, _) => Err(OutputError::NotAPlan(target.to_owned())),
    }
}

/// Refuses a plan directory with files that are not part of its plan, which replacing it would delete.
fn refuse_foreign(target: &Path) -> Result<(), OutputError> {
    let text = fs::read_to_string(target.join(PLAN_FILE)).unwrap_or_default();
    let recorded = Plan::file_paths(&text);
    let entries = io_context("read", target, fs::read_dir(target))?.flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut names: Vec<String> = names
        .filter(|name| !is_made_without_record(name))
        .filter(|name| match &recorded {
            Some(paths) => !paths.iter().any(|path| begins_with(path, name)),
            None => !is_usual(name),
        })
        .collect();
    names.sort_unstable();
    let dir = target.to_owned();
    match recorded {
        _ if names.is_empty() => Ok(()),
        Some(_) => Err(OutputError::ForeignFiles { dir, names }),
        None => Err(OutputError::UnknownFiles { dir, names }),
    }
}

/// Whether hpp-split or hpp-exec makes files of this name in plan directories without a record in the plan: their own files, the
/// configuration beside a quantized model, and the unfinished `VERIFIED_FILE` of a killed hpp-exec.
fn is_made_without_record(name: &str) -> bool {
    OWN_FILES.contains(&name)
        || CONFIG_FILES.contains(&name)
        || name.strip_prefix('.').is_some_and(|name| name.starts_with(VERIFIED_FILE))
}

/// Whether a path begins with this name.
fn begins_with(path: &str, name: &str) -> bool {
    Path::new(path).components().next() == Some(Component::Normal(name.as_ref()))
}

/// Whether plans have files of this name, whatever their model.
fn is_usual(name: &str) -> bool {
    let number = name.strip_suffix(".onnx").and_then(|name| name.strip_prefix("gpu_").or(name.strip_prefix("cpu_")));
    USUAL_FILES.contains(&name) || number.is_some_and(|number| number.parse::<u32>().is_ok())
}

/// Refuses a model in a plan directory that is replaced: its plan would refer to files that are gone.
pub fn refuse_model_inside(target: &Path, model: &Path) -> Result<(), OutputError> {
    let real = |path: &Path| fs::canonicalize(path).ok();
    match real(target).zip(real(model)) {
        Some((target, inside)) if inside.starts_with(&target) && target.join(PLAN_FILE).is_file() => {
            Err(OutputError::ModelInside(model.to_owned()))
        }
        _ => Ok(()),
    }
}

/// Removes a staging directory, except for what is to be resumed.
fn clear(staging: &Path, resume: Resume) -> io::Result<()> {
    let kept = match resume {
        Resume::Everything => return Ok(()),
        Resume::Nothing => return fs::remove_dir_all(staging),
        Resume::Directory(kept) => kept,
    };
    for entry in fs::read_dir(staging)? {
        let entry = entry?;
        match entry.file_type()?.is_dir() {
            true if entry.file_name() == kept => {}
            true => fs::remove_dir_all(entry.path())?,
            false => fs::remove_file(entry.path())?,
        }
    }
    Ok(())
}

fn is_empty(dir: &Path) -> bool {
    fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_none())
}

/// Swaps two directories: atomically where the system supports it, else through a third name.
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

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    #[cfg(unix)]
    #[test]
    fn a_symlink_stays_and_its_target_is_replaced() {
        let root = tempfile::tempdir().unwrap();
        let old = plan_dir(root.path(), "old");
        let link = root.path().join("link");
        std::os::unix::fs::symlink(old.file_name().unwrap(), &link).unwrap();
        let output = OutputDir::begin(&link, true, Resume::Nothing).unwrap();
        write_synced(&output.staging().join(PLAN_FILE), b"new").unwrap();
        output.commit().unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(fs::read(old.join(PLAN_FILE)).unwrap(), b"new");
    }

    /// Not the parent, the lock or the staging directory, which nobody asked for.
    #[cfg(target_os = "linux")]
    #[test]
    fn an_error_names_the_directory_that_the_user_gave() {
        for out in ["/proc/plan", "/proc/plan/inside"] {
            let error = OutputDir::begin(Path::new(out), false, Resume::Nothing).unwrap_err();
            assert_eq!(error.to_string(), format!("cannot create {out}"));
            assert_eq!(error.hint(), Some("choose a writable directory with --out"));
        }
    }

    #[test]
    fn nothing_is_visible_before_the_commit() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("plan");
        let output = OutputDir::begin(&target, false, Resume::Nothing).unwrap();
        write_synced(&output.staging().join(PLAN_FILE), b"new").unwrap();
        assert!(!target.exists());
        output.commit().unwrap();
        assert_eq!(fs::read(target.join(PLAN_FILE)).unwrap(), b"new");
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "no leftovers");
    }

    #[test]
    fn a_plan_behind_a_missing_directory_needs_force_too() {
        let root = tempfile::tempdir().unwrap();
        let plan = root.path().join("plan");
        fs::create_dir(&plan).unwrap();
        fs::write(plan.join(PLAN_FILE), "").unwrap();
        let refused = OutputDir::begin(&root.path().join("new/../plan"), false, Resume::Nothing);
        assert!(matches!(refused, Err(OutputError::PlanExists(_))));
        assert_eq!(names(&plan), [PLAN_FILE]);
    }

    #[test]
    fn an_existing_plan_needs_force_and_is_replaced_whole() {
        let root = tempfile::tempdir().unwrap();
        let target = plan_dir(root.path(), "old");
        fs::write(target.join("gpu_9.onnx"), "old").unwrap();
        assert!(matches!(OutputDir::begin(&target, false, Resume::Nothing), Err(OutputError::PlanExists(_))));
        let output = OutputDir::begin(&target, true, Resume::Nothing).unwrap();
        write_synced(&output.staging().join(PLAN_FILE), b"new").unwrap();
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
        assert!(matches!(OutputDir::begin(&target, true, Resume::Nothing), Err(OutputError::NotAPlan(_))));
        assert!(target.join("thesis.txt").exists());
    }

    #[test]
    fn a_plan_directory_with_files_of_others_is_never_replaced() {
        let text = include_str!("../../../runtime/engine/tests/support/toy.yaml").replace(
            "files: []",
            "files:\n  - { path: cpu_0.onnx, role: partition, bytes: 1 B, sampled: s }\n  - { path: draft/plan.yaml, role: draft, bytes: 1 B, sampled: s }",
        );
        assert!(Plan::from_yaml(&text).unwrap().files.len() == 2);
        for (plan, own) in [
            (text.as_str(), vec!["cpu_0.onnx", "draft", "prepared", "verified.txt", ".verified.txt.123"]),
            ("damaged", vec!["gpu_9.onnx"]),
        ] {
            let root = tempfile::tempdir().unwrap();
            let target = plan_dir(root.path(), plan);
            own.iter().for_each(|name| fs::write(target.join(name), "own").unwrap());
            check_target(&target, true).unwrap();
            let output = OutputDir::begin(&target, true, Resume::Nothing).unwrap();
            for name in ["answers.json", "notes.txt", "thesis.txt"] {
                fs::write(target.join(name), "precious").unwrap();
            }
            let said = check_target(&target, true).unwrap_err().to_string();
            assert!(said.contains("answers.json, notes.txt and 1 more"), "{said}");
            // They came while it was written.
            assert!(output.commit().unwrap_err().to_string().contains("hpp-split would delete"));
            assert!(!root.path().join(".plan.partial").exists());
            assert!(target.join("thesis.txt").exists() && target.join(own[0]).exists());
        }
    }

    #[test]
    fn a_model_inside_the_plan_that_is_replaced_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let target = plan_dir(root.path(), "old");
        let model = target.join("whole.onnx");
        fs::write(&model, "model").unwrap();
        let refused = refuse_model_inside(&target, &model);
        assert!(matches!(refused, Err(OutputError::ModelInside(path)) if path == model));
        assert!(refuse_model_inside(&target.join("new"), &model).is_ok());
        assert!(refuse_model_inside(&target, root.path()).is_ok(), "the plan is beside or in the model");
    }

    #[test]
    fn files_of_a_killed_run_are_cleared() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("plan");
        let killed = OutputDir::begin(&target, false, Resume::Nothing).unwrap();
        write_synced(&killed.staging().join("cpu_0.onnx"), b"half").unwrap();
        let leftovers = killed.leftovers();
        drop(killed);
        let left = names(root.path());
        let message = leftovers.message().unwrap();
        assert!(left.len() == 2 && left.iter().all(|name| message.contains(name.as_str())), "{message}: {left:?}");
        let output = OutputDir::begin(&target, false, Resume::Nothing).unwrap();
        write_synced(&output.staging().join(PLAN_FILE), b"new").unwrap();
        output.commit().unwrap();
        assert!(!target.join("cpu_0.onnx").exists() && leftovers.message().is_none());
        assert_eq!(names(root.path()), ["plan"], "the lock is gone too");
    }

    #[test]
    fn two_splits_do_not_write_one_directory() {
        let root = tempfile::tempdir().unwrap();
        let target = root.path().join("plan");
        let first = OutputDir::begin(&target, false, Resume::Nothing).unwrap();
        assert!(matches!(OutputDir::begin(&target, false, Resume::Nothing), Err(OutputError::Busy(_))));
        assert_eq!(first.abandon(), None);
        assert!(OutputDir::begin(&target, false, Resume::Nothing).is_ok());
    }

    #[test]
    fn a_failed_split_removes_its_files_even_with_resume() {
        let root = tempfile::tempdir().unwrap();
        let output = OutputDir::begin(&root.path().join("plan"), false, Resume::Everything).unwrap();
        write_synced(&output.staging().join("weights.bin.partial"), b"half").unwrap();
        assert_eq!(output.abandon(), None);
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    }
}
