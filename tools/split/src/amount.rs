//! Formats numbers, times and counts for people: two or three significant digits, seconds from one second on.

/// Significant digits of numbers that are measured or computed from measurements.
pub const MEASURED: i32 = 3;
/// Significant digits of estimates from shapes and assumed rates.
pub const ESTIMATED: i32 = 2;

/// The most significant digits that are computed exactly.
const MOST: i32 = 12;

/// `value` rounded to `significant` digits, without an exponent.
pub fn digits(value: f64, significant: i32) -> String {
    if value == 0.0 || !value.is_finite() {
        return "0".to_owned();
    }
    let exponent = |value: f64| value.abs().log10().floor() as i32;
    let scale = 10f64.powi(significant - 1 - exponent(value));
    let rounded = (value * scale).round() / scale;
    // Rounding may carry: 9.99 to two digits is 10.
    let decimals = (significant - 1 - exponent(rounded)).max(0);
    format!("{rounded:.*}", usize::try_from(decimals).unwrap_or(0))
}

/// `value` with at least `significant` digits, rounded down if it would otherwise not be shown as less than `limit`.
/// Precondition: it is less.
pub fn digits_below(value: f64, limit: f64, significant: i32) -> String {
    let is_less = |text: &String| text.parse::<f64>().is_ok_and(|shown| shown < limit);
    let more = (significant + 1..=MOST).map(|significant| {
        let scale = 10f64.powi(significant - 1 - value.abs().log10().floor() as i32);
        digits((value * scale).floor() / scale, significant)
    });
    std::iter::once(digits(value, significant)).chain(more).find(is_less).unwrap_or_else(|| value.to_string())
}

/// A time: milliseconds, or seconds from one second on.
pub fn time(ms: f64, significant: i32) -> String {
    // A time that rounds to 1000 ms is printed in seconds.
    let limit = 1e3 - 0.5 * 10f64.powi(3 - significant);
    match ms.abs() < limit {
        true => format!("{} ms", digits(ms, significant)),
        false => format!("{} s", digits(ms / 1e3, significant)),
    }
}

/// A difference in time, with its sign.
pub fn difference(ms: f64, significant: i32) -> String {
    let sign = if ms < 0.0 { '-' } else { '+' };
    format!("{sign}{}", time(ms.abs(), significant))
}

/// `1 layer`, `2 layers`.
pub fn count(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_rounded_to_significant_digits() {
        for (value, significant, text) in [
            (118.8, 2, "120"),
            (5255.0, 2, "5300"),
            (0.4567, 2, "0.46"),
            (0.2134, 3, "0.213"),
            (9.99, 2, "10"),
            (99.96, 3, "100"),
            (12345.0, 3, "12300"),
            (0.0, 2, "0"),
            (f64::INFINITY, 2, "0"),
        ] {
            assert_eq!(digits(value, significant), text, "{value}");
        }
    }

    #[test]
    fn a_number_below_a_limit_is_shown_below_it() {
        for (value, limit, text) in [
            (110.96, 111.0, "110.9"),
            (110.9, 111.0, "110.9"),
            (110.99996, 111.0, "110.9"),
            (110.96, 110.97, "110.9"),
            (99.99, 100.0, "99.99"),
            (12.347, 20.0, "12.3"),
            (12.347, 12.35, "12.3"),
            (123_456.7, 123_456.8, "123000"),
            (0.0, 5.0, "0"),
        ] {
            assert_eq!(digits_below(value, limit, MEASURED), text, "{value}");
        }
    }

    #[test]
    fn times_are_in_seconds_from_one_second_on() {
        for (ms, text) in
            [(0.2134, "0.213 ms"), (29.82, "29.8 ms"), (999.4, "999 ms"), (999.6, "1.00 s"), (31478.87, "31.5 s")]
        {
            assert_eq!(time(ms, MEASURED), text);
        }
        assert_eq!(time(996.0, ESTIMATED), "1.0 s");
        assert_eq!(difference(-243.61, ESTIMATED), "-240 ms");
        assert_eq!(difference(46527.17, ESTIMATED), "+47 s");
        assert_eq!((count(1, "block"), count(0, "block")), ("1 block".to_owned(), "0 blocks".to_owned()));
    }
}
