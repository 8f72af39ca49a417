//! A pass: one walk through the schedule with some tokens of one or more sequences. The weights of a stage are fetched once, and
//! every item runs before the next stage.

use super::{Runtime, Sequence};
use crate::buffers::PassInput;
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::{Backend, Session, Timing};
use crate::program::{BoundaryCopy, PassSizes, Program, ScheduledOp};
use crate::telemetry::{DeviceEvent, Phase};
use crate::tensor::HostTensor;
use std::collections::BTreeMap;

/// One run of each stage in a pass: some tokens of one sequence, or the next tokens of several as rows.
pub(super) struct PassItem<'a, B: Backend> {
    pub sequence: &'a mut Sequence<B>,
    pub input: PassInput<'a>,
    pub sizes: PassSizes,
    /// Tokens that sequences gain, for telemetry.
    pub new_tokens: u64,
    /// Whose schedule it follows.
    pub phase: Phase,
    /// Whether it is the first pass of its step.
    pub is_first: bool,
    /// Whether it is the last pass of its step.
    pub is_last: bool,
    /// Further model inputs, by name.
    pub extra: &'a BTreeMap<String, HostTensor>,
    /// Why this item failed; the others go on. The pass sets it.
    pub error: Option<EngineError>,
}

impl<B: Backend> PassItem<'_, B> {
    /// The index in the pass of the first position whose logits are computed.
    fn logits_from(&self) -> u64 {
        self.sizes.sequence - self.sizes.rows
    }
}

impl<B: Backend> Runtime<B> {
    /// Runs a pass. An item that fails alone has its `error` set; an error of the pass concerns all items. Sequences of failed items
    /// cannot be used again.
    pub(super) fn pass(&mut self, program: &Program, items: &mut [PassItem<'_, B>]) -> Result<(), EngineError> {
        let start = self.pool.backend.now();
        self.recorder.pass.begin();
        self.check_cancelled()?;
        if items.len() > 1 && !self.taps.wanted.is_empty() {
            return Err(EngineError::Unsupported("taps are read in passes of one sequence"));
        }
        self.assign_lanes(program, items)?;
        for item in items.iter_mut() {
            item.error = self.start_item(program, item).err();
        }
        let next = if items.iter().all(|item| item.is_last) { Phase::Decode } else { Phase::Prefill };
        self.weights.start_pass(&self.pool, next)?;
        PassRunner { program, runtime: self, items }.run()?;
        if items.iter().all(|item| item.error.is_some()) {
            return Ok(());
        }
        self.synchronize()?;
        self.watch.check()?;
        let done = || items.iter().filter(|item| item.error.is_none());
        let phase = if done().all(|item| item.phase == Phase::Decode) { Phase::Decode } else { Phase::Prefill };
        let tokens = done().map(|item| item.new_tokens).sum();
        for item in items.iter_mut().filter(|item| item.error.is_none()) {
            item.sequence.end_pass(item.sizes.past);
        }
        self.recorder.passed(phase, tokens, self.pool.since(start));
        Ok(())
    }

    /// Gives each item a lane of its own: that of its sequence's last pass, if that is free, because its bindings were made for it.
    fn assign_lanes(&mut self, program: &Program, items: &mut [PassItem<'_, B>]) -> Result<(), EngineError> {
        while self.lanes.len() < items.len() {
            self.lanes.push(self.lanes[0].another(&self.pool, program.context)?);
        }
        for index in 0..items.len() {
            let (assigned, rest) = items.split_at_mut(index);
            let is_free = |lane: &usize| assigned.iter().all(|item| item.sequence.lane != *lane);
            let sequence = &mut rest[0].sequence;
            if sequence.lane >= self.lanes.len() || !is_free(&sequence.lane) {
                sequence.lane = (0..self.lanes.len()).find(is_free).unwrap_or(0);
            }
        }
        Ok(())
    }

    /// Writes an item's model inputs.
    fn start_item(&mut self, program: &Program, item: &mut PassItem<'_, B>) -> Result<(), EngineError> {
        let lane = &mut self.lanes[item.sequence.lane];
        for input in lane.inputs.iter_mut() {
            let rows_from = item.logits_from();
            input.write(&self.pool, item.input, rows_from, &item.sizes, item.extra, &mut self.recorder)?;
        }
        lane.start_pass(&item.sizes);
        if item.sequence.taps_version != self.taps.version {
            item.sequence.bindings = self.new_bindings(program)?;
            item.sequence.taps_version = self.taps.version;
        }
        if item.sequence.snapshots {
            item.sequence.take_snapshots(program, &self.pool, item.sizes.sequence)?;
        }
        item.sequence.begin_pass();
        Ok(())
    }

    /// Runs a session and records the time.
    pub(super) fn run_session(
        &mut self,
        program: &Program,
        id: StageId,
        phase: Phase,
        binding: &mut <B::Session as Session>::Binding,
    ) -> Result<(), EngineError> {
        let stage = &program.stages[id];
        let start = self.pool.backend.now();
        let token = self.sessions[stage.session].run(binding, &self.control);
        let token = token.map_err(|source| stage.failed("running", source))?;
        let timing = token.map_or_else(|| Timing::Measured(self.pool.since(start)), Timing::Pending);
        self.recorder.record(DeviceEvent::Run { stage: id, phase }, timing);
        Ok(())
    }
}

/// Follows the schedule of one pass.
pub(super) struct PassRunner<'r, 'a, B: Backend> {
    pub program: &'r Program,
    pub runtime: &'r mut Runtime<B>,
    pub items: &'r mut [PassItem<'a, B>],
}

impl<B: Backend> PassRunner<'_, '_, B> {
    fn run(&mut self) -> Result<(), EngineError> {
        let has = |phase| self.items.iter().any(|item| item.error.is_none() && item.phase == phase);
        match (has(Phase::Prefill), has(Phase::Decode)) {
            (true, true) if self.same_order() => self.follow_both()?,
            (prefill, decode) => {
                for (phase, _) in [(Phase::Prefill, prefill), (Phase::Decode, decode)].iter().filter(|(_, has)| *has) {
                    self.follow(*phase)?;
                }
            }
        }
        if self.returns_at_end() && self.items[0].is_last && self.items[0].error.is_none() {
            self.return_all_states()?;
        }
        Ok(())
    }

