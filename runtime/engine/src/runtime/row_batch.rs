//! Row batching: the next tokens of several sequences as rows of one run, so that a matrix is multiplied once for all of them.
//!
//! A run of several rows may use other kernels than a run of one row, and their sums may round differently. So the first pass with a new
//! number of rows computes its items both ways, and later passes batch that many rows only if every bit was the same. Where values are
//! rounded to 16 bits, that hides the differences of sums in most rows: there several passes are computed both ways, until enough rows were
//! compared.

use super::pass::PassItem;
use super::step::{PassLogits, WorkItem};
use super::{Runtime, Sequence};
use crate::buffers::{PassInput, RowInput};
use crate::error::EngineError;
use crate::options::RowBatching;
use crate::port::Backend;
use crate::program::{PassSizes, Program};
use crate::tensor::{HostTensor, Logits};
use hpp_schema::{DType, Plan};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use tracing::info;

/// Most consecutive unused rows that a batch computes anyway; more split it in two.
const MAX_UNUSED_ROWS: u64 = 2;
/// Most tokens of the smallest shape; each further shape has twice as many, because attention may use other kernels for more.
const MIN_SHAPE_TOKENS: u64 = 256;
/// Where batched rows need not have the same bits: the largest difference of logits that counts as rounding, relative to the largest logit.
const ROUNDING: f32 = 0.05;

/// Rows that must agree before batches of a shape are used. The rows of one pass are enough, except where values are rounded to 16 bits.
const ROWS_CHECKED: u64 = 1;
const ROWS_CHECKED_16_BIT: u64 = 256;

/// Batching is disabled once this many shapes were checked and batches of none of them may be used.
const MOST_FAILURES: usize = 3;

static NO_EXTRA_INPUTS: BTreeMap<String, HostTensor> = BTreeMap::new();

/// Batches the rows of passes, and knows which batches have the same bits as single runs.
pub(crate) struct RowBatcher<B: Backend> {
    mode: RowBatching,
    /// What checks of batches of a shape have found so far.
    checked: BTreeMap<BatchShape, Checked>,
    /// The batches of the current pass come first; the others are kept for their bindings.
    batches: Vec<RowBatch<B>>,
    logits: Logits,
}

/// What checks of batches of a shape have found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checked {
    /// This many rows agreed, and no row differed.
    Agrees(u64),
    /// A row differed.
    Differs,
}

/// Batches that use the same kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct BatchShape {
    rows: u64,
    /// Most tokens of a sequence.
    tokens: u64,
}

/// Consecutive rows of the state arena in one run.
struct RowBatch<B: Backend> {
    /// Has the states of all rows, and the bindings of runs over them.
    sequence: Sequence<B>,
    rows: Range<u64>,
    /// The next token of each row; 0 where no sequence has the row.
    ids: Vec<u32>,
    /// Tokens that each row has before the pass.
    lengths: Vec<u64>,
    members: Vec<Member>,
    /// Whether it replaces the single runs; else both are computed and compared.
    replaces_single_runs: bool,
}

/// A work item in a batch.
#[derive(Clone, Copy, Debug)]
struct Member {
    /// Its index among the items of the pass.
    item: usize,
    /// Its row in the state arena.
    row: u64,
}

