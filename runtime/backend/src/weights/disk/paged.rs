//! Streams weights through the system's file cache: they stay mapped from their file, threads of this process read the pages of a chunk
//! ahead of the run that needs it, and after the run they are taken from the process. For systems and file systems where weights cannot be
//! read past the file cache into memory of HPP's own ([`super::direct`]).
//!
//! A page that was not read ahead is read when a kernel accesses it, so a missing chunk costs time, never a wrong number. Evicted pages
//! leave this process; the system keeps what it has room for in its cache.

use super::mapped_page_reader::{MappedPageReader, Ticket};
use super::mapping::Mapping;
use super::streamed::{ManagedWeights, ReadBeforeRuns};
use super::{ExpertTensors, views};
use crate::weights::file::WeightFile;
use hpp_engine::BackendError;
use hpp_engine::port::ChunkSize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of one chunk.
const CHUNK: usize = 2 << 20;

/// Weights of a session that stay mapped from their file. Must be dropped before the session.
pub(super) struct PagedWeights {
    mapped_page_reader: Rc<MappedPageReader>,
    files: BTreeMap<PathBuf, Arc<WeightFile>>,
    /// All weights but experts, in the order in which they are locked.
    mappings: Vec<Mapping>,
    budget: u64,
    locked: Vec<Range<usize>>,
    /// Whether locking another part has failed; then no run may start.
    is_broken: bool,
    chunks: Vec<PagedChunk>,
    sizes: Vec<ChunkSize>,
    /// The chunks of each expert.
    experts: Vec<Range<usize>>,
}

struct PagedChunk {
    file: Arc<WeightFile>,
    addresses: Range<usize>,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Evicted,
    Reading(Ticket),
    Read,
}

impl PagedWeights {
    /// Takes over the mappings of a session. Reads and locks up to `locked` bytes, small mappings first.
    ///
    /// # Safety
    /// The mappings must belong to this session alone, which must live longer than what is returned.
    pub unsafe fn take_over(
        mapped_page_reader: Rc<MappedPageReader>,
        mappings: Vec<Mapping>,
        experts: &ExpertTensors,
        locked: u64,
    ) -> io::Result<ManagedWeights> {
        let paths: BTreeSet<&Path> = mappings.iter().map(|mapping| &*mapping.path).collect();
        let open = |path: &Path| Ok((path.to_owned(), Arc::new(WeightFile::open_buffered(path)?)));
        let files = paths.into_iter().map(open).collect::<io::Result<_>>()?;
        let (mut mappings, divided) = experts.divide(mappings);
        mappings.sort_by_key(|mapping| (mapping.length, mapping.offset));
        let mut weights = PagedWeights {
            mapped_page_reader,
            files,
            mappings,
            budget: locked,
            locked: Vec::new(),
            is_broken: false,
            chunks: Vec::new(),
            sizes: Vec::new(),
            experts: Vec::new(),
        };
        let lock_error = weights.lock_and_divide()?;
        for parts in &divided {
            let first = weights.chunks.len();
            for part in parts {
                weights.add_chunks(&part.path, part.addresses())?;
            }
            weights.experts.push(first..weights.chunks.len());
        }
        Ok(ManagedWeights { weights: Box::new(weights), lock_error })
    }

    /// Locks weights up to the budget and divides the rest into chunks, all evicted. Returns why the system refused to lock weights, if it
    /// did.
    fn lock_and_divide(&mut self) -> io::Result<Option<io::Error>> {
        self.locked.drain(..).for_each(|range| views::unlock(&range));
        (self.chunks, self.sizes) = (Vec::new(), Vec::new());
        let (page, mut refused) = (views::page_bytes(), None);
        let mut room = usize::try_from(self.budget).unwrap_or(usize::MAX) / page * page;
        for Mapping { path, start, length, .. } in &self.mappings.clone() {
            let middle = start + room.min(*length);
            let (first, rest) = (*start..middle, middle..start + length);
            room -= first.len();
            if !first.is_empty() {
                let file = self.file(path)?;
                // SAFETY: the session keeps the view mapped (the contract of `take_over`), and the read is waited for here.
                let ticket = unsafe { self.mapped_page_reader.read(&file, first.clone()) };
                self.mapped_page_reader.wait(ticket)?;
                refused = views::lock(&first).err().or(refused);
                self.locked.push(first);
            }
            self.add_chunks(path, rest)?;
        }
        Ok(refused)
    }

