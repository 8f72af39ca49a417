//! Finds the sections of a matrix's columns: a packed matrix gives queries, keys and values, or gate and up projection, side by side.

use super::analyse::{Analysis, is_elementwise};
use super::attention::packed_widths;
use super::{RowsReason, WeightSlice};
use crate::{Node, NodeId, ValueId, ops};

/// The most readers that are followed from a matrix product. Exported models have a handful.
const MOST_READERS: u32 = 1000;

/// A range of a value's last axis: its first element, and the element after its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ColumnRange {
    pub start: u64,
    pub end: u64,
}

impl Analysis<'_> {
    /// The sections of a value's last axis, which has `width` elements. They follow from how readers take the value apart.
    pub(super) fn sections(&self, value: ValueId, width: u64) -> Result<Vec<u64>, RowsReason> {
        let mut left = MOST_READERS;
        self.sections_of(value, width, &mut left)
    }

    /// `left`: how many more readers may be followed.
    fn sections_of(&self, value: ValueId, width: u64, left: &mut u32) -> Result<Vec<u64>, RowsReason> {
        let mut found = vec![width];
        for reader in self.graph.value(value).consumers.iter().filter(|id| self.is_divided(**id)) {
            let too_many = RowsReason::Form("gives columns that more operators read than this build follows");
            *left = left.checked_sub(1).ok_or(too_many)?;
            let sections = self.sections_for(*reader, (value, width), left)?;
            if sections.len() > 1 && found.len() > 1 && sections != found {
                return Err(RowsReason::Form("gives columns that its readers take apart in different ways"));
            }
            if sections.len() > 1 {
                found = sections;
            }
        }
        match found.iter().find(|columns| !columns.is_multiple_of(self.shards)) {
            Some(columns) => Err(RowsReason::Columns { columns: *columns, kind: "columns", shards: self.shards }),
            None => Ok(found),
        }
    }

    fn sections_for(
        &self,
        reader: NodeId,
        (value, width): (ValueId, u64),
        left: &mut u32,
    ) -> Result<Vec<u64>, RowsReason> {
        let node = self.graph.node(reader);
        let is_first = node.inputs.first() == Some(&Some(value));
        match node.op_type.as_str() {
            "GroupQueryAttention" if is_first => self.packed_heads(node, width),
            "Split" if is_first => {
                let sizes = self.split_sizes(node, width)?;
                let parts = node.outputs.iter().zip(sizes).map(|(output, size)| match output {
                    Some(output) => self.sections_of(*output, size, left),
                    None => Ok(vec![size]),
                });
                Ok(parts.collect::<Result<Vec<_>, _>>()?.concat())
            }
            "Slice" if is_first => Ok(self.slices(value, width)),
            _ if is_elementwise(node) => match node.outputs.first().copied().flatten() {
                Some(output) => self.sections_of(output, width, left),
                None => Ok(vec![width]),
            },
            _ => Ok(vec![width]),
        }
    }

    /// The sections of an attention's first input: queries, keys and values if it has all of them; one section of queries if keys and values are
    /// other inputs.
    fn packed_heads(&self, node: &Node, width: u64) -> Result<Vec<u64>, RowsReason> {
        if node.inputs.get(1).copied().flatten().is_some() {
            return Ok(vec![width]);
        }
        let (heads, kv_heads) = self.head_counts(node)?;
        let all = heads.saturating_add(kv_heads.saturating_mul(2));
        let widths = packed_widths(heads, kv_heads, width / all).filter(|_| width > 0 && width.is_multiple_of(all));
        let unknown = RowsReason::Form("reads queries, keys and values whose columns are not those of its heads");
        widths.map(|widths| widths.to_vec()).ok_or(unknown)
    }

    /// The sections of a value that `Slice` nodes read: every bound of a slice ends a section.
    fn slices(&self, value: ValueId, width: u64) -> Vec<u64> {
        let readers = self.graph.value(value).consumers.iter().map(|id| self.graph.node(*id));
        let ranges = readers.filter_map(|node| self.slice_range(node, width));
        let mut ends: Vec<u64> = ranges.flat_map(|range| [range.start, range.end]).chain([0, width]).collect();
        ends.sort_unstable();
        ends.dedup();
        ends.windows(2).map(|pair| pair[1] - pair[0]).collect()
    }

    /// The range of the last axis that a `Slice` takes. `None` if the node is something else.
    pub(super) fn slice_range(&self, node: &Node, width: u64) -> Option<ColumnRange> {
        if node.op_type != "Slice" || !ops::is_standard(node) {
            return None;
        }
        let one = |at: usize| match self.graph.ints(node.inputs.get(at).copied().flatten()?)? {
            [one] => Some(*one),
            _ => None,
        };
        let steps_is_one = node.inputs.get(4).copied().flatten().is_none() || one(4) == Some(1);
        let is_last = self.is_last_axis(node.inputs.first().copied().flatten()?, one(3)?);
        let position = |at: i64| {
            let from_start = if at < 0 { at.saturating_add(width as i64) } else { at };
            from_start.clamp(0, width as i64) as u64
        };
        let range = ColumnRange { start: position(one(1)?), end: position(one(2)?) };
        (is_last && steps_is_one && range.start < range.end).then_some(range)
    }

    /// The sizes of the outputs of a `Split` of the last axis.
    pub(super) fn split_sizes(&self, node: &Node, width: u64) -> Result<Vec<u64>, RowsReason> {
        let unknown = RowsReason::Form("splits values in a form that this build does not know how to divide");
        let value = node.inputs.first().copied().flatten();
        let is_last = value.is_some_and(|value| self.is_last_axis(value, node.int("axis").unwrap_or(0)));
        let count = node.outputs.len() as u64;
        let sizes: Option<Vec<u64>> = match node.inputs.get(1).copied().flatten() {
            Some(sizes) => {
                self.graph.ints(sizes).and_then(|ints| ints.iter().map(|size| u64::try_from(*size).ok()).collect())
            }
            None if node.attributes.contains_key("split") || count == 0 || !width.is_multiple_of(count) => None,
            None => Some(vec![width / count; count as usize]),
        };
        let total = |sizes: &[u64]| sizes.iter().try_fold(0u64, |sum, size| sum.checked_add(*size));
        let is_known = |sizes: &Vec<u64>| sizes.len() as u64 == count && total(sizes) == Some(width);
        sizes.filter(|sizes| is_last && ops::is_standard(node) && is_known(sizes)).ok_or(unknown)
    }

    fn is_last_axis(&self, value: ValueId, axis: i64) -> bool {
        let rank = self.graph.value(value).shape.as_ref().map(|shape| shape.len() as i64);
        axis == -1 || rank.is_some_and(|rank| axis == rank - 1)
    }

    /// Checks a slice and returns it: the weight is stored, has the same number of elements for each unit of the slice, and its divided axis is a
    /// multiple of the number of shards. Refuses other weights.
    pub(super) fn checked(&self, value: ValueId, slice: WeightSlice) -> Result<WeightSlice, RowsReason> {
        self.stored(value)?;
        let elements: Option<u64> = self.sizes(value).map(|sizes| sizes.iter().product());
        let wanted = slice.rows.checked_mul(slice.columns());
        let divided = self.sizes(value).and_then(|sizes| sizes.get(slice.axis).copied());
        let is_whole = |count: u64| wanted.is_some_and(|wanted| wanted > 0 && count.is_multiple_of(wanted));
        let is_known = elements.is_some_and(is_whole) && divided.is_some_and(|size| size.is_multiple_of(self.shards));
        match is_known {
            true => Ok(slice),
            false => Err(RowsReason::Form("has a weight whose sizes do not match its attributes and inputs")),
        }
    }
}
