//! The usage probe: finds the mapped weights that runs read, by their pages that become resident during warm-up runs.
//!
//! Kernels with packed copies do not read all originals, which stay mapped beside the copies. Weights that no run has touched stay mapped
//! from their file: they take no memory, and if a run needs them after all, the system faults them in. A warm-up run may visit only some
//! experts of a mixture. So a weight also counts as read if a run has touched one that is alike: of the same size, and of the same kind (a
//! packed copy, an original with a packed copy, or an original without one).

use super::align::{Tensor, tensors};
use super::mapping::{Mapping, drop_page_cache};
use super::prepared::MODEL;
use super::views;
use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// File beside prepared weights that records which mappings runs have read.
const RECORD: &str = "used";
const PAGE: usize = 4096;
/// A mapping counts as read if at least one in `MIN_SHARE` of its pages became resident, or more than [`MIN_PAGES`].
const MIN_SHARE: usize = 32;
/// More resident pages than this count as a read of any mapping. A few do not: fault-around maps 16 pages per fault, so reading a mapping
/// makes pages at the ends of its neighbours resident. A share alone does not suffice: of 512 experts, warm-up tokens may visit ten.
const MIN_PAGES: usize = 64;

/// The mappings of a session, and those that a run is known to have read.
pub(super) struct UsageProbe {
    pub mappings: Vec<Mapping>,
    used: Vec<bool>,
    /// The directory of the prepared files, where `used` is recorded; `None` if it is not recorded.
    dir: Option<PathBuf>,
    /// Whether an earlier start has recorded `used`, or it is not to be recorded: then warm-up runs are not needed.
    known: bool,
}

impl UsageProbe {
    /// A probe for the mappings that a session has of files in `dir`. If `records`, results are recorded in this directory and read back
    /// from it.
    pub fn new(mappings: Vec<Mapping>, dir: &Path, records: bool) -> Self {
        let dir = records.then(|| dir.to_owned());
        let recorded = dir.as_deref().and_then(|dir| std::fs::read_to_string(dir.join(RECORD)).ok());
        let used = recorded.as_deref().and_then(|text| read(text, &mappings));
        let known = used.is_some() || !records;
        for mapping in &mappings {
            // Pages that session creation touched say nothing about runs.
            // SAFETY: as in `sample`.
            unsafe { mapping.free_pages() };
        }
        drop_page_cache(&mappings);
        UsageProbe { used: used.unwrap_or_else(|| vec![false; mappings.len()]), mappings, dir, known }
    }

    /// Whether warm-up runs would show something new.
    pub fn is_wanted(&self) -> bool {
        !self.known
    }

    /// Notes which mappings the last run has read, unless that is known, and drops their pages.
    pub fn sample(&mut self) {
        for (mapping, used) in self.mappings.iter().zip(&mut self.used) {
            *used |= !self.known && present(mapping).is_ok_and(|pages| is_used(pages, mapping.length / PAGE));
            // SAFETY: the mappings are this session's alone (`DiskReaders::take_over`), which is alive, and are still backed by the file:
            // dropped pages are read again when needed.
            unsafe { mapping.free_pages() };
        }
        // Nor shall they stay in the page cache: direct reads bypass it, and other reads are to start from the disk.
        drop_page_cache(&self.mappings);
    }

    /// The mappings that runs read: all if no run was seen to read any.
    pub fn used(mut self) -> Vec<Mapping> {
        if !self.used.contains(&true) {
            return self.mappings;
        }
        if let Some(dir) = self.dir.filter(|_| !self.known) {
            mark_alike(&dir.join(MODEL), &self.mappings, &mut self.used);
            // If the record cannot be written, the next start probes again.
            drop(std::fs::write(dir.join(RECORD), write(&self.mappings, &self.used)));
        }
        let bytes: usize = self.mappings.iter().map(|mapping| mapping.length).sum();
        let kept = self.mappings.into_iter().zip(self.used).filter(|(_, used)| *used).map(|(mapping, _)| mapping);
        let kept: Vec<Mapping> = kept.collect();
        let used: usize = kept.iter().map(|mapping| mapping.length).sum();
        tracing::info!(mapped = bytes, used, recorded = self.known, "weights that runs read");
        kept
    }
}

