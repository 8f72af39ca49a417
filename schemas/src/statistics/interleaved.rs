//! Computes hit rates of an expert cache that several sequences share, from the statistics of single sequences.
//!
//! Statistics of several sequences at once are not recorded, because they would depend on which sequences run together. A sequence hits more often
//! than the popularity of its experts explains, because consecutive tokens select similar experts. Other sequences help it only as far as all
//! prefer the same experts. So a window of tokens is described by two numbers of independent draws by popularity p: how many draws visit as many
//! distinct experts as the window, and after how many draws the next expert has been visited as often (`recent`). With `n` sequences and a cache of
//! `c` experts,
//!
//! - the windows of all sequences together visit `c` experts: `sum(1 - (1 - p)^draws) = c`. The window of one sequence has `draws / n` draws;
//! - the window of one sequence visits `c_1 = sum(1 - (1 - p)^(draws / n))` experts. An LRU cache of `c_1` experts hits the recorded share `H(c_1)`
//!   of the visits of one sequence. `recent` draws would hit as often: `sum(w (1 - p)^recent) = 1 - H(c_1)`, with `w` the share of an expert in all
//!   visits;
//! - a visit misses if neither its own sequence nor another one visited the expert: `sum(w (1 - p)^(recent + draws (n - 1) / n))`.
//!
//! Denning's working sets and Che's approximation relate the size of an LRU cache to its hits by such windows (Che, Tung and Wang, "Hierarchical
//! web caching systems", IEEE JSAC 20, 2002). If tokens select independently, `recent` is `draws / n`, and any number of sequences hits as often as
//! one.

use super::ExpertStatistics;

/// More draws than any window has: they visit every expert with a measurable popularity.
const MOST_DRAWS: f64 = 1e9;
/// How often the interval in which a number of draws is searched is halved: to less than a ten-thousandth of it.
const HALVINGS: usize = 14;

impl ExpertStatistics {
    /// The hit rate of an LRU cache of `experts` experts that several sequences share, their tokens in turn: one entry for each number in
    /// `sequences`. `None` without visits.
    pub fn shared_lru_hit_rates(&self, experts: usize, sequences: &[u64]) -> Option<Vec<f64>> {
        let alone = self.lru_hit_rate(experts)?;
        let visited = self.counts.iter().filter(|count| **count > 0).count();
        if experts == 0 || experts >= visited {
            return Some(vec![alone; sequences.len()]);
        }
        let popularity = Popularity::of(self);
        let draws = popularity.draws(|draws| popularity.distinct(draws) < experts as f64);
        let shared = |sequences: &u64| {
            if *sequences < 2 {
                return Some(alone);
            }
            let of_one = draws / *sequences as f64;
            let misses_of_one = 1.0 - self.interpolated_hit_rate(popularity.distinct(of_one))?;
            let recent = popularity.draws(|draws| popularity.unvisited(draws) > misses_of_one);
            Some(1.0 - popularity.unvisited(recent + draws - of_one))
        };
        sequences.iter().map(shared).collect()
    }

    /// The hit rate of a cache of `experts` experts, interpolated between whole numbers.
    fn interpolated_hit_rate(&self, experts: f64) -> Option<f64> {
        let below = experts as usize;
        let (less, more) = (self.lru_hit_rate(below)?, self.lru_hit_rate(below + 1)?);
        Some(less + (more - less) * (experts - below as f64))
    }
}

/// How often tokens select each expert.
struct Popularity {
    /// The logarithm of the probability that a token does not select it.
    log_unselected: Vec<f64>,
    /// Its share of all visits.
    of_visits: Vec<f64>,
}

impl Popularity {
    fn of(statistics: &ExpertStatistics) -> Self {
        let share = |whole: u64| statistics.counts.iter().map(move |count| *count as f64 / whole.max(1) as f64);
        // Never minus infinity: for an expert that all tokens select, 0 draws times minus infinity would be NaN.
        let log_unselected = share(statistics.tokens).map(|selected| (1.0 - selected).max(f64::MIN_POSITIVE).ln());
        Popularity { log_unselected: log_unselected.collect(), of_visits: share(statistics.visits()).collect() }
    }

    /// Expected number of distinct experts among this many draws.
    fn distinct(&self, draws: f64) -> f64 {
        self.log_unselected.iter().map(|log| 1.0 - (draws * log).exp()).sum()
    }

    /// The probability that the expert of a visit is not among this many draws.
    fn unvisited(&self, draws: f64) -> f64 {
        let both = self.of_visits.iter().zip(&self.log_unselected);
        both.map(|(share, log)| share * (draws * log).exp()).sum()
    }

