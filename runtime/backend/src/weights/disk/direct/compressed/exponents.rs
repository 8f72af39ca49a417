//! A code for float32 numbers whose exponents lie close together, as those of trained weights do: seven consecutive exponents cover 98 %
//! of normally distributed numbers.
//!
//! An exponent takes 3 bits: its distance from the largest of the seven, or 7 for any other exponent, which follows as a byte in a list of
//! exceptions. Sign and mantissa are stored as they are, without mantissa bits that are 0 in all numbers ([`Tail`]). Any bit pattern can
//! be stored. Normal numbers of bfloat16 precision take 11.2 bits instead of 16 (their exponents have an entropy of 2.6 bits, DFloat11,
//! arXiv 2504.11651), of float16 precision 14.2, others 27.2 instead of 32. A prefix code would save 0.5 bits more, but these fields have
//! fixed places, so that the compiler decodes 8 to 32 numbers at once.
//!
//! Encoded numbers are: a byte with the largest of the seven exponents; groups of [`GROUP`] numbers; the exceptions, in the order of the
//! numbers. A group has its packed exponents, a byte of sign and upper 7 mantissa bits for each number, and the tails of its numbers.

use super::Damaged;
use super::words::Wide;

/// Numbers that are decoded together.
pub(super) const GROUP: usize = 256;
/// Exponents with a code of their own.
const CODED: usize = 7;
/// The code of all other exponents.
const EXCEPTION: u8 = 7;
/// Fields of 3 bits are packed in rows: 8 rows take the space of 3 rows of bytes.
const ROW: usize = GROUP / 8;
/// Bytes of the packed 3-bit fields of a group.
const PACKED: usize = 3 * ROW;
/// The bits of a float32's exponent.
const EXPONENT: u32 = 0xff << MANTISSA;
const MANTISSA: u32 = 23;

/// The part of the mantissa that is stored beside its upper 7 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// None: the lower 16 bits are 0, as in widened bfloat16.
    None,
    /// 3 bits: the lower 13 bits are 0, as in widened float16.
    Three,
    /// All 16 bits.
    Sixteen,
}

impl Tail {
    /// All of them, the shortest first.
    pub const ALL: [Tail; 3] = [Tail::None, Tail::Three, Tail::Sixteen];

    /// Whether it represents all of these numbers exactly.
    pub fn is_exact(self, words: &[Wide]) -> bool {
        let dropped = match self {
            Tail::None => 0xffff,
            Tail::Three => 0x1fff,
            Tail::Sixteen => 0,
        };
        words.iter().all(|word| u32::from_le_bytes(*word) & dropped == 0)
    }

    /// Bytes of a number that is stored without coding its exponent.
    pub fn uncoded(self) -> usize {
        if self == Tail::Sixteen { 4 } else { 2 }
    }

    /// Bytes of the tails of a group.
    fn bytes(self) -> usize {
        match self {
            Tail::None => 0,
            Tail::Three => PACKED,
            Tail::Sixteen => 2 * GROUP,
        }
    }

    /// Bytes of a group.
    fn group(self) -> usize {
        PACKED + GROUP + self.bytes()
    }

    /// Its name in the index: the type whose precision the numbers have.
    pub fn name(self) -> &'static str {
        match self {
            Tail::None => "bfloat16",
            Tail::Three => "float16",
            Tail::Sixteen => "float32",
        }
    }

    /// The tail of a name.
    pub fn named(name: &str) -> Option<Tail> {
        Tail::ALL.into_iter().find(|tail| tail.name() == name)
    }
}

/// Encodes whole groups of numbers. `tail` must represent every number exactly.
pub(super) fn encode(tail: Tail, words: &[Wide]) -> Vec<u8> {
    let top = best_window(words);
    let (groups, _) = words.as_chunks::<GROUP>();
    let mut stored = Vec::with_capacity(1 + groups.len() * tail.group() + words.len() / 16);
    let mut exceptions = Vec::new();
    stored.push(top);
    for group in groups {
        let bits = group.map(u32::from_le_bytes);
        let codes = bits.map(|bits| {
            let exponent = (bits >> MANTISSA) as u8;
            match top.checked_sub(exponent) {
                Some(code) if code < EXCEPTION => code,
                _ => {
                    exceptions.push(exponent);
                    EXCEPTION
                }
            }
        });
        stored.extend(pack(&codes));
        stored.extend(bits.map(|bits| (bits >> 24) as u8 & 0x80 | (bits >> 16) as u8 & 0x7f));
        match tail {
            Tail::None => {}
            Tail::Three => stored.extend(pack(&bits.map(|bits| (bits >> 13) as u8 & 7))),
            Tail::Sixteen => stored.extend_from_slice(bits.map(|bits| (bits as u16).to_le_bytes()).as_flattened()),
        }
    }
    stored.extend(exceptions);
    stored
}

