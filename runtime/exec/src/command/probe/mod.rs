//! `hpp-exec probe`: measures what `hpp-profile` requests, in a separate process, so that a provider that crashes or hangs costs one
//! measurement only.
//!
//! The protocol is [`hpp_schema::probe`]: one JSON object per line, requests on stdin, replies on stdout. A failed request is answered
//! with the reason, and the next one is read.

mod compare;
mod host;
mod machine;
mod observe;
mod partition;
mod pass;
mod wire;

pub(super) use compare::{LogitsStore, each_row, kl};

use super::CommandContext;
use crate::cli::LibraryArgs;
use crate::console::Console;
use crate::error::ExecError;
use crate::runtime::OnnxRuntime;
use hpp_io::StdoutError;
use hpp_schema::error_line;
use hpp_schema::probe::{PROBE_VERSION, Reply, Request};
use std::sync::Arc;

/// Sends replies to hpp-profile. Fails if hpp-profile has closed its end of stdout.
pub(crate) type Replies<'a> = dyn FnMut(Reply) -> Result<(), StdoutError> + 'a;

/// What requests share: ONNX Runtime, and what each kind of request caches for the next.
pub(crate) struct ProbeSession<'a> {
    /// ONNX Runtime.
    pub runtime: OnnxRuntime,
    /// The library's arguments.
    pub library: &'a LibraryArgs,
    /// Messages for people.
    pub console: &'a Arc<Console>,
    /// For timing partitions.
    pub flushers: partition::Flushers,
    /// For observing prompts.
    pub observed: observe::LoadedModel,
    /// For comparing models.
    pub compared: compare::CachedReference,
}

/// Sends the greeting, then answers requests until stdin ends.
pub fn run(args: &LibraryArgs, ctx: &mut CommandContext<'_>) -> Result<u8, ExecError> {
    let mut wire = wire::Wire::open().map_err(StdoutError::from)?;
    let runtime = OnnxRuntime::open(args, ctx.console)?;
    let host = host::describe(&runtime.devices());
    wire.send(&Reply::Ready { version: PROBE_VERSION, host })?;
    let mut session = ProbeSession {
        runtime,
        library: args,
        console: ctx.console,
        flushers: partition::Flushers::default(),
        observed: observe::LoadedModel::default(),
        compared: compare::CachedReference::default(),
    };
    while let Some(request) = wire.receive() {
        let answered = match request {
            Ok(request) => answer(&mut session, &request, &mut |reply| wire.send(&reply)),
            Err(reason) => Err(ExecError::Usage { message: reason, hint: "one request is one line of JSON".into() }),
        };
        match answered {
            Ok(()) => wire.send(&Reply::Done)?,
            Err(error @ ExecError::Output(_)) => return Err(error),
            Err(error) => wire.send(&Reply::Failed { reason: error_line(&error) })?,
        }
    }
    Ok(0)
}

fn answer(session: &mut ProbeSession<'_>, request: &Request, replies: &mut Replies<'_>) -> Result<(), ExecError> {
    match request {
        Request::Observe(probe) => observe::run(session, probe, replies),
        Request::Moments(probe) => observe::second_moments::run(session, probe, replies),
        Request::Compare(probe) => compare::run(session, probe, replies),
        Request::Partition(probe) => partition::run(session, probe, replies),
        Request::Pass(probe) => pass::run(session, probe, replies),
        Request::Machine(probe) => machine::run(session, probe, replies),
    }
}
