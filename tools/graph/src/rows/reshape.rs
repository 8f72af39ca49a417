//! Divides operators that split the last axis into several axes or merge it again: `Reshape`, `Split`, `Slice`.

use super::analyse::{Analysis, Divided, unchanged};
use super::{InputDivision, NodeDivision, RowsReason, ShardLayout};
use crate::{Node, ValueId};

impl Analysis<'_> {
    /// Divides a `Reshape` that splits the last axis into heads, or merges heads into it.
    pub(super) fn reshape(&self, node: &Node) -> Divided {
        let unknown = RowsReason::Form("reshapes values in a form that this build does not know how to divide");
        let input = |at: usize| node.inputs.get(at).copied().flatten();
        let ints = input(1).and_then(|shape| self.graph.ints(shape)).map(<[i64]>::to_vec);
        let zeros_are_sizes = node.int("allowzero").unwrap_or(0) == 0;
        let Some((value, wanted)) = input(0).zip(ints.filter(|_| zeros_are_sizes)) else { return Err(unknown) };
        let (sizes, layout) = match self.seen(value) {
            ShardLayout::Columns(sections) if sections.len() == 1 => self.apart(value, sections[0], wanted)?,
            ShardLayout::Heads { width, .. } => self.together(value, *width, wanted)?,
            _ => return Err(unknown),
        };
        Ok((with_ints(node, &[(1, sizes)]), vec![layout]))
    }

    /// Splits the last axis: `[.., width]` becomes `[.., heads, head]` or `[.., tokens x heads, head]`.
    fn apart(&self, value: ValueId, width: u64, mut wanted: Vec<i64>) -> Result<(Vec<i64>, ShardLayout), RowsReason> {
        let unknown = RowsReason::Form("reshapes heads in a form that this build does not know how to divide");
        let head = wanted.last().and_then(|size| u64::try_from(*size).ok()).filter(|head| *head > 0);
        let Some(head) = head.filter(|_| wanted.len() >= 2) else { return Err(unknown) };
        self.whole_heads(width, Some(head))?;
        let (heads, rank) = (width / head, self.graph.value(value).shape.as_ref().map(Vec::len));
        let before = wanted.len() - 2;
        match wanted[before] {
            // -1 is tokens and heads in one axis, or heads alone where the axes before keep their sizes.
            -1 => {}
            size if size == heads as i64 && rank == Some(before + 1) => wanted[before] = (heads / self.shards) as i64,
            _ => return Err(unknown),
        }
        // Each token keeps its heads only if the axes before are the batch and perhaps the tokens.
        let is_kept = wanted[..before].iter().enumerate().all(|(at, size)| *size == 0 || (*size == -1 && at < 2));
        let is_known = is_kept && before >= 1 && (wanted.len() == 3 || rank == Some(before + 1));
        is_known.then_some((wanted, ShardLayout::Heads { width, head })).ok_or(unknown)
    }

    /// Merges heads: `[.., heads, head]` or `[.., tokens x heads, head]` becomes `[.., width]`.
    fn together(
        &self,
        value: ValueId,
        width: u64,
        mut wanted: Vec<i64>,
    ) -> Result<(Vec<i64>, ShardLayout), RowsReason> {
        let unknown = RowsReason::Form("reshapes heads in a form that this build does not know how to divide");
        let rank = wanted.len();
        let has_heads_alone = self.graph.value(value).shape.as_ref().is_some_and(|shape| shape.len() == 4);
        match wanted.last().copied() {
            Some(size) if size == width as i64 => wanted[rank - 1] = (width / self.shards) as i64,
            // The other axes keep their sizes, so -1 can only be the heads of a token.
            Some(-1) if rank == 3 && wanted[..2] == [0, 0] && has_heads_alone => {}
            _ => return Err(unknown),
        }
        let is_kept = wanted[..rank - 1].iter().all(|size| matches!(size, 0 | -1));
        (is_kept && rank >= 2).then_some((wanted, ShardLayout::Columns(vec![width]))).ok_or(unknown)
    }

    /// Divides a `Split` of the last axis that cuts only where sections end.
    pub(super) fn split(&self, node: &Node) -> Divided {
        let Some((_, sections)) = self.columns_of(node) else { return Err(not_columns()) };
        let sizes = self.split_sizes(node, sections.iter().sum())?;
        let layouts = parted(&sections, &sizes).ok_or_else(not_columns)?;
        let shard_sizes = sizes.iter().map(|size| (size / self.shards) as i64).collect();
        let has_sizes = node.inputs.get(1).copied().flatten().is_some();
        let division = if has_sizes { with_ints(node, &[(1, shard_sizes)]) } else { unchanged(node) };
        Ok((division, layouts))
    }

    /// Divides a `Slice` of the last axis that takes whole sections.
    pub(super) fn slice(&self, node: &Node) -> Divided {
        let Some((_, sections)) = self.columns_of(node) else { return Err(not_columns()) };
        let width = sections.iter().sum();
        let range = self.slice_range(node, width).ok_or_else(not_columns)?;
        let parts = [range.start, range.end - range.start, width - range.end];
        let layout = parted(&sections, &parts).ok_or_else(not_columns)?.swap_remove(1);
        let bound = |at: u64| vec![(at / self.shards) as i64];
        Ok((with_ints(node, &[(1, bound(range.start)), (2, bound(range.end))]), vec![layout]))
    }

    fn columns_of(&self, node: &Node) -> Option<(ValueId, Vec<u64>)> {
        let value = node.inputs.first().copied().flatten()?;
        match self.seen(value) {
            ShardLayout::Columns(sections) => Some((value, sections.clone())),
            _ => None,
        }
    }
}

fn not_columns() -> RowsReason {
    RowsReason::Form("takes values apart where no section of them ends, or along another axis")
}

/// Groups sections into ranges of these sizes; `None` if a range ends inside a section.
fn parted(sections: &[u64], sizes: &[u64]) -> Option<Vec<ShardLayout>> {
    let mut left = sections.iter().copied().peekable();
    let mut layouts = vec![];
    for size in sizes {
        let (mut taken, mut part) = (0, vec![]);
        while taken < *size {
            let section = left.next()?;
            taken += section;
            part.push(section);
        }
        if taken != *size {
            return None;
        }
        layouts.push(ShardLayout::Columns(part));
    }
    Some(layouts)
}

/// A division in which the inputs at these positions get other integers.
fn with_ints(node: &Node, ints: &[(usize, Vec<i64>)]) -> NodeDivision {
    let mut division = unchanged(node);
    for (at, ints) in ints {
        division.inputs[*at] = InputDivision::Ints(ints.clone());
    }
    division
}
