//! Anonymous memory in huge pages that are all allocated: disks fill them twice as fast as small pages.

use super::address_space::{HUGE, replace};
use crate::os::Pages;
use std::io;

/// Bytes of the smallest page.
const PAGE: usize = 4096;

/// Memory aligned to huge pages.
pub(super) struct HugePages {
    start: usize,
    _pages: Pages,
}

impl HugePages {
    /// Allocates `bytes`.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let pages = Pages::reserve(bytes.next_multiple_of(HUGE) + HUGE)?;
        let start = (pages.address() as usize).next_multiple_of(HUGE);
        // SAFETY: the range lies within the pages just reserved, which are not in use yet.
        unsafe { replace(&(start..start + bytes.next_multiple_of(HUGE))) }?;
        // SAFETY: each address lies within the range. Writing allocates the page.
        (start..start + bytes).step_by(PAGE).for_each(|at| unsafe { (at as *mut u8).write_volatile(0) });
        Ok(HugePages { start, _pages: pages })
    }

    /// The address of the first byte.
    pub fn start(&self) -> usize {
        self.start
    }
}
