//! Which of the mapped weights runs use: those whose pages came into this process while it ran a few times.
//!
//! Kernels that have packed copies do not look at all of the originals, which stay mapped beside them. What no run has touched
//! is left mapped from its file: then it takes no memory, and should a run want it after all, it comes page by page.

use super::mapping::{Mapping, forget};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Where a prepared partition remembers what its runs have used.
const NOTE: &str = "used";
/// Set in an entry of `/proc/self/pagemap` whose page is in memory.
const PRESENT: u64 = 1 << 63;
const PAGE: usize = 4096;
/// A mapping of which fewer pages than one in so many came is a neighbour of what was used,
const FEW: usize = 32;
/// unless so many came: the system brings in 16 with each that is read, and neighbours are read at their ends. Of a mixture of
/// 512 experts, made-up tokens may visit ten.
const MANY: usize = 64;

/// The mappings of a session and whether each was used, as far as is known.
pub(super) struct Trial {
    pub mappings: Vec<Mapping>,
    used: Vec<bool>,
    /// Where to remember it; none where every start finds out anew or nobody asks.
    note: Option<PathBuf>,
    /// Whether it is known already.
    known: bool,
}

impl Trial {
    /// The mappings of a session from files in `place`; what an earlier trial has found is remembered there where `remembers`.
    pub fn new(mappings: Vec<Mapping>, place: &Path, remembers: bool) -> Self {
        let note = remembers.then(|| place.join(NOTE));
        let remembered = note.as_deref().and_then(|note| std::fs::read_to_string(note).ok());
        let used = remembered.as_deref().and_then(|text| read(text, &mappings));
        let known = used.is_some() || !remembers;
        for mapping in &mappings {
            // What came in while the session was made says nothing of its runs, and is not needed now.
            // SAFETY: as in `look`.
            unsafe { mapping.give_back() };
        }
        forget(&mappings);
        Trial { used: used.unwrap_or_else(|| vec![false; mappings.len()]), mappings, note, known }
    }

    /// Whether runs would tell something new.
    pub fn is_wanted(&self) -> bool {
        !self.known
    }

    /// Looks at what the last run has brought in, and lets go of it.
    pub fn look(&mut self) {
        if self.known {
            return;
        }
        for (mapping, used) in self.mappings.iter().zip(&mut self.used) {
            *used |= present(mapping).is_ok_and(|pages| is_used(pages, mapping.length / PAGE));
            // SAFETY: the mappings are this session's alone (`Readers::keep`), which is alive, and still the file's: what is needed
            // again is read again.
            unsafe { mapping.give_back() };
        }
        // Nor is it to stay in memory as the system's copy: from now on it is read past that.
        forget(&self.mappings);
    }

    /// The mappings that runs use: all of them where no run was seen to use any.
    pub fn used(self) -> Vec<Mapping> {
        if !self.used.contains(&true) {
            return self.mappings;
        }
        if let Some(note) = self.note.filter(|_| !self.known) {
            // Where it cannot be written, the next start tries again.
            drop(std::fs::write(note, write(&self.mappings, &self.used)));
        }
        self.mappings.into_iter().zip(self.used).filter(|(_, used)| *used).map(|(mapping, _)| mapping).collect()
    }
}

/// Whether a mapping of so many pages is used, of which so many came.
fn is_used(came: usize, pages: usize) -> bool {
    came * FEW >= pages || came > MANY
}

/// Pages of a mapping that are in this process.
fn present(mapping: &Mapping) -> io::Result<usize> {
    let mut entries = vec![0; mapping.length / PAGE * 8];
    File::open("/proc/self/pagemap")?.read_exact_at(&mut entries, (mapping.start / PAGE * 8) as u64)?;
    let (entries, _) = entries.as_chunks();
    Ok(entries.iter().filter(|entry| u64::from_ne_bytes(**entry) & PRESENT != 0).count())
}

/// One line for each mapping: offset, length, and whether it is used.
fn write(mappings: &[Mapping], used: &[bool]) -> String {
    let mut lines: Vec<(u64, usize, bool)> =
        mappings.iter().zip(used).map(|(mapping, used)| (mapping.offset, mapping.length, *used)).collect();
    lines.sort_unstable();
    lines.iter().map(|(offset, length, used)| format!("{offset} {length} {}\n", u8::from(*used))).collect()
}

/// What was written of the same mappings; `None` where it was of others.
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
    use super::super::mapping::mapped_under;
    use super::*;

    fn mapped(path: &Path) -> memmap2::MmapMut {
        // SAFETY: nobody else writes to this test's own file.
        unsafe { memmap2::MmapOptions::new().map_copy(&File::open(path).unwrap()) }.unwrap()
    }

    #[test]
    fn what_is_read_is_used_and_remembered() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, vec![1; 64 * PAGE]).unwrap();
        std::fs::write(&b, vec![2; 48 * PAGE]).unwrap();
        let (first, _second) = (mapped(&a), mapped(&b));
        let mappings = mapped_under(dir.path()).unwrap();
        assert_eq!(mappings.len(), 2);
        let mut trial = Trial::new(mappings.clone(), dir.path(), true);
        assert!(trial.is_wanted());
        let sum: u32 = first.iter().map(|byte| u32::from(*byte)).sum();
        assert_eq!(sum as usize, 64 * PAGE);
        trial.look();
        trial.look();
        let used = trial.used();
        assert_eq!(used.iter().map(|mapping| mapping.length).collect::<Vec<_>>(), [64 * PAGE]);
        assert_eq!(first[PAGE], 1, "it comes again");
        let again = Trial::new(mappings.clone(), dir.path(), true);
        assert!(!again.is_wanted());
        assert_eq!(again.used(), used);
        // What was remembered of other mappings says nothing, and without a trial all are used.
        std::fs::write(dir.path().join(NOTE), "0 4096 1\n").unwrap();
        let other = Trial::new(mappings.clone(), dir.path(), true);
        assert!(other.is_wanted());
        assert_eq!(other.used(), mappings);
        assert!(!Trial::new(mappings, dir.path(), false).is_wanted());
    }

    #[test]
    fn a_few_of_many_experts_are_enough() {
        let dir = tempfile::tempdir().unwrap();
        let (experts, neighbour) = (dir.path().join("experts"), dir.path().join("neighbour"));
        for path in [&experts, &neighbour] {
            File::create(path).unwrap().set_len(8192 * PAGE as u64).unwrap();
        }
        let (first, second) = (mapped(&experts), mapped(&neighbour));
        let mut trial = Trial::new(mapped_under(dir.path()).unwrap(), dir.path(), true);
        // One in 82 of them, and the two ends of what lies beside something else.
        let visited: u32 = (0..100).map(|page| u32::from(first[(1000 + page) * PAGE])).sum();
        assert_eq!(visited + u32::from(second[0]) + u32::from(second[second.len() - 1]), 0);
        trial.look();
        let used: Vec<_> = trial.used().into_iter().map(|mapping| mapping.path).collect();
        assert_eq!(used, [experts.canonicalize().unwrap()]);
    }
}
