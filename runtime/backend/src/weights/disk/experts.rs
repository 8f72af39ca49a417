//! The slices of a session's weights that hold single experts: where they are in files, and the parts of mappings that hold them.

use super::align::{Tensor, tensors};
use super::mapping::Mapping;
use super::views;
use hpp_engine::port::ExpertWeights;
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};

/// Slices with fewer bytes are not worth mappings of their own and are treated like other weights.
const MIN_SLICE: u64 = 16 << 10;

/// What ONNX Runtime puts before the name of a weight that it has converted to another type (1.31).
const CONVERTED: [&str; 2] = ["FusedBack_", "InsertedPrecisionFreeCast_"];

/// The weights of experts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ExpertTensors {
    /// How many experts there are.
    count: usize,
    tensors: Vec<ExpertTensor>,
}

/// A weight that holds one slice for each expert, or belongs to one.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ExpertTensor {
    range: FileRange,
    /// The expert that it belongs to; `None` if it holds a slice for each expert.
    owner: Option<usize>,
}

/// A range of bytes in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FileRange {
    path: PathBuf,
    offset: u64,
    length: u64,
}

impl ExpertTensors {
    /// Finds the weights of these names that a model file stores in other files under `dir`. If a kernel has packed a weight, its packed
    /// copy counts: its slices have the same order, and all have one size. If ONNX Runtime has converted a weight to float32, the converted
    /// copy counts.
    pub fn find(model: &Path, dir: &Path, weights: ExpertWeights<'_>) -> io::Result<Self> {
        let all = tensors(&std::fs::read(model)?)?;
        let numbers: HashMap<&str, usize> = weights.names.iter().map(String::as_str).zip(0..).collect();
        let number = |tensor: &Tensor| {
            let original = CONVERTED.iter().find_map(|prefix| tensor.name.strip_prefix(prefix));
            numbers.get(&*tensor.name).or_else(|| numbers.get(original?)).copied()
        };
        let of_each = if weights.are_apart { weights.names.len() / weights.count.max(1) } else { 0 };
        let expert = |tensor: Tensor| {
            let owner = number(&tensor)?.checked_div(of_each);
            let (offset, length) = tensor.packed.or(tensor.stored)?;
            let path = dir.join(tensor.location).canonicalize().ok()?;
            let slices = if owner.is_some() { 1 } else { weights.count as u64 };
            let is_sliced = slices > 0 && length.is_multiple_of(slices);
            let range = FileRange { path, offset, length };
            (is_sliced && length / slices >= MIN_SLICE).then_some(ExpertTensor { range, owner })
        };
        let mut tensors: Vec<ExpertTensor> = all.into_iter().filter_map(expert).collect();
        let is_shared = |a: &ExpertTensor, b: &ExpertTensor| a.range == b.range && a.owner != b.owner;
        // Bytes that two experts share belong to neither.
        let shared: Vec<bool> = tensors.iter().map(|a| tensors.iter().any(|b| is_shared(a, b))).collect();
        let mut shared = shared.into_iter();
        tensors.retain(|_| !shared.next().unwrap_or(false));
        Ok(ExpertTensors { count: weights.count, tensors })
    }

    /// Divides mappings into the whole pages of each expert and all the rest. A page with bytes of two experts belongs to the rest.
    pub fn divide(&self, mappings: Vec<Mapping>) -> (Vec<Mapping>, Vec<Vec<Mapping>>) {
        if self.tensors.is_empty() {
            return (mappings, Vec::new());
        }
        let (mut rest, mut experts) = (Vec::new(), vec![Vec::new(); self.count]);
        for mapping in mappings {
            let mut left = Some(mapping);
            for (expert, pages) in self.slices(left.as_ref()) {
                let Some(whole) = left.take() else { break };
                // Two weights may share bytes: skip a slice that begins before what is left.
                let Some(start) = pages.start.checked_sub(whole.offset) else {
                    left = Some(whole);
                    continue;
                };
                let (before, from_slice) = whole.split(start);
                let (slice, after) = from_slice.map_or((None, None), |part| part.split(pages.end - pages.start));
                rest.extend(before);
                experts[expert].extend(slice);
                left = after;
            }
            rest.extend(left);
        }
        experts.retain(|parts| !parts.is_empty());
        match experts.len() == self.count {
            true => (rest, experts),
            // Not every expert has pages of its own.
            false => {
                rest.extend(experts.into_iter().flatten());
                rest.sort_by_key(|part| part.start);
                (rest, Vec::new())
            }
        }
    }

