//! The weights of one session that are read directly: some are locked in memory, and the chunks of the rest are read before each run.

use super::super::mapping::Mapping;
use super::super::streamed::ReadBeforeRuns;
use super::address_space::{map_inaccessible, replace};
use super::chunks::{ChunkRead, Files, MAX_READ, WeightRange, in_huge_pages, lock_order, merge_adjacent, reads};
use super::compressed::Compressed;
use super::expert_pages::ExpertPages;
use super::open_files::OpenFiles;
use super::page_pool::PagePool;
use super::page_region::PageRegions;
use super::reader::{Reader, Ticket};
use hpp_engine::BackendError;
use hpp_engine::port::ChunkSize;
use std::io;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Weights of a session that are read before each run. Must be dropped before the session.
pub(crate) struct StreamedWeights {
    reader: Rc<Reader>,
    /// Bytes of each chunk.
    bytes: Vec<ChunkSize>,
    /// The chunks that every run needs, then those of experts.
    chunks: Vec<StreamedChunk>,
    /// The chunks of each expert.
    experts: Vec<Range<usize>>,
    /// The experts that the next run uses.
    selected: Vec<u32>,
    /// The address ranges of the chunks that every run needs.
    memory: PageRegions,
    /// Where experts get their pages.
    expert_pages: Rc<ExpertPages>,
    /// Why the system refused to lock weights in memory, if it did: the system may then swap them.
    lock_error: Option<io::Error>,
    /// What is needed to lock more or less; `None` after an attempt that failed, and then no run may start.
    locking: Option<Locking>,
}

/// All weights of a session but experts, and which of them are locked.
struct Locking {
    mappings: Vec<Mapping>,
    compressed: Compressed,
    files: Files,
    pool: Rc<PagePool>,
    /// The bytes that may be locked.
    budget: u64,
    /// What is locked.
    locked: Vec<Mapping>,
}

/// What is read before each run.
struct Streamed {
    chunks: Vec<StreamedChunk>,
    bytes: Vec<ChunkSize>,
    memory: PageRegions,
    lock_error: Option<io::Error>,
}

/// The reader, the pools of pages and the open files, which all sessions share.
pub(super) struct StreamingIo {
    pub reader: Rc<Reader>,
    pub pool: Rc<PagePool>,
    pub expert_pages: Rc<ExpertPages>,
    pub files: Arc<OpenFiles>,
}

struct StreamedChunk {
    read: ChunkRead,
    state: ChunkState,
    /// The memory, if the chunk belongs to an expert. Access to it is forbidden while the chunk is absent, so that a kernel that reads an
    /// expert that was not selected cannot compute with zeros. Access is not forbidden while the chunk is read for a run of another
    /// sequence.
    expert: Option<ExpertMemory>,
}

/// The memory of a chunk of an expert.
struct ExpertMemory {
    addresses: Range<usize>,
    /// The pieces that it consists of; none while it is absent.
    pieces: Vec<Range<usize>>,
}

#[derive(Clone, Copy, PartialEq)]
enum ChunkState {
    /// It has no pages.
    Absent,
    Reading(Ticket),
    /// In memory.
    Present,
}

