//! Symbolic tensor dimensions: polynomials over named sizes, so that expressions like `past + sequence` can be compared
//! and evaluated.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize, de};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, Mul, Sub};
use std::str::FromStr;

/// Values for the symbols of a shape: name -> size.
pub type Symbols = BTreeMap<String, u64>;

/// A tensor shape; every dimension may be symbolic or unknown.
pub type Shape = Vec<Dim>;

/// One dimension of a tensor.
///
/// Written in a plan as an integer (`64`), an expression (`past_sequence_length + sequence_length`) or `?`; symbols that are no
/// plain names stand between backticks. Equal expressions compare equal however they were written, because the representation is a polynomial in normal form.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dim {
    /// A sum of `coefficient * product of symbols`; the empty product has the constant. Invariant: no zero
    /// coefficients.
    Known(BTreeMap<Vec<String>, i64>),
    /// An unknown size.
    Unknown,
}

/// A dimension that cannot be parsed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("cannot read dimension {text:?}: {why}")]
pub struct DimError {
    text: String,
    why: &'static str,
}

/// Longest name of a symbol, bytes. An exporter's longer expression is an unknown size.
const MAX_NAME: usize = 256;

/// Limit on the terms of a polynomial; larger ones become unknown, so that hostile input cannot cause unbounded work.
const MAX_TERMS: usize = 32;

impl Dim {
    /// A dimension of fixed size.
    pub fn fixed(size: u64) -> Self {
        let Ok(size) = i64::try_from(size) else { return Dim::Unknown };
        Dim::Known(if size == 0 { BTreeMap::new() } else { BTreeMap::from([(vec![], size)]) })
    }

    /// A dimension that is one symbol. The name is not parsed, even if it looks like an expression.
    pub fn symbol(name: &str) -> Self {
        Dim::Known(BTreeMap::from([(vec![name.to_owned()], 1)]))
    }

    /// Parses an exporter's `dim_param`: an expression if it parses as one, else one opaque symbol; unknown if that is too long.
    pub fn from_param(text: &str) -> Self {
        let opaque = || if text.len() > MAX_NAME { Dim::Unknown } else { Dim::symbol(text) };
        text.parse().unwrap_or_else(|_| opaque())
    }

    /// The `dim_param` that [`from_param`](Self::from_param) reads as this dimension.
    pub fn to_param(&self) -> String {
        self.as_symbol().map_or_else(|| self.to_string(), str::to_owned)
    }

    /// The size, if the dimension has no symbols. Negative results are `None`.
    pub fn as_fixed(&self) -> Option<u64> {
        self.eval(&Symbols::new())
    }

    /// The name, if the dimension is exactly one symbol.
    pub fn as_symbol(&self) -> Option<&str> {
        let Dim::Known(terms) = self else { return None };
        match terms.iter().next() {
            Some((product, 1)) if terms.len() == 1 && product.len() == 1 => Some(&product[0]),
            _ => None,
        }
    }

    /// The size for these values of symbols; `None` if a value is missing, or the result is negative or overflows 64
    /// bits.
    pub fn eval(&self, symbols: &Symbols) -> Option<u64> {
        let Dim::Known(terms) = self else { return None };
        let mut sum = 0i128;
        for (product, coefficient) in terms {
            let mut term = i128::from(*coefficient);
            for name in product {
                term = term.checked_mul(i128::from(*symbols.get(name)?))?;
            }
            sum = sum.checked_add(term)?;
        }
        u64::try_from(sum).ok()
    }

