//! What caches of every size would have hit, from one walk over the visits: Mattson's stack distances for LRU and for the
//! best possible cache (R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9, 1970).

/// Things visited in one text, the last visited first.
#[derive(Clone, Debug, Default)]
pub(super) struct LruStack(Vec<u32>);

impl LruStack {
    /// Visits a thing; how many others were visited since its last visit, or nothing where this is its first.
    pub fn visit(&mut self, thing: u32) -> Option<usize> {
        let distance = self.0.iter().position(|other| *other == thing);
        match distance {
            Some(distance) => self.0[..=distance].rotate_right(1),
            None => self.0.insert(0, thing),
        }
        distance
    }
}

/// Hits of the best possible cache (Belady's MIN, which must take in what is visited) of 1, 2, ... `things` things, empty at
/// first, over these visits of things below `things`.
pub(super) fn oracle_hits(visits: &[u32], things: usize) -> Vec<u64> {
    let mut hits = vec![0u64; things];
    let next_visits = next_visits(visits, things);
    // When each thing is visited next, as known after the visit at hand.
    let mut next = vec![NEVER; things];
    let mut stack: Vec<u32> = Vec::with_capacity(things);
    for (visit, thing) in visits.iter().enumerate() {
        let depth = stack.iter().position(|other| other == thing);
        if let Some(depth) = depth {
            hits[depth] += 1;
        }
        next[*thing as usize] = next_visits[visit];
        rise(&mut stack, *thing, depth, &next);
    }
    for size in 1..things {
        hits[size] += hits[size - 1];
    }
    hits
}

/// The visited thing comes to the top. What lay there sinks to the place that became free, and on its way changes places
/// with whatever is needed later than it.
fn rise(stack: &mut Vec<u32>, thing: u32, depth: Option<usize>, next: &[usize]) {
    let end = depth.unwrap_or_else(|| {
        stack.push(thing);
        stack.len() - 1
    });
    let mut sinking = std::mem::replace(&mut stack[0], thing);
    if end == 0 {
        return;
    }
    for other in &mut stack[1..end] {
        if next[sinking as usize] < next[*other as usize] {
            std::mem::swap(&mut sinking, other);
        }
    }
    stack[end] = sinking;
}

const NEVER: usize = usize::MAX;

/// For each visit, the next one of the same thing.
fn next_visits(visits: &[u32], things: usize) -> Vec<usize> {
    let mut seen = vec![NEVER; things];
    let mut next = vec![NEVER; visits.len()];
    for (at, thing) in visits.iter().enumerate().rev() {
        next[at] = std::mem::replace(&mut seen[*thing as usize], at);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A cache of `size` things that drops what `worst` names, visit by visit.
    fn simulate(visits: &[u32], size: usize, worst: impl Fn(&[u32], usize) -> usize) -> u64 {
        let mut cache: Vec<u32> = Vec::new();
        let mut hits = 0;
        for (at, thing) in visits.iter().enumerate() {
            if let Some(found) = cache.iter().position(|other| other == thing) {
                hits += 1;
                cache.remove(found);
            } else if cache.len() == size {
                cache.remove(worst(&cache, at));
            }
            // The last visited is at the end.
            cache.push(*thing);
        }
        hits
    }

    fn visits() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(0..7u32, 0..60)
    }

    proptest! {
        #[test]
        fn stack_distances_are_the_hits_of_every_lru_cache(visits in visits()) {
            let mut stack = LruStack::default();
            let distances: Vec<Option<usize>> = visits.iter().map(|v| stack.visit(*v)).collect();
            for size in 1..=7 {
                let hits = distances.iter().flatten().filter(|d| **d < size).count() as u64;
                prop_assert_eq!(hits, simulate(&visits, size, |_, _| 0));
            }
        }

        #[test]
        fn the_oracle_is_belady_at_every_size(visits in visits()) {
            let hits = oracle_hits(&visits, 7);
            for size in 1..=7 {
                let farthest = |cache: &[u32], at: usize| {
                    let next = |thing: &u32| visits[at..].iter().position(|v| v == thing).unwrap_or(usize::MAX);
                    (0..cache.len()).max_by_key(|i| next(&cache[*i])).unwrap()
                };
                prop_assert_eq!(hits[size - 1], simulate(&visits, size, farthest), "size {}", size);
            }
        }
    }

    #[test]
    fn no_visits_no_hits() {
        assert_eq!(oracle_hits(&[], 3), [0, 0, 0]);
        assert_eq!(oracle_hits(&[], 0), [0u64; 0]);
    }
}
