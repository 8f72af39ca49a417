//! Hit counts of caches of every size from one pass over the accesses: Mattson's stack distances for LRU and for the optimal cache
//! (R. L. Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9, 1970).

/// Items accessed in one text, the most recently used first.
#[derive(Clone, Debug, Default)]
pub(super) struct LruStack(Vec<u32>);

impl LruStack {
    /// Accesses an item. Returns the number of other items accessed since its last access; `None` at its first.
    pub fn access(&mut self, item: u32) -> Option<usize> {
        let distance = self.0.iter().position(|other| *other == item);
        match distance {
            Some(distance) => self.0[..=distance].rotate_right(1),
            None => self.0.insert(0, item),
        }
        distance
    }
}

/// Hits of the optimal cache (Belady's MIN without bypass: every accessed item enters the cache) of 1, 2, ... `items` items, empty at
/// first. `accesses` are items below `items`.
pub(super) fn oracle_hits(accesses: &[u32], items: usize) -> Vec<u64> {
    let mut hits = vec![0u64; items];
    let next_accesses = next_accesses(accesses, items);
    // The next access of each item, as of the current access.
    let mut next = vec![NEVER; items];
    let mut stack: Vec<u32> = Vec::with_capacity(items);
    for (access, item) in accesses.iter().enumerate() {
        let depth = stack.iter().position(|other| other == item);
        if let Some(depth) = depth {
            hits[depth] += 1;
        }
        next[*item as usize] = next_accesses[access];
        move_to_top(&mut stack, *item, depth, &next);
    }
    for size in 1..items {
        hits[size] += hits[size - 1];
    }
    hits
}

/// Moves the accessed item to the top of the priority stack. The former top moves down to the free position; on the way it is exchanged
/// with every item whose next access is later.
fn move_to_top(stack: &mut Vec<u32>, item: u32, depth: Option<usize>, next: &[usize]) {
    let end = depth.unwrap_or_else(|| {
        stack.push(item);
        stack.len() - 1
    });
    let mut sinking = std::mem::replace(&mut stack[0], item);
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

/// For each access, the position of the next access of the same item.
fn next_accesses(accesses: &[u32], items: usize) -> Vec<usize> {
    let mut seen = vec![NEVER; items];
    let mut next = vec![NEVER; accesses.len()];
    for (position, item) in accesses.iter().enumerate().rev() {
        next[position] = std::mem::replace(&mut seen[*item as usize], position);
    }
    next
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A cache of `size` items that evicts the item at the position that `victim` returns.
    fn simulate(accesses: &[u32], size: usize, victim: impl Fn(&[u32], usize) -> usize) -> u64 {
        let mut cache: Vec<u32> = Vec::new();
        let mut hits = 0;
        for (at, item) in accesses.iter().enumerate() {
            if let Some(found) = cache.iter().position(|other| other == item) {
                hits += 1;
                cache.remove(found);
            } else if cache.len() == size {
                cache.remove(victim(&cache, at));
            }
            // The most recently used item is at the end.
            cache.push(*item);
        }
        hits
    }

    fn accesses() -> impl Strategy<Value = Vec<u32>> {
        proptest::collection::vec(0..7u32, 0..60)
    }

    proptest! {
        #[test]
        fn stack_distances_are_the_hits_of_every_lru_cache(accesses in accesses()) {
            let mut stack = LruStack::default();
            let distances: Vec<Option<usize>> = accesses.iter().map(|v| stack.access(*v)).collect();
            for size in 1..=7 {
                let hits = distances.iter().flatten().filter(|d| **d < size).count() as u64;
                prop_assert_eq!(hits, simulate(&accesses, size, |_, _| 0));
            }
        }

        #[test]
        fn oracle_hits_are_those_of_beladys_algorithm_at_every_size(accesses in accesses()) {
            let hits = oracle_hits(&accesses, 7);
            for size in 1..=7 {
                let farthest = |cache: &[u32], at: usize| {
                    let next = |item: &u32| accesses[at..].iter().position(|v| v == item).unwrap_or(usize::MAX);
                    (0..cache.len()).max_by_key(|i| next(&cache[*i])).unwrap()
                };
                prop_assert_eq!(hits[size - 1], simulate(&accesses, size, farthest), "size {}", size);
            }
        }
    }

    #[test]
    fn without_accesses_there_are_no_hits() {
        assert_eq!(oracle_hits(&[], 3), [0, 0, 0]);
        assert_eq!(oracle_hits(&[], 0), [0u64; 0]);
    }
}
