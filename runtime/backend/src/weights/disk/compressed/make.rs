//! Storing what of prepared weights can be told in fewer bytes.

use super::region::{Code, CompressedRegion, Part};
use super::sums::{Layout, candidates};
use super::words::Word;
use super::{COMPRESSED_FILE, PART, REGIONS_FILE};
use crate::weights::file::SECTOR;
use std::fs::{self, File};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Weights of fewer bytes are stored as they are: more reads would cost more than they spare.
const LEAST: usize = 64 << 10;
/// Bytes of float32 numbers that are looked at before all are.
const SAMPLE: usize = 16 << 10;

/// Writes to `dir` what of `pieces`, offsets and lengths of weights in a file, is stored densely, and the list of it.
pub(in super::super) fn make(weights: &Path, pieces: &[(u64, u64)], dir: &Path) -> io::Result<()> {
    let source = Source(File::open(weights)?);
    let mut dense = BufWriter::with_capacity(PART, File::create(dir.join(COMPRESSED_FILE))?);
    let (mut end, mut list) = (0, String::new());
    for (offset, length) in
        pieces.iter().filter(|(offset, length)| offset.is_multiple_of(SECTOR) && *length >= LEAST as u64)
    {
        let Some(region) = source.find(*offset, usize::try_from(*length).map_err(io::Error::other)?, end)? else {
            continue;
        };
        if source.store(&region, &mut dense)? {
            end += region.stored_bytes();
            list += &region.line();
        } else {
            dense.seek(SeekFrom::Start(end))?;
        }
    }
    dense.flush()?;
    dense.get_ref().set_len(end)?;
    fs::write(dir.join(REGIONS_FILE), list)
}

/// The weights as they are.
struct Source(File);

impl Source {
    fn read(&self, offset: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        // The last page of the file may not be whole; nothing lies behind it.
        let mut done = 0;
        while done < length {
            match self.0.read_at(&mut bytes[done..], offset + done as u64)? {
                0 => break,
                read => done += read,
            }
        }
        Ok(bytes)
    }

    /// What is best stored otherwise of a weight, to begin at `stored`.
    fn find(&self, offset: u64, length: usize, stored: u64) -> io::Result<Option<CompressedRegion>> {
        for (sums, count) in candidates(length) {
            let (scales, some) = (sums + count * 4, count.min(SAMPLE));
            let [of_sums, of_scales] =
                [self.read(offset + sums as u64, some * 4)?, self.read(offset + scales as u64, some * 4)?];
            let Some(layout) = Layout::find(count, of_sums.as_chunks().0, of_scales.as_chunks().0) else { continue };
            let word = self.word(offset + scales as u64, count * 4)?;
            // Sums may begin within a page; what else lies in their pages is stored as it is.
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

    /// What tells all numbers there.
    fn word(&self, offset: u64, length: usize) -> io::Result<Word> {
        let mut kinds = [Word::Bfloat, Word::Half].to_vec();
        let (mut at, mut size) = (0, SAMPLE);
        while at < length && !kinds.is_empty() {
            let bytes = self.read(offset + at as u64, size.min(length - at))?;
            let words: &[[u8; 4]] = bytes.as_chunks().0;
            kinds.retain(|word| word.tells(words));
            (at, size) = (at + bytes.len(), PART);
        }
        Ok(kinds.first().copied().unwrap_or(Word::Full))
    }

    /// Stores a region; whether what is stored expands to what is there.
    fn store(&self, region: &CompressedRegion, out: &mut impl Write) -> io::Result<bool> {
        for part in region.parts() {
            let held = part.fills.clone().map(|fill| self.read(region.offset + fill.start as u64, fill.len()));
            let [first, second] = held;
            let held = [first?, second?];
            let stored = region.store(&part, [&held[0], &held[1]]);
            if !comes_back(region, &part, &stored, &held) {
                return Ok(false);
            }
            out.write_all(&stored)?;
            io::copy(
                &mut io::Read::take(
                    io::repeat(0),
                    stored.len().next_multiple_of(SECTOR as usize) as u64 - stored.len() as u64,
                ),
                out,
            )?;
        }
        Ok(true)
    }
}

fn comes_back(region: &CompressedRegion, part: &Part, stored: &[u8], held: &[Vec<u8>; 2]) -> bool {
    let mut back = held.each_ref().map(|bytes| vec![0xa5; bytes.len()]);
    let [first, second] = &mut back;
    region.decompress(part, stored, [first, second]);
    stored.len() == part.bytes && back == *held
}

#[cfg(test)]
pub(in super::super) mod tests {
    use super::super::sums::tests::packed;
    use super::*;

    /// Where the pieces of [`write`] are.
    const PIECES: [(u64, u64); 4] = [(0, 142_974), (143_360, 3 << 20), (3_289_088, 70_000), (3_359_104, 100)];

    /// Writes weights of which some can be stored densely, and what is stored of them; where they are.
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
    fn what_can_be_told_shorter_is_stored_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path());
        let regions = super::super::regions(dir.path()).unwrap();
        let found: Vec<_> =
            regions.iter().map(|region| (region.offset, region.length, region.stored_bytes())).collect();
        // Of 47,616 bytes of sums and scales a quarter, and 1,536 that share their pages; both in whole sectors.
        assert_eq!(found, [(94_208, 49_152, 4096 + 12_288), (143_360, 3 << 20, 3 << 19)]);
        assert_eq!(
            fs::metadata(dir.path().join(COMPRESSED_FILE)).unwrap().len(),
            found.iter().map(|(_, _, stored)| stored).sum::<u64>()
        );
    }

    #[test]
    fn a_sum_that_is_none_keeps_all_as_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let mut bytes = write(dir.path());
        // Not in the first tile, which shows the layout.
        bytes[95_232 + 20_000] ^= 1;
        fs::write(dir.path().join("weights"), &bytes).unwrap();
        make(&dir.path().join("weights"), &PIECES, dir.path()).unwrap();
        let regions = super::super::regions(dir.path()).unwrap();
        assert_eq!(regions.iter().map(|region| (region.offset, region.stored)).collect::<Vec<_>>(), [(143_360, 0)]);
        assert_eq!(fs::metadata(dir.path().join(COMPRESSED_FILE)).unwrap().len(), 3 << 19);
    }
}
