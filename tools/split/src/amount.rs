//! Formats numbers, times and counts for people: two or three significant digits, seconds from one second on.

/// Significant digits of numbers that are measured or computed from measurements.
pub const MEASURED: i32 = 3;
/// Significant digits of estimates from shapes and assumed rates.
pub const ESTIMATED: i32 = 2;

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

/// `value` rounded down to `significant` digits.
pub fn digits_down(value: f64, significant: i32) -> String {
    digits(rounded(value, significant, f64::floor), significant)
}

/// A time rounded up to `significant` digits of its unit.
pub fn time_up(ms: f64, significant: i32) -> String {
    time(rounded(ms, significant, f64::ceil), significant)
}

fn rounded(value: f64, significant: i32, round: fn(f64) -> f64) -> f64 {
    if value <= 0.0 {
        return value;
    }
    let scale = 10f64.powi(significant - 1 - value.log10().floor() as i32);
    round(value * scale) / scale
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

/// A number with its sign.
pub fn signed(value: f64, significant: i32) -> String {
    let sign = if value < 0.0 { '-' } else { '+' };
    format!("{sign}{}", digits(value.abs(), significant))
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

    /// A limit that is given back is met.
    #[test]
    fn limits_are_rounded_to_the_safe_side() {
        for (value, text) in
            [(110.96, "110"), (2749.6, "2740"), (99.99, "99.9"), (12.347, "12.3"), (5.0, "5.00"), (0.0, "0")]
        {
            assert_eq!(digits_down(value, MEASURED), text, "{value}");
        }
        for (ms, text) in
            [(7.931, "7.94 ms"), (0.1201, "0.121 ms"), (5.0, "5.00 ms"), (998.2, "999 ms"), (1234.0, "1.24 s")]
        {
            assert_eq!(time_up(ms, MEASURED), text, "{ms}");
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
