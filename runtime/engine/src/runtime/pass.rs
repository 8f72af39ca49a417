//! A pass: one walk through the schedule with some tokens of one or more sequences. The weights of a stage are fetched once, and
//! every item runs before the next stage.

use super::{Runtime, Sequence};
use crate::buffers::PassInput;
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::{Backend, Session, Timing};
use crate::program::{BoundaryCopy, PassSizes, Program, ScheduledRun};
use crate::telemetry::{DeviceEvent, PerPhase, Phase, StageRun};
use crate::tensor::HostTensor;
use std::collections::BTreeMap;

/// One run of each stage in a pass: some tokens of one sequence, or the next tokens of several as rows.
pub(super) struct PassItem<'a, B: Backend> {
    pub sequence: &'a mut Sequence<B>,
    pub input: PassInput<'a>,
    pub sizes: PassSizes,
    /// Tokens that sequences gain, for telemetry.
    pub new_tokens: u64,
    /// The phase whose schedule it follows.
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
    /// Whether the item has not failed and follows the schedule of one of these phases.
    pub(super) fn runs_in(&self, phases: &[Phase]) -> bool {
        self.error.is_none() && phases.contains(&self.phase)
    }

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
        self.free_pieces_that_are_too_small(items)?;
        self.assign_lanes(program, items)?;
        for item in items.iter_mut() {
            item.error = self.start_item(program, item).err();
        }
        let next = if items.iter().all(|item| item.is_last) { Phase::Decode } else { Phase::Prefill };
        self.weights.start_pass(&self.pool, next)?;
        self.staging.start_pass();
        let ran = PassRunner { program, runtime: self, items, prefetched: None, staged: Vec::new() }.run();
        let settled = self.staging.settle(&self.pool, ran.is_err());
        ran.and(settled)?;
        if items.iter().all(|item| item.error.is_some()) {
            return Ok(());
        }
        self.synchronize()?;
        self.watch.check()?;
        // Several sequences leave freed blocks between those in use: 10 to 15 MiB of heap that no sequence uses.
        if self.is_memory_limited && items.len() > 1 {
            self.pool.backend.trim_heap();
        }
        let done = || items.iter().filter(|item| item.error.is_none());
        let phase = if done().all(|item| item.phase == Phase::Decode) { Phase::Decode } else { Phase::Prefill };
        let tokens = done().map(|item| item.new_tokens).sum();
        for item in items.iter_mut().filter(|item| item.error.is_none()) {
            item.sequence.end_pass(item.sizes.past);
        }
        self.recorder.passed(phase, tokens, self.pool.since(start));
        Ok(())
    }

    /// Frees memory that the backend keeps for later runs, before an item that is longer than all earlier items. An arena never joins its pieces:
    /// each longer prompt would add larger pieces, and the pieces of all shorter prompts would stay unused.
    fn free_pieces_that_are_too_small(&mut self, items: &[PassItem<'_, B>]) -> Result<(), EngineError> {
        let longest = items.iter().map(|item| item.sizes.sequence).max().unwrap_or(0);
        if longest > self.longest_item {
            if self.longest_item > 0 {
                let failed = |source| EngineError::Memory { what: "memory of earlier passes".into(), source };
                self.pool.backend.trim_memory().map_err(failed)?;
            }
            self.longest_item = longest;
        }
        Ok(())
    }

    /// Gives each item a lane of its own: the lane of its sequence's last pass if that is free, because the sequence's bindings were made for it.
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

    /// Runs a session on `tokens` tokens and records the time.
    pub(super) fn run_session(
        &mut self,
        program: &Program,
        run: StageRun,
        tokens: u64,
        binding: &mut <B::Session as Session>::Binding,
    ) -> Result<(), EngineError> {
        let stage = &program.stages[run.stage];
        let start = self.pool.backend.now();
        let session = &mut self.sessions[stage.session];
        let token = match self.freed_memory.returns_after(tokens) {
            true => session.run_and_return_memory(binding, &self.control),
            false => session.run(binding, &self.control),
        };
        let token = token.map_err(|source| stage.failed("running", source))?;
        let timing = token.map_or_else(|| Timing::Measured(self.pool.since(start)), Timing::Pending);
        self.recorder.record(DeviceEvent::Run(run), timing);
        Ok(())
    }
}

