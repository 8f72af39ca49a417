//! Streams the weights of a session from disk: before each run they are read, after it they are evicted.
//!
//! ONNX Runtime maps external weights from their file and never writes to them, so once a session exists, the pages behind those
//! addresses can be replaced ([`mapping`]): by anonymous memory that direct reads fill before a run ([`reader`]) and that is evicted
//! after it. Part of each session's weights stays locked. Where kernels want another layout, the session is created from a file that
//! has it already ([`prepared`]), because memory in which ONNX Runtime packs weights itself is not mapped from a file. Regions of
//! weights that can be stored in fewer bytes are read compressed and decompressed in memory ([`compressed`]): of a prepared file, or of the
//! model's own ([`copies`]).

mod align;
mod chunks;
mod compressed;
mod copies;
mod direct;
mod disk_rate;
mod expert_pages;
mod experts;
mod huge_pages;
mod mapping;
mod open_files;
mod page_pool;
mod page_region;
mod prepared;
mod reader;
mod stream;
mod usage_probe;

pub use compressed::rate::decompression_rate;
pub(crate) use copies::find_or_copy;
pub(super) use direct::{DirectFile, DirectReads};
pub use disk_rate::read_rate;
pub(crate) use experts::ExpertTensors;
pub(crate) use mapping::{Mapping, claim, claim_locked, claim_unread, forget, mapped_under};
pub(crate) use prepared::{MODEL, UNALIGNED, WEIGHTS, find_or_make};

use super::file::SECTOR;
use crate::os;
use compressed::Compressed;
use expert_pages::ExpertPages;
use hpp_engine::port::{ChunkSize, Interval, WeightResidency};
use hpp_engine::{BackendError, Reporter};
use open_files::OpenFiles;
use page_pool::PagePool;
use reader::Reader;
use std::cell::OnceCell;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use stream::{MappedWeights, StreamedWeights, StreamingIo, expert_ranges};
use tracing::{debug, info};
use usage_probe::UsageProbe;

/// Why weights cannot be streamed from disk on this system, if so. Mappings are replaced in steps of [`SECTOR`] bytes, and some kernels for
/// aarch64 have larger pages.
pub(crate) fn refusal() -> Option<String> {
    // SAFETY: the call takes no pointer.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    refusal_of(u64::try_from(page).unwrap_or(SECTOR))
}

fn refusal_of(page: u64) -> Option<String> {
    (page > SECTOR)
        .then(|| format!("the pages of this system have {page} bytes, and streaming from disk needs {SECTOR}"))
}

/// The reader, pools of pages and open files that all streamed sessions of a backend share. The reader starts with the first session.
#[derive(Clone, Default)]
pub(crate) struct DiskReaders {
    reader: Rc<OnceCell<Rc<Reader>>>,
    pool: Rc<PagePool>,
    expert_pages: Rc<ExpertPages>,
    files: Arc<OpenFiles>,
    /// Set once the user was warned that the system does not lock memory.
    unlocked: Rc<OnceCell<()>>,
}

/// The weights of one session. Must be dropped before the session.
pub(crate) enum SessionWeights {
    /// Where ONNX Runtime put them: in memory, or mapped by the system.
    InMemory,
    /// Will be streamed; mapped from their file until [`lock_and_stream`](Self::lock_and_stream).
    Pending(PendingWeights),
    /// Partly locked; the rest is read before each run.
    Streamed(StreamedWeights),
    /// Mapped from their file; a run faults pages in.
    Mapped(MappedWeights),
}

/// Weights that will be streamed.
pub(crate) struct PendingWeights {
    probe: UsageProbe,
    compressed: Compressed,
    experts: ExpertTensors,
    readers: DiskReaders,
    partition: String,
}

/// The mappings of a session's weights and what to do with them. Default: weights in memory.
#[derive(Default)]
pub(crate) struct SessionMappings {
    /// Where the weights are between runs.
    pub residency: WeightResidency,
    /// The session's own mappings of files under `dir` ([`claim`]).
    pub mappings: Vec<Mapping>,
    pub dir: PathBuf,
    /// Whether the files have the layout that kernels want.
    pub prepared: bool,
    /// Where regions of the files are stored compressed; `None` if none are.
    pub compressed: Option<PathBuf>,
    /// The weights of experts: a run needs only the slices of the experts that it uses.
    pub experts: ExpertTensors,
}

