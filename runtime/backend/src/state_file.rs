//! States on disk: ranges of one file without a name, mapped into memory, of which a few are in memory at a time.
//!
//! The mapping is shared, so the pages in memory are those of the page cache and nothing is copied. [`Pages::prefetch`] asks the system to
//! read ahead. [`StateFile::evict`] starts to write what has changed, and drops the pages of its previous call, whose writes went on during
//! a run. Blocks are allocated when a range is reserved: a write to a mapping of a full disk would raise SIGBUS. The file keeps the blocks of
//! free ranges for the next sequences: a file system that discards each freed block at once (ext4 with `discard`) took up to 20 s to free those of 16
//! sequences while other programs used the disk.

use crate::os::Pages;
use hpp_schema::memory::state_window;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The starts and lengths of ranges are multiples of this: the largest page size of the systems that this runs on.
const ALIGNMENT: u64 = 64 << 10;

/// A file without a name; the system removes it when the process ends.
pub(crate) struct StateFile {
    file: File,
    ranges: Mutex<Ranges>,
}

#[derive(Default)]
struct Ranges {
    /// The end of the last range.
    end: u64,
    /// The starts of free ranges, by length. Sequences have states of the same sizes, so a range is used again as a whole.
    free: BTreeMap<u64, Vec<u64>>,
    /// What the last call of [`StateFile::evict`] has started to write.
    evicting: Vec<Range<u64>>,
    /// Bytes that may be in memory: the window of the largest call.
    window: u64,
    /// Bytes in memory of the ranges that stay there between their turns, by start.
    kept: BTreeMap<u64, u64>,
}

impl Ranges {
    /// Decides whether the pages of a call of [`StateFile::evict`] stay in memory. They stay if the window has room for them, for the pages
    /// that stay already, and for three calls as large, of which one is used, one is read and one is written.
    fn keep(&mut self, call: &[(Range<u64>, u64)]) -> bool {
        let length = |(range, _): &(Range<u64>, u64)| range.end - range.start;
        self.window = self.window.max(state_window(call.iter().map(length).sum()));
        self.kept.retain(|start, _| call.iter().all(|(range, _)| range.start != *start));
        let resident: u64 = call.iter().map(|(_, resident)| resident).sum();
        let kept: u64 = self.kept.values().sum();
        let fits = kept.saturating_add(resident).saturating_add(state_window(resident)) <= self.window;
        if fits {
            self.kept.extend(call.iter().map(|(range, resident)| (range.start, *resident)));
        }
        fits
    }
}

impl StateFile {
    /// A new file in a directory.
    pub fn create(dir: &Path) -> io::Result<Arc<Self>> {
        Ok(Arc::new(StateFile { file: tempfile::tempfile_in(dir)?, ranges: Mutex::default() }))
    }

    fn ranges(&self) -> MutexGuard<'_, Ranges> {
        self.ranges.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Maps a range of zeros.
    pub fn reserve(self: &Arc<Self>, bytes: u64) -> io::Result<Pages> {
        let too_large = || io::Error::from(io::ErrorKind::FileTooLarge);
        let length = bytes.max(1).checked_next_multiple_of(ALIGNMENT).ok_or_else(too_large)?;
        Pages::map(FileRange { file: Arc::clone(self), start: self.allocate(length).ok_or_else(too_large)??, length })
    }

    /// Allocates blocks for a range that nobody has, and returns its start. `None` if the file cannot be so long.
    fn allocate(&self, length: u64) -> Option<io::Result<u64>> {
        let mut ranges = self.ranges();
        let used_before = ranges.free.get_mut(&length).and_then(Vec::pop);
        let start = used_before.unwrap_or(ranges.end);
        let end = start.checked_add(length)?;
        let allocated = system::allocate(&self.file, start, length).or_else(|_| {
            // Free ranges of other lengths may have the blocks that are missing.
            let free = ranges.free.iter().flat_map(|(length, starts)| starts.iter().map(|start| (*start, *length)));
            free.for_each(|(start, length)| drop(system::free(&self.file, start, length)));
            system::allocate(&self.file, start, length)
        });
        if let Err(error) = allocated {
            // Some of its blocks may be allocated.
            let _ = system::free(&self.file, start, length);
            used_before.into_iter().for_each(|start| ranges.free.entry(length).or_default().push(start));
            return Some(Err(error));
        }
        ranges.end = ranges.end.max(end);
        Some(Ok(start))
    }

