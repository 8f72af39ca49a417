//! Lossless compression of weights on disk: the bytes read per token bound the speed of a model that does not fit in RAM.
//!
//! Beside the file of prepared weights there is a second file with *regions* that can be stored in fewer bytes, and an index
//! of them: float32 numbers that 16 bits represent exactly ([`words`]), and the scales and sums of packed integers, where the sums
//! follow from the scales ([`sums`]). Regions are whole pages, stored in *parts* that are decompressed independently. Invariant: every
//! region decompresses to the original bytes; [`make`] checks that when it writes one.

pub(super) mod make;
mod region;
mod sums;
mod words;

pub(super) use make::make;
pub(super) use region::{CompressedRegion, RegionPart};

use std::fs;
use std::io;
use std::path::Path;

/// The file that stores compressed regions.
pub(super) const COMPRESSED_FILE: &str = "dense";
/// The index of regions, one per line.
pub(super) const REGIONS_FILE: &str = "dense.spans";
/// Most stored bytes of one part.
pub(super) const PART: usize = 1 << 20;

/// The compressed regions of a directory of prepared weights.
pub(super) fn regions(dir: &Path) -> io::Result<Vec<CompressedRegion>> {
    let text = fs::read_to_string(dir.join(REGIONS_FILE))?;
    let broken =
        || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", dir.join(REGIONS_FILE).display()));
    text.lines().map(|line| CompressedRegion::parse(line).ok_or_else(broken)).collect()
}
