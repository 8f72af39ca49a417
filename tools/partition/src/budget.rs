//! Memory budgets: what a placement needs on each device, and what to say when it does not fit.

use crate::{Block, Place};
use hpp_schema::ByteSize;
use std::collections::BTreeSet;

/// The limits a placement keeps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    /// Device memory of each GPU, bytes; empty when there is none.
    pub vram: Vec<u64>,
    /// Host memory, bytes, where a limit was asked for.
    pub ram: Option<u64>,
    /// Device memory left unused on each GPU, bytes.
    pub margin: u64,
    /// Where state lies.
    pub kv: KvHome,
    /// Host memory that the process and reading ahead take where weights are read from disk, bytes.
    pub reading: u64,
}

/// Where the state of a GPU's blocks lies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvHome {
    /// On the device that computes.
    #[default]
    Device,
    /// On the host; the device holds one block's at a time.
    Host,
}

/// What a set of blocks needs on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Weights, each counted once.
    pub weights: u64,
    /// State.
    pub kv: u64,
    /// Activations: the largest block's, because blocks run one after another.
    pub workspace: u64,
    /// Slots for streamed weights.
    pub ring: u64,
}

impl Demand {
    /// What these blocks need together.
    pub fn of<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Demand {
        let mut seen = BTreeSet::new();
        let mut demand = Demand::default();
        for block in blocks {
            demand.weights += block.weights.iter().filter(|(key, _)| seen.insert(*key)).map(|(_, b)| b).sum::<u64>();
            demand.kv += block.kv_bytes;
            demand.workspace = demand.workspace.max(block.workspace_bytes);
        }
        demand
    }

    /// All of it.
    pub fn total(self) -> u64 {
        self.weights.saturating_add(self.kv).saturating_add(self.workspace).saturating_add(self.ring)
    }
}

/// A placement does not fit, with the numbers a person needs to mend it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{place} needs {} but may use {}: weights {}, KV {}, workspace {}, {}margin {}",
    ByteSize(demand.total().saturating_add(*margin)).human(), ByteSize(*budget).human(), ByteSize(demand.weights).human(),
    ByteSize(demand.kv).human(), ByteSize(demand.workspace).human(), ring(demand), ByteSize(*margin).human()
)]
pub struct NoFit {
    /// The device that is too small.
    pub place: Place,
    /// What the blocks placed there need.
    pub demand: Demand,
    /// What may be used.
    pub budget: u64,
    /// Part of the budget that must stay unused.
    pub margin: u64,
}

/// The slots of a ring, where there is one.
fn ring(demand: &Demand) -> String {
    if demand.ring == 0 { String::new() } else { format!("slots {}, ", ByteSize(demand.ring).human()) }
}

impl NoFit {
    /// Refuses a demand beyond what may be used.
    pub(crate) fn unless(place: Place, demand: Demand, budget: u64, margin: u64) -> Result<(), NoFit> {
        match demand.total().saturating_add(margin) > budget {
            true => Err(NoFit { place, demand, budget, margin }),
            false => Ok(()),
        }
    }

    /// The smallest budget of this device under which this placement fits, bytes.
    pub fn smallest(&self) -> u64 {
        self.demand.total().saturating_add(self.margin)
    }
}

/// What `places` puts on one device.
pub fn demand(blocks: &[Block], places: &[Place], place: Place, kv: KvHome) -> Demand {
    let there = || blocks.iter().zip(places).filter(|(_, p)| **p == place).map(|(block, _)| block);
    let demand = Demand::of(there());
    let kv = match (kv, place) {
        (KvHome::Device, _) => demand.kv,
        (KvHome::Host, Place::Cpu) => blocks.iter().map(|block| block.kv_bytes).sum(),
        (KvHome::Host, Place::Gpu(_)) => there().map(|block| block.kv_bytes).max().unwrap_or(0),
    };
    Demand { kv, ..demand }
}

/// Whether every device holds what `places` puts on it.
pub fn check(blocks: &[Block], places: &[Place], budget: &Budget) -> Result<(), NoFit> {
    let on = |place: Place| demand(blocks, places, place, budget.kv);
    let limits = (0..budget.vram.len()).map(|i| (Place::Gpu(i), budget.vram[i], budget.margin));
    for (place, limit, margin) in limits.chain(budget.ram.map(|ram| (Place::Cpu, ram, 0))) {
        let demand = on(place);
        let used = places.contains(&place);
        if used && demand.total().saturating_add(margin) > limit {
            return Err(NoFit { place, demand, budget: limit, margin });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cost::tests::dense;

    #[test]
    fn shared_weights_count_once_per_device() {
        let mut blocks = dense(2, 1000);
        let last = blocks.len() - 1;
        blocks[last].weights = vec![(0, 2000)];
        assert_eq!(Demand::of(&blocks).weights, 2000 + 2 * 1000);
        assert_eq!(Demand::of(&blocks[1..]).weights, 2000 + 2 * 1000);
    }

    #[test]
    fn the_error_names_the_smallest_budget_that_would_do() {
        let blocks = dense(2, 1000);
        let places = [Place::Cpu, Place::Gpu(0), Place::Gpu(0), Place::Cpu];
        let mut budget = Budget { vram: vec![2000], ram: None, margin: 50, ..Budget::default() };
        let error = check(&blocks, &places, &budget).unwrap_err();
        assert_eq!(error.place, Place::Gpu(0));
        budget.vram[0] = error.smallest() - 1;
        assert!(check(&blocks, &places, &budget).is_err());
        budget.vram[0] += 1;
        assert_eq!(check(&blocks, &places, &budget), Ok(()));
    }

    #[test]
    fn state_on_the_host_leaves_one_blocks_share_on_the_device() {
        let blocks = dense(4, 1000);
        let places = [Place::Cpu, Place::Gpu(0), Place::Gpu(0), Place::Gpu(0), Place::Cpu, Place::Cpu];
        assert_eq!(demand(&blocks, &places, Place::Gpu(0), KvHome::Device).kv, 750);
        assert_eq!(demand(&blocks, &places, Place::Gpu(0), KvHome::Host).kv, 250);
        assert_eq!(demand(&blocks, &places, Place::Cpu, KvHome::Host).kv, 1000);
    }

    #[test]
    fn host_memory_is_a_budget_too() {
        let blocks = dense(2, 1000);
        let budget = Budget { vram: vec![], ram: Some(3000), ..Budget::default() };
        let error = check(&blocks, &[Place::Cpu; 4], &budget).unwrap_err();
        assert_eq!((error.place, error.demand.weights), (Place::Cpu, 6000));
    }
}