impl<B: Backend> RowBatch<B> {
    /// Takes the tokens and lengths of a group of items that have some of these rows.
    fn fill(&mut self, items: &[WorkItem<'_, B>], group: &[Member], rows: &Range<u64>) {
        let count = (rows.end - rows.start) as usize;
        self.lengths.clear();
        self.lengths.resize(count, 0);
        self.ids.clear();
        self.ids.resize(count, 0);
        self.members.clear();
        self.members.extend_from_slice(group);
        for member in group {
            let (item, row) = (&items[member.item], (member.row - rows.start) as usize);
            self.lengths[row] = item.sequence.length;
            self.ids[row] = item.only_token().unwrap_or(0);
        }
    }

    fn row_count(&self) -> u64 {
        self.ids.len() as u64
    }

    /// Most tokens that a row has before.
    fn past(&self) -> u64 {
        self.lengths.iter().max().copied().unwrap_or(0)
    }

    fn shape(&self) -> BatchShape {
        let tokens = (self.past() + 1).next_power_of_two().max(MIN_SHAPE_TOKENS);
        BatchShape { rows: self.row_count(), tokens }
    }

    fn in_pass(&mut self, program: &Program) -> PassItem<'_, B> {
        let sizes = PassSizes { batch: self.row_count(), sequence: 1, past: self.past(), rows: 1 };
        let new_tokens = if self.replaces_single_runs { self.members.len() as u64 } else { 0 };
        PassItem {
            sequence: &mut self.sequence,
            input: PassInput::Rows(RowInput { ids: &self.ids, lengths: &self.lengths }),
            sizes,
            new_tokens,
            phase: program.phase(&sizes, true),
            is_first: true,
            is_last: true,
            extra: &NO_EXTRA_INPUTS,
            error: None,
        }
    }
}

impl<B: Backend> RowBatcher<B> {
    pub fn new(mode: RowBatching) -> Self {
        Self { mode, checked: BTreeMap::new(), batches: Vec::new(), logits: Logits::default() }
    }

