//! Values that several commands read alike.

/// A number of tokens: `8192`, or `8k` and `1M` with k for 1024 and M for its square, as context lengths are counted.
pub fn tokens(text: &str) -> Option<u64> {
    let lower = text.trim().to_ascii_lowercase();
    let units = [('k', 1 << 10), ('m', 1 << 20)];
    let unit = units.into_iter().find_map(|(letter, unit)| Some((lower.strip_suffix(letter)?, unit)));
    let (number, unit) = unit.unwrap_or((&lower, 1));
    number.trim().parse::<u64>().ok()?.checked_mul(unit)
}
