//! A compressed region: its index entry, its parts, and how a part is compressed and decompressed.

use super::PART;
use super::sums::SumLayout;
use super::words::Word;
use crate::weights::file::SECTOR;
use std::ops::Range;
use std::str::FromStr;

/// Bytes of a float32.
const WIDE: usize = 4;

/// Whole pages of the weights file that are stored compressed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CompressedRegion {
    /// Offset in the weights file.
    pub offset: u64,
    /// Uncompressed length in bytes.
    pub length: usize,
    /// Offset of the first part in the file of compressed regions.
    pub stored: u64,
    pub(super) code: Code,
}

/// The encoding of a region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Code {
    /// Every float32 in the same encoding.
    Words(Word),
    /// `lead` bytes uncompressed; the sums and scales of a layout, stored as the scales alone; the rest uncompressed.
    Sums { lead: usize, layout: SumLayout, scales: Word },
}

/// A part of a region that is read and decompressed at once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RegionPart {
    /// Offset in the file of compressed regions.
    pub at: u64,
    /// Stored bytes; the next part begins at the next whole sector.
    pub bytes: usize,
    /// The byte ranges of the region that it fills. No two parts fill the same byte.
    pub fills: [Range<usize>; 2],
}

impl CompressedRegion {
    /// Its parts, in order.
    pub fn parts(&self) -> Vec<RegionPart> {
        let mut at = self.stored;
        let mut parts = Vec::new();
        let mut add = |bytes: usize, fills: [Range<usize>; 2]| {
            parts.push(RegionPart { at, bytes, fills });
            at += (bytes as u64).next_multiple_of(SECTOR);
        };
        match self.code {
            Code::Words(word) => {
                let uncompressed = PART / word.bytes() * WIDE;
                for from in (0..self.length).step_by(uncompressed) {
                    let to = self.length.min(from + uncompressed);
                    add((to - from) / WIDE * word.bytes(), [from..to, to..to]);
                }
            }
            Code::Sums { lead, layout, scales } => {
                let (sums, all) = (lead, layout.bytes(&(0..layout.tiles)).end);
                let tail = lead + 2 * all..self.length;
                add(lead + tail.len(), [0..lead, tail]);
                let each = (PART / (layout.tile() * scales.bytes())).max(1);
                for from in (0..layout.tiles).step_by(each) {
                    let tiles = from..layout.tiles.min(from + each);
                    let bytes = layout.bytes(&tiles);
                    let shifted = |base: usize| base + bytes.start..base + bytes.end;
                    add(tiles.len() * layout.tile() * scales.bytes(), [shifted(sums), shifted(sums + all)]);
                }
            }
        }
        parts.retain(|part| part.bytes > 0);
        parts
    }

    /// Bytes of all its parts in the file, padding included.
    pub fn stored_bytes(&self) -> u64 {
        self.parts().iter().map(|part| (part.bytes as u64).next_multiple_of(SECTOR)).sum()
    }

    /// Decompresses a part into the ranges that it fills.
    pub fn decompress(&self, part: &RegionPart, stored: &[u8], fills: [&mut [u8]; 2]) {
        let [first, second] = fills;
        match self.code {
            Code::Words(word) => word.widen(stored, first.as_chunks_mut().0),
            Code::Sums { lead, .. } if part.fills[0] == (0..lead) => {
                first.copy_from_slice(&stored[..lead]);
                second.copy_from_slice(&stored[lead..part.bytes]);
            }
            Code::Sums { layout, scales, .. } => {
                layout.decompress(scales, &stored[..part.bytes], first.as_chunks_mut().0, second.as_chunks_mut().0);
            }
        }
    }

    /// Compresses the bytes of a part's ranges.
    pub(super) fn store(&self, part: &RegionPart, original: [&[u8]; 2]) -> Vec<u8> {
        let [first, second] = original;
        let mut stored = Vec::with_capacity(part.bytes);
        match self.code {
            Code::Words(word) => first.as_chunks().0.iter().for_each(|number| word.put(*number, &mut stored)),
            Code::Sums { lead, .. } if part.fills[0] == (0..lead) => stored.extend([first, second].concat()),
            Code::Sums { layout, scales, .. } => layout.store(scales, second.as_chunks().0, &mut stored),
        }
        stored
    }

    /// Its line in the index.
    pub fn line(&self) -> String {
        let CompressedRegion { offset, length, stored, code } = self;
        let code = match code {
            Code::Words(word) => word.name().to_owned(),
            Code::Sums { lead, layout: SumLayout { tiles, blocks, run, factor }, scales } => {
                format!("sums {lead} {tiles} {blocks} {run} {factor} {}", scales.name())
            }
        };
        format!("{offset} {length} {stored} {code}\n")
    }

