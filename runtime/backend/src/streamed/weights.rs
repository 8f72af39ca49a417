//! The weights of one session: which part is locked in memory, and the chunks of the rest that come and go.

use super::chunks::{ChunkRead, Files, by_what_they_spare, in_huge_pages, joined, reads};
use super::dense::Span;
use super::frames::Frames;
use super::mapping::Mapping;
use super::memory::Memory;
use super::open_files::OpenFiles;
use super::reader::{Reader, Ticket};
use hpp_engine::BackendError;
use hpp_engine::port::{ChunkSize, Interval};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Weights of a session that are read before each run. Must be dropped before the session.
pub(crate) struct Weights {
    reader: Rc<Reader>,
    /// Bytes of each chunk.
    bytes: Vec<ChunkSize>,
    chunks: Vec<Chunk>,
    /// The memory that chunks fill.
    memory: Memory,
    /// Why the system did not lock them, where it did not.
    unlocked: Option<io::Error>,
}

struct Chunk {
    read: ChunkRead,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// No page of it is there.
    Absent,
    /// It is being read.
    Reading(Ticket),
    /// It is there.
    Present,
}

impl Weights {
    /// Takes over what ONNX Runtime has mapped while it made a session. `locked` bytes are read and stay, those first that spare
    /// most reading, and of these the small ones; the rest is absent. `spans` of the weights are stored densely in their directory.
    ///
    /// # Safety
    /// The mappings must belong to this session alone. The session must live longer than this and must not run while a chunk is
    /// absent. ONNX Runtime must treat external weights as read-only and hold no pointer into them except through these mappings.
    pub(super) unsafe fn take_over(
        (reader, frames, files): (Rc<Reader>, Rc<Frames>, Arc<OpenFiles>),
        mappings: Vec<Mapping>,
        spans: &[Span],
        locked: u64,
    ) -> io::Result<Self> {
        let mut files = Files::new(files);
        let mut unlocked = None;
        for mapping in &mappings {
            // SAFETY: the session keeps it mapped and no other session has it (the caller's promises); nothing runs before its chunks
            // are present.
            unsafe { mapping.replace() }?;
        }
        let (mut room, mut going) = (locked, Vec::new());
        for (mapping, span) in by_what_they_spare(mappings, spans) {
            let held = mapping.length as u64;
            let (stays, goes) = match span {
                Some(span) if held <= room => (Some((mapping, Some(span))), None),
                // As it is, a part of it can stay: worth it where less is left to read then.
                Some(span) if held - room >= span.stored_bytes() => (None, Some((mapping, Some(span)))),
                _ => {
                    let (stays, goes) = mapping.split(room);
                    (stays.map(|part| (part, None)), goes.map(|part| (part, None)))
                }
            };
            if let Some((mapping, span)) = stays {
                room = room.saturating_sub(mapping.length as u64);
                // Locked at first, so that no huge page begins here and reaches into what is to be absent.
                unlocked = mapping.lock().err().or(unlocked);
                stay(&reader, reads(&mapping, span, 0..usize::MAX, &mut files)?)?;
            }
            going.extend(goes);
        }
        // In the order of the file, so that what is to be expanded comes between what is not.
        going.sort_by_key(|(mapping, _)| mapping.start);
        let runs = joined(going.iter().map(|(mapping, _)| mapping));
        let mut chunks = Vec::new();
        for (mapping, span) in &going {
            let reads = reads(mapping, *span, in_huge_pages(&runs, mapping), &mut files)?;
            chunks.extend(reads.into_iter().map(|read| Chunk { read, state: State::Absent }));
        }
        // Where the system does not lock memory, huge pages of what stays have reached further; they are given back.
        // SAFETY: replaced above; the session keeps the addresses mapped and outlives this.
        let memory = unsafe { Memory::new(frames, &runs) };
        let taken = memory.taken_by(chunks.iter().map(|chunk: &Chunk| &*chunk.read.fills));
        let bytes_of = |(chunk, held): (&Chunk, u64)| ChunkSize { resident: held, stored: chunk.read.length as u64 };
        let bytes = chunks.iter().zip(taken).map(bytes_of).collect();
        Ok(Weights { reader, bytes, chunks, memory, unlocked })
    }

    /// Bytes of each chunk.
    pub fn bytes(&self) -> &[ChunkSize] {
        &self.bytes
    }

    /// Why the system did not keep its promise to lock what stays; once.
    pub fn take_unlocked(&mut self) -> Option<io::Error> {
        self.unlocked.take()
    }

