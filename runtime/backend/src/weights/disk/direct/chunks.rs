//! Divides a session's weights into chunks, in the order in which they are locked, and plans where each read goes.

use super::super::mapping::Mapping;
use super::address_space::huge_pages;
use super::compressed::{Compressed, CompressedRegion, PART, RegionPart};
use super::open_files::{OpenFiles, ReadFrom};
use super::reader::{BUFFER, ReadTarget};
use crate::weights::file::SECTOR;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most bytes of one read. Larger reads are no faster, and smaller ones let the next stage's reads start sooner.
pub(super) const MAX_READ: u64 = 2 << 20;

/// One read of a chunk of weights.
pub(super) struct ChunkRead {
    pub file: ReadFrom,
    pub offset: u64,
    pub length: usize,
    pub to: ReadTarget,
    /// The address ranges it fills.
    pub fills: Vec<Range<usize>>,
}

/// The files of one session's weights.
pub(super) struct Files {
    open: Arc<OpenFiles>,
    known: BTreeMap<PathBuf, ReadFrom>,
}

impl Files {
    /// Opens files through `open`.
    pub fn new(open: Arc<OpenFiles>) -> Self {
        Files { open, known: BTreeMap::new() }
    }

    fn named(&mut self, path: &Path) -> io::Result<ReadFrom> {
        if let Some(known) = self.known.get(path) {
            return Ok(known.clone());
        }
        let named = ReadFrom::Named(Arc::new(self.open.file(path)?));
        self.known.insert(path.to_owned(), named.clone());
        Ok(named)
    }
}

/// A range of weights that is locked or streamed as one.
pub(super) struct WeightRange<'a> {
    pub mapping: Mapping,
    /// The compressed region that holds it, if one does.
    pub region: Option<StoredRegion<'a>>,
}

/// A compressed region and the file that stores it.
#[derive(Clone, Copy)]
pub(super) struct StoredRegion<'a> {
    region: &'a CompressedRegion,
    file: &'a Path,
}

impl StoredRegion<'_> {
    /// Bytes that reading it takes.
    pub fn stored_bytes(&self) -> u64 {
        self.region.stored_bytes()
    }
}

/// A range whose place in the order of locking is to be decided.
struct LockCandidate<'a> {
    range: WeightRange<'a>,
    /// Whether it lies in huge pages; else it is a fragment, or compressed.
    is_huge: bool,
}

impl LockCandidate<'_> {
    /// The sort key. The range with the smallest key is locked first.
    fn key(&self) -> (u64, bool, usize, u64) {
        let Mapping { length, offset, .. } = self.range.mapping;
        // Bytes per 1000 that compression saves already.
        let saved = self
            .range
            .region
            .map_or(0, |region| 1000 - region.stored_bytes().min(length as u64) * 1000 / length as u64);
        (saved, self.is_huge, length, offset)
    }
}

/// Divides mappings into compressed regions and the rest, in the order in which they are locked. Uncompressed ranges come first, because
/// each locked byte saves a byte of reading; the better a region is compressed, the later it comes. Among ranges that save the same, the
/// fragments outside huge pages come first, because reading them needs a copy from a staging buffer and many small remaps. Among equals the
/// smallest comes first.
pub(super) fn lock_order(mappings: Vec<Mapping>, compressed: &Compressed) -> Vec<WeightRange<'_>> {
    let mut ranges: Vec<_> = mappings.into_iter().flat_map(|mapping| split_at_regions(mapping, compressed)).collect();
    ranges.sort_by_key(|range| range.mapping.start);
    let merged = merge_adjacent(ranges.iter().map(|range| &range.mapping));
    let mut candidates: Vec<_> = ranges.into_iter().flat_map(|range| separate_fragments(range, &merged)).collect();
    candidates.sort_by_cached_key(LockCandidate::key);
    candidates.into_iter().map(|candidate| candidate.range).collect()
}

