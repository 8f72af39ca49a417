//! A compressed region: its index entry, its parts, and how a part is compressed and decompressed.

use super::checksum::checksum;
use super::exponents::{GROUP, Tail, decode, encode};
use super::sums::SumLayout;
use super::words::Word;
use super::{Damaged, PART};
use crate::weights::file::SECTOR;
use std::ops::Range;
use std::path::PathBuf;
use std::str::FromStr;

/// Bytes of a float32.
const WIDE: usize = 4;

/// Whole pages of a weights file that are stored compressed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CompressedRegion {
    /// The weights file; in the index, relative to the directory of weights.
    pub file: PathBuf,
    /// Offset in the weights file.
    pub offset: u64,
    /// Uncompressed length in bytes.
    pub length: usize,
    /// Offset of the first part in the file of compressed regions.
    pub stored: u64,
    /// The bytes of the region that are encoded. The others, which share pages with them, are stored as they are.
    pub(super) encoded: Range<usize>,
    pub(super) code: Code,
    /// What is stored of each part.
    pub(super) sizes: Vec<StoredPart>,
}

/// The encoding of a region.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Code {
    /// Every float32 in the same 16 bits.
    Words(Word),
    /// Every float32 with a coded exponent.
    Exponents(Tail),
    /// The sums and scales of a layout, stored as the scales alone.
    Sums { layout: SumLayout, scales: Word },
}

/// What is stored of a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StoredPart {
    /// Stored bytes.
    pub bytes: usize,
    /// Their checksum.
    pub checksum: u32,
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
    checksum: u32,
    is_encoded: bool,
}

/// The bytes of a region that a part fills, and what that takes in the file.
pub(super) struct PartShape {
    pub fills: [Range<usize>; 2],
    pub is_encoded: bool,
    /// Stored bytes; for [`Code::Exponents`], the most that are allowed.
    pub bytes: usize,
}

impl Code {
    /// The parts of a region of `length` bytes of which `encoded` are encoded, in order.
    pub fn shapes(self, encoded: &Range<usize>, length: usize) -> Vec<PartShape> {
        let mut parts = Vec::new();
        let rest = length - encoded.len();
        parts.push(PartShape { fills: [0..encoded.start, encoded.end..length], is_encoded: false, bytes: rest });
        match self {
            Code::Words(word) => add_numbers(&mut parts, encoded, word.bytes()),
            Code::Exponents(tail) => add_numbers(&mut parts, encoded, tail.uncoded()),
            Code::Sums { layout, scales } => {
                let (sums, all) = (encoded.start, encoded.len() / 2);
                let each = (PART / (layout.tile() * scales.bytes())).max(1);
                for from in (0..layout.tiles).step_by(each) {
                    let tiles = from..layout.tiles.min(from + each);
                    let bytes = layout.bytes(&tiles);
                    let shifted = |base: usize| base + bytes.start..base + bytes.end;
                    let stored = tiles.len() * layout.tile() * scales.bytes();
                    let fills = [shifted(sums), shifted(sums + all)];
                    parts.push(PartShape { fills, is_encoded: true, bytes: stored });
                }
            }
        }
        parts.retain(|part| part.bytes > 0);
        parts
    }

    /// Compresses the bytes of a part's ranges.
    pub fn store(self, part: &PartShape, original: [&[u8]; 2]) -> Vec<u8> {
        let [first, second] = original;
        if !part.is_encoded {
            return original.concat();
        }
        let mut stored = Vec::with_capacity(part.bytes);
        match self {
            Code::Words(word) => first.as_chunks().0.iter().for_each(|number| word.put(*number, &mut stored)),
            Code::Exponents(tail) => stored = encode(tail, first.as_chunks().0),
            Code::Sums { layout, scales } => layout.store(scales, second.as_chunks().0, &mut stored),
        }
        stored
    }