/// The largest of the seven consecutive exponents that most numbers have.
fn best_window(words: &[Wide]) -> u8 {
    let mut counts = [0usize; 256];
    words.iter().for_each(|word| counts[(u32::from_le_bytes(*word) >> MANTISSA) as usize & 0xff] += 1);
    let covered = |top: &u8| counts[usize::from(*top) + 1 - CODED..=usize::from(*top)].iter().sum::<usize>();
    (EXCEPTION - 1..=u8::MAX).max_by_key(covered).unwrap_or(u8::MAX)
}

/// Fills `words`, whole groups, with decoded numbers. An error if the length of `stored` does not match; `words` then keeps what was
/// decoded.
pub(super) fn decode(tail: Tail, stored: &[u8], words: &mut [Wide]) -> Result<(), Damaged> {
    match tail {
        Tail::None => decode_groups::<0>(stored, words),
        Tail::Three => decode_groups::<1>(stored, words),
        Tail::Sixteen => decode_groups::<2>(stored, words),
    }
}

/// Decodes with the widest registers of this processor. `TAIL` is a position in [`Tail::ALL`]: a constant, so that each has a loop of its
/// own.
fn decode_groups<const TAIL: usize>(stored: &[u8], words: &mut [Wide]) -> Result<(), Damaged> {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("bmi1") {
        // SAFETY: this processor has these instructions.
        return unsafe { with_avx2::<TAIL>(stored, words) };
    }
    in_any_registers::<TAIL>(stored, words)
}

/// [`in_any_registers`], compiled for registers of 32 bytes.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,bmi1")]
fn with_avx2<const TAIL: usize>(stored: &[u8], words: &mut [Wide]) -> Result<(), Damaged> {
    in_any_registers::<TAIL>(stored, words)
}

#[inline(always)]
fn in_any_registers<const TAIL: usize>(stored: &[u8], words: &mut [Wide]) -> Result<(), Damaged> {
    let (groups, rest) = words.as_chunks_mut::<GROUP>();
    let each = Tail::ALL[TAIL].group();
    let (top, stored) = stored.split_first().filter(|_| rest.is_empty()).ok_or(Damaged)?;
    let (encoded, mut exceptions) = stored.split_at_checked(groups.len() * each).ok_or(Damaged)?;
    let mut codes = [[0; ROW]; 8];
    for (group, encoded) in groups.iter_mut().zip(encoded.chunks_exact(each)) {
        let (packed, encoded) = encoded.split_first_chunk::<PACKED>().ok_or(Damaged)?;
        let (heads, tails) = encoded.split_first_chunk::<GROUP>().ok_or(Damaged)?;
        unpack(packed, &mut codes);
        join::<TAIL>(*top, codes.as_flattened(), heads, tails, group)?;
        exceptions = restore_exceptions(&codes, exceptions, group)?;
    }
    if exceptions.is_empty() { Ok(()) } else { Err(Damaged) }
}

/// Joins the fields of a group's numbers.
#[inline(always)]
fn join<const TAIL: usize>(
    top: u8,
    codes: &[u8],
    heads: &[u8; GROUP],
    tails: &[u8],
    group: &mut [Wide; GROUP],
) -> Result<(), Damaged> {
    let mut three = [[0; ROW]; 8];
    if Tail::ALL[TAIL] == Tail::Three {
        unpack(tails.first_chunk().ok_or(Damaged)?, &mut three);
    }
    let (three, (sixteen, _)) = (three.as_flattened(), tails.as_chunks::<2>());
    let codes: &[u8; GROUP] = codes.first_chunk().ok_or(Damaged)?;
    let number = |at: usize| {
        let head = u32::from(heads[at]);
        let exponent = u32::from(top.wrapping_sub(codes[at]));
        (head & 0x80) << 24 | exponent << MANTISSA | (head & 0x7f) << 16
    };
    match Tail::ALL[TAIL] {
        Tail::None => (0..GROUP).for_each(|at| group[at] = number(at).to_le_bytes()),
        Tail::Three => {
            let three: &[u8; GROUP] = three.first_chunk().ok_or(Damaged)?;
            (0..GROUP).for_each(|at| group[at] = (number(at) | u32::from(three[at]) << 13).to_le_bytes());
        }
        Tail::Sixteen => {
            let sixteen: &[[u8; 2]; GROUP] = sixteen.first_chunk().ok_or(Damaged)?;
            let number = |at: usize| number(at) | u32::from(u16::from_le_bytes(sixteen[at]));
            (0..GROUP).for_each(|at| group[at] = number(at).to_le_bytes());
        }
    }
    Ok(())
}