/// Divides a mapping into the compressed regions that it contains and what lies between them.
fn split_at_regions(mapping: Mapping, compressed: &Compressed) -> Vec<WeightRange<'_>> {
    let mut ranges = Vec::new();
    let uncompressed = |mapping| WeightRange { mapping, region: None };
    let Compressed { stored: file, regions } = compressed;
    let of_file = regions.iter().filter(|region| region.file == mapping.path).collect::<Vec<_>>();
    let mut rest = Some(mapping);
    for region in of_file {
        let Some(whole) = rest.take() else { break };
        let end = whole.offset + whole.length as u64;
        if region.offset < whole.offset || region.offset + region.length as u64 > end {
            rest = Some(whole);
            continue;
        }
        let (before, after) = whole.split(region.offset - whole.offset);
        let (compressed, after) = after.map_or((None, None), |after| after.split(region.length as u64));
        ranges.extend(before.map(uncompressed));
        ranges.extend(compressed.map(|mapping| WeightRange { mapping, region: Some(StoredRegion { region, file }) }));
        rest = after;
    }
    ranges.extend(rest.map(uncompressed));
    ranges
}

/// Separates the fragments of an uncompressed range from its part in huge pages. `merged` are all mappings, adjacent ones merged.
fn separate_fragments<'a>(range: WeightRange<'a>, merged: &[Mapping]) -> Vec<LockCandidate<'a>> {
    if range.region.is_some() {
        return vec![LockCandidate { range, is_huge: false }];
    }
    let [before, inside, after] = split_at(&range.mapping, in_huge_pages(merged, &range.mapping));
    let candidate = |mapping, is_huge| LockCandidate { range: WeightRange { mapping, region: None }, is_huge };
    let fragments = before.into_iter().chain(after).map(|part| candidate(part, false));
    fragments.chain(inside.map(|part| candidate(part, true))).collect()
}

/// The addresses that huge pages may fill in the merged mapping that contains `mapping`.
pub(super) fn in_huge_pages(merged: &[Mapping], mapping: &Mapping) -> Range<usize> {
    let containing = merged.iter().find(|other| other.start + other.length > mapping.start);
    containing.map_or(0..0, huge_pages)
}

/// The parts of a mapping before, within and after an address range.
fn split_at(mapping: &Mapping, addresses: Range<usize>) -> [Option<Mapping>; 3] {
    let (before, rest) = mapping.split(addresses.start.saturating_sub(mapping.start) as u64);
    let split_at_end = |rest: Mapping| rest.split(addresses.end.saturating_sub(rest.start) as u64);
    let (inside, after) = rest.map_or((None, None), split_at_end);
    [before, inside, after]
}

/// Merges adjacent mappings: a huge page that is freed in two parts is split, and the system then allocates small pages there.
pub(super) fn merge_adjacent<'a>(parts: impl Iterator<Item = &'a Mapping>) -> Vec<Mapping> {
    let mut merged: Vec<Mapping> = Vec::new();
    for part in parts {
        match merged.last_mut() {
            Some(last) if last.start + last.length == part.start => last.length += part.length,
            _ => merged.push(part.clone()),
        }
    }
    merged
}

/// The reads of a range. Uncompressed weights are read in place within `in_place`, and through a staging buffer elsewhere.
pub(super) fn reads(
    WeightRange { mapping, region }: &WeightRange<'_>,
    in_place: Range<usize>,
    files: &mut Files,
) -> io::Result<Vec<ChunkRead>> {
    match region {
        Some(StoredRegion { region, file }) => Ok(compressed_reads(mapping, region, &files.named(file)?)),
        None => Ok(uncompressed_reads(mapping, in_place, &files.named(&mapping.path)?)),
    }
}

fn uncompressed_reads(mapping: &Mapping, in_place: Range<usize>, file: &ReadFrom) -> Vec<ChunkRead> {
    let [before, inside, after] = split_at(mapping, in_place);
    let pieces_of = |part: Option<Mapping>, bytes| part.into_iter().flat_map(move |part| pieces(part, bytes));
    let inside = pieces_of(inside, MAX_READ).map(|piece| (ReadTarget::Memory(piece.start), piece));
    let fragments = pieces_of(before, BUFFER as u64).chain(pieces_of(after, BUFFER as u64));
    let fragments = fragments.map(|piece| (copy_target(&piece), piece));
    let read = |(to, Mapping { start, length, offset, .. }): (ReadTarget, Mapping)| {
        let fills = std::iter::once(start..start + length).collect();
        ChunkRead { file: file.clone(), offset, length, to, fills }
    };
    inside.chain(fragments).map(read).collect()
}

