//! A thread that reads files into memory, several reads at once: through io_uring where the system has it, else through a few
//! threads that each read.

use super::file::{SECTOR, WeightFile};
use io_uring::{IoUring, opcode, types};
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Reads under way at once.
const DEPTH: usize = 8;
/// Threads that read where there is no io_uring.
const THREADS: usize = 4;

/// One read that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Ticket(u64);

/// Reads files in the background, in the order they are asked for.
pub(crate) struct Reader {
    requests: Option<Sender<Request>>,
    board: Arc<Board>,
    threads: Vec<JoinHandle<()>>,
    next: std::cell::Cell<u64>,
    #[cfg_attr(not(test), expect(dead_code, reason = "tests look at it"))]
    kind: &'static str,
}

/// A read: into memory that stays valid until its end is waited for (see [`Reader::read`]).
struct Request {
    ticket: Ticket,
    file: Arc<WeightFile>,
    offset: u64,
    at: usize,
    length: usize,
}

/// How a read ended, when it began and when it ended.
type Done = (io::Result<()>, Instant, Instant);

/// What became of reads.
#[derive(Default)]
struct Board {
    done: Mutex<HashMap<Ticket, Done>>,
    rang: Condvar,
}

impl Board {
    fn post(&self, ticket: Ticket, result: io::Result<()>, from: Instant) {
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        done.insert(ticket, (result, from, Instant::now()));
        self.rang.notify_all();
    }
}

impl Reader {
    /// Starts its thread. Where there is no io_uring (an old kernel, a container that forbids it), several threads read.
    pub fn start() -> io::Result<Self> {
        match IoUring::new(DEPTH as u32) {
            Ok(ring) => Self::with("io_uring", vec![ring], through_ring),
            Err(_) => Self::with_threads(),
        }
    }

    fn with_threads() -> io::Result<Self> {
        Self::with("threads", vec![(); THREADS], |(), requests, board| through_calls(requests, board))
    }

