//! Byte counts with units for people, exact to the byte.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, de};
use std::fmt;
use std::str::FromStr;

/// A number of bytes.
///
/// Read from `24G`, `24GiB`, `1.5 GB`, `512M`, `4096` or `12.3 MiB (12897280 B)`. As in most tools, `K`, `M`, `G`, `T`
/// mean powers of 1024; so do `KB`, `MB`, `GB`, `TB`, as in the sizes of memory modules.
/// Printed with a unit and, if that rounds, the exact count in parentheses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ByteSize(pub u64);

/// Why a size could not be read.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum SizeError {
    /// It is not a number with a unit.
    #[error("cannot read size {0:?}: give bytes or a number with K, M, G or T, such as 24G, 512M or 1.5GiB")]
    Malformed(String),
    /// It has more than 64 bits.
    #[error("size {0:?} is too large: at most 16777215T")]
    TooLarge(String),
}

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl ByteSize {
    /// Rounded up, with a unit. If a budget must be at least this size, the printed number is enough.
    pub fn human_rounded_up(self) -> String {
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) if !self.0.is_multiple_of(*unit) => {
                let hundredths = (u128::from(self.0) * 100).div_ceil(u128::from(*unit));
                format!("{}.{:02} {name}", hundredths / 100, hundredths % 100)
            }
            _ => self.human(),
        }
    }

    /// Rounded down, with a unit. Printed beside a demand that is rounded up, a limit below the demand looks smaller than it.
    pub fn human_rounded_down(self) -> String {
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) if !self.0.is_multiple_of(*unit) => {
                let hundredths = u128::from(self.0) * 100 / u128::from(*unit);
                format!("{}.{:02} {name}", hundredths / 100, hundredths % 100)
            }
            _ => self.human(),
        }
    }

    /// Rounded to two decimals, with a unit: `12.30 MiB`.
    pub fn human(self) -> String {
        match UNITS.iter().find(|(_, unit)| self.0 >= *unit) {
            Some((name, unit)) if self.0.is_multiple_of(*unit) => format!("{} {name}", self.0 / unit),
            Some((name, unit)) => format!("{:.2} {name}", self.0 as f64 / *unit as f64),
            None => format!("{} B", self.0),
        }
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exact = UNITS.iter().find(|(_, unit)| self.0 >= *unit).is_none_or(|(_, unit)| self.0.is_multiple_of(*unit));
        if exact { f.write_str(&self.human()) } else { write!(f, "{} ({} B)", self.human(), self.0) }
    }
}

/// A number without a unit below this probably lacks a G or M. The smallest budgets that errors print, for test models,
/// are larger.
pub(crate) const MIN_UNITLESS_BYTES: u64 = 100_000;

impl ByteSize {
    /// Parses a size that a person typed. Refuses a small number without a unit, with what it may mean.
    pub fn typed(text: &str) -> Result<ByteSize, String> {
        let size = text.parse::<ByteSize>().map_err(|error| error.to_string())?;
        let bare = text.trim().ends_with(|last: char| last.is_ascii_digit());
        match bare && size.0 > 0 && size.0 < MIN_UNITLESS_BYTES {
            true => Err(format!("{0} without a unit is {size}: did you mean {0}G? Write {0}B for bytes", text.trim())),
            false => Ok(size),
        }
    }
}

impl FromStr for ByteSize {
    type Err = SizeError;
    fn from_str(text: &str) -> Result<Self, SizeError> {
        let shown = || text.chars().take(40).collect();
        let error = || SizeError::Malformed(shown());
        let too_large = || SizeError::TooLarge(shown());
        let body = match text.split_once('(') {
            Some((_, exact)) => exact.strip_suffix(')').ok_or_else(error)?,
            None => text,
        }
        .trim();
        let split = body.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(body.len());
        let (number, unit) = (&body[..split], body[split..].trim());
        let scale = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" | "kib" => 1u64 << 10,
            "m" | "mb" | "mib" => 1 << 20,
            "g" | "gb" | "gib" => 1 << 30,
            "t" | "tb" | "tib" => 1 << 40,
            _ => return Err(error()),
        };
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(scale).map(ByteSize).ok_or_else(too_large);
        }
        let value: f64 = number.parse().map_err(|_| error())?;
        let bytes = value * scale as f64;
        if bytes.is_finite() && bytes < u64::MAX as f64 { Ok(ByteSize(bytes.round() as u64)) } else { Err(too_large()) }
    }
}

impl Serialize for ByteSize {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = ByteSize;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a size such as 24 GiB, 512M or a number of bytes")
            }
            fn visit_u64<E: de::Error>(self, v: u64) -> Result<ByteSize, E> {
                Ok(ByteSize(v))
            }
            fn visit_str<E: de::Error>(self, v: &str) -> Result<ByteSize, E> {
                v.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Visitor)
    }
}

impl JsonSchema for ByteSize {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ByteSize".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "Bytes, as `24 GiB`, `12.30 MiB (12897280 B)` (the exact count wins) or a plain integer.",
            "oneOf": [{ "type": "string" }, { "type": "integer", "minimum": 0 }]
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_spellings_are_parsed() {
        for (text, bytes) in [
            ("24G", 24 << 30),
            ("24GiB", 24 << 30),
            ("24 gb", 24 << 30),
            ("512M", 512 << 20),
            ("1.5K", 1536),
            ("0", 0),
            ("12.30 MiB (12897280 B)", 12897280),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
        for text in ["", "G", "24X", "-1G", "1e3", "99999999999T", "(", "12 MiB (3", "nan", "inf"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
        for text in ["16777216T", "99999999999.5G"] {
            assert_eq!(text.parse::<ByteSize>(), Err(SizeError::TooLarge(text.to_owned())));
        }
        assert!("16777215T".parse::<ByteSize>().is_ok());
    }

    #[test]
    fn a_small_number_without_a_unit_is_refused() {
        let typed = ByteSize::typed;
        for (text, bytes) in [("24G", 24 << 30), ("0", 0), ("1B", 1), ("500K", 500 << 10), ("2000000", 2_000_000)] {
            assert_eq!(typed(text), Ok(ByteSize(bytes)), "{text}");
        }
        assert!(typed("24").unwrap_err().contains("did you mean 24G"));
        assert!(typed("1.5").is_err() && typed("98304").is_err() && typed("839971").is_ok() && typed("G").is_err());
    }

    #[test]
    fn sizes_rounded_up_parse_to_no_less() {
        for (bytes, text) in [(319827968, "305.02 MiB"), (1 << 30, "1 GiB"), ((1 << 30) + 1, "1.01 GiB"), (5, "5 B")] {
            let rounded = ByteSize(bytes).human_rounded_up();
            assert_eq!(rounded, text);
            assert!(rounded.parse::<ByteSize>().is_ok_and(|parsed| parsed.0 >= bytes), "{rounded}");
        }
    }

    #[test]
    fn printed_sizes_parse_to_the_exact_count() {
        for bytes in [0, 1, 1023, 1024, 1025, 887040, 24 << 30, (24 << 30) + 1, u64::MAX] {
            assert_eq!(ByteSize(bytes).to_string().parse(), Ok(ByteSize(bytes)));
        }
        assert_eq!(ByteSize(24 << 30).to_string(), "24 GiB");
        assert_eq!(ByteSize(887040).to_string(), "866.25 KiB (887040 B)");
    }
}