    /// Begins to read a chunk.
    pub fn begin(&mut self, chunk: usize) -> Result<(), BackendError> {
        match self.chunks[chunk].state {
            State::Absent => {
                let chunk = &mut self.chunks[chunk];
                // SAFETY: nothing is filled before it has room, and nothing runs before it is filled.
                unsafe { self.memory.make_room(&chunk.read.fills) };
                chunk.state = State::Reading(begin(&self.reader, &chunk.read));
                Ok(())
            }
            State::Reading(_) | State::Present => Err(misfit("it is there already")),
        }
    }

    /// Waits for a chunk; from when to when it was read, `now` being the time at the return.
    pub fn finish(&mut self, chunk: usize, now: impl Fn() -> Duration) -> Result<Interval, BackendError> {
        let chunk = &mut self.chunks[chunk];
        let State::Reading(ticket) = chunk.state else { return Err(misfit("nobody reads it")) };
        let waited = self.reader.wait(ticket);
        chunk.state = if waited.is_ok() { State::Present } else { State::Absent };
        let (began, ended) = waited.map_err(|error| BackendError::Runtime {
            doing: format!("read weights from {} at offset {}", chunk.read.file.path().display(), chunk.read.offset),
            cause: error.to_string(),
        })?;
        let now = now();
        Ok(Interval { start: now.saturating_sub(began), end: now.saturating_sub(ended) })
    }

    /// Gives the memory of all chunks back.
    pub fn release(&mut self) {
        self.wait_for_all();
        if self.chunks.iter().any(|chunk| chunk.state != State::Absent) {
            // SAFETY: no chunk is being read any more, and the session does not run while one is absent, which all are now.
            unsafe { self.memory.leave() };
        }
        self.chunks.iter_mut().for_each(|chunk| chunk.state = State::Absent);
    }

    /// Refuses a run while a chunk is absent.
    pub fn check(&self) -> Result<(), BackendError> {
        match self.chunks.iter().all(|chunk| chunk.state == State::Present) {
            true => Ok(()),
            false => Err(misfit("a run needs it and it is not there")),
        }
    }

    fn wait_for_all(&mut self) {
        for chunk in &mut self.chunks {
            if let State::Reading(ticket) = chunk.state {
                // Whether it could be read matters to nobody any more.
                drop(self.reader.wait(ticket));
                chunk.state = State::Present;
            }
        }
    }
}

impl Drop for Weights {
    fn drop(&mut self) {
        self.wait_for_all();
    }
}

/// Reads what stays.
fn stay(reader: &Reader, reads: Vec<ChunkRead>) -> io::Result<()> {
    reads.iter().try_for_each(|read| reader.wait(begin(reader, read)).map(drop))
}

fn begin(reader: &Reader, ChunkRead { file, offset, length, to, .. }: &ChunkRead) -> Ticket {
    // SAFETY: the session keeps the addresses mapped and outlives this chunk's owner, which waits for all reads before it goes;
    // nothing runs, gives back or reads these pages before the read was waited for.
    unsafe { reader.read(file, *offset, *length, to.clone()) }
}

/// Weights of a session that stay mapped from their file; what a run touches comes page by page, and goes after it.
pub(crate) struct OnDemand(Vec<Mapping>);

impl OnDemand {
    /// What ONNX Runtime has mapped while it made a session.
    pub fn new(mappings: Vec<Mapping>) -> Self {
        mappings.iter().for_each(Mapping::read_at_random);
        OnDemand(mappings)
    }

    /// Gives back what a run has touched.
    pub fn release(&self) {
        for mapping in &self.0 {
            // SAFETY: the mappings are this session's alone (`Readers::keep`), which is alive; they still are the file's, so what is
            // needed again is read again.
            unsafe { mapping.give_back() };
        }
    }
}

fn misfit(why: &str) -> BackendError {
    BackendError::Misfit { what: "a chunk of weights".into(), why: why.into() }
}

#[cfg(test)]
mod tests {
    use super::super::file::{SECTOR, WeightFile};
    use super::super::open_files::ReadFrom;
    use super::super::reader::To;
    use super::*;
    use crate::os::Pages;
    use std::path::Path;

    const BYTES: usize = 4096;