    /// Decompresses a part into the ranges that it fills.
    fn decompress(self, is_encoded: bool, stored: &[u8], fills: [&mut [u8]; 2]) -> Result<(), Damaged> {
        let [first, second] = fills;
        match self {
            _ if !is_encoded => {
                let (start, rest) = stored.split_at_checked(first.len()).ok_or(Damaged)?;
                first.copy_from_slice(start);
                second.copy_from_slice(rest.get(..second.len()).ok_or(Damaged)?);
                Ok(())
            }
            Code::Words(word) => word.widen(stored, first.as_chunks_mut().0),
            Code::Exponents(tail) => decode(tail, stored, first.as_chunks_mut().0),
            Code::Sums { layout, scales } => {
                layout.decompress(scales, stored, first.as_chunks_mut().0, second.as_chunks_mut().0)
            }
        }
    }

    /// The code as one word of the index.
    fn name(self) -> String {
        match self {
            Code::Words(word) => word.name().to_owned(),
            Code::Exponents(tail) => format!("exponents:{}", tail.name()),
            Code::Sums { layout: SumLayout { tiles, blocks, run, factor }, scales } => {
                format!("sums:{tiles}:{blocks}:{run}:{factor}:{}", scales.name())
            }
        }
    }

    fn parse(name: &str) -> Option<Code> {
        let mut fields = name.split(':');
        let code = match fields.next()? {
            "exponents" => Code::Exponents(Tail::named(fields.next()?)?),
            "sums" => {
                let (tiles, blocks, run) = (next(&mut fields)?, next(&mut fields)?, next(&mut fields)?);
                let layout = SumLayout { tiles, blocks, run, factor: next(&mut fields)? };
                Code::Sums { layout, scales: Word::named(fields.next()?)? }
            }
            name => Code::Words(Word::named(name).filter(|word| *word != Word::Full)?),
        };
        fields.next().is_none().then_some(code)
    }

    /// Whether `bytes` can be encoded with it: whole numbers, groups or tiles.
    fn takes(self, bytes: usize) -> bool {
        match self {
            Code::Words(_) => bytes.is_multiple_of(WIDE),
            Code::Exponents(_) => bytes.is_multiple_of(GROUP * WIDE),
            Code::Sums { layout: SumLayout { tiles, blocks, run, .. }, .. } => {
                let numbers = tiles.checked_mul(blocks).and_then(|sums| sums.checked_mul(super::sums::TILE * 2 * WIDE));
                (1..=blocks).contains(&run) && numbers == Some(bytes)
            }
        }
    }
}

/// Adds the parts of the encoded numbers, each of which takes at most `each` stored bytes.
fn add_numbers(parts: &mut Vec<PartShape>, encoded: &Range<usize>, each: usize) {
    let uncompressed = PART / each * WIDE;
    for from in encoded.clone().step_by(uncompressed) {
        let to = encoded.end.min(from + uncompressed);
        parts.push(PartShape { fills: [from..to, to..to], is_encoded: true, bytes: (to - from) / WIDE * each });
    }
}

impl CompressedRegion {
    /// Its parts, in order.
    pub fn parts(&self) -> Vec<RegionPart> {
        let mut at = self.stored;
        let shapes = self.code.shapes(&self.encoded, self.length).into_iter().zip(&self.sizes);
        let part = |(shape, size): (PartShape, &StoredPart)| {
            let PartShape { fills, is_encoded, .. } = shape;
            let part = RegionPart { at, bytes: size.bytes, fills, checksum: size.checksum, is_encoded };
            at += padded(size.bytes);
            part
        };
        shapes.map(part).collect()
    }

    /// Bytes of all its parts in the file, padding included.
    pub fn stored_bytes(&self) -> u64 {
        self.sizes.iter().map(|part| padded(part.bytes)).sum()
    }

    /// Decompresses a part into the ranges that it fills; an error if its bytes are not those that were stored.
    pub fn decompress(&self, part: &RegionPart, stored: &[u8], fills: [&mut [u8]; 2]) -> Result<(), Damaged> {
        let stored = stored.get(..part.bytes).ok_or(Damaged)?;
        if checksum(stored) != part.checksum {
            return Err(Damaged);
        }
        self.code.decompress(part.is_encoded, stored, fills)
    }

