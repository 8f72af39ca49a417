//! Finds the regions of weights that can be compressed, and writes them.

use super::checksum::checksum;
use super::exponents::{GROUP, Tail};
use super::region::{Code, CompressedRegion, PartShape, StoredPart};
use super::sums::{SumLayout, candidates};
use super::words::Word;
use super::{COMPRESSED_FILE, PART, REGIONS_FILE};
use crate::weights::file::SECTOR;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Smaller weights are not compressed: the additional reads would cost more than they save.
const MIN_BYTES: u64 = 64 << 10;
/// Bytes of the sample of float32 numbers that is tested before the whole weight is.
const SAMPLE: usize = 64 << 10;
/// Bytes of a float32.
const WIDE: usize = 4;

/// Writes compressed regions and their index to a directory.
pub(in super::super) struct RegionWriter<'a> {
    dir: &'a Path,
    /// The most stored bytes per 1000 original bytes for which a region is compressed.
    limit: u64,
    out: BufWriter<File>,
    end: u64,
    index: String,
}

impl<'a> RegionWriter<'a> {
    /// Creates the file of regions. Only regions that then take at most `limit` bytes per 1000 are compressed.
    pub fn create(dir: &'a Path, limit: u64) -> io::Result<Self> {
        let out = BufWriter::with_capacity(PART, File::create(dir.join(COMPRESSED_FILE))?);
        Ok(RegionWriter { dir, limit, out, end: 0, index: String::new() })
    }

    /// Compresses what can be compressed of the weight at `offset` of the file `path`. `name` is the file's name in the index.
    pub fn add(&mut self, path: &Path, name: &Path, (offset, length): (u64, u64)) -> io::Result<()> {
        if length < MIN_BYTES {
            return Ok(());
        }
        let source = WeightSource(File::open(path)?);
        for Candidate { offset, encoded, length, code } in source.candidates(offset, to_usize(length)?)? {
            let (file, stored, sizes) = (name.to_owned(), self.end, Vec::new());
            let mut region = CompressedRegion { file, offset, length, stored, encoded, code, sizes };
            let is_stored = self.store(&source, &mut region)?;
            let line = region.line().filter(|_| is_stored && self.is_short(region.stored_bytes(), length));
            match line {
                Some(line) => {
                    self.end += region.stored_bytes();
                    self.index += &line;
                    break;
                }
                None => {
                    self.out.seek(SeekFrom::Start(self.end))?;
                }
            }
        }
        // Drop what was read here from the page cache, so that it does not displace other memory.
        crate::os::drop_cached(&source.0, offset / SECTOR * SECTOR, length.next_multiple_of(SECTOR));
        Ok(())
    }

    /// Writes what remains and the index.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.flush()?;
        self.out.get_ref().set_len(self.end)?;
        fs::write(self.dir.join(REGIONS_FILE), self.index)
    }

    /// Writes a region, each part padded to whole sectors, and notes the sizes and checksums of its parts. Returns false, after a partial
    /// write, if the region does not decompress to the original or if a part is too long.
    fn store(&mut self, source: &WeightSource, region: &mut CompressedRegion) -> io::Result<bool> {
        let shapes = region.code.shapes(&region.encoded, region.length);
        let first = shapes.iter().position(|shape| shape.is_encoded);
        for (number, shape) in shapes.iter().enumerate() {
            let [first_fill, second] =
                shape.fills.clone().map(|fill| source.read(region.offset + fill.start as u64, fill.len()));
            let original = [first_fill?, second?];
            let stored = region.code.store(shape, [&original[0], &original[1]]);
            // If the first encoded part does not shrink enough, the others will not either: do not encode a whole weight in vain.
            let is_long = stored.len() > shape.bytes
                || Some(number) == first && !self.is_short(stored.len() as u64, original.concat().len());
            region.sizes.push(StoredPart { bytes: stored.len(), checksum: checksum(&stored) });
            if is_long || !is_lossless(region, shape, &stored, &original) {
                return Ok(false);
            }
            self.out.write_all(&stored)?;
            self.out.write_all(&vec![0; stored.len().next_multiple_of(SECTOR as usize) - stored.len()])?;
        }
        Ok(true)
    }

    /// Whether storing `length` bytes as `stored` is worth it.
    fn is_short(&self, stored: u64, length: usize) -> bool {
        let length = length as u64;
        stored < length && stored.saturating_mul(1000) <= length.saturating_mul(self.limit)
    }
}

/// A region that may be compressible with a code.
struct Candidate {
    offset: u64,
    encoded: Range<usize>,
    length: usize,
    code: Code,
}

