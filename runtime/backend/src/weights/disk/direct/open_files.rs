//! A cache of open weight files. The system limits the open files of a process, and a plan may read from hundreds. So the most recently
//! used files stay open, each once for all sessions of a backend, and the others are reopened when a read needs them.

use crate::weights::file::{FileVersion, WeightFile};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Most files kept open.
const MAX_OPEN: usize = 256;

/// The open files.
pub(super) struct OpenFiles {
    most: usize,
    /// Least recently used first.
    open: Mutex<Vec<Arc<WeightFile>>>,
}

impl Default for OpenFiles {
    /// Keeps up to a quarter of the descriptors that this process may have.
    fn default() -> Self {
        OpenFiles::keeping(crate::os::most_open_files().map_or(MAX_OPEN, |limit| (limit / 4).clamp(1, MAX_OPEN)))
    }
}

impl OpenFiles {
    /// Keeps at most `most` files open, besides those being read.
    pub fn keeping(most: usize) -> Self {
        OpenFiles { most, open: Mutex::default() }
    }

    /// A file to read from. Later reads fail if the file has changed since this call.
    pub fn file(self: &Arc<Self>, path: &Path) -> io::Result<NamedFile> {
        let is_current = |file: &WeightFile| file.check().is_ok();
        let was = self.open(path, is_current)?.version();
        Ok(NamedFile { path: path.to_owned(), was, files: Arc::clone(self) })
    }

    /// The open file at a path if it `is_wanted`, else the file opened now.
    fn open(&self, path: &Path, is_wanted: impl Fn(&WeightFile) -> bool) -> io::Result<Arc<WeightFile>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let known = open.iter().position(|file| file.path() == path).map(|at| open.remove(at));
        let file = match known.filter(|file| is_wanted(file)) {
            Some(file) => file,
            None => {
                // Close others first: there may be no free descriptor.
                let surplus = (open.len() + 1).saturating_sub(self.most);
                open.drain(..surplus);
                Arc::new(WeightFile::open(path)?)
            }
        };
        open.push(Arc::clone(&file));
        Ok(file)
    }
}

/// A file that is opened for each read if the cache has closed it.
#[derive(Clone)]
pub(super) struct NamedFile {
    path: PathBuf,
    was: FileVersion,
    files: Arc<OpenFiles>,
}

/// The source of a read.
#[derive(Clone)]
pub(super) enum ReadFrom {
    /// A file that its owner keeps open.
    Open(Arc<WeightFile>),
    /// A file of the cache.
    Named(Arc<NamedFile>),
}

impl ReadFrom {
    /// The open file; an error if it has changed.
    pub fn open(&self) -> io::Result<Arc<WeightFile>> {
        let file = match self {
            ReadFrom::Open(file) => Arc::clone(file),
            ReadFrom::Named(named) => named.files.open(&named.path, |file| file.version() == named.was)?,
        };
        match self {
            ReadFrom::Named(named) if file.version() != named.was => Err(file.changed_since(named.was)),
            _ => file.check().map(|()| file),
        }
    }

    pub fn path(&self) -> &Path {
        match self {
            ReadFrom::Open(file) => file.path(),
            ReadFrom::Named(named) => &named.path,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Descriptors of this process that refer to files under a directory.
    fn descriptors(dir: &Path) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        all.filter_map(|entry| std::fs::read_link(entry.path()).ok()).filter(|path| path.starts_with(dir)).count()
    }

    #[test]
    fn the_cache_bounds_open_files_and_shares_them() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        let files = Arc::new(OpenFiles::keeping(3));
        let path = |number: usize| dir.join(format!("weights_{number}"));
        (0..8).for_each(|number| std::fs::write(path(number), vec![number as u8; 10]).unwrap());
        let named: Vec<ReadFrom> =
            (0..16).map(|number| ReadFrom::Named(Arc::new(files.file(&path(number % 8)).unwrap()))).collect();
        assert_eq!(descriptors(&dir), 3);
        for (number, from) in named.iter().enumerate().chain(named.iter().enumerate().rev()) {
            assert_eq!(from.open().unwrap().path(), path(number % 8));
            assert!(descriptors(&dir) <= 3);
        }
        // A reader keeps its file open, whatever is opened meanwhile.
        let first = named[0].open().unwrap();
        named.iter().for_each(|from| drop(from.open().unwrap()));
        first.check().unwrap();
        assert_eq!(first.expected(0, 100), 10);
    }

    #[test]
    fn a_file_that_changed_while_it_was_closed_is_an_error_for_its_earlier_readers() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("first"), dir.path().join("second"));
        for most in [1, 2] {
            std::fs::write(&first, [1; 10]).unwrap();
            std::fs::write(&second, [2; 10]).unwrap();
            let files = Arc::new(OpenFiles::keeping(most));
            let named = |path: &Path| ReadFrom::Named(Arc::new(files.file(path).unwrap()));
            let (old, other) = (named(&first), named(&second));
            other.open().unwrap();
            std::fs::write(&first, [3; 20]).unwrap();
            let error = old.open().unwrap_err().to_string();
            assert!(error.contains("had 10 bytes and has 20"), "{error}");
            let new = named(&first);
            new.open().unwrap();
            assert!(old.open().is_err());
            new.open().unwrap();
        }
    }
}