    /// The whole pages of experts within a mapping, by their offsets in its file, in order.
    fn slices(&self, mapping: Option<&Mapping>) -> Vec<(usize, std::ops::Range<u64>)> {
        let Some(mapping) = mapping else { return Vec::new() };
        let (mapped, step) = (mapping.offset..mapping.offset + mapping.length as u64, views::page_step());
        let within = |tensor: &&ExpertTensor| {
            let range = &tensor.range;
            let end = range.offset.checked_add(range.length);
            range.path == mapping.path && mapped.start <= range.offset && end.is_some_and(|end| end <= mapped.end)
        };
        let slices = self.tensors.iter().filter(within).flat_map(|ExpertTensor { range, owner }| {
            let experts = owner.map_or(0..self.count, |owner| owner..owner + 1);
            let (first, bytes) = (experts.start, range.length / experts.len().max(1) as u64);
            experts.map(move |expert| {
                let start = range.offset + (expert - first) as u64 * bytes;
                (expert, start.next_multiple_of(step)..(start + bytes) / step * step)
            })
        });
        let mut slices: Vec<_> = slices.filter(|(_, pages)| pages.start < pages.end).collect();
        slices.sort_by_key(|(_, pages)| pages.start);
        slices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(offset: u64, length: u64) -> ExpertTensor {
        ExpertTensor { range: FileRange { path: "/w".into(), offset, length }, owner: None }
    }

    fn mapping(offset: u64, length: usize) -> Mapping {
        Mapping { start: 0x1000_0000 + offset as usize, length, offset, path: "/w".into() }
    }

    #[test]
    fn experts_have_the_pages_that_only_they_fill() {
        // Two tensors of two experts: one aligned, of 5 pages each; one of 4.5 pages each.
        let tensors = ExpertTensors { count: 2, tensors: vec![tensor(4096, 40_960), tensor(45_056, 36_864)] };
        let (rest, experts) = tensors.divide(vec![mapping(0, 90_112)]);
        let parts =
            |mappings: &[Mapping]| -> Vec<_> { mappings.iter().map(|part| (part.offset, part.length)).collect() };
        assert_eq!(parts(&experts[0]), [(4096, 20_480), (45_056, 16_384)]);
        assert_eq!(parts(&experts[1]), [(24_576, 20_480), (65_536, 16_384)]);
        assert_eq!(parts(&rest), [(0, 4096), (61_440, 4096), (81_920, 8192)]);
        let all: usize = rest.iter().chain(experts.iter().flatten()).map(|part| part.length).sum();
        assert_eq!(all, 90_112);
    }

    #[test]
    fn weights_of_one_expert_are_its_pages() {
        let of = |owner, offset, length| ExpertTensor { owner: Some(owner), ..tensor(offset, length) };
        let tensors =
            ExpertTensors { count: 2, tensors: vec![of(1, 4096, 40_960), of(0, 45_056, 36_864), of(1, 81_920, 8192)] };
        let (rest, experts) = tensors.divide(vec![mapping(0, 94_208)]);
        let parts =
            |mappings: &[Mapping]| -> Vec<_> { mappings.iter().map(|part| (part.offset, part.length)).collect() };
        assert_eq!(parts(&experts[0]), [(45_056, 36_864)]);
        assert_eq!(parts(&experts[1]), [(4096, 40_960), (81_920, 8192)]);
        assert_eq!(parts(&rest), [(0, 4096), (90_112, 4096)]);
    }

    #[test]
    fn tensors_that_are_not_mapped_as_a_whole_are_not_divided() {
        let tensors = ExpertTensors { count: 2, tensors: vec![tensor(4096, 40_960)] };
        let whole = vec![mapping(0, 8192)];
        assert_eq!(tensors.divide(whole.clone()), (whole, vec![]));
        let elsewhere = vec![Mapping { path: "/other".into(), ..mapping(0, 90_112) }];
        assert_eq!(tensors.divide(elsewhere.clone()), (elsewhere, vec![]));
        let none = vec![mapping(0, 8192)];
        assert_eq!(ExpertTensors::default().divide(none.clone()), (none, vec![]));
    }
}