/// What is equal for the weights of experts of one mixture.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Likeness {
    length: u64,
    is_packed: bool,
    has_packed_copy: bool,
}

/// Marks the mappings of weights that are like one whose mapping is marked. Does nothing if the model file cannot be read.
fn mark_alike(model: &Path, mappings: &[Mapping], used: &mut [bool]) {
    let weights = std::fs::read(model).and_then(|model| tensors(&model)).unwrap_or_default();
    let likeness: HashMap<(&OsStr, u64), Likeness> = weights.iter().flat_map(likeness).collect();
    let of = |mapping: &Mapping| likeness.get(&(mapping.path.file_name()?, mapping.offset)).copied();
    let marked: HashSet<Likeness> =
        mappings.iter().zip(&*used).filter(|(_, used)| **used).filter_map(|(mapping, _)| of(mapping)).collect();
    for (mapping, used) in mappings.iter().zip(used) {
        *used |= of(mapping).is_some_and(|likeness| marked.contains(&likeness));
    }
}

/// The likeness of a weight and of its packed copy, by their file and the offset of their mapping.
fn likeness(tensor: &Tensor) -> impl Iterator<Item = ((&OsStr, u64), Likeness)> {
    // Weights begin at pages of 4 KiB, mappings at pages of the system.
    let page = views::page_bytes() as u64;
    let mapped_at = move |at: u64| if page > PAGE as u64 { at / page * page } else { at };
    let has_packed_copy = tensor.packed.is_some();
    let ranges = tensor.stored.map(|range| (range, false)).into_iter().chain(tensor.packed.map(|range| (range, true)));
    let file = Path::new(&tensor.location).file_name().unwrap_or_default();
    ranges
        .map(move |((at, length), is_packed)| ((file, mapped_at(at)), Likeness { length, is_packed, has_packed_copy }))
}

/// Whether a mapping of `pages` pages counts as read when `resident` of them are resident.
fn is_used(resident: usize, pages: usize) -> bool {
    resident * MIN_SHARE >= pages || resident > MIN_PAGES
}

/// Resident pages of a mapping.
fn present(mapping: &Mapping) -> io::Result<usize> {
    views::resident(&mapping.addresses()).map(|bytes| bytes / PAGE)
}

/// One line for each mapping: offset, length, and whether it was read.
fn write(mappings: &[Mapping], used: &[bool]) -> String {
    let mut lines: Vec<(u64, usize, bool)> =
        mappings.iter().zip(used).map(|(mapping, used)| (mapping.offset, mapping.length, *used)).collect();
    lines.sort_unstable();
    lines.iter().map(|(offset, length, used)| format!("{offset} {length} {}\n", u8::from(*used))).collect()
}

/// Parses a record; `None` if it is of other mappings.
fn read(text: &str, mappings: &[Mapping]) -> Option<Vec<bool>> {
    let lines: Vec<(u64, usize, bool)> = text
        .lines()
        .map(|line| {
            let mut fields = line.split(' ');
            let (offset, length, used) = (fields.next()?, fields.next()?, fields.next()?);
            Some((offset.parse().ok()?, length.parse().ok()?, used == "1"))
        })
        .collect::<Option<_>>()?;
    let used = |mapping: &Mapping| {
        let same = lines.iter().filter(|(offset, length, _)| (*offset, *length) == (mapping.offset, mapping.length));
        same.map(|(_, _, used)| *used).reduce(|a, b| a | b)
    };
    mappings.iter().map(used).collect()
}

#[cfg(test)]
mod tests {
    use super::super::align::tests::{model, tensor};
    use super::super::mapped_under;
    use super::*;
    use std::fs::File;

    fn mapped(path: &Path) -> memmap2::MmapMut {
        // SAFETY: only this test uses its file.
        unsafe { memmap2::MmapOptions::new().map_copy(&File::open(path).unwrap()) }.unwrap()
    }

