//! What is read at once of a session's weights, from where, and how it comes to where it belongs.

use super::dense::{DENSE, PART, Part, Span};
use super::file::SECTOR;
use super::mapping::Mapping;
use super::open_files::{OpenFiles, ReadFrom};
use super::reader::To;
use super::staging::BUFFER;
use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Most bytes of one read. Larger ones are no faster, and finer ones let the next stage's begin sooner.
pub(super) const CHUNK: u64 = 2 << 20;

/// How a chunk of weights is read.
pub(super) struct ChunkRead {
    pub file: ReadFrom,
    pub offset: u64,
    pub length: usize,
    pub to: To,
    /// The addresses it fills.
    pub fills: Vec<Range<usize>>,
}

/// The files of one session's weights.
pub(super) struct Files {
    open: Arc<OpenFiles>,
    known: BTreeMap<PathBuf, ReadFrom>,
}

impl Files {
    /// Files that are opened by way of these.
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

/// What is stored densely apart from what is not, in the order in which it is best to lock it: a byte locked spares a byte of reading
/// where weights are stored as they are, and less where they are not. Of those that spare as much, the ones that fill no huge page
/// go first: a disk reads into huge pages, and what comes and goes beside them is copied there, and moves in many small pieces.
pub(super) fn by_what_they_spare(mappings: Vec<Mapping>, spans: &[Span]) -> Vec<(Mapping, Option<&Span>)> {
    let mut parts = Vec::new();
    for mapping in mappings {
        let mut rest = Some(mapping);
        for span in spans {
            let Some(whole) = rest.take() else { break };
            let end = whole.offset + whole.length as u64;
            if span.offset < whole.offset || span.offset + span.length as u64 > end {
                rest = Some(whole);
                continue;
            }
            let (before, behind) = whole.split(span.offset - whole.offset);
            let (dense, behind) = behind.map_or((None, None), |behind| behind.split(span.length as u64));
            parts.extend(before.map(|part| (part, None)));
            parts.extend(dense.map(|part| (part, Some(span))));
            rest = behind;
        }
        parts.extend(rest.map(|part| (part, None)));
    }
    parts.sort_by_key(|(mapping, _)| mapping.start);
    let runs = joined(parts.iter().map(|(mapping, _)| mapping));
    let apart = |(mapping, span)| match span {
        Some(_) => vec![(mapping, span, false)],
        None => {
            let [before, inside, behind] = within(&mapping, in_huge_pages(&runs, &mapping));
            let beside = before.into_iter().chain(behind).map(|part| (part, None, false));
            beside.chain(inside.map(|part| (part, None, true))).collect()
        }
    };
    let mut parts: Vec<_> = parts.into_iter().flat_map(apart).collect();
    parts.sort_by_cached_key(|(mapping, span, huge)| {
        // Of 1000 bytes, those that are not read.
        let spared =
            span.map_or(0, |span| 1000 - span.stored_bytes().min(mapping.length as u64) * 1000 / mapping.length as u64);
        (spared, *huge, mapping.length, mapping.offset)
    });
    parts.into_iter().map(|(mapping, span, _)| (mapping, span)).collect()
}

/// The addresses that huge pages may fill in the neighbourhood of a mapping, which is a part of one of `runs`.
pub(super) fn in_huge_pages(runs: &[Mapping], mapping: &Mapping) -> Range<usize> {
    let own = runs.iter().find(|run| run.start + run.length > mapping.start);
    own.map_or(0..0, Mapping::huge_pages)
}

/// What of a mapping lies before, at and behind these addresses.
fn within(mapping: &Mapping, addresses: Range<usize>) -> [Option<Mapping>; 3] {
    let (before, rest) = mapping.split(addresses.start.saturating_sub(mapping.start) as u64);
    let at = |rest: Mapping| rest.split(addresses.end.saturating_sub(rest.start) as u64);
    let (inside, behind) = rest.map_or((None, None), at);
    [before, inside, behind]
}

/// Neighbours, which follow each other here, as one: a huge page that is given back in two parts is taken apart, and the next
/// there are small ones.
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

/// What is read at once of a mapping. Of what is not stored densely, only what lies at the addresses `in_place` is read to where it
/// belongs.
pub(super) fn reads(
    mapping: &Mapping,
    span: Option<&Span>,
    in_place: Range<usize>,
    files: &mut Files,
) -> io::Result<Vec<ChunkRead>> {
    let Some(span) = span else {
        let file = files.named(&mapping.path)?;
        let [before, inside, behind] = within(mapping, in_place);
        let pieces = |part: Option<Mapping>, bytes| part.into_iter().flat_map(move |part| pieces(part, bytes));
        let beside = pieces(before, BUFFER as u64).chain(pieces(behind, BUFFER as u64));
        let inside = pieces(inside, CHUNK).map(|piece| (To::Memory(piece.start), piece));
        let read = |(to, Mapping { start, length, offset, .. }): (To, Mapping)| {
            let fills = std::iter::once(start..start + length).collect();
            ChunkRead { file: file.clone(), offset, length, to, fills }
        };
        return Ok(inside.chain(beside.map(|piece| (copied(&piece), piece))).map(read).collect());
    };
    let file = files.named(&mapping.path.with_file_name(DENSE))?;
    let (parts, span) = (span.parts(), Arc::new(span.clone()));
    let start = mapping.start;
    let read = |parts: &[Part]| {
        let (first, last) = (&parts[0], &parts[parts.len() - 1]);
        let length = (last.at - first.at) as usize + last.bytes.next_multiple_of(SECTOR as usize);
        let fills = parts.iter().flat_map(|part| part.fills.clone());
        let fills = fills.map(|fill| start + fill.start..start + fill.end).collect();
        let (file, offset, parts, span) = (file.clone(), first.at, parts.to_vec(), Arc::clone(&span));
        let expand = move |stored: &[u8]| {
            for part in &parts {
                let fills = part.fills.clone().map(|fill| {
                    // SAFETY: the range lies within the mapping, which is as long as the span, and is this part's alone; whoever
                    // asked for the read sees to it that the mapping stays and nobody looks at it (`Reader::read`).
                    unsafe { std::slice::from_raw_parts_mut((start + fill.start) as *mut u8, fill.len()) }
                });
                span.expand(part, &stored[(part.at - offset) as usize..], fills);
            }
        };
        ChunkRead { file, offset, length, to: To::Through(Arc::new(expand)), fills }
    };
    Ok(together(&parts).into_iter().map(read).collect())
}

/// To a mapping by way of memory that is faster to read to: a disk fills huge pages twice as fast as small ones.
fn copied(mapping: &Mapping) -> To {
    let Mapping { start, length, .. } = *mapping;
    To::Through(Arc::new(move |read: &[u8]| {
        // SAFETY: the range is the mapping; whoever asked for the read sees to it that it stays and nobody looks at it
        // (`Reader::read`).
        let memory = unsafe { std::slice::from_raw_parts_mut(start as *mut u8, length) };
        memory[..read.len()].copy_from_slice(read);
    }))
}

/// Parts that lie side by side, as many as may be read at once.
fn together(parts: &[Part]) -> Vec<&[Part]> {
    let mut groups = Vec::new();
    let mut rest = parts;
    while let Some(first) = rest.first() {
        let fits = |part: &&Part| part.at + (part.bytes as u64).next_multiple_of(SECTOR) - first.at <= PART as u64;
        let (group, behind) = rest.split_at(rest.iter().take_while(fits).count().max(1));
        groups.push(group);
        rest = behind;
    }
    groups
}

/// Parts of at most so many bytes.
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
    fn of_what_spares_as_much_the_ends_beside_huge_pages_stay_first() {
        let mapping =
            |start: usize, length: usize| Mapping { start, length, offset: start as u64, path: PathBuf::new() };
        // Two neighbours that share a huge page, one with none, and one that is smaller than the ends of others.
        let [first, second] = [(HUGE - 8192, 2 * HUGE), (3 * HUGE - 8192, HUGE)].map(|(at, bytes)| mapping(at, bytes));
        let [small, alone] = [mapping(8 * HUGE + 4096, 4096), mapping(20 * HUGE, 2 * HUGE)];
        let all = vec![alone.clone(), second, small.clone(), first];
        let order: Vec<Mapping> = by_what_they_spare(all, &[]).into_iter().map(|(mapping, _)| mapping).collect();
        let [front, end] = [mapping(HUGE - 8192, 8192), mapping(3 * HUGE, HUGE - 8192)];
        let [shared, inside] = [mapping(3 * HUGE - 8192, 8192), mapping(HUGE, 2 * HUGE - 8192)];
        assert_eq!(order, [small, front, end, shared, inside, alone]);
    }
}
