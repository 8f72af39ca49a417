//! Reads files in the background, several at once: through io_uring where the system has it ([`ring`]), else through a few threads with
//! blocking calls ([`calls`]). Other threads decompress, so that reads continue meanwhile.

mod calls;
mod request;
mod ring;
mod shared;
mod staging;

pub(super) use request::{ReadTarget, Ticket};
pub(super) use staging::BUFFER;

use super::open_files::ReadFrom;
use calls::through_calls;
use hpp_schema::compression::decompressing_threads;
use request::ReadRequest;
use ring::{Wake, WakeableRing, through_ring};
use shared::{Shared, ToDecompress};
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

/// Reads in flight at once.
pub(super) const DEPTH: usize = 8;
/// Threads that read without io_uring.
const THREADS: usize = 4;

/// Reads files in the background, in the order of requests.
pub(crate) struct Reader {
    requests: Option<Sender<ReadRequest>>,
    /// Wakes the thread of a reader with io_uring.
    wake: Option<Arc<Wake>>,
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    next: std::cell::Cell<u64>,
    #[cfg_attr(not(test), expect(dead_code, reason = "tests look at it"))]
    kind: &'static str,
}

impl Reader {
    /// Starts its threads. Without io_uring (an old kernel, a container that forbids it) several threads read.
    pub fn start() -> io::Result<Self> {
        let Ok(ring) = WakeableRing::new() else { return Self::with_threads() };
        let wake = Arc::clone(&ring.wake);
        let mut reader = Self::with("io_uring", vec![ring], through_ring)?;
        reader.wake = Some(wake);
        Ok(reader)
    }

    fn with_threads() -> io::Result<Self> {
        Self::with("threads", vec![(); THREADS], |(), requests, shared, decompressor| {
            through_calls(requests, shared, decompressor)
        })
    }

