//! The class `Generation`: a request that waits, runs or has ended.

use crate::failure::Failure;
use crate::job::{Answer, Event, JobHandle};
use crate::wait::receive;
use hpp_engine::Logits;
use hpp_generate::FinishReason;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// A request of an engine. Dropping it cancels it.
#[pyclass(frozen, module = "hpp._native")]
pub struct Generation {
    events: Mutex<Receiver<Event>>,
    handle: Arc<JobHandle>,
    ended: Mutex<Option<Result<Box<Answer>, Failure>>>,
}

impl Generation {
    /// A request whose events arrive through `events`.
    pub fn new(events: Receiver<Event>, handle: Arc<JobHandle>) -> Self {
        Self { events: Mutex::new(events), handle, ended: Mutex::default() }
    }

    fn has_ended(&self) -> bool {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.handle.cancel();
    }
}

#[pymethods]
impl Generation {
    /// The next piece of text; `None` once there is no more.
    fn next_text(&self, py: Python<'_>) -> PyResult<Option<String>> {
        if self.has_ended() {
            return Ok(None);
        }
        match receive(py, &self.events, || self.handle.cancel())? {
            Event::Text(text) => Ok(Some(text)),
            Event::Ended(answer) => {
                *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
                Ok(None)
            }
        }
    }

    /// Waits for the end and returns the answer as a dictionary; raises what the generation failed with.
    fn answer<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        while self.next_text(py)?.is_some() {}
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        match ended.as_ref() {
            Some(Ok(answer)) => dictionary(py, answer),
            Some(Err(failure)) => Err(failure.clone().into()),
            None => Err(Failure::engine_gone().into()),
        }
    }

    /// Ends it, within a pass if one computes for it.
    fn cancel(&self) {
        self.handle.cancel();
    }
}

fn dictionary<'py>(py: Python<'py>, answer: &Answer) -> PyResult<Bound<'py, PyDict>> {
    let Answer { generated, seed, logits } = answer;
    let finish_reason = match generated.finish_reason {
        FinishReason::Stop => "stop",
        FinishReason::Eos => "eos",
        FinishReason::Grammar => "grammar",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
    };
    let values = PyDict::new(py);
    values.set_item("text", &generated.text)?;
    values.set_item("tokens", &generated.tokens)?;
    values.set_item("finish_reason", finish_reason)?;
    values.set_item("prompt_tokens", generated.usage.prompt_tokens)?;
    values.set_item("reused_tokens", generated.usage.reused_tokens)?;
    values.set_item("seed", seed)?;
    values.set_item("prefill_ms", millis(generated.timings.prefill))?;
    values.set_item("first_token_ms", generated.timings.first_token.map(millis))?;
    values.set_item("decode_ms", millis(generated.timings.decode))?;
    values.set_item("logits", logits.as_ref().map(|logits| table(py, logits)).transpose()?)?;
    Ok(values)
}

/// The bytes of logits as float32 in this machine's order, rows and columns.
pub fn table<'py>(py: Python<'py>, logits: &Logits) -> PyResult<(Bound<'py, PyByteArray>, usize, usize)> {
    let fill = |bytes: &mut [u8]| {
        for (bytes, number) in bytes.chunks_exact_mut(size_of::<f32>()).zip(&logits.data) {
            bytes.copy_from_slice(&number.to_ne_bytes());
        }
        Ok(())
    };
    let bytes = PyByteArray::new_with(py, size_of_val(logits.data.as_slice()), fill)?;
    Ok((bytes, logits.rows, logits.vocab))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