impl StreamedWeights {
    /// Takes over the mappings that ONNX Runtime made for a session. Reads and locks up to `locked` bytes, in [`lock_order`]. The rest is
    /// absent at first, and so are `experts`, whose mappings are not among `mappings`. `compressed` has the regions of `mappings` that are
    /// stored in another file.
    ///
    /// # Safety
    /// The mappings must belong to this session alone. The session must live longer than this and must not run while a chunk is
    /// absent. ONNX Runtime must treat external weights as read-only and hold no pointer into them except through these mappings.
    pub(super) unsafe fn take_over(
        io: StreamingIo,
        mappings: Vec<Mapping>,
        experts: Vec<Vec<Mapping>>,
        compressed: Compressed,
        locked: u64,
    ) -> io::Result<Self> {
        let StreamingIo { reader, pool, expert_pages, files } = io;
        for mapping in mappings.iter().chain(experts.iter().flatten()) {
            // SAFETY: the session keeps it mapped, no other session uses it, and no run starts before its chunks are present (this
            // function's contract).
            unsafe { replace(&mapping.addresses()) }?;
        }
        let (files, locked_now) = (Files::new(files), Vec::new());
        let mut locking = Locking { mappings, compressed, files, pool, budget: locked, locked: locked_now };
        // SAFETY: replaced above; the session keeps the addresses mapped and outlives this, and no run is in progress.
        let Streamed { mut chunks, mut bytes, memory, lock_error } = unsafe { locking.read_and_lock(&reader) }?;
        let mut of_experts = Vec::with_capacity(experts.len());
        for parts in &experts {
            let first = chunks.len();
            for part in parts {
                // SAFETY: replaced above; the session does not run before the chunks of the experts that it uses are present.
                unsafe { map_inaccessible(&part.addresses()) }?;
                chunks.extend(expert_chunks(part, &mut locking.files)?);
            }
            of_experts.push(first..chunks.len());
        }
        let lengths = chunks[bytes.len()..].iter().map(|chunk| chunk.read.length as u64);
        bytes.extend(lengths.map(|length| ChunkSize { resident: length, stored: length }).collect::<Vec<_>>());
        let (experts, selected) = (of_experts, Vec::new());
        let locking = Some(locking);
        Ok(StreamedWeights { reader, bytes, chunks, experts, selected, memory, expert_pages, lock_error, locking })
    }

    /// Why the system refused to lock weights, if it did; returned once.
    pub fn take_lock_error(&mut self) -> Option<io::Error> {
        self.lock_error.take()
    }

    /// The number of chunks that every run needs.
    fn always_needed(&self) -> usize {
        self.experts.first().map_or(self.chunks.len(), |chunks| chunks.start)
    }

    fn wait_for_reads(&mut self, chunks: Range<usize>) {
        for chunk in &mut self.chunks[chunks] {
            if let ChunkState::Reading(ticket) = chunk.state {
                // Whether the read failed does not matter: the chunk is evicted.
                drop(self.reader.wait(ticket));
                chunk.state = ChunkState::Present;
            }
        }
    }
}

impl ReadBeforeRuns for StreamedWeights {
    fn bytes(&self) -> &[ChunkSize] {
        &self.bytes
    }

    fn experts(&self) -> &[Range<usize>] {
        &self.experts
    }

    fn select_experts(&mut self, experts: &[u32]) {
        self.selected.clear();
        self.selected.extend_from_slice(experts);
    }

    fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError> {
        match self.chunks[chunk].state {
            ChunkState::Absent => {
                let chunk = &mut self.chunks[chunk];
                match &mut chunk.expert {
                    Some(ExpertMemory { addresses, pieces }) => {
                        // SAFETY: `take_over` made it inaccessible and the session keeps it mapped; `drop` tells the pool when that ends.
                        *pieces = unsafe { self.expert_pages.acquire(addresses.clone()) }.map_err(no_memory)?;
                    }
                    // SAFETY: the session does not run before the chunk is present, so nothing needs the contents of its regions.
                    None => unsafe { self.memory.acquire(&chunk.read.fills) },
                }
                chunk.state = ChunkState::Reading(begin(&self.reader, &chunk.read));
                Ok(())
            }
            ChunkState::Reading(_) | ChunkState::Present => Err(misfit("it is in memory already")),
        }
    }

    fn wait(&mut self, chunk: usize) -> Result<(Duration, Duration), BackendError> {
        let chunk = &mut self.chunks[chunk];
        let ChunkState::Reading(ticket) = chunk.state else { return Err(misfit("no read of it was started")) };
        let waited = self.reader.wait(ticket);
        chunk.state = if waited.is_ok() { ChunkState::Present } else { ChunkState::Absent };
        waited.map_err(|error| BackendError::Runtime {
            doing: format!("read weights from {} at offset {}", chunk.read.file.path().display(), chunk.read.offset),
            cause: error.to_string(),
        })
    }