    /// All symbols in it, sorted, each once.
    pub fn symbols(&self) -> Vec<&str> {
        let Dim::Known(terms) = self else { return vec![] };
        let mut names: Vec<&str> = terms.keys().flatten().map(String::as_str).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// This dimension with symbols replaced by other dimensions; symbols that are not in the map stay.
    pub fn substitute(&self, replace: &BTreeMap<String, Dim>) -> Dim {
        let Dim::Known(terms) = self else { return Dim::Unknown };
        terms.iter().fold(Dim::fixed(0), |sum, (product, coefficient)| {
            let constant = Dim::Known(BTreeMap::from([(vec![], *coefficient)]));
            let term = product
                .iter()
                .fold(constant, |acc, name| acc * replace.get(name).cloned().unwrap_or_else(|| Dim::symbol(name)));
            sum + term
        })
    }

    fn from_terms(terms: impl IntoIterator<Item = (Vec<String>, Option<i64>)>) -> Dim {
        let mut sum: BTreeMap<Vec<String>, i64> = BTreeMap::new();
        for (product, coefficient) in terms {
            let slot = sum.entry(product).or_default();
            let Some(total) = coefficient.and_then(|c| slot.checked_add(c)) else { return Dim::Unknown };
            *slot = total;
        }
        sum.retain(|_, coefficient| *coefficient != 0);
        if sum.len() > MAX_TERMS { Dim::Unknown } else { Dim::Known(sum) }
    }
}

impl Add for Dim {
    type Output = Dim;
    fn add(self, other: Dim) -> Dim {
        let (Dim::Known(a), Dim::Known(b)) = (self, other) else { return Dim::Unknown };
        Dim::from_terms(a.into_iter().chain(b).map(|(p, c)| (p, Some(c))))
    }
}

impl Sub for Dim {
    type Output = Dim;
    fn sub(self, other: Dim) -> Dim {
        let (Dim::Known(a), Dim::Known(b)) = (self, other) else { return Dim::Unknown };
        Dim::from_terms(
            a.into_iter().map(|(p, c)| (p, Some(c))).chain(b.into_iter().map(|(p, c)| (p, c.checked_neg()))),
        )
    }
}

impl Mul for Dim {
    type Output = Dim;
    fn mul(self, other: Dim) -> Dim {
        let (Dim::Known(a), Dim::Known(b)) = (self, other) else { return Dim::Unknown };
        Dim::from_terms(a.iter().flat_map(|(pa, ca)| {
            b.iter().map(move |(pb, cb)| {
                let mut product: Vec<String> = pa.iter().chain(pb).cloned().collect();
                product.sort_unstable();
                (product, ca.checked_mul(*cb))
            })
        }))
    }
}

impl From<u64> for Dim {
    fn from(size: u64) -> Self {
        Dim::fixed(size)
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Dim::Known(terms) = self else { return f.write_str("?") };
        if terms.is_empty() {
            return f.write_str("0");
        }
        // The constant comes last.
        let constant = terms.iter().filter(|(p, _)| p.is_empty());
        for (i, (product, coefficient)) in terms.iter().filter(|(p, _)| !p.is_empty()).chain(constant).enumerate() {
            match (i, *coefficient < 0) {
                (0, true) => f.write_str("-")?,
                (0, false) => {}
                (_, true) => f.write_str(" - ")?,
                (_, false) => f.write_str(" + ")?,
            }
            let magnitude = coefficient.unsigned_abs();
            let symbols = || product.iter().map(|name| quoted(name)).collect::<Vec<_>>().join("*");
            match (magnitude, product.is_empty()) {
                (_, true) => write!(f, "{magnitude}")?,
                (1, false) => f.write_str(&symbols())?,
                (_, false) => write!(f, "{magnitude}*{}", symbols())?,
            }
        }
        Ok(())
    }
}

/// Whether a symbol's name needs no backticks in an expression.
fn is_plain(name: &str) -> bool {
    name.starts_with(|c: char| c.is_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '/' | ':'))
}

/// A symbol as expressions write it: between backticks unless it is plain.
fn quoted(name: &str) -> Cow<'_, str> {
    if is_plain(name) { Cow::Borrowed(name) } else { Cow::Owned(format!("`{}`", name.replace('`', "'"))) }
}

/// Position of the first of these characters outside backticks.
fn find_unquoted(text: &str, wanted: &[char]) -> Option<usize> {
    let mut is_quoted = false;
    text.find(|c: char| {
        is_quoted ^= c == '`';
        !is_quoted && wanted.contains(&c)
    })
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Dim {
    type Err = DimError;

    /// Parses `?`, integers, symbols, `+`, `-`, `*` and their combinations, without parentheses. Between backticks any symbol is allowed.
    fn from_str(text: &str) -> Result<Self, DimError> {
        let error = |why| DimError { text: text.chars().take(80).collect(), why };
        if text.trim() == "?" {
            return Ok(Dim::Unknown);
        }
        if text.len() > 1024 {
            return Err(error("longer than 1024 bytes"));
        }
        let mut sum = Dim::fixed(0);
        let mut rest = text.trim();
        let mut negative = false;
        if let Some(after) = rest.strip_prefix('-') {
            (negative, rest) = (true, after.trim_start());
        }
        loop {
            let end = find_unquoted(rest, &['+', '-']).unwrap_or(rest.len());
            let mut term = Dim::fixed(1);
            let mut factors = Some(&rest[..end]);
            while let Some(text) = factors {
                let at = find_unquoted(text, &['*']);
                let factor = text[..at.unwrap_or(text.len())].trim();
                factors = at.map(|at| &text[at + 1..]);
                let name = factor.strip_prefix('`').and_then(|rest| rest.strip_suffix('`'));
                term = term
                    * if let Ok(size) = factor.parse::<u64>() {
                        Dim::fixed(size)
                    } else if let Some(name) = name.filter(|name| !name.contains('`')) {
                        Dim::symbol(name)
                    } else if is_plain(factor) {
                        Dim::symbol(factor)
                    } else {
                        return Err(error(
                            "expected integers and names joined by + - *, other names between backticks",
                        ));
                    };
            }
            sum = if negative { sum - term } else { sum + term };
            if end == rest.len() {
                return if sum == Dim::Unknown { Err(error("too large")) } else { Ok(sum) };
            }
            negative = rest.as_bytes()[end] == b'-';
            rest = rest[end + 1..].trim_start();
        }
    }
}

impl Serialize for Dim {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        match self.as_fixed() {
            Some(size) => s.serialize_u64(size),
            None => s.collect_str(self),
        }
    }
}