    /// Its line in the index; `None` if the name of its file cannot be written in one.
    pub fn line(&self) -> Option<String> {
        let CompressedRegion { file, offset, length, stored, encoded, code, sizes } = self;
        let file = file.to_str().filter(|name| !name.contains('\n'))?;
        let sizes: Vec<String> = sizes.iter().map(|part| format!("{}:{:08x}", part.bytes, part.checksum)).collect();
        let (start, end, code, sizes) = (encoded.start, encoded.end, code.name(), sizes.join(","));
        Some(format!("{offset} {length} {stored} {start} {end} {code} {sizes} {file}\n"))
    }

    /// Parses a line of the index; `None` if it is malformed or inconsistent.
    pub fn parse(line: &str) -> Option<CompressedRegion> {
        let mut fields = line.splitn(8, ' ');
        let (offset, length, stored) = (next(&mut fields)?, next(&mut fields)?, next(&mut fields)?);
        let encoded = next(&mut fields)?..next(&mut fields)?;
        let code = Code::parse(fields.next()?)?;
        let size = |text: &str| {
            let (bytes, checksum) = text.split_once(':')?;
            Some(StoredPart { bytes: bytes.parse().ok()?, checksum: u32::from_str_radix(checksum, 16).ok()? })
        };
        let sizes = fields.next()?.split(',').map(size).collect::<Option<_>>()?;
        let file = fields.next().filter(|file| !file.is_empty())?.into();
        let region = CompressedRegion { file, offset, length, stored, encoded, code, sizes };
        region.is_sound().then_some(region)
    }

    /// Whether it is whole pages, and its parts fill no byte outside of it and are no longer than they may be.
    fn is_sound(&self) -> bool {
        let (sector, encoded) = (SECTOR as usize, &self.encoded);
        let pages = self.offset.is_multiple_of(SECTOR)
            && self.stored.is_multiple_of(SECTOR)
            && self.length.is_multiple_of(sector);
        if !pages || encoded.start >= encoded.end || encoded.end > self.length || !self.code.takes(encoded.len()) {
            return false;
        }
        let shapes = self.code.shapes(encoded, self.length);
        let is_shorter = |(shape, size): (&PartShape, &StoredPart)| match self.code {
            Code::Exponents(_) if shape.is_encoded => size.bytes <= shape.bytes,
            _ => size.bytes == shape.bytes,
        };
        shapes.len() == self.sizes.len() && shapes.iter().zip(&self.sizes).all(is_shorter)
    }
}

/// Bytes that a part of `bytes` bytes takes in the file.
fn padded(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(SECTOR)
}

