//! One read: the request, the memory it reads into, and where its bytes go.

use super::super::compressed::Damaged;
use super::super::open_files::ReadFrom;
use super::staging::{StagingBuffer, StagingPool};
use crate::weights::file::WeightFile;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// Identifies a requested read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(in super::super) struct Ticket(pub(super) u64);

/// Where the bytes of a read go.
#[derive(Clone)]
pub(in super::super) enum ReadTarget {
    /// Directly to this address.
    Memory(usize),
    /// To a staging buffer of [`BUFFER`](super::BUFFER) bytes, from which the function decompresses or copies the weights.
    Through(Arc<Decompress>),
}

/// Writes weights to memory from their stored bytes; an error if these are damaged.
pub(in super::super) type Decompress = dyn Fn(&[u8]) -> Result<(), Damaged> + Send + Sync;

/// A requested read. Its destination stays valid until it has been waited for (see [`Reader::read`](super::Reader::read)).
pub(super) struct ReadRequest {
    pub ticket: Ticket,
    pub file: ReadFrom,
    pub offset: u64,
    pub length: usize,
    pub to: ReadTarget,
}

/// A read that can start: the request, its open file, and its staging buffer if it needs one.
pub(super) struct Read {
    pub request: ReadRequest,
    pub file: Arc<WeightFile>,
    buffer: Option<StagingBuffer>,
}

/// Why a read cannot start.
pub(super) enum NotNow {
    /// All staging buffers are in use.
    Later(ReadRequest),
    /// Its file has changed, or memory has run out.
    Refused(Ticket, io::Error),
}

impl Read {
    /// A read that can start. If all staging buffers are in use, waits for one if it `may_wait`.
    pub fn new(request: ReadRequest, staging: &StagingPool, may_wait: bool) -> Result<Read, NotNow> {
        let ticket = request.ticket;
        let refused = |error| NotNow::Refused(ticket, error);
        let file = request.file.open().map_err(refused)?;
        match request.to {
            ReadTarget::Memory(_) => Ok(Read { request, file, buffer: None }),
            ReadTarget::Through(_) => match staging.acquire(may_wait).map_err(refused)? {
                None => Err(NotNow::Later(request)),
                buffer => Ok(Read { request, file, buffer }),
            },
        }
    }

    /// Bytes it must return.
    pub fn expected(&self) -> usize {
        self.file.expected(self.request.offset, self.request.length)
    }

    /// The address it reads into.
    pub fn at(&self) -> *mut u8 {
        match (&self.request.to, &self.buffer) {
            (ReadTarget::Memory(at), _) => *at as *mut u8,
            (ReadTarget::Through(_), buffer) => buffer.as_ref().map_or(std::ptr::null_mut(), StagingBuffer::address),
        }
    }

    /// Decompresses or copies the bytes in the staging buffer to their destination, and returns the buffer to its pool.
    pub fn decompress(self, staging: &StagingPool) -> io::Result<()> {
        let expected = self.expected();
        let (Some(buffer), ReadTarget::Through(decompress)) = (self.buffer, &self.request.to) else { return Ok(()) };
        // SAFETY: the buffer has room for the largest read, all expected bytes were read, and only this read has it.
        let bytes = unsafe { std::slice::from_raw_parts(buffer.address(), expected) };
        // A panic would end the thread before it posts this read, and the waiter would wait for ever.
        let decompressed = catch_unwind(AssertUnwindSafe(|| decompress(bytes)));
        staging.release(buffer);
        Ok(decompressed.unwrap_or(Err(Damaged))?)
    }

    /// Returns the staging buffer unused.
    pub fn cancel(self, staging: &StagingPool) {
        if let Some(buffer) = self.buffer {
            staging.release(buffer);
        }
    }
}
