//! The header of a `.npy` file: a Python dictionary with three known keys. Reads untrusted input; writes as NumPy does.

use std::io::{self, Read};

/// How a `.npy` file begins.
pub const MAGIC: &[u8] = b"\x93NUMPY";

/// Longest header read, in bytes; NumPy itself refuses longer ones.
const MAX_BYTES: u32 = 10_000;

/// The fields of a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NpyHeader {
    /// The element type, such as `<f4` or `|b1`.
    pub descr: String,
    /// Whether the first index runs fastest.
    pub fortran_order: bool,
    /// Sizes of the axes.
    pub shape: Vec<u64>,
}

impl NpyHeader {
    /// Reads a header, leaving the reader at the data.
    pub fn read(reader: &mut impl Read) -> io::Result<Self> {
        let mut start = [0; 8];
        reader.read_exact(&mut start)?;
        if &start[..6] != MAGIC {
            return Err(invalid("it does not start like a NumPy array"));
        }
        let length = match start[6] {
            1 => u32::from(u16::from_le_bytes(take(reader)?)),
            2 | 3 => u32::from_le_bytes(take(reader)?),
            _ => return Err(invalid("its format version is newer than 3")),
        };
        if length > MAX_BYTES {
            return Err(invalid("its header is too long"));
        }
        let mut text = Vec::new();
        reader.take(u64::from(length)).read_to_end(&mut text)?;
        let text = String::from_utf8(text).map_err(|_| invalid("its header is not text"))?;
        Parser { rest: &text }.header().ok_or_else(|| invalid("its header is not that of an array of plain numbers"))
    }

    /// The header as bytes, padded to a multiple of 64 and to at least `min_bytes`, so that a longer header can overwrite it later.
    pub fn to_bytes(&self, min_bytes: usize) -> Vec<u8> {
        let sizes: String = self.shape.iter().map(|n| format!("{n}, ")).collect();
        let sizes = if self.shape.len() == 1 { sizes.trim_end() } else { sizes.trim_end_matches(", ") };
        let fortran = if self.fortran_order { "True" } else { "False" };
        let mut text = format!("{{'descr': '{}', 'fortran_order': {fortran}, 'shape': ({sizes}), }}", self.descr);
        let whole = (MAGIC.len() + 4 + text.len() + 1).max(min_bytes).next_multiple_of(64);
        text.push_str(&" ".repeat(whole - MAGIC.len() - 4 - text.len() - 1));
        text.push('\n');
        // Only a tensor with thousands of axes has a header above 64 KiB.
        let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
        [MAGIC, &[1, 0], &length.to_le_bytes(), text.as_bytes()].concat()
    }
}

fn take<const N: usize>(reader: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    reader.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn invalid(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Parses the Python literals of a header.
struct Parser<'t> {
    rest: &'t str,
}

impl<'t> Parser<'t> {
    fn header(&mut self) -> Option<NpyHeader> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        self.expect("{")?;
        while self.expect("}").is_none() {
            let key = self.string()?;
            self.expect(":")?;
            match key {
                "descr" => descr = Some(self.string()?.to_owned()),
                "fortran_order" => fortran_order = Some(self.boolean()?),
                "shape" => shape = Some(self.tuple()?),
                _ => return None,
            }
            if self.expect(",").is_none() {
                self.expect("}")?;
                break;
            }
        }
        Some(NpyHeader { descr: descr?, fortran_order: fortran_order?, shape: shape? })
    }

    fn expect(&mut self, what: &str) -> Option<()> {
        self.rest = self.rest.trim_start().strip_prefix(what)?;
        Some(())
    }

    fn string(&mut self) -> Option<&'t str> {
        let text = self.rest.trim_start();
        let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
        let (inside, rest) = text[1..].split_once(quote)?;
        self.rest = rest;
        Some(inside)
    }

    fn boolean(&mut self) -> Option<bool> {
        if self.expect("True").is_some() { Some(true) } else { self.expect("False").map(|()| false) }
    }

    fn tuple(&mut self) -> Option<Vec<u64>> {
        let mut sizes = Vec::new();
        self.expect("(")?;
        while self.expect(")").is_none() {
            let text = self.rest.trim_start();
            let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
            sizes.push(text[..digits].parse().ok()?);
            self.rest = text[digits..].strip_prefix('L').unwrap_or(&text[digits..]);
            if self.expect(",").is_none() {
                self.expect(")")?;
                break;
            }
        }
        Some(sizes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(text: &str) -> io::Result<NpyHeader> {
        let length = u16::try_from(text.len()).unwrap().to_le_bytes();
        NpyHeader::read(&mut &[MAGIC, &[1, 0], &length, text.as_bytes()].concat()[..])
    }

    #[test]
    fn reads_what_numpy_writes() {
        let h = read("{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }      \n").unwrap();
        assert_eq!(h, NpyHeader { descr: "<f4".into(), fortran_order: false, shape: vec![3, 4] });
        assert_eq!(read("{'shape': (), 'fortran_order': True, 'descr': \"|b1\"}").unwrap().shape, Vec::<u64>::new());
        assert_eq!(read("{'descr': '<i8', 'fortran_order': False, 'shape': (7L,)}").unwrap().shape, [7]);
    }

    #[test]
    fn other_headers_are_errors() {
        for text in [
            "",
            "{",
            "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
            "{'descr': '<f4', 'fortran_order': False}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
            "{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}",
        ] {
            assert!(read(text).is_err(), "{text}");
        }
        assert!(NpyHeader::read(&mut &b"\x93NUMPY\x09\x00"[..]).is_err());
        assert!(NpyHeader::read(&mut &b"\x93NUMPY\x02\x00\xff\xff\xff\xff"[..]).is_err());
    }

    proptest! {
        #[test]
        fn written_headers_are_read_back(fortran_order: bool, shape in prop::collection::vec(any::<u64>(), 0..6)) {
            let header = NpyHeader { descr: "<f2".into(), fortran_order, shape };
            let bytes = header.to_bytes(128);
            prop_assert_eq!(bytes.len() % 64, 0);
            prop_assert_eq!(NpyHeader::read(&mut &bytes[..]).unwrap(), header);
        }

        #[test]
        fn any_text_is_a_header_or_an_error(text in "\\PC{0,80}") {
            let _ = read(&text);
        }

        #[test]
        fn broken_headers_never_panic(text in "[{}'():, 0-9TrueFalsdcphot_]{0,80}") {
            let _ = read(&text);
        }
    }
}