    /// The number of draws up to which `holds` is true.
    fn draws(&self, holds: impl Fn(f64) -> bool) -> f64 {
        let (mut low, mut high) = (0.0, 1.0);
        while holds(high) && high < MOST_DRAWS {
            (low, high) = (high, high * 2.0);
        }
        for _ in 0..HALVINGS {
            let middle = (low + high) / 2.0;
            if holds(middle) { low = middle } else { high = middle }
        }
        low
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random numbers that are the same in every run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: usize) -> usize {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (self.0 >> 33) as usize % limit
        }
    }

    const EXPERTS: usize = 32;
    const TOKENS: usize = 400;

    /// Sequences whose tokens select one expert each. With a probability of `local` in 16, a token selects one of four experts that its sequence
    /// prefers, else any expert. With `skewed`, experts with small numbers are more likely in both cases.
    fn sequences(local: usize, skewed: bool, count: usize) -> Vec<Vec<usize>> {
        let mut random = Random(7);
        let any = |random: &mut Random| match skewed {
            true => random.below(EXPERTS).min(random.below(EXPERTS)).min(random.below(EXPERTS)),
            false => random.below(EXPERTS),
        };
        (0..count)
            .map(|_| {
                let preferred: [usize; 4] = std::array::from_fn(|_| any(&mut random));
                let select = |_| match random.below(16) < local {
                    true => preferred[random.below(4)],
                    false => any(&mut random),
                };
                (0..TOKENS).map(select).collect()
            })
            .collect()
    }

    /// The number of visits by reuse distance, and the number of first visits.
    fn reuse_distances(visits: impl Iterator<Item = usize>) -> (Vec<u64>, u64) {
        let (mut stack, mut distances, mut first) = (Vec::<usize>::new(), vec![0; EXPERTS], 0);
        for expert in visits {
            match stack.iter().position(|other| *other == expert) {
                None => first += 1,
                Some(distance) => {
                    distances[distance] += 1;
                    stack.remove(distance);
                }
            }
            stack.insert(0, expert);
        }
        (distances, first)
    }

    fn statistics(sequences: &[Vec<usize>]) -> ExpertStatistics {
        let mut statistics = ExpertStatistics {
            block: "layers.0".into(),
            top_k: 1,
            tokens: (sequences.len() * TOKENS) as u64,
            counts: vec![0; EXPERTS],
            reuse_distances: vec![0; EXPERTS],
            first_visits: 0,
            oracle_hits: vec![],
        };
        for sequence in sequences {
            sequence.iter().for_each(|expert| statistics.counts[*expert] += 1);
            let (distances, first) = reuse_distances(sequence.iter().copied());
            statistics.reuse_distances.iter_mut().zip(distances).for_each(|(sum, more)| *sum += more);
            statistics.first_visits += first;
        }
        statistics
    }

    /// The hit rate of a cache of this many experts that groups of `count` sequences share.
    fn replayed(sequences: &[Vec<usize>], count: usize, experts: usize) -> f64 {
        let (mut hits, mut visits) = (0, 0);
        for group in sequences.chunks_exact(count) {
            let in_turn = (0..TOKENS).flat_map(|token| group.iter().map(move |sequence| sequence[token]));
            let (distances, _) = reuse_distances(in_turn);
            hits += distances[..experts].iter().sum::<u64>();
            visits += (count * TOKENS) as u64;
        }
        hits as f64 / visits as f64
    }

    #[test]
    fn sequences_in_turn_hit_as_often_as_predicted() {
        for (local, skewed) in [(0, false), (0, true), (8, false), (8, true), (14, false), (14, true)] {
            let sequences = sequences(local, skewed, 32);
            let statistics = statistics(&sequences);
            for (count, experts) in [(1, 8), (2, 4), (2, 8), (4, 8), (4, 16), (8, 8), (8, 24)] {
                let (measured, predicted) = (
                    replayed(&sequences, count, experts),
                    statistics.shared_lru_hit_rates(experts, &[count as u64]).unwrap()[0],
                );
                let case = format!("local {local}/16, skewed {skewed}, {count} sequences, {experts} experts");
                assert!(
                    (measured - predicted).abs() < 0.09,
                    "{case}: {measured:.3} measured, {predicted:.3} predicted"
                );
            }
        }
    }

    #[test]
    fn sequences_that_prefer_experts_of_their_own_evict_each_other_s() {
        let sequences = sequences(14, false, 32);
        let statistics = statistics(&sequences);
        let hits = statistics.shared_lru_hit_rates(8, &[1, 4]).unwrap();
        assert!(hits[0] > 0.85 && hits[1] < 0.65, "alone and with four: {hits:?}");
        assert_eq!(statistics.shared_lru_hit_rates(0, &[4]), Some(vec![0.0]));
        assert_eq!(
            statistics.shared_lru_hit_rates(EXPERTS, &[4]).map(|hits| hits[0]),
            statistics.lru_hit_rate(EXPERTS)
        );
        // One expert that all tokens select.
        let mut constant = ExpertStatistics { tokens: 5, counts: vec![5, 2, 1], ..statistics.clone() };
        (constant.reuse_distances, constant.first_visits) = (vec![3, 2], 3);
        assert!(constant.shared_lru_hit_rates(1, &[2]).unwrap()[0].is_finite());
        let empty = ExpertStatistics { tokens: 0, counts: vec![0; 4], ..statistics };
        assert_eq!(empty.shared_lru_hit_rates(2, &[4]), None);
    }
}