impl<'de> Deserialize<'de> for Dim {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Dim;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a dimension: a size, an expression such as `past + 1`, or `?`")
            }
            fn visit_u64<E: de::Error>(self, v: u64) -> Result<Dim, E> {
                Ok(Dim::fixed(v))
            }
            fn visit_i64<E: de::Error>(self, v: i64) -> Result<Dim, E> {
                u64::try_from(v).map(Dim::fixed).map_err(|_| E::custom(format!("a dimension cannot be {v}")))
            }
            fn visit_str<E: de::Error>(self, v: &str) -> Result<Dim, E> {
                v.parse().map_err(E::custom)
            }
        }
        d.deserialize_any(Visitor)
    }
}

impl JsonSchema for Dim {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Dim".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "description": "A dimension: a size, an expression over named sizes, or `?` if unknown.",
            "oneOf": [{ "type": "integer", "minimum": 0 }, { "type": "string" }]
        })
    }
}

/// Serialises a list as `[a, b, c]` on one line, which keeps plans readable.
pub(crate) fn on_one_line<T: Serialize, S: serde::Serializer>(list: &Vec<T>, s: S) -> Result<S::Ok, S::Error> {
    serde_saphyr::FlowSeq(list).serialize(s)
}

/// Writes each item of a list as a mapping on a line of its own.
pub(crate) fn each_on_one_line<T: Serialize, S: serde::Serializer>(list: &[T], s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(list.iter().map(serde_saphyr::FlowMap))
}

/// Writes a mapping on one line.
pub(crate) fn map_on_one_line<T: Serialize, S: serde::Serializer>(map: &T, s: S) -> Result<S::Ok, S::Error> {
    serde_saphyr::FlowMap(map).serialize(s)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_expressions_compare_equal() {
        let a: Dim = "past + 2*seq + 1".parse().unwrap();
        let b: Dim = "1 + seq + past+seq".parse().unwrap();
        assert_eq!(a, b);
        assert_eq!(a.to_string(), "past + 2*seq + 1");
        assert_eq!((a.clone() - b).as_fixed(), Some(0));
        assert_eq!(a.eval(&Symbols::from([("past".into(), 3), ("seq".into(), 4)])), Some(12));
        assert_eq!(a.eval(&Symbols::new()), None);
    }

    #[test]
    fn products_commute() {
        let a = Dim::symbol("b") * Dim::symbol("s");
        assert_eq!(a, "s*b".parse().unwrap());
        assert_eq!(a.to_string(), "b*s");
    }

    #[test]
    fn opaque_names_stay_whole() {
        for name in ["floor(x/2)", "Max(1, s1)", "length of x", "(s0//14) + 1", "a - (b)", "0x", "", "x[0]*"] {
            let dim = Dim::from_param(name);
            assert_eq!((dim.as_symbol(), dim.to_param().as_str()), (Some(name), name));
            let sum = dim.clone() * Dim::fixed(3) * Dim::symbol("b") - Dim::symbol("s 1") + Dim::fixed(2);
            for dim in [dim, sum] {
                assert_eq!(dim.to_string().parse(), Ok(dim.clone()), "{dim}");
                assert_eq!(Dim::from_param(&dim.to_param()), dim);
            }
        }
        assert_eq!(Dim::from_param("floor(x/2)").to_string(), "`floor(x/2)`");
        assert_eq!(Dim::from_param(&"(".repeat(300)), Dim::Unknown);
        assert!(
            "floor(x/2)".parse::<Dim>().is_err() && "`a".parse::<Dim>().is_err() && "`a`b`".parse::<Dim>().is_err()
        );
        assert!("".parse::<Dim>().is_err());
        assert!("a +".parse::<Dim>().is_err());
    }

    #[test]
    fn negative_sizes_have_no_value() {
        let d: Dim = "a - 5".parse().unwrap();
        assert_eq!(d.eval(&Symbols::from([("a".into(), 3)])), None);
        assert_eq!(d.eval(&Symbols::from([("a".into(), 8)])), Some(3));
    }

    #[test]
    fn overflow_is_unknown() {
        assert_eq!(Dim::fixed(i64::MAX as u64) * Dim::fixed(2), Dim::Unknown);
        assert_eq!(Dim::fixed(u64::MAX), Dim::Unknown);
    }
}