    fn release(&mut self) {
        let needed = 0..self.always_needed();
        self.wait_for_reads(needed.clone());
        let chunks = &mut self.chunks[needed];
        if chunks.iter().any(|chunk| chunk.state != ChunkState::Absent) {
            // SAFETY: all reads into this memory have finished, and the session does not run while a chunk of it is absent, which all
            // are now.
            unsafe { self.memory.release() };
        }
        chunks.iter_mut().for_each(|chunk| chunk.state = ChunkState::Absent);
    }

    fn evict(&mut self, chunk: usize) {
        self.wait_for_reads(chunk..chunk + 1);
        let chunk = &mut self.chunks[chunk];
        if let Some(memory) = &mut chunk.expert {
            for piece in memory.pieces.drain(..) {
                // SAFETY: the session keeps it mapped; its read has finished, and the session does not run with this expert before it is
                // present again.
                unsafe { self.expert_pages.release(piece) };
            }
            chunk.state = ChunkState::Absent;
        }
    }

    /// Refuses a run while a chunk that it needs is absent or being read. Other experts may be read meanwhile, for a run of another
    /// sequence, because a kernel accesses only the experts that its router selected. For absent experts [`map_inaccessible`] enforces that.
    fn check(&self) -> Result<(), BackendError> {
        if self.locking.is_none() {
            return Err(misfit("locking another part of its session's weights failed"));
        }
        self.expert_pages.deny_access_to_free_pages().map_err(no_memory)?;
        let experts =
            self.selected.iter().flat_map(|expert| self.experts.get(*expert as usize).cloned().into_iter().flatten());
        let mut needed = (0..self.always_needed()).chain(experts).map(|chunk| self.chunks[chunk].state);
        match needed.find(|state| *state != ChunkState::Present) {
            None => Ok(()),
            Some(ChunkState::Reading(_)) => Err(misfit("a run would access it while it is read")),
            Some(_) => Err(misfit("a run needs it and it is not in memory")),
        }
    }

    /// Changes how many bytes are locked, to at most `locked`. If the number differs from the one before, evicts all chunks; weights that
    /// stay locked are not read again. Weights with experts stay as they are.
    fn relock(&mut self, locked: u64) -> io::Result<()> {
        let is_new = |locking: &mut Locking| locking.budget != locked && self.experts.is_empty();
        let Some(mut locking) = self.locking.take_if(is_new) else { return Ok(()) };
        self.release();
        locking.budget = locked;
        // The pool must discard its free pages at these addresses before some of the addresses are locked.
        // SAFETY: of no mapping.
        self.memory = unsafe { PageRegions::new(Rc::clone(&locking.pool), &[]) };
        // SAFETY: `take_over` replaced the mappings; the session keeps them mapped and outlives this; no run is in progress, since that
        // borrows this, and the next is refused until all chunks are present.
        let Streamed { chunks, bytes, memory, lock_error } = unsafe { locking.read_and_lock(&self.reader) }?;
        (self.chunks, self.bytes, self.memory) = (chunks, bytes, memory);
        self.lock_error = lock_error.or(self.lock_error.take());
        self.locking = Some(locking);
        Ok(())
    }
}

impl Drop for StreamedWeights {
    fn drop(&mut self) {
        self.wait_for_reads(0..self.chunks.len());
        for memory in self.chunks.iter().filter_map(|chunk| chunk.expert.as_ref()) {
            self.expert_pages.discard(memory.addresses.clone());
        }
    }
}