/// The file of uncompressed weights.
struct WeightSource(File);

impl WeightSource {
    /// Reads a range; bytes past the end of the file are zeros.
    fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        // The last page of the file may be partial.
        let mut done = 0;
        while done < length {
            match self.0.read_at(&mut bytes[done..], offset + done as u64)? {
                0 => break,
                read => done += read,
            }
        }
        Ok(bytes)
    }

    /// The regions of a weight that can be compressed as far as a sample shows, with the shortest code first: the sums and scales if the
    /// weight has them, else the whole weight.
    fn candidates(&self, offset: u64, length: usize) -> io::Result<Vec<Candidate>> {
        if offset.is_multiple_of(SECTOR)
            && let Some(sums) = self.sums(offset, length)?
        {
            return Ok(vec![sums]);
        }
        // A region is whole pages; bytes of neighbouring weights in them are stored as they are.
        let lead = to_usize(offset % SECTOR)?;
        let pages = (lead + length).next_multiple_of(SECTOR as usize);
        let sample = self.read(offset, SAMPLE.min(length / WIDE * WIDE))?;
        let (numbers, _) = sample.as_chunks();
        let candidate = |code: Code, bytes: usize| Candidate {
            offset: offset - lead as u64,
            encoded: lead..lead + length / bytes * bytes,
            length: pages,
            code,
        };
        let exponents = |tail: Tail| tail.is_exact(numbers).then(|| candidate(Code::Exponents(tail), GROUP * WIDE));
        let words = |word: Word| word.is_exact(numbers).then(|| candidate(Code::Words(word), WIDE));
        let shortest_first = [
            exponents(Tail::None),
            words(Word::Bfloat),
            exponents(Tail::Three),
            words(Word::Half),
            exponents(Tail::Sixteen),
        ];
        Ok(shortest_first.into_iter().flatten().collect())
    }

    /// The sums and scales of a weight, if it has them.
    fn sums(&self, offset: u64, length: usize) -> io::Result<Option<Candidate>> {
        for (sums, count) in candidates(length) {
            let (scales, some) = (sums + count * WIDE, count.min(SAMPLE / WIDE));
            let [of_sums, of_scales] =
                [self.read(offset + sums as u64, some * WIDE)?, self.read(offset + scales as u64, some * WIDE)?];
            let Some(layout) = SumLayout::find(count, of_sums.as_chunks().0, of_scales.as_chunks().0) else { continue };
            let word = self.word(offset + scales as u64, count * WIDE)?;
            // Sums may begin within a page.
            let lead = sums % SECTOR as usize;
            let encoded = lead..lead + 2 * count * WIDE;
            let (offset, length) = (offset + (sums - lead) as u64, encoded.end.next_multiple_of(SECTOR as usize));
            return Ok(Some(Candidate { offset, encoded, length, code: Code::Sums { layout, scales: word } }));
        }
        Ok(None)
    }

    /// The shortest encoding in whole words that is exact for all numbers of a range.
    fn word(&self, offset: u64, length: usize) -> io::Result<Word> {
        let mut kinds = [Word::Bfloat, Word::Half].to_vec();
        let (mut at, mut size) = (0, SAMPLE);
        while at < length && !kinds.is_empty() {
            let bytes = self.read(offset + at as u64, size.min(length - at))?;
            let words: &[[u8; 4]] = bytes.as_chunks().0;
            kinds.retain(|word| word.is_exact(words));
            (at, size) = (at + bytes.len(), PART);
        }
        Ok(kinds.first().copied().unwrap_or(Word::Full))
    }
}

fn to_usize(bytes: u64) -> io::Result<usize> {
    usize::try_from(bytes).map_err(io::Error::other)
}

/// Whether the part of a region whose size was noted last decompresses to the original.
fn is_lossless(region: &CompressedRegion, shape: &PartShape, stored: &[u8], original: &[Vec<u8>; 2]) -> bool {
    let Some(part) = region.parts().pop().filter(|part| part.fills == shape.fills) else { return false };
    let mut decompressed = original.each_ref().map(|bytes| vec![0xa5; bytes.len()]);
    let [first, second] = &mut decompressed;
    region.decompress(&part, stored, [first, second]).is_ok() && decompressed == *original
}

#[cfg(test)]
pub(in super::super) mod tests {
    use super::super::Compressed;
    use super::super::sums::tests::packed;
    use super::*;

    /// Offsets and lengths of the weights of [`write`]; the last does not begin at a page.
    const PIECES: [(u64, u64); 5] =
        [(0, 142_974), (143_360, 3 << 20), (3_289_088, 70_000), (3_359_104, 100), (3_359_232, 300_000)];

