//! Which experts a pass selects: computed from the router's logits as the kernel of the mixture does.

use super::Runtime;
use super::pass::PassItem;
use crate::error::EngineError;
use crate::ids::StageId;
use crate::port::Backend;
use crate::program::{Program, Routing};
use crate::telemetry::Phase;
use crate::tensor::floats_to_f32;
use std::cmp::Ordering;

impl<B: Backend> Runtime<B> {
    /// The experts that the items of `phases` select in a stage, in order, each once.
    pub(super) fn routed_experts(
        &self,
        program: &Program,
        items: &[PassItem<'_, B>],
        stage: StageId,
        phases: &[Phase],
    ) -> Result<Vec<u32>, EngineError> {
        let Some(routing) = program.stages[stage].routing else { return Ok(Vec::new()) };
        let mut selected = vec![false; routing.count];
        for item in items.iter().filter(|item| item.error.is_none() && phases.contains(&item.phase)) {
            self.select_in_lane(routing, item.sequence.lane, &mut selected)?;
        }
        Ok(indices(&selected))
    }

    /// The experts that the tokens of one lane select in a stage, in order, each once.
    pub(super) fn routed_experts_of_lane(
        &self,
        program: &Program,
        lane: usize,
        stage: StageId,
    ) -> Result<Vec<u32>, EngineError> {
        let Some(routing) = program.stages[stage].routing else { return Ok(Vec::new()) };
        let mut selected = vec![false; routing.count];
        self.select_in_lane(routing, lane, &mut selected)?;
        Ok(indices(&selected))
    }

    fn select_in_lane(&self, routing: Routing, lane: usize, selected: &mut [bool]) -> Result<(), EngineError> {
        let boundaries = &self.lanes[lane].boundaries;
        let value = boundaries.read(routing.router, &self.pool)?;
        let mut logits = Vec::new();
        let is_float = floats_to_f32(value.dtype, &value.bytes, &mut logits);
        if !is_float || !logits.len().is_multiple_of(routing.count) {
            return Err(EngineError::WrongOutput {
                name: boundaries.name(routing.router).to_owned(),
                why: format!("its {} elements are not {} logits for each token", logits.len(), routing.count),
            });
        }
        logits.chunks_exact(routing.count).for_each(|row| routing.select(row, selected));
        Ok(())
    }
}

/// The indices of those that are selected.
fn indices(selected: &[bool]) -> Vec<u32> {
    (0u32..).zip(selected).filter(|(_, selected)| **selected).map(|(expert, _)| expert).collect()
}

impl Routing {
    /// Marks the experts that a token with these logits selects: those with the largest logits, of equal ones those with the larger
    /// index, as ONNX Runtime sorts pairs of logit and index (`moe_quantization_cpu.cc`). A token whose logits cannot be ordered may
    /// select any expert.
    fn select(&self, logits: &[f32], selected: &mut [bool]) {
        if logits.iter().any(|logit| logit.is_nan()) {
            selected.fill(true);
            return;
        }
        let mut order: Vec<usize> = (0..logits.len()).collect();
        let by_logit =
            |a: &usize, b: &usize| logits[*b].partial_cmp(&logits[*a]).unwrap_or(Ordering::Equal).then(b.cmp(a));
        let active = self.active.min(order.len());
        if active < order.len() {
            order.select_nth_unstable_by(active, by_logit);
        }
        order[..active].iter().for_each(|expert| selected[*expert] = true);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{BoundaryId, Id};

    fn selected(active: usize, rows: &[&[f32]]) -> Vec<usize> {
        let routing = Routing { router: BoundaryId::new(0), count: rows[0].len(), active };
        let mut selected = vec![false; routing.count];
        rows.iter().for_each(|row| routing.select(row, &mut selected));
        (0..routing.count).filter(|expert| selected[*expert]).collect()
    }

    #[test]
    fn the_largest_logits_select_and_of_equal_ones_the_later() {
        assert_eq!(selected(2, &[&[0.5, -1.0, 3.0, 0.25]]), [0, 2]);
        assert_eq!(selected(2, &[&[1.0, 1.0, 1.0, 1.0]]), [2, 3]);
        assert_eq!(selected(2, &[&[1.0, 2.0, 1.0, 0.0]]), [1, 2]);
        // 0 and -0 are equal.
        assert_eq!(selected(1, &[&[0.0, -0.0, -1.0]]), [1]);
        assert_eq!(selected(1, &[&[0.0, 1.0, f32::NEG_INFINITY], &[f32::INFINITY, 1.0, 0.0]]), [0, 1]);
        assert_eq!(selected(3, &[&[0.0, 1.0, 2.0]]), [0, 1, 2]);
    }

    #[test]
    fn logits_that_are_no_numbers_select_all() {
        assert_eq!(selected(1, &[&[0.0, f32::NAN, 1.0]]), [0, 1, 2]);
    }
}
