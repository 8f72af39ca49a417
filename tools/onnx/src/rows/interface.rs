//! Rewrites the model's inputs and outputs and the recorded types of values for division by rows.

use super::RowSplitError;
use crate::names;
use crate::proto::{GraphProto, ValueInfoProto};
use crate::typed;
use hpp_graph::{Graph, RowDivision, ShardLayout, ValueId, shard_name};
use hpp_schema::Dim;
use std::collections::{HashMap, HashSet};

/// Replaces each divided state by one state for each shard, and drops recorded types that divided values no longer
/// have.
pub(super) fn rewrite(graph: &Graph, division: &RowDivision, proto: &mut GraphProto) -> Result<(), RowSplitError> {
    let ids: HashMap<&str, ValueId> = graph.value_ids().map(|id| (graph.value(id).name.as_str(), id)).collect();
    let used: HashSet<&str> = ids.keys().copied().collect();
    let parts = |info: ValueInfoProto| match ids.get(info.name()) {
        Some(id) if is_state(division, *id) => of_shards(graph, division, *id, &info, &used),
        _ => Ok(vec![info]),
    };
    let replaced = |infos: Vec<ValueInfoProto>| {
        let parts: Result<Vec<_>, RowSplitError> = infos.into_iter().map(parts).collect();
        parts.map(|parts| parts.concat())
    };
    proto.input = replaced(std::mem::take(&mut proto.input))?;
    proto.output = replaced(std::mem::take(&mut proto.output))?;
    // Types of divided values are inferred again.
    let is_whole =
        |id: &ValueId| matches!(division.layout(*id), None | Some(ShardLayout::Replicated | ShardLayout::Partial));
    let known: HashSet<&str> = names::produced(&proto.node).collect();
    proto.value_info.retain(|info| known.contains(info.name()) && ids.get(info.name()).is_none_or(is_whole));
    Ok(())
}

/// Whether this value is a divided state, before or after a pass.
fn is_state(division: &RowDivision, id: ValueId) -> bool {
    division.is_divided_past(id) || division.layout(id) == Some(&ShardLayout::State)
}

/// The records of a divided state: one for each shard.
fn of_shards(
    graph: &Graph,
    division: &RowDivision,
    id: ValueId,
    info: &ValueInfoProto,
    used: &HashSet<&str>,
) -> Result<Vec<ValueInfoProto>, RowSplitError> {
    let operator = graph.producer(id).or_else(|| graph.value(id).consumers.first().copied());
    let attributes = operator.and_then(|id| division.node(id)).map(|node| node.attributes.as_slice());
    let heads = attributes.unwrap_or_default().iter().find(|(name, _)| *name == "kv_num_heads");
    let of_shard = |shard: usize| {
        let name = shard_name(info.name(), shard);
        if used.contains(name.as_str()) {
            return Err(RowSplitError::NameTaken { name });
        }
        let mut part = ValueInfoProto { name: Some(name), ..info.clone() };
        if let Some((_, heads)) = heads {
            typed::set_dim(&mut part, 1, &Dim::fixed(*heads as u64));
        }
        Ok(part)
    };
    (0..division.shards()).map(of_shard).collect()
}
