//! Steps: tokens in, next-token logits out, in as many passes as the plan's chunk size needs.

use super::pass::Pass;
use super::{Runtime, Sequence};
use crate::buffers::{PassInput, about};
use crate::error::EngineError;
use crate::port::{Backend, MemoryId};
use crate::program::{PassSizes, Program};
use crate::telemetry::Transfer;
use crate::tensor::{HostTensor, Logits, floats_to_f32};
use hpp_schema::ModelKind;
use std::collections::BTreeMap;

/// The tokens of a step.
#[derive(Clone, Copy, Debug)]
pub enum StepInput<'a> {
    /// Token ids.
    Tokens(&'a [u32]),
    /// Embeddings `[tokens, hidden]`, for models that take them instead of ids.
    Embeddings {
        /// Number of tokens.
        tokens: usize,
        /// `tokens * hidden` numbers.
        data: &'a [f32],
    },
}

impl<'a> StepInput<'a> {
    /// The tokens from `start` on, `count` of `total`.
    fn part(self, start: u64, count: u64, total: u64) -> PassInput<'a> {
        let (start, count) = (start as usize, count as usize);
        match self {
            StepInput::Tokens(ids) => PassInput::Tokens(&ids[start..start + count]),
            StepInput::Embeddings { data, .. } => {
                let width = data.len() / total as usize;
                PassInput::Embeddings(&data[start * width..(start + count) * width])
            }
        }
    }
}

/// The positions whose logits a step returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// The last position's.
    Last,
    /// Those of every position in this step.
    All,
}

impl LogitRows {
    /// How many of a pass's positions.
    fn of(self, tokens: u64) -> u64 {
        if self == LogitRows::All { tokens } else { 1 }
    }
}

/// What a step takes and returns.
pub(crate) struct Step<'a> {
    pub input: StepInput<'a>,
    pub rows: LogitRows,
    /// Further model inputs, by name.
    pub extra: &'a BTreeMap<String, HostTensor>,
    pub logits: &'a mut Logits,
}

impl<B: Backend> Runtime<B> {
    /// A step without further inputs.
    pub fn step(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
    ) -> Result<Logits, EngineError> {
        let mut logits = Logits::default();
        self.step_with(program, sequence, Step { input, rows, extra: &BTreeMap::new(), logits: &mut logits })?;
        Ok(logits)
    }

    pub fn step_with(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        step: Step<'_>,
    ) -> Result<(), EngineError> {
        let tokens = accept(program, sequence, step.input)?;
        let Step { input, rows, extra, logits } = step;
        (logits.rows, logits.vocab) = (0, 0);
        logits.data.clear();
        if program.recomputes() {
            return self.recompute(program, sequence, tokens, Step { input, rows, extra, logits });
        }
        self.make_room_in_states(program, sequence, sequence.length + tokens)?;
        let chunk = program.plan.schedule.prefill_chunk.unwrap_or(tokens).clamp(1, tokens);
        let mut done = 0;
        while done < tokens {
            let count = chunk.min(tokens - done);
            let wanted = rows.of(count);
            let (is_first, is_last) = (done == 0, done + count == tokens);
            let pass = Pass {
                input: input.part(done, count, tokens),
                sizes: PassSizes { batch: 1, sequence: count, past: sequence.length, rows: wanted },
                is_first,
                is_last,
                extra,
            };
            self.pass(program, sequence, &pass)?;
            sequence.length += count;
            done += count;
            if rows == LogitRows::All || is_last {
                self.read_logits(program, wanted, count, logits)?;
            }
        }
        Ok(())
    }

    /// Makes room for `total` tokens in states that are laid out for the tokens they hold.
    fn make_room_in_states(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        total: u64,
    ) -> Result<(), EngineError> {
        let length = sequence.length;
        for (state, layout) in sequence.states.iter_mut().zip(program.layouts.iter()) {
            state.make_room(layout, &self.pool, length, total, &mut self.scratch)?;
        }
        Ok(())
    }

