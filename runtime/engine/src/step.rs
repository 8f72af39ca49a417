//! Steps: tokens in, next-token scores out, in as many passes as the plan's chunk allows.

use crate::area::about;
use crate::engine::Engine;
use crate::error::EngineError;
use crate::feed::Content;
use crate::meter::{Moved, Took};
use crate::pass::Pass;
use crate::port::{Backend, MemoryId};
use crate::sequence::Sequence;
use crate::shape::Sizes;
use crate::tensor::{HostTensor, Logits, floats_to_f32};
use hpp_schema::ModelKind;
use std::collections::BTreeMap;

/// What a step takes in.
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

/// Which positions' scores a step returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// The last position's.
    Last,
    /// Every position's in this step.
    All,
}

static NOTHING: BTreeMap<String, HostTensor> = BTreeMap::new();

impl<B: Backend> Engine<B> {
    /// Takes tokens in and returns next-token scores.
    pub fn step(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
    ) -> Result<Logits, EngineError> {
        let mut logits = Logits::default();
        self.step_with(sequence, input, rows, &NOTHING, &mut logits)?;
        Ok(logits)
    }

    /// [`step`](Self::step) into scores that are reused, so that decoding allocates nothing.
    pub fn step_into(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        self.step_with(sequence, input, rows, &NOTHING, logits)
    }

    /// [`step_into`](Self::step_into) for models with further inputs, which `extra` gives by name.
    pub fn step_with(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
        extra: &BTreeMap<String, HostTensor>,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        let tokens = self.accept(sequence, input)?;
        (logits.rows, logits.vocab) = (0, 0);
        logits.data.clear();
        if self.recomputes() {
            return self.recompute(sequence, input, tokens, rows, extra, logits);
        }
        self.lay_out_states(sequence, sequence.length + tokens)?;
        let chunk = self.plan.schedule.prefill_chunk.unwrap_or(tokens).clamp(1, tokens);
        let mut done = 0;
        while done < tokens {
            let now = chunk.min(tokens - done);
            let wanted = if rows == LogitRows::All { now } else { 1 };
            let sizes = Sizes { batch: 1, sequence: now, past: sequence.length, rows: wanted };
            let content = part(input, done, now, tokens);
            let (first, last) = (done == 0, done + now == tokens);
            self.pass(sequence, &Pass { content, sizes, rows_from: now - wanted, first, last, extra })?;
            sequence.length += now;
            done += now;
            if rows == LogitRows::All || done == tokens {
                self.read_logits(wanted, now, logits)?;
            }
        }
        Ok(())
    }

    /// Makes room for `total` tokens in states that are laid out for no more than they hold.
    fn lay_out_states(&mut self, sequence: &mut Sequence<B>, total: u64) -> Result<(), EngineError> {
        let Engine { layouts, areas, scratch, .. } = self;
        let held = (sequence.length, total);
        let mut states = sequence.stores.iter_mut().zip(layouts.iter());
        states.try_for_each(|(store, layout)| store.lay_out(layout, areas, held, scratch))
    }

