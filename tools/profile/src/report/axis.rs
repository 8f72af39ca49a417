//! The axes of a panel: range, ticks and labels.

use super::number::{bytes, label, plain};

/// How values map to positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    Linear,
    Log,
}

/// An axis of a panel.
#[derive(Clone, Debug)]
pub struct Axis {
    pub name: String,
    scale: Scale,
    low: f64,
    high: f64,
    /// Tick values with labels.
    ticks: Vec<(f64, String)>,
}

/// Approximate number of ticks.
const TICKS: f64 = 5.0;

impl Axis {
    fn new(name: impl Into<String>, scale: Scale, (low, high): (f64, f64), ticks: Vec<(f64, String)>) -> Axis {
        Axis { name: name.into(), scale, low, high, ticks }
    }

    /// From 0, or the smallest value below it, to the largest value.
    pub fn from_zero(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = finite(values).fold((0f64, 0f64), |(low, high), value| (low.min(value), high.max(value)));
        Axis::linear(name, low * 1.05, if high > low { high * 1.05 } else { low + 1.0 })
    }

    /// Around the values, from zero where the scale has one.
    pub fn scaled(scale: Scale, name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        match scale {
            Scale::Linear => Axis::from_zero(name, values),
            Scale::Log => Axis::log(name, values),
        }
    }

    /// A range with round ticks.
    pub fn linear(name: impl Into<String>, low: f64, high: f64) -> Axis {
        Axis::new(name, Scale::Linear, (low, high), labelled(round_ticks(low, high)))
    }

    /// Logarithmic, around the positive values; others have no position.
    pub fn log(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = log_range(values);
        Axis::new(name, Scale::Log, (low, high), labelled(decades(low, high)))
    }

    /// Sizes in bytes, logarithmic, with ticks at powers of two.
    pub fn bytes(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Axis {
        let (low, high) = extent(values);
        let (low, high) = (low.max(1.0) / 1.5, high.max(2.0) * 1.5);
        let (first, last) = (low.log2().ceil() as i32, high.log2().floor() as i32);
        let step = ((last - first) / TICKS as i32).max(1);
        let ticks = (first..=last).step_by(step as usize).map(|power| 2f64.powi(power));
        Axis::new(name, Scale::Log, (low, high), ticks.map(|value| (value, bytes(value as u64))).collect())
    }

    /// The blocks of a model, one unit per block.
    pub fn depth(labels: &[&str]) -> Axis {
        let range = (-0.6, labels.len().max(1) as f64 - 0.4);
        Axis::new("blocks in the order they run", Scale::Linear, range, depth_ticks(labels))
    }

    /// `rows` rows without a name, of which some have a label; row 0 is at the bottom.
    pub fn rows(rows: usize, labels: Vec<(f64, String)>) -> Axis {
        Axis::new("", Scale::Linear, (-0.6, rows.max(1) as f64 - 0.4), labels)
    }

    /// The position of a value, 0 (low) to 1 (high); `None` if it has none.
    pub fn position(&self, value: f64) -> Option<f64> {
        let scaled = |value: f64| if self.scale == Scale::Log { value.log10() } else { value };
        let (low, high) = (scaled(self.low), scaled(self.high));
        let position = (scaled(value).clamp(low, high) - low) / (high - low);
        (scaled(value).is_finite() && position.is_finite()).then_some(position)
    }

    /// Lowest and highest value.
    pub fn values(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    /// Ticks by position.
    pub fn ticks(&self) -> Vec<(f64, &str)> {
        self.ticks.iter().filter_map(|(value, text)| Some((self.position(*value)?, text.as_str()))).collect()
    }
}

fn labelled(values: Vec<f64>) -> Vec<(f64, String)> {
    values.into_iter().map(|value| (value, short(value))).collect()
}

fn finite(values: impl IntoIterator<Item = f64>) -> impl Iterator<Item = f64> {
    values.into_iter().filter(|value| value.is_finite() && value.abs() < 1e200)
}

/// Smallest and largest positive value; 1 and 1 if there is none.
fn extent(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let above = finite(values).filter(|value| *value > 1e-200);
    let (low, high) = above.fold((f64::INFINITY, 0f64), |(low, high), value| (low.min(value), high.max(value)));
    if high > 0.0 { (low, high) } else { (1.0, 1.0) }
}

/// A range slightly wider than the values, at least a factor of ten.
fn log_range(values: impl IntoIterator<Item = f64>) -> (f64, f64) {
    let (low, high) = extent(values);
    let widen = (10.0 / (high / low)).max(1.0).sqrt().max(1.3);
    (low / widen, high * widen)
}

/// Multiples of 1, 2 or 5 times a power of ten.
fn round_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / TICKS;
    if !(rough.is_finite() && rough > 0.0) {
        return vec![low];
    }
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step).ceil(), (high / step).floor());
    (0..=(last - first).clamp(0.0, 20.0) as u32).map(|i| (first + f64::from(i)) * step).collect()
}