    /// Keeps the pages of these mappings in memory if there is room for them until they are used again. Else unmaps them and starts to
    /// write what has changed in them. Then waits for the writes of the previous call, and removes the pages of that call from memory.
    pub fn evict(&self, mappings: &[&Pages]) {
        let ranges = mappings.iter().filter_map(|pages| Some((*pages, pages.range()?)));
        let call: Vec<(&Pages, Range<u64>)> = ranges.collect();
        let sizes: Vec<_> = call.iter().map(|(pages, range)| (range.clone(), pages.resident())).collect();
        let mut evicting = Vec::with_capacity(call.len());
        if !self.ranges().keep(&sizes) {
            for (pages, range) in call {
                pages.unmap_pages();
                system::start_write(&self.file, range.clone());
                evicting.push(range);
            }
        }
        let before = std::mem::replace(&mut self.ranges().evicting, evicting);
        before.into_iter().for_each(|range| system::drop_written(&self.file, range));
    }
}

/// Whether the files of a directory are in memory.
#[cfg(target_os = "linux")]
pub(crate) fn is_in_memory(dir: &Path) -> bool {
    /// The types of tmpfs and ramfs, of `linux/magic.h`.
    const IN_MEMORY: [u64; 2] = [0x0102_1994, 0x8584_58f6];
    rustix::fs::statfs(dir).is_ok_and(|found| IN_MEMORY.contains(&(found.f_type as u64)))
}

/// Unknown on other systems.
#[cfg(not(target_os = "linux"))]
pub(crate) fn is_in_memory(_: &Path) -> bool {
    false
}

/// A range of the file that belongs to one mapping.
pub(crate) struct FileRange {
    file: Arc<StateFile>,
    start: u64,
    length: u64,
}

impl FileRange {
    /// The file.
    pub fn file(&self) -> &Arc<StateFile> {
        &self.file
    }

    /// The handle to map.
    #[cfg(unix)]
    pub fn handle(&self) -> &File {
        &self.file.file
    }

    /// The offset of its first byte.
    pub fn start(&self) -> u64 {
        self.start
    }

    /// Its length in bytes.
    pub fn length(&self) -> u64 {
        self.length
    }
}

impl Drop for FileRange {
    fn drop(&mut self) {
        self.file.ranges().kept.remove(&self.start);
        // The next owner finds zeros. If that fails, nobody else gets the range.
        if system::zero(&self.file.file, self.start, self.length).is_ok() {
            self.file.ranges().free.entry(self.length).or_default().push(self.start);
        }
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::File;
    use std::io;
    use std::ops::Range;
    use std::os::fd::AsRawFd;

    fn offset(bytes: u64) -> io::Result<libc::off_t> {
        libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge.into())
    }

