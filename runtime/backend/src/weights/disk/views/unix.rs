//! Advice about pages on Unix.

use std::io;
use std::ops::Range;

/// Bytes of a page.
pub(in super::super) fn page_bytes() -> usize {
    // SAFETY: the call takes no pointer.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| *bytes > 0).unwrap_or(4096)
}

/// Drops the whole pages of an address range from this process. A later access reads them from their file again; pages of anonymous memory
/// are zeros then.
///
/// # Safety
/// The range must be mapped, and nothing may need the contents of anonymous memory there.
pub(in super::super) unsafe fn evict(addresses: &Range<usize>) {
    // SAFETY: this function's contract.
    unsafe { advise(addresses, libc::MADV_DONTNEED) };
}

/// Reads the pages of a view ahead. Linux returns when it has read them, other systems at once.
pub(in super::super) fn prefetch(addresses: &Range<usize>) {
    #[cfg(target_os = "linux")]
    const ADVICE: libc::c_int = libc::MADV_POPULATE_READ;
    #[cfg(not(target_os = "linux"))]
    const ADVICE: libc::c_int = libc::MADV_WILLNEED;
    // SAFETY: reading ahead changes no contents; if the range is not mapped, the call fails.
    unsafe { advise(addresses, ADVICE) };
}

/// Disables readahead: pages are read in random order.
pub(in super::super) fn advise_random(addresses: &Range<usize>) {
    // SAFETY: this advice changes no contents; if the range is not mapped, the call fails.
    unsafe { advise(addresses, libc::MADV_RANDOM) };
}

/// # Safety
/// That of the advice, for the whole pages of the range.
unsafe fn advise(addresses: &Range<usize>, advice: libc::c_int) {
    let page = page_bytes();
    let (start, end) = (addresses.start.next_multiple_of(page), addresses.end / page * page);
    if start < end {
        // SAFETY: this function's contract. A refusal costs time or memory only.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, advice) };
    }
}

/// Locks the pages of a range in memory; an error if the system refuses.
pub(in super::super) fn lock(addresses: &Range<usize>) -> io::Result<()> {
    let (at, bytes) = (addresses.start as *const libc::c_void, addresses.len());
    // SAFETY: locking changes no contents; if the range is not mapped, the call fails.
    if unsafe { libc::mlock(at, bytes) } == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Undoes [`lock`]: the pages may be evicted again.
pub(in super::super) fn unlock(addresses: &Range<usize>) {
    // SAFETY: unlocking changes no contents; if the range is not mapped or not locked, nothing happens.
    unsafe { libc::munlock(addresses.start as *const libc::c_void, addresses.len()) };
}