    /// Parses a line of the index; `None` if it is malformed or inconsistent.
    pub fn parse(line: &str) -> Option<CompressedRegion> {
        let mut fields = line.split(' ');
        let (offset, length, stored) = (next(&mut fields)?, next(&mut fields)?, next(&mut fields)?);
        let name = fields.next()?;
        let code = match Word::named(name) {
            Some(word) => Code::Words(word),
            None if name == "sums" => {
                let lead = next(&mut fields)?;
                let (tiles, blocks, run) = (next(&mut fields)?, next(&mut fields)?, next(&mut fields)?);
                let layout = SumLayout { tiles, blocks, run, factor: next(&mut fields)? };
                Code::Sums { lead, layout, scales: Word::named(fields.next()?)? }
            }
            None => return None,
        };
        let region = CompressedRegion { offset, length, stored, code };
        (fields.next().is_none() && region.is_sound()).then_some(region)
    }

    /// Whether it is whole pages, and its parts fill no byte outside of it.
    fn is_sound(&self) -> bool {
        let sector = SECTOR as usize;
        let pages = self.offset.is_multiple_of(SECTOR)
            && self.stored.is_multiple_of(SECTOR)
            && self.length.is_multiple_of(sector);
        let fits = match self.code {
            Code::Words(word) => word != Word::Full,
            Code::Sums { lead, layout: SumLayout { tiles, blocks, run, .. }, .. } => {
                let numbers =
                    tiles.checked_mul(blocks).and_then(|bytes| bytes.checked_mul(super::sums::TILE * 2 * WIDE));
                let end = numbers.and_then(|bytes| bytes.checked_add(lead));
                tiles > 0 && (1..=blocks).contains(&run) && end.is_some_and(|end| end <= self.length)
            }
        };
        pages && self.length > 0 && fits
    }
}

fn next<T: FromStr>(fields: &mut std::str::Split<'_, char>) -> Option<T> {
    fields.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> SumLayout {
        SumLayout { tiles: 3, blocks: 64, run: 2, factor: -8.0 }
    }

    #[test]
    fn a_region_survives_formatting_and_parsing() {
        let words = CompressedRegion { offset: 8192, length: 3 << 20, stored: 4096, code: Code::Words(Word::Half) };
        assert_eq!(words.line(), "8192 3145728 4096 float16\n");
        let code = Code::Sums { lead: 64, layout: layout(), scales: Word::Bfloat };
        let sums = CompressedRegion { offset: 0, length: 7 * 4096, stored: 0, code };
        for region in [words, sums] {
            assert_eq!(CompressedRegion::parse(region.line().trim_end()), Some(region));
        }
        for strange in [
            "",
            "0 4096 0",
            "0 4096 0 float32",
            "0 4096 0 float16 more",
            "1 4096 0 float16",
            "0 4095 0 float16",
            "0 4096 7 float16",
            "0 0 0 float16",
            "0 24576 0 sums 64 3 64 2 -8 bfloat16",
            "0 28672 0 sums 64 3 64 0 -8 bfloat16",
            "0 28672 0 sums 64 18446744073709551615 64 2 -8 bfloat16",
        ] {
            assert_eq!(CompressedRegion::parse(strange), None, "{strange:?}");
        }
    }

    #[test]
    fn parts_fill_every_byte_once() {
        let code = Code::Sums { lead: 64, layout: SumLayout { tiles: 700, ..layout() }, scales: Word::Full };
        let length = (64 + 700 * 64 * 16 * 8 + 50_usize).next_multiple_of(4096);
        let words = Code::Words(Word::Bfloat);
        for (length, code) in [(length, code), (5 << 20, words), (4096, words)] {
            let parts = CompressedRegion { offset: 0, length, stored: 12_288, code }.parts();
            let mut filled = vec![0; length];
            parts
                .iter()
                .flat_map(|part| part.fills.clone())
                .for_each(|fill| filled[fill].iter_mut().for_each(|n| *n += 1));
            assert!(filled.iter().all(|times| *times == 1));
            assert!(parts.iter().all(|part| part.bytes <= PART && part.at.is_multiple_of(SECTOR)));
            let ends = parts.iter().map(|part| part.at + part.bytes as u64);
            assert!(ends.zip(&parts[1..]).all(|(end, next)| end <= next.at && next.at < end + SECTOR));
        }
    }
}
