//! Huge pages for packed weights: a product that reads gigabytes for each token spends a part of its time finding pages.
//!
//! Knows Linux only; elsewhere it does nothing. It is an attempt: where the system refuses, everything goes on as before.

/// Anonymous memory below this is not worth a look.
#[cfg(target_os = "linux")]
const WORTH_IT: usize = 4 << 20;

/// Asks the system to gather large anonymous memory of this process, as it is filled now, in huge pages.
#[cfg(target_os = "linux")]
pub(crate) fn gather() {
    /// From <linux/mman.h>, Linux 6.1: now, not some day.
    const MADV_COLLAPSE: libc::c_int = 25;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for (start, length) in maps.lines().filter_map(anonymous).filter(|(_, length)| *length >= WORTH_IT) {
        let at = start as *mut libc::c_void;
        // SAFETY: advice changes no contents: at worst the range is gone by now, and the call says so without touching anything.
        unsafe {
            if libc::madvise(at, length, libc::MADV_HUGEPAGE) == 0 {
                libc::madvise(at, length, MADV_COLLAPSE);
            }
        }
    }
}

/// Nothing to ask for.
#[cfg(not(target_os = "linux"))]
pub(crate) fn gather() {}

/// Start and length of a line of `/proc/self/maps` that is private, writable and backed by nothing.
#[cfg(target_os = "linux")]
fn anonymous(line: &str) -> Option<(usize, usize)> {
    let mut fields = line.split_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?);
    let backing = fields.nth(3);
    if !rights.starts_with("rw") || !rights.ends_with('p') || backing.is_some_and(|name| name != "[heap]") {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    Some((start, end.checked_sub(start)?))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn only_memory_of_our_own_is_advised() {
        assert_eq!(anonymous("7f00-8f00 rw-p 00000000 00:00 0 "), Some((0x7f00, 0x1000)));
        assert_eq!(anonymous("7f00-8f00 rw-p 00000000 00:00 0 [heap]"), Some((0x7f00, 0x1000)));
        for other in [
            "7f00-8f00 r--p 00000000 00:00 0 ",
            "7f00-8f00 rw-s 00000000 00:00 0 ",
            "7f00-8f00 rw-p 00000000 fe:00 12 /usr/lib/libc.so.6",
            "7f00-8f00 rw-p 00000000 00:00 0 [stack]",
            "nonsense",
            "",
        ] {
            assert_eq!(anonymous(other), None, "{other}");
        }
    }

    #[test]
    fn contents_stay() {
        let filled: Vec<u64> = (0..8 << 20).collect();
        gather();
        assert!(filled.iter().copied().eq(0..8 << 20));
    }
}
