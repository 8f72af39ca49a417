//! Which experts one layer's router selects, and how often caches of experts would hit.

use super::cache_hits::{LruStack, oracle_hits};
use super::rows::{indices, wrong};
use hpp_engine::{EngineError, HostTensor};
use hpp_schema::{ExpertStatistics, ORACLE_TOKENS};

/// The selected experts of one text.
#[derive(Clone, Debug, Default)]
pub(super) struct Experts {
    top_k: usize,
    tokens: u64,
    counts: Vec<u64>,
    stack: LruStack,
    reuse_distances: Vec<u64>,
    first_visits: u64,
    /// Accesses since the last window of the oracle.
    accesses: Vec<u32>,
    oracle_hits: Vec<u64>,
    chosen: Vec<u32>,
}

impl Experts {
    /// Adds tokens, each a row with one router score per expert, and selects the `top_k` best experts. A row with fewer than `top_k` scores that are
    /// numbers selects none.
    pub fn add_scores<'a>(
        &mut self,
        name: &str,
        rows: impl Iterator<Item = &'a [f32]>,
        experts: usize,
        top_k: usize,
    ) -> Result<(), EngineError> {
        self.expect(name, experts, top_k)?;
        for row in rows {
            let mut chosen = std::mem::take(&mut self.chosen);
            best(row, top_k, &mut chosen);
            if chosen.len() == top_k {
                self.select(&chosen);
            }
            self.chosen = chosen;
        }
        Ok(())
    }

    /// Adds the last `tokens` tokens by the indices of their experts, the best first.
    pub fn add_indices(
        &mut self,
        name: &str,
        tensor: &HostTensor,
        tokens: usize,
        experts: usize,
    ) -> Result<(), EngineError> {
        let (indices, top_k) = indices(name, tensor, tokens)?;
        self.expect(name, experts, top_k)?;
        for row in indices.chunks_exact(top_k) {
            let mut chosen = std::mem::take(&mut self.chosen);
            chosen.clear();
            for index in row {
                let expert = u32::try_from(*index).ok().filter(|expert| (*expert as usize) < experts);
                chosen.push(expert.ok_or_else(|| wrong(name, format!("it names expert {index} of {experts}")))?);
            }
            self.select(&chosen);
            self.chosen = chosen;
        }
        Ok(())
    }

    fn expect(&mut self, name: &str, experts: usize, top_k: usize) -> Result<(), EngineError> {
        if top_k == 0 || top_k > experts {
            return Err(wrong(name, format!("it selects {top_k} of {experts} experts")));
        }
        if self.counts.is_empty() {
            (self.top_k, self.counts, self.oracle_hits) = (top_k, vec![0; experts], vec![0; experts]);
        }
        match (self.counts.len(), self.top_k) == (experts, top_k) {
            true => Ok(()),
            false => Err(wrong(name, "the number of experts changed".into())),
        }
    }

    fn select(&mut self, experts: &[u32]) {
        self.tokens += 1;
        for expert in experts {
            self.counts[*expert as usize] += 1;
            match self.stack.access(*expert) {
                None => self.first_visits += 1,
                Some(distance) => {
                    if self.reuse_distances.len() <= distance {
                        self.reuse_distances.resize(distance + 1, 0);
                    }
                    self.reuse_distances[distance] += 1;
                }
            }
        }
        self.accesses.extend_from_slice(experts);
        if self.tokens.is_multiple_of(ORACLE_TOKENS) {
            self.run_oracle();
        }
    }

    fn run_oracle(&mut self) {
        let hits = oracle_hits(&self.accesses, self.counts.len());
        self.oracle_hits.iter_mut().zip(hits).for_each(|(sum, hits)| *sum += hits);
        self.accesses.clear();
    }

    /// The record for a profile, at the end of the text.
    pub fn statistics(mut self, block: &str) -> ExpertStatistics {
        self.run_oracle();
        ExpertStatistics {
            block: block.to_owned(),
            top_k: self.top_k as u32,
            tokens: self.tokens,
            counts: self.counts,
            reuse_distances: self.reuse_distances,
            first_visits: self.first_visits,
            oracle_hits: self.oracle_hits,
        }
    }
}

