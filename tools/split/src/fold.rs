//! Partitions that share a row of the table.

use crate::{split_mode, table};
use hpp_schema::Partition;
use std::collections::BTreeMap;

/// Groups partitions into rows of the table; `device` says where a partition computes. Adjacent partitions that are streamed in the same way for the
/// same reason share a row, because there may be one per layer. All partitions of a shard share a row too, although they alternate with those of
/// other shards.
pub fn rows(partitions: &[Partition], device: fn(&Partition) -> String) -> Vec<Vec<&Partition>> {
    let share_row = |a: &Partition, b: &Partition| {
        a.is_streamed() && b.is_streamed() && device(a) == device(b) && a.reason == b.reason
    };
    let (mut rows, mut of_shards) = (Vec::<Vec<&Partition>>::new(), BTreeMap::new());
    for partition in partitions {
        let shard = split_mode::shard(partition).map(|(_, shard)| shard);
        let before = match shard {
            Some(shard) => of_shards.get(&shard).copied(),
            None => rows.len().checked_sub(1).filter(|last| share_row(rows[*last][0], partition)),
        };
        match before {
            Some(row) => rows[row].push(partition),
            None => rows.push(vec![partition]),
        }
        if let Some(shard) = shard {
            of_shards.entry(shard).or_insert(rows.len() - 1);
        }
    }
    rows
}

/// The layers of which a row of partitions is a shard, `layers.0-79 (rows, 1 of 2)`; `None` for other rows.
pub fn shard(partitions: &[&Partition], shards: usize) -> Option<String> {
    let found: Vec<(&str, usize)> = partitions.iter().copied().filter_map(split_mode::shard).collect();
    let mut layers: Vec<String> = found.iter().map(|(layer, _)| (*layer).to_owned()).collect();
    layers.dedup();
    found.first().map(|(_, shard)| format!("{} (rows, {} of {shards})", table::blocks(&layers), shard + 1))
}
