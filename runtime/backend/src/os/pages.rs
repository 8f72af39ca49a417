//! Zeroed memory whose pages take room once they are written: anonymous memory, or a mapped range of a file.

use crate::state_file::{FileRange, StateFile};
use std::io;
use std::sync::Arc;

/// Zeroed memory of fixed length, aligned to pages. A page is allocated when it is first written. (Windows counts all of it against the
/// limit on committed memory at once.)
pub(crate) struct Pages {
    at: *mut u8,
    length: usize,
    /// The range of a file that is mapped here; `None` for anonymous memory.
    range: Option<FileRange>,
}

// SAFETY: a mapping belongs to no thread, and reads and writes through its address are `unsafe` by themselves.
unsafe impl Send for Pages {}

impl Pages {
    /// Reserves at least one byte.
    pub fn reserve(length: usize) -> io::Result<Self> {
        let length = length.max(1);
        map(length).map(|at| Pages { at, length, range: None })
    }

    /// Maps a range of a file, shared, so that its pages can leave memory and come back.
    #[cfg(unix)]
    pub fn map(range: FileRange) -> io::Result<Self> {
        use std::os::fd::AsRawFd;
        let too_large = |_| io::Error::from(io::ErrorKind::FileTooLarge);
        let length = usize::try_from(range.length()).map_err(too_large)?;
        let start = libc::off_t::try_from(range.start()).map_err(too_large)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: the system chooses the address of the new mapping, so it replaces no other. Nobody else has the file, which has no name, or
        // this range of it.
        let at = unsafe {
            libc::mmap(std::ptr::null_mut(), length, access, libc::MAP_SHARED, range.handle().as_raw_fd(), start)
        };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // `prefetch` asks for what will be read, so a fault on the page of a new token need not read the pages around it.
        // SAFETY: advice about the mapping made above; it changes no contents.
        unsafe { libc::madvise(at, length, libc::MADV_RANDOM) };
        Ok(Pages { at: at.cast(), length, range: Some(range) })
    }

    /// Reserves anonymous memory instead: mapping files is implemented for Unix only.
    #[cfg(not(unix))]
    pub fn map(range: FileRange) -> io::Result<Self> {
        let length = usize::try_from(range.length()).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
        Pages::reserve(length)
    }

    /// The file that is mapped here.
    pub fn file(&self) -> Option<&Arc<StateFile>> {
        self.range.as_ref().map(FileRange::file)
    }

    /// The range of a file that is mapped here.
    pub fn range(&self) -> Option<std::ops::Range<u64>> {
        self.range.as_ref().map(|range| range.start()..range.start() + range.length())
    }

    /// Asks the system to read a part of a mapped file ahead; other memory stays as it is.
    pub fn prefetch(&self, offset: usize, bytes: usize) {
        #[cfg(unix)]
        if self.range.is_some() && bytes > 0 && offset < self.length {
            let start = offset / PAGE * PAGE;
            let length = bytes.saturating_add(offset - start).min(self.length - start);
            // SAFETY: the range lies in the mapping; reading ahead changes no contents. Failure only costs time.
            unsafe { libc::madvise(self.at.add(start).cast(), length, libc::MADV_WILLNEED) };
        }
        #[cfg(not(unix))]
        let _ = (offset, bytes);
    }

    /// Takes the pages of a mapped file from this process; the page cache keeps what they hold. Other memory stays as it is.
    pub fn unmap_pages(&self) {
        #[cfg(unix)]
        if self.range.is_some() {
            // SAFETY: of a shared mapping of a file, this drops page table entries and no contents.
            unsafe { libc::madvise(self.at.cast(), self.length, libc::MADV_DONTNEED) };
        }
    }

    /// Bytes of a mapped file that are in memory here or in the page cache.
    #[cfg(target_os = "linux")]
    pub fn resident(&self) -> u64 {
        let mut found = vec![0u8; self.length.div_ceil(PAGE)];
        // SAFETY: the mapping is as long as said, and there is a byte for each of its pages (`PAGE` is the smallest there is).
        match unsafe { libc::mincore(self.at.cast(), self.length, found.as_mut_ptr()) } {
            0 => found.iter().filter(|page| **page & 1 == 1).count() as u64 * PAGE as u64,
            _ => self.length as u64,
        }
    }

    /// All bytes: how many are in memory is not known on this system.
    #[cfg(not(target_os = "linux"))]
    pub fn resident(&self) -> u64 {
        self.length as u64
    }

    pub fn address(&self) -> *mut u8 {
        self.at
    }

    pub fn len(&self) -> usize {
        self.length
    }
}

/// Page size of x86-64. A system with larger pages refuses advice for addresses within them; that only costs the read-ahead.
#[cfg(unix)]
const PAGE: usize = 4096;

#[cfg(unix)]
fn map(length: usize) -> io::Result<*mut u8> {
    // SAFETY: the system chooses the address of the new anonymous mapping, so it replaces no other.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | NO_RESERVE,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(at.cast()) }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
const NO_RESERVE: libc::c_int = libc::MAP_NORESERVE;
#[cfg(all(unix, not(any(target_os = "linux", target_os = "android"))))]
const NO_RESERVE: libc::c_int = 0;

#[cfg(windows)]
fn map(length: usize) -> io::Result<*mut u8> {
    use windows_sys::Win32::System::Memory::{MEM_COMMIT, MEM_RESERVE, PAGE_READWRITE, VirtualAlloc};
    // SAFETY: the system chooses the address, so no other memory is affected.
    let at = unsafe { VirtualAlloc(std::ptr::null(), length, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) };
    if at.is_null() { Err(io::Error::last_os_error()) } else { Ok(at.cast()) }
}

impl Drop for Pages {
    fn drop(&mut self) {
        #[cfg(unix)]
        // SAFETY: `map` made the mapping, and users of its address keep this value alive.
        unsafe {
            libc::munmap(self.at.cast(), self.length);
        }
        #[cfg(windows)]
        // SAFETY: `map` made the allocation, which a length of zero releases whole; users of its address keep this value alive.
        unsafe {
            windows_sys::Win32::System::Memory::VirtualFree(
                self.at.cast(),
                0,
                windows_sys::Win32::System::Memory::MEM_RELEASE,
            );
        }
    }
}
