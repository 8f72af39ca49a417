//! Numbers as text for people, and durations in milliseconds.

use std::time::Duration;

/// A duration in milliseconds.
pub fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// A rate, or `-` without one.
pub fn rate(per_second: Option<f64>) -> String {
    per_second.map_or("-".to_owned(), significant)
}

/// A number with three significant digits below 100 and one decimal from there on.
pub fn significant(number: f64) -> String {
    let magnitude = number.abs().log10().floor();
    let decimals = if magnitude.is_finite() { (2.0 - magnitude).clamp(1.0, 6.0) as usize } else { 1 };
    format!("{number:.decimals$}")
}

/// A count with its noun: `1 token`, `2 tokens`.
pub fn counted(count: u64, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

/// 1e9 bytes per second; 0 for no time.
pub fn gb_per_second(bytes: f64, millis: f64) -> f64 {
    if millis > 0.0 { bytes / millis / 1e6 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_keep_three_digits() {
        let text = [1395.04, 100.0, 12.34, 1.0, 0.2041, 0.00123, 0.0, -2.5, 1e-12].map(significant);
        assert_eq!(text, ["1395.0", "100.0", "12.3", "1.00", "0.204", "0.00123", "0.0", "-2.50", "0.000000"]);
        assert_eq!((rate(Some(0.0417)).as_str(), rate(None).as_str()), ("0.0417", "-"));
    }

    #[test]
    fn nouns_are_in_the_plural_except_for_one() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "run")), ["0 runs", "1 run", "2 runs"]);
    }
}
