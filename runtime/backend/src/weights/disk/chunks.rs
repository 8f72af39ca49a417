//! Divides a session's weights into chunks, in the order in which they are locked, and plans where each read goes.

use super::compressed::{COMPRESSED_FILE, CompressedRegion, PART, RegionPart};
use super::mapping::Mapping;
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

/// How a chunk of weights is read.
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

/// Divides mappings into compressed regions and the rest, in the order in which they are locked: uncompressed ranges first, because each
/// locked byte saves a byte of reading, and among ranges that save the same the fragments outside huge pages, which need a bounce copy
/// and many small remaps when they are streamed.
pub(super) fn lock_order(
    mappings: Vec<Mapping>,
    regions: &[CompressedRegion],
) -> Vec<(Mapping, Option<&CompressedRegion>)> {
    let mut parts = Vec::new();
    for mapping in mappings {
        let mut rest = Some(mapping);
        for region in regions {
            let Some(whole) = rest.take() else { break };
            let end = whole.offset + whole.length as u64;
            if region.offset < whole.offset || region.offset + region.length as u64 > end {
                rest = Some(whole);
                continue;
            }
            let (before, after) = whole.split(region.offset - whole.offset);
            let (compressed, after) = after.map_or((None, None), |after| after.split(region.length as u64));
            parts.extend(before.map(|part| (part, None)));
            parts.extend(compressed.map(|part| (part, Some(region))));
            rest = after;
        }
        parts.extend(rest.map(|part| (part, None)));
    }
    parts.sort_by_key(|(mapping, _)| mapping.start);
    let runs = joined(parts.iter().map(|(mapping, _)| mapping));
    let apart = |(mapping, region)| match region {
        Some(_) => vec![(mapping, region, false)],
        None => {
            let [before, inside, behind] = within(&mapping, in_huge_pages(&runs, &mapping));
            let fragments = before.into_iter().chain(behind).map(|part| (part, None, false));
            fragments.chain(inside.map(|part| (part, None, true))).collect()
        }
    };
    let mut parts: Vec<_> = parts.into_iter().flat_map(apart).collect();
    parts.sort_by_cached_key(|(mapping, region, huge)| {
        // Bytes per 1000 that compression saves already.
        let saved = region
            .map_or(0, |region| 1000 - region.stored_bytes().min(mapping.length as u64) * 1000 / mapping.length as u64);
        (saved, *huge, mapping.length, mapping.offset)
    });
    parts.into_iter().map(|(mapping, region, _)| (mapping, region)).collect()
}

/// The addresses that huge pages may fill in the run that contains a mapping.
pub(super) fn in_huge_pages(runs: &[Mapping], mapping: &Mapping) -> Range<usize> {
    let own = runs.iter().find(|run| run.start + run.length > mapping.start);
    own.map_or(0..0, Mapping::huge_pages)
}

/// The parts of a mapping before, within and after an address range.
fn within(mapping: &Mapping, addresses: Range<usize>) -> [Option<Mapping>; 3] {
    let (before, rest) = mapping.split(addresses.start.saturating_sub(mapping.start) as u64);
    let split_at_end = |rest: Mapping| rest.split(addresses.end.saturating_sub(rest.start) as u64);
    let (inside, behind) = rest.map_or((None, None), split_at_end);
    [before, inside, behind]
}

/// Merges adjacent mappings: a huge page that is freed in two parts is split, and the system then allocates small pages there.
pub(super) fn joined<'a>(parts: impl Iterator<Item = &'a Mapping>) -> Vec<Mapping> {
    let mut joined: Vec<Mapping> = Vec::new();
    for part in parts {
        match joined.last_mut() {
            Some(last) if last.start + last.length == part.start => last.length += part.length,
            _ => joined.push(part.clone()),
        }
    }
    joined
}

/// The reads of a mapping. Uncompressed weights are read in place within `in_place`, and through a staging buffer elsewhere.
pub(super) fn reads(
    mapping: &Mapping,
    region: Option<&CompressedRegion>,
    in_place: Range<usize>,
    files: &mut Files,
) -> io::Result<Vec<ChunkRead>> {
    let Some(region) = region else {
        let file = files.named(&mapping.path)?;
        let [before, inside, behind] = within(mapping, in_place);
        let pieces = |part: Option<Mapping>, bytes| part.into_iter().flat_map(move |part| pieces(part, bytes));
        let fragments = pieces(before, BUFFER as u64).chain(pieces(behind, BUFFER as u64));
        let inside = pieces(inside, MAX_READ).map(|piece| (ReadTarget::Memory(piece.start), piece));
        let read = |(to, Mapping { start, length, offset, .. }): (ReadTarget, Mapping)| {
            let fills = std::iter::once(start..start + length).collect();
            ChunkRead { file: file.clone(), offset, length, to, fills }
        };
        return Ok(inside.chain(fragments.map(|piece| (copied(&piece), piece))).map(read).collect());
    };
    let file = files.named(&mapping.path.with_file_name(COMPRESSED_FILE))?;
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
                region.decompress(part, &stored[(part.at - offset) as usize..], fills);
            }
        };
        ChunkRead { file, offset, length, to: ReadTarget::Through(Arc::new(decompress)), fills }
    };
    Ok(together(&parts).into_iter().map(read).collect())
}

/// Through a staging buffer to a mapping: disks fill the huge pages of staging buffers twice as fast as small pages.
fn copied(mapping: &Mapping) -> ReadTarget {
    let Mapping { start, length, .. } = *mapping;
    ReadTarget::Through(Arc::new(move |read: &[u8]| {
        // SAFETY: the range is the mapping, which stays and is not used until the read was waited for (`Reader::read`).
        let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, length) };
        memory[..read.len()].copy_from_slice(read);
    }))
}

/// Groups adjacent parts into reads of at most [`PART`] bytes.
fn together(parts: &[RegionPart]) -> Vec<&[RegionPart]> {
    let mut groups = Vec::new();
    let mut rest = parts;
    while let Some(first) = rest.first() {
        let fits =
            |part: &&RegionPart| part.at + (part.bytes as u64).next_multiple_of(SECTOR) - first.at <= PART as u64;
        let (group, behind) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        groups.push(group);
        rest = behind;
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
    use super::super::mapping::HUGE;
    use super::*;

    #[test]
    fn fragments_outside_huge_pages_are_locked_first() {
        let mapping =
            |start: usize, length: usize| Mapping { start, length, offset: start as u64, path: PathBuf::new() };
        // Two adjacent mappings that share a huge page, one without fragments, and one smaller than the fragments of the others.
        let [first, second] = [(HUGE - 8192, 2 * HUGE), (3 * HUGE - 8192, HUGE)].map(|(at, bytes)| mapping(at, bytes));
        let [small, alone] = [mapping(8 * HUGE + 4096, 4096), mapping(20 * HUGE, 2 * HUGE)];
        let all = vec![alone.clone(), second, small.clone(), first];
        let order: Vec<Mapping> = lock_order(all, &[]).into_iter().map(|(mapping, _)| mapping).collect();
        let [front, end] = [mapping(HUGE - 8192, 8192), mapping(3 * HUGE, HUGE - 8192)];
        let [shared, inside] = [mapping(3 * HUGE - 8192, 8192), mapping(HUGE, 2 * HUGE - 8192)];
        assert_eq!(order, [small, front, end, shared, inside, alone]);
    }
}