/// Follows the schedule of one pass.
pub(super) struct PassRunner<'r, 'a, B: Backend> {
    pub program: &'r Program,
    pub runtime: &'r mut Runtime<B>,
    pub items: &'r mut [PassItem<'a, B>],
    /// The stage and item whose states on disk were prefetched last.
    pub prefetched: Option<(StageId, usize)>,
    /// The stages whose states are copied ahead, in the order that is followed, each with the phases of its items.
    pub staged: Vec<(StageId, &'static [Phase])>,
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
        let [prefill, decode] = Phase::BOTH.map(|phase| self.program.schedules[phase].partitions());
        prefill.eq(decode)
    }

    /// Follows the schedule of one phase, for its items.
    fn follow(&mut self, phase: Phase) -> Result<(), EngineError> {
        let program = self.program;
        let schedule = &program.schedules[phase];
        if self.runtime.staging.copies_ahead() {
            let stages = schedule.runs.iter().map(|run| self.step(run, phase)).map(|step| (step.id, step.phases));
            self.begin_order(stages.collect());
        }
        if self.items.len() == 1 {
            for group in &schedule.groups {
                match &schedule.runs[group.clone()] {
                    [run] => self.run_alone(&self.step(run, phase))?,
                    runs => self.run_together(&runs.iter().map(|run| self.step(run, phase)).collect::<Vec<_>>())?,
                }
            }
        } else {
            let steps: Vec<PassStep> = schedule.runs.iter().map(|run| self.step(run, phase)).collect();
            self.run_steps(&steps)?;
        }
        self.copy_boundaries(&schedule.final_copies, phase);
        Ok(())
    }

    /// Follows the schedules of both phases, partition by partition: a stage that both use runs all items.
    fn follow_both(&mut self) -> Result<(), EngineError> {
        let program = self.program;
        let PerPhase { prefill, decode } = &program.schedules;
        let mut steps: Vec<PassStep> = Vec::with_capacity(prefill.runs.len());
        for (for_prefill, for_decode) in prefill.runs.iter().zip(&decode.runs) {
            let [first, second] = [self.step(for_prefill, Phase::Prefill), self.step(for_decode, Phase::Decode)];
            if first.id == second.id {
                let copies = PerPhase { prefill: first.copies.prefill, decode: second.copies.decode };
                steps.push(PassStep { id: first.id, phases: &Phase::BOTH, copies });
            } else {
                steps.extend([first, second]);
            }
        }
        if self.runtime.staging.copies_ahead() {
            self.begin_order(steps.iter().map(|step| (step.id, step.phases)).collect());
        }
        self.run_steps(&steps)?;
        self.copy_boundaries(&prefill.final_copies, Phase::Prefill);
        self.copy_boundaries(&decode.final_copies, Phase::Decode);
        Ok(())
    }

    /// A run of a schedule, for the items of its phase.
    fn step<'p>(&self, run: &'p ScheduledRun, phase: Phase) -> PassStep<'p> {
        let id = self.runtime.route[phase][run.partition];
        let (phases, copies): (&[Phase], _) = match phase {
            Phase::Prefill => (&[Phase::Prefill], PerPhase { prefill: &run.copies[..], decode: &[] }),
            Phase::Decode => (&[Phase::Decode], PerPhase { prefill: &[], decode: &run.copies[..] }),
        };
        PassStep { id, phases, copies }
    }

    /// Runs a stage for all its items, one after the other.
    pub(super) fn run_alone(&mut self, step: &PassStep<'_>) -> Result<(), EngineError> {
        step.phases.iter().for_each(|phase| self.copy_boundaries(step.copies[*phase], *phase));
        self.run_stage(step.id, step.phases)
    }

    /// Copies boundaries of all items of a phase.
    fn copy_boundaries(&mut self, copies: &[BoundaryCopy], phase: Phase) {
        for index in 0..self.items.len() {
            if self.items[index].runs_in(&[phase]) {
                self.items[index].error = self.copy_item_boundaries(copies, index).err();
            }
        }
    }

    /// Copies boundaries of one item.
    fn copy_item_boundaries(&mut self, copies: &[BoundaryCopy], index: usize) -> Result<(), EngineError> {
        let Runtime { pool, lanes, recorder, .. } = &mut *self.runtime;
        lanes[self.items[index].sequence.lane].copy_boundaries(pool, copies, recorder)
    }

    /// Fetches a stage's weights, runs the items of `phases` and releases the weights.
    fn run_stage(&mut self, id: StageId, phases: &[Phase]) -> Result<(), EngineError> {
        self.runtime.check_cancelled()?;
        let mut order = std::mem::take(&mut self.runtime.item_order);
        order.clear();
        order.extend((0..self.items.len()).filter(|item| self.items[*item].runs_in(phases)));
        let selected = match self.runtime.weights.has_experts(id) {
            true => self.select_experts(id, &mut order),
            false => Ok(()),
        };
        let done = selected.and_then(|()| self.run_items(id, phases, &order));
        self.runtime.item_order = order;
        done?;
        self.runtime.check_cancelled()
    }

    /// Runs items of `phases` at a stage in this order.
    fn run_items(&mut self, id: StageId, phases: &[Phase], order: &[usize]) -> Result<(), EngineError> {
        let has_item_of_several_tokens = self.has_item_of_several_tokens();
        if self.runtime.is_memory_limited && order.len() > 1 && has_item_of_several_tokens {
            self.runtime.pool.backend.trim_heap();
        }
        let mut reads_ahead = !has_item_of_several_tokens;
        for (number, &item) in order.iter().enumerate() {
            let (is_first, next_item) = (number == 0, order.get(number + 1).copied());
            let turn = StageTurn { id, phase: phases[0], item, is_first, next_item };
            self.prepare(turn, &[])?;
            if !is_first && self.runtime.weights.has_experts(id) {
                let (weights, context) = self.runtime.weights();
                weights.wait_for_experts(context, &self.program.stages, id, number)?;
            }
            if reads_ahead && self.runtime.weights.disk.has_read_experts() {
                self.runtime.read_experts_ahead(self.program, self.items, id, phases);
                reads_ahead = false;
            }
            self.prefetch_next_states(turn);
            self.run_item(turn)?;
        }
        Ok(())
    }

    /// Says which experts of a stage each item uses, and orders the items so that some compute while the experts of others are being read.
    fn select_experts(&mut self, id: StageId, order: &mut [usize]) -> Result<(), EngineError> {
        let experts_of = |item: &usize| {
            let experts = self.runtime.routed_experts_of_lane(self.program, self.items[*item].sequence.lane, id);
            experts.map(|experts| (*item, experts))
        };
        let mut runs = order.iter().map(experts_of).collect::<Result<Vec<_>, EngineError>>()?;
        // States on disk are prefetched in the order of the items.
        if runs.len() > 1 && self.program.disk_states(id).next().is_none() {
            runs = self.runtime.weights.disk.order_runs(id, runs);
        }
        order.iter_mut().zip(&runs).for_each(|(place, (item, _))| *place = *item);
        self.runtime.weights.disk.select_experts(runs.into_iter().map(|(_, experts)| experts).collect());
        Ok(())
    }

    /// Whether any item has more than one token.
    fn has_item_of_several_tokens(&self) -> bool {
        self.items.iter().any(|item| item.error.is_none() && item.sizes.sequence > 1)
    }

    /// While an item runs at a stage, starts to read the states on disk of the next run: those of the next item, or after the last item those of
    /// the first item at the next stage; after the last stage those at the first stage, for the next pass.
    fn prefetch_next_states(&mut self, turn: StageTurn) {
        if self.program.disk_states(turn.id).next().is_none() {
            return;
        }
        let phase = self.items[turn.item].phase;
        let next_item = (turn.item + 1..self.items.len()).find(|item| self.items[*item].runs_in(&[phase]));
        if let Some(item) = next_item {
            return self.prefetch_states(turn.id, item);
        }
        let order = || self.program.schedules[phase].partitions().map(|partition| self.runtime.route[phase][partition]);
        let later = order().skip_while(|stage| *stage != turn.id).skip(1);
        let next_stage = later.chain(order()).find(|stage| self.program.disk_states(*stage).next().is_some());
        let first_item = self.items.iter().position(|item| item.runs_in(&[phase]));
        if let Some((stage, item)) = next_stage.zip(first_item) {
            self.prefetch_states(stage, item);
        }
    }

    /// Starts to read the states on disk of an item at a stage, once.
    fn prefetch_states(&mut self, id: StageId, item: usize) {
        if self.prefetched.replace((id, item)) == Some((id, item)) {
            return;
        }
        if self.program.disk_states(id).next().is_none() {
            return;
        }
        let (Runtime { pool, recorder, .. }, PassItem { sequence, sizes, .. }) =
            (&mut *self.runtime, &self.items[item]);
        let start = pool.backend.now();
        for state in self.program.disk_states(id) {
            sequence.states[state].prefetch(&self.program.layouts[state], pool, sizes.past);
        }
        recorder.waited_for_states(id, pool.since(start));
    }

    /// Evicts the states on disk of an item that has run at a stage.
    fn evict_states(&mut self, id: StageId, item: usize) {
        if self.program.disk_states(id).next().is_none() {
            return;
        }
        let Runtime { pool, recorder, .. } = &mut *self.runtime;
        let start = pool.backend.now();
        let states = &self.items[item].sequence.states;
        let buffers = self.program.disk_states(id).flat_map(|state| states[state].buffers());
        let buffers: Vec<&B::Buffer> = buffers.map(|buffer| &buffer.handle).collect();
        pool.backend.evict(&buffers);
        recorder.waited_for_states(id, pool.since(start));
    }

    /// Copies boundaries of an item and binds it at a stage. Before the stage's first item, its weights are fetched; binding overlaps with
    /// that. An item that has failed is left as it is.
    pub(super) fn prepare(&mut self, turn: StageTurn, copies: &[BoundaryCopy]) -> Result<(), EngineError> {
        let StageTurn { id, phase, item, is_first, .. } = turn;
        if is_first {
            let (weights, context) = self.runtime.weights();
            weights.fetch(context, &self.program.stages, id, phase)?;
        }
        self.prefetch_states(id, item);
        if self.items[item].error.is_none() {
            let bound = self.copy_item_boundaries(copies, item).and_then(|()| self.bind(item, id));
            self.items[item].error = bound.err();
        }
        if is_first {
            let (weights, context) = self.runtime.weights();
            weights.wait(context, &self.program.stages, id)?;
        }
        Ok(())
    }

    /// Runs a prepared item at a stage and takes its outputs. After the stage's last item, its weights are released.
    pub(super) fn run_item(&mut self, turn: StageTurn) -> Result<(), EngineError> {
        let StageTurn { id, item: index, next_item, .. } = turn;
        let item = &mut self.items[index];
        if item.error.is_none() {
            let run = StageRun { stage: id, phase: item.phase, item: index };
            let binding = &mut item.sequence.bindings[id].binding;
            item.error = self.runtime.run_session(self.program, run, item.sizes.sequence, binding).err();
            if self.items[index].error.is_none() {
                // Before weights are released, because that starts to copy the next weights: they wait for this run, and states copied after them
                // would wait, too.
                self.copy_states_ahead(Some((id, next_item)));
            }
            if self.items[index].error.is_some() {
                self.runtime.staging.abandon_run(&self.runtime.pool, id);
            }
        }
        if next_item.is_none() {
            // Before outputs and states are copied, so that the next weights are fetched meanwhile; also after an error, because
            // a cancelled run has used its weights.
            let (weights, context) = self.runtime.weights();
            weights.release(context, &self.program.stages, id)?;
        }
        if self.items[index].error.is_none() {
            self.items[index].error = self.after_run(index, id).err();
        }
        self.evict_states(id, index);
        Ok(())
    }
}

/// A stage in the order of a pass, and which items run there.
#[derive(Clone, Copy)]
pub(super) struct PassStep<'p> {
    pub id: StageId,
    /// The phases whose items it runs and whose order has it; at least one.
    pub phases: &'static [Phase],
    /// Copies before it, for the items of each phase.
    pub copies: PerPhase<&'p [BoundaryCopy]>,
}

/// One item's turn at a stage.
#[derive(Clone, Copy)]
pub(super) struct StageTurn {
    pub id: StageId,
    /// A phase whose order has the stage.
    pub phase: Phase,
    /// The index of the item.
    pub item: usize,
    /// Whether the stage has run no item of the pass yet.
    pub is_first: bool,
    /// The item that the stage runs next; `None` if it will run no other item of the pass.
    pub next_item: Option<usize>,
}
