//! One read: what was asked for, the memory it reads into, and what becomes of its bytes.

use super::super::file::WeightFile;
use super::super::stages::{Stage, Stages};
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
    /// To what makes weights of it and puts them where they belong: at most [`STAGE`](super::super::stages::STAGE) bytes.
    Through(Arc<Expand>),
}

/// Makes weights of what is stored of them.
pub(in super::super) type Expand = dyn Fn(&[u8]) + Send + Sync;

/// What was asked for: memory that stays valid until its end is waited for (see [`Reader::read`](super::Reader::read)).
pub(super) struct Request {
    pub ticket: Ticket,
    pub file: Arc<WeightFile>,
    pub offset: u64,
    pub length: usize,
    pub to: To,
}

impl Request {
    /// Bytes it must bring.
    pub fn expected(&self) -> usize {
        self.file.expected(self.offset, self.length)
    }
}

/// A request and the memory it reads into.
pub(super) struct Read {
    pub request: Request,
    stage: Option<Stage>,
}

impl Read {
    /// A read that may begin, where its file is what it was; else why it may not. Waits for memory to read into where others have it.
    pub fn new(request: Request, stages: &Stages) -> Result<Read, (Ticket, io::Error)> {
        let ticket = request.ticket;
        let failed = |error| (ticket, error);
        request.file.check().map_err(failed)?;
        let stage = match request.to {
            To::Memory(_) => None,
            To::Through(_) => Some(stages.take().map_err(failed)?),
        };
        Ok(Read { request, stage })
    }

    /// Where its bytes go first.
    pub fn at(&self) -> *mut u8 {
        match (&self.request.to, &self.stage) {
            (To::Memory(at), _) => *at as *mut u8,
            (To::Through(_), stage) => stage.as_ref().map_or(std::ptr::null_mut(), Stage::address),
        }
    }

    /// Makes weights of what was read and gives the memory it was read into back.
    pub fn expand(self, stages: &Stages) -> io::Result<()> {
        let (Some(stage), To::Through(expand)) = (self.stage, &self.request.to) else { return Ok(()) };
        // SAFETY: the stage holds as many bytes as may be read at once, all of which were read, and nobody else has it.
        let bytes = unsafe { std::slice::from_raw_parts(stage.address(), self.request.expected()) };
        // Whoever waits for these weights would wait for ever.
        let expanded = catch_unwind(AssertUnwindSafe(|| expand(bytes)));
        stages.put(stage);
        expanded.map_err(|_| io::Error::other("what is stored of these weights does not make any"))
    }

    /// Gives the memory it was to be read into back.
    pub fn give_up(self, stages: &Stages) {
        if let Some(stage) = self.stage {
            stages.put(stage);
        }
    }
}
