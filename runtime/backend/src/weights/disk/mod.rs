//! Streams the weights of a session from disk: before each run they are read, after it they are evicted.
//!
//! ONNX Runtime maps external weights from their file ([`mapping`], [`views`]). There are two ways to stream them: direct reads into memory
//! that replaces the mapping ([`direct`], Linux), and reading the mapped pages ahead through the system's file cache ([`paged`]). Part of
//! each session's weights stays locked. Where kernels want another layout, the session is created from a file that has it already
//! ([`prepared`]), because memory in which ONNX Runtime packs weights itself is not mapped from a file.

mod align;
#[cfg_attr(not(target_os = "linux"), path = "non_linux.rs")]
mod direct;
mod experts;
mod mapped_page_reader;
mod mapping;
mod paged;
mod prepared;
mod streamed;
mod usage_probe;
mod views;

pub(crate) use direct::find_or_copy;
pub(super) use direct::{DirectFile, DirectReads};
pub use direct::{decompression_rate, read_rate};
pub(crate) use experts::ExpertTensors;
pub(crate) use mapping::{Mapping, claim, claim_locked, claim_unread, drop_page_cache};
pub(crate) use prepared::{MODEL, Sealed, UNALIGNED, WEIGHTS, find_or_make};
pub(crate) use views::{list as mapped_under, locate};

use crate::os;
use direct::PendingDirect;
use hpp_engine::port::{ChunkSize, Interval, WeightResidency};
use hpp_engine::{BackendError, Reporter};
use mapped_page_reader::MappedPageReader;
use paged::PagedWeights;
use std::cell::OnceCell;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use streamed::{ManagedWeights, ReadBeforeRuns, interval};
use tracing::{debug, info};
use usage_probe::UsageProbe;

/// The environment variable that says how weights are read: `direct`, or `mapped` for reads through the file cache where direct ones are
/// possible, too.
const READS: &str = "HPP_READS";

/// Why weights cannot be streamed from disk on this system, if so.
pub(crate) fn refusal() -> Option<String> {
    let why =
        "this system does not tell where ONNX Runtime has mapped them, and decides itself which of them stay in memory";
    (!views::CAN_LIST).then(|| why.to_owned())
}

/// Whether weights are read past the file cache, and may be stored compressed; if not, their mapped pages are read ahead.
pub(crate) fn reads_directly() -> bool {
    direct::refusal().is_none() && std::env::var_os(READS).is_none_or(|value| value != "mapped")
}

/// The warning that [`READS`] has a value that means nothing.
fn unknown_reads(value: Option<&str>) -> Option<String> {
    let value = value.filter(|value| !["", "direct", "mapped"].contains(value))?;
    Some(format!("{READS}={value} is neither direct nor mapped and changes nothing"))
}

/// Whether weights of a residency stay mapped from their files, so that kernels would see changes of these.
pub(crate) fn stays_mapped(residency: WeightResidency) -> bool {
    match residency {
        WeightResidency::Mapped { .. } => true,
        WeightResidency::ReadFromDisk => !reads_directly(),
        WeightResidency::InMemory => false,
    }
}

/// What all streamed sessions of a backend share. Threads start with the first session.
#[derive(Clone, Default)]
pub(crate) struct DiskReaders {
    direct: direct::Readers,
    mapped_page_reader: Rc<OnceCell<Rc<MappedPageReader>>>,
    /// Set once the user was warned that the system does not lock memory.
    lock_warning_given: Rc<OnceCell<()>>,
    /// Set once [`READS`] was checked.
    checked: Rc<OnceCell<()>>,
}

/// The weights of one session. Must be dropped before the session.
pub(crate) enum SessionWeights {
    /// Where ONNX Runtime put them: in memory, or mapped by the system.
    InMemory,
    /// Will be streamed; mapped from their file until [`lock_and_stream`](Self::lock_and_stream).
    Pending(Box<PendingWeights>),
    /// Partly locked; the rest is read before each run.
    Streamed(Box<dyn ReadBeforeRuns>),
    /// Mapped from their file; a run faults pages in.
    Mapped(MappedWeights),
}

/// Weights that will be streamed.
pub(crate) struct PendingWeights {
    probe: UsageProbe,
    experts: ExpertTensors,
    method: ReadMethod,
    partition: String,
    sealed: Option<Sealed>,
    /// Set once the user was warned that the system does not lock memory.
    lock_warning_given: Rc<OnceCell<()>>,
}

/// How weights are read.
enum ReadMethod {
    Direct(PendingDirect),
    Paged(Rc<MappedPageReader>),
}