impl DiskReaders {
    /// Takes over the weights of a session.
    ///
    /// # Safety
    /// `weights.mappings` must be the session's alone, as [`claim`] returns them. The session must live longer than what is
    /// returned and must run only after [`SessionWeights::check`].
    pub unsafe fn take_over(
        &self,
        weights: SessionMappings,
        partition: &str,
        reporter: &dyn Reporter,
    ) -> Result<SessionWeights, BackendError> {
        let SessionMappings { residency, mappings, dir, prepared, compressed, experts } = weights;
        if matches!(residency, WeightResidency::InMemory | WeightResidency::Mapped { sparse_rows: false }) {
            return Ok(SessionWeights::InMemory);
        }
        if residency != WeightResidency::ReadFromDisk {
            return Ok(SessionWeights::Mapped(MappedWeights::new(mappings)));
        }
        if mappings.is_empty() {
            reporter.warning(&format!(
                "the weights of {partition} stay in memory: they are inside its file, so there is nothing to read them from"
            ));
            return Ok(SessionWeights::InMemory);
        }
        // Creating a session leaves about 1 MiB of freed memory in the heap, which weights can use.
        os::trim_heap();
        let probe = UsageProbe::new(mappings, &dir, prepared);
        let compressed = compressed.map(|stored| Compressed::open(&stored, &dir)).transpose();
        let compressed = compressed.map_err(reading(partition))?.unwrap_or_default();
        self.reader().and_then(|reader| reader.prepare()).map_err(reading(partition))?;
        Ok(SessionWeights::Pending(PendingWeights {
            probe,
            compressed,
            experts,
            readers: self.clone(),
            partition: partition.to_owned(),
        }))
    }

    fn reader(&self) -> io::Result<Rc<Reader>> {
        if let Some(reader) = self.reader.get() {
            return Ok(Rc::clone(reader));
        }
        let reader = Rc::new(Reader::start()?);
        Ok(Rc::clone(self.reader.get_or_init(|| reader)))
    }
}

