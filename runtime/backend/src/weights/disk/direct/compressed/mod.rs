//! Lossless compression of weights on disk: the bytes read per token bound the speed of a model that does not fit in RAM.
//!
//! A file holds *regions* of a weights file in fewer bytes, beside an index of them. There is one mechanism with several codes: float32
//! numbers that 16 bits represent exactly ([`words`]), numbers with coded exponents ([`exponents`]), and the scales and sums of packed
//! integers, where the sums follow from the scales ([`sums`]). The weights file is the one of prepared weights ([`super::prepared`]) in
//! the same directory or, where kernels take weights as the model has them, the model's own ([`super::copies`]). Regions are whole
//! pages, stored in *parts* that are decompressed independently and have a checksum each. Invariant: every region decompresses to the
//! original bytes; [`make`] checks that when it writes one.

mod checksum;
mod exponents;
pub(super) mod make;
pub(super) mod rate;
mod region;
mod sums;
mod words;

pub(super) use make::RegionWriter;
pub(super) use region::{CompressedRegion, RegionPart};

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The file that stores compressed regions.
pub(super) const COMPRESSED_FILE: &str = "dense";
/// The index of regions, one per line.
pub(super) const REGIONS_FILE: &str = "dense.spans";
/// Most stored bytes of one part.
pub(super) const PART: usize = 1 << 20;

/// Stored bytes that are not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Damaged;

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "compressed weights are damaged: remove the directory of this file, and the next start makes it again",
        )
    }
}

impl std::error::Error for Damaged {}

impl From<Damaged> for io::Error {
    fn from(damaged: Damaged) -> Self {
        io::Error::new(io::ErrorKind::InvalidData, damaged)
    }
}

/// The compressed regions of files under one directory, and the file that stores them. Default: none.
#[derive(Clone, Debug, Default)]
pub(super) struct Compressed {
    /// The file that stores them.
    pub stored: PathBuf,
    /// In the order of their files and offsets.
    pub regions: Vec<CompressedRegion>,
}

impl Compressed {
    /// Reads the index in `dir` of the regions of files under `weights_dir`.
    pub fn open(dir: &Path, weights_dir: &Path) -> io::Result<Self> {
        let text = fs::read_to_string(dir.join(REGIONS_FILE))?;
        let broken =
            || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", dir.join(REGIONS_FILE).display()));
        let weights_dir = weights_dir.canonicalize()?;
        let region = |line| {
            let region: CompressedRegion = CompressedRegion::parse(line).ok_or_else(broken)?;
            Ok(CompressedRegion { file: weights_dir.join(&region.file), ..region })
        };
        let mut regions = text.lines().map(region).collect::<io::Result<Vec<_>>>()?;
        regions.sort_by(|a, b| (&a.file, a.offset).cmp(&(&b.file, b.offset)));
        Ok(Compressed { stored: dir.join(COMPRESSED_FILE), regions })
    }
}
