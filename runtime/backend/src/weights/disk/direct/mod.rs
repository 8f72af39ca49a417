//! Reads weights past the page cache into memory that replaces ONNX Runtime's mappings (Linux).
//!
//! ONNX Runtime maps external weights from their file and never writes to them, so once a session exists, the pages behind those
//! addresses can be replaced ([`address_space`]): by anonymous memory that direct reads fill before a run ([`reader`]) and that is evicted
//! after it. Regions of weights that can be stored in fewer bytes are read compressed and decompressed in memory ([`compressed`]): of a
//! prepared file, or of the model's own ([`copies`]).

mod address_space;
mod chunks;
mod compressed;
mod copies;
mod disk_rate;
mod expert_pages;
mod files;
mod huge_pages;
mod open_files;
mod page_pool;
mod page_region;
mod reader;
mod stream;

pub use compressed::rate::decompression_rate;
pub(crate) use copies::find_or_copy;
pub use disk_rate::read_rate;
pub(in super::super) use files::{DirectFile, DirectReads};

use super::ExpertTensors;
use super::mapping::Mapping;
use super::streamed::{ManagedWeights, ReadBeforeRuns};
use super::views;
use crate::weights::file::SECTOR;
use compressed::{Compressed, RegionWriter};
use expert_pages::ExpertPages;
use open_files::OpenFiles;
use page_pool::PagePool;
use reader::Reader;
use std::cell::OnceCell;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use stream::{StreamedWeights, StreamingIo, expert_ranges};

/// The files of compressed regions beside prepared weights.
pub(super) const REGION_FILES: &[&str] = &[compressed::COMPRESSED_FILE, compressed::REGIONS_FILE];

/// Why weights cannot be read directly on this system, if so. Mappings are replaced in steps of [`SECTOR`] bytes, and some kernels for
/// aarch64 have larger pages.
pub(super) fn refusal() -> Option<String> {
    refusal_of(views::page_bytes() as u64)
}

fn refusal_of(page: u64) -> Option<String> {
    (page > SECTOR).then(|| format!("the pages of this system have {page} bytes, and direct reads need {SECTOR}"))
}

/// Compresses regions of a prepared weights file of the directory `dir`: those that then take at most `limit` bytes per 1000. `pieces` are
/// the offset and length of each weight.
pub(super) fn compress(dir: &Path, weights: &str, limit: u64, pieces: Vec<(u64, u64)>) -> io::Result<()> {
    let mut regions = RegionWriter::create(dir, limit)?;
    let file = dir.join(weights);
    pieces.into_iter().try_for_each(|piece| regions.add(&file, Path::new(weights), piece))?;
    regions.finish()
}

/// The reader, pools of pages and open files that all streamed sessions of a backend share. The reader starts with the first session.
#[derive(Clone, Default)]
pub(super) struct Readers {
    reader: Rc<OnceCell<Rc<Reader>>>,
    pool: Rc<PagePool>,
    expert_pages: Rc<ExpertPages>,
    files: Arc<OpenFiles>,
}

/// The weights of a session that will be read directly.
pub(super) struct PendingDirect {
    compressed: Compressed,
    readers: Readers,
}

impl Readers {
    /// Starts the reader, and opens the directory `compressed` of compressed regions of files under `dir`.
    pub fn prepare(&self, compressed: Option<PathBuf>, dir: &Path) -> io::Result<PendingDirect> {
        let compressed = compressed.map(|stored| Compressed::open(&stored, dir)).transpose()?.unwrap_or_default();
        self.reader()?.prepare()?;
        Ok(PendingDirect { compressed, readers: self.clone() })
    }

    fn reader(&self) -> io::Result<Rc<Reader>> {
        if let Some(reader) = self.reader.get() {
            return Ok(Rc::clone(reader));
        }
        let reader = Rc::new(Reader::start()?);
        Ok(Rc::clone(self.reader.get_or_init(|| reader)))
    }
}

impl PendingDirect {
    /// Reads and locks up to `locked` bytes; the rest is absent until it is read before a run.
    ///
    /// # Safety
    /// That of [`StreamedWeights::take_over`].
    pub unsafe fn take_over(
        self,
        mappings: Vec<Mapping>,
        experts: &ExpertTensors,
        locked: u64,
    ) -> io::Result<ManagedWeights> {
        let PendingDirect { compressed, readers } = self;
        let io = StreamingIo {
            reader: readers.reader()?,
            pool: Rc::clone(&readers.pool),
            expert_pages: Rc::clone(&readers.expert_pages),
            files: Arc::clone(&readers.files),
        };
        let (mappings, experts) = divide_experts(experts, mappings, &readers.expert_pages);
        // SAFETY: this function's contract.
        let mut weights = unsafe { StreamedWeights::take_over(io, mappings, experts, compressed, locked) }?;
        let lock_error = weights.take_lock_error();
        Ok(ManagedWeights { weights: Box::new(weights) as Box<dyn ReadBeforeRuns>, lock_error })
    }
}

/// Divides mappings into the rest and those of each expert; there are none of experts if that would exceed the process's limit on mappings.
fn divide_experts(
    experts: &ExpertTensors,
    mappings: Vec<Mapping>,
    pages: &ExpertPages,
) -> (Vec<Mapping>, Vec<Vec<Mapping>>) {
    let (rest, divided) = experts.divide(mappings.clone());
    match pages.register(divided.iter().flatten().map(expert_ranges).sum()) {
        true => (rest, divided),
        false => (mappings, Vec::new()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_pages_are_refused() {
        assert_eq!(refusal_of(SECTOR), None);
        assert!(refusal_of(65_536).is_some_and(|why| why.contains("65536 bytes")));
    }
}
