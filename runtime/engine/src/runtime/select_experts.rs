//! Which experts a pass selects: computed from the router's logits as the kernel of the mixture does, or read from scores or numbers.

use super::Runtime;
use super::pass::PassItem;
use crate::error::EngineError;
use crate::ids::{BoundaryId, StageId};
use crate::port::Backend;
use crate::program::{Program, Routing};
use crate::telemetry::Phase;
use crate::tensor::floats_to_f32;
use hpp_schema::SelectedBy;
use std::cmp::Ordering;
use std::collections::BTreeSet;

/// A difference of two logits that is so large that rounding cannot reverse the order of their probabilities: the difference to the largest logit,
/// at most [`UNDERFLOW_GAP`], is rounded to 24 bits (5e-6), and exponential and quotient to a few units in the last place (5e-7).
const ROUNDING_MARGIN: f32 = 1e-4;
/// From this difference to the largest logit on, a probability is too small to be compared: it is e^-80 = 2e-35 of the largest, near the smallest
/// normal float32, 1e-38, below which it loses bits and becomes zero.
const UNDERFLOW_GAP: f32 = 80.0;

impl<B: Backend> Runtime<B> {
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

    /// While a stage runs, whose experts are in memory, starts to read ahead one expert that a later stage probably selects.
    pub(super) fn read_experts_ahead(
        &mut self,
        program: &Program,
        items: &[PassItem<'_, B>],
        stage: StageId,
        phases: &[Phase],
    ) {
        let Some(next) = program.stages[stage].routing.and_then(|routing| routing.next) else { return };
        let later = self.route[phases[0]][next.partition];
        let Some(routing) = program.stages[later].routing.filter(|_| self.weights.disk.reads_ahead(later)) else {
            return;
        };
        let mut rankings = Vec::new();
        for item in items.iter().filter(|item| item.runs_in(phases)) {
            // A prediction that cannot be read changes no answer.
            let Ok(logits) = self.logits_in_lane(next.router, routing.count, item.sequence.lane) else { return };
            rankings.extend(logits.chunks_exact(routing.count).map(|row| likeliest(row, routing.active.div_ceil(2))));
        }
        self.weights.disk.read_ahead(later, &by_rank(&rankings));
    }

    fn select_in_lane(&self, routing: Routing, lane: usize, selected: &mut [bool]) -> Result<(), EngineError> {
        let Some(select) = row_selection(routing.selected_by) else {
            let boundaries = &self.lanes[lane].boundaries;
            let value = boundaries.read(routing.router, &self.pool)?;
            return select_numbers(&value.bytes, selected).ok_or_else(|| EngineError::WrongOutput {
                name: boundaries.name(routing.router).to_owned(),
                why: format!("its numbers are not those of {} experts", routing.count),
            });
        };
        let logits = self.logits_in_lane(routing.router, routing.count, lane)?;
        logits.chunks_exact(routing.count).for_each(|row| select(row, routing.active, selected));
        Ok(())
    }

    /// The logits of a router: `count` for each token.
    fn logits_in_lane(&self, router: BoundaryId, count: usize, lane: usize) -> Result<Vec<f32>, EngineError> {
        let boundaries = &self.lanes[lane].boundaries;
        let value = boundaries.read(router, &self.pool)?;
        let mut logits = Vec::new();
        let is_float = floats_to_f32(value.dtype, &value.bytes, &mut logits);
        if !is_float || !logits.len().is_multiple_of(count) {
            return Err(EngineError::WrongOutput {
                name: boundaries.name(router).to_owned(),
                why: format!("its {} elements are not {count} logits for each token", logits.len()),
            });
        }
        Ok(logits)
    }
}

/// The `count` experts with the largest logits, the largest first; none where a logit is not a number. Predictions of experts with smaller logits
/// are more often wrong.
fn likeliest(logits: &[f32], count: usize) -> Vec<u32> {
    if has_no_order(logits) {
        return Vec::new();
    }
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_unstable_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(b.cmp(a)));
    order.truncate(count);
    order
}

/// The experts of several rankings, each once: the first of every ranking, then the second of every ranking, and so on.
fn by_rank(rankings: &[Vec<u32>]) -> Vec<u32> {
    let longest = rankings.iter().map(Vec::len).max().unwrap_or(0);
    let mut seen = BTreeSet::new();
    let ranks = (0..longest).flat_map(|rank| rankings.iter().filter_map(move |ranking| ranking.get(rank).copied()));
    ranks.filter(|expert| seen.insert(*expert)).collect()
}

