//! Numbers as people read them.

/// A rate for people.
pub fn rate(per_second: Option<f64>) -> String {
    per_second.map_or("-".to_owned(), figures)
}

/// A number for people: three significant digits below 100, one decimal from there.
pub fn figures(number: f64) -> String {
    let before = number.abs().log10().floor();
    let decimals = if before.is_finite() { (2.0 - before).clamp(1.0, 6.0) as usize } else { 1 };
    format!("{number:.decimals$}")
}

/// So many of something, `1 token` or `2 tokens`.
pub fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_numbers_keep_three_digits() {
        let said = [1395.04, 100.0, 12.34, 1.0, 0.2041, 0.00123, 0.0, -2.5, 1e-12].map(figures);
        assert_eq!(said, ["1395.0", "100.0", "12.3", "1.00", "0.204", "0.00123", "0.0", "-2.50", "0.000000"]);
        assert_eq!((rate(Some(0.0417)).as_str(), rate(None).as_str()), ("0.0417", "-"));
    }

    #[test]
    fn one_is_one() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "run")), ["0 runs", "1 run", "2 runs"]);
    }
}