    /// Checks a step's input against the model and the sequence; the number of tokens it brings.
    fn accept(&self, sequence: &Sequence<B>, input: StepInput<'_>) -> Result<u64, EngineError> {
        if self.plan.model.kind == ModelKind::SingleRun {
            return Err(EngineError::WrongKind("this model generates no tokens: run it once with its inputs instead"));
        }
        if sequence.interrupted {
            return Err(EngineError::Interrupted);
        }
        let tokens = match input {
            StepInput::Tokens(ids) => {
                self.check_ids(sequence, ids)?;
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

    fn check_ids(&self, sequence: &Sequence<B>, ids: &[u32]) -> Result<(), EngineError> {
        let Some(vocab) = self.plan.model.vocab_size else { return Ok(()) };
        match ids.iter().position(|id| u64::from(*id) >= vocab) {
            None => Ok(()),
            Some(at) => {
                let position = sequence.length + at as u64;
                Err(EngineError::TokenOutOfRange { token: ids[at], position, vocab })
            }
        }
    }

    /// A decoder without cache: the whole sequence again, with the new tokens at its end.
    fn recompute(
        &mut self,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        tokens: u64,
        rows: LogitRows,
        extra: &BTreeMap<String, HostTensor>,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        let mut history = std::mem::take(&mut sequence.history);
        match input {
            StepInput::Tokens(ids) => history.tokens.extend_from_slice(ids),
            StepInput::Embeddings { data, .. } => history.embeddings.extend_from_slice(data),
        }
        let total = sequence.length + tokens;
        let wanted = if rows == LogitRows::All { tokens } else { 1 };
        let sizes = Sizes { batch: 1, sequence: total, past: 0, rows: wanted };
        let content = match input {
            StepInput::Tokens(_) => Content::Tokens(&history.tokens),
            StepInput::Embeddings { .. } => Content::Embeddings(&history.embeddings),
        };
        let outcome =
            self.pass(sequence, &Pass { content, sizes, rows_from: total - wanted, first: true, last: true, extra });
        sequence.history = history;
        outcome?;
        sequence.length = total;
        self.read_logits(wanted, total, logits)
    }

    /// Appends the last `wanted` rows of this pass's scores. The model may have computed only those, all of the pass's
    /// `tokens`, or just one.
    fn read_logits(&mut self, wanted: u64, tokens: u64, logits: &mut Logits) -> Result<(), EngineError> {
        let Some(number) = self.logits else {
            return Err(EngineError::WrongKind("the plan names no output with next-token scores"));
        };
        let boundary = &self.boundaries[number];
        let wrong = |why: String| EngineError::WrongOutput { name: boundary.name.clone(), why };
        let dims = boundary.dims.as_deref().unwrap_or_default();
        let vocab = dims.last().copied().unwrap_or(0);
        let have: u64 = dims.iter().rev().skip(1).product();
        if vocab == 0 || have < wanted || (have != wanted && have != tokens && have != 1) {
            return Err(wrong(format!("its shape is {dims:?}, where scores for {wanted} positions are wanted")));
        }
        if logits.rows > 0 && logits.vocab as u64 != vocab {
            return Err(wrong(format!("it had {} scores before and has {vocab} now", logits.vocab)));
        }
        let row = boundary.dtype.bytes_for(vocab).ok_or_else(|| wrong(format!("{dims:?} has no size")))?;
        self.scratch.resize((row * wanted) as usize, 0);
        let home = boundary.home_memory();
        let from = self.areas.now_between(home, MemoryId::HOST, &mut self.meter).map_err(about(&boundary.name))?;
        boundary.read_into(&self.areas, row * (have - wanted), &mut self.scratch)?;
        if home != MemoryId::HOST {
            let bytes = self.scratch.len() as u64;
            let moved = Moved { name: &boundary.name, from: home, to: MemoryId::HOST, bytes };
            self.meter.moved(&moved, Took { from, to: self.areas.backend.now() });
        }
        if !floats_to_f32(boundary.dtype, &self.scratch, &mut logits.data) {
            return Err(wrong(format!("{} is no floating-point type", boundary.dtype)));
        }
        logits.rows += wanted as usize;
        logits.vocab = vocab as usize;
        Ok(())
    }
}

/// `count` tokens of an input from `from` on.
fn part(input: StepInput<'_>, from: u64, count: u64, tokens: u64) -> Content<'_> {
    let (from, count) = (from as usize, count as usize);
    match input {
        StepInput::Tokens(ids) => Content::Tokens(&ids[from..from + count]),
        StepInput::Embeddings { data, .. } => {
            let width = data.len() / tokens as usize;
            Content::Embeddings(&data[from * width..(from + count) * width])
        }
    }
}