/// Marks the experts with these numbers, as int64; `None` if there is no such expert.
fn select_numbers(bytes: &[u8], selected: &mut [bool]) -> Option<()> {
    let (numbers, []) = bytes.as_chunks() else { return None };
    numbers.iter().try_for_each(|number| {
        let number = usize::try_from(i64::from_ne_bytes(*number)).ok()?;
        *selected.get_mut(number)? = true;
        Some(())
    })
}

/// The indices of the selected experts.
fn indices(selected: &[bool]) -> Vec<u32> {
    (0u32..).zip(selected).filter(|(_, selected)| **selected).map(|(expert, _)| expert).collect()
}

/// Marks the experts that a token with these logits or scores selects, or may select where rounding decides; with logits, as many as a
/// token selects. A token whose logits cannot be ordered may select any expert.
type RowSelection = fn(&[f32], usize, &mut [bool]);

/// How a token's row of floats selects experts; `None` where the router gives their numbers instead.
fn row_selection(selected_by: SelectedBy) -> Option<RowSelection> {
    match selected_by {
        SelectedBy::Logits => Some(select_by_logit),
        SelectedBy::Probabilities => Some(select_by_probability),
        SelectedBy::Scores => Some(select_by_score),
        SelectedBy::Weights => Some(select_by_weight),
        SelectedBy::Numbers => None,
    }
}

/// Marks the experts whose score is not zero. NaN is not zero either: the condition of the expert is the sum of absolute values.
fn select_by_score(scores: &[f32], _: usize, selected: &mut [bool]) {
    scores.iter().zip(selected).for_each(|(score, selected)| *selected |= *score != 0.0);
}

/// Marks the experts with the largest logits; of equal logits those with the larger index, as ONNX Runtime sorts pairs of logit and index
/// (`moe_quantization_cpu.cc`).
fn select_by_logit(logits: &[f32], active: usize, selected: &mut [bool]) {
    if has_no_order(logits) {
        selected.fill(true);
        return;
    }
    let mut order: Vec<usize> = (0..logits.len()).collect();
    let by_logit = |a: &usize, b: &usize| logits[*b].partial_cmp(&logits[*a]).unwrap_or(Ordering::Equal).then(b.cmp(a));
    let active = active.min(order.len());
    if active < order.len() {
        order.select_nth_unstable_by(active, by_logit);
    }
    order[..active].iter().for_each(|expert| selected[*expert] = true);
}

/// Marks the experts with the largest weights, without those of weight 0, which the kernel does not compute.
fn select_by_weight(weights: &[f32], active: usize, selected: &mut [bool]) {
    let mut largest = vec![false; weights.len()];
    select_by_logit(weights, active, &mut largest);
    let is_weighted = weights.iter().zip(largest).map(|(weight, is_largest)| is_largest && *weight != 0.0);
    selected.iter_mut().zip(is_weighted).for_each(|(selected, is_weighted)| *selected |= is_weighted);
}

/// Marks the experts whose logit is at most [`ROUNDING_MARGIN`] below the smallest of the `active` largest: ONNX Runtime sorts probabilities in
/// float32 (`moe_cpu.cc`), and rounding cannot put an expert with a smaller logit first. Marks all experts where probabilities are zero or not
/// numbers.
fn select_by_probability(logits: &[f32], active: usize, selected: &mut [bool]) {
    let mut descending = logits.to_vec();
    descending.sort_unstable_by(|a, b| b.total_cmp(a));
    let (Some(&largest), Some(&smallest)) =
        (descending.first(), descending.get(active.clamp(1, logits.len().max(1)) - 1))
    else {
        return;
    };
    if has_no_order(logits) || !largest.is_finite() || smallest < largest - UNDERFLOW_GAP {
        selected.fill(true);
        return;
    }
    for (logit, selected) in logits.iter().zip(selected) {
        *selected |= *logit >= smallest - ROUNDING_MARGIN;
    }
}

