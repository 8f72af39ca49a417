//! Steps: tokens in, next-token logits out. A step of one sequence takes as many passes as the plan's chunk size needs; a pass may take
//! items of several sequences.

use super::pass::PassItem;
use super::{Runtime, Sequence};
use crate::buffers::{PassInput, about};
use crate::error::EngineError;
use crate::port::{Backend, MemoryId};
use crate::program::{PassSizes, Program};
use crate::telemetry::{Phase, TensorCopy};
use crate::tensor::{HostTensor, Logits, floats_to_f32};
use hpp_schema::{ModelKind, chunk_length};
use std::collections::BTreeMap;
use std::ops::Range;

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

impl<B: Backend> WorkItem<'_, B> {
    /// Its token, if it has exactly one.
    pub(super) fn only_token(&self) -> Option<u32> {
        match self.input {
            StepInput::Tokens([token]) => Some(*token),
            _ => None,
        }
    }

    pub(super) fn in_pass(&mut self, program: &Program) -> PassItem<'_, B> {
        let (tokens, past) = (self.input.len(), self.sequence.length);
        let sizes = PassSizes { batch: 1, sequence: tokens, past, rows: self.rows.of(tokens) };
        PassItem {
            input: self.input.part(0, tokens, tokens),
            sizes,
            new_tokens: tokens,
            phase: program.phase(&sizes, true),
            sequence: self.sequence,
            is_first: true,
            is_last: true,
            extra: self.extra,
            error: None,
        }
    }
}

/// Where a pass left the logits of an item.
#[derive(Clone, Copy)]
pub(super) struct PassLogits {
    pub lane: usize,
    /// Rows to read.
    pub wanted: u64,
    /// Tokens in the pass.
    pub tokens: u64,
    /// The first row to read, for an item that is part of a batch; else the last rows are read.
    pub row: Option<u64>,
}

impl<'a> StepInput<'a> {
    fn len(self) -> u64 {
        match self {
            StepInput::Tokens(ids) => ids.len() as u64,
            StepInput::Embeddings { tokens, .. } => tokens as u64,
        }
    }

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

/// The positions whose logits a step returns. The head computes no others where the model allows that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// The last position's.
    Last,
    /// Those of the last positions, at most this many.
    LastN(u64),
    /// Those of every position in this step.
    All,
}

impl LogitRows {
    /// How many positions of a step of `tokens` tokens.
    fn of(self, tokens: u64) -> u64 {
        match self {
            LogitRows::Last => 1,
            LogitRows::LastN(rows) => rows.clamp(1, tokens.max(1)),
            LogitRows::All => tokens,
        }
    }

    /// How many positions of the pass with the tokens `pass` of a step of `tokens` tokens.
    fn of_pass(self, pass: Range<u64>, tokens: u64) -> u64 {
        pass.end.saturating_sub(pass.start.max(tokens - self.of(tokens)))
    }
}

/// What a step takes and returns.
pub(crate) struct StepRequest<'a> {
    pub input: StepInput<'a>,
    pub rows: LogitRows,
    /// Further model inputs, by name.
    pub extra: &'a BTreeMap<String, HostTensor>,
    pub logits: &'a mut Logits,
}

/// What one sequence contributes to a pass of several: its next tokens, and where their logits go.
pub struct WorkItem<'a, B: Backend> {
    /// The sequence, which is in no other item of the pass.
    pub sequence: &'a mut Sequence<B>,
    /// Its next tokens: one, a draft to verify, or a chunk of a prompt of at most [`Engine::chunk`](crate::Engine::chunk) tokens.
    pub input: StepInput<'a>,
    /// The positions whose logits are computed.
    pub rows: LogitRows,
    /// Further model inputs, by name.
    pub extra: &'a BTreeMap<String, HostTensor>,
    /// The logits `[rows, vocab]`.
    pub logits: &'a mut Logits,
}