/// Replaces the exponents of exceptions by the next ones in the list; returns the rest of the list.
#[inline(always)]
fn restore_exceptions<'a>(
    codes: &[[u8; ROW]; 8],
    mut exceptions: &'a [u8],
    group: &mut [Wide; GROUP],
) -> Result<&'a [u8], Damaged> {
    let (blocks, _) = codes.as_flattened().as_chunks::<64>();
    for (block, codes) in blocks.iter().enumerate() {
        let mut places = exceptions_among(codes);
        while places != 0 {
            let at = block * 64 + places.trailing_zeros() as usize;
            places &= places - 1;
            let (exponent, rest) = exceptions.split_first().ok_or(Damaged)?;
            let bits = u32::from_le_bytes(group[at]) & !EXPONENT | u32::from(*exponent) << MANTISSA;
            (group[at], exceptions) = (bits.to_le_bytes(), rest);
        }
    }
    Ok(exceptions)
}

/// A bit for each of 64 codes: whether it is [`EXCEPTION`].
#[inline(always)]
fn exceptions_among(codes: &[u8; 64]) -> u64 {
    /// 1 in each byte.
    const ONES: u64 = 0x0101_0101_0101_0101;
    /// Gathers the lowest bit of each byte in the highest byte of the product.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    let (eights, _) = codes.as_chunks::<8>();
    eights.iter().zip(0..).fold(0, |places, (codes, number)| {
        // Adding 1 carries into bit 3 for code 7 alone.
        let found = (u64::from_le_bytes(*codes) + ONES) >> 3 & ONES;
        places | (found.wrapping_mul(GATHER) >> 56) << (8 * number)
    })
}

/// Packs 3-bit fields. Rows 0 to 5 take the lower six bits of each byte, two in each; rows 6 and 7 the upper two bits.
fn pack(fields: &[u8; GROUP]) -> [u8; PACKED] {
    let mut packed = [0; PACKED];
    for at in 0..ROW {
        let field = |row: usize| fields[row * ROW + at];
        packed[at] = field(0) | field(1) << 3 | field(6) << 6;
        packed[ROW + at] = field(2) | field(3) << 3 | field(7) << 6;
        packed[2 * ROW + at] = field(4) | field(5) << 3 | field(6) >> 2 << 6 | field(7) >> 2 << 7;
    }
    packed
}

