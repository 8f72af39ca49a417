//! The byte ranges that a file's sampled hash covers. Reads no files.

/// Bytes in one sample.
const SAMPLE: u64 = 4096;
/// Gaps between samples; there is one more sample than gaps.
const GAPS: u64 = 65;

/// The `(offset, length)` ranges that [`FileRecord::sampled`](crate::FileRecord::sampled) covers of a file of `length`
/// bytes.
///
/// The first 4 KiB, the last 4 KiB and 64 more, evenly spaced between them; the whole file if it is not larger than
/// these samples. The hash is BLAKE3 over `length` as eight little-endian bytes, followed by the ranges' bytes in
/// order, as lower-case hexadecimal.
pub fn sample_ranges(length: u64) -> Vec<(u64, u64)> {
    if length <= SAMPLE * (GAPS + 1) {
        return if length == 0 { Vec::new() } else { vec![(0, length)] };
    }
    let last = u128::from(length - SAMPLE);
    (0..=u128::from(GAPS)).map(|at| ((at * last / u128::from(GAPS)) as u64, SAMPLE)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_files_are_covered_whole() {
        assert_eq!(sample_ranges(0), []);
        assert_eq!(sample_ranges(1), [(0, 1)]);
        assert_eq!(sample_ranges(66 * 4096), [(0, 66 * 4096)]);
    }

    #[test]
    fn large_files_are_sampled_from_first_to_last_byte() {
        for length in [66 * 4096 + 1, 1 << 32, u64::MAX] {
            let ranges = sample_ranges(length);
            assert_eq!(ranges.len(), 66);
            assert_eq!(ranges[0], (0, 4096));
            assert_eq!(ranges[65], (length - 4096, 4096));
            assert!(ranges.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0), "overlap at {length}");
        }
    }
}