    /// Two chunks: one of a file that is as it should be, one of a disk that fails.
    fn weights(reader: Reader, dir: &Path) -> (Weights, Pages) {
        let path = dir.join("weights");
        std::fs::write(&path, vec![7; BYTES]).unwrap();
        let pages = Pages::reserve(2 * BYTES).unwrap();
        let chunk = |file: WeightFile, number: usize| {
            let at = pages.address() as usize + number * BYTES;
            let (to, fills) = (To::Memory(at), std::iter::once(at..at + BYTES).collect());
            let read = ChunkRead { file: ReadFrom::Open(Arc::new(file)), offset: 0, length: BYTES, to, fills };
            Chunk { read, state: State::Absent }
        };
        let broken = WeightFile::pretending(Path::new("/proc/self/mem"), u64::MAX);
        let chunks = vec![chunk(WeightFile::open(&path).unwrap(), 0), chunk(broken, 1)];
        let bytes = vec![ChunkSize { resident: BYTES as u64, stored: BYTES as u64 }; 2];
        let filled = [Mapping { start: pages.address() as usize, length: 2 * BYTES, offset: 0, path }];
        // SAFETY: pages of this test, which outlive the weights.
        let memory = unsafe { Memory::new(Rc::default(), &filled) };
        (Weights { reader: Rc::new(reader), bytes, chunks, memory, unlocked: None }, pages)
    }

    #[test]
    fn what_could_not_be_read_is_absent_and_no_run_begins() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let (mut weights, pages) = weights(reader, dir.path());
            for _ in 0..2 {
                weights.begin(0).unwrap();
                weights.begin(1).unwrap();
                weights.finish(0, || Duration::ZERO).unwrap();
                let error = weights.finish(1, || Duration::ZERO).unwrap_err().to_string();
                assert!(error.contains("read weights from /proc/self/mem at offset 0"), "{error}");
                assert!(error.contains("Input/output error"), "{error}");
                // SAFETY: the first chunk was read, and no read is under way.
                assert_eq!(unsafe { *pages.address() }, 7);
                assert!(weights.check().unwrap_err().to_string().contains("it is not there"));
                // Everything is let go; another pass may try again.
                weights.release();
                assert!(weights.check().is_err());
            }
            weights.begin(1).unwrap();
            // What is being read when they are dropped is waited for.
            drop(weights);
        }
    }

    /// Weights in a file, in part stored densely beside it, and their mapping, as ONNX Runtime makes one.
    fn mapped(dir: &Path) -> (Vec<u8>, memmap2::MmapMut, Vec<Mapping>) {
        let mut bytes = super::super::dense::make::tests::write(dir);
        bytes.resize(bytes.len().next_multiple_of(SECTOR as usize), 0);
        let file = std::fs::File::open(dir.join("weights")).unwrap();
        // SAFETY: nobody else writes to this test's own file.
        let map = unsafe { memmap2::MmapOptions::new().map_copy(&file) }.unwrap();
        let mappings = super::super::mapped_under(dir).unwrap();
        assert_eq!(mappings.iter().map(|mapping| mapping.length).sum::<usize>(), bytes.len());
        (bytes, map, mappings)
    }

    #[test]
    fn what_is_stored_densely_arrives_as_it_was() {
        for reader in Reader::each() {
            let (reader, frames, files, dir) =
                (Rc::new(reader), Rc::default(), Arc::default(), tempfile::tempdir().unwrap());
            let spans = |dir: &Path| super::super::dense::spans(dir).unwrap();
            let mut read = Vec::new();
            for locked in [0, 50_000, 180_000, 250_000, 2 << 20, 4 << 20] {
                let (bytes, map, mappings) = mapped(dir.path());
                let start = mappings[0].start as *const u8;
                let all = mappings.clone();
                let shared = (Rc::clone(&reader), Rc::clone(&frames), Arc::clone(&files));
                // SAFETY: the mapping outlives them, and is looked at while all chunks are present.
                let mut weights = unsafe { Weights::take_over(shared, mappings, &spans(dir.path()), locked) }.unwrap();
                for _ in 0..2 {
                    (0..weights.bytes().len()).for_each(|chunk| weights.begin(chunk).unwrap());
                    (0..weights.bytes().len())
                        .for_each(|chunk| assert!(weights.finish(chunk, || Duration::ZERO).is_ok()));
                    weights.check().unwrap();
                    // SAFETY: as many bytes are mapped there, and nobody writes to them now.
                    assert!(unsafe { std::slice::from_raw_parts(start, bytes.len()) } == bytes, "{locked} locked");
                    weights.release();
                }
                let held: u64 = weights.bytes().iter().map(|chunk| chunk.resident).sum();
                assert!(bytes.len() as u64 - held <= locked + SECTOR && all.len() == 1);
                read.push(weights.bytes().iter().map(|chunk| chunk.stored).sum::<u64>());
                drop((weights, map));
            }
            // 167,936 bytes as they are; 16,384 for sums and scales, half of the rest for numbers. What
            // is as it is goes first, and the last is all locked.
            let half = 3 << 19;
            assert_eq!(read[..2], [167_936 + 16_384 + half, 167_936 - 53_248 + 16_384 + half]);
            assert_eq!(read[5], 0);
            assert!(read.is_sorted_by(|more, less| less < more), "{read:?}");
        }
    }
}
