//! Exact arithmetic on dimensions beyond the operators of [`Dim`]: signed constants, division, comparison.
//!
//! Invariant: a result holds for all values of the symbols, or it is unknown. Symbols are sizes, so they are not
//! negative.

use hpp_schema::Dim;
use std::collections::BTreeMap;

/// Maximum degree of a product. The limit stops hostile input from growing polynomials without bound.
const MAX_DEGREE: usize = 8;

/// A constant, which may be negative as in slices and reshapes.
pub(super) fn constant(value: i64) -> Dim {
    Dim::Known(if value == 0 { BTreeMap::new() } else { BTreeMap::from([(vec![], value)]) })
}

/// The value of a constant, which may be negative; `None` if there are symbols.
pub(super) fn as_constant(dim: &Dim) -> Option<i64> {
    let Dim::Known(terms) = dim else { return None };
    match terms.len() {
        0 => Some(0),
        1 => terms.get(&Vec::new()).copied(),
        _ => None,
    }
}

fn degree(dim: &Dim) -> usize {
    let Dim::Known(terms) = dim else { return 0 };
    terms.keys().map(Vec::len).max().unwrap_or(0)
}

/// `a * b`; unknown if the degree exceeds the maximum.
pub(super) fn multiply(a: &Dim, b: &Dim) -> Dim {
    if as_constant(a) == Some(0) || as_constant(b) == Some(0) {
        return constant(0);
    }
    if degree(a) + degree(b) > MAX_DEGREE { Dim::Unknown } else { a.clone() * b.clone() }
}

/// The product of all dimensions; 1 for none.
pub(super) fn product<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
    dims.into_iter().fold(constant(1), |all, dim| multiply(&all, dim))
}

/// The sum of all dimensions; 0 for none.
pub(super) fn sum<'a>(dims: impl IntoIterator<Item = &'a Dim>) -> Dim {
    dims.into_iter().fold(constant(0), |all, dim| all + dim.clone())
}

/// `a / b` if the division is exact for all values of the symbols; unknown otherwise.
pub(super) fn divide(a: &Dim, b: &Dim) -> Dim {
    let (Dim::Known(terms), Dim::Known(divisor)) = (a, b) else { return Dim::Unknown };
    if a == b && !terms.is_empty() {
        return constant(1);
    }
    let mut divisors = divisor.iter();
    let (Some((symbols, by)), None) = (divisors.next(), divisors.next()) else { return Dim::Unknown };
    let mut quotient = BTreeMap::new();
    for (product, coefficient) in terms {
        if coefficient.checked_rem(*by) != Some(0) {
            return Dim::Unknown;
        }
        let Some(rest) = without(product, symbols) else { return Dim::Unknown };
        quotient.insert(rest, coefficient / by);
    }
    Dim::Known(quotient)
}

/// The sorted multiset `all` without the elements of `some`; `None` if one is missing.
fn without(all: &[String], some: &[String]) -> Option<Vec<String>> {
    let mut rest = all.to_vec();
    for name in some {
        rest.remove(rest.iter().position(|n| n == name)?);
    }
    Some(rest)
}

/// `floor(a / by)` for a positive divisor, if that is a polynomial.
pub(super) fn divide_down(a: &Dim, by: i64) -> Dim {
    let Dim::Known(terms) = a else { return Dim::Unknown };
    if by < 1 {
        return Dim::Unknown;
    }
    let mut quotient = BTreeMap::new();
    for (product, coefficient) in terms {
        if !product.is_empty() && coefficient % by != 0 {
            return Dim::Unknown;
        }
        quotient.insert(product.clone(), coefficient.div_euclid(by));
    }
    quotient.retain(|_, coefficient| *coefficient != 0);
    Dim::Known(quotient)
}

/// `ceil(a / by)` for a positive divisor, if that is a polynomial.
pub(super) fn divide_up(a: &Dim, by: i64) -> Dim {
    if by < 1 { Dim::Unknown } else { divide_down(&(a.clone() + constant(by - 1)), by) }
}

