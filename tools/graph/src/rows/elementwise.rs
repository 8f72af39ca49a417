//! Operators that compute each element, or each head, alone: activations, arithmetic, norms of heads, rotary embeddings.

use super::analyse::{Analysis, Divided, unchanged};
use super::{InputDivision, RowsReason, ShardLayout, WeightSlice};
use crate::{Node, ValueId};

/// Operators that compute each element from the elements of all inputs at the same place.
pub(super) const OPERATORS: [&str; 33] = [
    "Abs",
    "Add",
    "BiasGelu",
    "Cast",
    "Celu",
    "Clip",
    "Div",
    "Elu",
    "Erf",
    "Exp",
    "FastGelu",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Max",
    "Min",
    "Mish",
    "Mul",
    "Neg",
    "Pow",
    "QuickGelu",
    "Relu",
    "Selu",
    "Sigmoid",
    "Silu",
    "Softplus",
    "Sqrt",
    "Sub",
    "Swish",
    "Tanh",
    "ThresholdedRelu",
];

impl Analysis<'_> {
    /// Divides an elementwise operator. `part` is one of its inputs of which shards have a part.
    pub(super) fn elementwise(&self, node: &Node, part: ValueId) -> Divided {
        let layout = self.seen(part).clone();
        let mut division = unchanged(node);
        for (input, value) in division.inputs.iter_mut().zip(&node.inputs) {
            if let Some(value) = value.filter(|value| *self.seen(*value) != layout) {
                *input = self.beside(&layout, part, value)?;
            }
        }
        Ok((division, vec![layout; node.outputs.len()]))
    }

    /// How the copies read an input that is combined with a part of this layout: unchanged if it broadcasts, else a
    /// slice of a vector.
    fn beside(&self, layout: &ShardLayout, part: ValueId, value: ValueId) -> Result<InputDivision, RowsReason> {
        let mixed = || RowsReason::Mixed { part: self.name(part), whole: self.name(value) };
        let shape = self.graph.value(value).shape.as_ref().filter(|_| *self.seen(value) == ShardLayout::Replicated);
        let sizes: Vec<Option<u64>> = shape.ok_or_else(mixed)?.iter().map(|dim| dim.as_fixed()).collect();
        let last = sizes.last().copied().unwrap_or(Some(1));
        let is_vector = sizes.iter().rev().skip(1).all(|size| *size == Some(1));
        match layout {
            ShardLayout::Columns(_) if last == Some(1) => Ok(InputDivision::Own),
            ShardLayout::Columns(sections) if last == Some(sections.iter().sum()) && is_vector => {
                let slice = WeightSlice { rows: 1, sections: sections.clone(), axis: sizes.len() - 1 };
                Ok(InputDivision::Slice(self.checked(value, slice)?))
            }
            ShardLayout::Heads { head, .. } if is_vector && (last == Some(1) || last == Some(*head)) => {
                Ok(InputDivision::Own)
            }
            _ => Err(mixed()),
        }
    }

    /// Refuses a value that is not a stored weight.
    pub(super) fn stored(&self, value: ValueId) -> Result<(), RowsReason> {
        let weight = || self.name(value);
        match self.graph.weight(value) {
            Some(_) => Ok(()),
            None => Err(RowsReason::ComputedWeight { weight: weight() }),
        }
    }

    /// A norm over the elements of each head.
    pub(super) fn norm(&self, node: &Node) -> Divided {
        let value = node.inputs.first().copied().flatten();
        let layout = value.map(|value| self.seen(value).clone());
        let Some(ShardLayout::Heads { width, head }) = layout else {
            return Err(RowsReason::Form("computes a norm over all heads or neurons, of which a shard has a part"));
        };
        let rank = value.and_then(|value| self.graph.value(value).shape.as_ref()).map(Vec::len);
        let axis = node.int("axis").unwrap_or(-1);
        let is_last = axis == -1 || rank.is_some_and(|rank| axis == rank as i64 - 1);
        let is_shared = node.inputs.iter().skip(1).flatten().all(|value| {
            *self.seen(*value) == ShardLayout::Replicated && self.sizes(*value).is_some_and(|sizes| sizes == [head])
        });
        let has_one_output = node.outputs.iter().flatten().count() == 1;
        if !is_last || !is_shared || !has_one_output {
            return Err(RowsReason::Form("computes a norm of heads in a form that this build does not know"));
        }
        Ok((unchanged(node), vec![ShardLayout::Heads { width, head }]))
    }

    /// The rotary embedding of queries or keys, `[batch, tokens, elements of all heads]`.
    pub(super) fn rotary(&self, node: &Node) -> Divided {
        let value = node.inputs.first().copied().flatten();
        let layout = value.map(|value| self.seen(value).clone());
        let others_are_whole = node.inputs.iter().skip(1).flatten().all(|v| *self.seen(*v) == ShardLayout::Replicated);
        let Some(ShardLayout::Columns(sections)) = layout.clone().filter(|_| others_are_whole) else {
            return Err(RowsReason::Form("rotates values in a form that this build does not know how to divide"));
        };
        let width: u64 = sections.iter().sum();
        let mut division = unchanged(node);
        match node.int("num_heads").unwrap_or(0) {
            0 => self.whole_heads(width, self.rotated(node))?,
            heads => {
                let heads = u64::try_from(heads).unwrap_or(0);
                self.whole_heads(width, Some(width / heads.max(1)))?;
                division.attributes.push(("num_heads", (heads / self.shards) as i64));
            }
        }
        Ok((division, vec![ShardLayout::Columns(sections)]))
    }

    /// Number of elements in a head, from the width of the cosine cache: an operator without `num_heads` rotates whole
    /// heads.
    fn rotated(&self, node: &Node) -> Option<u64> {
        let at = if node.domain == "com.microsoft" { 2 } else { 1 };
        let cache = node.inputs.get(at).copied().flatten()?;
        self.graph.value(cache).shape.as_ref()?.last()?.as_fixed().map(|half| half * 2)
    }

    /// Refuses a division that would give a shard a part of a head.
    pub(super) fn whole_heads(&self, width: u64, head: Option<u64>) -> Result<(), RowsReason> {
        let head = head.filter(|head| *head > 0 && width.is_multiple_of(*head));
        let head = head.ok_or(RowsReason::Form("has heads of an unknown size"))?;
        let heads = width / head;
        match heads.is_multiple_of(self.shards) {
            true => Ok(()),
            false => Err(RowsReason::Heads { heads, kind: "heads", shards: self.shards }),
        }
    }
}
