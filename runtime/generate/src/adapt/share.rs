//! How loaded engines share a memory limit that was lowered below what they take together: what costs least is reclaimed first.

/// The part of its reclaimable memory that an engine may keep at present.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineShare {
    /// Bytes of RAM for KV pages.
    pub kv: u64,
    /// Sequences that it runs and keeps, at least one.
    pub sequences: u64,
    /// Bytes of locked weights.
    pub locked: u64,
}

/// The memory that can be reclaimed from a loaded engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimable {
    /// Bytes of RAM for KV pages.
    pub kv: u64,
    /// Sequences that it runs and keeps.
    pub sequences: u64,
    /// Bytes of the states of one sequence.
    pub sequence: u64,
    /// Bytes of weights that are locked in memory and could be read for each pass.
    pub locked: u64,
}

impl Reclaimable {
    /// The share of an engine from which nothing is reclaimed.
    pub fn all(&self) -> EngineShare {
        EngineShare { kv: self.kv, sequences: self.sequences.max(1), locked: self.locked }
    }

    /// The bytes that a share leaves out.
    pub fn reclaimed(&self, share: &EngineShare) -> u64 {
        let sequences = self.sequences.max(1).saturating_sub(share.sequences).saturating_mul(self.sequence);
        let parts = [self.kv.saturating_sub(share.kv), sequences, self.locked.saturating_sub(share.locked)];
        parts.into_iter().fold(0, u64::saturating_add)
    }
}

/// The shares of engines from which `excess` bytes are reclaimed in all, as far as possible: KV pages first, then sequences, whose states are saved in
/// pages or computed again, and last locked weights, which then cost every pass a read.
pub fn shares(engines: &[Reclaimable], excess: u64) -> Vec<EngineShare> {
    let mut shares: Vec<EngineShare> = engines.iter().map(Reclaimable::all).collect();
    let mut excess = excess;
    let kv: Vec<u64> = engines.iter().map(|engine| engine.kv).collect();
    for (share, taken) in shares.iter_mut().zip(divide(&kv, excess)) {
        share.kv -= taken;
        excess = excess.saturating_sub(taken);
    }
    // One sequence at a time, of the engine whose sequences take most.
    while excess > 0 {
        let left = engines.iter().zip(&mut shares).filter(|(engine, share)| share.sequences > 1 && engine.sequence > 0);
        let Some((engine, share)) = left.max_by_key(|(engine, share)| share.sequences.saturating_mul(engine.sequence))
        else {
            break;
        };
        share.sequences -= 1;
        excess = excess.saturating_sub(engine.sequence);
    }
    let locked: Vec<u64> = engines.iter().map(|engine| engine.locked).collect();
    for (share, taken) in shares.iter_mut().zip(divide(&locked, excess)) {
        share.locked -= taken;
    }
    shares
}

/// Divides `taken`, at most the sum of the parts, among the parts in proportion to their sizes.
fn divide(parts: &[u64], taken: u64) -> Vec<u64> {
    let total: u128 = parts.iter().map(|part| u128::from(*part)).sum();
    let taken = u128::from(taken).min(total);
    let share = |part: &u64| (u128::from(*part) * taken).div_ceil(total.max(1)) as u64;
    parts.iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Reclaimable = Reclaimable { kv: 300, sequences: 4, sequence: 50, locked: 1000 };
    const B: Reclaimable = Reclaimable { kv: 100, sequences: 2, sequence: 60, locked: 0 };

    #[test]
    fn pages_go_before_sequences_and_those_before_locked_weights() {
        let of = |excess| shares(&[A, B], excess);
        let share = |kv, sequences, locked| EngineShare { kv, sequences, locked };
        assert_eq!(of(0), [share(300, 4, 1000), share(100, 2, 0)]);
        assert_eq!(of(40), [share(270, 4, 1000), share(90, 2, 0)]);
        assert_eq!(of(400), [share(0, 4, 1000), share(0, 2, 0)]);
        assert_eq!(of(401), [share(0, 3, 1000), share(0, 2, 0)]);
        assert_eq!(of(600), [share(0, 1, 1000), share(0, 1, 0)]);
        assert_eq!(of(700), [share(0, 1, 910), share(0, 1, 0)]);
        assert_eq!(of(u64::MAX), [share(0, 1, 0), share(0, 1, 0)], "more cannot be released");
    }

    #[test]
    fn as_much_is_reclaimed_as_was_asked_for() {
        for excess in [1, 77, 399, 555, 610, 1000, 1610] {
            let given = [A, B].into_iter().zip(shares(&[A, B], excess));
            let freed: u64 = given.map(|(has, share)| has.reclaimed(&share)).sum();
            assert!(freed >= excess && freed < excess + 60, "{freed} for {excess}");
        }
    }
}