impl Locking {
    /// Locks weights in [`lock_order`] up to the budget, and reads those that were not locked before. Unlocks the rest and frees its pages.
    ///
    /// # Safety
    /// [`replace`](super::address_space::replace) made the memory of the mappings, which must stay mapped as long as the result is used, and nothing may need the
    /// contents of what is not locked.
    unsafe fn read_and_lock(&mut self, reader: &Reader) -> io::Result<Streamed> {
        let Locking { mappings, compressed, files, pool, budget, locked } = self;
        let before = std::mem::take(locked);
        let divided = divide(lock_order(mappings.clone(), compressed), *budget);
        let mut lock_error = None;
        for range in divided.locked.iter().filter(|range| !range.mapping.is_within(&before)) {
            // Locked before it is read, so that no huge page that starts here reaches into absent memory.
            lock_error = range.mapping.lock().err().or(lock_error);
            read_now(reader, reads(range, 0..usize::MAX, files)?)?;
        }
        *locked = divided.locked.into_iter().map(|range| range.mapping).collect();
        let streamed = divided.streamed;
        if !before.is_empty() {
            streamed.iter().for_each(|range| range.mapping.unlock());
        }
        let merged = merge_adjacent(streamed.iter().map(|range| &range.mapping));
        let chunks = absent_chunks(&streamed, &merged, files)?;
        // If the system does not lock memory, huge pages of locked weights may reach into these ranges; `new` frees them.
        // SAFETY: this function's contract.
        let memory = unsafe { PageRegions::new(Rc::clone(pool), &merged) };
        let needed = memory.bytes_needed(chunks.iter().map(|chunk: &StreamedChunk| &*chunk.read.fills));
        let size_of =
            |(chunk, resident): (&StreamedChunk, u64)| ChunkSize { resident, stored: chunk.read.length as u64 };
        let bytes: Vec<ChunkSize> = chunks.iter().zip(needed).map(size_of).collect();
        Ok(Streamed { chunks, bytes, memory, lock_error })
    }
}

/// Weights in two parts.
struct Divided<'a> {
    locked: Vec<WeightRange<'a>>,
    /// In file order, so that compressed and uncompressed reads alternate.
    streamed: Vec<WeightRange<'a>>,
}