/// Positions of the `count` largest numbers, the largest first and the first of equals; fewer if there are fewer numbers.
fn best(scores: &[f32], count: usize, chosen: &mut Vec<u32>) {
    chosen.clear();
    for (position, score) in scores.iter().enumerate().filter(|(_, score)| !score.is_nan()) {
        let rank = chosen.iter().position(|other| scores[*other as usize] < *score).unwrap_or(chosen.len());
        if rank < count {
            chosen.truncate(count - 1);
            chosen.insert(rank, position as u32);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_first_and_the_first_of_equals() {
        let mut chosen = vec![9];
        let mut of = |scores: &[f32], count| {
            best(scores, count, &mut chosen);
            chosen.clone()
        };
        assert_eq!(of(&[0.1, 0.9, 0.5, 0.9], 3), [1, 3, 2]);
        assert_eq!(of(&[f32::NAN, f32::NEG_INFINITY, -1.0], 2), [2, 1]);
        assert_eq!(of(&[f32::NAN, 1.0], 2), [1]);
        assert_eq!(of(&[1.0, 1.0, 1.0], 1), [0]);
    }

    #[test]
    fn scores_and_indices_give_the_same_statistics() {
        let scores = [[0.0f32, 3.0, 1.0, 2.0], [5.0, 0.0, 0.0, 6.0], [0.0, 3.0, 1.0, 2.0]];
        let mut by_scores = Experts::default();
        by_scores.add_scores("s", scores.iter().map(|row| &row[..]), 4, 2).unwrap();
        let mut by_indices = Experts::default();
        let chosen = HostTensor::from_i64(&[4, 2], &[0, 0, 1, 3, 3, 0, 1, 3]);
        by_indices.add_indices("i", &chosen, 3, 4).unwrap();
        let (a, b) = (by_scores.statistics("b"), by_indices.statistics("b"));
        assert_eq!(a, b);
        assert_eq!((a.tokens, a.top_k, &a.counts[..], a.first_visits), (3, 2, &[1, 2, 0, 3][..], 3));
        // The accesses of three tokens: 1 3, then 3 0, then 1 3. Reused are 3 at once, 1 after two others (3 and 0), and 3 after two others (0 and
        // 1).
        assert_eq!(a.reuse_distances, [1, 0, 2]);
        assert_eq!(a.oracle_hits, [1, 2, 3, 3]);
    }

    #[test]
    fn rows_of_nan_select_no_expert() {
        let mut experts = Experts::default();
        let rows = [[f32::NAN, 1.0], [0.0, 1.0]];
        experts.add_scores("s", rows.iter().map(|row| &row[..]), 2, 2).unwrap();
        let s = experts.statistics("b");
        assert_eq!((s.tokens, s.counts), (1, vec![1, 1]));
    }

    #[test]
    fn experts_out_of_range_are_refused() {
        let bad = HostTensor::from_i64(&[1, 1], &[4]);
        assert!(Experts::default().add_indices("i", &bad, 1, 4).unwrap_err().to_string().contains("expert 4 of 4"));
        assert!(Experts::default().add_scores("s", [].into_iter(), 2, 3).is_err());
    }

    #[test]
    fn the_oracle_starts_again_after_its_window() {
        let mut experts = Experts::default();
        let row = [1.0f32, 0.0];
        let rows = std::iter::repeat_n(&row[..], ORACLE_TOKENS as usize + 2);
        experts.add_scores("s", rows, 2, 1).unwrap();
        let s = experts.statistics("b");
        assert_eq!((s.first_visits, s.reuse_distances), (1, vec![ORACLE_TOKENS + 1]));
        assert_eq!(s.oracle_hits, [ORACLE_TOKENS, ORACLE_TOKENS], "one miss in each of two windows");
    }
}