    #[test]
    fn mappings_that_are_read_count_as_used_and_are_recorded() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, vec![1; 64 * PAGE]).unwrap();
        std::fs::write(&b, vec![2; 48 * PAGE]).unwrap();
        let (first, _second) = (mapped(&a), mapped(&b));
        let mappings = mapped_under(dir.path()).unwrap();
        assert_eq!(mappings.len(), 2);
        let mut probe = UsageProbe::new(mappings.clone(), dir.path(), true);
        assert!(probe.is_wanted());
        let sum: u32 = first.iter().map(|byte| u32::from(*byte)).sum();
        assert_eq!(sum as usize, 64 * PAGE);
        probe.sample();
        probe.sample();
        let used = probe.used();
        assert_eq!(used.iter().map(|mapping| mapping.length).collect::<Vec<_>>(), [64 * PAGE]);
        assert_eq!(first[PAGE], 1, "it is faulted in again");
        let mut again = UsageProbe::new(mappings.clone(), dir.path(), true);
        assert!(!again.is_wanted());
        // A warm-up run for another partition leaves no pages of this one in memory either.
        assert_eq!(first[0], 1);
        again.sample();
        assert_eq!(present(&mappings[0]).unwrap() + present(&mappings[1]).unwrap(), 0);
        assert_eq!(again.used(), used);
        // A record of other mappings is ignored, and without samples all mappings count as used.
        std::fs::write(dir.path().join(RECORD), "0 4096 1\n").unwrap();
        let other = UsageProbe::new(mappings.clone(), dir.path(), true);
        assert!(other.is_wanted());
        assert_eq!(other.used(), mappings);
        assert!(!UsageProbe::new(mappings, dir.path(), false).is_wanted());
    }

    /// Two experts with packed copies, of which a run visits the first: the packed copy of the second counts as read, and no original.
    #[test]
    fn weights_like_those_that_are_read_count_as_used() {
        let dir = tempfile::tempdir().unwrap();
        let weight = |name: &str, at: usize| {
            let [stored, packed] = [at, at + 64 * PAGE].map(|at| at.to_string());
            let packed = format!("k|{packed};{};0", 72 * PAGE);
            let pairs = [
                ("location", "w"),
                ("offset", &*stored),
                ("length", &*(64 * PAGE).to_string()),
                ("prepacked_0", &*packed),
            ];
            tensor(name, &pairs)
        };
        std::fs::write(dir.path().join(MODEL), model(&[weight("a", 0), weight("b", 136 * PAGE)])).unwrap();
        let path = dir.path().join("w");
        File::create(&path).unwrap().set_len(272 * PAGE as u64).unwrap();
        let file = File::open(&path).unwrap();
        let map = |(at, pages): (usize, usize)| {
            // SAFETY: only this test uses its file.
            unsafe { memmap2::MmapOptions::new().offset((at * PAGE) as u64).len(pages * PAGE).map_copy(&file) }.unwrap()
        };
        let mapped = [(0, 64), (64, 72), (136, 64), (200, 72)].map(map);
        let mappings = mapped.iter().zip([0, 64, 136, 200]).map(|(mapped, page)| Mapping {
            start: mapped.as_ptr() as usize,
            length: mapped.len(),
            offset: page * PAGE as u64,
            path: path.clone(),
        });
        let mut probe = UsageProbe::new(mappings.collect(), dir.path(), true);
        assert_eq!(mapped[1].iter().map(|byte| u32::from(*byte)).sum::<u32>(), 0);
        probe.sample();
        let used: Vec<u64> = probe.used().iter().map(|mapping| mapping.offset / PAGE as u64).collect();
        assert_eq!(used, [64, 200]);
    }

    #[test]
    fn a_few_of_many_experts_are_enough() {
        let dir = tempfile::tempdir().unwrap();
        let (experts, neighbour) = (dir.path().join("experts"), dir.path().join("neighbour"));
        for path in [&experts, &neighbour] {
            File::create(path).unwrap().set_len(8192 * PAGE as u64).unwrap();
        }
        let (first, second) = (mapped(&experts), mapped(&neighbour));
        let mut probe = UsageProbe::new(mapped_under(dir.path()).unwrap(), dir.path(), true);
        // 1 of 82 pages, and the two ends of a neighbour.
        let visited: u32 = (0..100).map(|page| u32::from(first[(1000 + page) * PAGE])).sum();
        assert_eq!(visited + u32::from(second[0]) + u32::from(second[second.len() - 1]), 0);
        probe.sample();
        let used: Vec<_> = probe.used().into_iter().map(|mapping| mapping.path).collect();
        assert_eq!(used, [experts.canonicalize().unwrap()]);
    }
}