fn compressed_reads(mapping: &Mapping, region: &CompressedRegion, file: &ReadFrom) -> Vec<ChunkRead> {
    let (parts, region) = (region.parts(), Arc::new(region.clone()));
    let start = mapping.start;
    let read = |parts: &[RegionPart]| {
        let (first, last) = (&parts[0], &parts[parts.len() - 1]);
        let length = (last.at - first.at) as usize + last.bytes.next_multiple_of(SECTOR as usize);
        let fills = parts.iter().flat_map(|part| part.fills.clone());
        let fills = fills.map(|fill| start + fill.start..start + fill.end).collect();
        let (file, offset, parts, region) = (file.clone(), first.at, parts.to_vec(), Arc::clone(&region));
        let decompress = move |stored: &[u8]| {
            for part in &parts {
                let fills = part.fills.clone().map(|fill| {
                    // SAFETY: the range lies within the mapping, which is as long as the region, and no other part fills it; the
                    // mapping stays and is not used until the read was waited for (`Reader::read`).
                    unsafe { std::slice::from_raw_parts_mut((start + fill.start) as *mut u8, fill.len()) }
                });
                let stored = stored.get((part.at - offset) as usize..).unwrap_or_default();
                region.decompress(part, stored, fills)?;
            }
            Ok(())
        };
        ChunkRead { file, offset, length, to: ReadTarget::Through(Arc::new(decompress)), fills }
    };
    group_reads(&parts).into_iter().map(read).collect()
}

/// The target of a read through a staging buffer to a mapping. Disks fill the huge pages of staging buffers twice as fast as small pages.
fn copy_target(mapping: &Mapping) -> ReadTarget {
    let Mapping { start, length, .. } = *mapping;
    ReadTarget::Through(Arc::new(move |read: &[u8]| {
        // SAFETY: the range is the mapping, which stays and is not used until the read was waited for (`Reader::read`).
        let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, length) };
        memory[..read.len()].copy_from_slice(read);
        Ok(())
    }))
}

/// Groups adjacent parts into reads of at most [`PART`] bytes.
fn group_reads(parts: &[RegionPart]) -> Vec<&[RegionPart]> {
    let mut groups = Vec::new();
    let mut rest = parts;
    while let Some(first) = rest.first() {
        let fits =
            |part: &&RegionPart| part.at + (part.bytes as u64).next_multiple_of(SECTOR) - first.at <= PART as u64;
        let (group, after) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        groups.push(group);
        rest = after;
    }
    groups
}

/// Splits a mapping into pieces of at most `bytes`.
fn pieces(mapping: Mapping, bytes: u64) -> Vec<Mapping> {
    let mut parts = Vec::new();
    let mut rest = Some(mapping);
    while let Some(mapping) = rest {
        let (first, more) = mapping.split(bytes);
        parts.extend(first);
        rest = more;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::super::address_space::HUGE;
    use super::*;

    #[test]
    fn fragments_outside_huge_pages_are_locked_first() {
        let mapping =
            |start: usize, length: usize| Mapping { start, length, offset: start as u64, path: PathBuf::new() };
        // Two adjacent mappings that share a huge page, one without fragments, and one smaller than the fragments of the others.
        let [first, second] = [(HUGE - 8192, 2 * HUGE), (3 * HUGE - 8192, HUGE)].map(|(at, bytes)| mapping(at, bytes));
        let [small, alone] = [mapping(8 * HUGE + 4096, 4096), mapping(20 * HUGE, 2 * HUGE)];
        let all = vec![alone.clone(), second, small.clone(), first];
        let order: Vec<Mapping> =
            lock_order(all, &Compressed::default()).into_iter().map(|range| range.mapping).collect();
        let [front, end] = [mapping(HUGE - 8192, 8192), mapping(3 * HUGE, HUGE - 8192)];
        let [shared, inside] = [mapping(3 * HUGE - 8192, 8192), mapping(HUGE, 2 * HUGE - 8192)];
        assert_eq!(order, [small, front, end, shared, inside, alone]);
    }
}
