//! Lossless compression of weights on disk: facts about the runtime's code that the planner needs.

/// Number of consecutive exponents that have a short code.
pub const SHORT_EXPONENTS: usize = 7;

/// The precision of numbers stored as float32. If they were widened from 16 bits, their mantissas end in zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Precision {
    /// The lower 16 bits are 0.
    Bfloat16,
    /// The lower 13 bits are 0.
    Float16,
    /// No zeros.
    Float32,
}

impl Precision {
    /// Bytes on disk per 1000 bytes of float32 numbers whose exponents are coded: sign and mantissa, 3 bits for the exponent, and another byte for
    /// each exponent that is not among the [`SHORT_EXPONENTS`]. `exceptions` is the share of these exponents, 0 to 1.
    pub fn coded_permille(self, exceptions: f64) -> u32 {
        let mantissa = match self {
            Precision::Bfloat16 => 7.0,
            Precision::Float16 => 10.0,
            Precision::Float32 => 23.0,
        };
        let bits = 1.0 + mantissa + 3.0 + 8.0 * exceptions.clamp(0.0, 1.0);
        (bits / 32.0 * 1000.0).ceil() as u32
    }

    /// Bytes on disk per 1000 bytes of float32 numbers that are stored as whole words of 16 or 32 bits.
    pub fn in_words_permille(self) -> u32 {
        if self == Precision::Float32 { 1000 } else { 500 }
    }
}

/// Number of threads that decompress weights on a host with this many cores. Most cores compute.
pub fn decompressing_threads(cores: usize) -> usize {
    (cores / 4).clamp(1, 4)
}

/// The maximum of stored bytes per 1000 with which compression saves time where reading is the bottleneck. If the share `s` of the bytes is stored,
/// `1 - s` need not be read, but everything must be decompressed. Compression pays if `(1 - s) / disk > 1 / decompress`, so if
/// `s < 1 - disk / decompress`. The rates are uncompressed bytes per time; `decompress` is that of all threads together.
pub fn worth_permille(disk: f64, decompress: f64) -> u32 {
    let most = 1.0 - disk / decompress;
    if most > 0.0 { (most * 1000.0) as u32 } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_of_bfloat16_precision_take_a_third() {
        assert_eq!(Precision::Bfloat16.coded_permille(0.023), 350);
        assert_eq!([0.0, 1.0].map(|share| Precision::Float32.coded_permille(share)), [844, 1094]);
    }

    #[test]
    fn a_fast_disk_is_not_worth_decompressing_for() {
        assert_eq!(worth_permille(2.0, 8.0), 750);
        assert_eq!([worth_permille(8.0, 8.0), worth_permille(9.0, 8.0), worth_permille(0.0, 8.0)], [0, 0, 1000]);
        assert_eq!([1, 2, 8, 64].map(decompressing_threads), [1, 1, 2, 4]);
    }
}
