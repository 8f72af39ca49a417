//! Zeroed memory that takes room when it is written.

use std::io;

/// Zeroed memory of fixed length, aligned to pages. A page is allocated when it is first written. (Windows counts all of it against the
/// limit on committed memory at once.)
pub(crate) struct Pages {
    at: *mut u8,
    length: usize,
}

// SAFETY: a mapping belongs to no thread, and reads and writes through its address are `unsafe` by themselves.
unsafe impl Send for Pages {}

impl Pages {
    /// Reserves at least one byte.
    pub fn reserve(length: usize) -> io::Result<Self> {
        let length = length.max(1);
        map(length).map(|at| Pages { at, length })
    }

    pub fn address(&self) -> *mut u8 {
        self.at
    }

    pub fn len(&self) -> usize {
        self.length
    }
}

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
