//! Decides which states are copied to a device ahead. While an item runs at a stage, the states of the run after it are copied: those of the next
//! item, or after the last item those of the first item at the next stage with states to copy.

use super::Runtime;
use super::pass::{PassItem, PassRunner};
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::Backend;
use crate::telemetry::Phase;

impl<B: Backend> PassRunner<'_, '_, B> {
    /// Starts an order of stages: keeps those whose states are copied ahead, and starts to copy the states of the first one.
    pub(super) fn begin_order(&mut self, mut stages: Vec<(StageId, &'static [Phase])>) {
        stages.retain(|(stage, _)| self.runtime.staging.has_states_ahead(*stage));
        let memory = |(stage, _): &(StageId, _)| self.program.stages[*stage].memory();
        let has_second =
            |of: &&(StageId, _)| stages.iter().filter(|other| memory(other) == memory(of)).nth(1).is_some();
        // A stage without another one on its device needs no second set, and the planner counts none.
        self.staged = stages.iter().filter(has_second).copied().collect();
        self.copy_states_ahead(None);
    }

    /// Starts to copy the states of the next run. `after` is the stage that runs now and the item that it runs next, if there is one; `None` before
    /// the first run. A failure is an error of the item whose states are copied.
    pub(super) fn copy_states_ahead(&mut self, after: Option<(StageId, Option<usize>)>) {
        let Some((stage, item)) = self.next_staged(after) else { return };
        if let Err(error) = self.copy_states_of(stage, item) {
            self.items[item].error = Some(error);
        }
    }

    /// The next run with states to copy: its stage and its item.
    fn next_staged(&self, after: Option<(StageId, Option<usize>)>) -> Option<(StageId, usize)> {
        let from = match after {
            None => 0,
            Some((stage, next_item)) => {
                let at = self.staged.iter().position(|(other, _)| *other == stage)?;
                if let Some(item) = next_item.filter(|item| self.items[*item].error.is_none()) {
                    return Some((stage, item));
                }
                at + 1
            }
        };
        let first_item = |phases: &[Phase]| self.items.iter().position(|item| item.runs_in(phases));
        self.staged[from..].iter().find_map(|(stage, phases)| Some((*stage, first_item(phases)?)))
    }

    fn copy_states_of(&mut self, stage: StageId, item: usize) -> Result<(), EngineError> {
        let Runtime { pool, staging, recorder, .. } = &mut *self.runtime;
        let PassItem { sequence, sizes, .. } = &self.items[item];
        for state in self.program.stages[stage].states() {
            let layout = &self.program.layouts[state];
            let home = sequence.states[state].past(layout, sizes.past)?;
            staging.copy_ahead(pool, (stage, item), state, layout, home, recorder)?;
        }
        Ok(())
    }
}