    fn file(&self, path: &Path) -> io::Result<Arc<WeightFile>> {
        self.files.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// Adds the chunks of an address range, evicted.
    fn add_chunks(&mut self, path: &Path, addresses: Range<usize>) -> io::Result<()> {
        let file = self.file(path)?;
        for start in addresses.clone().step_by(CHUNK) {
            let chunk = start..addresses.end.min(start + CHUNK);
            let bytes = chunk.len() as u64;
            self.sizes.push(ChunkSize { resident: bytes, stored: bytes });
            let mut chunk = PagedChunk { file: Arc::clone(&file), addresses: chunk, state: State::Read };
            chunk.evict(&self.mapped_page_reader);
            self.chunks.push(chunk);
        }
        Ok(())
    }

    /// The number of chunks that every run needs.
    fn always_needed(&self) -> usize {
        self.experts.first().map_or(self.chunks.len(), |chunks| chunks.start)
    }
}

impl PagedChunk {
    /// Waits for the read in progress, if there is one, and takes the pages from this process, also those that the system has mapped with
    /// the pages of another chunk.
    fn evict(&mut self, mapped_page_reader: &MappedPageReader) {
        if let State::Reading(ticket) = self.state {
            // Whether the read failed does not matter: the chunk is evicted.
            drop(mapped_page_reader.wait(ticket));
        }
        // SAFETY: the session keeps the view of its file mapped and outlives this (the contract of `take_over`); the pages come back from the
        // file.
        unsafe { views::evict(&self.addresses) };
        self.state = State::Evicted;
    }
}

impl ReadBeforeRuns for PagedWeights {
    fn bytes(&self) -> &[ChunkSize] {
        &self.sizes
    }

    fn experts(&self) -> &[Range<usize>] {
        &self.experts
    }

    fn select_experts(&mut self, _: &[u32]) {}

    fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError> {
        self.check()?;
        let chunk = &mut self.chunks[chunk];
        match chunk.state {
            State::Evicted => {
                // SAFETY: the session keeps the view mapped and outlives this (the contract of `take_over`), and `drop` waits for reads.
                let ticket = unsafe { self.mapped_page_reader.read(&chunk.file, chunk.addresses.clone()) };
                chunk.state = State::Reading(ticket);
                Ok(())
            }
            State::Reading(_) | State::Read => Err(misfit("it is in memory already")),
        }
    }

    fn wait(&mut self, chunk: usize) -> Result<(Duration, Duration), BackendError> {
        let chunk = &mut self.chunks[chunk];
        let State::Reading(ticket) = chunk.state else { return Err(misfit("no read of it was started")) };
        let waited = self.mapped_page_reader.wait(ticket);
        chunk.state = State::Read;
        if waited.is_err() {
            chunk.evict(&self.mapped_page_reader);
        }
        waited.map_err(|error| BackendError::Runtime {
            doing: format!("read weights from {}", chunk.file.path().display()),
            cause: error.to_string(),
        })
    }

    fn release(&mut self) {
        let needed = self.always_needed();
        let chunks = &mut self.chunks[..needed];
        if chunks.iter().any(|chunk| chunk.state != State::Evicted) {
            chunks.iter_mut().for_each(|chunk| chunk.evict(&self.mapped_page_reader));
        }
    }

    fn evict(&mut self, chunk: usize) {
        self.chunks[chunk].evict(&self.mapped_page_reader);
    }

    /// What was not read ahead is read from the mapped file.
    fn check(&self) -> Result<(), BackendError> {
        match self.is_broken {
            true => Err(misfit("locking another part of its session's weights failed")),
            false => Ok(()),
        }
    }