/// Divides ranges into the first ones, up to `budget` bytes, which are locked, and the rest.
fn divide(ranges: Vec<WeightRange<'_>>, budget: u64) -> Divided<'_> {
    let (mut room, mut locked, mut streamed) = (budget, Vec::new(), Vec::new());
    for range in ranges {
        let length = range.mapping.length as u64;
        let (first, rest) = match range.region {
            Some(_) if length <= room => (Some(range), None),
            // A part of a compressed region can be locked if the other part is read uncompressed. That is worth it only if it leaves less
            // to read.
            Some(region) if length - room >= region.stored_bytes() => (None, Some(range)),
            _ => {
                let uncompressed = |mapping| WeightRange { mapping, region: None };
                let (first, rest) = range.mapping.split(room);
                (first.map(uncompressed), rest.map(uncompressed))
            }
        };
        room = first.as_ref().map_or(room, |range| room.saturating_sub(range.mapping.length as u64));
        locked.extend(first);
        streamed.extend(rest);
    }
    streamed.sort_by_key(|range| range.mapping.start);
    Divided { locked, streamed }
}

/// The chunks of streamed ranges, all absent. `merged` are their mappings, adjacent ones merged.
fn absent_chunks(
    streamed: &[WeightRange<'_>],
    merged: &[Mapping],
    files: &mut Files,
) -> io::Result<Vec<StreamedChunk>> {
    let mut chunks = Vec::new();
    for range in streamed {
        let reads = reads(range, in_huge_pages(merged, &range.mapping), files)?;
        chunks.extend(reads.into_iter().map(|read| StreamedChunk { read, state: ChunkState::Absent, expert: None }));
    }
    Ok(chunks)
}

/// The chunks of an expert's part of a mapping, each with the memory that it fills.
fn expert_chunks(part: &Mapping, files: &mut Files) -> io::Result<Vec<StreamedChunk>> {
    let range = WeightRange { mapping: part.clone(), region: None };
    let chunk = |read: ChunkRead| {
        let addresses = read.fills.first().cloned().unwrap_or_default();
        let expert = Some(ExpertMemory { addresses, pieces: Vec::new() });
        StreamedChunk { read, state: ChunkState::Absent, expert }
    };
    // The pages of experts are contiguous wherever they are mapped, so all are read in place.
    Ok(reads(&range, part.addresses(), files)?.into_iter().map(chunk).collect())
}

/// How many address ranges [`expert_chunks`] makes of a part.
pub(super) fn expert_ranges(part: &Mapping) -> usize {
    part.length.div_ceil(MAX_READ as usize)
}

/// Reads locked weights.
fn read_now(reader: &Reader, reads: Vec<ChunkRead>) -> io::Result<()> {
    reads.iter().try_for_each(|read| reader.wait(begin(reader, read)).map(drop))
}

fn begin(reader: &Reader, ChunkRead { file, offset, length, to, .. }: &ChunkRead) -> Ticket {
    // SAFETY: the session keeps the addresses mapped and outlives the chunk's owner, which waits for all reads before it is dropped;
    // no run, eviction or other read uses these pages before the read was waited for.
    unsafe { reader.read(file, *offset, *length, to.clone()) }
}

fn no_memory(error: io::Error) -> BackendError {
    BackendError::Runtime {
        doing: "make room for an expert (hpp-split --experts all needs fewer mappings)".into(),
        cause: error.to_string(),
    }
}

fn misfit(why: &str) -> BackendError {
    BackendError::Misfit { what: "a chunk of weights".into(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::super::open_files::ReadFrom;
    use super::super::reader::ReadTarget;
    use super::*;
    use crate::os::Pages;
    use crate::weights::file::{SECTOR, WeightFile};
    use std::path::Path;

    const BYTES: usize = 4096;

    /// Two chunks: one of a sound file, one of a failing disk.
    fn weights(reader: Reader, dir: &Path) -> (StreamedWeights, Pages) {
        let path = dir.join("weights");
        std::fs::write(&path, vec![7; BYTES]).unwrap();
        let pages = Pages::reserve(2 * BYTES).unwrap();
        let chunk = |file: WeightFile, number: usize| {
            let at = pages.address() as usize + number * BYTES;
            let (to, fills) = (ReadTarget::Memory(at), std::iter::once(at..at + BYTES).collect());
            let read = ChunkRead { file: ReadFrom::Open(Arc::new(file)), offset: 0, length: BYTES, to, fills };
            StreamedChunk { read, state: ChunkState::Absent, expert: None }
        };
        let broken = WeightFile::with_length(Path::new("/proc/self/mem"), u64::MAX);
        let chunks = vec![chunk(WeightFile::open(&path).unwrap(), 0), chunk(broken, 1)];
        let bytes = vec![ChunkSize { resident: BYTES as u64, stored: BYTES as u64 }; 2];
        let filled = [Mapping { start: pages.address() as usize, length: 2 * BYTES, offset: 0, path }];
        // SAFETY: pages of this test, which outlive the weights.
        let memory = unsafe { PageRegions::new(Rc::default(), &filled) };
        let (experts, selected, expert_pages) = (Vec::new(), Vec::new(), Rc::default());
        let reader = Rc::new(reader);
        let (files, pool, compressed) = (Files::new(Arc::default()), Rc::default(), Compressed::default());
        let locking = Some(Locking { mappings: vec![], compressed, files, pool, budget: 0, locked: vec![] });
        let lock_error = None;
        (StreamedWeights { reader, bytes, chunks, experts, selected, memory, expert_pages, lock_error, locking }, pages)
    }

    #[test]
    fn a_chunk_that_could_not_be_read_is_absent_and_refuses_runs() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let (mut weights, pages) = weights(reader, dir.path());
            for _ in 0..2 {
                weights.prefetch(0).unwrap();
                weights.prefetch(1).unwrap();
                weights.wait(0).unwrap();
                let error = weights.wait(1).unwrap_err().to_string();
                assert!(error.contains("read weights from /proc/self/mem at offset 0"), "{error}");
                assert!(error.contains("Input/output error"), "{error}");
                // SAFETY: the first chunk was read, and no read is in progress.
                assert_eq!(unsafe { *pages.address() }, 7);
                assert!(weights.check().unwrap_err().to_string().contains("it is not in memory"));
                // After eviction the next pass can try again.
                weights.release();
                assert!(weights.check().is_err());
            }
            weights.prefetch(1).unwrap();
            // Dropping them waits for the read in progress.
            drop(weights);
        }
    }

    /// A weights file with compressed regions beside it, and its mapping as ONNX Runtime makes one.
    fn mapped(dir: &Path) -> (Vec<u8>, memmap2::MmapMut, Vec<Mapping>) {
        let mut bytes = super::super::compressed::make::tests::write(dir);
        bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
        let file = std::fs::File::open(dir.join("weights")).unwrap();
        // SAFETY: only this test uses its file.
        let map = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        let mappings = super::super::super::mapped_under(dir).unwrap();
        assert_eq!(mappings.iter().map(|mapping| mapping.length).sum::<usize>(), bytes.len());
        (bytes, map, mappings)
    }

    #[test]
    fn streamed_weights_equal_the_file_for_any_number_of_locked_bytes() {
        for reader in Reader::each() {
            let (reader, pool, files, dir) =
                (Rc::new(reader), Rc::default(), Arc::default(), tempfile::tempdir().unwrap());
            let compressed = |dir: &Path| Compressed::open(dir, dir).unwrap();
            let mut read = Vec::new();
            for locked in [0, 50_000, 180_000, 250_000, 2 << 20, 4 << 20] {
                let (bytes, map, mappings) = mapped(dir.path());
                let start = mappings[0].start as *const u8;
                let all = mappings.clone();
                let (pool, files) = (Rc::clone(&pool), Arc::clone(&files));
                let io = StreamingIo { reader: Rc::clone(&reader), pool, expert_pages: Rc::default(), files };
                // SAFETY: the mapping outlives the weights, and is read only while all chunks are present.
                let mut weights =
                    unsafe { StreamedWeights::take_over(io, mappings, vec![], compressed(dir.path()), locked) }
                        .unwrap();
                for _ in 0..2 {
                    (0..weights.bytes().len()).for_each(|chunk| weights.prefetch(chunk).unwrap());
                    (0..weights.bytes().len()).for_each(|chunk| assert!(weights.wait(chunk).is_ok()));
                    weights.check().unwrap();
                    // SAFETY: the mapping has this length, and nothing writes to it now.
                    assert!(unsafe { std::slice::from_raw_parts(start, bytes.len()) } == bytes, "{locked} locked");
                    weights.release();
                }
                let held: u64 = weights.bytes().iter().map(|chunk| chunk.resident).sum();
                assert!(bytes.len() as u64 - held <= locked + SECTOR && all.len() == 1);
                read.push(weights.bytes().iter().map(|chunk| chunk.stored).sum::<u64>());
                drop((weights, map));
            }
            // 163,840 bytes are uncompressed; sums and scales take 16,384, and numbers half of their size or 110,592. Uncompressed bytes
            // are locked first, and in the last case all are locked.
            let stored = 16_384 + (3 << 19) + 110_592;
            assert_eq!(read[..2], [163_840 + stored, 163_840 - 53_248 + stored]);
            assert_eq!(read[5], 0);
            assert!(read.is_sorted_by(|more, less| less < more), "{read:?}");
        }
    }

    /// Bytes of memory that this process has locked in these mappings.
    fn locked_bytes(mappings: &[Mapping]) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (mut within, mut locked) = (false, 0);
        for line in smaps.lines() {
            let first = line.split_ascii_whitespace().next().unwrap();
            if let Some((start, end)) = first.split_once('-')
                && let (Ok(start), Ok(end)) = (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16))
            {
                within = mappings.iter().any(|of| of.start <= start && end <= of.start + of.length);
            } else if within && let Some(kib) = line.strip_prefix("Locked:") {
                locked += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
            }
        }
        locked
    }

    #[test]
    fn other_bytes_can_be_locked_between_runs() {
        for reader in Reader::each() {
            let (reader, dir) = (Rc::new(reader), tempfile::tempdir().unwrap());
            let (bytes, map, mappings) = mapped(dir.path());
            let (start, all) = (mappings[0].start as *const u8, mappings.clone());
            let compressed = Compressed::open(dir.path(), dir.path()).unwrap();
            let (pool, files): (Rc<PagePool>, _) = (Rc::default(), Arc::default());
            let io = StreamingIo { reader, pool: Rc::clone(&pool), expert_pages: Rc::default(), files };
            // SAFETY: the mapping outlives the weights, and is read only while all chunks are present.
            let taken = unsafe { StreamedWeights::take_over(io, mappings, vec![], compressed, 2 << 20) };
            let mut weights = taken.unwrap();
            // Some pages cannot be locked where the process may not lock as much.
            let locks = locked_bytes(&all) > 0;
            for locked in [3 << 20, 180_000, 4 << 20, 0, 50_000, 1 << 20, 250_000, 4 << 20] {
                // With chunks in memory and on their way.
                (0..weights.bytes().len()).for_each(|chunk| weights.prefetch(chunk).unwrap());
                weights.relock(locked).unwrap();
                assert!(weights.bytes().is_empty() || weights.check().is_err(), "its chunks are absent");
                (0..weights.bytes().len()).for_each(|chunk| weights.prefetch(chunk).unwrap());
                (0..weights.bytes().len()).for_each(|chunk| assert!(weights.wait(chunk).is_ok()));
                weights.check().unwrap();
                // SAFETY: the mapping has this length, and nothing writes to it now.
                assert!(unsafe { std::slice::from_raw_parts(start, bytes.len()) } == bytes, "{locked} locked");
                let streamed: u64 = weights.bytes().iter().map(|chunk| chunk.resident).sum();
                let kept = bytes.len() as u64 - streamed;
                assert!(kept <= locked + SECTOR, "{kept} of {locked}");
                assert!(!locks || locked_bytes(&all) == kept, "{} of {kept}", locked_bytes(&all));
                weights.release();
                let (_, free, held) = pool.account();
                assert_eq!(held, free, "no page is lost");
            }
            drop((weights, map));
        }
    }

    #[test]
    fn damaged_compressed_bytes_are_an_error() {
        for reader in Reader::each() {
            let (reader, dir) = (Rc::new(reader), tempfile::tempdir().unwrap());
            let (_, map, mappings) = mapped(dir.path());
            let compressed = Compressed::open(dir.path(), dir.path()).unwrap();
            let stored = std::fs::read(&compressed.stored).unwrap();
            // The first byte that was stored of each code, in the order of their regions.
            for region in compressed.regions.clone() {
                let mut changed = stored.clone();
                changed[region.parts().last().unwrap().at as usize] ^= 1;
                std::fs::write(&compressed.stored, &changed).unwrap();
                let reader = Rc::clone(&reader);
                let io =
                    StreamingIo { reader, pool: Rc::default(), expert_pages: Rc::default(), files: Arc::default() };
                // SAFETY: the mapping outlives the weights, and nothing reads it.
                let taken = unsafe { StreamedWeights::take_over(io, mappings.clone(), vec![], compressed.clone(), 0) };
                let mut weights = taken.unwrap();
                let chunks = 0..weights.bytes().len();
                chunks.clone().for_each(|chunk| weights.prefetch(chunk).unwrap());
                let failed: Vec<String> =
                    chunks.filter_map(|chunk| weights.wait(chunk).err()).map(|error| error.to_string()).collect();
                assert!(
                    matches!(&failed[..], [one] if one.contains("dense at offset") && one.contains("damaged: remove")),
                    "{failed:?}"
                );
                assert!(weights.check().is_err());
            }
            drop(map);
        }
    }
}