impl<B: Backend> Runtime<B> {
    /// Runs a pass for each item of a model without states; each computes the item's whole sequence again.
    pub fn recompute_items(
        &mut self,
        program: &Program,
        items: &mut [WorkItem<'_, B>],
    ) -> Result<Vec<Result<(), EngineError>>, EngineError> {
        let mut outcomes = Vec::with_capacity(items.len());
        for WorkItem { sequence, input, rows, extra, logits } in items.iter_mut() {
            match self.step_with(program, sequence, StepRequest { input: *input, rows: *rows, extra, logits }) {
                Err(error) if error.concerns_all() => return Err(error),
                outcome => outcomes.push(outcome),
            }
        }
        Ok(outcomes)
    }

    /// Checks items and makes room for their tokens. Returns for each item why it cannot take part in the pass; `None` if it can.
    pub(super) fn prepare_all(&mut self, program: &Program, items: &mut [WorkItem<'_, B>]) -> Vec<Option<EngineError>> {
        items.iter_mut().map(|item| self.prepare(program, item).err()).collect()
    }

    /// Checks an item and makes room for its tokens.
    fn prepare(&mut self, program: &Program, item: &mut WorkItem<'_, B>) -> Result<(), EngineError> {
        let tokens = accept(program, item.sequence, item.input)?;
        let chunk = program.plan.schedule.prefill_chunk.unwrap_or(u64::MAX);
        if tokens > chunk {
            let why = format!("{tokens} tokens in one pass, and the plan was made for {chunk}");
            return Err(EngineError::WrongInput { name: "tokens".into(), why });
        }
        (item.logits.rows, item.logits.vocab) = (0, 0);
        item.logits.data.clear();
        self.make_room_in_states(program, item.sequence, item.sequence.length + tokens)
    }

    /// After a pass of an item: counts its tokens and reads its logits.
    pub(super) fn finish(&mut self, program: &Program, item: &mut WorkItem<'_, B>) -> Result<(), EngineError> {
        let tokens = item.input.len();
        item.sequence.length += tokens;
        let pass = PassLogits { lane: item.sequence.lane, wanted: item.rows.of(tokens), tokens, row: None };
        self.read_logits(program, pass, item.logits)
    }

    /// A step without further inputs.
    pub fn step(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        input: StepInput<'_>,
        rows: LogitRows,
    ) -> Result<Logits, EngineError> {
        let mut logits = Logits::default();
        self.step_with(program, sequence, StepRequest { input, rows, extra: &BTreeMap::new(), logits: &mut logits })?;
        Ok(logits)
    }

    pub fn step_with(
        &mut self,
        program: &Program,
        sequence: &mut Sequence<B>,
        step: StepRequest<'_>,
    ) -> Result<(), EngineError> {
        let tokens = accept(program, sequence, step.input)?;
        let StepRequest { input, rows, extra, logits } = step;
        (logits.rows, logits.vocab) = (0, 0);
        logits.data.clear();
        if program.recomputes() {
            return self.recompute(program, sequence, tokens, StepRequest { input, rows, extra, logits });
        }
        self.make_room_in_states(program, sequence, sequence.length + tokens)?;
        let chunk = program.plan.schedule.prefill_chunk.unwrap_or(tokens).max(1);
        let mut done = 0;
        while done < tokens {
            let count = chunk_length(tokens - done, chunk);
            let wanted = rows.of_pass(done..done + count, tokens);
            let (is_first, is_last) = (done == 0, done + count == tokens);
            let sizes = PassSizes { batch: 1, sequence: count, past: sequence.length, rows: wanted.max(1) };
            let item = PassItem {
                input: input.part(done, count, tokens),
                sizes,
                new_tokens: count,
                phase: program.phase(&sizes, is_first && is_last),
                sequence: &mut *sequence,
                is_first,
                is_last,
                extra,
                error: None,
            };
            self.pass_alone(program, item)?;
            sequence.length += count;
            done += count;
            if wanted > 0 {
                self.read_logits(
                    program,
                    PassLogits { lane: sequence.lane, wanted, tokens: count, row: None },
                    logits,
                )?;
            }
        }
        Ok(())
    }

    fn pass_alone(&mut self, program: &Program, mut item: PassItem<'_, B>) -> Result<(), EngineError> {
        self.pass(program, std::slice::from_mut(&mut item))?;
        item.error.map_or(Ok(()), Err)
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
        step: StepRequest<'_>,
    ) -> Result<(), EngineError> {
        let StepRequest { input, rows, extra, logits } = step;
        let mut history = std::mem::take(&mut sequence.history);
        let before = (history.tokens.len(), history.embeddings.len());
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
        let (phase, error) = (Phase::Prefill, None);
        let item = PassItem {
            sequence: &mut *sequence,
            input,
            sizes,
            new_tokens: total,
            phase,
            is_first: true,
            is_last: true,
            extra,
            error,
        };
        let outcome = self.pass_alone(program, item);
        if outcome.is_err() {
            history.tokens.truncate(before.0);
            history.embeddings.truncate(before.1);
        }
        sequence.history = history;
        outcome?;
        sequence.length = total;
        self.read_logits(program, PassLogits { lane: sequence.lane, wanted, tokens: total, row: None }, logits)
    }

    /// Appends `wanted` rows of a pass's logits. The model may have computed only the wanted rows, the rows of all `tokens`, or one row.
    pub(super) fn read_logits(
        &mut self,
        program: &Program,
        PassLogits { lane, wanted, tokens, row }: PassLogits,
        logits: &mut Logits,
    ) -> Result<(), EngineError> {
        let Some(id) = program.logits else {
            return Err(EngineError::Unsupported("the plan names no output with next-token scores"));
        };
        let boundaries = &self.lanes[lane].boundaries;
        let name = boundaries.name(id);
        let wrong = |why: String| EngineError::WrongOutput { name: name.to_owned(), why };
        let dims = boundaries.dims(id).unwrap_or_default();
        let vocab = dims.last().copied().unwrap_or(0);
        let computed: u64 = dims.iter().rev().skip(1).product();
        let first = row.unwrap_or(computed.saturating_sub(wanted));
        if vocab > 0 && computed == 1 && first + wanted > 1 {
            return Err(EngineError::Unsupported(
                "the model gives scores for the last token of a pass only, and those of each token are needed here",
            ));
        }
        if vocab == 0 || computed < first + wanted || (computed != wanted && computed != tokens && computed != 1) {
            return Err(wrong(format!("its shape is {dims:?}, where scores for {wanted} positions are wanted")));
        }
        if logits.rows > 0 && logits.vocab as u64 != vocab {
            return Err(wrong(format!("it had {} scores before and has {vocab} now", logits.vocab)));
        }
        let row_bytes = boundaries.dtype(id).bytes_for(vocab).ok_or_else(|| wrong(format!("{dims:?} has no size")))?;
        self.scratch.resize((row_bytes * wanted) as usize, 0);
        let home = boundaries.home(id);
        let start = self.pool.synchronize(home, MemoryId::HOST, &mut self.recorder).map_err(about(name))?;
        boundaries.read_into(id, &self.pool, row_bytes * first, &mut self.scratch)?;
        if home != MemoryId::HOST {
            let bytes = self.scratch.len() as u64;
            let transfer = TensorCopy { name, from: home, to: MemoryId::HOST, bytes };
            self.recorder.copied(&transfer, self.pool.since(start));
        }
        if !floats_to_f32(boundaries.dtype(id), &self.scratch, &mut logits.data) {
            return Err(wrong(format!("{} is no floating-point type", boundaries.dtype(id))));
        }
        logits.rows += wanted as usize;
        logits.vocab = vocab as usize;
        Ok(())
    }
}

/// Checks a step's input against the model and the sequence; returns its number of tokens.
fn accept<B: Backend>(program: &Program, sequence: &Sequence<B>, input: StepInput<'_>) -> Result<u64, EngineError> {
    if program.plan.model.kind == ModelKind::SingleRun {
        return Err(EngineError::Unsupported("this model generates no tokens: run it once with its inputs instead"));
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
