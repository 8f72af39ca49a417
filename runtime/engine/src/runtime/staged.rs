//! Which states are copied to a device ahead: while an item runs at a stage, those of the run after it, of the next item or at the next
//! stage that has such states.

use super::Runtime;
use super::pass::{PassItem, PassRunner};
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::Backend;
use crate::telemetry::Phase;

impl<B: Backend> PassRunner<'_, '_, B> {
    /// The stages that run next, in order: copies the states of the first one.
    pub(super) fn begin_order(&mut self, mut stages: Vec<(StageId, &'static [Phase])>) {
        stages.retain(|(stage, _)| self.runtime.staging.has_states_ahead(*stage));
        let memory = |(stage, _): &(StageId, _)| self.program.stages[*stage].memory();
        let has_second =
            |of: &&(StageId, _)| stages.iter().filter(|other| memory(other) == memory(of)).nth(1).is_some();
        // A stage without another one on its device needs no second set, and the planner counts none.
        self.staged = stages.iter().filter(has_second).copied().collect();
        self.copy_states_ahead(None);
    }

    /// Starts to copy the states of the run after that of a stage, which then runs `next_item` or none. What fails is an error of their item.
    pub(super) fn copy_states_ahead(&mut self, after: Option<(StageId, Option<usize>)>) {
        let Some((stage, item)) = self.next_staged(after) else { return };
        if let Err(error) = self.copy_states_of(stage, item) {
            self.items[item].error = Some(error);
        }
    }

    /// The stage with such states and the item that run next.
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