/// Undoes [`pack`].
#[inline(always)]
fn unpack(packed: &[u8; PACKED], rows: &mut [[u8; ROW]; 8]) {
    let ([first, second, third], _) = packed.as_chunks::<ROW>() else { return };
    for at in 0..ROW {
        let [a, b, c] = [first[at], second[at], third[at]];
        rows[0][at] = a & 7;
        rows[1][at] = a >> 3 & 7;
        rows[2][at] = b & 7;
        rows[3][at] = b >> 3 & 7;
        rows[4][at] = c & 7;
        rows[5][at] = c >> 3 & 7;
        rows[6][at] = a >> 6 | c >> 4 & 4;
        rows[7][at] = b >> 6 | c >> 5 & 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pseudorandom numbers (xorshift).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        /// Close to normally distributed, with a standard deviation of 1.
        fn normal(&mut self) -> f32 {
            (0..12).map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32).sum::<f32>() - 6.0
        }
    }

    fn dropped(tail: Tail) -> u32 {
        match tail {
            Tail::None => 0xffff_0000,
            Tail::Three => 0xffff_e000,
            Tail::Sixteen => u32::MAX,
        }
    }

    /// Encodes, decodes with each set of instructions and compares; returns the encoded bytes.
    fn survives(tail: Tail, bits: &[u32]) -> Vec<u8> {
        let words: Vec<Wide> = bits.iter().map(|bits| bits.to_le_bytes()).collect();
        assert!(tail.is_exact(&words));
        let stored = encode(tail, &words);
        let portable = match tail {
            Tail::None => in_any_registers::<0>,
            Tail::Three => in_any_registers::<1>,
            Tail::Sixteen => in_any_registers::<2>,
        };
        let mut decoded = vec![[0xa5; 4]; words.len()];
        decode(tail, &stored, &mut decoded).unwrap();
        assert!(decoded == words, "{tail:?}");
        decoded.fill([0xa5; 4]);
        portable(&stored, &mut decoded).unwrap();
        assert!(decoded == words, "{tail:?}, without wide registers");
        stored
    }

    #[test]
    fn every_bfloat16_and_every_float16_survives() {
        // All patterns, among them infinities, payloads of NaN, denormal numbers and -0.
        let all: Vec<u32> = (0..=u16::MAX).map(|bits| u32::from(bits) << 16).collect();
        survives(Tail::None, &all);
        survives(Tail::Three, &all);
        let halves: Vec<u32> = (0..1 << 19).map(|bits: u32| bits << 13).collect();
        survives(Tail::Three, &halves);
    }

    #[test]
    fn random_patterns_of_every_kind_survive() {
        let mut random = Random(0x1234_5678_9abc_def1);
        for round in 0..60 {
            let tail = Tail::ALL[round % 3];
            let groups = random.next() as usize % 6;
            let common = random.next() as u32;
            let bits: Vec<u32> = (0..groups * GROUP)
                .map(|_| match (round / 3 % 4, random.next()) {
                    // Any bits; one exponent; zeros and few others; the numbers of a layer.
                    (0, any) => any as u32,
                    (1, any) => any as u32 & !EXPONENT | common & EXPONENT,
                    (2, any) if !any.is_multiple_of(9) => (any as u32) & 0x8000_0000,
                    (2, any) => any as u32,
                    _ => (random.normal() * 0.02).to_bits(),
                })
                .map(|bits| bits & dropped(tail))
                .collect();
            survives(tail, &bits);
        }
    }

    #[test]
    fn normal_numbers_take_the_documented_bits() {
        let mut random = Random(77);
        for (tail, documented) in Tail::ALL.into_iter().zip([11.2, 14.2, 27.2]) {
            let bits: Vec<u32> = (0..1 << 16).map(|_| (random.normal() * 0.02).to_bits() & dropped(tail)).collect();
            let each = survives(tail, &bits).len() as f64 * 8.0 / bits.len() as f64;
            assert!((each - documented).abs() < 0.1, "{tail:?}: {each} bits");
            assert_eq!(Tail::named(tail.name()), Some(tail));
        }
    }

    #[test]
    fn an_inexact_tail_is_refused_and_wrong_lengths_are_damage() {
        let words = |bits: u32| [bits.to_le_bytes()];
        assert!(Tail::None.is_exact(&words(0x7f81_0000)) && !Tail::None.is_exact(&words(0x3f80_2000)));
        assert!(Tail::Three.is_exact(&words(0x3f80_2000)) && !Tail::Three.is_exact(&words(0x3f80_1000)));
        assert!(Tail::Sixteen.is_exact(&words(1)));
        let mut random = Random(5);
        let numbers: Vec<Wide> = (0..2 * GROUP).map(|_| (random.next() as u32).to_le_bytes()).collect();
        let stored = encode(Tail::Sixteen, &numbers);
        let mut decoded = vec![[0; 4]; numbers.len()];
        for length in [0, 1, GROUP, stored.len() - 1] {
            assert_eq!(decode(Tail::Sixteen, &stored[..length], &mut decoded), Err(Damaged), "{length} bytes");
        }
        let longer = [&stored[..], &[0]].concat();
        assert_eq!(decode(Tail::Sixteen, &longer, &mut decoded), Err(Damaged));
        assert_eq!(decode(Tail::Sixteen, &stored, &mut decoded[1..]), Err(Damaged));
        // Other bytes of the same length decode to something, without a panic.
        let noise: Vec<u8> = (0..stored.len()).map(|_| random.next() as u8).collect();
        let _ = decode(Tail::Sixteen, &noise, &mut decoded);
    }
}