    fn with<T: Send + 'static>(
        kind: &'static str,
        workers: Vec<T>,
        work: fn(T, &Mutex<Receiver<Request>>, &Board),
    ) -> io::Result<Self> {
        let (sender, receiver) = channel();
        let (board, receiver) = (Arc::new(Board::default()), Arc::new(Mutex::new(receiver)));
        let start = |worker: T| {
            let (board, receiver) = (Arc::clone(&board), Arc::clone(&receiver));
            std::thread::Builder::new().name("hpp-reader".into()).spawn(move || work(worker, &receiver, &board))
        };
        let threads = workers.into_iter().map(start).collect::<io::Result<_>>()?;
        Ok(Reader { requests: Some(sender), board, threads, next: Default::default(), kind })
    }

    /// How it reads: `io_uring` or `threads`.
    #[cfg(test)]
    fn kind(&self) -> &'static str {
        self.kind
    }

    /// Begins to read `length` bytes at `offset` of a file to address `at`; fewer at the end of the file.
    ///
    /// # Safety
    /// Nothing may use or unmap the memory until [`wait`](Self::wait) has returned for this ticket.
    pub(super) unsafe fn read(&self, file: &Arc<WeightFile>, offset: u64, at: usize, length: usize) -> Ticket {
        let ticket = Ticket(self.next.replace(self.next.get() + 1));
        let request = Request { ticket, file: Arc::clone(file), offset, at, length };
        let sent = self.requests.as_ref().map(|requests| requests.send(request));
        if !matches!(sent, Some(Ok(()))) {
            self.board.post(ticket, Err(io::Error::other("the thread that reads weights has ended")), Instant::now());
        }
        ticket
    }

    /// Waits for a read; how long ago it began and ended.
    pub(super) fn wait(&self, ticket: Ticket) -> io::Result<(Duration, Duration)> {
        let mut done = self.board.done.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some((result, from, to)) = done.remove(&ticket) {
                return result.map(|()| (from.elapsed(), to.elapsed()));
            }
            done = self.board.rang.wait(done).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.requests = None;
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// A read that the ring has.
struct InFlight {
    request: Request,
    /// Bytes that have come.
    done: usize,
    from: Instant,
}

/// Takes requests and keeps the ring full until nobody can ask any more.
fn through_ring(mut ring: IoUring, requests: &Mutex<Receiver<Request>>, board: &Board) {
    let requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
    let mut flying: HashMap<u64, InFlight> = HashMap::new();
    let mut waiting: VecDeque<InFlight> = VecDeque::new();
    let mut last = Instant::now();
    loop {
        while flying.len() + waiting.len() < DEPTH {
            let next = match flying.is_empty() && waiting.is_empty() {
                true => requests.recv().map_err(|_| TryRecvError::Disconnected),
                false => requests.try_recv(),
            };
            match next {
                Ok(request) => waiting.push_back(InFlight { request, done: 0, from: Instant::now() }),
                Err(TryRecvError::Empty) => break,
                Err(TryRecvError::Disconnected) if flying.is_empty() && waiting.is_empty() => return,
                Err(TryRecvError::Disconnected) => break,
            }
        }
        while let Some(mut read) = waiting.pop_front() {
            if let Err(error) = read.request.file.check() {
                board.post(read.request.ticket, Err(error), read.from);
                continue;
            }
            read.from = if flying.is_empty() { Instant::now() } else { read.from };
            push(&mut ring, &read);
            flying.insert(read.request.ticket.0, read);
        }
        if flying.is_empty() {
            continue;
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if is_passing(&error) => continue,
            // Nothing may be told to be over while the system may still write to its memory, and nobody can say any more
            // whether it does. Only a mistake in this file leads here.
            Err(_) => std::process::abort(),
        }
        while let Some(entry) = ring.completion().next() {
            let Some(mut read) = flying.remove(&entry.user_data()) else { continue };
            let expected = read.request.file.expected(read.request.offset, read.request.length);
            let result = match usize::try_from(entry.result()) {
                Err(_) => Err(io::Error::from_raw_os_error(-entry.result())),
                Ok(bytes) if read.done + bytes >= expected => Ok(()),
                Ok(0) => Err(ends_early()),
                Ok(bytes) => {
                    // Direct reads go on at a sector.
                    let done = (read.done + bytes) / SECTOR as usize * SECTOR as usize;
                    if done > read.done {
                        read.done = done;
                        waiting.push_back(read);
                        continue;
                    }
                    Err(ends_early())
                }
            };
            read.request.file.forget(read.request.offset, read.request.length);
            board.post(read.request.ticket, result, read.from.max(last));
            last = Instant::now();
        }
    }
}

/// Whether the same call may work the next time.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY))
}

fn push(ring: &mut IoUring, read: &InFlight) {
    let InFlight { request, done, .. } = read;
    let (at, length) = ((request.at + done) as *mut u8, (request.length - done) as u32);
    let entry = opcode::Read::new(types::Fd(request.file.descriptor()), at, length)
        .offset(request.offset + *done as u64)
        .build()
        .user_data(request.ticket.0);
    // SAFETY: the descriptor is open as long as the request, which is kept until the read is over; so is the memory, by the
    // promise of `Reader::read`. There is room: no more reads fly than the ring has entries.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.expect("the ring has an entry for each read that may fly");
}

/// Takes requests one after the other and reads them.
fn through_calls(requests: &Mutex<Receiver<Request>>, board: &Board) {
    loop {
        let next = requests.lock().unwrap_or_else(PoisonError::into_inner).recv();
        let Ok(request) = next else { return };
        let from = Instant::now();
        let result = request.file.check().and_then(|()| read_whole(&request));
        request.file.forget(request.offset, request.length);
        board.post(request.ticket, result, from);
    }
}

