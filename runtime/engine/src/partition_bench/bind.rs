//! Binds a case: fills inputs, reserves outputs, and shares the buffers of states that are updated in place.

use super::{about, fill::fill, find, run_failed};
use crate::error::{BackendError, EngineError};
use crate::port::{Backend, MemoryId, Port, Session, Tensor};
use crate::tensor::byte_len;
use hpp_schema::DType;
use hpp_schema::probe::{Case, Feed};
use std::time::Duration;

/// Bytes read back to synchronize with a device. Devices copy whole words.
const WAIT_BYTES: u64 = 16;

/// The tensors that one case has bound.
pub(super) struct Bound<B: Backend> {
    binding: <B::Session as Session>::Binding,
    /// Outputs whose shape is unknown before a run.
    unknown: Vec<usize>,
    /// The first bytes of an output on a device.
    waited_for: Option<B::Tensor>,
    /// Duration of reading `waited_for` when no run is pending.
    idle_wait: Duration,
}

impl<B: Backend> Bound<B> {
    pub fn new(backend: &B, session: &B::Session, case: &Case) -> Result<Self, EngineError> {
        check(case, session.inputs(), session.outputs())?;
        let mut binding = session.binding().map_err(|source| run_failed(&case.name, "being bound", source))?;
        let mut shared = Vec::new();
        for (index, port) in session.inputs().iter().enumerate() {
            let Some(feed) = case.inputs.iter().find(|feed| feed.name == port.name) else { continue };
            let buffer = filled(backend, feed, port.memory)?;
            let view = backend.view(&buffer, feed.dtype, &feed.shape).map_err(|source| about(&feed.name, source))?;
            session.bind_input(&mut binding, index, &view).map_err(|source| about(&feed.name, source))?;
            shared.push((port.name.as_str(), buffer, view));
        }
        let (mut unknown, mut waited_for) = (Vec::new(), None);
        for (index, port) in session.outputs().iter().enumerate() {
            let failed = |source| about(&port.name, source);
            let past = case.carried.iter().find(|carried| carried.in_place && carried.present == port.name);
            if let Some((_, _, view)) = past.and_then(|past| shared.iter().find(|(name, ..)| *name == past.past)) {
                session.bind_output(&mut binding, index, view).map_err(failed)?;
            } else if let Some(fact) = case.outputs.iter().find(|fact| fact.name == port.name) {
                let bytes = size_of(&fact.name, fact.dtype, &fact.shape)?.max(WAIT_BYTES);
                let buffer = backend.reserve(port.memory, bytes).map_err(failed)?;
                let view = backend.view(&buffer, fact.dtype, &fact.shape).map_err(failed)?;
                session.bind_output(&mut binding, index, &view).map_err(failed)?;
                if port.memory != MemoryId::HOST && waited_for.is_none() {
                    waited_for = Some(backend.view(&buffer, DType::Uint8, &[WAIT_BYTES]).map_err(failed)?);
                }
            } else {
                unknown.push(index);
            }
        }
        Ok(Bound { binding, unknown, waited_for, idle_wait: Duration::MAX })
    }

    /// One run, timed until its outputs are there.
    ///
    /// A run on a device may return before it has finished. Reading a few bytes of an output waits for it; the shortest duration of
    /// such a read alone is subtracted.
    pub fn run(
        &mut self,
        backend: &B,
        session: &mut B::Session,
        control: &B::Control,
    ) -> Result<Duration, BackendError> {
        for index in &self.unknown {
            session.bind_output_unknown(&mut self.binding, *index)?;
        }
        let started = backend.now();
        session.run(&mut self.binding, control)?;
        backend.synchronize_all(&mut |_, _| ())?;
        let returned = backend.now().saturating_sub(started);
        if !self.look(backend, session)? {
            return Ok(returned);
        }
        let seen = backend.now();
        self.look(backend, session)?;
        self.idle_wait = self.idle_wait.min(backend.now().saturating_sub(seen));
        Ok(seen.saturating_sub(started).saturating_sub(self.idle_wait).max(returned))
    }

    /// Reads a few bytes of an output on a device, if there is one.
    fn look(&mut self, backend: &B, session: &B::Session) -> Result<bool, BackendError> {
        let mut bytes = [0; WAIT_BYTES as usize];
        if let Some(waited_for) = &self.waited_for {
            return backend.read(waited_for, 0, &mut bytes).map(|()| true);
        }
        for index in &self.unknown {
            let tensor = session.take_output(&mut self.binding, *index)?;
            let length = byte_len(tensor.dtype(), tensor.shape()).unwrap_or(0).min(WAIT_BYTES);
            if tensor.memory() != MemoryId::HOST && length > 0 {
                return backend.read(&tensor, 0, &mut bytes[..length as usize]).map(|()| true);
            }
        }
        Ok(false)
    }
}

/// A buffer with an input's contents, in the memory the session wants it in.
fn filled<B: Backend>(backend: &B, feed: &Feed, memory: MemoryId) -> Result<B::Buffer, EngineError> {
    let failed = |source| about(&feed.name, source);
    let bytes = size_of(&feed.name, feed.dtype, &feed.shape)?.max(WAIT_BYTES);
    let host = backend.reserve(MemoryId::HOST, bytes).map_err(failed)?;
    fill(feed, |offset, piece| backend.write(&host, offset, piece).map_err(failed))?;
    if memory == MemoryId::HOST {
        return Ok(host);
    }
    let there = backend.reserve(memory, bytes).map_err(failed)?;
    let view = |buffer| backend.view(buffer, DType::Uint8, &[bytes]).map_err(failed);
    backend.copy(&view(&host)?, &view(&there)?).map_err(failed)?;
    Ok(there)
}

fn size_of(name: &str, dtype: DType, shape: &[u64]) -> Result<u64, EngineError> {
    crate::buffers::size_of(name, dtype, shape)
}

/// Checks a case against the session: every input is fed, and every name exists.
fn check(case: &Case, inputs: &[Port], outputs: &[Port]) -> Result<(), EngineError> {
    let mut problems = Vec::new();
    for port in inputs.iter().filter(|port| case.inputs.iter().all(|feed| feed.name != port.name)) {
        problems.push(format!("nothing is given for input {:?} ({})", port.name, port.dtype));
    }
    let named = case.inputs.iter().map(|feed| ("input", &feed.name, feed.dtype, &feed.shape, inputs));
    let made = case.outputs.iter().map(|fact| ("output", &fact.name, fact.dtype, &fact.shape, outputs));
    for (what, name, dtype, shape, ports) in named.chain(made) {
        match find(ports, name).map(|at| &ports[at]) {
            None => problems.push(format!("the file has no {what} {name:?}")),
            Some(port) if !fits(port, dtype, shape) => problems.push(format!(
                "{what} {name:?} is {} {:?} in the file and {dtype} {shape:?} in the request",
                port.dtype, port.shape
            )),
            Some(_) => {}
        }
    }
    for carried in &case.carried {
        if find(inputs, &carried.past).is_none() || find(outputs, &carried.present).is_none() {
            problems.push(format!("the file has no state from {:?} to {:?}", carried.past, carried.present));
        }
    }
    if problems.is_empty() {
        return Ok(());
    }
    Err(EngineError::Case { case: case.name.clone(), problems })
}

fn fits(port: &Port, dtype: DType, shape: &[u64]) -> bool {
    port.dtype == dtype
        && port.shape.len() == shape.len()
        && port.shape.iter().zip(shape).all(|(said, size)| said.is_none_or(|said| said == *size))
}