impl PendingWeights {
    fn lock_and_stream(self, locked: u64) -> Result<(StreamedWeights, Option<String>), BackendError> {
        let PendingWeights { probe, compressed, experts, readers, partition } = self;
        let failed = reading(&partition);
        let io = StreamingIo {
            reader: readers.reader().map_err(&failed)?,
            pool: Rc::clone(&readers.pool),
            expert_pages: Rc::clone(&readers.expert_pages),
            files: Arc::clone(&readers.files),
        };
        let (mappings, experts) = divide_experts(&experts, probe.used(), &readers.expert_pages);
        // SAFETY: the mappings are this session's alone, which lives longer and runs only after `SessionWeights::check` (the promises made
        // to `DiskReaders::take_over`); ONNX Runtime maps external weights privately and only reads them; no run is in progress, since a run
        // borrows the session's weights (`SessionCore`).
        let weights = unsafe { StreamedWeights::take_over(io, mappings, experts, compressed, locked) };
        let mut weights = weights.map_err(&failed)?;
        let sum = |size: fn(&ChunkSize) -> u64| weights.bytes().iter().map(size).sum::<u64>();
        let (resident, stored) = (sum(|chunk| chunk.resident), sum(|chunk| chunk.stored));
        info!(partition, locked, chunks = weights.bytes().len(), resident, stored, "weights streamed from disk");
        for (number, ChunkSize { resident, stored }) in weights.bytes().iter().enumerate() {
            debug!(partition, number, resident, stored, "chunk");
        }
        let unlocked = weights.take_unlocked().filter(|_| readers.unlocked.set(()).is_ok());
        let warning = |error: io::Error| {
            format!(
                "the system does not lock weights in memory ({error}); they may be swapped out. Raise the limit on locked memory \
                 (ulimit -l, RLIMIT_MEMLOCK, LimitMEMLOCK= of a service)"
            )
        };
        Ok((weights, unlocked.map(warning)))
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

impl SessionWeights {
    /// Whether the weights need no management: no run needs a fetch or a release.
    pub fn is_unmanaged(&self) -> bool {
        matches!(self, SessionWeights::InMemory)
    }

    /// Whether warm-up runs would show which weights runs read.
    pub fn wants_warm_up(&self) -> bool {
        matches!(self, SessionWeights::Pending(pending) if pending.probe.is_wanted())
    }

    /// Called after a run: if the weights are still mapped from their files, as during warm-up, records which pages the run touched, and
    /// drops them.
    pub fn sample_resident(&mut self) {
        if let SessionWeights::Pending(pending) = self {
            pending.probe.sample();
        }
    }

    /// Reads and locks up to `locked` bytes, and drops the rest. Returns a warning for the user, if there is one. May be called again with
    /// another number, to lock more or less.
    pub fn lock_and_stream(&mut self, locked: u64) -> Result<Option<String>, BackendError> {
        match std::mem::replace(self, SessionWeights::InMemory) {
            SessionWeights::Pending(pending) => {
                let (weights, warning) = pending.lock_and_stream(locked)?;
                *self = SessionWeights::Streamed(weights);
                Ok(warning)
            }
            SessionWeights::Streamed(mut weights) => {
                let relocked = weights.relock(locked);
                *self = SessionWeights::Streamed(weights);
                relocked.map_err(|error| BackendError::Runtime {
                    doing: "lock another part of the weights".into(),
                    cause: error.to_string(),
                })?;
                Ok(None)
            }
            other => {
                *self = other;
                Ok(None)
            }
        }
    }

    /// The weights that are read before each run, if there are any.
    fn streamed(&mut self) -> Option<&mut StreamedWeights> {
        match self {
            SessionWeights::Streamed(weights) => Some(weights),
            SessionWeights::InMemory | SessionWeights::Pending(_) | SessionWeights::Mapped(_) => None,
        }
    }

    /// The chunks that are read before each run.
    pub fn chunks(&mut self) -> Vec<ChunkSize> {
        self.streamed().map_or(Vec::new(), |weights| weights.bytes().to_vec())
    }

    /// The chunks of each expert, if runs select some.
    pub fn experts(&mut self) -> Vec<Range<usize>> {
        self.streamed().map_or(Vec::new(), |weights| weights.experts().to_vec())
    }

    /// Which experts the next run uses.
    pub fn select_experts(&mut self, experts: &[u32]) {
        if let Some(weights) = self.streamed() {
            weights.select_experts(experts);
        }
    }

    /// Evicts a chunk of an expert.
    pub fn evict(&mut self, chunk: usize) {
        if let Some(weights) = self.streamed() {
            weights.evict(chunk);
        }
    }

    /// Starts to read a chunk.
    pub fn prefetch(&mut self, chunk: usize) -> Result<(), BackendError> {
        self.streamed().map_or(Ok(()), |weights| weights.prefetch(chunk))
    }

    /// Waits for a chunk.
    pub fn wait(&mut self, chunk: usize, now: impl Fn() -> Duration) -> Result<Interval, BackendError> {
        self.streamed().map_or(Ok(Interval::default()), |weights| weights.wait(chunk, now))
    }

    /// Evicts what the last run used, without experts.
    pub fn release(&mut self) {
        match self {
            SessionWeights::Streamed(weights) => weights.release(),
            SessionWeights::Mapped(pages) => pages.release(),
            SessionWeights::Pending(_) | SessionWeights::InMemory => {}
        }
    }

    /// Refuses a run while a chunk is absent.
    pub fn check(&self) -> Result<(), BackendError> {
        match self {
            SessionWeights::Streamed(weights) => weights.check(),
            SessionWeights::InMemory | SessionWeights::Pending(_) | SessionWeights::Mapped(_) => Ok(()),
        }
    }
}

fn reading(partition: &str) -> impl Fn(io::Error) -> BackendError {
    move |error| BackendError::Runtime { doing: format!("read the weights of {partition}"), cause: error.to_string() }
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