    /// Whether both phases run partitions in the same order.
    fn same_order(&self) -> bool {
        let partitions = |phase| {
            self.program.schedules[phase].iter().filter_map(|op| match op {
                ScheduledOp::Run(partition) => Some(partition),
                ScheduledOp::Copy(_) => None,
            })
        };
        partitions(Phase::Prefill).eq(partitions(Phase::Decode))
    }

    /// The schedule of one phase, for its items.
    fn follow(&mut self, phase: Phase) -> Result<(), EngineError> {
        for op in &self.program.schedules[phase] {
            match op {
                ScheduledOp::Run(partition) => {
                    self.run_stage(self.runtime.route[phase][*partition], phase, &[phase])?
                }
                ScheduledOp::Copy(copies) => self.copy_boundaries(copies, phase)?,
            }
        }
        Ok(())
    }

    /// The schedules of both phases, partition by partition: a stage that both use runs all items at once.
    fn follow_both(&mut self) -> Result<(), EngineError> {
        let mut decode = self.program.schedules.decode.iter();
        for op in &self.program.schedules.prefill {
            let partition = match op {
                ScheduledOp::Run(partition) => *partition,
                ScheduledOp::Copy(copies) => {
                    self.copy_boundaries(copies, Phase::Prefill)?;
                    continue;
                }
            };
            for op in decode.by_ref() {
                match op {
                    ScheduledOp::Run(_) => break,
                    ScheduledOp::Copy(copies) => self.copy_boundaries(copies, Phase::Decode)?,
                }
            }
            let [for_prefill, for_decode] = Phase::BOTH.map(|phase| self.runtime.route[phase][partition]);
            if for_prefill == for_decode {
                self.run_stage(for_prefill, Phase::Prefill, &Phase::BOTH)?;
            } else {
                self.run_stage(for_prefill, Phase::Prefill, &[Phase::Prefill])?;
                self.run_stage(for_decode, Phase::Decode, &[Phase::Decode])?;
            }
        }
        Ok(())
    }

    fn copy_boundaries(&mut self, copies: &[BoundaryCopy], phase: Phase) -> Result<(), EngineError> {
        let Runtime { pool, lanes, recorder, .. } = &mut *self.runtime;
        for item in self.items.iter_mut().filter(|item| item.error.is_none() && item.phase == phase) {
            item.error = lanes[item.sequence.lane].copy_boundaries(pool, copies, recorder).err();
        }
        Ok(())
    }

    /// Fetches a stage's weights, runs the items of `phases` and releases the weights. `phase`: one in whose order the stage is.
    fn run_stage(&mut self, id: StageId, phase: Phase, phases: &[Phase]) -> Result<(), EngineError> {
        self.runtime.check_cancelled()?;
        let runs = |item: &PassItem<'_, B>| item.error.is_none() && phases.contains(&item.phase);
        if !self.items.iter().any(runs) {
            return Ok(());
        }
        if self.runtime.weights.has_experts(id) {
            let selected = self.runtime.routed_experts(self.program, self.items, id, phases)?;
            self.runtime.weights.disk.select_experts(selected);
        }
        let (weights, context) = self.runtime.weights();
        weights.fetch(context, &self.program.stages, id, phase)?;
        let (first, last) = (self.items.iter().position(runs), self.items.iter().rposition(runs));
        for index in 0..self.items.len() {
            if !runs(&self.items[index]) {
                continue;
            }
            // Binding the first item overlaps with the fetch.
            let bound = self.bind(index, id);
            if Some(index) == first {
                let (weights, context) = self.runtime.weights();
                weights.wait(context, &self.program.stages, id)?;
            }
            let ran = bound.and_then(|()| self.run_item(index, id));
            if Some(index) == last {
                // Before outputs and states are copied, so that the next weights are fetched meanwhile; also after an error, because
                // a cancelled run has used its weights.
                let (weights, context) = self.runtime.weights();
                weights.release(context, &self.program.stages, id)?;
            }
            self.items[index].error = ran.and_then(|()| self.after_run(index, id)).err();
        }
        self.runtime.check_cancelled()
    }

    fn run_item(&mut self, index: usize, id: StageId) -> Result<(), EngineError> {
        let item = &mut self.items[index];
        let (phase, binding) = (item.phase, &mut item.sequence.bindings[id].binding);
        self.runtime.run_session(self.program, id, phase, binding)
    }
}
