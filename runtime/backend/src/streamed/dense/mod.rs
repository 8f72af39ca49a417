//! Weights that are stored in fewer bytes than they take in memory, bit for bit: what limits a model below RAM is what is read of
//! it for each token.
//!
//! Beside the weights as kernels want them lies a second file, with what of them can be told shorter, and a list of the
//! *spans* it tells: float32 numbers that 16 bits tell exactly ([`words`]), and the scales and sums of packed integers, of which the
//! scales are enough ([`sums`]). Spans are whole pages, and each is stored in *parts* that are expanded by themselves. What is
//! stored was expanded and compared with the weights when it was written ([`make`]).

pub(super) mod make;
mod span;
mod sums;
mod words;

pub(super) use make::make;
pub(super) use span::{Part, Span};

use std::fs;
use std::io;
use std::path::Path;

/// What is stored of spans.
pub(super) const DENSE: &str = "dense";
/// The spans, one on each line.
pub(super) const SPANS: &str = "dense.spans";
/// Most bytes of one part as it is stored.
pub(super) const PART: usize = 1 << 20;

/// The spans that a directory of prepared weights stores densely.
pub(super) fn spans(dir: &Path) -> io::Result<Vec<Span>> {
    let text = fs::read_to_string(dir.join(SPANS))?;
    let broken = || {
        io::Error::new(io::ErrorKind::InvalidData, format!("{} is not as it was written", dir.join(SPANS).display()))
    };
    text.lines().map(|line| Span::parse(line).ok_or_else(broken)).collect()
}
