//! Moves packed weights into huge pages: matrix products that read gigabytes per token spend part of their time in TLB misses.
//!
//! ONNX Runtime packs weights into anonymous memory and does not report where. Anonymous memory that appears while a session with packed
//! weights is created ([`watch`], under the load lock) counts as its packed weights. Memory that a host program allocates before, between
//! or after its loads is not touched. Allocations of its other threads during a load can be included, which is harmless: collapsing pages
//! changes no contents.
//!
//! Linux only, and best effort: if the system refuses, nothing changes.

use std::ops::Range;

/// Smaller ranges are not worth a system call.
#[cfg(target_os = "linux")]
const MIN_RANGE: usize = 4 << 20;

/// Runs `make`; its result, and the address ranges of anonymous memory that appeared meanwhile.
#[cfg(target_os = "linux")]
pub(crate) fn watch<T>(make: impl FnOnce() -> T) -> (T, Vec<Range<usize>>) {
    let before = anonymous_memory();
    let made = make();
    (made, subtract(anonymous_memory(), &before))
}

/// Collapses the pages at these addresses into huge pages now, if they are still anonymous memory.
#[cfg(target_os = "linux")]
pub(crate) fn collapse(packed: &[Range<usize>]) {
    /// From <linux/mman.h>, Linux 6.1: collapses synchronously.
    const MADV_COLLAPSE: libc::c_int = 25;
    for range in intersect(&joined(packed), &anonymous_memory()).filter(|range| range.len() >= MIN_RANGE) {
        let at = range.start as *mut libc::c_void;
        // SAFETY: the advice changes no contents; if the range is unmapped by now, the call fails and does nothing.
        unsafe {
            if libc::madvise(at, range.len(), libc::MADV_HUGEPAGE) == 0 {
                libc::madvise(at, range.len(), MADV_COLLAPSE);
            }
        }
    }
}

/// Runs `make`; reports no memory.
#[cfg(not(target_os = "linux"))]
pub(crate) fn watch<T>(make: impl FnOnce() -> T) -> (T, Vec<Range<usize>>) {
    (make(), Vec::new())
}

/// Does nothing.
#[cfg(not(target_os = "linux"))]
pub(crate) fn collapse(_: &[Range<usize>]) {}

/// The address ranges of this process's private, writable memory without a file.
#[cfg(target_os = "linux")]
fn anonymous_memory() -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter_map(anonymous).collect()
}

/// The address range of a line of `/proc/self/maps`, if it is private, writable and has no file.
#[cfg(target_os = "linux")]
fn anonymous(line: &str) -> Option<Range<usize>> {
    let mut fields = line.split_whitespace();
    let (range, rights) = (fields.next()?, fields.next()?);
    let backing = fields.nth(3);
    if !rights.starts_with("rw") || !rights.ends_with('p') || backing.is_some_and(|name| name != "[heap]") {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    (start < end).then_some(start..end)
}

/// The parts of `all` outside of `others`.
#[cfg(target_os = "linux")]
fn subtract(all: Vec<Range<usize>>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    let without = |range: Range<usize>, other: &Range<usize>| {
        let (from, to) = (other.start.clamp(range.start, range.end), other.end.clamp(range.start, range.end));
        [range.start..from, from.max(to)..range.end].into_iter().filter(|part| !part.is_empty())
    };
    others.iter().fold(all, |left, other| left.into_iter().flat_map(|range| without(range, other)).collect())
}

/// The intersection of two lists of ranges.
#[cfg(target_os = "linux")]
fn intersect<'a>(these: &'a [Range<usize>], those: &'a [Range<usize>]) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let both = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
    these.iter().flat_map(move |a| those.iter().map(move |b| both(a, b))).filter(|range| !range.is_empty())
}

/// The ranges in order, with adjacent ones merged: a heap grows in small steps.
#[cfg(target_os = "linux")]
fn joined(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut sorted = ranges.to_vec();
    sorted.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in sorted {
        match joined.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::os::Pages;

    #[test]
    fn only_private_memory_without_a_file_is_anonymous() {
        assert_eq!(anonymous("7f00-8f00 rw-p 00000000 00:00 0 "), Some(0x7f00..0x8f00));
        assert_eq!(anonymous("7f00-8f00 rw-p 00000000 00:00 0 [heap]"), Some(0x7f00..0x8f00));
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
    fn ranges_are_subtracted_intersected_and_merged() {
        let ranges = |pairs: &[(usize, usize)]| pairs.iter().map(|(from, to)| *from..*to).collect::<Vec<_>>();
        let all = ranges(&[(10, 50), (60, 70), (80, 90)]);
        let others = ranges(&[(0, 12), (20, 30), (45, 65), (80, 90)]);
        assert_eq!(subtract(all.clone(), &others), ranges(&[(12, 20), (30, 45), (65, 70)]));
        assert_eq!(
            intersect(&all, &others).collect::<Vec<_>>(),
            ranges(&[(10, 12), (20, 30), (45, 50), (60, 65), (80, 90)])
        );
        assert_eq!(joined(&ranges(&[(30, 40), (10, 20), (20, 30), (50, 60)])), ranges(&[(10, 40), (50, 60)]));
    }

    /// Whether the middle of the pages was advised to use huge pages: the flag `hg` of its mapping.
    fn is_advised(pages: &Pages) -> bool {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut inside, at) = (false, pages.address() as usize + pages.len() / 2);
        for line in maps.lines() {
            let range = line.split(' ').next().and_then(|range| range.split_once('-'));
            let range = range.and_then(|(start, end)| {
                Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
            });
            inside = range.map_or(inside, |range| range.contains(&at));
            if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| inside) {
                return flags.split(' ').any(|flag| flag == "hg");
            }
        }
        panic!("nothing is mapped there");
    }

    #[test]
    fn only_memory_that_appeared_during_a_load_is_collapsed_and_keeps_its_contents() {
        let filled = |bytes: usize| {
            let pages = Pages::reserve(bytes).unwrap();
            // SAFETY: each address lies within the pages, which only this test uses.
            (0..bytes).step_by(512).for_each(|at| unsafe { pages.address().add(at).write(at as u8 ^ 0x5a) });
            pages
        };
        let earlier = filled(8 << 20);
        let (own, packed) = watch(|| filled(16 << 20));
        let (freed, more) = watch(|| filled(8 << 20));
        let later = filled(8 << 20);
        drop(freed);
        collapse(&[packed, more].concat());
        assert!(!is_advised(&earlier) && !is_advised(&later), "other memory was advised");
        // A system without transparent huge pages takes no advice.
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert!(is_advised(&own));
        }
        for pages in [&earlier, &own, &later] {
            // SAFETY: as above.
            let same = |at: usize| unsafe { pages.address().add(at).read() } == at as u8 ^ 0x5a;
            assert!((0..pages.len()).step_by(512).all(same));
        }
    }
}
