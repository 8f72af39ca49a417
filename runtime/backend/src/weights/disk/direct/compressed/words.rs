//! Encodings of float32 numbers that 16 bits represent exactly.
//!
//! Weights of a checkpoint in bfloat16 or float16 keep their values when an exporter widens them to float32. So do the scales of their
//! symmetric quantization, which are the largest weight of a block over a power of two.

use super::Damaged;
use half::f16;

/// The bytes of a float32.
pub(super) type Wide = [u8; 4];

/// The encoding of a sequence of float32 numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Word {
    /// Uncompressed.
    Full,
    /// The upper 16 bits; the lower ones are 0.
    Bfloat,
    /// A finite float16.
    Half,
}

impl Word {
    /// Whether the encoding represents all of these numbers exactly.
    pub fn is_exact(self, words: &[Wide]) -> bool {
        words.iter().map(|word| u32::from_le_bytes(*word)).all(|bits| match self {
            Word::Full => true,
            Word::Bfloat => bits & 0xffff == 0,
            Word::Half => widened_half(narrowed_half(bits)) == bits,
        })
    }

    /// Bytes per number.
    pub fn bytes(self) -> usize {
        if self == Word::Full { 4 } else { 2 }
    }

    /// Appends a number in this encoding.
    pub fn put(self, word: Wide, out: &mut Vec<u8>) {
        let bits = u32::from_le_bytes(word);
        match self {
            Word::Full => out.extend_from_slice(&word),
            Word::Bfloat => out.extend_from_slice(&((bits >> 16) as u16).to_le_bytes()),
            Word::Half => out.extend_from_slice(&narrowed_half(bits).to_le_bytes()),
        }
    }

    /// Decodes stored numbers; an error if they are not as many as `words`.
    pub fn widen(self, stored: &[u8], words: &mut [Wide]) -> Result<(), Damaged> {
        if stored.len() != words.len() * self.bytes() {
            return Err(Damaged);
        }
        let (stored, _) = stored.as_chunks::<2>();
        match self {
            Word::Full => {
                let (stored, _) = stored.as_chunks::<2>();
                words.iter_mut().zip(stored).for_each(|(word, [low, high])| *word = [low[0], low[1], high[0], high[1]]);
            }
            Word::Bfloat => words.iter_mut().zip(stored).for_each(|(word, [low, high])| *word = [0, 0, *low, *high]),
            Word::Half => {
                let widened = |half: &[u8; 2]| widened_half(u16::from_le_bytes(*half)).to_le_bytes();
                words.iter_mut().zip(stored).for_each(|(word, half)| *word = widened(half));
            }
        }
        Ok(())
    }

    /// Its name in the index.
    pub fn name(self) -> &'static str {
        match self {
            Word::Full => "float32",
            Word::Bfloat => "bfloat16",
            Word::Half => "float16",
        }
    }

    /// The encoding of a name.
    pub fn named(name: &str) -> Option<Word> {
        [Word::Full, Word::Bfloat, Word::Half].into_iter().find(|word| word.name() == name)
    }
}

fn narrowed_half(bits: u32) -> u16 {
    f16::from_f32(f32::from_bits(bits)).to_bits()
}

/// Branch-free: the product with 2^112 adjusts the exponent bias to float32's. Finite numbers only.
fn widened_half(bits: u16) -> u32 {
    let (sign, rest) = (u32::from(bits & 0x8000) << 16, u32::from(bits & 0x7fff) << 13);
    (f32::from_bits(rest) * f32::from_bits((127 + 112) << 23)).to_bits() | sign
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(numbers: &[f32]) -> Vec<Wide> {
        numbers.iter().map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn an_encoding_is_lossless_exactly_if_it_claims_to_be() {
        let small = f32::from_bits(0x3380_0000); // The smallest float16 above 0.
        let half = f16::from_f32(0.1).to_f32();
        for (numbers, expected) in [
            (vec![1.0, -0.0, f32::from_bits(0x7f7f_0000), f32::from_bits(0x0001_0000), f32::INFINITY], [true, false]),
            (vec![0.1, 1.0], [false, false]),
            (vec![half, -small, 65504.0, -0.0], [false, true]),
            (vec![f32::INFINITY, half], [false, false]),
            (vec![0.5, -8.0], [true, true]),
        ] {
            let numbers = words(&numbers);
            assert_eq!([Word::Bfloat, Word::Half].map(|word| word.is_exact(&numbers)), expected);
            for word in [Word::Full, Word::Bfloat, Word::Half] {
                let mut stored = Vec::new();
                numbers.iter().for_each(|number| word.put(*number, &mut stored));
                assert_eq!(stored.len(), numbers.len() * word.bytes());
                let mut back = vec![[9; 4]; numbers.len()];
                word.widen(&stored, &mut back).unwrap();
                assert_eq!(word.widen(&stored[1..], &mut back.clone()), Err(Damaged));
                assert_eq!(back == numbers, word.is_exact(&numbers));
                assert_eq!(Word::named(word.name()), Some(word));
            }
        }
    }

    #[test]
    fn every_finite_float16_widens_as_in_the_half_crate() {
        for bits in (0..=u16::MAX).filter(|bits| f16::from_bits(*bits).is_finite()) {
            assert_eq!(widened_half(bits), f16::from_bits(bits).to_f32().to_bits(), "{bits:#x}");
        }
    }
}