    /// Allocates blocks, so that no later write finds the disk full.
    pub fn allocate(file: &File, start: u64, length: u64) -> io::Result<()> {
        // SAFETY: changes the file alone, through a descriptor that is open while this runs.
        match unsafe { libc::posix_fallocate(file.as_raw_fd(), offset(start)?, offset(length)?) } {
            0 => Ok(()),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }

    /// Makes the range read as zeros and removes its pages from memory. Frees the blocks where the file system cannot keep them (tmpfs).
    pub fn zero(file: &File, start: u64, length: u64) -> io::Result<()> {
        let mode = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: as in `allocate`; the mapping of the range is gone.
        match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset(start)?, offset(length)?) } {
            0 => Ok(()),
            _ => free(file, start, length),
        }
    }

    /// Frees the blocks: the range reads as zeros.
    pub fn free(file: &File, start: u64, length: u64) -> io::Result<()> {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: as in `allocate`; the mapping of the range is gone.
        match unsafe { libc::fallocate(file.as_raw_fd(), mode, offset(start)?, offset(length)?) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Starts to write changed pages. Errors are left to the system, which keeps the pages in memory.
    pub fn start_write(file: &File, range: Range<u64>) {
        let (Ok(start), Ok(length)) = (offset(range.start), offset(range.end - range.start)) else { return };
        // SAFETY: as in `allocate`.
        unsafe { libc::sync_file_range(file.as_raw_fd(), start, length, libc::SYNC_FILE_RANGE_WRITE) };
    }

    /// Waits for writes of a range, and removes its pages from memory.
    pub fn drop_written(file: &File, range: Range<u64>) {
        let (Ok(start), Ok(length)) = (offset(range.start), offset(range.end - range.start)) else { return };
        let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        // SAFETY: as in `allocate`.
        unsafe {
            libc::sync_file_range(file.as_raw_fd(), start, length, all);
            libc::posix_fadvise(file.as_raw_fd(), start, length, libc::POSIX_FADV_DONTNEED);
        }
    }
}

/// Elsewhere the system decides which pages stay in memory.
#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::File;
    use std::io;
    use std::ops::Range;

    pub fn allocate(file: &File, start: u64, length: u64) -> io::Result<()> {
        let end = start + length;
        if file.metadata()?.len() < end { file.set_len(end) } else { Ok(()) }
    }

    pub fn zero(_: &File, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn free(_: &File, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn start_write(_: &File, _: Range<u64>) {}

    pub fn drop_written(_: &File, _: Range<u64>) {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    fn bytes(pages: &mut Pages) -> &mut [u8] {
        // SAFETY: the mapping is as long, and the borrow is the only use of it.
        unsafe { std::slice::from_raw_parts_mut(pages.address(), pages.len()) }
    }

    #[test]
    fn contents_survive_eviction_and_pages_leave_memory() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::create(dir.path()).unwrap();
        let (mut a, mut b) = (file.reserve(1 << 20).unwrap(), file.reserve(1 << 20).unwrap());
        assert!(bytes(&mut a).iter().all(|byte| *byte == 0));
        bytes(&mut a).iter_mut().zip(0u32..).for_each(|(byte, at)| *byte = at as u8);
        bytes(&mut b).fill(7);
        assert_eq!((a.resident(), b.resident()), (1 << 20, 1 << 20));
        file.evict(&[&a]);
        file.evict(&[&b]);
        assert_eq!(a.resident(), 0, "written and dropped");
        a.prefetch(0, 1 << 20);
        assert!(bytes(&mut a).iter().zip(0u32..).all(|(byte, at)| *byte == at as u8));
        file.evict(&[]);
        assert_eq!(b.resident(), 0);
        assert!(bytes(&mut b).iter().all(|byte| *byte == 7));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "the file has no name");
    }

    /// Of eight caches of 1 MiB, as many stay in memory as fit into the space of three whole ones, in every round the same.
    #[test]
    fn short_states_stay_in_memory() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::create(dir.path()).unwrap();
        let mut caches: Vec<Pages> = (0..8).map(|_| file.reserve(1 << 20).unwrap()).collect();
        let mut in_memory_after = |held: usize| {
            for _ in 0..2 {
                for (at, cache) in caches.iter_mut().enumerate() {
                    bytes(cache)[..held].fill(at as u8);
                    file.evict(&[cache]);
                }
            }
            file.evict(&[]);
            assert!(caches.iter_mut().enumerate().all(|(at, cache)| bytes(cache)[0] == at as u8));
            file.evict(&[]);
            caches.iter().map(Pages::resident).collect::<Vec<_>>()
        };
        let pages = |count: u64| count * 4096;
        // 64 pages of each: eight calls and three more are 704 of 768 pages.
        assert_eq!(in_memory_after(64 * 4096), [pages(64); 8]);
        // 128 pages: three calls stay beside three more, the same in every round. (Reading a byte above brought a page of the others back.)
        let stay = |resident: Vec<u64>| resident.iter().map(|bytes| *bytes == pages(128)).collect::<Vec<_>>();
        let first = stay(in_memory_after(128 * 4096));
        assert_eq!(first.iter().filter(|stays| **stays).count(), 3, "{first:?}");
        assert_eq!(stay(in_memory_after(128 * 4096)), first);
        drop(caches);
        assert!(file.ranges().kept.is_empty());
    }

    #[test]
    fn a_range_that_was_freed_is_used_again_and_holds_zeros() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::create(dir.path()).unwrap();
        let mut first = file.reserve(100_000).unwrap();
        bytes(&mut first).fill(9);
        let start = first.range().unwrap().start;
        drop(first);
        let mut second = file.reserve(100_000).unwrap();
        assert_eq!(second.range().unwrap().start, start);
        assert!(bytes(&mut second).iter().all(|byte| *byte == 0));
        let third = file.reserve(100_000).unwrap();
        assert_ne!(third.range().unwrap().start, start);
        drop((second, third));
        let allocated = std::os::unix::fs::MetadataExt::blocks(&file.file.metadata().unwrap()) * 512;
        assert!(allocated == 256 << 10 || is_in_memory(dir.path()), "the file keeps its blocks: {allocated} bytes");
    }

    #[test]
    fn a_directory_in_memory_is_recognised() {
        assert!(!is_in_memory(tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap().path()));
        let shared = Path::new("/dev/shm");
        assert_eq!(is_in_memory(shared), std::fs::read_to_string("/proc/mounts").unwrap().contains("/dev/shm tmpfs"));
    }

    #[test]
    fn more_than_the_disk_has_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let file = StateFile::create(dir.path()).unwrap();
        assert!(file.reserve(1 << 50).is_err());
        assert!(file.reserve(4096).is_ok(), "what could not be allocated is free again");
    }
}
