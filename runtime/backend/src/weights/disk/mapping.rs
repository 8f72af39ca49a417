//! The mappings of weight files that belong to one session.

use super::views;
use crate::loading::Loading;
use hpp_engine::BackendError;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tracing::info;

/// A mapping of whole pages of a file, which only this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Its address.
    pub start: usize,
    /// Its length, bytes.
    pub length: usize,
    /// Its offset in the file.
    pub offset: u64,
    /// The file.
    pub path: PathBuf,
}

/// Creates a session and returns the mappings of files under a directory that appeared meanwhile. They are this session's alone, because
/// the load lock is held. An error, and no session, if the mappings cannot be listed before.
pub(crate) fn claim<T>(
    loading: &Loading,
    dir: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<(T, Vec<Mapping>), BackendError> {
    let mapped = || {
        views::list(dir).map_err(|error| BackendError::Runtime {
            doing: format!("list the mappings of {}", dir.display()),
            cause: error.to_string(),
        })
    };
    loading.mapping(|| {
        let before = mapped()?;
        let made = make()?;
        Ok((made, new_since(&before, &mapped()?)))
    })
}

/// Creates a session and locks its mappings of files under a directory, so that the system does not evict the pages that kernels use there.
/// Where memory is scarce, each page fault would read megabytes around it and so evict pages that the next fault needs. On Linux the mappings
/// are private and writable, so locking copies their pages, and the files are dropped from the page cache.
pub(crate) fn claim_locked<T>(
    loading: &Loading,
    dir: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    let (made, mappings) = claim(loading, dir, make)?;
    let bytes: usize = mappings.iter().map(|mapping| mapping.length).sum();
    let refused = mappings.iter().filter(|mapping| mapping.lock().is_err()).count();
    drop_page_cache(&mappings);
    info!(bytes, refused, "weights locked where their files are mapped");
    Ok(made)
}

/// Creates a session, and drops the pages of files under a directory that its creation has read. These pages hold the weights that kernels
/// have packed into copies of their own, and the scales that are packed with them. If a run uses such a page after all, the system reads it
/// again.
pub(crate) fn claim_unread<T>(
    loading: &Loading,
    dir: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    if views::list(dir).is_err() {
        return make();
    }
    let (made, mappings) = claim(loading, dir, make)?;
    for mapping in &mappings {
        // SAFETY: the mapping belongs to the session, which is alive; its pages have the contents of a file, from which they come back.
        unsafe { mapping.free_pages() };
    }
    Ok(made)
}

/// The ranges in `now` that are not in `before`.
fn new_since(before: &[Mapping], now: &[Mapping]) -> Vec<Mapping> {
    let mut new = now.to_vec();
    for old in before {
        new = new.into_iter().flat_map(|mapping| without(mapping, old)).collect();
    }
    new
}

/// The parts of a mapping before and after another.
fn without(mapping: Mapping, other: &Mapping) -> Vec<Mapping> {
    let (start, end) = (mapping.start, mapping.start + mapping.length);
    let (from, to) = (other.start.clamp(start, end), (other.start + other.length).clamp(start, end));
    if from >= to {
        return vec![mapping];
    }
    let part = |start: usize, end: usize| Mapping {
        start,
        length: end - start,
        offset: mapping.offset + (start - mapping.start) as u64,
        path: mapping.path.clone(),
    };
    [part(start, from), part(to, end)].into_iter().filter(|part| part.length > 0).collect()
}

/// Drops the files of these mappings from the page cache, except pages that a process has mapped.
pub(crate) fn drop_page_cache(mappings: &[Mapping]) {
    let paths: BTreeSet<&Path> = mappings.iter().map(|mapping| mapping.path.as_path()).collect();
    for file in paths.into_iter().filter_map(|path| File::open(path).ok()) {
        crate::os::drop_cached(&file, 0, 0);
    }
}

impl Mapping {
    /// Frees its pages. Later reads see the file again, or zeros if the mapping was replaced.
    ///
    /// # Safety
    /// It must still be mapped, and nothing may need the contents of anonymous memory there.
    pub(super) unsafe fn free_pages(&self) {
        // SAFETY: this function's contract.
        unsafe { views::evict(&self.addresses()) };
    }

    /// Disables readahead: pages are read in random order.
    pub(super) fn advise_random(&self) {
        views::advise_random(&self.addresses());
    }

    /// Locks its pages in memory; an error if the system refuses.
    pub(super) fn lock(&self) -> io::Result<()> {
        views::lock(&self.addresses())
    }

    /// Undoes [`lock`](Self::lock): its pages may be freed again.
    #[cfg(target_os = "linux")]
    pub(super) fn unlock(&self) {
        views::unlock(&self.addresses());
    }

    /// Whether these mappings hold all of its addresses.
    #[cfg(target_os = "linux")]
    pub(super) fn is_within(&self, others: &[Mapping]) -> bool {
        let (mut at, end) = (self.start, self.start + self.length);
        while at < end {
            let holds = |other: &&Mapping| (other.start..other.start + other.length).contains(&at);
            let Some(found) = others.iter().find(holds) else { return false };
            at = found.start + found.length;
        }
        true
    }

    /// Its addresses.
    pub(super) fn addresses(&self) -> Range<usize> {
        self.start..self.start + self.length
    }

    /// The first `bytes` of it, rounded up to whole pages, and the rest.
    pub(super) fn split(&self, bytes: u64) -> (Option<Mapping>, Option<Mapping>) {
        let at = (bytes.next_multiple_of(views::page_step()) as usize).min(self.length);
        let part = |start: usize, length: usize| Mapping {
            start: self.start + start,
            length,
            offset: self.offset + start as u64,
            path: self.path.clone(),
        };
        let (first, rest) = (part(0, at), part(at, self.length - at));
        (Some(first).filter(|part| part.length > 0), Some(rest).filter(|part| part.length > 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(start: usize, length: usize, offset: u64) -> Mapping {
        Mapping { start, length, offset, path: "/a/model.data".into() }
    }

    #[test]
    fn new_mappings_are_separated_from_old_ones_they_were_merged_with() {
        let old = mapping(0x2000, 0x1000, 0x10000);
        let now = [mapping(0x1000, 0x4000, 0xf000), mapping(0x9000, 0x1000, 0)];
        let new = new_since(std::slice::from_ref(&old), &now);
        assert_eq!(new, [mapping(0x1000, 0x1000, 0xf000), mapping(0x3000, 0x2000, 0x11000), now[1].clone()]);
        assert_eq!(new_since(&now, &[old]), []);
    }

    #[test]
    fn parts_are_whole_pages() {
        let whole = mapping(0x1000, 0x4000, 0x2000);
        let (first, rest) = whole.split(0x1001);
        assert_eq!((first.unwrap().length, rest.unwrap()), (0x2000, mapping(0x3000, 0x2000, 0x4000)));
        assert_eq!(whole.split(0), (None, Some(whole.clone())));
        assert_eq!(whole.split(1 << 30), (Some(whole.clone()), None));
    }
}
