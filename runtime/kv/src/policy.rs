//! Eviction policies: the value of a page. The page with the least value is evicted first.

use std::fmt;
use std::str::FromStr;

/// Seconds after which a use counts half.
const HALF_LIFE: f64 = 1800.0;
/// The weight of the latest page in the usual time of computing a page.
const COST_WEIGHT: f64 = 1.0 / 16.0;
/// Times that differ from the usual one by less than this factor count as the usual one. Generated tokens take 10 to 100 times as long as those of
/// a prompt.
const LIKE_USUAL: f64 = 3.0;
/// The least time of a page, milliseconds.
const LEAST_COST_MS: f64 = 0.001;
/// Added to the age of a page, so that the last seconds do not decide everything.
const LEAST_AGE: f64 = 30.0;

/// The facts about a page that policies use.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PageFacts {
    /// When it was used last, seconds since the store was opened; negative for pages of an earlier run.
    pub last_used: f64,
    /// How often it was used. Up to `last_used`, each use has lost half of its weight every half hour.
    pub uses: f64,
    /// The time of computing it again, milliseconds.
    pub cost_ms: f64,
    /// The priority of the most important request that used it.
    pub priority: i32,
}

impl PageFacts {
    /// Notes a use.
    pub fn touch(&mut self, now: f64, priority: i32) {
        self.uses = 1.0 + self.uses * decay(now - self.last_used);
        self.last_used = now;
        self.priority = self.priority.max(priority);
    }
}

/// The usual time of computing a page. Measured times vary with what else the machine does. If small differences decided, pages of all
/// conversations would be evicted in turn, and no conversation would stay whole.
#[derive(Clone, Copy, Debug, Default)]
pub struct UsualCost {
    /// The logarithm of the milliseconds; `None` before the first page.
    log_ms: Option<f64>,
}

impl UsualCost {
    /// Notes the time of a page, milliseconds.
    pub fn note(&mut self, cost_ms: f64) {
        let log = cost_ms.max(LEAST_COST_MS).ln();
        self.log_ms = Some(self.log_ms.map_or(log, |before| before + COST_WEIGHT * (log - before)));
    }

    /// A time to compare pages by: the usual one for all that are near it.
    pub fn comparable(self, cost_ms: f64) -> f64 {
        let usual = self.log_ms.map_or(cost_ms, f64::exp);
        if (usual / LIKE_USUAL..=usual * LIKE_USUAL).contains(&cost_ms) { usual } else { cost_ms }
    }
}

/// Which pages are evicted first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// The least recently used.
    Lru,
    /// Those of the least important requests, and of these the least recently used.
    Priority,
    /// Those with the least expected cost of a miss: the time to compute them again, times their uses relative to their
    /// age, times two for each step of priority.
    #[default]
    Hybrid,
}

impl EvictionPolicy {
    /// The names in flags.
    pub const NAMES: [(&'static str, EvictionPolicy); 3] =
        [("lru", EvictionPolicy::Lru), ("priority", EvictionPolicy::Priority), ("hybrid", EvictionPolicy::Hybrid)];

    /// The value of a page; the page with the least value is evicted first, and of pages with equal values the later one of a sequence.
    pub fn value(self, facts: &PageFacts, now: f64) -> f64 {
        match self {
            EvictionPolicy::Lru => facts.last_used,
            // Recency only orders within a priority: no store lives 10^10 seconds.
            EvictionPolicy::Priority => f64::from(facts.priority) * 1e10 + facts.last_used,
            EvictionPolicy::Hybrid => {
                let age = (now - facts.last_used).max(0.0);
                let importance = 2f64.powi(facts.priority.clamp(-30, 30));
                importance * facts.cost_ms.max(LEAST_COST_MS) * (facts.uses * decay(age) + 0.1) / (age + LEAST_AGE)
            }
        }
    }
}

fn decay(seconds: f64) -> f64 {
    (-seconds.max(0.0) / HALF_LIFE).exp2()
}

impl FromStr for EvictionPolicy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = EvictionPolicy::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, policy)| *policy).ok_or_else(|| "expected lru, priority or hybrid".to_owned())
    }
}

impl fmt::Display for EvictionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = EvictionPolicy::NAMES.iter().find(|(_, policy)| policy == self).map_or("", |(name, _)| name);
        f.write_str(name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(last_used: f64, uses: f64, priority: i32) -> PageFacts {
        PageFacts { last_used, uses, cost_ms: 100.0, priority }
    }

    #[test]
    fn policies_differ_in_what_they_count() {
        let (old_and_often, new_and_once, old_and_important) =
            (facts(0.0, 20.0, 0), facts(90.0, 1.0, 0), facts(10.0, 1.0, 3));
        let worth = |policy: EvictionPolicy, facts| policy.value(&facts, 100.0);
        assert!(worth(EvictionPolicy::Lru, new_and_once) > worth(EvictionPolicy::Lru, old_and_important));
        assert!(worth(EvictionPolicy::Priority, old_and_important) > worth(EvictionPolicy::Priority, new_and_once));
        assert!(worth(EvictionPolicy::Hybrid, old_and_often) > worth(EvictionPolicy::Hybrid, new_and_once));
        assert!(worth(EvictionPolicy::Hybrid, old_and_important) > worth(EvictionPolicy::Hybrid, facts(10.0, 1.0, 0)));
        let cheap = PageFacts { cost_ms: 1.0, ..new_and_once };
        assert!(worth(EvictionPolicy::Hybrid, new_and_once) > worth(EvictionPolicy::Hybrid, cheap));
        let mut used = facts(0.0, 4.0, 0);
        used.touch(1800.0, 1);
        assert_eq!(used, PageFacts { last_used: 1800.0, uses: 3.0, cost_ms: 100.0, priority: 1 });
        for (name, policy) in EvictionPolicy::NAMES {
            assert_eq!((name.parse(), policy.to_string()), (Ok(policy), name.to_owned()));
        }
        assert!("best".parse::<EvictionPolicy>().is_err());
    }
}
