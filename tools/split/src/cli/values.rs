//! Parsers for option values: token counts, layer counts, VRAM ranges. Memory sizes are parsed by [`ByteSize::typed`].

use clap::ValueEnum;
use hpp_schema::ByteSize;
use std::str::FromStr;

/// Parses a number of tokens: `8192`, or `8k` and `1M` with k for 1024 and M for its square, as context lengths are counted.
pub fn tokens(text: &str) -> Result<u64, String> {
    hpp_cli::tokens(text).ok_or_else(|| "give a number of tokens, such as 8192 or 8k (k is 1024)".to_owned())
}

/// `--gpu-layers` and `--stream`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerCount {
    /// The planner decides.
    Auto,
    /// This many layers; `u64::MAX` stands for `all`.
    Count(u64),
}

impl FromStr for LayerCount {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(LayerCount::Auto),
            "all" => Ok(LayerCount::Count(u64::MAX)),
            _ => text.parse().map(LayerCount::Count).map_err(|_| "give a number of layers, `all` or `auto`".to_owned()),
        }
    }
}

/// `--gpu-experts`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuExpertsArg {
    /// As many experts as fit.
    Auto,
    /// This many experts of each layer.
    Count(u64),
}

impl FromStr for GpuExpertsArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "auto" => Ok(GpuExpertsArg::Auto),
            _ => text.parse().map(GpuExpertsArg::Count).map_err(|_| "give a number of experts or `auto`".to_owned()),
        }
    }
}

/// `--kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvHomeArg {
    /// The device that computes the layer. Layers on the CPU keep theirs in a file, as with `disk`, if memory is too small for the context,
    /// or if weights that are read from disk are expected to use that memory much better. With --objective throughput those of layers on
    /// GPUs are in host memory, as with `cpu`, if that is faster.
    Auto,
    /// The device that computes the layer.
    Follow,
    /// The GPU; refused when a layer with state computes on the CPU.
    Gpu,
    /// Host memory, copied to the GPU and back around each layer: VRAM holds the caches of one layer, or of two, and the
    /// whole cache crosses the bus twice per token.
    #[value(name = "cpu")]
    Host,
    /// The GPU for its layers, and a file for layers on the CPU, whose caches are read before each layer and written after it: a
    /// context may need more than host memory has.
    Disk,
}

/// `--split-mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SplitModeArg {
    /// Whole layers, one after another.
    Layer,
    /// A part of every layer, all at the same time: some rows or columns of each matrix. For two or more GPUs of one kind.
    Row,
}

/// Upper limit on the number of budgets in a sweep.
const MAX_POINTS: u64 = 1000;

/// `--sweep-vram FROM..TO[:STEP]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VramRange {
    from: u64,
    to: u64,
    step: u64,
}

impl VramRange {
    /// Every budget from the first to the last. The last is included even where it is not a multiple of the step.
    pub fn points(&self) -> Vec<u64> {
        let mut points: Vec<u64> =
            (self.from..=self.to).step_by(usize::try_from(self.step).unwrap_or(usize::MAX)).collect();
        points.extend(Some(self.to).filter(|to| points.last() != Some(to)));
        points
    }
}

impl FromStr for VramRange {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (range, step) = text.split_once(':').map_or((text, None), |(range, step)| (range, Some(step)));
        let (from, to) = range.split_once("..").ok_or("give FROM..TO or FROM..TO:STEP, such as 4G..24G:2G")?;
        let size = |text: &str| ByteSize::typed(text).map(|size| size.0);
        let (from, to) = (size(from)?, size(to)?);
        // Without a step, about twenty points at powers of two.
        let step = step.map_or(Ok(((to.saturating_sub(from)) / 20).next_power_of_two()), size)?;
        match () {
            () if from == 0 => Err("a VRAM budget of 0 holds nothing: start above 0".to_owned()),
            () if to < from => Err(format!("{} is less than {}", ByteSize(to).human(), ByteSize(from).human())),
            () if step == 0 => Err("a step of 0 never reaches the end".to_owned()),
            () if (to - from) / step >= MAX_POINTS => {
                Err(format!("more than {MAX_POINTS} budgets: take a larger step"))
            }
            () => Ok(VramRange { from, to, step }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn points(text: &str) -> Vec<u64> {
        text.parse::<VramRange>().unwrap().points()
    }

    #[test]
    fn tokens_may_be_counted_in_thousands() {
        assert_eq!(["8192", "8k", "128K", "1M", "0"].map(tokens), [Ok(8192), Ok(8192), Ok(131072), Ok(1 << 20), Ok(0)]);
        for text in ["k", "8kk", "lots", "-1", "1.5k", ""] {
            assert!(tokens(text).unwrap_err().contains("8k"), "{text}");
        }
    }

    #[test]
    fn a_range_includes_both_ends() {
        assert_eq!(points("1K..4K:1K"), [1024, 2048, 3072, 4096]);
        assert_eq!(points("1K..4K:2K"), [1024, 3072, 4096]);
        assert_eq!(points("4G..4G"), [4 << 30]);
        let gibibytes: Vec<u64> = points("4G..24G").iter().map(|bytes| bytes >> 30).collect();
        assert_eq!(gibibytes, (4..=24).collect::<Vec<_>>());
    }

    #[test]
    fn invalid_ranges_are_refused() {
        for text in
            ["4G", "4G-8G", "8G..4G", "0..4G", "1G..2G:0", "1..1G:1", "4..24", "aG..1G", "1G..", "..1G", "1G..2G:x"]
        {
            assert!(text.parse::<VramRange>().is_err(), "{text}");
        }
    }
}
