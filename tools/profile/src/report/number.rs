//! Formats numbers: three significant digits and a unit.

use hpp_schema::ByteSize;

/// Three significant digits, without an exponent between 0.001 and 1,000,000.
pub fn plain(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "not a number".to_owned();
    }
    if value == 0.0 {
        return "0".to_owned();
    }
    if !(1e-3..1e6).contains(&size) {
        return format!("{value:.1e}");
    }
    let decimals = (2 - size.log10().floor() as i32).clamp(0, 6) as usize;
    let text = format!("{value:.decimals$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

/// A time with a suitable unit.
pub fn time(ms: f64) -> String {
    match ms.abs() {
        size if size >= 1e3 => format!("{} s", plain(ms / 1e3)),
        size if size >= 1.0 || size == 0.0 => format!("{} ms", plain(ms)),
        _ => format!("{} µs", plain(1e3 * ms)),
    }
}

/// Bytes with a binary unit.
pub fn bytes(count: u64) -> String {
    ByteSize(count).human()
}

/// A ratio from 0 to 1 in percent.
pub fn percent(part: f64) -> String {
    format!("{} %", plain(if part.abs() < 1e-5 { 0.0 } else { 100.0 * part }))
}

/// A value, or a dash where there is none.
pub fn or_dash<T>(value: Option<T>, show: fn(T) -> String) -> String {
    value.map_or("—".to_owned(), show)
}

/// A count with the singular or plural of a word.
pub fn count(number: impl TryInto<u64>, one: &str, many: &str) -> String {
    let number = number.try_into().unwrap_or(u64::MAX);
    if number == 1 { format!("1 {one}") } else { format!("{number} {many}") }
}

/// Text from a file on one line: escapes control characters and cuts after `most` characters.
pub fn label(text: &str, most: usize) -> String {
    let shown = |c: char| if c.is_control() { '\u{FFFD}' } else { c };
    let mut short: String = text.chars().map(shown).take(most).collect();
    if text.chars().count() > most {
        short.pop();
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_a_unit() {
        assert_eq!([plain(12.345), plain(0.5), plain(1234.0), plain(0.0)], ["12.3", "0.5", "1234", "0"]);
        assert_eq!([plain(2.5e9), plain(1e-7), plain(f64::NAN)], ["2.5e9", "1.0e-7", "not a number"]);
        assert_eq!([time(0.0421), time(3.0), time(4210.0)], ["42.1 µs", "3 ms", "4.21 s"]);
        assert_eq!([bytes(5), bytes(3 << 19), bytes(7 << 30)], ["5 B", "1.50 MiB", "7 GiB"]);
        assert_eq!(percent(0.1234), "12.3 %");
    }

    #[test]
    fn a_label_stays_on_its_line() {
        assert_eq!(label("layers.0", 12), "layers.0");
        assert_eq!(label("a\nb\u{7}", 12), "a\u{FFFD}b\u{FFFD}");
        assert_eq!(label("abcdefgh", 5), "abcd…");
    }
}
