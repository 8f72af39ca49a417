//! Measures how fast weights are decompressed.

use super::PART;
use super::checksum::checksum;
use super::exponents::{GROUP, Tail, decode, encode};
use super::words::Wide;
use std::time::{Duration, Instant};

/// Uncompressed bytes of the parts that are decompressed in turn: more than caches hold.
const ALL: usize = 64 << 20;
/// Least time of a measurement.
const MIN_TIME: Duration = Duration::from_millis(200);

/// The rate in 1e9 uncompressed bytes per second at which one thread checks and decodes numbers with coded exponents and bfloat16
/// precision, the most common kind. The weights are made up.
pub fn decompression_rate() -> f64 {
    let (tail, count) = (Tail::None, PART / 2 / GROUP * GROUP);
    // The exponents of normally distributed numbers: about half as many for each smaller one.
    let mut state = 1u32;
    let mut number = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let exponent = 120 - (state >> 8).trailing_zeros().min(20);
        ((state & 0x8000_0000) | exponent << 23 | (state >> 9 & 0x7f) << 16).to_le_bytes()
    };
    let numbers: Vec<Wide> = (0..count).map(|_| number()).collect();
    let stored = encode(tail, &numbers);
    let right = checksum(&stored);
    let parts = (ALL / (count * size_of::<Wide>())).max(1);
    let (mut stored, mut decoded) = (vec![stored; parts], vec![vec![[1u8; 4]; count]; parts]);
    let (started, mut bytes) = (Instant::now(), 0);
    while started.elapsed() < MIN_TIME {
        for (stored, decoded) in stored.iter_mut().zip(&mut decoded) {
            let is_right = checksum(stored) == right && decode(tail, stored, decoded).is_ok();
            assert!(is_right, "what was just encoded can be decoded");
            bytes += count * size_of::<Wide>();
        }
    }
    bytes as f64 / started.elapsed().as_secs_f64() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_that_of_memory_or_less() {
        let rate = decompression_rate();
        assert!(rate > 0.01 && rate < 1e3, "{rate}");
    }
}
