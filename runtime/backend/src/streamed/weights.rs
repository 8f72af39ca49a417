//! The weights of one session: which part is locked in memory, and the chunks of the rest that come and go.

use super::file::WeightFile;
use super::mapping::Mapping;
use super::reader::{Reader, Ticket};
use hpp_engine::BackendError;
use hpp_engine::port::Took;
use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

/// Most bytes of one read. Larger ones are no faster, and finer ones let the next stage's begin sooner.
pub(super) const CHUNK: u64 = 2 << 20;

/// Weights of a session that are read before each run. Must be dropped before the session.
pub(crate) struct Weights {
    reader: Rc<Reader>,
    /// Bytes of each chunk.
    bytes: Vec<u64>,
    chunks: Vec<Chunk>,
    /// Bytes that stay in memory.
    locked: u64,
    /// Why the system did not lock them, where it did not.
    unlocked: Option<io::Error>,
}

struct Chunk {
    mapping: Mapping,
    file: Arc<WeightFile>,
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
    /// Takes over what ONNX Runtime has mapped while it made a session. The small ones first, `locked` bytes are read and
    /// stay; the rest is absent.
    ///
    /// # Safety
    /// The session must live longer than this, must not run while a chunk is absent, and ONNX Runtime must neither write to its
    /// external weights nor have kept anything of them outside of the mappings that it needs them for again.
    pub unsafe fn take_over(reader: Rc<Reader>, mut mappings: Vec<Mapping>, locked: u64) -> io::Result<Self> {
        mappings.sort_by_key(|mapping| (mapping.length, mapping.offset));
        let mut files: BTreeMap<PathBuf, Arc<WeightFile>> = BTreeMap::new();
        for mapping in &mappings {
            if !files.contains_key(&mapping.path) {
                files.insert(mapping.path.clone(), Arc::new(WeightFile::open(&mapping.path)?));
            }
        }
        let mut room = locked;
        let mut weights = Weights { reader, bytes: vec![], chunks: vec![], locked: 0, unlocked: None };
        for mapping in mappings {
            // SAFETY: nothing runs yet, and nothing runs before its chunks are present.
            unsafe { mapping.replace() }?;
            let (stays, goes) = mapping.split(room);
            let file = &files[&mapping.path];
            room = room.saturating_sub(stays.as_ref().map_or(0, |part| part.length as u64));
            let chunks = |part: Option<Mapping>| part.into_iter().flat_map(chunks);
            for mapping in chunks(stays) {
                weights.stay(Chunk { mapping, file: Arc::clone(file), state: State::Absent })?;
            }
            for mapping in chunks(goes) {
                weights.bytes.push(mapping.length as u64);
                weights.chunks.push(Chunk { mapping, file: Arc::clone(file), state: State::Absent });
            }
        }
        Ok(weights)
    }

    /// Reads a part that stays.
    fn stay(&mut self, mut chunk: Chunk) -> io::Result<()> {
        self.locked += chunk.mapping.length as u64;
        let ticket = begin(&self.reader, &mut chunk);
        self.reader.wait(ticket)?;
        if let Err(error) = chunk.mapping.lock() {
            self.unlocked = Some(error);
        }
        Ok(())
    }

    /// Bytes of each chunk.
    pub fn bytes(&self) -> &[u64] {
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
                begin(&self.reader, &mut self.chunks[chunk]);
                Ok(())
            }
            State::Reading(_) | State::Present => Err(misfit("it is there already")),
        }
    }

    /// Waits for a chunk; from when to when it was read, `now` being the time at the return.
    pub fn finish(&mut self, chunk: usize, now: impl Fn() -> Duration) -> Result<Took, BackendError> {
        let chunk = &mut self.chunks[chunk];
        let State::Reading(ticket) = chunk.state else { return Err(misfit("nobody reads it")) };
        let waited = self.reader.wait(ticket);
        chunk.state = if waited.is_ok() { State::Present } else { State::Absent };
        let (began, ended) = waited.map_err(|error| BackendError::Runtime {
            doing: format!("read weights from {} at offset {}", chunk.file.path().display(), chunk.mapping.offset),
            cause: error.to_string(),
        })?;
        let now = now();
        Ok(Took { from: now.saturating_sub(began), to: now.saturating_sub(ended) })
    }

    /// Gives the memory of all chunks back.
    pub fn release(&mut self) {
        self.wait_for_all();
        for part in runs(&self.chunks) {
            // SAFETY: no chunk is being read any more; the session, which keeps the addresses mapped, outlives this, and it does
            // not run while a chunk is absent, which all are from here on.
            unsafe { part.give_back() };
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

fn begin(reader: &Reader, chunk: &mut Chunk) -> Ticket {
    let Mapping { start, length, offset, .. } = chunk.mapping;
    // SAFETY: the session keeps the addresses mapped and outlives this chunk's owner, which waits for all reads before it goes;
    // nothing runs, gives back or reads these pages before the read was waited for.
    let ticket = unsafe { reader.read(&chunk.file, offset, start, length) };
    chunk.state = State::Reading(ticket);
    ticket
}

/// Parts of at most [`CHUNK`] bytes.
fn chunks(mapping: Mapping) -> Vec<Mapping> {
    let mut parts = Vec::new();
    let mut rest = Some(mapping);
    while let Some(mapping) = rest {
        let (first, more) = mapping.split(CHUNK);
        parts.extend(first);
        rest = more;
    }
    parts
}

/// Chunks that are there, neighbours as one.
fn runs(chunks: &[Chunk]) -> Vec<Mapping> {
    let mut runs: Vec<Mapping> = Vec::new();
    for Chunk { mapping, .. } in chunks.iter().filter(|chunk| chunk.state == State::Present) {
        match runs.last_mut() {
            Some(run) if run.start + run.length == mapping.start => run.length += mapping.length,
            _ => runs.push(mapping.clone()),
        }
    }
    runs
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
            // SAFETY: the mappings are the session's, which is alive; they still are the file's, so what is needed again comes again.
            unsafe { mapping.give_back() };
        }
    }
}

fn misfit(why: &str) -> BackendError {
    BackendError::Misfit { what: "a chunk of weights".into(), why: why.into() }
}

#[cfg(test)]
mod tests {
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
            let start = pages.address() as usize + number * BYTES;
            let mapping = Mapping { start, length: BYTES, offset: 0, path: file.path().to_owned() };
            Chunk { mapping, file: Arc::new(file), state: State::Absent }
        };
        let broken = WeightFile::pretending(Path::new("/proc/self/mem"), u64::MAX);
        let chunks = vec![chunk(WeightFile::open(&path).unwrap(), 0), chunk(broken, 1)];
        let bytes = vec![BYTES as u64; 2];
        (Weights { reader: Rc::new(reader), bytes, chunks, locked: 0, unlocked: None }, pages)
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
}