    /// A step of a decoder without states: computes the whole sequence again, with the new tokens at its end.
    fn recompute(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        tokens: u64,
        step: Step<'_>,
    ) -> Result<(), EngineError> {
        let Step { input, rows, extra, logits } = step;
        let mut history = std::mem::take(&mut sequence.history);
        match input {
            StepInput::Tokens(ids) => history.tokens.extend_from_slice(ids),
            StepInput::Embeddings { data, .. } => history.embeddings.extend_from_slice(data),
        }
        let total = sequence.length + tokens;
        let wanted = rows.of(tokens);
        let input = match input {
            StepInput::Tokens(_) => PassInput::Tokens(&history.tokens),
            StepInput::Embeddings { .. } => PassInput::Embeddings(&history.embeddings),
        };
        let sizes = PassSizes { batch: 1, sequence: total, past: 0, rows: wanted };
        let outcome = self.pass(program, sequence, &Pass { input, sizes, is_first: true, is_last: true, extra });
        sequence.history = history;
        outcome?;
        sequence.length = total;
        self.read_logits(program, wanted, total, logits)
    }

    /// Appends the last `wanted` rows of a pass's logits. The model may have computed only those, those of all `tokens`, or one row.
    fn read_logits(
        &mut self,
        program: &Program,
        wanted: u64,
        tokens: u64,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        let Some(id) = program.logits else {
            return Err(EngineError::WrongKind("the plan names no output with next-token scores"));
        };
        let boundary = &self.boundaries[id];
        let wrong = |why: String| EngineError::WrongOutput { name: boundary.name.clone(), why };
        let dims = boundary.dims().unwrap_or_default();
        let vocab = dims.last().copied().unwrap_or(0);
        let computed: u64 = dims.iter().rev().skip(1).product();
        if vocab == 0 || computed < wanted || (computed != wanted && computed != tokens && computed != 1) {
            return Err(wrong(format!("its shape is {dims:?}, where scores for {wanted} positions are wanted")));
        }
        if logits.rows > 0 && logits.vocab as u64 != vocab {
            return Err(wrong(format!("it had {} scores before and has {vocab} now", logits.vocab)));
        }
        let row_bytes = boundary.dtype.bytes_for(vocab).ok_or_else(|| wrong(format!("{dims:?} has no size")))?;
        self.scratch.resize((row_bytes * wanted) as usize, 0);
        let home = boundary.home();
        let start = self.pool.synchronize(home, MemoryId::HOST, &mut self.recorder).map_err(about(&boundary.name))?;
        boundary.read_into(&self.pool, row_bytes * (computed - wanted), &mut self.scratch)?;
        if home != MemoryId::HOST {
            let bytes = self.scratch.len() as u64;
            let transfer = Transfer { name: &boundary.name, from: home, to: MemoryId::HOST, bytes };
            self.recorder.copied(&transfer, self.pool.since(start));
        }
        if !floats_to_f32(boundary.dtype, &self.scratch, &mut logits.data) {
            return Err(wrong(format!("{} is no floating-point type", boundary.dtype)));
        }
        logits.rows += wanted as usize;
        logits.vocab = vocab as usize;
        Ok(())
    }
}

/// Checks a step's input against the model and the sequence; its number of tokens.
fn accept<B: Backend>(program: &Program, sequence: &Sequence<B>, input: StepInput<'_>) -> Result<u64, EngineError> {
    if program.plan.model.kind == ModelKind::SingleRun {
        return Err(EngineError::WrongKind("this model generates no tokens: run it once with its inputs instead"));
    }
    if sequence.interrupted {
        return Err(EngineError::Interrupted);
    }
    let tokens = match input {
        StepInput::Tokens(ids) => {
            check_ids(program, sequence.length, ids)?;
            ids.len() as u64
        }
        StepInput::Embeddings { tokens, data } if tokens > 0 && data.len() % tokens == 0 => tokens as u64,
        StepInput::Embeddings { tokens, data } => {
            let why = format!("{} numbers for {tokens} tokens", data.len());
            return Err(EngineError::WrongInput { name: "embeddings".into(), why });
        }
    };
    if tokens == 0 {
        return Err(EngineError::EmptyInput);
    }
    if tokens > sequence.room() {
        let (used, context) = (sequence.length, sequence.limit);
        return Err(EngineError::ContextExceeded { asked: tokens, used, context });
    }
    Ok(tokens)
}

fn check_ids(program: &Program, length: u64, ids: &[u32]) -> Result<(), EngineError> {
    let Some(vocab) = program.plan.model.vocab_size else { return Ok(()) };
    match ids.iter().position(|id| u64::from(*id) >= vocab) {
        None => Ok(()),
        Some(at) => Err(EngineError::TokenOutOfRange { token: ids[at], position: length + at as u64, vocab }),
    }
}
