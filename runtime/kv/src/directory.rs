//! The directory of a store: one directory for each model, by its fingerprint, each with a lock and a file of records.

use crate::error::PageStoreError;
use crate::key::Fingerprint;
use std::fs::{DirBuilder, File, TryLockError, read_dir, remove_dir_all};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

const LOCK: &str = "lock";
const PAGES: &str = "pages.kv";

/// A model's directory, locked for as long as this lives.
#[derive(Debug)]
pub(crate) struct ModelDirectory {
    path: PathBuf,
    _lock: File,
}

impl ModelDirectory {
    /// Makes and locks the directory of a model.
    pub fn open(store: &Path, fingerprint: &Fingerprint) -> Result<Self, PageStoreError> {
        let path = store.join(fingerprint.short());
        private_directories().create(&path).map_err(|source| PageStoreError::Io { path: path.clone(), source })?;
        match lock(&path) {
            Ok(Some(lock)) => Ok(ModelDirectory { path, _lock: lock }),
            Ok(None) => Err(PageStoreError::InUse(path)),
            Err(source) => Err(PageStoreError::Io { path, source }),
        }
    }

    /// The file of records.
    pub fn pages(&self) -> PathBuf {
        self.path.join(PAGES)
    }

    /// Bytes of its file.
    pub fn bytes(&self) -> u64 {
        self.pages().metadata().map_or(0, |pages| pages.len())
    }

    /// Bytes that this model may take so that all models together take at most `limit`. Removes unused directories of other models,
    /// the one written longest ago first, until `wanted` bytes fit.
    pub fn make_room(&self, store: &Path, wanted: u64, limit: u64) -> u64 {
        let mut others = self.others(store);
        others.sort_by_key(|other| other.modified);
        let mut taken: u64 = others.iter().map(|other| other.bytes).sum();
        for other in others {
            if taken.saturating_add(wanted) <= limit {
                break;
            }
            if let Ok(Some(_lock)) = lock(&other.path)
                && remove_dir_all(&other.path).is_ok()
            {
                tracing::info!(path = %other.path.display(), "removed the KV pages of another model to make room");
                taken -= other.bytes;
            }
        }
        limit.saturating_sub(taken)
    }

    fn others(&self, store: &Path) -> Vec<Other> {
        let entries = read_dir(store).into_iter().flatten().flatten();
        let other = |path: PathBuf| {
            let pages = path.join(PAGES).metadata().ok()?;
            let modified = pages.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            let name = path.file_name()?.to_str()?;
            let is_model = name.len() == 16 && name.bytes().all(|byte| byte.is_ascii_hexdigit());
            let is_other = is_model && path != self.path;
            is_other.then_some(Other { bytes: pages.len(), modified, path })
        };
        entries.filter_map(|entry| other(entry.path())).collect()
    }
}

/// The directory of another model.
struct Other {
    path: PathBuf,
    bytes: u64,
    modified: SystemTime,
}

/// Locks a model's directory; `None` if another process has it.
fn lock(directory: &Path) -> std::io::Result<Option<File>> {
    let file = File::options().create(true).truncate(false).write(true).open(directory.join(LOCK))?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Creates directories that only this user may read: KV caches and sessions are conversations.
pub fn private_directories() -> DirBuilder {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::create_dir_all;

    #[cfg(unix)]
    #[test]
    fn only_the_user_may_read_a_directory() {
        use std::os::unix::fs::PermissionsExt;
        let store = tempfile::tempdir().unwrap();
        let directory = ModelDirectory::open(&store.path().join("kv"), &Fingerprint::of([("model", "a")])).unwrap();
        for path in [store.path().join("kv"), directory.path.clone()] {
            assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700, "{}", path.display());
        }
    }

    #[test]
    fn a_directory_belongs_to_one_and_others_make_room() {
        let store = tempfile::tempdir().unwrap();
        let [a, b, c] = ["a", "b", "c"].map(|name| Fingerprint::of([("model", name)]));
        let first = ModelDirectory::open(store.path(), &a).unwrap();
        assert!(matches!(ModelDirectory::open(store.path(), &a), Err(PageStoreError::InUse(_))));
        std::fs::write(first.pages(), [0; 100]).unwrap();
        let second = ModelDirectory::open(store.path(), &b).unwrap();
        std::fs::write(second.pages(), [0; 50]).unwrap();
        let third = ModelDirectory::open(store.path(), &c).unwrap();
        assert_eq!(third.make_room(store.path(), 60, 200), 50, "both are in use");
        drop(first);
        assert_eq!(third.make_room(store.path(), 40, 200), 50, "it is enough");
        assert_eq!(third.make_room(store.path(), 60, 200), 150);
        assert!(second.pages().exists() && !store.path().join(a.short()).exists());
    }

    #[test]
    fn the_model_written_longest_ago_leaves_first_and_foreign_directories_stay() {
        let store = tempfile::tempdir().unwrap();
        let own = ModelDirectory::open(store.path(), &Fingerprint::of([("model", "own")])).unwrap();
        let foreign = store.path().join("photographs");
        create_dir_all(&foreign).unwrap();
        std::fs::write(foreign.join(PAGES), [0; 100]).unwrap();
        let names: Vec<String> =
            (0..8).map(|model| Fingerprint::of([("model", &*model.to_string())]).short()).collect();
        for (days, name) in names.iter().enumerate() {
            create_dir_all(store.path().join(name)).unwrap();
            let pages = File::create(store.path().join(name).join(PAGES)).unwrap();
            pages.set_len(10).unwrap();
            pages
                .set_modified(SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(86_400 * (days as u64 + 1)))
                .unwrap();
        }
        assert_eq!(own.make_room(store.path(), 50, 80), 50);
        let left: Vec<bool> = names.iter().map(|name| store.path().join(name).exists()).collect();
        assert_eq!(left, [false, false, false, false, false, true, true, true]);
        assert!(foreign.join(PAGES).exists());
    }
}