/// Whether a logit is not a number.
fn has_no_order(logits: &[f32]) -> bool {
    logits.iter().any(|logit| logit.is_nan())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selected(active: usize, rows: &[&[f32]]) -> Vec<usize> {
        select(active, SelectedBy::Logits, rows)
    }

    fn select(active: usize, selected_by: SelectedBy, rows: &[&[f32]]) -> Vec<usize> {
        let select = row_selection(selected_by).expect("rows of floats select");
        let mut selected = vec![false; rows[0].len()];
        rows.iter().for_each(|row| select(row, active, &mut selected));
        (0..selected.len()).filter(|expert| selected[*expert]).collect()
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
    fn the_likeliest_are_the_first_of_each_token() {
        let rankings = [
            likeliest(&[0.5, -1.0, 3.0, 0.25], 2),
            likeliest(&[4.0, 1.0, 1.0, 0.0], 2),
            likeliest(&[f32::NAN, 1.0], 1),
        ];
        assert_eq!(rankings, [vec![2, 0], vec![0, 2], vec![]]);
        assert_eq!(by_rank(&rankings), [2, 0]);
        assert_eq!(by_rank(&[vec![3, 1], vec![3, 0, 2]]), [3, 1, 0, 2]);
        assert!(by_rank(&[]).is_empty());
    }

    #[test]
    fn logits_that_are_no_numbers_select_all() {
        assert_eq!(selected(1, &[&[0.0, f32::NAN, 1.0]]), [0, 1, 2]);
        assert_eq!(select(1, SelectedBy::Probabilities, &[&[0.0, f32::NAN, 1.0]]), [0, 1, 2]);
        assert_eq!(select(1, SelectedBy::Probabilities, &[&[0.0, f32::INFINITY, 1.0]]), [0, 1, 2]);
    }

    #[test]
    fn scores_other_than_zero_select() {
        let select = |rows| select(1, SelectedBy::Scores, rows);
        assert_eq!(select(&[&[0.0, 0.25, -0.0, 0.75]]), [1, 3]);
        assert_eq!(select(&[&[0.0, 1e-45, 0.0], &[0.0, 0.0, 1.0]]), [1, 2]);
        assert_eq!(select(&[&[0.0, f32::NAN, 0.0]]), [1]);
        assert!(select(&[&[0.0, 0.0]]).is_empty());
    }

    #[test]
    fn the_largest_weights_select_unless_they_are_zero() {
        let select = |active, rows| select(active, SelectedBy::Weights, rows);
        assert_eq!(select(2, &[&[0.25, 0.0, 0.75, 0.0]]), [0, 2]);
        assert_eq!(select(2, &[&[0.0, 0.5, 0.0, -0.0]]), [1]);
        assert_eq!(select(2, &[&[0.5, 0.25, 0.75, 0.0], &[0.0, 0.0, 0.0, 1.0]]), [0, 2, 3]);
        assert!(select(2, &[&[0.0, 0.0]]).is_empty());
        assert_eq!(select(1, &[&[f32::NAN, 0.0, 1.0]]), [0, 2]);
    }

    #[test]
    fn numbers_select() {
        let select = |numbers: &[i64]| {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_ne_bytes()).collect();
            let mut selected = [false; 4];
            select_numbers(&bytes, &mut selected).map(|()| indices(&selected))
        };
        assert_eq!(select(&[3, 1, 1, 0]), Some(vec![0, 1, 3]));
        assert_eq!((select(&[4]), select(&[-1])), (None, None));
        assert!(row_selection(SelectedBy::Numbers).is_none());
        assert_eq!(select_numbers(&[0; 7], &mut [false; 4]), None);
    }

    #[test]
    fn by_probability_all_that_rounding_may_select_are_marked() {
        let select = |active, rows| select(active, SelectedBy::Probabilities, rows);
        assert_eq!(select(2, &[&[0.5, -1.0, 3.0, 0.25]]), [0, 2]);
        assert_eq!(select(2, &[&[1.0, 1.000001, 0.5, 0.99999]]), [0, 1, 3]);
        assert_eq!(select(2, &[&[1.0, 1.0, 1.0, 0.999]]), [0, 1, 2]);
        assert_eq!(select(3, &[&[0.0, 1.0, 2.0]]), [0, 1, 2]);
        // Probabilities of the second are zero or nearly so.
        assert_eq!(select(2, &[&[0.0, -90.0, -100.0]]), [0, 1, 2]);
        assert_eq!(select(1, &[&[0.0, -90.0, f32::NEG_INFINITY]]), [0]);
    }

    /// Probabilities as ONNX Runtime computes them: whatever it may put first is marked.
    #[test]
    fn what_a_sort_of_probabilities_puts_first_is_marked() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        for round in 0..2000 {
            // Many nearly equal logits, near and far from the largest.
            let base: f32 = if round % 2 == 0 { 0.0 } else { -75.0 * random() };
            let mut logits: Vec<f32> = (0..16).map(|_| base + 1e-6 * random()).collect();
            logits[0] = 0.0;
            let exponentials: Vec<f32> = logits.iter().map(|logit| logit.exp()).collect();
            let sum: f32 = exponentials.iter().sum();
            let mut sorted: Vec<(f32, usize)> = exponentials.iter().map(|value| value / sum).zip(0..).collect();
            sorted.sort_unstable_by(|a, b| b.partial_cmp(a).unwrap());
            let marked = select(4, SelectedBy::Probabilities, &[&logits]);
            assert!(sorted[..4].iter().all(|(_, expert)| marked.contains(expert)), "{logits:?}");
        }
    }
}
