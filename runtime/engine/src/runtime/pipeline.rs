//! Pipelines: consecutive stages on different devices compute for different items of a pass at the same time.
//!
//! One thread issues all runs. A device's run returns while the device computes; a run on the host, or a copy from a device, returns when
//! it is done. In each turn of a pipeline every stage gets the item that the stage before it had in the turn before: first all of them are
//! prepared, which copies boundaries and so waits for the devices; then the runs of devices start; then the host computes, meanwhile
//! the devices compute for other items. A pass of n items through two stages that take a and b then takes about
//! `a + b + (n - 1) max(a, b)` instead of `n (a + b)`.

use super::pass::{PassRunner, StageTurn};
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::{Backend, MemoryId};
use crate::program::ScheduledRun;
use crate::telemetry::Phase;
use std::ops::Range;

impl<B: Backend> PassRunner<'_, '_, B> {
    /// Divides the runs of a phase's schedule into pipelines, most of one run. Adjacent runs of a pipeline are on different devices.
    /// The weights of all its stages are in memory together, so at most one of them on each device is fetched.
    pub(super) fn pipelines(&self, phase: Phase) -> Vec<Range<usize>> {
        let stages: Vec<StageId> = self.stages(&self.program.schedules[phase].runs, phase);
        let has_several = self.items.iter().filter(|item| item.runs_in(&[phase])).nth(1).is_some();
        let mut pipelines: Vec<Range<usize>> = Vec::new();
        for at in 0..stages.len() {
            match pipelines.last_mut() {
                Some(last) if has_several && self.can_join(&stages[last.clone()], stages[at]) => last.end = at + 1,
                _ => pipelines.push(at..at + 1),
            }
        }
        pipelines
    }

    /// Runs the stages of a pipeline for all items of the phase.
    pub(super) fn run_pipeline(&mut self, runs: &[ScheduledRun], phase: Phase) -> Result<(), EngineError> {
        if let [run] = runs {
            return self.run_alone(run, phase);
        }
        let stages = self.stages(runs, phase);
        self.runtime.check_cancelled()?;
        let items: Vec<usize> = (0..self.items.len()).filter(|index| self.items[*index].runs_in(&[phase])).collect();
        for turn in 0..items.len() + stages.len() - 1 {
            let mut turns: Vec<StageTurn> = Vec::with_capacity(stages.len());
            for (position, id) in stages.iter().enumerate() {
                let Some(number) = turn.checked_sub(position).filter(|number| *number < items.len()) else { continue };
                let (is_first, is_last) = (number == 0, number + 1 == items.len());
                let turn = StageTurn { id: *id, phase, item: items[number], is_first, is_last };
                self.prepare(turn, &runs[position].copies)?;
                turns.push(turn);
            }
            let on_host = |turn: &StageTurn| self.program.stages[turn.id].memory() == MemoryId::HOST;
            turns.sort_by_key(on_host);
            turns.into_iter().try_for_each(|turn| self.run_item(turn))?;
            self.runtime.check_cancelled()?;
        }
        Ok(())
    }

    fn stages(&self, runs: &[ScheduledRun], phase: Phase) -> Vec<StageId> {
        runs.iter().map(|run| self.runtime.route[phase][run.partition]).collect()
    }

    /// Whether a stage can join a pipeline at its end.
    fn can_join(&self, pipeline: &[StageId], stage: StageId) -> bool {
        let memory = |stage: &StageId| self.program.stages[*stage].memory();
        let weights = &self.runtime.weights;
        // States that are copied to a device for a run share buffers there. Experts are selected for all items at once.
        let is_alone = |stage: StageId| self.runtime.staging.has_states_of(stage) || weights.has_experts(stage);
        let last_is_elsewhere = pipeline.last().is_some_and(|last| memory(last) != memory(&stage));
        if !last_is_elsewhere || is_alone(stage) || pipeline.iter().any(|other| is_alone(*other)) {
            return false;
        }
        let is_fetched_here = |other: &StageId| memory(other) == memory(&stage) && weights.fetches(*other);
        !weights.fetches(stage) || !pipeline.iter().any(is_fetched_here)
    }
}