/// The mappings of a session's weights and what to do with them. Default: weights in memory.
#[derive(Default)]
pub(crate) struct SessionMappings {
    /// Where the weights are between runs.
    pub residency: WeightResidency,
    /// The session's own mappings of files under `dir` ([`claim`]).
    pub mappings: Vec<Mapping>,
    pub dir: PathBuf,
    /// The files, if they are prepared: in the layout that kernels want.
    pub sealed: Option<Sealed>,
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
        let SessionMappings { residency, mappings, dir, sealed, compressed, experts } = weights;
        let unchanged = |sealed: &Sealed| sealed.check().map_err(reading(partition));
        sealed.as_ref().map_or(Ok(()), unchanged)?;
        if matches!(residency, WeightResidency::InMemory | WeightResidency::Mapped { sparse_rows: false }) {
            return Ok(SessionWeights::InMemory);
        }
        if residency != WeightResidency::ReadFromDisk {
            return Ok(SessionWeights::Mapped(MappedWeights::new(mappings)));
        }
        if mappings.is_empty() {
            reporter.warning(&format!(
                "the weights of {partition} stay in memory: they are inside its file, so there is nothing to read them from{}",
                if cfg!(target_os = "linux") { "" } else { " (or the system did not tell where they are mapped)" }
            ));
            return Ok(SessionWeights::InMemory);
        }
        let unknown = unknown_reads(std::env::var_os(READS).as_deref().and_then(|value| value.to_str()));
        if let Some(warning) = unknown.filter(|_| self.checked.set(()).is_ok()) {
            reporter.warning(&warning);
        }
        // Creating a session leaves about 1 MiB of freed memory in the heap, which weights can use.
        os::trim_heap();
        let probe = UsageProbe::new(mappings, &dir, sealed.is_some());
        let method = self.read_method(compressed, &dir).map_err(reading(partition))?;
        let (partition, lock_warning_given) = (partition.to_owned(), Rc::clone(&self.lock_warning_given));
        let pending = PendingWeights { probe, experts, method, partition, sealed, lock_warning_given };
        Ok(SessionWeights::Pending(Box::new(pending)))
    }

    fn read_method(&self, compressed: Option<PathBuf>, dir: &Path) -> io::Result<ReadMethod> {
        if reads_directly() {
            return self.direct.prepare(compressed, dir).map(ReadMethod::Direct);
        }
        info!(why = direct::refusal(), "weights are read through the file cache");
        if let Some(mapped_page_reader) = self.mapped_page_reader.get() {
            return Ok(ReadMethod::Paged(Rc::clone(mapped_page_reader)));
        }
        let mapped_page_reader = Rc::new(MappedPageReader::start()?);
        Ok(ReadMethod::Paged(Rc::clone(self.mapped_page_reader.get_or_init(|| mapped_page_reader))))
    }
}

impl PendingWeights {
    fn lock_and_stream(self, locked: u64) -> Result<(Box<dyn ReadBeforeRuns>, Option<String>), BackendError> {
        let PendingWeights { probe, experts, method, partition, sealed, lock_warning_given } = self;
        // SAFETY: the mappings are this session's alone, which lives longer and runs only after `SessionWeights::check` (the promises made
        // to `DiskReaders::take_over`); ONNX Runtime maps external weights privately and only reads them; no run is in progress, since a run
        // borrows the session's weights (`SessionCore`).
        let taken = unsafe {
            match method {
                ReadMethod::Direct(to_read) => to_read.take_over(probe.used(), &experts, locked),
                ReadMethod::Paged(mapped_page_reader) => {
                    PagedWeights::take_over(mapped_page_reader, probe.used(), &experts, locked)
                }
            }
        };
        let ManagedWeights { weights, lock_error } = taken.map_err(reading(&partition))?;
        // From here on reads find changes, because the files are open.
        sealed.map_or(Ok(()), |sealed| sealed.check()).map_err(reading(&partition))?;
        let sum = |size: fn(&ChunkSize) -> u64| weights.bytes().iter().map(size).sum::<u64>();
        let (resident, stored) = (sum(|chunk| chunk.resident), sum(|chunk| chunk.stored));
        info!(partition, locked, chunks = weights.bytes().len(), resident, stored, "weights streamed from disk");
        for (number, ChunkSize { resident, stored }) in weights.bytes().iter().enumerate() {
            debug!(partition, number, resident, stored, "chunk");
        }
        let lock_error = lock_error.filter(|_| lock_warning_given.set(()).is_ok());
        let advice = match cfg!(unix) {
            true => ". Raise the limit on locked memory (ulimit -l, RLIMIT_MEMLOCK, LimitMEMLOCK= of a service)",
            false => "",
        };
        let warning = |error: io::Error| {
            format!("the system does not lock weights in memory ({error}); they may be swapped out{advice}")
        };
        Ok((weights, lock_error.map(warning)))
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
    pub fn record_touched_pages(&mut self) {
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
    fn streamed(&mut self) -> Option<&mut dyn ReadBeforeRuns> {
        match self {
            SessionWeights::Streamed(weights) => Some(weights.as_mut()),
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
        self.streamed().map_or(Ok(Interval::default()), |weights| Ok(interval(weights.wait(chunk)?, now)))
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

/// Weights that stay mapped from their file: a run faults pages in, and they are dropped after it.
pub(crate) struct MappedWeights(Vec<Mapping>);

impl MappedWeights {
    /// Takes the mappings that ONNX Runtime made for a session, and disables readahead for them.
    pub fn new(mappings: Vec<Mapping>) -> Self {
        mappings.iter().for_each(Mapping::advise_random);
        MappedWeights(mappings)
    }

    /// Drops the pages that a run has touched.
    pub fn release(&self) {
        for mapping in &self.0 {
            // SAFETY: the mappings are this session's alone (`DiskReaders::take_over`), which is alive; they are still backed by the file, so
            // dropped pages are read again when needed.
            unsafe { mapping.free_pages() };
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
    fn unknown_ways_to_read_are_warned_of() {
        assert_eq!(unknown_reads(None), None);
        assert_eq!(["", "direct", "mapped"].map(|value| unknown_reads(Some(value))), [None, None, None]);
        assert!(unknown_reads(Some("mmap")).is_some_and(|warning| warning.contains("HPP_READS=mmap")));
    }
}