    fn relock(&mut self, locked: u64) -> io::Result<()> {
        if self.budget == locked && !self.is_broken || !self.experts.is_empty() {
            return Ok(());
        }
        self.release();
        self.budget = locked;
        let divided = self.lock_and_divide();
        self.is_broken = divided.is_err();
        divided.map(drop)
    }
}

impl Drop for PagedWeights {
    fn drop(&mut self) {
        self.chunks.iter_mut().for_each(|chunk| chunk.evict(&self.mapped_page_reader));
        self.locked.iter().for_each(views::unlock);
    }
}

fn misfit(why: &str) -> BackendError {
    BackendError::Misfit { what: "a chunk of weights".into(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::super::mapping::Mapping;
    use super::*;
    use std::fs::File;

    const BYTES: usize = 5 << 20;

    struct Mapped {
        /// Unmapped last.
        _view: memmap2::MmapMut,
        mapping: Mapping,
    }

    /// Maps a new file of [`BYTES`] bytes.
    fn mapped(path: &Path) -> Mapped {
        std::fs::write(path, vec![7; BYTES]).unwrap();
        // SAFETY: only this test uses its file.
        let view = unsafe { memmap2::MmapOptions::new().map_copy(&File::open(path).unwrap()) }.unwrap();
        let mapping = Mapping { start: view.as_ptr() as usize, length: BYTES, offset: 0, path: path.to_owned() };
        Mapped { _view: view, mapping }
    }

    fn take_over(mappings: &[&Mapped], experts: &ExpertTensors, locked: u64) -> ManagedWeights {
        let mappings = mappings.iter().map(|mapped| mapped.mapping.clone()).collect();
        let mapped_page_reader = Rc::new(MappedPageReader::start().unwrap());
        // SAFETY: the views outlive the weights in every test.
        unsafe { PagedWeights::take_over(mapped_page_reader, mappings, experts, locked) }.unwrap()
    }

    fn resident(mapped: &Mapped) -> usize {
        views::resident(&mapped.mapping.addresses()).unwrap()
    }

    #[test]
    fn chunks_are_in_memory_between_their_read_and_their_eviction() {
        let dir = tempfile::tempdir().unwrap();
        let view = mapped(&dir.path().join("weights"));
        let mut weights = take_over(&[&view], &ExpertTensors::default(), 1 << 20).weights;
        assert_eq!(resident(&view), 1 << 20, "what is locked was read");
        let sizes: Vec<u64> = weights.bytes().iter().map(|chunk| chunk.resident).collect();
        assert_eq!(sizes, [2 << 20, 2 << 20]);
        for _ in 0..3 {
            weights.prefetch(1).unwrap();
            assert!(weights.prefetch(1).is_err(), "it is being read");
            let (began, ended) = weights.wait(1).unwrap();
            assert!(began >= ended);
            assert!(resident(&view) >= 3 << 20, "the system may map pages around those that are read");
            weights.prefetch(0).unwrap();
            weights.wait(0).unwrap();
            assert_eq!(resident(&view), BYTES);
            weights.release();
            assert_eq!(resident(&view), 1 << 20);
        }
        weights.relock(4 << 20).unwrap();
        assert_eq!(resident(&view), 4 << 20);
        assert_eq!(weights.bytes().len(), 1);
        weights.relock(0).unwrap();
        assert_eq!(resident(&view), 0);
        drop(weights);
    }

    #[test]
    fn small_mappings_are_locked_first() {
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| mapped(&dir.path().join(name)));
        let second = Mapped { mapping: Mapping { length: 1 << 20, ..second.mapping.clone() }, ..second };
        let weights = take_over(&[&first, &second], &ExpertTensors::default(), 1 << 20).weights;
        assert_eq!((resident(&first), resident(&second)), (0, 1 << 20));
        drop(weights);
    }

    #[test]
    fn a_changed_file_is_an_error_and_its_chunk_can_be_read_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let view = mapped(&path);
        let mut weights = take_over(&[&view], &ExpertTensors::default(), 0).weights;
        let file = File::options().write(true).open(&path).unwrap();
        let before = file.metadata().unwrap().modified().unwrap();
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        weights.prefetch(0).unwrap();
        let error = weights.wait(0).unwrap_err().to_string();
        assert!(error.contains("was changed while it was in use"), "{error}");
        file.set_modified(before).unwrap();
        weights.prefetch(0).unwrap();
        weights.wait(0).unwrap();
        drop(weights);
    }
}
