//! Huge pages for packed weights: a product that reads gigabytes for each token spends a part of its time finding pages.
//!
//! ONNX Runtime packs weights into anonymous memory and does not say where. Memory counts as packed weights of ours where it
//! became anonymous while a session with packed weights was made ([`watch`]), under the load lock: what was there before, and
//! what a host program allocates before, between and after its loads, is left alone. What its other threads allocate in just
//! that time can be among it, which does no harm: gathering changes no contents.
//!
//! Knows Linux only; elsewhere it does nothing. It is an attempt: where the system refuses, everything goes on as before.

use std::ops::Range;

/// Anonymous memory below this is not worth a call.
#[cfg(target_os = "linux")]
const WORTH_IT: usize = 4 << 20;

/// Runs `make`; what it returns, and the addresses that became anonymous memory meanwhile.
#[cfg(target_os = "linux")]
pub(crate) fn watch<T>(make: impl FnOnce() -> T) -> (T, Vec<Range<usize>>) {
    let before = anonymous_memory();
    let made = make();
    (made, subtract(anonymous_memory(), &before))
}

/// Asks the system to gather what is still anonymous memory at these addresses, as it is filled now, in huge pages.
#[cfg(target_os = "linux")]
pub(crate) fn gather(packed: &[Range<usize>]) {
    /// From <linux/mman.h>, Linux 6.1: now, not some day.
    const MADV_COLLAPSE: libc::c_int = 25;
    for range in intersect(&joined(packed), &anonymous_memory()).filter(|range| range.len() >= WORTH_IT) {
        let at = range.start as *mut libc::c_void;
        // SAFETY: advice changes no contents: at worst the range is gone by now, and the call says so without touching anything.
        unsafe {
            if libc::madvise(at, range.len(), libc::MADV_HUGEPAGE) == 0 {
                libc::madvise(at, range.len(), MADV_COLLAPSE);
            }
        }
    }
}

/// Nothing to watch.
#[cfg(not(target_os = "linux"))]
pub(crate) fn watch<T>(make: impl FnOnce() -> T) -> (T, Vec<Range<usize>>) {
    (make(), Vec::new())
}

/// Nothing to ask for.
#[cfg(not(target_os = "linux"))]
pub(crate) fn gather(_: &[Range<usize>]) {}

/// Private, writable memory of this process that is backed by no file.
#[cfg(target_os = "linux")]
fn anonymous_memory() -> Vec<Range<usize>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    maps.lines().filter_map(anonymous).collect()
}

/// The addresses of a line of `/proc/self/maps` that is private, writable and backed by nothing.
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

/// What of `all` is in none of `others`.
#[cfg(target_os = "linux")]
fn subtract(all: Vec<Range<usize>>, others: &[Range<usize>]) -> Vec<Range<usize>> {
    let apart = |range: Range<usize>, other: &Range<usize>| {
        let (from, to) = (other.start.clamp(range.start, range.end), other.end.clamp(range.start, range.end));
        [range.start..from, from.max(to)..range.end].into_iter().filter(|part| !part.is_empty())
    };
    others.iter().fold(all, |left, other| left.into_iter().flat_map(|range| apart(range, other)).collect())
}

/// What is in both, range by range.
#[cfg(target_os = "linux")]
fn intersect<'a>(these: &'a [Range<usize>], those: &'a [Range<usize>]) -> impl Iterator<Item = Range<usize>> + use<'a> {
    let both = |a: &Range<usize>, b: &Range<usize>| a.start.max(b.start)..a.end.min(b.end);
    these.iter().flat_map(move |a| those.iter().map(move |b| both(a, b))).filter(|range| !range.is_empty())
}

/// The same addresses in order, neighbours as one: a heap grows in pieces that are small by themselves.
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
    fn ranges_are_cut_and_joined() {
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

    /// Whether the system was asked to gather the memory at an address: the flag `hg` of its mapping.
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
    fn only_what_appeared_while_weights_were_packed_is_gathered_and_keeps_its_contents() {
        let filled = |bytes: usize| {
            let pages = Pages::reserve(bytes).unwrap();
            // SAFETY: each address lies within the pages, which nobody else uses.
            (0..bytes).step_by(512).for_each(|at| unsafe { pages.address().add(at).write(at as u8 ^ 0x5a) });
            pages
        };
        let others = filled(8 << 20);
        let (own, packed) = watch(|| filled(16 << 20));
        let (gone, more) = watch(|| filled(8 << 20));
        let later = filled(8 << 20);
        drop(gone);
        gather(&[packed, more].concat());
        assert!(!is_advised(&others) && !is_advised(&later), "memory of others was advised");
        // Where the system knows no huge pages, nothing can be asked for.
        if std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            assert!(is_advised(&own));
        }
        for pages in [&others, &own, &later] {
            // SAFETY: as above.
            let same = |at: usize| unsafe { pages.address().add(at).read() } == at as u8 ^ 0x5a;
            assert!((0..pages.len()).step_by(512).all(same));
        }
    }
}
