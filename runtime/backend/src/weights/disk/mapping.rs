//! The file mappings of this process, and replacing them by anonymous memory.

use crate::loading::Loading;
use crate::weights::file::SECTOR;
use hpp_engine::BackendError;
use std::collections::BTreeSet;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use tracing::info;

/// Bytes of a huge page.
pub(super) const HUGE: usize = 2 << 20;

/// The limit on mappings of a process, if the system does not report it.
const DEFAULT_MAX_MAPPINGS: usize = 65_530;

/// How many mappings this process may have.
pub(super) fn most_mappings() -> usize {
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    allowed.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_MAX_MAPPINGS)
}

/// A private mapping of whole pages of a file.
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

/// Private writable mappings of files under a directory: how ONNX Runtime maps external weights.
pub(crate) fn mapped_under(dir: &Path) -> io::Result<Vec<Mapping>> {
    let dir = dir.canonicalize()?;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    Ok(maps.lines().filter_map(parse).filter(|mapping| mapping.path.starts_with(&dir)).collect())
}

/// Creates a session and returns the mappings of files under a directory that appeared meanwhile. They are this session's alone, because
/// the load lock is held. An error, and no session, if the mappings cannot be listed before.
pub(crate) fn claim<T>(
    loading: &Loading,
    dir: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<(T, Vec<Mapping>), BackendError> {
    let mapped = || {
        mapped_under(dir).map_err(|error| BackendError::Runtime {
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
/// Where memory is scarce, each page fault would read megabytes around it and so evict pages that the next fault needs. The mappings are
/// private and writable, so locking copies their pages, and the files are dropped from the page cache.
pub(crate) fn claim_locked<T>(
    loading: &Loading,
    dir: &Path,
    make: impl FnOnce() -> Result<T, BackendError>,
) -> Result<T, BackendError> {
    let (made, mappings) = claim(loading, dir, make)?;
    let bytes: usize = mappings.iter().map(|mapping| mapping.length).sum();
    let refused = mappings.iter().filter(|mapping| mapping.lock().is_err()).count();
    forget(&mappings);
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
    if mapped_under(dir).is_err() {
        return make();
    }
    let (made, mappings) = claim(loading, dir, make)?;
    for mapping in &mappings {
        // SAFETY: the mapping belongs to the session, which is alive; its pages have the contents of a file, from which they come back.
        unsafe { mapping.free_pages() };
    }
    Ok(made)
}

fn parse(line: &str) -> Option<Mapping> {
    let (fields, path) = (line.split_ascii_whitespace(), line.find('/').map(|at| &line[at..])?);
    let [range, rights, offset] = fields.take(3).collect::<Vec<_>>().try_into().ok()?;
    let (start, end) = range.split_once('-')?;
    let number = |text| usize::from_str_radix(text, 16).ok();
    let (start, end) = (number(start)?, number(end)?);
    // The system writes spaces as they are and line ends as \012.
    let path = PathBuf::from(path.replace("\\012", "\n"));
    (rights == "rw-p").then_some(Mapping { start, length: end - start, offset: number(offset)? as u64, path })
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
pub(crate) fn forget(mappings: &[Mapping]) {
    let paths: BTreeSet<&Path> = mappings.iter().map(|mapping| mapping.path.as_path()).collect();
    for file in paths.into_iter().filter_map(|path| File::open(path).ok()) {
        crate::os::drop_cached(&file, 0, 0);
    }
}

/// Frees the pages in an address range, which stays mapped.
///
/// # Safety
/// The range must be mapped, and nothing may need its contents.
pub(super) unsafe fn free_pages(addresses: Range<usize>) {
    // SAFETY: this function's contract.
    unsafe { libc::madvise(addresses.start as *mut libc::c_void, addresses.len(), libc::MADV_DONTNEED) };
}

/// Moves pages from one address range to another of the same length, replacing the pages there; false if the system cannot.
///
/// # Safety
/// Both ranges must be whole pages of memory that [`replace`] made, huge pages if `to` is one, and nothing may need their contents.
pub(super) unsafe fn move_pages(from: usize, to: &Range<usize>) -> bool {
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED | libc::MREMAP_DONTUNMAP;
    let (from, at) = (from as *mut libc::c_void, to.start as *mut libc::c_void);
    // SAFETY: both ranges are mapped (this function's contract) and stay so: `from` is left mapped without pages.
    unsafe { libc::mremap(from, to.len(), to.len(), flags, at) != libc::MAP_FAILED }
}

/// Replaces the mapping of an address range by anonymous memory, which reads as zeros until it is filled.
///
/// # Safety
/// The range must be whole mapped pages whose contents nothing needs.
pub(super) unsafe fn replace(addresses: &Range<usize>) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let (start, rights) = (addresses.start as *mut libc::c_void, libc::PROT_READ | libc::PROT_WRITE);
    // SAFETY: the range is mapped (this function's contract), so `MAP_FIXED` replaces nothing else.
    let at = unsafe { libc::mmap(start, addresses.len(), rights, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // The disk fills pages soon after they are allocated: huge pages are fewer allocations and fewer TLB misses.
    // SAFETY: advice for the mapping just made.
    unsafe { libc::madvise(start, addresses.len(), libc::MADV_HUGEPAGE) };
    Ok(())
}

/// Replaces the mapping of an address range by one without pages that may not be accessed: an access is a segmentation fault. Ranges of this
/// kind that follow each other are one mapping to the system.
///
/// # Safety
/// The range must be whole mapped pages whose contents nothing needs.
pub(super) unsafe fn forbid(addresses: &Range<usize>) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let start = addresses.start as *mut libc::c_void;
    // SAFETY: the range is mapped (this function's contract), so `MAP_FIXED` replaces nothing else.
    let at = unsafe { libc::mmap(start, addresses.len(), libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Forbids any access to an address range, which keeps its pages, until [`permit`].
///
/// # Safety
/// The range must be whole pages of memory that [`replace`] made, and nothing may access them until then.
pub(super) unsafe fn close(addresses: &Range<usize>) -> io::Result<()> {
    // SAFETY: this function's contract.
    unsafe { protect(addresses, libc::PROT_NONE) }
}

/// Allows access to an address range again.
///
/// # Safety
/// The range must be whole pages of memory that [`replace`] made.
pub(super) unsafe fn permit(addresses: &Range<usize>) -> io::Result<()> {
    // SAFETY: this function's contract.
    unsafe { protect(addresses, libc::PROT_READ | libc::PROT_WRITE) }
}

/// # Safety
/// The range must be whole pages of memory that [`replace`] made, and nothing may access them in a way that is not allowed.
unsafe fn protect(addresses: &Range<usize>, rights: libc::c_int) -> io::Result<()> {
    // SAFETY: this function's contract.
    match unsafe { libc::mprotect(addresses.start as *mut libc::c_void, addresses.len(), rights) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Mapping {
    /// Replaces the file's pages by anonymous memory, which reads as zeros until it is filled.
    ///
    /// # Safety
    /// Nothing may read the mapping before it is filled, or write to it, and it must stay mapped as long as the memory is used.
    pub(super) unsafe fn replace(&self) -> io::Result<()> {
        // SAFETY: this function's contract.
        unsafe { replace(&(self.start..self.start + self.length)) }
    }

    /// Frees its pages. Later reads see the file again, or zeros if the mapping was replaced.
    ///
    /// # Safety
    /// It must still be mapped, and nothing may need the contents of anonymous memory there.
    pub(super) unsafe fn free_pages(&self) {
        // SAFETY: this function's contract.
        unsafe { free_pages(self.start..self.start + self.length) };
    }

    /// Disables readahead: pages are read in random order.
    pub(super) fn read_at_random(&self) {
        // SAFETY: advice changes no contents; if the range is not mapped, the call fails.
        unsafe { libc::madvise(self.address(), self.length, libc::MADV_RANDOM) };
    }

    /// Locks its pages in memory; an error if the system refuses.
    pub(super) fn lock(&self) -> io::Result<()> {
        // SAFETY: locking changes no contents; if the range is not mapped, the call fails.
        if unsafe { libc::mlock(self.address(), self.length) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Undoes [`lock`](Self::lock): its pages may be freed again.
    pub(super) fn unlock(&self) {
        // SAFETY: unlocking changes no contents; if the range is not mapped or not locked, nothing happens.
        unsafe { libc::munlock(self.address(), self.length) };
    }

    /// Whether these mappings hold all of its addresses.
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

    fn address(&self) -> *mut libc::c_void {
        self.start as *mut libc::c_void
    }

    /// The addresses in it that huge pages may fill.
    pub(super) fn huge_pages(&self) -> Range<usize> {
        let (start, end) = (self.start.next_multiple_of(HUGE), (self.start + self.length) / HUGE * HUGE);
        start..end.max(start)
    }

    /// The first `bytes` of it, rounded up to whole pages, and the rest.
    pub(super) fn split(&self, bytes: u64) -> (Option<Mapping>, Option<Mapping>) {
        let at = (bytes.next_multiple_of(SECTOR) as usize).min(self.length);
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
    fn only_private_writable_mappings_of_files_count() {
        let line = "7f0000001000-7f0000004000 rw-p 00002000 fe:00 12   /a dir/model.data";
        let found = parse(line).unwrap();
        assert_eq!((found.start, found.length, found.offset), (0x7f0000001000, 0x3000, 0x2000));
        assert_eq!(found.path, Path::new("/a dir/model.data"));
        for other in [
            "7f0000001000-7f0000004000 r--p 00002000 fe:00 12 /a/model.data",
            "7f0000001000-7f0000004000 rw-s 00002000 fe:00 12 /a/model.data",
            "7f0000001000-7f0000004000 rw-p 00000000 00:00 0 [heap]",
            "7f0000001000-7f0000004000 rw-p 00000000 00:00 0",
            "nonsense",
        ] {
            assert_eq!(parse(other), None, "{other}");
        }
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
    fn huge_pages_are_aligned_to_their_size() {
        assert_eq!(mapping(0x1000, 0x60_0000, 0).huge_pages(), 0x20_0000..0x60_0000);
        assert_eq!(mapping(0x20_0000, 0x20_0000, 0).huge_pages(), 0x20_0000..0x40_0000);
        assert!(mapping(0x1000, 0x20_0000, 0).huge_pages().is_empty());
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
