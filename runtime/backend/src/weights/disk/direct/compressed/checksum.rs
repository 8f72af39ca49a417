//! The checksum of stored bytes. It is checked before every decompression, so it must be many times faster than that: 32 words are mixed
//! side by side, in loops that compilers turn into vector instructions.
//!
//! Each step maps its state (a lane, or the sum) and its input (a word, or a lane) to a new state, one to one in either of the two. A
//! change within one word therefore always changes the checksum, and other changes do so in all but one of 2^32 cases. The checksum does
//! not protect against deliberate changes.

/// Words that are mixed side by side.
const LANES: usize = 32;
/// Bytes of a word.
const WORD: usize = 4;
/// Odd, so that multiplication by it loses nothing: 2^32 over the golden ratio.
const FACTOR: u32 = 0x9e37_79b1;

/// The checksum of these bytes and their number.
pub(super) fn checksum(bytes: &[u8]) -> u32 {
    let mut lanes: [u32; LANES] = std::array::from_fn(|lane| lane as u32);
    let (rows, rest) = bytes.as_chunks::<{ LANES * WORD }>();
    rows.iter().for_each(|row| mix_row(&mut lanes, row));
    let mut last = [0; LANES * WORD];
    last[..rest.len()].copy_from_slice(rest);
    mix_row(&mut lanes, &last);
    lanes.iter().fold(bytes.len() as u32, |sum, lane| mix(sum, *lane))
}

fn mix_row(lanes: &mut [u32; LANES], row: &[u8; LANES * WORD]) {
    let (words, _) = row.as_chunks::<WORD>();
    lanes.iter_mut().zip(words).for_each(|(lane, word)| *lane = mix(*lane, u32::from_le_bytes(*word)));
}

fn mix(state: u32, word: u32) -> u32 {
    let product = (state ^ word).wrapping_mul(FACTOR);
    product ^ product >> 15
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_change_of_a_bit_and_of_the_length_changes_it() {
        let bytes: Vec<u8> = (0..600_u32).map(|at| (at * 37 % 251) as u8).collect();
        let mut seen = HashSet::from([checksum(&bytes)]);
        for at in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[at / 8] ^= 1 << (at % 8);
            assert!(seen.insert(checksum(&changed)), "bit {at}");
        }
        assert!((0..bytes.len()).all(|length| seen.insert(checksum(&bytes[..length]))));
        let padded = [&bytes[..], &[0]].concat();
        assert!(seen.insert(checksum(&padded)));
    }

    #[test]
    fn exchanged_words_change_it() {
        let bytes: Vec<u8> = (0..1024_u32).map(|at| (at / 4) as u8).collect();
        let exchanged = |a: usize, b: usize| {
            let mut changed = bytes.clone();
            (0..4).for_each(|at| changed.swap(a + at, b + at));
            checksum(&changed)
        };
        // Of one lane, and of two.
        assert!([exchanged(0, 128), exchanged(0, 4)].iter().all(|sum| *sum != checksum(&bytes)));
    }
}
