//! `hpp-exec probe`: measures what `hpp-profile` asks for, in a process of its own, so that a provider that crashes or hangs takes
//! one measurement with it and nothing else.
//!
//! It speaks [`hpp_schema::probe`]: one JSON object a line, requests on stdin, replies on stdout. A request that fails is
//! answered with the reason, and the next one is read.

mod compare;
mod host;
mod machine;
mod observe;
mod partition;
mod pass;
mod product;
mod wire;

use super::Around;
use crate::cli::LibraryArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::machine::Machine;
use hpp_io::StdoutError;
use hpp_schema::error_line;
use hpp_schema::probe::{PROBE_VERSION, Reply, Request};
pub use machine::MeasureError;
pub(crate) use machine::{bare_copy, bare_reads};
use std::sync::Arc;

/// Sends one reply to whoever asked; an error if the reader has closed the pipe.
pub(crate) type Answer<'a> = dyn FnMut(Reply) -> Result<(), StdoutError> + 'a;

/// What requests share: ONNX Runtime, and what each kind of request keeps for the next.
pub(crate) struct ProbeSession<'a> {
    /// ONNX Runtime, found and started.
    pub machine: Machine,
    /// How the library is used.
    pub library: &'a LibraryArgs,
    /// Where people read.
    pub console: &'a Arc<Console>,
    /// What timing partitions keeps.
    pub evictors: partition::Evictors,
    /// What observing keeps.
    pub observe: observe::Kept,
    /// What comparing keeps.
    pub compare: compare::Kept,
}

/// Says who speaks, then answers requests until there are no more.
pub fn run(args: &LibraryArgs, around: &mut Around<'_>) -> Result<u8, ExecError> {
    let mut wire = wire::Wire::open().map_err(StdoutError::from)?;
    let machine = Machine::open(args, around.console)?;
    let host = host::host(&machine.devices());
    wire.send(&Reply::Ready { version: PROBE_VERSION, host })?;
    let mut session = ProbeSession {
        machine,
        library: args,
        console: around.console,
        evictors: partition::Evictors::default(),
        observe: observe::Kept::default(),
        compare: compare::Kept::default(),
    };
    while let Some(request) = wire.receive() {
        let answered = match request {
            Ok(request) => answer(&mut session, &request, &mut |reply| wire.send(&reply)),
            Err(reason) => Err(ExecError::Usage { message: reason, hint: "one request is one line of JSON".into() }),
        };
        match answered {
            Ok(()) => wire.send(&Reply::Done)?,
            Err(gone @ ExecError::Output(_)) => return Err(gone),
            Err(error) => wire.send(&Reply::Failed { reason: error_line(&error) })?,
        }
    }
    Ok(0)
}

fn answer(session: &mut ProbeSession<'_>, request: &Request, reply: &mut Answer<'_>) -> Result<(), ExecError> {
    match request {
        Request::Observe(probe) => observe::run(session, probe, reply),
        Request::Compare(probe) => compare::run(session, probe, reply),
        Request::Partition(probe) => partition::run(session, probe, reply),
        Request::Pass(probe) => pass::run(session, probe, reply),
        Request::Machine(probe) => machine::run(session, probe, reply),
    }
}
