//! Finds the regions of prepared weights that can be compressed, and writes them.

use super::region::{Code, CompressedRegion, RegionPart};
use super::sums::{SumLayout, candidates};
use super::words::Word;
use super::{COMPRESSED_FILE, PART, REGIONS_FILE};
use crate::weights::file::SECTOR;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Smaller weights are not compressed: the additional reads would cost more than they save.
const MIN_BYTES: usize = 64 << 10;
/// Bytes of float32 numbers that are tested before all of them are.
const SAMPLE: usize = 16 << 10;

/// Writes to `dir` the compressed regions of the weights in a file, and their index. `pieces` are the offsets and lengths of the weights.
pub(in super::super) fn make(weights: &Path, pieces: &[(u64, u64)], dir: &Path) -> io::Result<()> {
    let source = WeightSource(File::open(weights)?);
    let mut compressed = BufWriter::with_capacity(PART, File::create(dir.join(COMPRESSED_FILE))?);
    let (mut end, mut index) = (0, String::new());
    for (offset, length) in
        pieces.iter().filter(|(offset, length)| offset.is_multiple_of(SECTOR) && *length >= MIN_BYTES as u64)
    {
        let Some(region) = source.find(*offset, usize::try_from(*length).map_err(io::Error::other)?, end)? else {
            continue;
        };
        if source.store(&region, &mut compressed)? {
            end += region.stored_bytes();
            index += &region.line();
        } else {
            compressed.seek(SeekFrom::Start(end))?;
        }
    }
    compressed.flush()?;
    compressed.get_ref().set_len(end)?;
    fs::write(dir.join(REGIONS_FILE), index)
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

    /// The region of a weight that can be compressed, to be stored at the offset `stored`: sums and scales if it has them, else all of it.
    fn find(&self, offset: u64, length: usize, stored: u64) -> io::Result<Option<CompressedRegion>> {
        for (sums, count) in candidates(length) {
            let (scales, some) = (sums + count * 4, count.min(SAMPLE));
            let [of_sums, of_scales] =
                [self.read(offset + sums as u64, some * 4)?, self.read(offset + scales as u64, some * 4)?];
            let Some(layout) = SumLayout::find(count, of_sums.as_chunks().0, of_scales.as_chunks().0) else { continue };
            let word = self.word(offset + scales as u64, count * 4)?;
            // Sums may begin within a page; the other bytes of their pages are stored uncompressed.
            let lead = sums % SECTOR as usize;
            let pages = (lead + 2 * count * 4).next_multiple_of(SECTOR as usize);
            let begin = offset + (sums - lead) as u64;
            return Ok(Some(CompressedRegion {
                offset: begin,
                length: pages,
                stored,
                code: Code::Sums { lead, layout, scales: word },
            }));
        }
        let pages = length / SECTOR as usize * SECTOR as usize;
        Ok(match self.word(offset, pages)? {
            Word::Full => None,
            word => Some(CompressedRegion { offset, length: pages, stored, code: Code::Words(word) }),
        })
    }

    /// The shortest encoding that is exact for all numbers of a range.
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

    /// Writes a region, each part padded to whole sectors. False, after a partial write, if it does not decompress to the original.
    fn store(&self, region: &CompressedRegion, out: &mut impl Write) -> io::Result<bool> {
        for part in region.parts() {
            let [first, second] =
                part.fills.clone().map(|fill| self.read(region.offset + fill.start as u64, fill.len()));
            let original = [first?, second?];
            let stored = region.store(&part, [&original[0], &original[1]]);
            if !is_lossless(region, &part, &stored, &original) {
                return Ok(false);
            }
            out.write_all(&stored)?;
            out.write_all(&vec![0; stored.len().next_multiple_of(SECTOR as usize) - stored.len()])?;
        }
        Ok(true)
    }
}

fn is_lossless(region: &CompressedRegion, part: &RegionPart, stored: &[u8], original: &[Vec<u8>; 2]) -> bool {
    let mut decompressed = original.each_ref().map(|bytes| vec![0xa5; bytes.len()]);
    let [first, second] = &mut decompressed;
    region.decompress(part, stored, [first, second]);
    stored.len() == part.bytes && decompressed == *original
}

#[cfg(test)]
pub(in super::super) mod tests {
    use super::super::sums::tests::packed;
    use super::*;

    /// Offsets and lengths of the weights of [`write`].
    const PIECES: [(u64, u64); 4] = [(0, 142_974), (143_360, 3 << 20), (3_289_088, 70_000), (3_359_104, 100)];

    /// Writes weights, some of which can be compressed, and their compressed regions. Returns the weights.
    pub fn write(dir: &Path) -> Vec<u8> {
        let mut bytes = vec![0; 3_359_204];
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
        fs::write(dir.join("weights"), &bytes).unwrap();
        make(&dir.join("weights"), &PIECES, dir).unwrap();
        bytes
    }

    #[test]
    fn only_compressible_regions_are_stored() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let regions = super::super::regions(dir.path()).unwrap();
        let found: Vec<_> =
            regions.iter().map(|region| (region.offset, region.length, region.stored_bytes())).collect();
        // A quarter of 47,616 bytes of sums and scales, and 1,536 bytes that share their pages; both padded to whole sectors.
        assert_eq!(found, [(94_208, 49_152, 4096 + 12_288), (143_360, 3 << 20, 3 << 19)]);
        assert_eq!(
            fs::metadata(dir.path().join(COMPRESSED_FILE)).unwrap().len(),
            found.iter().map(|(_, _, stored)| stored).sum::<u64>()
        );
    }

    #[test]
    fn one_wrong_sum_leaves_the_weight_uncompressed() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = write(dir.path());
        // Not in the first tile, from which the layout is found.
        bytes[95_232 + 20_000] ^= 1;
        fs::write(dir.path().join("weights"), &bytes).unwrap();
        make(&dir.path().join("weights"), &PIECES, dir.path()).unwrap();
        let regions = super::super::regions(dir.path()).unwrap();
        assert_eq!(regions.iter().map(|region| (region.offset, region.stored)).collect::<Vec<_>>(), [(143_360, 0)]);
        assert_eq!(fs::metadata(dir.path().join(COMPRESSED_FILE)).unwrap().len(), 3 << 19);
    }
}