    fn with<T: Send + 'static>(
        kind: &'static str,
        workers: Vec<T>,
        work: fn(T, &Mutex<Receiver<ReadRequest>>, &Shared, &Sender<ToDecompress>),
    ) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let (shared, receiver) = (Arc::<Shared>::default(), Arc::new(Mutex::new(receiver)));
        let (decompressor, reads) = channel();
        let (reads, mut threads) = (Arc::new(Mutex::new(reads)), Vec::new());
        for _ in 0..decompressing_threads(crate::os::cores()) {
            let (shared, reads) = (Arc::clone(&shared), Arc::clone(&reads));
            threads.push(Builder::new().name("hpp-decompressor".into()).spawn(move || shared.decompress(&reads))?);
        }
        for worker in workers {
            let (shared, receiver, decompressor) = (Arc::clone(&shared), Arc::clone(&receiver), decompressor.clone());
            let works = move || work(worker, &receiver, &shared, &decompressor);
            threads.push(Builder::new().name("hpp-reader".into()).spawn(works)?);
        }
        Ok(Reader { requests: Some(sender), wake: None, shared, threads, next: Default::default(), kind })
    }

    /// Allocates the staging buffers now, so that they are part of the resident set that the memory budget starts from.
    pub(super) fn prepare(&self) -> io::Result<()> {
        self.shared.staging.allocate()
    }

    /// `io_uring` or `threads`.
    #[cfg(test)]
    fn kind(&self) -> &'static str {
        self.kind
    }

    /// Starts to read `length` bytes at `offset` of a file; fewer at the end of the file.
    ///
    /// # Safety
    /// Nothing may use or unmap the destination until [`wait`](Self::wait) has returned for this ticket.
    pub(super) unsafe fn read(&self, file: &ReadFrom, offset: u64, length: usize, to: ReadTarget) -> Ticket {
        let ticket = Ticket(self.next.replace(self.next.get() + 1));
        let request = ReadRequest { ticket, file: file.clone(), offset, length, to };
        let sent = self.requests.as_ref().map(|requests| requests.send(request));
        if !matches!(sent, Some(Ok(()))) {
            self.shared.refuse(ticket, io::Error::other("the thread that reads weights has ended"));
        }
        if let Some(wake) = &self.wake {
            wake.notify();
        }
        ticket
    }

    /// Waits for a read and its decompression. Returns how long ago the disk started and finished the read.
    pub(super) fn wait(&self, ticket: Ticket) -> io::Result<(Duration, Duration)> {
        self.shared.wait(ticket)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.requests = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[cfg(test)]
impl Reader {
    /// One of each kind.
    pub(super) fn each() -> [Self; 2] {
        [Self::start().unwrap(), Self::with_threads().unwrap()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::Pages;
    use crate::weights::file::{SECTOR, WeightFile};
    use std::path::Path;

    /// Reads a file of odd length in pieces, out of order, and compares.
    fn reads(reader: &Reader) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let contents: Vec<u8> = (0..1_000_003_u32).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let file = ReadFrom::Open(Arc::new(WeightFile::open(&path).unwrap()));
        let pages = Pages::reserve(contents.len().next_multiple_of(SECTOR as usize)).unwrap();
        let piece = 5 * SECTOR as usize;
        let starts: Vec<usize> = (0..pages.len()).step_by(piece).collect();
        let tickets: Vec<Ticket> = starts
            .iter()
            .map(|start| {
                let length = piece.min(pages.len() - start);
                // SAFETY: `pages` outlives the waits below, and nothing reads it before them.
                unsafe {
                    reader.read(&file, *start as u64, length, ReadTarget::Memory(pages.address() as usize + start))
                }
            })
            .collect();
        for ticket in tickets.into_iter().rev() {
            let (began, ended) = reader.wait(ticket).unwrap();
            assert!(began >= ended);
        }
        // SAFETY: the pages live, all of them were written, and no read is in progress.
        let read = unsafe { std::slice::from_raw_parts(pages.address(), contents.len()) };
        assert!(read == contents);
    }

    #[test]
    fn the_ring_reads_everything() {
        let reader = Reader::start().unwrap();
        eprintln!("through {}", reader.kind());
        reads(&reader);
    }

    #[test]
    fn threads_read_everything() {
        let reader = Reader::with_threads().unwrap();
        assert_eq!(reader.kind(), "threads");
        reads(&reader);
    }

    #[test]
    fn a_truncated_file_is_an_error() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            std::fs::write(&path, vec![1; 3 * SECTOR as usize]).unwrap();
            let file = ReadFrom::Open(Arc::new(WeightFile::open(&path).unwrap()));
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(SECTOR).unwrap();
            let pages = Pages::reserve(SECTOR as usize).unwrap();
            // SAFETY: `pages` outlives the wait.
            let ticket = unsafe {
                reader.read(&file, 2 * SECTOR, SECTOR as usize, ReadTarget::Memory(pages.address() as usize))
            };
            let error = reader.wait(ticket).unwrap_err().to_string();
            assert!(error.contains("was changed while it was in use"), "{error}");
        }
    }

    /// Reads some sectors of a file.
    fn read(reader: &Reader, file: WeightFile, offset: u64, sectors: usize) -> io::Result<(Duration, Duration)> {
        let pages = Pages::reserve(sectors * SECTOR as usize).unwrap();
        // SAFETY: `pages` outlives the wait.
        let ticket = unsafe {
            reader.read(
                &ReadFrom::Open(Arc::new(file)),
                offset,
                pages.len(),
                ReadTarget::Memory(pages.address() as usize),
            )
        };
        reader.wait(ticket)
    }

    #[test]
    fn a_failed_read_is_an_error_and_the_next_read_succeeds() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            std::fs::write(&path, vec![1; 2 * SECTOR as usize]).unwrap();
            let broken = WeightFile::with_length(Path::new("/proc/self/mem"), u64::MAX);
            let error = read(&reader, broken, 0, 1).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
            read(&reader, WeightFile::open(&path).unwrap(), SECTOR, 1).unwrap();
        }
    }

    #[test]
    fn a_short_read_is_an_error() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            // At a sector, and in the middle of one.
            for bytes in [0, SECTOR, 2 * SECTOR + 1808] {
                std::fs::write(&path, vec![1; bytes as usize]).unwrap();
                let error = read(&reader, WeightFile::with_length(&path, 3 * SECTOR), 0, 3).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{bytes} bytes: {error}");
            }
        }
    }

    #[test]
    fn a_slow_read_does_not_delay_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![1; SECTOR as usize]).unwrap();
        // A pipe returns nothing until something is written to it. Reads at an offset refuse pipes, so only the ring is tested.
        let (from, mut to) = io::pipe().unwrap();
        let pipe = std::os::fd::AsRawFd::as_raw_fd(&from);
        let slow = WeightFile::with_length(Path::new(&format!("/proc/self/fd/{pipe}")), SECTOR);
        let slow = ReadFrom::Open(Arc::new(slow));
        let reader = Reader::start().unwrap();
        if reader.kind() != "io_uring" {
            return;
        }
        let pages = Pages::reserve(SECTOR as usize).unwrap();
        // SAFETY: `pages` outlives the wait.
        let ticket = unsafe { reader.read(&slow, 0, pages.len(), ReadTarget::Memory(pages.address() as usize)) };
        // Let the reader wait for the slow read before it gets the next request.
        std::thread::sleep(Duration::from_millis(50));
        read(&reader, WeightFile::open(&path).unwrap(), 0, 1).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        io::Write::write_all(&mut to, &[7; SECTOR as usize]).unwrap();
        let (began, ended) = reader.wait(ticket).unwrap();
        assert!(began - ended >= Duration::from_millis(50), "{began:?} {ended:?}");
    }
}
