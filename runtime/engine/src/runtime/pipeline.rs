//! Stages on different devices that compute at the same time: for one item where they need nothing of each other, and for different
//! items of a pass in a pipeline.
//!
//! One thread issues all runs. A device's run returns while the device computes; a run on the host, or a copy from a device, returns when
//! it is done. In each turn of a pipeline every stage runs the item that the stage before it ran in the turn before. First all items of a turn are
//! prepared, which copies boundaries and so waits for the devices; then the runs of devices start; then the host computes while the devices compute
//! for other items. A pass of n items through two stages that take a and b then takes about `a + b + (n - 1) max(a, b)` instead of `n (a + b)`.
//!
//! Items with a chunk of a prompt and items with the next tokens share a pipeline at partitions that have the same stage in both phases.

use super::Runtime;
use super::pass::{PassRunner, PassStep, StageTurn};
use crate::error::EngineError;
use crate::port::{Backend, MemoryId};
use std::ops::Range;

impl<B: Backend> PassRunner<'_, '_, B> {
    /// Runs steps in order, those that form a pipeline together.
    pub(super) fn run_steps(&mut self, steps: &[PassStep<'_>]) -> Result<(), EngineError> {
        self.pipelines(steps).into_iter().try_for_each(|pipeline| match &steps[pipeline] {
            [step] => self.run_alone(step),
            pipeline => self.run_pipeline(pipeline),
        })
    }

    /// Divides steps into pipelines, most of which have one step. Adjacent stages of a pipeline are on different devices and run the same items.
    /// The weights of all stages of a pipeline are in memory together, so on each device at most one of its stages has weights that are fetched.
    fn pipelines(&self, steps: &[PassStep<'_>]) -> Vec<Range<usize>> {
        let has_several = |phases| self.items.iter().filter(|item| item.runs_in(phases)).nth(1).is_some();
        let mut pipelines: Vec<Range<usize>> = Vec::new();
        for (at, step) in steps.iter().enumerate() {
            match pipelines.last_mut() {
                Some(last) if self.can_join(&steps[last.clone()], step) && has_several(step.phases) => {
                    last.end = at + 1;
                }
                _ => pipelines.push(at..at + 1),
            }
        }
        pipelines
    }

    /// Runs the stages of a pipeline for all their items.
    fn run_pipeline(&mut self, steps: &[PassStep<'_>]) -> Result<(), EngineError> {
        self.runtime.check_cancelled()?;
        let runs_here = |index: &usize| self.items[*index].runs_in(steps[0].phases);
        let items: Vec<usize> = (0..self.items.len()).filter(runs_here).collect();
        for turn in 0..items.len() + steps.len() - 1 {
            let mut turns: Vec<StageTurn> = Vec::with_capacity(steps.len());
            for (position, step) in steps.iter().enumerate() {
                let Some(number) = turn.checked_sub(position).filter(|number| *number < items.len()) else { continue };
                let (item, is_first, next_item) = (items[number], number == 0, items.get(number + 1).copied());
                let turn = StageTurn { id: step.id, phase: step.phases[0], item, is_first, next_item };
                self.prepare(turn, step.copies[self.items[item].phase])?;
                turns.push(turn);
            }
            self.run_turns(&turns)?;
            self.runtime.check_cancelled()?;
        }
        Ok(())
    }

    /// Runs steps that need nothing of each other, for the only item of a pass. All are prepared before the first one runs, because a copy from a
    /// device waits for the runs that were started there before.
    pub(super) fn run_together(&mut self, steps: &[PassStep<'_>]) -> Result<(), EngineError> {
        if !self.are_on_different_devices(steps) || steps.iter().any(|step| self.is_alone(step)) {
            return steps.iter().try_for_each(|step| self.run_alone(step));
        }
        self.runtime.check_cancelled()?;
        let turn = |step: &PassStep<'_>| StageTurn {
            id: step.id,
            phase: step.phases[0],
            item: 0,
            is_first: true,
            next_item: None,
        };
        let turns: Vec<StageTurn> = steps.iter().map(turn).collect();
        for (turn, step) in turns.iter().zip(steps) {
            self.prepare(*turn, step.copies[turn.phase])?;
        }
        self.run_turns(&turns)?;
        self.runtime.check_cancelled()
    }

    fn are_on_different_devices(&self, steps: &[PassStep<'_>]) -> bool {
        let mut memories: Vec<MemoryId> = steps.iter().map(|step| self.program.stages[step.id].memory()).collect();
        memories.sort_unstable();
        memories.windows(2).all(|pair| pair[0] != pair[1])
    }

    /// Whether no other stage may compute at the same time: states that are copied to a device for a run share buffers there, and experts are
    /// selected for all items at once.
    fn is_alone(&self, step: &PassStep<'_>) -> bool {
        self.runtime.staging.has_states_of(step.id) || self.runtime.weights.has_experts(step.id)
    }

    /// Runs prepared items of different stages: devices start, then the host computes.
    fn run_turns(&mut self, turns: &[StageTurn]) -> Result<(), EngineError> {
        let memory = |turn: &StageTurn| self.program.stages[turn.id].memory();
        let (on_host, on_devices): (Vec<StageTurn>, Vec<StageTurn>) =
            turns.iter().partition(|turn| memory(turn) == MemoryId::HOST);
        on_devices.iter().try_for_each(|turn| self.run_item(*turn))?;
        if !on_host.is_empty() {
            for turn in &on_devices {
                let Runtime { pool, recorder, .. } = &mut *self.runtime;
                let watched = pool.watch(self.program.stages[turn.id].memory(), recorder);
                watched.map_err(|source| EngineError::Device { source })?;
            }
        }
        on_host.iter().try_for_each(|turn| self.run_item(*turn))
    }

    /// Whether a step can join a pipeline at its end.
    fn can_join(&self, pipeline: &[PassStep<'_>], step: &PassStep<'_>) -> bool {
        let memory = |step: &PassStep<'_>| self.program.stages[step.id].memory();
        let weights = &self.runtime.weights;
        let continues =
            |last: &PassStep<'_>| memory(last) != memory(step) && last.phases == step.phases && !self.is_alone(last);
        if self.is_alone(step) || !pipeline.last().is_some_and(continues) {
            return false;
        }
        let is_fetched_here = |other: &PassStep<'_>| memory(other) == memory(step) && weights.fetches(other.id);
        !weights.fetches(step.id) || !pipeline.iter().any(is_fetched_here)
    }
}