fn read_whole(request: &Request) -> io::Result<()> {
    // SAFETY: by the promise of `Reader::read` nothing else uses this memory until the read was waited for.
    let bytes = unsafe { std::slice::from_raw_parts_mut(request.at as *mut u8, request.length) };
    let expected = request.file.expected(request.offset, request.length);
    let mut done = 0;
    while done < expected {
        match request.file.read_at(&mut bytes[done..], request.offset + done as u64) {
            Ok(0) => return Err(ends_early()),
            Ok(more) => done += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn ends_early() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the file ends too early")
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
    use std::path::Path;

    /// Reads a file of odd length in pieces, out of order, and compares.
    fn reads(reader: &Reader) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        let contents: Vec<u8> = (0..1_000_003_u32).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &contents).unwrap();
        let file = Arc::new(WeightFile::open(&path).unwrap());
        let pages = Pages::reserve(contents.len().next_multiple_of(SECTOR as usize)).unwrap();
        let piece = 5 * SECTOR as usize;
        let starts: Vec<usize> = (0..pages.len()).step_by(piece).collect();
        let tickets: Vec<Ticket> = starts
            .iter()
            .map(|start| {
                let length = piece.min(pages.len() - start);
                // SAFETY: `pages` outlives the waits below, and nothing looks at it before them.
                unsafe { reader.read(&file, *start as u64, pages.address() as usize + start, length) }
            })
            .collect();
        for ticket in tickets.into_iter().rev() {
            let (began, ended) = reader.wait(ticket).unwrap();
            assert!(began >= ended);
        }
        // SAFETY: the pages live, all of them were written, and no read is under way.
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
    fn a_file_that_was_cut_short_is_an_error() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            std::fs::write(&path, vec![1; 3 * SECTOR as usize]).unwrap();
            let file = Arc::new(WeightFile::open(&path).unwrap());
            std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(SECTOR).unwrap();
            let pages = Pages::reserve(SECTOR as usize).unwrap();
            // SAFETY: `pages` outlives the wait.
            let ticket = unsafe { reader.read(&file, 2 * SECTOR, pages.address() as usize, SECTOR as usize) };
            let error = reader.wait(ticket).unwrap_err().to_string();
            assert!(error.contains("was changed while it was in use"), "{error}");
        }
    }

    /// Reads some sectors of a file.
    fn read(reader: &Reader, file: WeightFile, offset: u64, sectors: usize) -> io::Result<(Duration, Duration)> {
        let pages = Pages::reserve(sectors * SECTOR as usize).unwrap();
        // SAFETY: `pages` outlives the wait.
        let ticket = unsafe { reader.read(&Arc::new(file), offset, pages.address() as usize, pages.len()) };
        reader.wait(ticket)
    }

    #[test]
    fn a_disk_that_fails_is_an_error_and_the_next_read_is_none() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            std::fs::write(&path, vec![1; 2 * SECTOR as usize]).unwrap();
            let broken = WeightFile::pretending(Path::new("/proc/self/mem"), u64::MAX);
            let error = read(&reader, broken, 0, 1).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO), "{error}");
            read(&reader, WeightFile::open(&path).unwrap(), SECTOR, 1).unwrap();
        }
    }

    #[test]
    fn a_read_that_brings_too_little_is_an_error() {
        for reader in Reader::each() {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("weights");
            // At a sector, and in the middle of one.
            for bytes in [0, SECTOR, 2 * SECTOR + 1808] {
                std::fs::write(&path, vec![1; bytes as usize]).unwrap();
                let error = read(&reader, WeightFile::pretending(&path, 3 * SECTOR), 0, 3).unwrap_err();
                assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{bytes} bytes: {error}");
            }
        }
    }

    #[test]
    fn a_read_that_takes_long_does_not_hold_up_others() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("weights");
        std::fs::write(&path, vec![1; SECTOR as usize]).unwrap();
        // A pipe brings nothing until somebody writes to it. Calls at an offset know no pipes, so this is for the ring alone.
        let (from, mut to) = io::pipe().unwrap();
        let pipe = std::os::fd::AsRawFd::as_raw_fd(&from);
        let slow = Arc::new(WeightFile::pretending(Path::new(&format!("/proc/self/fd/{pipe}")), SECTOR));
        let reader = Reader::start().unwrap();
        if reader.kind() != "io_uring" {
            return;
        }
        let pages = Pages::reserve(SECTOR as usize).unwrap();
        // SAFETY: `pages` outlives the wait.
        let ticket = unsafe { reader.read(&slow, 0, pages.address() as usize, pages.len()) };
        read(&reader, WeightFile::open(&path).unwrap(), 0, 1).unwrap();
        std::thread::sleep(Duration::from_millis(50));
        io::Write::write_all(&mut to, &[7; SECTOR as usize]).unwrap();
        let (began, ended) = reader.wait(ticket).unwrap();
        assert!(began - ended >= Duration::from_millis(50), "{began:?} {ended:?}");
    }
}