/// The product of `dividends` divided by the product of `divisors`. Equal factors are cancelled first.
pub(super) fn quotient(mut dividends: Vec<Dim>, divisors: &[Dim]) -> Dim {
    let mut left = vec![];
    for divisor in divisors {
        match dividends.iter().position(|d| d == divisor && *d != Dim::Unknown && as_constant(d) != Some(0)) {
            Some(at) => drop(dividends.swap_remove(at)),
            None => left.push(divisor.clone()),
        }
    }
    let divisor = product(&left);
    if as_constant(&divisor) == Some(0) { Dim::Unknown } else { divide(&product(&dividends), &divisor) }
}

/// Whether `dim >= 0` for all values of the symbols.
pub(super) fn never_negative(dim: &Dim) -> bool {
    matches!(dim, Dim::Known(terms) if terms.values().all(|c| *c >= 0))
}

/// Whether `a <= b` for all values of the symbols.
pub(super) fn at_most(a: &Dim, b: &Dim) -> bool {
    never_negative(&(b.clone() - a.clone()))
}

/// Whether `a < b` for all values of the symbols.
pub(super) fn below(a: &Dim, b: &Dim) -> bool {
    at_most(&(a.clone() + constant(1)), b)
}

/// Whether `a` and `b` differ for all values of the symbols.
pub(super) fn differ(a: &Dim, b: &Dim) -> bool {
    below(a, b) || below(b, a)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dim(text: &str) -> Dim {
        text.parse().unwrap()
    }

    #[test]
    fn division_is_exact_or_unknown() {
        assert_eq!(divide(&dim("6*b*s + 4*s"), &dim("2*s")), dim("3*b + 2"));
        assert_eq!(divide(&dim("b + 1"), &dim("b + 1")), dim("1"));
        assert_eq!(divide(&dim("b + 1"), &dim("b")), Dim::Unknown);
        assert_eq!(divide(&dim("3*b"), &dim("2")), Dim::Unknown);
        assert_eq!(divide(&dim("0"), &dim("0")), Dim::Unknown);
        assert_eq!(divide(&constant(i64::MIN), &constant(-1)), Dim::Unknown);
    }

    #[test]
    fn quotient_cancels_sums() {
        let dims = [dim("b"), dim("past + s"), dim("4"), dim("16")];
        assert_eq!(quotient(dims.to_vec(), &[dim("b"), dim("past + s")]), dim("64"));
        assert_eq!(quotient(dims.to_vec(), &[dim("b*past + b*s")]), Dim::Unknown);
        assert_eq!(quotient(vec![dim("b"), Dim::Unknown], &[dim("b")]), Dim::Unknown);
    }

    #[test]
    fn floors_and_ceilings() {
        assert_eq!(divide_down(&dim("4*s + 7"), 2), dim("2*s + 3"));
        assert_eq!(divide_up(&dim("4*s + 7"), 2), dim("2*s + 4"));
        assert_eq!(divide_down(&dim("s"), 2), Dim::Unknown);
        assert_eq!(as_constant(&divide_down(&constant(-3), 2)), Some(-2));
    }

    #[test]
    fn comparisons_need_proof() {
        assert!(below(&dim("s"), &dim("s + 1")));
        assert!(at_most(&dim("s"), &dim("past + s")));
        assert!(!at_most(&dim("s"), &dim("past")));
        assert!(differ(&dim("s"), &constant(-1)));
        assert!(!differ(&dim("s"), &constant(1)));
        assert!(!at_most(&Dim::Unknown, &Dim::Unknown));
    }

    #[test]
    fn repeated_squaring_is_bounded() {
        let mut d = dim("s");
        for _ in 0..200 {
            d = multiply(&d, &d);
        }
        assert_eq!(d, Dim::Unknown);
    }
}