    /// One pass for all items: each stage's weights are fetched once. Returns the outcome of each item; an error of the pass concerns all.
    pub fn pass(
        &mut self,
        program: &Program,
        runtime: &mut Runtime<B>,
        items: &mut [WorkItem<'_, B>],
    ) -> Result<Vec<Result<(), EngineError>>, EngineError> {
        let mut errors = runtime.prepare_all(program, items);
        let count = self.form_batches(program, runtime, items, &errors)?;
        let batches = &mut self.batches[..count];
        let mut is_batched = vec![false; items.len()];
        for batch in batches.iter().filter(|batch| batch.replaces_single_runs) {
            for member in &batch.members {
                items[member.item].sequence.begin_pass();
                is_batched[member.item] = true;
            }
        }
        let alone = items.iter_mut().zip(&errors).zip(&is_batched).enumerate();
        let alone = alone.filter(|(_, ((_, error), is_batched))| error.is_none() && !**is_batched);
        let mut alone: Vec<_> = alone.map(|(index, ((item, _), _))| (index, item.in_pass(program))).collect();
        // The longest first, so that the others fit into the memory that it leaves in the backend's arena.
        alone.sort_by_key(|(_, item)| Reverse(item.sizes.sequence));
        let (order, alone): (Vec<usize>, Vec<PassItem<'_, B>>) = alone.into_iter().unzip();
        // Batches run first: they write to unused rows between two sequences, and to rows that are also computed one by one. Both are overwritten
        // before they are read.
        let mut pass: Vec<PassItem<'_, B>> = batches.iter_mut().map(|batch| batch.in_pass(program)).collect();
        pass.extend(alone);
        runtime.pass(program, &mut pass)?;
        let mut outcomes = pass.into_iter().map(|item| item.error);
        let of_batches: Vec<Option<EngineError>> = outcomes.by_ref().take(count).collect();
        let mut of_items: Vec<Option<EngineError>> = is_batched.iter().map(|_| None).collect();
        order.into_iter().zip(outcomes).for_each(|(index, error)| of_items[index] = error);
        let mut results = Vec::with_capacity(items.len());
        for (((item, error), is_batched), of_item) in
            items.iter_mut().zip(errors.drain(..)).zip(&is_batched).zip(of_items)
        {
            results.push(match error.or(of_item) {
                Some(error) => Err(error),
                None if *is_batched => Ok(()),
                None => runtime.finish(program, item),
            });
        }
        for (index, error) in of_batches.into_iter().enumerate() {
            match self.batches[index].replaces_single_runs {
                true => self.finish_batch(program, runtime, items, (index, error))?,
                false => self.check(program, runtime, items, (index, error)),
            }
        }
        Ok(results)
    }

    /// Forms the batches of a pass; returns their number.
    fn form_batches(
        &mut self,
        program: &Program,
        runtime: &Runtime<B>,
        items: &[WorkItem<'_, B>],
        errors: &[Option<EngineError>],
    ) -> Result<usize, EngineError> {
        let may_batch = self.mode != RowBatching::Off && !self.is_disabled() && runtime.taps.wanted.is_empty();
        let Some(arena) = runtime.arena.as_ref().filter(|_| may_batch && items.len() > 1) else { return Ok(0) };
        let mut members: Vec<Member> = Vec::with_capacity(items.len());
        for (index, (item, error)) in items.iter().zip(errors).enumerate() {
            let can_batch =
                error.is_none() && item.only_token().is_some() && item.sequence.length > 0 && item.extra.is_empty();
            if let Some(row) = item.sequence.row.as_ref().filter(|_| can_batch) {
                members.push(Member { item: index, row: row.index });
            }
        }
        members.sort_by_key(|member| member.row);
        let wanted_rows = self.rows_to_check(program);
        let is_near = |a: &Member, b: &Member| {
            let between = a.row + 1..b.row;
            between.end - between.start <= MAX_UNUSED_ROWS && between.clone().all(|row| arena.is_free(row))
        };
        let mut count = 0;
        for group in members.chunk_by(is_near).filter(|group| group.len() > 1) {
            let rows = group[0].row..group[group.len() - 1].row + 1;
            if count == self.batches.len() {
                let sequence = runtime.sequence_without_states(program)?;
                let (ids, lengths, members) = (Vec::new(), Vec::new(), Vec::new());
                self.batches.push(RowBatch {
                    sequence,
                    rows: 0..0,
                    ids,
                    lengths,
                    members,
                    replaces_single_runs: false,
                });
            }
            let batch = &mut self.batches[count];
            batch.fill(items, group, &rows);
            batch.replaces_single_runs = match self.checked.get(&batch.shape()) {
                Some(Checked::Differs) => continue,
                Some(Checked::Agrees(rows)) => *rows >= wanted_rows,
                None => false,
            };
            if batch.rows != rows {
                let states = arena.states_of_rows(&program.layouts, &runtime.pool, rows.clone());
                let Some(states) = states else { continue };
                (batch.sequence.states, batch.rows) = (states, rows);
            }
            count += 1;
        }
        Ok(count)
    }

    fn is_disabled(&self) -> bool {
        self.checked.len() >= MOST_FAILURES && self.checked.values().all(|checked| *checked == Checked::Differs)
    }

    /// Rows that must agree before batches of a shape are used.
    fn rows_to_check(&self, program: &Program) -> u64 {
        let is_half = |dtype: DType| matches!(dtype, DType::Float16 | DType::Bfloat16);
        let Plan { partitions, states, .. } = &program.plan;
        let mut values = partitions.iter().flat_map(|partition| &partition.outputs).map(|output| output.dtype);
        let rounds = values.any(is_half) || states.iter().any(|state| is_half(state.dtype));
        if rounds && self.mode == RowBatching::Exact { ROWS_CHECKED_16_BIT } else { ROWS_CHECKED }
    }

    /// Copies the logits of a batch to its items.
    fn finish_batch(
        &mut self,
        program: &Program,
        runtime: &mut Runtime<B>,
        items: &mut [WorkItem<'_, B>],
        (index, error): (usize, Option<EngineError>),
    ) -> Result<(), EngineError> {
        if let Some(error) = error {
            return Err(error);
        }
        let batch = &self.batches[index];
        let (lane, rows) = (batch.sequence.lane, batch.row_count());
        for member in &batch.members {
            let item = &mut items[member.item];
            item.sequence.end_pass(item.sequence.length);
            item.sequence.length += 1;
            let row = Some(member.row - batch.rows.start);
            runtime.read_logits(program, PassLogits { lane, wanted: 1, tokens: rows, row }, item.logits)?;
        }
        let rows = batch.members.len() as u64;
        runtime.recorder.pass.batched_rows += rows;
        let telemetry = &mut runtime.recorder.telemetry;
        telemetry.row_batches += 1;
        telemetry.batched_rows += rows;
        Ok(())
    }

    /// Compares the logits of a batch with those of its items, which were also computed one by one, and records the result for the batch's shape.
    fn check(
        &mut self,
        program: &Program,
        runtime: &mut Runtime<B>,
        items: &[WorkItem<'_, B>],
        (index, error): (usize, Option<EngineError>),
    ) {
        let batch = &self.batches[index];
        let (lane, rows, shape) = (batch.sequence.lane, batch.row_count(), batch.shape());
        let mut found = if error.is_some() { Agreement::None } else { Agreement::Bits };
        for member in batch.members.iter().filter(|_| error.is_none()) {
            let alone = &items[member.item].logits;
            if alone.rows != 1 {
                return;
            }
            (self.logits.rows, self.logits.vocab) = (0, 0);
            self.logits.data.clear();
            let row = Some(member.row - batch.rows.start);
            let read =
                runtime.read_logits(program, PassLogits { lane, wanted: 1, tokens: rows, row }, &mut self.logits);
            let one = if read.is_ok() { Agreement::of(&self.logits.data, &alone.data) } else { Agreement::None };
            found = found.min(one);
        }
        let agrees = match self.mode {
            RowBatching::Off => false,
            RowBatching::Exact => found == Agreement::Bits,
            RowBatching::On => found >= Agreement::Rounding,
        };
        let members = self.batches[index].members.len() as u64;
        let before = self.checked.get(&shape).copied();
        let checked = match before {
            _ if !agrees => Checked::Differs,
            Some(Checked::Agrees(rows)) => Checked::Agrees(rows + members),
            _ => Checked::Agrees(members),
        };
        if before.is_none() || checked == Checked::Differs {
            info!(rows, tokens = shape.tokens, agreement = ?found, agrees, error = ?error, "rows of a batch checked");
        }
        self.checked.insert(shape, checked);
    }
}

/// How far the logits of a batched row agree with those of the same row alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Agreement {
    /// They differ by more than rounding: one row influences another.
    None,
    /// Up to rounding.
    Rounding,
    /// In every bit.
    Bits,
}

impl Agreement {
    fn of(batched: &[f32], alone: &[f32]) -> Self {
        let mut pairs = batched.iter().zip(alone);
        if batched.len() == alone.len() && pairs.all(|(a, b)| a.to_bits() == b.to_bits()) {
            return Agreement::Bits;
        }
        let largest = alone.iter().fold(0.0f32, |largest, logit| largest.max(logit.abs()));
        let is_near = |(a, b): (&f32, &f32)| (a - b).abs() <= ROUNDING * largest;
        match batched.len() == alone.len() && batched.iter().zip(alone).all(is_near) {
            true => Agreement::Rounding,
            false => Agreement::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agreement_tells_bits_from_rounding_from_other_numbers() {
        let alone = [1.0, -4.0, 0.0];
        assert_eq!(Agreement::of(&alone, &alone), Agreement::Bits);
        assert_eq!(Agreement::of(&[1.1, -4.0, -0.0], &alone), Agreement::Rounding);
        for other in [&[1.0, -4.0, 0.3][..], &[1.0, f32::NAN, 0.0], &[1.0, -4.0]] {
            assert_eq!(Agreement::of(other, &alone), Agreement::None, "{other:?}");
        }
        assert!(Agreement::None < Agreement::Rounding && Agreement::Rounding < Agreement::Bits);
    }
}
