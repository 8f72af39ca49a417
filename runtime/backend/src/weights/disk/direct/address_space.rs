//! Replacing the mappings of weights by memory of this process, and moving its pages (Linux).

use super::super::mapping::Mapping;
use std::io;
use std::ops::Range;

/// Bytes of a huge page.
pub(super) const HUGE: usize = 2 << 20;

/// The limit on mappings of a process, if the system does not report it.
const DEFAULT_MAX_MAPPINGS: usize = 65_530;

/// How many mappings this process may have.
pub(super) fn most_mappings() -> usize {
    let allowed = std::fs::read_to_string("/proc/sys/vm/max_map_count").ok();
    allowed.and_then(|text| text.trim().parse().ok()).unwrap_or(DEFAULT_MAX_MAPPINGS)
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
pub(super) unsafe fn map_inaccessible(addresses: &Range<usize>) -> io::Result<()> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    let start = addresses.start as *mut libc::c_void;
    // SAFETY: the range is mapped (this function's contract), so `MAP_FIXED` replaces nothing else.
    let at = unsafe { libc::mmap(start, addresses.len(), libc::PROT_NONE, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Forbids any access to an address range, which keeps its pages, until [`allow_access`].
///
/// # Safety
/// The range must be whole pages of memory that [`replace`] made, and nothing may access them until then.
pub(super) unsafe fn deny_access(addresses: &Range<usize>) -> io::Result<()> {
    // SAFETY: this function's contract.
    unsafe { protect(addresses, libc::PROT_NONE) }
}

/// Allows access to an address range again.
///
/// # Safety
/// The range must be whole pages of memory that [`replace`] made.
pub(super) unsafe fn allow_access(addresses: &Range<usize>) -> io::Result<()> {
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

/// The addresses in a mapping that huge pages may fill.
pub(super) fn huge_pages(mapping: &Mapping) -> Range<usize> {
    let (start, end) = (mapping.start.next_multiple_of(HUGE), (mapping.start + mapping.length) / HUGE * HUGE);
    start..end.max(start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_are_aligned_to_their_size() {
        let mapping = |start, length| Mapping { start, length, offset: 0, path: "/a/model.data".into() };
        assert_eq!(huge_pages(&mapping(0x1000, 0x60_0000)), 0x20_0000..0x60_0000);
        assert_eq!(huge_pages(&mapping(0x20_0000, 0x20_0000)), 0x20_0000..0x40_0000);
        assert!(huge_pages(&mapping(0x1000, 0x20_0000)).is_empty());
    }
}
