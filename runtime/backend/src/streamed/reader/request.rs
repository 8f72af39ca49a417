//! One read: what was asked for, the memory it reads into, and what becomes of its bytes.

use super::super::file::WeightFile;
use super::super::open_files::ReadFrom;
use super::super::staging::{Staging, StagingBuffer};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Stands for one read that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Ticket(pub(super) u64);

/// Where what is read goes.
#[derive(Clone)]
pub(in super::super) enum To {
    /// To the memory at this address.
    Memory(usize),
    /// To what makes weights of it and puts them where they belong: at most [`BUFFER`](super::super::staging::BUFFER) bytes.
    Through(Arc<Expand>),
}

/// Makes weights of what is stored of them.
pub(in super::super) type Expand = dyn Fn(&[u8]) + Send + Sync;

/// What was asked for: memory that stays valid until its end is waited for (see [`Reader::read`](super::Reader::read)).
pub(super) struct Request {
    pub ticket: Ticket,
    pub file: ReadFrom,
    pub offset: u64,
    pub length: usize,
    pub to: To,
}

/// A request, its file, which is open, and the memory it reads into.
pub(super) struct Read {
    pub request: Request,
    pub file: Arc<WeightFile>,
    buffer: Option<StagingBuffer>,
}

/// Why a read does not begin.
pub(super) enum NotNow {
    /// Others have all memory that it could read into.
    Later(Request),
    /// Its file is not what it was, or there is no memory.
    Refused(Ticket, io::Error),
}

impl Read {
    /// A read that may begin. Where others have all memory to read into, it waits for some if it `may_wait`.
    pub fn new(request: Request, staging: &Staging, may_wait: bool) -> Result<Read, NotNow> {
        let ticket = request.ticket;
        let refused = |error| NotNow::Refused(ticket, error);
        let file = request.file.open().map_err(refused)?;
        match request.to {
            To::Memory(_) => Ok(Read { request, file, buffer: None }),
            To::Through(_) => match staging.take(may_wait).map_err(refused)? {
                None => Err(NotNow::Later(request)),
                buffer => Ok(Read { request, file, buffer }),
            },
        }
    }

    /// Bytes it must bring.
    pub fn expected(&self) -> usize {
        self.file.expected(self.request.offset, self.request.length)
    }

    /// Where its bytes go first.
    pub fn at(&self) -> *mut u8 {
        match (&self.request.to, &self.buffer) {
            (To::Memory(at), _) => *at as *mut u8,
            (To::Through(_), buffer) => buffer.as_ref().map_or(std::ptr::null_mut(), StagingBuffer::address),
        }
    }

    /// Makes weights of what was read and gives the memory it was read into back.
    pub fn expand(self, staging: &Staging) -> io::Result<()> {
        let expected = self.expected();
        let (Some(buffer), To::Through(expand)) = (self.buffer, &self.request.to) else { return Ok(()) };
        // SAFETY: the buffer holds as many bytes as may be read at once, all of which were read, and nobody else has it.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.address(), expected) };
        // Whoever waits for these weights would wait for ever.
        let expanded = catch_unwind(AssertUnwindSafe(|| expand(bytes)));
        staging.put(buffer);
        expanded.map_err(|_| io::Error::other("what is stored of these weights does not make any"))
    }

    /// Gives the memory it was to be read into back.
    pub fn give_up(self, staging: &Staging) {
        if let Some(buffer) = self.buffer {
            staging.put(buffer);
        }
    }
}