fn next<'a, T: FromStr>(fields: &mut impl Iterator<Item = &'a str>) -> Option<T> {
    fields.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> SumLayout {
        SumLayout { tiles: 3, blocks: 64, run: 2, factor: -8.0 }
    }

    /// A region whose parts are as long as they may be.
    fn region(code: Code, encoded: Range<usize>, length: usize) -> CompressedRegion {
        let shapes = code.shapes(&encoded, length);
        let sizes = shapes.iter().map(|shape| StoredPart { bytes: shape.bytes, checksum: 0xab }).collect();
        CompressedRegion { file: "a b".into(), offset: 8192, length, stored: 4096, encoded, code, sizes }
    }

    #[test]
    fn a_region_survives_formatting_and_parsing() {
        let words = region(Code::Words(Word::Half), 0..3 << 19, 3 << 19);
        assert_eq!(words.line().unwrap(), "8192 1572864 4096 0 1572864 float16 786432:000000ab a b\n");
        let exponents = region(Code::Exponents(Tail::Sixteen), 100..100 + (2 << 20), 520 * 4096);
        let sums = region(Code::Sums { layout: layout(), scales: Word::Bfloat }, 64..24_640, 7 * 4096);
        for region in [words, exponents, sums] {
            assert_eq!(CompressedRegion::parse(region.line().unwrap().trim_end()), Some(region));
        }
        let unnamed = CompressedRegion { file: "a\nb".into(), ..region(Code::Words(Word::Half), 0..4096, 4096) };
        assert_eq!(unnamed.line(), None);
        for strange in [
            "",
            "0 4096 0",
            "0 4096 0 0 4096 float32 2048:1 w",
            "0 4096 0 0 4096 float16 2048:1",
            "0 4096 0 0 4096 float16 2048:1,1:1 w",
            "0 4096 0 0 4096 float16 2047:1 w",
            "1 4096 0 0 4096 float16 2048:1 w",
            "0 4095 0 0 4092 float16 2046:1 w",
            "0 4096 7 0 4096 float16 2048:1 w",
            "0 0 0 0 0 float16 0:1 w",
            "0 4096 0 8 4 float16 2048:1 w",
            "0 4096 0 0 8192 float16 4096:1 w",
            "0 4096 0 0 4096 exponents:bfloat16 2049:1 w",
            "0 8192 0 0 4100 exponents:bfloat16 4092:1,1000:1 w",
            "0 28672 0 64 24640 sums:3:64:0:-8:bfloat16 4096:1,6144:1 w",
            "0 28672 0 64 24644 sums:3:64:2:-8:bfloat16 4092:1,6144:1 w",
            "0 28672 0 64 24640 sums:18446744073709551615:64:2:-8:bfloat16 4096:1,6144:1 w",
        ] {
            assert_eq!(CompressedRegion::parse(strange), None, "{strange:?}");
        }
        assert!(CompressedRegion::parse("0 28672 0 64 24640 sums:3:64:2:-8:bfloat16 4096:1,6144:1 w").is_some());
        assert!(CompressedRegion::parse("0 4096 0 0 4096 exponents:bfloat16 1409:1 w").is_some());
    }

    #[test]
    fn parts_fill_every_byte_once() {
        let sums = SumLayout { tiles: 700, ..layout() };
        let end = 64 + 700 * 64 * 16 * 8_usize;
        let sums = (Code::Sums { layout: sums, scales: Word::Full }, 64..end, (end + 50).next_multiple_of(4096));
        let (words, exponents) = (Code::Words(Word::Bfloat), Code::Exponents(Tail::Three));
        for (code, encoded, length) in [
            sums,
            (words, 0..5 << 20, 5 << 20),
            (words, 0..4096, 4096),
            (exponents, 400..400 + (5 << 20), (5 << 20) + 4096),
            (Code::Exponents(Tail::Sixteen), 0..3 << 20, 3 << 20),
        ] {
            let parts = region(code, encoded, length).parts();
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

    #[test]
    fn a_changed_byte_of_any_code_is_damage() {
        let (word, tail) = (Word::Bfloat, Tail::None);
        let sums = Code::Sums { layout: layout(), scales: Word::Bfloat };
        for (code, encoded) in [(Code::Words(word), 4..24_576), (Code::Exponents(tail), 4..24_580), (sums, 64..24_640)]
        {
            let mut region = region(code, encoded.clone(), 7 * 4096);
            let original: Vec<u8> =
                (0..region.length).map(|at| if at % 4 < 2 { 0 } else { (at % 251) as u8 }).collect();
            let shapes = code.shapes(&encoded, region.length);
            let stored: Vec<Vec<u8>> =
                shapes.iter().map(|part| code.store(part, part.fills.clone().map(|fill| &original[fill]))).collect();
            region.sizes =
                stored.iter().map(|stored| StoredPart { bytes: stored.len(), checksum: checksum(stored) }).collect();
            for (part, stored) in region.parts().iter().zip(&stored) {
                let mut fills = part.fills.clone().map(|fill| vec![0; fill.len()]);
                let [first, second] = &mut fills;
                assert_eq!(region.decompress(part, stored, [first, second]), Ok(()));
                assert_eq!(region.decompress(part, &stored[1..], [first, second]), Err(Damaged));
                for at in [0, stored.len() / 2, stored.len() - 1] {
                    let mut changed = stored.clone();
                    changed[at] ^= 4;
                    assert_eq!(region.decompress(part, &changed, [first, second]), Err(Damaged), "{code:?}, byte {at}");
                }
            }
        }
    }
}
