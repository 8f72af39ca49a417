//! `GroupQueryAttention`: each shard has some of the heads, with their keys and values.

use super::analyse::{Analysis, Divided, unchanged};
use super::{InputDivision, RowsReason, ShardLayout, WeightSlice};
use crate::{Node, NodeId, ValueId};

/// Inputs by position. Inputs not listed here (lengths, rotary caches, positions) are the same for all heads.
const QUERY: usize = 0;
const VALUE: usize = 2;
const PASTS: [usize; 2] = [3, 4];
const BIAS: usize = 10;
const SINK: usize = 11;
const SCALES: [usize; 2] = [12, 13];
/// Number of inputs that this code knows.
const KNOWN: usize = 16;

impl Analysis<'_> {
    pub(super) fn attention(&mut self, id: NodeId) -> Divided {
        let node = self.graph.node(id);
        let (heads, kv_heads) = self.head_counts(node)?;
        for (heads, kind) in [(heads, "heads of queries"), (kv_heads, "heads of keys and values")] {
            if !heads.is_multiple_of(self.shards) {
                return Err(RowsReason::Heads { heads, kind, shards: self.shards });
            }
        }
        let width = self.query_width(node, heads, kv_heads)?;
        let pasts = PASTS.map(|at| node.inputs.get(at).copied().flatten());
        let states = pasts.map(|past| past.and_then(|past| Some((past, *self.states.get(&past)?))));
        let [Some(keys), Some(values)] = states else {
            return Err(RowsReason::Form("has no states for its keys and values"));
        };
        let mut division = unchanged(node);
        for (at, value) in node.inputs.iter().enumerate().skip(PASTS[1] + 1) {
            if let Some(value) = value {
                division.inputs[at] = self.other_input(at, *value, heads)?;
            }
        }
        if node.outputs.get(3).copied().flatten().is_some() || node.domain != "com.microsoft" {
            return Err(RowsReason::Form("returns the products of queries and keys"));
        }
        let count = |heads: u64| (heads / self.shards) as i64;
        division.attributes = vec![("num_heads", count(heads)), ("kv_num_heads", count(kv_heads))];
        self.pasts.extend([keys, values]);
        Ok((division, vec![ShardLayout::Columns(vec![width]), ShardLayout::State, ShardLayout::State]))
    }

    /// Number of heads of queries, and of keys and values.
    pub(super) fn head_counts(&self, node: &Node) -> Result<(u64, u64), RowsReason> {
        let count = |name: &str| node.int(name).and_then(|count| u64::try_from(count).ok()).filter(|count| *count > 0);
        count("num_heads").zip(count("kv_num_heads")).ok_or(RowsReason::Form("does not say how many heads it has"))
    }

    /// Number of elements of a token's queries of all heads. Refuses inputs that are not divided at heads.
    fn query_width(&self, node: &Node, heads: u64, kv_heads: u64) -> Result<u64, RowsReason> {
        let unknown = || RowsReason::Form("reads queries, keys and values whose columns are not those of its heads");
        let columns = |at: usize| match self.seen(node.inputs.get(at).copied().flatten()?) {
            ShardLayout::Columns(sections) => Some(sections.as_slice()),
            _ => None,
        };
        let is_packed = node.inputs.iter().take(VALUE + 1).skip(1).all(Option::is_none);
        let widths = match is_packed {
            true => columns(QUERY).filter(|sections| sections.len() == 3).map(<[u64]>::to_vec),
            false => (QUERY..=VALUE).map(|at| columns(at).filter(|one| one.len() == 1).map(|one| one[0])).collect(),
        };
        let widths = widths.ok_or_else(unknown)?;
        let head = widths[0] / heads;
        let is_known =
            head > 0 && widths.len() == 3 && packed_widths(heads, kv_heads, head).is_some_and(|known| widths == known);
        is_known.then_some(widths[0]).ok_or_else(unknown)
    }

    /// How an input after the states is divided.
    fn other_input(&self, at: usize, value: ValueId, heads: u64) -> Result<InputDivision, RowsReason> {
        if *self.seen(value) != ShardLayout::Replicated {
            return Err(RowsReason::Operator { value: self.name(value) });
        }
        let sizes = self.graph.value(value).shape.as_ref();
        let is_one = |at: usize| sizes.and_then(|sizes| sizes.get(at)).and_then(|size| size.as_fixed()) == Some(1);
        let is_scalar = || self.sizes(value).is_some_and(|sizes| sizes.iter().product::<u64>() == 1);
        match at {
            BIAS if !is_one(1) => Err(RowsReason::Form("adds scores of their own to each head")),
            SINK => {
                let slice = WeightSlice { rows: 1, sections: vec![heads], axis: 0 };
                Ok(InputDivision::Slice(self.checked(value, slice)?))
            }
            _ if SCALES.contains(&at) && !is_scalar() => Err(RowsReason::Form("has scales of their own for each head")),
            _ if at >= KNOWN => Err(RowsReason::Form("has an input that this build does not know")),
            _ => Ok(InputDivision::Own),
        }
    }
}

/// Numbers of columns of queries, keys and values, for heads of `head` elements.
pub(super) fn packed_widths(heads: u64, kv_heads: u64, head: u64) -> Option<[u64; 3]> {
    let (queries, keys) = (heads.checked_mul(head)?, kv_heads.checked_mul(head)?);
    Some([queries, keys, keys])
}