    /// Writes weights, some of which can be compressed, and their compressed regions. Returns the weights.
    pub fn write(dir: &Path) -> Vec<u8> {
        let mut bytes = vec![0; 3_659_232];
        // 96 columns of 62 blocks, integers of 16 bytes, scales in bfloat16.
        let scale =
            |n: usize, k: usize| f32::from_bits(0x3c00_0000 + (((n * 131 + k * 17) % 4000) << 16) as u32 % 0x0300_0000);
        let [sums, scales] = packed(96, 62, 2, -8.0, scale);
        let noise = |at: usize| (at as u32).wrapping_mul(2_654_435_761).to_be_bytes()[0];
        (0..bytes.len()).for_each(|at| bytes[at] = noise(at));
        let count = 96 * 62;
        bytes[count * 16..count * 20].copy_from_slice(sums.as_flattened());
        bytes[count * 20..count * 24].copy_from_slice(scales.as_flattened());
        let words = PIECES[1].0 as usize..(PIECES[1].0 + PIECES[1].1) as usize;
        for word in bytes[words].as_chunks_mut::<4>().0 {
            *word = half::f16::from_bits(u16::from_le_bytes([word[0], word[1] & 0x3f])).to_f32().to_le_bytes();
        }
        // Numbers of bfloat16 precision from 0.5 to 64.
        for word in bytes[3_359_232..].as_chunks_mut::<4>().0 {
            *word = [0, 0, word[2], 0x3f + (word[3] & 1) + (word[2] & 0x80)];
        }
        fs::write(dir.join("weights"), &bytes).unwrap();
        make(dir, 1000);
        bytes
    }

    /// Compresses the weights of a directory.
    fn make(dir: &Path, limit: u64) {
        let mut writer = RegionWriter::create(dir, limit).unwrap();
        PIECES.iter().for_each(|piece| writer.add(&dir.join("weights"), Path::new("weights"), *piece).unwrap());
        writer.finish().unwrap();
    }

    /// Offset, length and stored bytes of each region.
    fn found(dir: &Path) -> Vec<(u64, usize, u64)> {
        let compressed = Compressed::open(dir, dir).unwrap();
        let of = |region: &CompressedRegion| (region.offset, region.length, region.stored_bytes());
        let found: Vec<_> = compressed.regions.iter().map(of).collect();
        let stored = fs::metadata(dir.join(COMPRESSED_FILE)).unwrap().len();
        assert_eq!(stored, found.iter().map(|(_, _, stored)| stored).sum::<u64>());
        found
    }

    #[test]
    fn only_compressible_regions_are_stored() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        // A quarter of 47,616 bytes of sums and scales, and 1,536 bytes that share their pages; both padded to whole sectors.
        let sums = (94_208, 49_152, 4096 + 12_288);
        let words = (143_360, 3 << 20, 3 << 19);
        // 292 groups of 352 bytes and no exceptions, and 4,096 bytes that share their pages.
        let exponents = (3_358_720, 303_104, 4096 + 106_496);
        assert_eq!(found(dir.path()), [sums, words, exponents]);
        // Each needs more than 300 of 1000 bytes but not more than 400, or 500.
        for (limit, expected) in [(300, vec![]), (400, vec![sums, exponents]), (500, vec![sums, words, exponents])] {
            make(dir.path(), limit);
            assert_eq!(found(dir.path()), expected, "{limit}");
        }
    }

    #[test]
    fn one_wrong_sum_leaves_the_weight_uncompressed() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = write(dir.path());
        // Not in the first tile, from which the layout is found.
        bytes[95_232 + 20_000] ^= 1;
        fs::write(dir.path().join("weights"), &bytes).unwrap();
        make(dir.path(), 1000);
        assert_eq!(found(dir.path()).iter().map(|region| region.0).collect::<Vec<_>>(), [143_360, 3_358_720]);
    }

    #[test]
    fn one_number_of_more_precision_is_kept() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = write(dir.path());
        let whole = found(dir.path());
        // The last number of the bfloat16 ones: all are stored with the precision that it needs.
        for (low, longer) in [(0x20, true), (0x01, true)] {
            bytes[3_359_232 + 299_004 + 1] = low;
            fs::write(dir.path().join("weights"), &bytes).unwrap();
            make(dir.path(), 1000);
            let now = found(dir.path());
            assert_eq!(now[..2], whole[..2]);
            assert_eq!(now[2].2 > whole[2].2, longer, "{now:?}");
        }
    }
}