/// Powers of ten; with few of them also 2 and 5 times.
fn decades(low: f64, high: f64) -> Vec<f64> {
    let (first, last) = (low.log10().ceil() as i32, high.log10().floor() as i32);
    let step = ((last - first) / 6 + 1).max(1);
    let tens: Vec<f64> = (first..=last).step_by(step as usize).map(|power| 10f64.powi(power)).collect();
    if tens.len() > 2 {
        return tens;
    }
    let finer = (first - 1..=last).flat_map(|power| [1.0, 2.0, 5.0].map(|factor| factor * 10f64.powi(power)));
    finer.filter(|value| (low..=high).contains(value)).collect()
}

/// A round number as a label: `100k`, `0.01`, `-2M`.
fn short(value: f64) -> String {
    match value.abs() {
        size if (1e4..1e6).contains(&size) => format!("{}k", plain(value / 1e3)),
        size if (1e6..1e9).contains(&size) => format!("{}M", plain(value / 1e6)),
        size if size > 0.0 && size < 1e-3 => format!("{value:.0e}"),
        _ => plain(value),
    }
}

/// Round layer numbers, and the labels of the blocks before and after the layers.
fn depth_ticks(labels: &[&str]) -> Vec<(f64, String)> {
    let most = TICKS as usize + 1;
    let round = [1, 2, 5, 10, 20, 50, 100, 200, 500];
    let step = round.into_iter().find(|step| labels.len() <= step * most).unwrap_or(labels.len().div_ceil(most));
    let number = |at: usize| short_block(labels[at]).parse::<usize>().ok();
    let last = labels.len().saturating_sub(1);
    let numbered = (0..labels.len()).any(|at| number(at).is_some());
    let shown = |at: &usize| {
        let near_an_end = [0, last].into_iter().any(|end| number(end).is_none() && end.abs_diff(*at) * 2 <= step);
        match number(*at) {
            Some(number) => number.is_multiple_of(step) && !near_an_end,
            None if numbered => *at == 0 || *at == last,
            None => at.is_multiple_of(step),
        }
    };
    (0..labels.len()).filter(shown).map(|at| (at as f64, short_block(labels[at]))).collect()
}

/// The number of a layer, or the start of another block's label.
fn short_block(text: &str) -> String {
    let last = text.rsplit('.').next().unwrap_or(text);
    label(if last.parse::<u32>().is_ok() { last } else { text }, 9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(axis: &Axis) -> Vec<&str> {
        axis.ticks().into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(words(&Axis::from_zero("ms", [1.0, 7.9])), ["0", "2", "4", "6", "8"]);
        assert_eq!(words(&Axis::log("ms", [0.02, 300.0])), ["0.1", "1", "10", "100"]);
        assert_eq!(words(&Axis::log("ms", [3.0, 4.0])), ["2", "5", "10"]);
        assert_eq!(words(&Axis::from_zero("ms", [-2.1e6, 0.0])), ["-2M", "-1.5M", "-1M", "-500k", "0"]);
        assert_eq!(words(&Axis::bytes("size", [4096.0, 65536.0])), ["4 KiB", "8 KiB", "16 KiB", "32 KiB", "64 KiB"]);
        assert_eq!(
            words(&Axis::depth(&["embedding", "layers.0", "layers.1", "head"])),
            ["embedding", "0", "1", "head"]
        );
        let names: Vec<String> = (0..24).map(|layer| format!("layers.{layer}")).collect();
        let labels: Vec<&str> =
            std::iter::once("embedding").chain(names.iter().map(String::as_str)).chain(["head"]).collect();
        assert_eq!(words(&Axis::depth(&labels)), ["embedding", "5", "10", "15", "20", "head"]);
        assert_eq!(words(&Axis::depth(&["stem", "body", "tail"])), ["stem", "body", "tail"]);
        assert_eq!(words(&Axis::depth(&[])), [""; 0]);
    }

    #[test]
    fn nonsense_gives_an_axis_all_the_same() {
        let odd = [f64::NAN, f64::INFINITY, -1.0, 0.0, f64::MAX, f64::MIN_POSITIVE];
        for axis in [Axis::from_zero("", odd), Axis::log("", odd), Axis::bytes("", odd)] {
            let (low, high) = axis.values();
            assert!(low.is_finite() && high > low, "{axis:?}");
            assert!(axis.ticks().len() < 30, "{axis:?}");
            assert_eq!(axis.position(f64::NAN), None);
        }
    }
}
